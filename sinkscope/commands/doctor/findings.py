"""The findings of `doctor --dtype`: whether a model overflows in a dtype, and what scales, a clip or a rescaling cost.

The cost of float8 with the scales of served formats decides; an overflow of its plain cast is a note.
"""

from collections.abc import Iterator, Sequence
from math import isfinite, isnan
from typing import Any

import pandas as pd

from sinkscope.commands.doctor import overflow
from sinkscope.models.projections import NO_LAYER
from sinkscope.results.findings import FLOAT8_COST, HEADROOM, Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report, layers_text, with_interval

OVERFLOW, INSIDE, REMEDIES, SERVED = "Overflow", "Inside norms and attention", "Remedies", "Scaled as served"
NATS = METRICS["cost"].text


def report(run: RunData) -> Report:
    title = f"{run.model}: {run.manifest['overflow']['dtype']}, {run.reads}"
    return Report(title, settings(run), overview(run), findings(run))


def overview(run: RunData) -> pd.DataFrame:
    runs = run.tables["overflow_runs"]
    first = [place(row) if row.site else "–" for row in runs.itertuples()]
    costs = {name: [_nats(x) for x in runs[name]] for name in ("loss", "cost", "divergence")}
    return pd.DataFrame({"setting": runs["setting"], "dtype": runs["dtype"], **costs, "first not finite": first})


def place(row: Any) -> str:
    """Return for example "layer_out of layer 7", or the path of a module outside the layers."""
    return row.site if row.layer == NO_LAYER else f"{row.site} of layer {row.layer}"


def _nats(x: float) -> str:
    return "–" if isnan(x) else NATS(x)


def _number(x: float) -> str:
    return f"{x:,.0f}" if 10 <= x < 1e7 else f"{x:.2g}"


def _location(row: Any) -> str:
    where = [f"coordinate {row.coordinate}"] if row.coordinate >= 0 else []
    where += [f"position {row.position}, token {row.token!r}"] if row.position >= 0 else []
    return f"{place(row)} ({', '.join(where)})" if where else place(row)


def _run(run: RunData, setting: str, dtype: str) -> Any:
    """Return the row of a setting in a dtype; None if it was not run."""
    runs = run.tables["overflow_runs"].query("setting == @setting and dtype == @dtype")
    return next(runs.itertuples(), None)


def findings(run: RunData) -> list[Finding]:
    """Return the findings on overflow, then on numbers inside norms and attention, and on remedies."""
    dtype, limit = run.manifest["overflow"]["dtype"], run.manifest["overflow"]["limit"]
    table, runs = run.tables["overflow"].sort_values("order"), run.tables["overflow_runs"]
    outside = table.query("not is_inside")
    largest = next(outside.loc[[outside["largest"].idxmax()]].itertuples())
    predicted, as_run = next(outside[outside["overflows"]].itertuples(), None), _run(run, overflow.FULL, dtype)
    is_float8 = dtype.startswith("float8")
    what = f"{dtype} without scales" if is_float8 else dtype
    numbers: dict[str, Any] = {"limit": limit, "largest": largest.largest, "layer": largest.layer}
    is_near = largest.headroom < HEADROOM
    if predicted is None:
        sentence = f"The largest number is {_number(largest.largest)}, at {_location(largest)}: "
        sentence += f"{_number(largest.headroom)} × below {dtype}'s limit of {_number(limit)}"
        sentence += f", less than {HEADROOM:g} ×, so that other text may overflow" if is_near else ""
    else:
        numbers |= {"first_layer": predicted.layer, "coordinate": predicted.coordinate, "position": predicted.position}
        sentence = f"{what} overflows: {_number(predicted.largest)} at {_location(predicted)} is the first number "
        sentence += f"beyond its limit of {_number(limit)}; the largest is {_number(largest.largest)}, at "
        sentence += place(largest)
    how = "with the inputs of linear layers rounded to it" if is_float8 else "run in it"
    if as_run.site:
        is_same = predicted is not None and predicted.layer == as_run.layer
        sentence += (
            f"; {how}, {place(as_run)} is the first that is not finite, {'as' if is_same else 'unlike'} predicted"
        )
        stream = table[~table["is_finite"] & table["site"].isin(overflow.RESIDUAL_STREAM)]["layer"].unique()
        sentence += f", and neither is the residual stream of {layers_text(stream)}" if len(stream) else ""
    else:
        sentence += f"; {how}, every number is finite{', unlike predicted' if predicted is not None else ''}"
        sentence += "" if isnan(as_run.cost) else f", and it costs {NATS(as_run.cost)} nats per token"
    outcome = Outcome.WEAK if is_near else Outcome.ABSENT
    outcome = Outcome.PRESENT if predicted is not None or as_run.site else outcome
    about: dict[str, Any] = {"threshold": 1.0, "numbers": numbers, "sentence": f"{sentence}."}
    rows = [_scaled(run, dtype)] if is_float8 else []
    name = "overflow-unscaled" if is_float8 else "overflow"
    rows.append(Finding(name, OVERFLOW, outcome, largest.headroom, is_headline=not is_float8, **about))
    if (decomposed := _run(run, overflow.DECOMPOSED, dtype)) is not None:
        rows += _overflowing_norms(table, dtype, decomposed)
    if len(products := table[table["site"] == overflow.QK]):
        worst = next(products.nlargest(1, "largest").itertuples())
        scaled = float(table[table["site"] == overflow.SCALED_QK]["largest"].max())
        outcome = Outcome.WEAK if worst.overflows else Outcome.ABSENT
        sentence = f"The largest q·k is {_number(worst.largest)} before scaling (layer {worst.layer}) and "
        sentence += f"{_number(scaled)} after it"
        sentence += f": scale queries first where a kernel keeps it in {dtype}." if worst.overflows else "."
        about = {"numbers": {"largest": worst.largest, "scaled": scaled, "layer": worst.layer}, "sentence": sentence}
        rows.append(Finding("overflow-qk", INSIDE, outcome, worst.headroom, threshold=1.0, **about))
    clips = table.dropna(subset=["clip"])["layer"].unique()
    for setting in (overflow.CLIPPED, overflow.RESCALED):
        if (row := _run(run, setting, dtype)) is not None:
            plain = next(runs.query("setting == @setting and dtype != @dtype").itertuples(), None)
            rows.append(_remedy(row, plain, clips))
    for setting, reason in run.manifest["overflow"]["refused"].items():
        sentence, numbers = f"No rescaling of the residual stream: {reason}.", {"what": setting, "reason": reason}
        rows.append(Finding("not-measured", REMEDIES, numbers=numbers, sentence=sentence))
    return rows


def _scaled(run: RunData, dtype: str) -> Finding:
    """Return what float8 costs with a scale for each output channel and each token."""
    row, cost = _run(run, overflow.SCALED, dtype), Estimate.of_columns(run.tables["overflow_scaled"].iloc[0], "cost")
    outcome, below = Outcome.UNDECIDED, "not shown to be below"
    if row.site or cost.low >= FLOAT8_COST:
        outcome, below = Outcome.PRESENT, "not below"
    elif cost.high < FLOAT8_COST:
        outcome, below = Outcome.ABSENT, "below"
    ending = f"costs {with_interval(cost, 'z.3f')} nats per token, {below} the threshold of {FLOAT8_COST:g}"
    if row.site or isnan(cost.value):
        ending = f"is not finite from {place(row)} on" if row.site else "is finite; there is no loss to show its cost"
    sentence = f"With a scale for each output channel of a weight and each token, as served, {dtype} "
    about: dict[str, Any] = {"low": cost.low, "high": cost.high, "threshold": FLOAT8_COST, "is_headline": True}
    return Finding("float8", SERVED, outcome, cost.value, sentence=f"{sentence}{ending}.", **about)


def _overflowing_norms(table: pd.DataFrame, dtype: str, decomposed: Any) -> Iterator[Finding]:
    """Yield the norms whose squares overflow. A fused LayerNorm is often exported as single operations."""
    advices = {
        overflow.CENTERED: ("LayerNorm", Outcome.PRESENT, "keep them fused or in float32 when the model is exported"),
        overflow.SQUARE: ("RMSNorm", Outcome.WEAK, "transformers' code says float32, so keep that in a conversion"),
    }
    for kind, (what, outcome, advice) in advices.items():
        rows = table[table["site"].str.endswith(f" {kind}") & table["overflows"]]
        if rows.empty:
            continue
        first, largest = next(rows.itertuples()), rows["largest"].max()
        sentence = f"{what} squares numbers up to {_number(largest**0.5)}, which {dtype} cannot hold, from "
        sentence += f"{place(first).replace(f' {kind}', '')} on. torch computes norms in float32; decomposed in "
        sentence += f"{dtype}, their output is wrong{'' if decomposed.site else ' but finite'}"
        changed = f", which moves the next tokens of the text by {NATS(decomposed.divergence)} nats (Kullback–Leibler)"
        sentence += f"{changed if isfinite(decomposed.divergence) else ''}: {advice}."
        about: dict[str, Any] = {"threshold": 1.0, "sentence": sentence}
        about["numbers"] = {"largest": largest, "layer": first.layer, "divergence": decomposed.divergence}
        headroom = float(rows["headroom"].min())
        yield Finding("overflow-norms", INSIDE, outcome, headroom, **about)


def _remedy(row: Any, plain: Any, clips: Sequence[int]) -> Finding:
    """Return what a remedy costs in the dtype and, if it was run, in the model's own (`plain`)."""
    if row.setting == overflow.CLIPPED:
        what = f"Clamping the residual stream to ±{_number(row.factor)} in {layers_text(clips)}"
    else:
        what = f"Dividing by {row.factor:g} what enters the first layer (the embeddings, not their table, which the "
        what += "LM head may share) and what each branch adds to the residual stream (weight and bias of its last "
        what += "linear layer, or the output of its last norm), and the ε of the norms that read the stream by "
        what += f"{row.factor**2:g}"
    helps = isfinite(row.difference)
    numbers = {"factor": row.factor, "cost": row.cost} | ({} if plain is None else {"own_cost": plain.cost})
    sentence = f"{what} costs " + ("" if plain is None else f"{_nats(plain.cost)} nats per token in {plain.dtype}, ")
    sentence += (
        f"{_nats(row.cost)} in {row.dtype}." if helps else f"and {row.dtype} is not finite from {place(row)} on."
    )
    outcome = Outcome.PRESENT if helps else Outcome.ABSENT
    return Finding(f"overflow-{row.setting}", REMEDIES, outcome, row.cost, numbers=numbers, sentence=sentence)
