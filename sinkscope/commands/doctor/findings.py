"""The findings of `doctor --dtype`: whether a model overflows in a dtype, and what a clip and a rescaling cost."""

from collections.abc import Iterator
from math import isfinite, isnan
from typing import Any

import pandas as pd

from sinkscope.commands.doctor.overflow import (
    CENTERED,
    CLIPPED,
    DECOMPOSED,
    FULL,
    QK,
    RESCALED,
    SCALED_QK,
    SQUARE,
    STREAM,
)
from sinkscope.models.projections import NO_LAYER
from sinkscope.results.findings import HEADROOM, Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report, layers_text

OVERFLOW, INSIDE, REMEDIES = "Overflow", "Inside norms and attention", "Remedies"
NATS = METRICS["cost"].text


def report(run: RunData) -> Report:
    title = f"{run.model}: {run.manifest['overflow']['dtype']}, {run.reads}"
    return Report(title, settings(run), overview(run), findings(run))


def overview(run: RunData) -> pd.DataFrame:
    runs = run.tables["overflow_runs"]
    first = [place(row) if row.site else "–" for row in runs.itertuples()]
    costs = {name: [_nats(x) for x in runs[name]] for name in ("loss", "cost", "divergence")}
    return pd.DataFrame({"setting": runs["setting"], "dtype": runs["dtype"], **costs, "first not finite": first})


def findings(run: RunData) -> list[Finding]:
    return [*_overflow(run), *_norms(run), *_logits(run), *_remedies(run)]


def place(row: Any) -> str:
    """Return for example "layer_out of layer 7", or the path of a module outside the layers."""
    return row.site if row.layer == NO_LAYER else f"{row.site} of layer {row.layer}"


def _nats(x: float) -> str:
    return "–" if isnan(x) else NATS(x)


def _number(x: float) -> str:
    return f"{x:,.0f}" if 10 <= x < 1e7 else f"{x:.2g}"


def _where(row: Any) -> str:
    at = [f"coordinate {row.coordinate}"] if row.coordinate >= 0 else []
    at += [f"position {row.position}, token {row.token!r}"] if row.position >= 0 else []
    return f"{place(row)} ({', '.join(at)})" if at else place(row)


def _run(run: RunData, setting: str, dtype: str) -> Any:
    """Return the row of a setting in a dtype; None if it was not run."""
    runs = run.tables["overflow_runs"].query("setting == @setting and dtype == @dtype")
    return next(runs.itertuples(), None)


def _overflow(run: RunData) -> Iterator[Finding]:
    dtype, limit = run.manifest["overflow"]["dtype"], run.manifest["overflow"]["limit"]
    table = run.tables["overflow"].query("not is_inside").sort_values("order")
    largest = next(table.loc[[table["largest"].idxmax()]].itertuples())
    too_large, as_run = table[table["overflows"]], _run(run, FULL, dtype)
    predicted = next(too_large.itertuples(), None)
    numbers: dict[str, Any] = {"limit": limit, "largest": largest.largest, "layer": largest.layer}
    if predicted is None:
        sentence = f"The largest number is {_number(largest.largest)}, at {_where(largest)}: "
        sentence += f"{_number(largest.headroom)} × below {dtype}'s limit of {_number(limit)}"
        sentence += (
            f", less than {HEADROOM:g} ×, so that other text may overflow" if largest.headroom < HEADROOM else ""
        )
    else:
        numbers |= {"first_layer": predicted.layer, "coordinate": predicted.coordinate, "position": predicted.position}
        sentence = f"{dtype} overflows: {_number(predicted.largest)} at {_where(predicted)} is the first number beyond "
        sentence += f"its limit of {_number(limit)}; the largest is {_number(largest.largest)}, at {place(largest)}"
    sentence += _as_run(run, dtype, predicted, as_run)
    outcome = Outcome.PRESENT if predicted is not None or as_run.site else Outcome.ABSENT
    outcome = Outcome.WEAK if outcome == Outcome.ABSENT and largest.headroom < HEADROOM else outcome
    about: dict[str, Any] = {"threshold": 1.0, "numbers": numbers, "is_headline": True, "sentence": f"{sentence}."}
    yield Finding("overflow", OVERFLOW, outcome, largest.headroom, **about)


def _as_run(run: RunData, dtype: str, predicted: Any, as_run: Any) -> str:
    """Say what the run in the dtype showed, next to the prediction."""
    how = "with the inputs of linear layers rounded to it, unscaled" if dtype.startswith("float8") else "run in it"
    if not as_run.site:
        cost = "" if isnan(as_run.cost) else f", and it costs {NATS(as_run.cost)} nats per token"
        return f"; {how}, every number is finite{', unlike predicted' if predicted is not None else ''}{cost}"
    table = run.tables["overflow"]
    stream = table[~table["is_finite"] & table["site"].isin(STREAM)]["layer"].unique()
    is_same = predicted is not None and predicted.layer == as_run.layer
    text = f"; {how}, {place(as_run)} is the first that is not finite, {'as' if is_same else 'unlike'} predicted"
    return text + (f", and neither is the residual stream of {layers_text(stream)}" if len(stream) else "")


def _norms(run: RunData) -> Iterator[Finding]:
    """Yield the norms whose squares overflow. A fused LayerNorm is often exported as single operations."""
    dtype, table = run.manifest["overflow"]["dtype"], run.tables["overflow"]
    row = _run(run, DECOMPOSED, dtype)
    if row is None:
        return
    for kind, what in ((CENTERED, "LayerNorm"), (SQUARE, "RMSNorm")):
        found = table[table["site"].str.endswith(f" {kind}") & table["overflows"]].sort_values("order")
        if found.empty:
            continue
        first, largest = next(found.itertuples()), found["largest"].max()
        is_alarm = kind == CENTERED
        sentence = f"{what} squares numbers up to {_number(largest**0.5)}, which {dtype} cannot hold, from "
        sentence += f"{place(first).replace(f' {kind}', '')} on. torch computes norms in float32; decomposed in "
        sentence += f"{dtype}, their output is wrong"
        sentence += " but finite" if not row.site else ""
        changed = f", which moves the next tokens by {NATS(row.divergence)} nats (Kullback–Leibler)"
        sentence += changed if isfinite(row.divergence) else ""
        sentence += (
            ": keep them fused or in float32 when the model is exported."
            if is_alarm
            else (": transformers' code says float32, so keep that in a conversion.")
        )
        outcome = Outcome.PRESENT if is_alarm else Outcome.WEAK
        numbers = {"largest": largest, "layer": first.layer, "divergence": row.divergence}
        headroom = float(found["headroom"].min())
        yield Finding("overflow-norms", INSIDE, outcome, headroom, threshold=1.0, numbers=numbers, sentence=sentence)


def _logits(run: RunData) -> Iterator[Finding]:
    dtype, table = run.manifest["overflow"]["dtype"], run.tables["overflow"]
    of_attention = {kind: table[table["site"] == kind] for kind in (QK, SCALED_QK)}
    if of_attention[QK].empty:
        return
    worst = next(of_attention[QK].nlargest(1, "largest").itertuples())
    scaled = float(of_attention[SCALED_QK]["largest"].max())
    outcome = Outcome.WEAK if worst.overflows else Outcome.ABSENT
    sentence = f"The largest q·k is {_number(worst.largest)} before scaling (layer {worst.layer}) and "
    sentence += f"{_number(scaled)} after it"
    sentence += f": scale queries first where a kernel keeps it in {dtype}." if worst.overflows else "."
    numbers = {"largest": worst.largest, "scaled": scaled, "layer": worst.layer}
    yield Finding("overflow-qk", INSIDE, outcome, worst.headroom, threshold=1.0, numbers=numbers, sentence=sentence)


def _remedies(run: RunData) -> Iterator[Finding]:
    dtype = run.manifest["overflow"]["dtype"]
    is_float8 = dtype.startswith("float8")
    for setting in (CLIPPED, RESCALED):
        row = _run(run, setting, dtype)
        if row is None:
            continue
        others = run.tables["overflow_runs"].query("setting == @setting and dtype != @dtype")
        own = next(others.itertuples(), None)
        if setting == CLIPPED:
            layers = run.tables["overflow"].dropna(subset=["clip"])["layer"].unique()
            what = f"Clamping the residual stream to ±{_number(row.factor)} in {layers_text(layers)}"
            what = f"Clamping the inputs of linear layers to ±{_number(row.factor)}" if is_float8 else what
        else:
            what = (
                f"Dividing by {row.factor:g} what enters the first layer (the embeddings, not their table, which the "
            )
            what += "LM head may share) and what each branch adds to the residual stream (weight and bias of its last "
            what += "linear layer, or the output of its last norm), and the ε of the norms that read the stream by "
            what += f"{row.factor**2:g}"
            what = "A scale for each linear layer's input, a power of two" if is_float8 else what
        cost = [f"{_nats(own.cost)} nats per token in {own.dtype}"] if own is not None else []
        helps = isfinite(row.difference)
        cost += [f"{_nats(row.cost)} in {dtype}" if helps else f"and {dtype} is not finite from {place(row)} on"]
        numbers = {"factor": row.factor, "cost": row.cost} | ({} if own is None else {"own_cost": own.cost})
        sentence = f"{what} costs {', '.join(cost)}."
        outcome = Outcome.PRESENT if helps else Outcome.ABSENT
        name = f"overflow-{setting}"
        yield Finding(name, REMEDIES, outcome, row.cost, numbers=numbers, sentence=sentence)
    for setting, reason in run.manifest["overflow"]["refused"].items():
        numbers = {"what": setting, "reason": reason}
        sentence = f"No rescaling of the residual stream: {reason}."
        yield Finding("not-measured", REMEDIES, numbers=numbers, sentence=sentence)
