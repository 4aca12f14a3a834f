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
    from sinkscope.commands.show.command import page as page
    from sinkscope.commands.show.command import show as show
    from sinkscope.commands.steps.series import Series as Series
    from sinkscope.commands.sweep.command import sweep as sweep
    from sinkscope.commands.train.retrofit import retrofit as retrofit
    from sinkscope.commands.train.train import train as train
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

_RENAMED = {"list": "listing", "run": "run_recipe"}  # commands that have another name in their module
# module → the public names that it defines
_PUBLIC = {
    "commands.analyze": ("analyze", "analyze_steps", "spike_mask"),
    "commands.show": ("page", "show"),
    "commands.list": ("list",),
    "commands.run": ("run", "run_recipe"),
    **{f"commands.{name}": (name,) for name in ("benchmark", "card", "claims", "doctor", "intervene", "kv_plan")},
    **{f"commands.{name}": (name,) for name in ("load", "quantize", "retrofit", "sweep", "train")},
    "errors": ("InputError", "SinkscopeError"),
    "measuring.intervening": ("intervening",),
    "measuring.quantization_study": ("calibrate_ranges",),
    "measuring.watching": ("watch",),
    "output.run": ("Run",),
    "output.series": ("Series",),
    "output.side_by_side": ("compare",),
    "quantization.simulation": ("quantized",),
    "retrofits": ("gate_displacement", "new_parameters", "retrofit_model"),
    "training.callback": ("SinkCallback",),
    "verdict.scorecard": ("Scorecard",),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_MODULES.keys() - {"list"})  # `from sinkscope import *` leaves Python's own list alone

if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("sinkscope")
        if name not in _MODULES:
            raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
        state = random.getstate()  # rich draws a number when it is imported
        try:
            module = import_module(f"sinkscope.{_MODULES[name]}")
        finally:
            random.setstate(state)
        return getattr(module, _RENAMED.get(name, name))

    def __dir__():
        return sorted([*_MODULES, "__version__"])
