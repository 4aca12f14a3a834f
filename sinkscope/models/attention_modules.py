"""Finds the modules that compute a softmax of q·k, and how they make q, k and v, in runs on a few tokens.

Queries, keys and values are found with sequences of one token: rotary positions leave position 0 unrotated, so the
input of attention equals the output of a projection bit for bit, unless a norm, a convolution or a latent is between.
Any order of heads and roles within a module is found: one projection for all three, a latent's up-projection that holds
keys and values, or one module each. Queries and keys may be normalized head by head, because their weights can still be
edited; values may not, because a norm would undo a scaling of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from sinkscope.errors import InputError
from sinkscope.models.attention_functions import MATMULS, SOFTMAXES, attending_by
from sinkscope.models.family import Outputs, Role, embedding_weight, first_tensor, input_device


def find_attentions(
    model: nn.Module, path: str, layers: list[nn.Module], inputs: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Find the attention module of every layer, for the list of layers at a path.

    The result is the family's `door`, and the module's path by layer, "" for a layer without attention. A layer with
    several attentions, or with a form of attention that is not measured, raises InputError.
    """
    seen = watch_attention(model, inputs)
    names = {module: name for name, module in model.named_modules()}
    ran = ([module for module, _ in seen.through_interface], seen.in_own_code, seen.in_other_form)
    ran_paths = [[names.get(module, "") for module in modules] for modules in ran]
    prefixes = [f"{path}.{index}." for index in range(len(layers))]
    interface, own, other = (
        [[at.removeprefix(prefix) for at in paths if at.startswith(prefix)] for prefix in prefixes]
        for paths in ran_paths
    )
    door = "interface" if any(interface) or not any(own) else "interceptor"
    chosen, elsewhere = (interface, own) if door == "interface" else (own, interface)
    for index, layer in enumerate(layers):
        unmeasured = [*elsewhere[index], *other[index]]
        if unmeasured:
            kind = type(layer.get_submodule(unmeasured[0])).__name__
            raise InputError(f"layer {index}: its {kind} attends in code of its own, in a form that is not measured")
        paths = chosen[index]
        if len(paths) < 2:
            continue
        module = layer.get_submodule(paths[0])
        if sum(any(part is module for part in other.modules()) for other in layers) > 1:
            raise InputError("several layers share one attention module, which is not measured")
        if len(set(paths)) > 1:
            raise InputError(f"layer {index} has {len(paths)} attention modules, which is not measured")
        raise InputError(
            f"layer {index} attends {len(paths)} times and combines the results: no single softmax is its attention"
        )
    return door, [paths[0] if paths else "" for paths in chosen]


@torch.no_grad()
def watch_attention(model: nn.Module, inputs: Mapping[str, Any]) -> "_Watch":
    """Run the model, and record the modules that compute attention."""
    watch = _Watch(inputs["input_ids"].shape[1])

    def listening(own: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watch.is_off = True
        try:
            given = own(module, *args, **kwargs)
        finally:
            watch.is_off = False
        watch.through_interface.append((module, given[0].detach().clone()))
        return given

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.parameters(), None) is not None:  # a dropout or a softmax is not an attention module
                stack.enter_context(module.register_forward_pre_hook(watch.enter))
                stack.enter_context(module.register_forward_hook(watch.leave))
        stack.enter_context(attending_by(model, listening))
        stack.enter_context(watch)
        model(**inputs)
    return watch


class _Watch(TorchFunctionMode):
    """Records in order the modules that compute attention, by transformers' interface or by their own softmax."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.through_interface: list[tuple[nn.Module, torch.Tensor]] = []  # with their mix (B,T,H,d)
        self.in_own_code: list[nn.Module] = []
        self.in_other_form: list[nn.Module] = []  # modules with a softmax over keys that is not of a product
        self.length = length  # T
        self.running: list[nn.Module] = []
        self.product = 0  # size of the last product of two batched tensors in the running module
        self.is_off = False

    def enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)
        self.product = 0

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if self.is_off or not self.running:
            return given
        if func in MATMULS:
            self.product = given.numel() if given.dim() > 2 else 0
        elif func is F.scaled_dot_product_attention and _attends_to_tokens(self.length, *args, **(kwargs or {})):
            self.in_own_code.append(self.running[-1])
        elif func in SOFTMAXES and given.dim() > 2 and given.shape[-2] == given.shape[-1] >= self.length:
            is_known = given.numel() == self.product
            (self.in_own_code if is_known else self.in_other_form).append(self.running[-1])
        return given


def _attends_to_tokens(length: int, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether the keys of a call are the tokens, and not, for example, states of earlier layers."""
    return query.shape[-2] == key.shape[-2] >= length


@torch.no_grad()
def is_gated(model: nn.Module, attention: nn.Module, output: str, inputs: Mapping[str, Any]) -> bool:
    """Return whether the output projection reads attention's mix times factors in (0, 1), which no module returns."""
    if not output:
        return False
    given: list[torch.Tensor] = []
    taken: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for module in attention.modules():
            hooks.enter_context(
                module.register_forward_hook(lambda module, args, result: given.append(first_tensor(result)))
            )
        projection = attention.get_submodule(output)
        hooks.enter_context(projection.register_forward_pre_hook(lambda module, args: taken.append(args[0].clone())))
        mix = next(mix for module, mix in watch_attention(model, inputs).through_interface if module is attention)
    x, plain = taken[0], mix.flatten(2)
    if x.shape != plain.shape or any(isinstance(other, torch.Tensor) and torch.equal(other, x) for other in given):
        return False
    factors = (x / plain)[plain.abs() > plain.abs().median() / 100]
    return not torch.equal(x, plain) and bool(((factors > 0) & (factors < 1)).all())


PROBES = 4  # sequences: two outputs that are equal in all of them are taken to be the same


@torch.no_grad()
def find_projections(model: Any, attending: Sequence[nn.Module]) -> tuple[dict[Role, Outputs], ...]:
    """Find the outputs of each role (query, key, value) in each module that uses transformers' attention interface."""
    states: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
    given: dict[nn.Module, torch.Tensor] = {}

    def listening(own: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states[module] = tuple(x[:, :, 0].clone() for x in args[:3])  # (B,heads,d)
        return own(module, *args, **kwargs)

    modules = {module for attention in attending for module in attention.modules()}
    linear = [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
    ids = torch.arange(3, 3 + PROBES, device=input_device(model))[:, None] % len(embedding_weight(model))

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.dim() >= 3 and output[0].numel() == output.shape[-1]:  # one vector per token
            given[module] = output.detach().flatten(1).clone()

    with ExitStack() as stack:
        for module in linear:
            stack.enter_context(module.register_forward_hook(keep))
        stack.enter_context(attending_by(model, listening))
        with suppress(RuntimeError, ValueError, IndexError):  # for a model that cannot read single tokens
            model(input_ids=ids, use_cache=False)
    return tuple(_roles(attention, states.get(attention, ()), given) for attention in attending)


def _roles(
    attention: nn.Module, states: Iterable[torch.Tensor], given: dict[nn.Module, torch.Tensor]
) -> dict[Role, Outputs]:
    """Find the module and the outputs of each role for the states q, k and v (B,heads,d) of an attention module."""
    own = {path: given[module] for path, module in attention.named_modules() if module in given}
    columns = {path: {entry: at for at, entry in enumerate(_entries(outputs))} for path, outputs in own.items()}
    found: dict[Role, Outputs] = {}
    roles: tuple[Role, ...] = ("query", "key", "value")
    for role, state in zip(roles, states, strict=False):
        heads, width = state.shape[1:]
        entries, in_order = _entries(state.flatten(1)), list(range(heads * width))
        # all outputs are found by their values, which are distinct, or else by their order before a norm of each head
        exact = [(path, [known[entry] for entry in entries if entry in known]) for path, known in columns.items()]
        candidates = [(path, places) for path, places in exact if len(places) == len(set(places)) == len(entries)]
        if role != "value":
            candidates += [(path, in_order) for path, outputs in own.items() if _is_normed(state, outputs)]
        if candidates:
            path, places = candidates[0]
            found[role] = Outputs(path, tuple(tuple(places[at : at + width]) for at in range(0, len(places), width)))
    return found


def _entries(x: torch.Tensor) -> list[bytes]:
    return [entry.tobytes() for entry in x.double().cpu().T.contiguous().numpy()]


def _is_normed(state: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Return whether a state is the outputs in order, times one factor for each sequence and one for each channel."""
    if outputs.shape[1] != state[0].numel():
        return False
    factors = state.double() / outputs.double().view(state.shape)
    by_sequence = factors.median(-1, keepdim=True).values
    by_channel = (factors / by_sequence).median(0, keepdim=True).values
    return bool(((factors - by_sequence * by_channel).abs() <= 0.05 * factors.abs()).double().mean() > 0.9)
