"""Workers of a sweep that load models onto a simulated device. `spawn` imports this file in the worker."""

from dataclasses import replace
from typing import Any

import pytest

from sinkscope.commands import load
from sinkscope.commands.sweep import pools
from support.simulated import moved, simulated

of_a_worker = pools._main


def work(*arguments: Any) -> None:
    """Do the work of a worker, whose models lie on a simulated device."""
    on_cpu = load.load

    def on_device(**options: Any) -> Any:
        loaded = on_cpu(**options)
        return replace(loaded, model=moved(loaded.model))

    with simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load", on_device)
        of_a_worker(*arguments)
