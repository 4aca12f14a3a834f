"""Register tokens: n learned embeddings before the sequence, to which every token may attend (Darcet et al. 2023).

They start at the mean of the vocabulary, which in a trained model is similar to a token. In a model with random weights
the mean is much smaller; there `deviation=0.02` starts them at N(0, .02²), as WSE does.

They are placed directly before each sequence's first token, after any padding on the left, so that a padded batch gives
the same results as single sequences. Inputs and outputs keep the length of the text: masks and positions are widened
for the forward pass and logits are cut after it. In a causal model the first token is not a target, because nothing
predicts it in the plain model. Hidden states and attentions, if requested, include the registers.
"""

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError, counted
from sinkscope.models.family import Family, embedding_weight, text_arguments
from sinkscope.models.projections import known_positions
from sinkscope.retrofits.retrofit import RETROFIT, Part, Retrofit
from sinkscope.text.batch import IGNORED, insert_before

CHUNK = 4096  # rows of the vocabulary that are averaged at once


class Registers(Part):
    """The parameter `embeddings` (n,E), in the space of the token embeddings; they start at a buffer."""

    def __init__(self, model: PreTrainedModel, count: int, limit: int | None, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        weight = embedding_weight(model)
        self.count = count
        self.limit = limit  # number of positions for which the model has a vector
        self.embeddings = nn.Parameter(weight.new_empty(count, weight.shape[1]))
        self.register_buffer("first_embeddings", weight.new_empty(count, weight.shape[1]))

    def around(
        self, forward: Callable[..., Any], embed: Callable[[torch.Tensor], torch.Tensor], inputs: dict[str, Any]
    ) -> Any:
        """Call the model's own `forward` on the text with the registers before it; `inputs` are keyword arguments.

        An input that cannot be widened by registers, or a text that is too long, raises InputError.
        """
        mask, cache = inputs.get("attention_mask"), inputs.get("past_key_values")
        if getattr(cache, "is_compileable", False):
            raise InputError("register tokens need a dynamic cache: a static one has no room for them")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            raise InputError("register tokens need an attention_mask of two dimensions (sequences, tokens)")
        for name in ("pixel_values", "token_type_ids", "mm_token_type_ids"):
            if inputs.get(name) is not None:
                raise InputError(f"register tokens support only text: {name} is not widened")
        keep = inputs.get("logits_to_keep")
        if isinstance(keep, torch.Tensor):
            if keep.dtype == torch.bool:
                raise InputError("with register tokens logits_to_keep must be positions or the number of last tokens")
            inputs["logits_to_keep"] = torch.where(keep < 0, keep, keep + self.count)
        return_dict = inputs.pop("return_dict", None)
        embeds = inputs.pop("inputs_embeds", None)
        ids = inputs.pop("input_ids", None)
        embeds = embed(ids) if embeds is None else embeds
        length = embeds.shape[1]
        start = None if mask is None else mask.int().argmax(dim=1)
        if mask is not None:
            inputs["attention_mask"] = insert_before(mask, mask.new_ones(self.count), start)
        positions = inputs.get("position_ids")
        if positions is not None:
            positions = inputs["position_ids"] = positions + self.count
        if cache is None or not int(cache.get_seq_length()):  # otherwise the cache has the registers already
            if self.limit is not None and self.count + length > self.limit:
                raise InputError(
                    f"{length} tokens and {counted(self.count, 'register')} are beyond the model's "
                    f"{self.limit} positions"
                )
            if positions is not None:
                before = torch.arange(self.count, device=positions.device)
                inputs["position_ids"] = insert_before(positions.expand(len(embeds), -1), before, start)
            if (labels := inputs.get("labels")) is not None:
                if self.causal:
                    rows = torch.arange(len(labels), device=labels.device)
                    labels = labels.clone()
                    labels[rows, torch.zeros_like(rows) if start is None else start.to(rows.device)] = IGNORED
                inputs["labels"] = insert_before(labels, labels.new_full((self.count,), IGNORED), start)
            embeds = insert_before(embeds, self.embeddings.to(embeds.dtype), start)
        output = forward(inputs_embeds=embeds, return_dict=True, **inputs)
        output.logits = output.logits[:, -length:]
        return output.to_tuple() if return_dict is False else output


class RegisterTokens(Retrofit):
    name = "register-tokens"
    about = (
        "learned embeddings before the sequence (count: 4), at first the vocabulary's mean (deviation of another start)"
    )
    paper = "VGA §1, Darcet 2023"

    count: int = Field(default=4, ge=1, le=10_000)
    deviation: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # for a start at N(0, deviation²), as in WSE

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        if family.prefix:
            return "it is a prefix LM, and its prefix would be the registers"
        arguments = text_arguments(model)
        return f"{', '.join(arguments)} would also need values for them" if arguments else None

    def install(self, model: PreTrainedModel, family: Family) -> None:
        part = Registers(model, self.count, known_positions(model, family), family.causal)
        first = part.get_buffer("first_embeddings")
        start = torch.randn_like(first) * self.deviation if self.deviation else mean_embedding(model)
        with torch.no_grad():
            first.copy_(start.expand(self.count, -1))
        part.reset()
        model.add_module(RETROFIT, part)


@torch.no_grad()
def mean_embedding(model: PreTrainedModel) -> torch.Tensor:
    """Return the embedding module's output averaged over the vocabulary, (E,)."""
    embedding: Any = model.get_input_embeddings()
    ids = torch.arange(embedding.weight.shape[0], device=embedding.weight.device)
    return torch.stack([embedding(part).double().sum(0) for part in ids.split(CHUNK)]).sum(0) / len(ids)
