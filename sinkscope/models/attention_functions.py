"""Functions in place of those by which transformers attends, in the modules of one model, until the end of a block.

The model keeps the name of its attention implementation: some models make masks, or leave them out, by what it is
called. The table in which functions are looked up by that name belongs to the whole process, so its entries are not
touched either. While any block is open, the table gives functions that first ask the calling module whether it belongs
to a block: a model without one gets what is registered, also where the user registers it meanwhile.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.models.edits import forward_of, name_of, written_in

# By these a model's own code attends: matmul (q, kᵀ) → softmax → matmul (weights, v).
MATMULS = frozenset({
    torch.matmul, torch.bmm, torch.baddbmm,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm,
})  # fmt: skip
SOFTMAXES = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})

Attend = Callable[..., Any]  # (module, query, key, value, mask, …) → mix (B,T,H,d), weights or None

INSTEAD = "_sinkscope_attends_by"  # of a module: what is called in place of its attention function, the last one first
_lock = threading.Lock()
_watching: dict[int, tuple[type[AttentionInterface], int]] = {}  # id of a table → its own class, and its open blocks


@contextmanager
def attending_by(model: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Call `instead(own, module, query, …)` wherever a module of this model attends by `own(module, query, …)`.

    Blocks may overlap, on one model or several, in one thread or several.

    Args:
        model: of transformers. Its modeling code may have a table of attention functions of its own.
        instead: what is called; of several, the one whose block began last is called first.
    """
    modules, entry = list(model.modules()), (instead,)  # a tuple of this block's own, to be found again
    with ExitStack() as stack:
        for table in _tables(model):
            stack.enter_context(_watched(table))
        stack.callback(_forget, modules, entry)
        for module in modules:
            vars(module)[INSTEAD] = (*vars(module).get(INSTEAD, ()), entry)
        yield


def _forget(modules: list[nn.Module], entry: tuple[Callable[..., Any]]) -> None:
    for module in modules:
        rest = tuple(other for other in vars(module).pop(INSTEAD, ()) if other is not entry)
        if rest:
            vars(module)[INSTEAD] = rest


class _Watched(AttentionInterface):
    """A table that gives functions which ask the calling module first, whatever was registered, and when."""

    def __getitem__(self, key: str) -> Attend:
        return partial(_attend, super().__getitem__(key))

    def get_interface(self, attn_implementation: str, default: Attend) -> Attend:
        return super().get_interface(attn_implementation, partial(_attend, default))


def _attend(own: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call what the module's open blocks put in place of `own`; without a block, call `own`."""
    for (instead,) in getattr(module, INSTEAD, ()):
        own = partial(instead, own)
    return own(module, *args, **kwargs)


@contextmanager
def _watched(table: AttentionInterface) -> Iterator[None]:
    """The table is watched until the end of the last such block."""
    with _lock:
        kind, count = _watching.get(id(table), (type(table), 0))
        _watching[id(table)] = kind, count + 1
        table.__class__ = _watched_kind(kind)
    try:
        yield
    finally:
        with _lock:
            kind, count = _watching.pop(id(table))
            if count > 1:
                _watching[id(table)] = kind, count - 1
            else:
                table.__class__ = kind


@cache
def _watched_kind(kind: type[AttentionInterface]) -> type[AttentionInterface]:
    return type(kind.__name__, (_Watched, kind), {})


def _tables(model: nn.Module) -> list[AttentionInterface]:
    """Where attention functions are looked up by name."""
    files = {type(module).__module__ for module in model.modules()}
    named = [vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in sorted(files) if file in sys.modules]
    found = [ALL_ATTENTION_FUNCTIONS, *(table for table in named if isinstance(table, AttentionInterface))]
    return list({id(table): table for table in found}.values())


def unknown_code(attentions: Iterable[nn.Module]) -> str | None:
    """The first function that takes part in the attention of one of these modules and is not transformers' own.

    A user may have registered it, or put it in place of the forward of a module or a class.

    Args:
        attentions: attention modules.

    Returns:
        Where it is defined and what it is called; None where all are transformers' or sinkscope's.
    """
    for attention in attentions:
        for function in (forward_of(attention), *_functions(attention)):
            if not written_in(function).startswith(("transformers.", "sinkscope.")):
                return name_of(function)
    return None


def _functions(module: nn.Module) -> list[Attend]:
    """The attention functions that the tables hold for this module; none if it attends by code of its own."""
    config = vars(module).get("config")
    file: Any = sys.modules.get(type(module).__module__)
    if not isinstance(config, PreTrainedConfig) or not hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        return []
    default = getattr(file, "eager_attention_forward", None)
    found = file.ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation, default)
    if isinstance(found, partial) and found.func is _attend:  # while the table is watched
        found = found.args[0]
    return [] if found is None else [found]
