"""Which modules attend by a softmax of q·k, and whether a gate follows: found in a run on a few tokens."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sinkscope.errors import InputError
from sinkscope.models.attention_functions import MATMULS, SOFTMAXES, attending_by
from sinkscope.models.family import first_tensor


@dataclass(frozen=True)
class Attentions:
    """By layer the path of the module that attends, "" where none does; and how they attend."""

    door: str  # see Family
    paths: list[str]


@dataclass
class Seen:
    """The modules that attended, in their order."""

    through_interface: list[tuple[nn.Module, torch.Tensor]] = field(default_factory=list)  # and their mix (B,T,H,d)
    in_own_code: list[nn.Module] = field(default_factory=list)
    in_other_form: list[nn.Module] = field(default_factory=list)  # a softmax over keys, and not by two products


def find_attentions(model: nn.Module, path: str, layers: list[nn.Module], inputs: Mapping[str, Any]) -> Attentions:
    """The attention module of every layer.

    Args:
        model: to run.
        path: of the list of layers.
        layers: its entries.
        inputs: of the model.

    Raises:
        InputError: a layer attends more than once, or in a form that is not measured.
    """
    seen = watch_attention(model, inputs)
    names = {module: name for name, module in model.named_modules()}
    ran = ([module for module, _ in seen.through_interface], seen.in_own_code, seen.in_other_form)
    interface, own, other = (
        [_inside(f"{path}.{index}", modules, names) for index in range(len(layers))] for modules in ran
    )
    door = "interface" if any(interface) or not any(own) else "interceptor"
    chosen, elsewhere = (interface, own) if door == "interface" else (own, interface)
    for index, layer in enumerate(layers):
        unmeasured = [*elsewhere[index], *other[index]]
        if unmeasured:
            kind = type(layer.get_submodule(unmeasured[0])).__name__
            raise InputError(f"layer {index}: its {kind} attends in code of its own, in a form that is not measured")
        _check_one(index, chosen[index], layers)
    return Attentions(door, [paths[0] if paths else "" for paths in chosen])


def _inside(layer: str, modules: Iterable[nn.Module], names: Mapping[nn.Module, str]) -> list[str]:
    """The paths within a layer of those modules that are part of it."""
    paths = (names.get(module, "") for module in modules)
    return [path.removeprefix(f"{layer}.") for path in paths if path.startswith(f"{layer}.")]


def _check_one(index: int, paths: list[str], layers: list[nn.Module]) -> None:
    """Whether a layer attends at most once, by a module of its own."""
    if len(paths) < 2:
        return
    if _is_shared(layers[index].get_submodule(paths[0]), layers):
        raise InputError("several layers share one attention module, which is not measured")
    if len(set(paths)) > 1:
        raise InputError(f"layer {index} has {len(paths)} attention modules, which is not measured")
    raise InputError(
        f"layer {index} attends {len(paths)} times and combines what it gets: no single softmax is its attention"
    )


def _is_shared(module: nn.Module, layers: list[nn.Module]) -> bool:
    return sum(any(part is module for part in layer.modules()) for layer in layers) > 1


@torch.no_grad()
def watch_attention(model: nn.Module, inputs: Mapping[str, Any]) -> Seen:
    """Run the model, and note which modules attend."""
    seen = Seen()
    own_code = _OwnCode(seen, inputs["input_ids"].shape[1])

    def listening(own: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with own_code.not_listening():
            given = own(module, *args, **kwargs)
        seen.through_interface.append((module, given[0].detach().clone()))
        return given

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.parameters(), None) is not None:  # a dropout or a softmax is no attention module
                stack.enter_context(module.register_forward_pre_hook(own_code.enter))
                stack.enter_context(module.register_forward_hook(own_code.leave))
        stack.enter_context(attending_by(model, listening))
        stack.enter_context(own_code)
        model(**inputs)
    return seen


class _OwnCode(TorchFunctionMode):
    """Notes the modules whose own code takes a softmax over keys."""

    def __init__(self, seen: Seen, length: int) -> None:
        super().__init__()
        self.seen = seen
        self.length = length  # T
        self.running: list[nn.Module] = []
        self.product = 0  # numbers in the last product of two batched tensors in the module that runs
        self.is_off = False

    def enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)
        self.product = 0

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if self.is_off or not self.running:
            return given
        if func in MATMULS:
            self.product = given.numel() if given.dim() > 2 else 0
        elif func is F.scaled_dot_product_attention and _is_over_tokens(self.length, *args, **(kwargs or {})):
            self.seen.in_own_code.append(self.running[-1])
        elif func in SOFTMAXES and given.dim() > 2 and given.shape[-2] == given.shape[-1] >= self.length:
            is_known = given.numel() == self.product
            (self.seen.in_own_code if is_known else self.seen.in_other_form).append(self.running[-1])
        return given


def _is_over_tokens(length: int, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether the keys of a call are those of all queries, and not a token's own (memories of earlier layers, say)."""
    return query.shape[-2] == key.shape[-2] >= length


@torch.no_grad()
def is_gated(model: nn.Module, attention: nn.Module, output: str, inputs: Mapping[str, Any]) -> bool:
    """Whether the output projection takes what attention gives times factors between 0 and 1 that no module makes."""
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
