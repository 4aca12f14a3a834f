"""Attention sinks, massive activations and value drains of any pretrained HuggingFace causal language model.

    import sinkscope
    run = sinkscope.analyze("HuggingFaceTB/SmolLM2-135M")
    run.tables["attention"]
    run.figure("sink-map")

The verbs are those of the command line. They are imported when first used: `sinkscope --help` needs no torch.
"""

from importlib import import_module
from typing import Any

from sinkscope.model_types import teach_transformers

_HOME = {
    "analyze": "sinkscope.analysis",
    "analyze_steps": "sinkscope.training_view",
    "intervene": "sinkscope.experiment",
    "intervening": "sinkscope.interventions",
    "quantize": "sinkscope.quantisation.experiment",
    "quantised": "sinkscope.quantisation.simulation",
    "calibrate_ranges": "sinkscope.quantisation.calibration",
    "load": "sinkscope.loading",
    "retrofit": "sinkscope.retrofitting",
    "train": "sinkscope.pretraining",
    "retrofit_model": "sinkscope.retrofits",
    "new_parameters": "sinkscope.retrofits",
    "gate_displacement": "sinkscope.retrofits",
    "compare": "sinkscope.comparison",
    "doctor": "sinkscope.diagnosis",
    "run_recipe": "sinkscope.recipes",
    "Run": "sinkscope.run",
    "Series": "sinkscope.training_view",
    "InputError": "sinkscope.errors",
    "SinkscopeError": "sinkscope.errors",
}
__all__ = sorted(_HOME)

teach_transformers()  # so that AutoModelForCausalLM.from_pretrained knows retrofitted models


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sinkscope' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
