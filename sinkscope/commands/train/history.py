"""The record of a training: losses, learning rates, gates, and measurements of a probe (sink rates, total weights)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, TrainerCallback

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.train.tasks import TrainingTask
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.callback import SEQUENCES, run_probe
from sinkscope.measuring.measure import measure
from sinkscope.measuring.observables.attention import Attention
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.family import Family, vocabulary
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import SEQ_LEN, make_config
from sinkscope.results.findings import FEWEST_QUERIES
from sinkscope.results.metrics import is_sink, lacks_rate
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.retrofits import gate_displacement
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs, masked

Probe = Callable[[PreTrainedModel], pd.DataFrame]  # → layer (−1: the whole model), metric, value
NAMES_OF_LOGS = {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "gradient_norm"}  # the Trainer's → ours


class Recorder(TrainerCallback):
    """Adds the displacement of the gates and the measurements of the probe to each log of the Trainer, which is kept in
    checkpoints. Ends the training if the loss is not finite.
    """

    def __init__(self, model: PreTrainedModel, probe: Probe | None) -> None:
        self.model = model
        self.probe = probe

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.probe is not None and state.global_step == 0:
            state.log_history.append({"step": 0})
            self._measure(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Forget the last step's weights in bfloat16, which a block of autocast around the training would keep."""
        torch.clear_autocast_cache()  # the end of a step's own block clears it only if no other is around it

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Also log at every checkpoint: a loss is the mean since the last log, which a checkpoint does not keep."""
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" not in logs:  # the Trainer's last log, which contains only times
            return
        if not math.isfinite(logs["loss"]):
            raise SinkscopeError(
                f"the loss is {logs['loss']} at step {state.global_step}: take smaller learning rates, or more warmup"
            )
        state.log_history[-1]["measured"] = [
            [int(layer), f"gate_displacement_{name}", float(value)]
            for layer, moved in gate_displacement(self.model).groupby("layer")["displacement"]
            for name, value in (("mean", moved.mean()), ("max", moved.max()))
        ]
        self._measure(state)

    def _measure(self, state: Any) -> None:
        if self.probe is not None and state.is_world_process_zero:
            table = run_probe(self.model, self.probe)
            rows = zip(table["layer"], table["metric"], table["value"], strict=True)
            log = state.log_history[-1].setdefault("measured", [])
            log += [[int(layer), str(name), float(value)] for layer, name, value in rows]


class TrainingBar(ProgressCallback):
    """The Trainer's progress bar, with the last log next to it instead of above."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            measured = state.log_history[-1].get("measured", ())
            gates = [value for _, name, value in measured if name == "gate_displacement_max"]
            moved = {"gates": f"{max(gates):.3g}"} if gates else {}
            self.training_bar.set_postfix({"loss": f"{logs['loss']:.3f}"} | moved)


def history(logs: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the Trainer's logs as a table: layer (−1: the whole model), step, metric, value."""
    rows: list[tuple[int, int, str, float]] = []
    for log in logs:
        step = int(log["step"])
        rows += [(WHOLE_MODEL, step, name, float(log[key])) for key, name in NAMES_OF_LOGS.items() if key in log]
        rows += [(layer, step, metric, value) for layer, metric, value in log.get("measured", ())]
    return pd.DataFrame(rows, columns=["layer", "step", "metric", "value"])


def measure_at_log(
    model: PreTrainedModel,
    family: Family,
    held_out: np.ndarray,
    epsilon: float,
    task: TrainingTask | None = None,
    position: int = 0,
    observables: tuple[str, ...] = (),
    masked_by: PreTrainedTokenizerBase | None = None,
) -> pd.DataFrame:
    """Measure a model on held-out blocks (N,T) at step 0 and at every log of its training: layer, metric, value.

    These are the measurements of a task, sink rates at a position, and the metrics of observables, as `analyze` has
    them, on the beginnings of the blocks. The loss, which the tables of a training have of the training batches, is
    `held_out_loss` here; an encoder's is of tokens that are masked by its tokenizer.
    """
    parts = [] if task is None else [task.probe(model, family, held_out)]
    parts.append(sinks_and_weights(model, family, held_out, epsilon, position))
    if observables:
        sequences = tuple(held_out[:SEQUENCES, :SEQ_LEN])
        hidden = masked(sequences, masked_by, vocabulary(model), 0) if masked_by else None
        inputs = TokenInputs("held-out", sequences, "", "", masked=hidden)
        subject = Subject(LoadedModel(model, masked_by, "", "", None, None, ()), family, inputs)
        sizes = {"num_seqs": len(sequences), "seq_len": len(sequences[0])}
        with torch.enable_grad():  # observables of the backward pass need gradients
            tables, _ = measure(subject, make_config(observables=observables, epsilon=epsilon, **sizes))
        metrics = tables["summary"][["layer", "metric", "value"]].replace({"metric": {"loss": "held_out_loss"}})
        if not (metrics["metric"] == "held_out_loss").any():  # only a backward pass has computed it
            pairs = hidden or zip(sequences, sequences, strict=True)
            ids, labels = (torch.from_numpy(np.stack(part)).to(model.device) for part in zip(*pairs, strict=True))
            with torch.no_grad():
                loss = float(model(ids, labels=labels, use_cache=False).loss)
            metrics.loc[len(metrics)] = WHOLE_MODEL, "held_out_loss", loss
        # the rate of position 0 is not that of another position, also where that one has none
        parts.append(metrics[~metrics["metric"].isin(["perplexity", *["sink_rate"] * (position > 0)])])
    return pd.concat(parts, ignore_index=True).drop_duplicates(["layer", "metric"])


@torch.no_grad()
def sinks_and_weights(
    model: PreTrainedModel, family: Family, held_out: np.ndarray, epsilon: float, position: int = 0
) -> pd.DataFrame:
    """Measure the sink rate at a position of blocks (N,T), not counting register tokens, and `TotalWeight`, of a model
    in eval mode. With a sliding window, only the tokens that see the first one are measured. Returns layer (−1: the
    whole model), metric, value; without a row if no attention to the position is measured.
    """
    before = registers_before(model)
    seen = getattr(model.config.get_text_config(), "sliding_window", None) or SEQ_LEN
    ids = torch.from_numpy(held_out[:SEQUENCES, : min(SEQ_LEN, max(1, seen - before))])
    if not family.has_attention or position >= ids.shape[1]:
        return pd.DataFrame(columns=["layer", "metric", "value"])
    index = before + position
    settings = Settings(positions=index + 1, window=before + ids.shape[1], epsilon=epsilon)
    attention, total = Attention(settings), TotalWeight(settings, index)
    with open_tracer(model, family) as tracer:
        tracer.forward(Batch(ids, torch.ones_like(ids)), [attention, total])
    by_layer = attention.tables()["attention"].query("position == @index").groupby("layer")["sink_rate"].mean()
    rates = [(layer, "sink_rate", rate) for layer, rate in (*by_layer.items(), (WHOLE_MODEL, by_layer.mean()))]
    return pd.DataFrame([*rates, *total.rows()], columns=["layer", "metric", "value"])


class TotalWeight(Observable):
    """Measures Σ|sim ÷ Z| of a query over the tokens that it sees: the total factor of their values.

    It is 1 for softmax (less with a learned key) and for every operation that is divided by its own sum. For other
    operations it may be close to 0, and the proxy |sim| ÷ Σ|sim| then means little. Therefore the median is taken over
    the queries after one token, mostly the first, in all heads and sequences, and also over the queries that give this
    token a share above ε. The value of the whole model is over the queries of all layers.

    A sink rate by total weight takes a token's share of the weight of all its queries together, Σ_t w[t,s] ÷ Σ_t W[t],
    which for softmax is the usual mean of shares: queries that attend to almost nothing then count almost nothing.
    """

    name = "total-weight"
    sites = ("attention",)

    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings)
        self.index = index  # index of the token
        # layer → total weight of each query, and whether its share on the token is above ε; and by head and sequence,
        # whether by total weight the token is a sink, and whether any token with enough queries is
        self.seen: dict[int, tuple[np.ndarray, ...]] = {}

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        rows, later = slice(0, read.length), slice(self.index + 1, None)
        weights = upcast(read.mix_weights(rows, rows).abs())
        total, received = weights.sum(-1), weights.sum(-2)
        of_queries = total.flip(-1).cumsum(-1).flip(-1)  # the total weight of the queries of each key
        seen_by_all = read.call.prefix if read.call.causal else read.length  # also by queries before them
        of_queries[..., :seen_by_all] = total.sum(-1, keepdim=True)
        uniform = batch.uniform(read.length, read.length, read.call.causal, read.call.prefix)[0].to(of_queries)
        tiny = torch.finfo(of_queries.dtype).tiny
        sinks = is_sink(received / of_queries.clamp(min=tiny), self.settings.epsilon).double()
        sinks = sinks.masked_fill(lacks_rate(uniform, self.settings.epsilon), torch.nan)
        with_queries = max(self.index + 1, read.length - FEWEST_QUERIES + 1) if read.call.causal else read.length
        anywhere = sinks[..., :with_queries]
        anywhere = torch.where(anywhere.isnan().all(-1), torch.nan, anywhere.nan_to_num().amax(-1))
        share = read.weights(rows, slice(self.index, self.index + 1))[0][..., later, 0]
        chosen = is_sink(share, self.settings.epsilon)
        parts = (total[..., later], chosen, sinks[..., self.index], anywhere)
        self.seen[layer] = tuple(part.flatten().cpu().numpy() for part in parts)

    def rows(self) -> list[tuple[int, str, float]]:
        """Return layer (−1: the whole model), metric, value, where there are queries."""
        whole = tuple(np.concatenate(parts) for parts in zip(*self.seen.values(), strict=True))
        return [
            (layer, name, float(of(values)))
            for layer, (total, chosen, first, anywhere) in (*self.seen.items(), (WHOLE_MODEL, whole))
            for name, values, of in (
                ("total_weight", total, np.median),
                ("total_weight_at_sink", total[chosen], np.median),
                ("sink_rate_by_weight", first, np.mean),
                ("sink_rate_by_weight_anywhere", anywhere, np.mean),
            )
            if len(values)
        ]
