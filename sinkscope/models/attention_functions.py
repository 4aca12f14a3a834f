"""Functions in place of those by which transformers attends, until the end of a block.

The model keeps the name of its attention implementation: some models make masks, or leave them out, by what it is
called.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KEPT = ("sdpa", "eager")  # names of implementations whose masks are understood here

Attend = Callable[..., Any]  # (module, query, key, value, mask, …) → mix (B,T,H,d), weights or None


@contextmanager
def attending_by(instead: Callable[..., Any]) -> Iterator[None]:
    """Call `instead(own, module, query, …)` wherever a model of transformers attends by `own(module, query, …)`."""
    with ExitStack() as stack:
        for name in KEPT:
            before = ALL_ATTENTION_FUNCTIONS.get(name)
            ALL_ATTENTION_FUNCTIONS[name] = partial(instead, before or _own_eager)
            stack.callback(_put_back, name, before)
        yield


def _own_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Every modeling file has an eager function of its own."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"](module, *args, **kwargs)


def _put_back(name: str, before: Attend | None) -> None:
    del ALL_ATTENTION_FUNCTIONS[name]
    if ALL_ATTENTION_FUNCTIONS.get(name) is not before:  # a local override of the caller's
        ALL_ATTENTION_FUNCTIONS[name] = before
