"""Weights of any family in one form: query, key and value projections of an attention layer, and learned positions.

Projections may be separate modules or one, with weights stored as (out, in), or as (in, out) in GPT-2, and with fewer
key/value heads than query heads: each is represented as outputs of a module, head by head.

NU is "Attention Sink Mechanisms Are Not Universal".
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinkscope.errors import InputError
from sinkscope.models.edits import check_own_map
from sinkscope.models.family import Family, Role
from sinkscope.models.in_memory import weight_in_memory
from sinkscope.models.packed import check_ordinary

# Massive coordinates (NU appendix C): the number of largest entries among which the gap is searched
FIRST_PLACES = 16
GAP = 2.0  # least ratio of the last massive entry to the next entry
OUTLYING = 10.0  # least ratio of a massive entry to the median

ROLES: tuple[Role, ...] = ("query", "key", "value")
LINEAR_LAYERS = (nn.Linear, Conv1D)  # Conv1D is GPT-2's linear layer, with its weight stored as (in, out)
NO_LAYER = -1  # for a module outside the model's layers


@dataclass(frozen=True)
class Projection:
    """One of a layer's three projections. `weight` and `bias` raise InputError unless it is a Linear or a Conv1D."""

    module: Any  # a Linear, a Conv1D or a replacement (an adapter's layer, quantized weights); may hold all three
    places: torch.Tensor  # (heads, d), the indices of the module's outputs that belong to each head
    path: str  # the module's path within the attention module

    @property
    def heads(self) -> int:
        return self.places.shape[0]

    @property
    def width(self) -> int:
        """The width D of the input."""
        return int(self.module.nx if isinstance(self.module, Conv1D) else self.module.in_features)

    @property
    def is_whole(self) -> bool:
        """Whether the module's outputs are exactly this projection's, in order."""
        return bool(torch.equal(self.places.flatten(), torch.arange(_outputs(self.module), device="cpu")))

    @property
    def weight(self) -> torch.Tensor:
        """The weight W (heads, d, D) of k = W x."""
        check_plain(self.module)
        return self._oriented(self.module.weight)[self.places]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias (heads, d); None if the module has none."""
        check_plain(self.module)
        return None if self.module.bias is None else self.module.bias[self.places]

    def with_part(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of the module's weight or bias in its own layout, with the values (heads, d, …) put into it."""
        edited = getattr(self.module, name).detach().clone()
        self._oriented(edited)[self.places] = values.to(edited.dtype)
        return edited

    def _oriented(self, x: torch.Tensor) -> torch.Tensor:
        return x.T if isinstance(self.module, Conv1D) and x.dim() == 2 else x


def check_plain(module: Any) -> None:
    """Raise InputError unless a module's output depends only on its `weight` and `bias`, which are not quantized."""
    check_ordinary(module)
    if not isinstance(module, LINEAR_LAYERS):  # an adapter's layer has more weights than `weight`
        package, kind = type(module).__module__.partition(".")[0], type(module).__name__
        raise InputError(f"it projects by {package}'s {kind}, not by one matrix: merge its adapter first")
    check_own_map(module)


def projections(model: PreTrainedModel, family: Family, layer: int) -> dict[Role, Projection]:
    """Return the query, key and value projections of a layer, or only those that were found."""
    if not family.qkv and not family.projections.get(layer):
        raise InputError(f"'{family.name}' keeps q, k and v together in a way that is not known: its row needs `qkv`")
    attention, named = family.attentions(model)[layer], _named(model, family, layer) if family.qkv else {}
    if layer not in family.projections:
        return named
    return {role: projection for role, projection in named.items() if role != "value"} | {
        role: Projection(attention.get_submodule(outputs.module), torch.tensor(outputs.places), outputs.module)
        for role, outputs in family.projections[layer].items()
    }


def lacking_projection(family: Family, layers: Iterable[int], role: Role) -> str | None:
    """Return why a projection of these layers cannot be edited; None if it can."""
    if not family.projections:
        return None if family.qkv else "how it keeps q, k and v together is not known: its row needs `qkv`"
    if (family.qkv and role != "value") or all(role in family.projections.get(layer, {}) for layer in layers):
        return None
    return f"its {role} states are not the outputs of one projection (a norm, a convolution or a latent is between)"


def _named(model: PreTrainedModel, family: Family, layer: int) -> dict[Role, Projection]:
    config: Any = model.config.get_text_config()
    attention = family.attentions(model)[layer]
    try:
        modules = [attention.get_submodule(name) for name in family.qkv]
    except AttributeError:
        kind = type(attention)
        raise InputError(
            f"layer {layer} attends by {kind.__module__}.{kind.__qualname__}, which has no {' and '.join(family.qkv)}"
        ) from None
    places = head_places(family, config, [_outputs(module) for module in modules])
    return {role: Projection(modules[number], rows, family.qkv[number]) for role, (number, rows) in places.items()}


def head_places(family: Family, config: Any, outputs: Sequence[int]) -> dict[Role, tuple[int, torch.Tensor]]:
    """Return where q, k and v are in modules with these numbers of outputs: the module's number, and places (heads,d).

    The modules are those of `family.qkv`, three or one, and `config` is that of the text model.
    """
    heads = config.num_attention_heads
    if not family.fused:
        width = outputs[0] // heads
        every = enumerate(torch.arange(count).view(-1, width) for count in outputs)
        return dict(zip(ROLES, every, strict=True))
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = (outputs[0] // width - heads) // 2
    places = torch.arange(outputs[0]).view(-1, width)
    rows = torch.arange(heads + 2 * key_heads)
    if family.fused == "blocks":  # all query heads, then all key heads, then all value heads
        by_role = rows.split([heads, key_heads, key_heads])
    else:  # "groups": a key head's query heads, the key head, its value head; then the same for the next key head
        grouped = rows.view(key_heads, -1)
        by_role = (grouped[:, :-2].flatten(), grouped[:, -2], grouped[:, -1])
    return {role: (0, places[rows]) for role, rows in zip(ROLES, by_role, strict=True)}


def _outputs(module: Any) -> int:
    count = module.nf if isinstance(module, Conv1D) else getattr(module, "out_features", None)
    if not isinstance(count, int):
        raise InputError(f"it projects by a {type(module).__name__}, which does not say how many outputs it has")
    return count


# --- linear layers


def linear_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield all linear modules except the LM head, which computes logits or shares its weight with the embeddings."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in model.named_modules():
        is_head = module is head or getattr(module, "weight", None) is getattr(embedding, "weight", embedding)
        if isinstance(module, LINEAR_LAYERS) and not is_head:
            yield path, module


def by_output(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Transpose a module's weight, if needed, so that it has a row for each output channel (embedding: each token)."""
    return weight.T if isinstance(module, Conv1D) else weight


def layer_and_kind(path: str, family: Family) -> tuple[int, str]:
    """Return the layer of a path, and the path within it."""
    if not (match := re.fullmatch(rf"{re.escape(family.layers)}\.(\d+)\.(.+)", path)):
        return NO_LAYER, path
    return int(match[1]), re.sub(r"(?<=\.)\d+(?=\.|$)", "*", match[2])


# --- learned positions


def known_positions(model: PreTrainedModel, family: Family) -> int | None:
    """Return the number of positions that have a learned vector; None if positions are not learned."""
    return len(position_vectors(model, family)) if family.position_embedding else None


def position_vectors(model: PreTrainedModel, family: Family) -> torch.Tensor:
    """Return the learned absolute positions p_0, p_1, …, (positions, D)."""
    return weight_in_memory(model.get_submodule(family.position_embedding))[family.position_offset :]


def without_effective_positions(model: PreTrainedModel, family: Family) -> str | None:
    """Return why the first layer's feed-forward network cannot read positions alone; None if it can."""
    for name in family.mlp:
        # the class's forward, because nnsight and accelerate replace that of the module
        forward = type(family.layer_modules(model)[0].get_submodule(name)).forward
        _, *needed = (x for x in inspect.signature(forward).parameters.values() if x.default is x.empty)
        if sum(x.kind == x.POSITIONAL_OR_KEYWORD for x in needed) > 1:
            return f"its feed-forward network ('{name}') reads more than one tensor"
    return None


@torch.no_grad()
def effective_positions(model: PreTrainedModel, family: Family, count: int) -> torch.Tensor:
    """Return effective positional encodings MLP⁽¹⁾(p_i) + p_i, (count, D), with the first layer's MLP (NU §3.2.1)."""
    vectors = hidden = position_vectors(model, family)[:count]
    if len(vectors) < count:
        raise InputError(f"the model has {len(vectors)} positions, and {count} were requested")
    for name in family.mlp:
        hidden = family.layer_modules(model)[0].get_submodule(name)(hidden)
    return vectors + hidden


def massive_coordinates(vector: torch.Tensor) -> list[int]:
    """Return the coordinates of entries that a gap separates from the rest, ascending; [] without a gap.

    NU appendix C: sort |entries| in descending order; the gap is the largest ratio of an entry to the next among the
    first FIRST_PLACES. The entries before it are massive if the gap is at least GAP and the smallest of them is at
    least OUTLYING times the median.
    """
    magnitude, coordinates = vector.double().abs().sort(descending=True, stable=True)
    ratios = magnitude[:-1][:FIRST_PLACES] / magnitude[1:][:FIRST_PLACES]
    ratios = ratios.nan_to_num(nan=1.0)  # 0 ÷ 0
    last = int(ratios.argmax())
    if ratios[last] < GAP or magnitude[last] < OUTLYING * magnitude.median():
        return []
    return sorted(coordinates[: last + 1].tolist())
