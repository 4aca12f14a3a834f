"""nnsight, imported without its mount, which by default gives every object of the process an attribute `save`; and what
the tracer adds to it: what leaves a module is read after the module's forward hooks.

nnsight's configuration can turn the mount off, but is read while nnsight is imported. This module changes the
configuration during the import only. If the user has imported nnsight before, it stays as it is; if they import it
later, `nnsight.save(x)` replaces `x.save()`, and `with x.backward():` is not nnsight's.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec, module_from_spec
from typing import Any

import torch
from torch import nn


def _import_without_mount() -> None:
    spec = find_spec("nnsight")
    if "nnsight" in sys.modules or spec is None or spec.loader is None:
        return
    package = sys.modules["nnsight"] = module_from_spec(spec)
    # nnsight replaces it by one that takes every call on the line of a `with` for its own context manager, and then
    # computes no gradient: `with enabled(): loss.backward()`
    backward = torch.Tensor.backward
    try:
        from nnsight.schema.config import CONFIG

        wanted, CONFIG.APP.PYMOUNT = CONFIG.APP.PYMOUNT, False
        spec.loader.exec_module(package)
        CONFIG.APP.PYMOUNT = wanted
    except BaseException:
        del sys.modules["nnsight"]
        raise
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


_import_without_mount()

from nnsight import NNsight, save  # noqa: E402
from nnsight.intervention.envoy import Envoy  # noqa: E402
from nnsight.intervention.eproperty import eproperty  # noqa: E402
from nnsight.intervention.interleaver import OutOfOrderError  # noqa: E402

__all__ = ["NNsight", "OutOfOrderError", "Traced", "TracedPart", "part_of", "save", "serving"]

LEFT = "after_hooks"


class TracedPart(Envoy):
    """A module of a traced model."""

    @eproperty(key=LEFT)
    def after_hooks(self, value: Any) -> Any:
        """The module's output after its forward hooks; nnsight's own `output` is the one before the hooks."""
        return value


class Traced(NNsight, TracedPart):
    """A model that nnsight wraps."""

    # nnsight would move the inputs to the first parameter's device: wrong when accelerate has offloaded it
    device = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, envoys=TracedPart)


def part_of(envoy: Any, path: str) -> Any:
    """Return a submodule's envoy. nnsight renames modules whose name it uses, like BERT's `output`, to `E_output`."""
    for name in path.split(".") if path else ():
        moved = f"{envoy.OVERLOAD_PREFIX}{name}"
        envoy = getattr(envoy, moved if moved in vars(envoy) else name)
    return envoy


@contextmanager
def serving(parts: Iterable[TracedPart]) -> Iterator[None]:
    """Serve `after_hooks` of these parts to the traces of the block. A hook that is registered in it acts later."""

    def serve(part: TracedPart, module: nn.Module, args: tuple, output: Any) -> Any:
        interleaver = part.interleaver
        return interleaver.handle(f"{part.path}.{LEFT}", output) if interleaver.interleaving else None

    with ExitStack() as hooks:
        for part in {part.path: part for part in parts}.values():  # layers may share a module
            hooks.enter_context(part._module.register_forward_hook(partial(serve, part)))
        yield
