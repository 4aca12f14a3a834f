"""Which outputs of a model's linear modules are its queries, keys and values, found numerically.

Sequences of one token are run: at position 0 rotary positions turn nothing, so what attention is given is bit for bit
what a projection gave, unless a norm, a convolution or a latent stands between. Any order of heads and roles within a
module is found: all in one, a latent's up-projection that holds keys and values, or one module each. Queries and keys
may be normed head by head: their weights can be edited all the same, where values that are scaled and then normed would
be what they were.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sinkscope.models.attention_functions import attending_by
from sinkscope.models.family import Outputs, Role, embedding_weight, input_device

PROBES = 4  # sequences: two outputs that are equal in all of them are the same


@torch.no_grad()
def find_projections(model: Any, attending: Sequence[nn.Module]) -> tuple[dict[Role, Outputs], ...]:
    """Of each attention module, role → outputs; without the roles that are not found.

    Args:
        model: on transformers' attention interface.
        attending: its attention modules.
    """
    states: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
    given: dict[nn.Module, torch.Tensor] = {}

    def listening(own: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states[module] = tuple(x[:, :, 0].clone() for x in args[:3])  # (B,heads,d)
        return own(module, *args, **kwargs)

    modules = {module for attention in attending for module in attention.modules()}
    linear = [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
    ids = torch.arange(3, 3 + PROBES, device=input_device(model))[:, None] % len(embedding_weight(model))
    with ExitStack() as stack:
        for module in linear:
            stack.enter_context(module.register_forward_hook(partial(_keep, given)))
        stack.enter_context(attending_by(model, listening))
        with suppress(RuntimeError, ValueError, IndexError):  # a model that takes no single tokens: none are found
            model(input_ids=ids, use_cache=False)
    return tuple(_roles(attention, states.get(attention, ()), given) for attention in attending)


def _keep(given: dict[nn.Module, torch.Tensor], module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """(B,O), where it gives one vector for each token."""
    if output.dim() >= 3 and output[0].numel() == output.shape[-1]:
        given[module] = output.detach().flatten(1).clone()


def _roles(
    attention: nn.Module, states: Iterable[torch.Tensor], given: dict[nn.Module, torch.Tensor]
) -> dict[Role, Outputs]:
    own = {path: given[module] for path, module in attention.named_modules() if module in given}
    columns = {path: {entry: at for at, entry in enumerate(_entries(outputs))} for path, outputs in own.items()}
    found: dict[Role, Outputs] = {}
    roles: tuple[Role, ...] = ("query", "key", "value")
    for role, state in zip(roles, states, strict=False):
        exact = [(path, _places(state, known)) for path, known in columns.items()]
        normed = [(path, _in_order(state, outputs)) for path, outputs in own.items()] if role != "value" else []
        chosen = next(((path, places) for path, places in [*exact, *normed] if places is not None), None)
        if chosen is not None:
            found[role] = Outputs(*chosen)
    return found


def _entries(x: torch.Tensor) -> list[bytes]:
    """(B,N) → each of the N over the sequences, to the bit."""
    return [entry.tobytes() for entry in x.double().cpu().T.contiguous().numpy()]


def _places(state: torch.Tensor, columns: Mapping[bytes, int]) -> tuple[tuple[int, ...], ...] | None:
    """By head (B,heads,d) which outputs a state is; None unless each is another one."""
    places = [columns[entry] for entry in _entries(state.flatten(1)) if entry in columns]
    width = state.shape[2]
    if len(places) < state[0].numel() or len(set(places)) < len(places):
        return None
    return tuple(tuple(places[head * width : (head + 1) * width]) for head in range(state.shape[1]))


def _in_order(state: torch.Tensor, outputs: torch.Tensor) -> tuple[tuple[int, ...], ...] | None:
    """The same for a state whose heads are normed: the outputs in their order, times one factor for each sequence and
    one for each channel.
    """
    batch, heads, width = state.shape
    if outputs.shape[1] != heads * width:
        return None
    factors = state.double() / outputs.double().view(batch, heads, width)
    by_sequence = factors.median(-1, keepdim=True).values
    by_channel = (factors / by_sequence).median(0, keepdim=True).values
    is_product = ((factors - by_sequence * by_channel).abs() <= 0.05 * factors.abs()).double().mean() > 0.9
    return tuple(tuple(range(head * width, (head + 1) * width)) for head in range(heads)) if is_product else None
