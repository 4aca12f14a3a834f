"""What is recorded while a model is trained: losses, rates, gates, and what a probe measures."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback

from sinkscope.errors import SinkscopeError
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.retrofits import gate_displacement

Probe = Callable[[PreTrainedModel], pd.DataFrame]  # → layer (−1: the whole model), metric, value
LOGGED = {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "gradient_norm"}  # the Trainer's → ours


class Recorder(TrainerCallback):
    """Adds to each log of the Trainer, which its checkpoints keep, how far the gates have moved and what the probe
    measures. A loss that is not finite ends the training.
    """

    def __init__(self, model: PreTrainedModel, probe: Probe | None) -> None:
        self.model = model
        self.probe = probe

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.probe is not None and state.global_step == 0:
            state.log_history.append({"step": 0})
            self._measure(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Log at every checkpoint, too: a loss is the mean since the last log, which a checkpoint does not keep."""
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" not in logs:  # the Trainer's last log, of times
            return
        if not math.isfinite(logs["loss"]):
            raise SinkscopeError(
                f"the loss is {logs['loss']} at step {state.global_step}: take smaller learning rates, or more warmup"
            )
        moved = gate_displacement(self.model)
        state.log_history[-1]["gates"] = [
            [int(layer), float(distance.mean()), float(distance.max())]
            for layer, distance in moved.groupby("layer")["displacement"]
        ]
        self._measure(state)

    def _measure(self, state: Any) -> None:
        """Run the probe so that the training does not depend on it: in eval mode, with random numbers of its own."""
        if self.probe is None or not state.is_world_process_zero:
            return
        self.model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            found = self.probe(self.model)
        self.model.train()
        state.log_history[-1]["probe"] = [
            [int(row.layer), str(row.metric), float(row.value)] for row in found.itertuples()
        ]


class Bar(ProgressCallback):
    """The Trainer's progress bar, with the last log beside it instead of above."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            shown = {"loss": f"{logs['loss']:.3f}"}
            gates = state.log_history[-1].get("gates")
            if gates:
                shown["gates"] = f"{max(most for _, _, most in gates):.3g}"
            self.training_bar.set_postfix(shown)


def history(logs: list[dict[str, Any]]) -> pd.DataFrame:
    """The Trainer's logs as a table: layer (−1: the whole model), step, metric, value."""
    rows: list[tuple[int, int, str, float]] = []
    for log in logs:
        step = int(log["step"])
        rows += [(WHOLE_MODEL, step, name, float(log[key])) for key, name in LOGGED.items() if key in log]
        for layer, mean, most in log.get("gates", ()):
            rows.append((layer, step, "gate_displacement_mean", mean))
            rows.append((layer, step, "gate_displacement_max", most))
        rows += [(layer, step, metric, value) for layer, metric, value in log.get("probe", ())]
    return pd.DataFrame(rows, columns=["layer", "step", "metric", "value"])
