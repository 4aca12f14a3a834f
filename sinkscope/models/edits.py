"""Changes within a `with` block: replaced parameters, wrapped forwards, edited inputs and outputs, and attention.

Parameters are never written to: an edited copy replaces them, and the original Parameter returns at the end. What
leaves a module is edited after the user's hooks, and before the tracer's, which reads it. A forward or a hook of the
user may compute more than the module's weights say, so the checks find out in which module it was defined.

Attention functions are replaced in the modules of one model. The model keeps the name of its attention implementation,
because some models decide by it whether to make masks. The table in which functions are looked up by that name is
global to the process, so its entries stay as they are. While a block is open, the table returns functions that first
check whether the calling module belongs to a block: other models get the registered function, even if the user
registers it in the meantime.
"""

import string
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.errors import InputError

ACCELERATE = "_hf_hook"  # module attribute of accelerate's hook, which moves inputs and weights between devices
Edit = tuple[nn.Module, str, torch.Tensor]  # module, name of its parameter, the tensor that replaces it


@contextmanager
def replaced(edits: Iterable[Edit]) -> Iterator[None]:
    """Replace parameters by other tensors within the block, and restore the same Parameters after it."""
    with ExitStack() as stack:
        for module, name, tensor in edits:
            before = module._parameters[name]
            assert before is not None
            stack.callback(module._parameters.__setitem__, name, before)
            module._parameters[name] = nn.Parameter(tensor, requires_grad=before.requires_grad)
        yield


def check_changes(name: str, edits: list[Edit]) -> None:
    """Raise InputError if weights are not in memory or are computed, or if no edit would change a value."""
    for module, parameter, _ in edits:
        try:
            check_own_map(module)
            check_parameters(module)
        except InputError as error:
            raise InputError(f"{name} does not apply to this model: {error}") from None
        if module.get_parameter(parameter).is_meta:
            raise InputError(
                f"{name}: these weights are offloaded and cannot be edited: load without --device-map auto"
            )
    if all(torch.equal(module.get_parameter(parameter), tensor) for module, parameter, tensor in edits):
        raise InputError(f"{name} would change nothing: the values that it sets are there already")


@contextmanager
def wrapped_forward(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module by around(forward, …) within the block."""
    # a forward may have been set by accelerate or by another edit
    before = {name: vars(module)[name] for name in ("forward", ACCELERATE) if name in vars(module)}
    forward, moves = module.forward, vars(module).pop(ACCELERATE, None)
    unmoved: Any = getattr(module, "_old_forward", None)

    def moving(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = moves.pre_forward(module, *args, **kwargs)
        return moves.post_forward(module, unmoved(*args, **kwargs))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # if accelerate's attribute is there, nnsight runs the forward of the module's class in place of this: so the
        # attribute is removed, and `moving` moves inputs and weights as accelerate's hook does
        return around(forward if moves is None else moving, *args, **kwargs)

    module.forward = wrapped
    try:
        yield
    finally:
        del module.forward
        vars(module).update(before)


@contextmanager
def edited_output(module: nn.Module, edit: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Edit a module's output, or its first tensor, after the forward hooks, until the end of the block.

    Hooks that transformers has left there to return hidden states read what is edited.
    """

    def changed(module: nn.Module, args: tuple, output: Any) -> Any:
        return (edit(module, output[0]), *output[1:]) if isinstance(output, tuple) else edit(module, output)

    hooks: Any = module._forward_hooks
    before = list(hooks)
    with module.register_forward_hook(changed):
        for key in before:
            if defining_module(hooks[key]) == CAPTURES:
                hooks.move_to_end(key)
        try:
            yield
        finally:
            for key in [*filter(hooks.__contains__, before), *(key for key in hooks if key not in before)]:
                hooks.move_to_end(key)


def first_argument(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a module's call, positional or keyword."""
    return args[0] if args else next(iter(kwargs.values()))


@contextmanager
def edited_input(module: nn.Module, edit: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Edit the first argument of a module within the block, before the forward that nnsight wraps."""

    def changed(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        edited = edit(module, first_argument(args, kwargs))
        return ((edited, *args[1:]), kwargs) if args else (args, kwargs | {next(iter(kwargs)): edited})

    with module.register_forward_pre_hook(changed, with_kwargs=True):
        yield


CAPTURES = "transformers.utils.output_capturing"  # its hooks collect what `output_hidden_states` asks for
LIBRARIES = ("sinkscope.", "transformers.", "torch.", "accelerate.", "nnsight.", "peft.")


def defining_module(function: Any) -> str:
    """Return the Python module in which a function is defined; unlike names, `functools.wraps` does not copy it."""
    function = getattr(function, "__func__", function)  # unwraps a bound method
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))


def name_of(function: Any) -> str:
    """Return a function's module and name, for messages."""
    return f"{defining_module(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def forward_of(module: Any) -> Callable[..., Any]:
    """Return the function that a call of the module runs; accelerate keeps the original when it replaces `forward`."""
    return module._old_forward if ACCELERATE in vars(module) else module.forward


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # attributes of modules


class ChangeRecorder:
    """Wraps a user's hook, and records which attributes of its module and of the parent modules the hook changes."""

    def __init__(self, hook: Callable[..., Any], modules: Sequence[nn.Module], changes: set[tuple[int, str]]) -> None:
        self.hook = hook
        self.changes = changes  # pairs: id of a module's `vars`, name of a changed attribute
        self.watched: list[tuple[dict[str, Any], str, dict[str, Any]]] = []  # attributes, the name of a dict, the dict
        for attributes in map(vars, modules):
            dicts = [(attributes, name, value) for name, value in attributes.items() if isinstance(value, dict)]
            self.watched += [(attributes, "", attributes), *dicts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [dict(entries) for _, _, entries in self.watched]
        try:
            return self.hook(*args, **kwargs)
        finally:
            for (attributes, name, entries), old in zip(self.watched, before, strict=True):
                if len(entries) != len(old) or not all(map(is_, entries.values(), old.values())):
                    changed = [one for one in old | entries if old.get(one, old) is not entries.get(one, old)]
                    self.changes.update((id(attributes), name or one) for one in changed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as the hook itself: a copy of the model is not watched."""
        return deepcopy(self.hook, memo)


def hook_of_user(hook: Any) -> Any:
    """Return a user's own hook; None for a hook of a library."""
    hook = hook.hook if isinstance(hook, ChangeRecorder) else hook
    return None if defining_module(hook.func if isinstance(hook, partial) else hook).startswith(LIBRARIES) else hook


def check_own_map(module: nn.Module) -> None:
    """Raise InputError if a user's hook or forward may change the module's output."""
    for hook in map(hook_of_user, [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]):
        if hook is not None:
            hook = hook.func if isinstance(hook, partial) else hook
            raise InputError(
                f"it has a forward hook, {name_of(hook)}, that may change its output: remove the hook, or add what it "
                "does to the weight"
            )
    forward = forward_of(module)
    if not defining_module(forward).startswith(LIBRARIES):
        raise InputError(
            f"its forward is {name_of(forward)}, which may compute with more than its weight: put its own forward back"
        )


def check_parameters(module: nn.Module) -> None:
    """Raise InputError if the weight or the bias is computed at each call, so that it cannot be replaced."""
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None and module._parameters.get(name) is None:
            raise InputError(
                f"its {name} is not a parameter but computed, by torch.nn.utils.prune or a parametrization: "
                "make it permanent with prune.remove or remove_parametrizations"
            )


class Beginning(NamedTuple):
    """A layer at which a forward pass on some inputs begins, with the output of the layer before it."""

    layer: int
    output: Any  # output of the layer before, a tensor (B,T,D) or a tuple that begins with one


class _Reached(Exception):
    """Ends a forward pass."""


@torch.no_grad()
def run_to_layer(
    layer: int,
    model: nn.Module,
    layers: Sequence[nn.Module],
    inputs: Mapping[str, Any],
    before: Beginning | None = None,
) -> Beginning | None:
    """Run the model up to this layer, from `before` if given; return None if the previous layer does not run."""
    outputs: list[Any] = []

    def keep(module: nn.Module, args: tuple, output: Any) -> None:
        outputs.append(output)
        raise _Reached

    with ExitStack() as stack:
        if before is not None:
            stack.enter_context(begun(layers, before))
        stack.enter_context(layers[layer - 1].register_forward_hook(keep))
        stack.enter_context(suppress(_Reached))
        model(**inputs)
    return Beginning(layer, outputs[0]) if outputs else None


@contextmanager
def begun(layers: Sequence[nn.Module], beginning: Beginning) -> Iterator[None]:
    """Skip the layers before the beginning within the block: each returns the kept output."""

    def skipped(forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = beginning.output  # copied, because some models add to it in place
        return (output[0].clone(), *output[1:]) if isinstance(output, tuple) else output.clone()

    with ExitStack() as stack:
        for layer in layers[: beginning.layer]:
            stack.enter_context(wrapped_forward(layer, skipped))
        yield


# --- attention functions

# The functions with which a model's own code computes attention: matmul(q, kᵀ) → softmax → matmul(weights, v).
MATMULS = frozenset({
    torch.matmul, torch.bmm, torch.baddbmm,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm,
})  # fmt: skip
SOFTMAXES = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})


class Product(NamedTuple):
    """A batched product x @ y = z of x (…,R,C) and y (…,C,S), as which an einsum can be written."""

    x: torch.Tensor
    y: torch.Tensor
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (x, y) → z, by the einsum itself
    restore: Callable[[torch.Tensor], torch.Tensor]  # z → the einsum's result
    is_stored: bool  # whether the result's axes are those of z


def as_product(equation: Any, *operands: Any) -> Product | None:
    """Return the batched product that an einsum of two tensors computes; None if it computes something else.

    Of the two axes that only one factor has, the one that is first in the result is R.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    factors = terms.split(",")
    if not arrow or len(factors) != 2:
        return None
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [x.dim() - len(term) + 3 if "..." in term else 0 for x, term in zip(operands, factors, strict=True)]
    wide = max(hidden)
    axes = [
        term.replace("...", "".join(spare[wide - count : wide])) for term, count in zip(factors, hidden, strict=True)
    ]
    result = result.replace("...", "".join(spare[:wide]))
    alone = [axis for axis in result if (axis in axes[0]) != (axis in axes[1])]
    batch = [axis for axis in result if axis not in alone]
    summed = [axis for axis in axes[0] if axis not in result]
    if len(alone) != 2 or len(summed) != 1 or any(len(set(letters)) != len(letters) for letters in (*axes, result)):
        return None
    rows, columns = alone
    first = 0 if rows in axes[0] else 1  # the operand that is x
    orders = ([*batch, rows, *summed], [*batch, *summed, columns])
    if not batch or sorted(orders[0]) != sorted(axes[first]) or sorted(orders[1]) != sorted(axes[1 - first]):
        return None
    places = [[axes[first].index(axis) for axis in orders[0]], [axes[1 - first].index(axis) for axis in orders[1]]]
    of_result = [result.index(axis) for axis in (*batch, rows, columns)]

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        factors = [_unpermuted(x, places[0]), _unpermuted(y, places[1])]
        return torch.einsum(equation, *(factors if first == 0 else factors[::-1])).permute(of_result)

    return Product(
        operands[first].permute(places[0]),
        operands[1 - first].permute(places[1]),
        compute,
        partial(_unpermuted, order=of_result),
        of_result == sorted(of_result),
    )


def _unpermuted(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return x.permute([order.index(axis) for axis in range(len(order))])


Attend = Callable[..., Any]  # (module, query, key, value, mask, …) → mix (B,T,H,d), weights or None

INSTEAD = "_sinkscope_attends_by"  # module attribute: the functions to call in place of its attention function
_table_lock = threading.Lock()
# id of a table → its class, and the number of open blocks
_watching: dict[int, tuple[type[AttentionInterface], int]] = {}


@contextmanager
def attending_by(model: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Call `instead(attend, module, query, …)` where a module of this model would call its attention function `attend`.

    Blocks may overlap, on one model or several, in one thread or several: the innermost is called first.
    """
    modules, entry = list(model.modules()), (instead,)  # the identity of this tuple marks the block
    files = sorted({type(module).__module__ for module in modules} & sys.modules.keys())
    tables = [ALL_ATTENTION_FUNCTIONS, *(vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in files)]
    with ExitStack() as stack:
        for table in {id(table): table for table in tables if isinstance(table, AttentionInterface)}.values():
            stack.enter_context(_watched_table(table))
        try:
            for module in modules:
                vars(module)[INSTEAD] = (*vars(module).get(INSTEAD, ()), entry)
            yield
        finally:
            for module in modules:
                rest = tuple(other for other in vars(module).pop(INSTEAD, ()) if other is not entry)
                if rest:
                    vars(module)[INSTEAD] = rest


class _Watched(AttentionInterface):
    """A table of attention functions that check the calling module first, no matter when they were registered."""

    def __getitem__(self, key: str) -> Attend:
        return partial(_attend, super().__getitem__(key))

    def get_interface(self, attn_implementation: str, default: Attend) -> Attend:
        return super().get_interface(attn_implementation, partial(_attend, default))


def _attend(attend: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the functions of the module's open blocks in place of `attend`; without a block, call `attend`."""
    for (instead,) in getattr(module, INSTEAD, ()):
        attend = partial(instead, attend)
    return attend(module, *args, **kwargs)


@contextmanager
def _watched_table(table: AttentionInterface) -> Iterator[None]:
    """Change the class of the table until the last of its blocks ends."""
    with _table_lock:
        kind, count = _watching.get(id(table), (type(table), 0))
        _watching[id(table)] = kind, count + 1
        table.__class__ = _watched_kind(kind)
    try:
        yield
    finally:
        with _table_lock:
            kind, count = _watching.pop(id(table))
            if count > 1:
                _watching[id(table)] = kind, count - 1
            else:
                table.__class__ = kind


@cache
def _watched_kind(kind: type[AttentionInterface]) -> type[AttentionInterface]:
    return type(kind.__name__, (_Watched, kind), {})


def unknown_code(attentions: Iterable[nn.Module]) -> str | None:
    """Return the name of the first attention function of these modules that is not transformers' own, or None."""
    for attention in attentions:
        functions = [forward_of(attention)]
        config, file = vars(attention).get("config"), sys.modules.get(type(attention).forward.__module__)
        table = getattr(file, "ALL_ATTENTION_FUNCTIONS", None)  # None if attention is in the module's own code
        if isinstance(config, PreTrainedConfig) and table is not None:
            function = table.get(config._attn_implementation, getattr(file, "eager_attention_forward", None))
            if isinstance(function, partial) and function.func is _attend:  # while the table is watched
                function = function.args[0]
            functions += [] if function is None else [function]
        for function in functions:
            if not defining_module(function).startswith(("transformers.", "sinkscope.")):
                return name_of(function)
    return None
