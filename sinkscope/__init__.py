"""Attention sinks, massive activations and value drains of any pretrained HuggingFace causal language model.

    import sinkscope
    run = sinkscope.analyze("HuggingFaceTB/SmolLM2-135M")
    run.tables["attention"]
    run.figure("sink-map")

The verbs are those of the command line. They are imported when first used: `sinkscope --help` needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "analyze": "sinkscope.commands.analyze",
    "analyze_steps": "sinkscope.commands.series",
    "intervene": "sinkscope.commands.intervene",
    "intervening": "sinkscope.interventions",
    "quantize": "sinkscope.commands.quantize",
    "quantised": "sinkscope.quantization.simulation",
    "calibrate_ranges": "sinkscope.quantization.calibration",
    "load": "sinkscope.commands.load",
    "retrofit": "sinkscope.commands.retrofit",
    "train": "sinkscope.commands.train",
    "retrofit_model": "sinkscope.retrofits",
    "new_parameters": "sinkscope.retrofits",
    "gate_displacement": "sinkscope.retrofits",
    "compare": "sinkscope.report.comparison",
    "doctor": "sinkscope.commands.doctor",
    "run_recipe": "sinkscope.commands.run",
    "Run": "sinkscope.report.run",
    "Series": "sinkscope.commands.series",
    "InputError": "sinkscope.errors",
    "SinkscopeError": "sinkscope.errors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
