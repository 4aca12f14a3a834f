"""Complete commands on a few random texts, whose launches, waits and copies are counted."""

from collections.abc import Callable
from typing import Any

from tiny import tiny_tokens
from transformers import PreTrainedModel

import sinkscope

ON_TEXTS: dict[str, Any] = {"input": "random", "num_seqs": 8, "seq_len": 64}


def watch_two_batches(model: PreTrainedModel) -> None:
    with sinkscope.watch(model):
        for seed in (0, 1):
            model(tiny_tokens(8, 64, seed=seed).to(model.device))


COUNTED_COMMANDS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "analyze": lambda model: sinkscope.analyze(model, **ON_TEXTS),
    "gradients": lambda model: sinkscope.analyze(model, observables="gradient", **ON_TEXTS),
    "watch": watch_two_batches,
    "quantize": lambda model: sinkscope.quantize(model, scheme="static", calibration=8, **ON_TEXTS),
    "formats": lambda model: sinkscope.quantize(model, scheme="W8A8", calibration=8, **ON_TEXTS),
    "kv-plan": lambda model: sinkscope.kv_plan(model, **ON_TEXTS | {"seq_len": 128, "num_seqs": 1}),
}
