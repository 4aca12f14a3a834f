"""Finds the layers whose attention cannot be read: of models that are not known by name, or attend by a user's code."""

from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.seam import open_seam, why_unread
from sinkscope.models.edits import edited_input, unknown_code
from sinkscope.models.family import Family, embedding_weight, input_device, number_of_positions
from sinkscope.models.in_memory import unchanged_after
from sinkscope.models.quantized import is_quantized
from sinkscope.models.wiring import record_ends

TOKENS = 24
ROUNDED = 5e-2  # largest difference where activations are rounded to 8 bits


@torch.no_grad()
def unread_attentions(model: PreTrainedModel, family: Family) -> dict[int, str]:
    """Return layer → why its attention cannot be read, after a run with the seams on a few tokens.

    The layers get the same inputs as without the seams, so that their attention has to give the same outputs.
    """
    length = min(TOKENS, number_of_positions(model, family) or TOKENS)
    ids = torch.arange(3, 3 + length, device=input_device(model))[None] % len(embedding_weight(model))
    inputs = {"input_ids": ids, "use_cache": False}
    layers, attentions = family.layer_modules(model), family.attentions(model)
    with unchanged_after(model):
        bare = record_ends(model, [*layers, *attentions.values()], inputs)
    seen: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in attentions}

    def keep(layer: int, name: str, tap: nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen[layer][name] = output

    def as_bare(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return bare[module][0].x.to(x.device)

    with open_seam(model, family) as seams, ExitStack() as hooks:
        for layer, seam in seams.items():
            hooks.enter_context(edited_input(layers[layer], as_bare))
            for name in seam.order[:-1]:
                hooks.enter_context(getattr(seam, name).register_forward_hook(partial(keep, layer, name)))
        seamed = record_ends(model, attentions.values(), inputs)
        reasons = {layer: why_unread(seam, seen[layer], ids.shape) for layer, seam in seams.items()}
    for layer, attention in attentions.items():
        if reasons[layer] is None:
            ours, theirs = (ends[attention][-1].x for ends in (seamed, bare))
            difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
            exact = max(torch.finfo(theirs.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
            if difference > max(exact, ROUNDED if is_quantized(model) else 0.0):
                by = unknown_code([attention]) or type(attention).__name__
                why = f"it attends by {by}, which is not one softmax of q·k: it differs by {difference:.1e} of its norm"
                return dict.fromkeys(attentions, why)  # the layers of a model have one attention function
    return {layer: reason for layer, reason in reasons.items() if reason is not None}
