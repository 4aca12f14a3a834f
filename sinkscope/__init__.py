"""Attention sinks, massive activations and value drains of any pretrained HuggingFace language model or encoder.

    import sinkscope
    run = sinkscope.analyze("HuggingFaceTB/SmolLM2-135M")
    run.tables["attention"]
    run.figure("sink-map")

There is one function per command, with its name and options. Each is imported when first used, so that
`import sinkscope` is fast.
`import sinkscope.retrofits` registers retrofitted models with transformers' auto classes.
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.commands.analyze.command import analyze as analyze
    from sinkscope.commands.analyze.command import analyze_steps as analyze_steps
    from sinkscope.commands.analyze.command import spike_filter as spike_filter
    from sinkscope.commands.analyze.command import spike_mask as spike_mask
    from sinkscope.commands.benchmark.command import benchmark as benchmark
    from sinkscope.commands.card.command import card as card
    from sinkscope.commands.claims.command import claims as claims
    from sinkscope.commands.claims.scorecard import Scorecard as Scorecard
    from sinkscope.commands.compare.side_by_side import compare as compare
    from sinkscope.commands.doctor.command import doctor as doctor
    from sinkscope.commands.intervene.command import intervene as intervene
    from sinkscope.commands.intervene.intervening import intervening as intervening
    from sinkscope.commands.kv_plan.command import kv_plan as kv_plan
    from sinkscope.commands.list.command import listing as list  # noqa: F401
    from sinkscope.commands.load import load as load
    from sinkscope.commands.quantize.command import quantize as quantize
    from sinkscope.commands.quantize.study import calibrate_ranges as calibrate_ranges
    from sinkscope.commands.run.command import run_recipe as run  # noqa: F401
    from sinkscope.commands.run.command import run_recipe as run_recipe
    from sinkscope.commands.scan.command import scan as scan
    from sinkscope.commands.show.command import page as page
    from sinkscope.commands.show.command import show as show
    from sinkscope.commands.steps.series import Series as Series
    from sinkscope.commands.sweep.command import sweep as sweep
    from sinkscope.commands.train.command import retrofit as retrofit
    from sinkscope.commands.train.command import train as train
    from sinkscope.errors import InputError as InputError
    from sinkscope.errors import SinkscopeError as SinkscopeError
    from sinkscope.measuring.callback import SinkCallback as SinkCallback
    from sinkscope.measuring.watching import watch as watch
    from sinkscope.output.run import Run as Run
    from sinkscope.quantization.simulation import quantized as quantized
    from sinkscope.retrofits import gate_displacement as gate_displacement
    from sinkscope.retrofits import new_parameters as new_parameters
    from sinkscope.retrofits import retrofit_model as retrofit_model

    __version__: str

# public name of the core → MODULE:NAME; those of a command are in its record
_CORE = {
    "load": "commands.load:load",
    "InputError": "errors:InputError",
    "SinkscopeError": "errors:SinkscopeError",
    "SinkCallback": "measuring.callback:SinkCallback",
    "watch": "measuring.watching:watch",
    "Run": "output.run:Run",
    "quantized": "quantization.simulation:quantized",
    "gate_displacement": "retrofits:gate_displacement",
    "new_parameters": "retrofits:new_parameters",
    "retrofit_model": "retrofits:retrofit_model",
}


def _places() -> dict[str, tuple[str, str]]:
    """Return public name → the package and the MODULE:NAME in it."""
    from sinkscope.options.register import records  # imports pydantic

    core = {name: (__name__, f".{place}") for name, place in _CORE.items()}
    return core | {name: (one.folder, place) for one in records().values() for name, place in one.public.items()}


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("sinkscope")
        if name == "__all__":
            return sorted(_places().keys() - {"list"})  # `from sinkscope import *` leaves Python's own list alone
        places = {} if name.startswith("_") else _places()
        if name not in places:
            raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
        from sinkscope.plugins import load_plugins

        package, place = places[name]
        module, _, attribute = place.partition(":")
        state = random.getstate()  # rich draws a number when it is imported
        try:
            load_plugins()  # so that every register is complete
            return getattr(import_module(module, package), attribute)
        finally:
            random.setstate(state)

    def __dir__():
        return sorted([*_places(), "__version__"])
