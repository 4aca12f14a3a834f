"""Replaces transformers' attention functions in the modules of one model, for the length of a block.

The model keeps the name of its attention implementation, because some models decide by it whether to make masks. The
table in which functions are looked up by that name is global to the process, so its entries stay as they are. While a
block is open, the table returns functions that first check whether the calling module belongs to a block: other models
get the registered function, even if the user registers it in the meantime.
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

# The functions with which a model's own code computes attention: matmul(q, kᵀ) → softmax → matmul(weights, v).
MATMULS = frozenset({
    torch.matmul, torch.bmm, torch.baddbmm,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm,
})  # fmt: skip
SOFTMAXES = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})

Attend = Callable[..., Any]  # (module, query, key, value, mask, …) → mix (B,T,H,d), weights or None

INSTEAD = "_sinkscope_attends_by"  # module attribute: the functions to call in place of its attention function
_lock = threading.Lock()
# id of a table → its class, and the number of open blocks
_watching: dict[int, tuple[type[AttentionInterface], int]] = {}


@contextmanager
def attending_by(model: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Call `instead(own, module, query, …)` where a module of this model would call its attention function `own`.

    Blocks may overlap, on one model or several, in one thread or several: the innermost is called first.
    """
    modules, entry = list(model.modules()), (instead,)  # the identity of this tuple marks the block
    files = sorted({type(module).__module__ for module in modules} & sys.modules.keys())
    tables = [ALL_ATTENTION_FUNCTIONS, *(vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in files)]
    with ExitStack() as stack:
        for table in {id(table): table for table in tables if isinstance(table, AttentionInterface)}.values():
            stack.enter_context(_watched(table))
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


def _attend(own: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the functions of the module's open blocks in place of `own`; without a block, call `own`."""
    for (instead,) in getattr(module, INSTEAD, ()):
        own = partial(instead, own)
    return own(module, *args, **kwargs)


@contextmanager
def _watched(table: AttentionInterface) -> Iterator[None]:
    """Change the class of the table until the last of its blocks ends."""
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


def unknown_code(attentions: Iterable[nn.Module]) -> str | None:
    """Return the name of the first attention function of these modules that is not transformers' own, or None."""
    for attention in attentions:
        functions = [forward_of(attention)]
        config, file = vars(attention).get("config"), sys.modules.get(type(attention).__module__)
        table = getattr(file, "ALL_ATTENTION_FUNCTIONS", None)  # None if attention is in the module's own code
        if isinstance(config, PreTrainedConfig) and table is not None:
            found = table.get(config._attn_implementation, getattr(file, "eager_attention_forward", None))
            if isinstance(found, partial) and found.func is _attend:  # while the table is watched
                found = found.args[0]
            functions += [] if found is None else [found]
        for function in functions:
            if not written_in(function).startswith(("transformers.", "sinkscope.")):
                return name_of(function)
    return None
