"""Hooks that act on the module that is in one place of an attention module while that runs.

A projection does not stay in its place: PEFT puts a module of its own there, which holds the projection and adds to
what it gives (LoRA), multiplies it (IA³) or rotates what it reads (OFT), and puts the projection back once the adapter
is merged into its weight. A hook on the projection itself acts before the adapter in the first case and after it in the
second. A hook on the place acts after the adapter in both.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError
from sinkscope.retrofits.registers import RETROFIT

# (the retrofit's module, what the module in the place is called with, what it gives) → what takes the place of its
# output, or of a hook that acts before, of its arguments; None: nothing does
Act = Callable[[Any, tuple, Any], Any]


class PlacedHook:
    """Calls `act` before or after the module at a path within an attention module, in every forward of the latter.

    The retrofit's module is looked up in each forward as well: with `modules_to_save`, PEFT trains a copy of it.
    """

    def __init__(self, path: str, act: Act, before: bool = False) -> None:
        self.path, self.act, self.before = path, act, before
        self.module: nn.Module | None = None  # in the place at the last forward; only there the hook acts
        self.part: Any = None

    def watch(self, attention: nn.Module) -> None:
        self._join(attention.get_submodule(self.path))
        attention.register_forward_pre_hook(self._find)

    def _find(self, attention: nn.Module, args: tuple) -> None:
        if getattr(attention, "_is_replica", False):  # its hooks are those of the other replicas, in other threads
            raise SinkscopeError("nn.DataParallel cannot run a retrofitted model: take DistributedDataParallel")
        self.module, self.part = attention.get_submodule(self.path), getattr(attention, RETROFIT)
        self._join(self.module)

    def _join(self, module: nn.Module) -> None:
        hooks: Any = module._forward_pre_hooks if self.before else module._forward_hooks
        if self not in hooks.values():
            join: Any = module.register_forward_pre_hook if self.before else module.register_forward_hook
            join(self)

    def __call__(self, module: nn.Module, args: tuple, output: Any = None) -> Any:
        return self.act(self.part, args, output) if module is self.module else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a projection, which PEFT makes for `modules_to_save`, is in no place yet."""
        return vars(self) | {"module": None, "part": None}
