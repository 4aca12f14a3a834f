"""Functions in place of those by which transformers attends, until the end of a block.

The model keeps the name of its attention implementation: some models make masks, or leave them out, by what it is
called.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KEPT = ("sdpa", "eager")  # names of implementations whose masks are understood here

# By these a model's own code attends: matmul (q, kᵀ) → softmax → matmul (weights, v).
MATMULS = frozenset({
    torch.matmul, torch.bmm, torch.baddbmm,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm,
})  # fmt: skip
SOFTMAXES = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})

Attend = Callable[..., Any]  # (module, query, key, value, mask, …) → mix (B,T,H,d), weights or None


@contextmanager
def attending_by(model: nn.Module, instead: Callable[..., Any]) -> Iterator[None]:
    """Call `instead(own, module, query, …)` wherever a model of transformers attends by `own(module, query, …)`.

    Args:
        model: whose modeling code may have a table of attention functions of its own, beside that of transformers.
        instead: what is called.
    """
    with ExitStack() as stack:
        for table in _tables(model):
            for name in KEPT:
                before = table.get(name)
                table[name] = partial(instead, before or _own_eager)
                stack.callback(_put_back, table, name, before)
        yield


def _tables(model: nn.Module) -> list[AttentionInterface]:
    """Where attention functions are looked up by name."""
    files = {type(module).__module__ for module in model.modules()}
    named = [vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in sorted(files) if file in sys.modules]
    found = [ALL_ATTENTION_FUNCTIONS, *(table for table in named if isinstance(table, AttentionInterface))]
    return list({id(table): table for table in found}.values())


def _own_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Every modeling file has an eager function of its own."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"](module, *args, **kwargs)


def _put_back(table: AttentionInterface, name: str, before: Attend | None) -> None:
    del table[name]
    if table.get(name) is not before:  # a local override of the caller's
        table[name] = before
