"""The order in which the sink, the norm and the value gradient of position 0 appear in a training.

Three quantities of each checkpoint:

value_gradient   value gradient at position 0 ÷ at positions 5–15, norms averaged over layers (GS fig. 2), ÷ its null:
                 the same ratio under uniform causal attention, or that of step 0 if it was measured and is larger
norm             ‖h₀‖ ÷ norm at positions 5–15 of a layer's output, in the layer where this is largest
sink_rate        sink rate at position 0 in %, mean over layers

The onset is the first measured step from which on a quantity stays beyond its threshold. The threshold of the sink rate
is SINK. That of the others is halfway, on the scale of logarithms, between their values at the first and the last step;
they have an onset only if these two values differ (the interval of the difference does not contain 0). An onset at the
first step means «at or before it», an infinite onset «not by the last step».

The delay between two onsets is the difference of their log₁₀(step + 1). Steps between two checkpoints are
unknown, so that onsets between the same two checkpoints have no order.

The lag correlation of X before Y is Pearson's correlation, over steps i, of the change of X from step i to i + 1 with
the change of Y from i + 1 to i + 2. The lead of X over Y is the lag correlation of X before Y minus that of Y before X.
Its null has the same changes of X and Y in a random order of the steps, the same order for both: it keeps how changes
are distributed and how those of one step belong together, and has neither order nor lead. Unrelated smooth curves are
outside its middle 95 % in less than 5 % of trials, curves of noise around a constant in 7 %.

All intervals are 95 % percentile intervals over resampled sequences. A gradient is a sum over sequences, so that a
sequence drawn twice would add its own noise twice (`jackknife` in results/statistics.py): groups of sequences are
resampled through their influence, which is the change of a value when the group is left out. A draw has the same groups
for all quantities and steps; all that the steps share, such as a difficult sequence, therefore drops out of a delay.
The intervals do not contain the spread over seeds of the training.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, permutations
from math import inf, isfinite, isinf, isnan, nan
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from sinkscope.measuring.estimates import gradient_ratios, norm_ratios, sink_rates
from sinkscope.measuring.observables.reductions import GROUPS
from sinkscope.results.findings import SINK, Finding, Outcome
from sinkscope.results.judgment import NotDefined
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import DRAWS, LEVEL, RESAMPLING_SEED, Estimate, bootstrap, resamplings
from sinkscope.results.tables import WHOLE_MODEL, Column

ONSET = "onset"
ONSET_COLUMNS = (
    Column("number", "course, threshold, onset, delay, lag, lead; or uniform or step-0, the null of value_gradient",
        kind="text"),
    Column("quantity", "value_gradient, norm or sink_rate; of a pair, the first", kind="text"),
    Column("other", "the second quantity of a pair; empty for a single one", kind="text"),
    Column("step", "of the training, for a course; -1: of no single step", kind="whole"),
    Column("value", "the number; an onset is a step, NaN: none, infinite: not by the last step"),
    Column("low", "lower end of its 95 % interval over sequences"),
    Column("high", "upper end"),
    Column("null_low", "lower end of the middle 95 % of its null, for a lead"),
    Column("null_high", "upper end"),
)  # fmt: skip
ONSET_TABLES = {ONSET: ONSET_COLUMNS}
FEWEST_STEPS = 8  # least number for lags: with fewer, the null reaches from almost -2 to 2
FEWEST_QUANTITIES = 2
UNIFORM, STEP_0 = "uniform", "step-0"
NULLS = {UNIFORM: "null: uniform attention", STEP_0: "null: step 0"}
SECTION = "Order in training"


class Quantity(NamedTuple):
    """One of the quantities, with its names in tables and sentences."""

    name: str  # its name in sentences
    title: str
    unit: str
    is_ratio: bool  # whether its values are compared as logarithms
    of: Callable[[Sequences], np.ndarray]  # (R,): the run's value, then those of resampled sequences


# fmt: off
QUANTITIES: Mapping[str, Quantity] = {
    "value_gradient": Quantity("value gradient", "value gradient ÷ null", "ratio", True,
        lambda sequences: gradient_ratios(sequences, "value")),
    "norm": Quantity("norm", "‖h₀‖ ÷ later norms", "ratio,\nlargest layer", True,
        lambda sequences: norm_ratios(sequences, "layer_out").max(1)),
    "sink_rate": Quantity("sink", "sink rate", "%", False, sink_rates),
}
# fmt: on


# --- a quantity of one run, and its course over S steps


class _LeftOut(Sequences):
    """The by-sequence tables of a run, without each group of its sequences."""

    @cached_property
    def weights(self) -> np.ndarray:
        """(1 + groups, N): 1 for every sequence in the first row, 0 for the sequences of a group in the others."""
        texts = self.run.text_numbers
        groups = np.arange(min(GROUPS, len(np.unique(texts))))
        return np.concatenate([np.ones((1, len(texts))), groups[:, None] != texts % GROUPS])


def left_out(run: RunData) -> dict[str, np.ndarray]:
    """Return quantity → (1 + groups,): its value, then without each group of sequences; without those not measured.

    Ratios are natural logarithms. The value gradient is not yet divided by its null.
    """
    sequences, by_quantity = _LeftOut(run), {}
    for name, quantity in QUANTITIES.items():
        try:
            values = quantity.of(sequences)
        except (Lacks, NotDefined):
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log(values) if quantity.is_ratio else values
        if np.isfinite(values).all():
            by_quantity[name] = values
    return by_quantity


def resampled(values: np.ndarray) -> np.ndarray:
    """(S, 1 + groups) values without each group → (1 + draws, S): the values themselves, then of resampled groups.

    Draw b is θ + c Σ_g (w_bg − 1) (θ̄ − θ_g), where group g counts w_bg times and θ_g is the value without it. Its
    variance is that of the jackknife if c = √((groups − 1) / groups); Student's factor for few groups is in c, too.
    """
    groups = values.shape[1] - 1
    influence = values[:, 1:].mean(1, keepdims=True) - values[:, 1:]
    student = stats.t.ppf((1 + LEVEL) / 2, groups - 1) / stats.norm.ppf((1 + LEVEL) / 2)
    scale = student * np.sqrt((groups - 1) / groups)
    return values[:, 0] + scale * (resamplings(groups, size=groups) - 1) @ influence.T


# --- onsets


def onset_of(course: np.ndarray, threshold: float | None = None) -> tuple[float, np.ndarray]:
    """Return the threshold of a curve (1 + draws, S), and the step from which on the curve stays beyond it.

    Without a threshold, that is halfway from the first to the last value. The second result (1 + draws,) has the index
    of the step in each draw, S if it is not by the last step; it is empty if there is no onset.
    """
    if threshold is not None:
        beyond = course > threshold
    else:
        change, halfway = course[:, -1] - course[:, 0], (course[:, -1] + course[:, 0]) / 2
        ends = bootstrap(change)
        if ends.low <= 0 <= ends.high:
            return nan, np.empty(0)
        threshold, beyond = float(halfway[0]), (course - halfway[:, None]) * np.sign(change)[:, None] > 0
    stays = np.logical_and.accumulate(beyond[:, ::-1], axis=1)  # from the last step backwards
    return threshold, course.shape[1] - stays.sum(1)


def steps_between(places: np.ndarray, steps: Sequence[int]) -> Estimate:
    """Return the step of an onset with its interval; NaN without an onset."""
    return _in_order(np.append(np.asarray(steps, float), inf)[places.astype(int)])


def delay(first: np.ndarray, second: np.ndarray, steps: Sequence[int]) -> Estimate:
    """Return log₁₀(step + 1) of the second onset minus that of the first, from their places; NaN if one has none."""
    if not len(first) or not len(second) or max(first[0], second[0]) == len(steps):
        return Estimate(nan, -inf, inf)
    logarithms = np.append(np.log10(np.asarray(steps, float) + 1), inf)
    with np.errstate(invalid="ignore"):
        apart = logarithms[second.astype(int)] - logarithms[first.astype(int)]
    return _in_order(np.where(first == second, 0.0, apart))


def _in_order(replicates: np.ndarray) -> Estimate:
    """Return the interval of (1 + draws,) replicates that are steps: its ends are drawn values, also infinite ones."""
    if not len(replicates):
        return Estimate(nan, nan, nan)
    drawn, tail = np.sort(replicates[1:]), (1 - LEVEL) / 2
    low, high = drawn[int(np.floor(tail * (len(drawn) - 1)))], drawn[int(np.ceil((1 - tail) * (len(drawn) - 1)))]
    return Estimate(float(replicates[0]), float(min(low, replicates[0])), float(max(high, replicates[0])))


# --- lags


def lag_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the correlation of changes (R, S − 1) with the other's changes one step later, (R,); NaN for constants."""
    x, y = first[:, :-1], second[:, 1:]
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (x * y).sum(1) / np.sqrt((x**2).sum(1) * (y**2).sum(1))


def lead(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the lag correlation of `first` before `second` minus that of `second` before `first`, (R,)."""
    return lag_correlation(first, second) - lag_correlation(second, first)


def lead_of(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Return the lead of a curve (1 + draws, S) over another, with the middle 95 % of its null."""
    x, y = np.diff(first), np.diff(second)
    random = np.random.default_rng(RESAMPLING_SEED)
    orders = random.permuted(np.tile(np.arange(x.shape[1]), (DRAWS, 1)), axis=1)
    low, high = np.quantile(lead(x[0][orders], y[0][orders]), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return replace(bootstrap(lead(x, y)), null_low=float(low), null_high=float(high))


# --- the table, from runs by step


class RunsByStep(list[tuple[int, RunData]]):
    """Runs in the order of their steps, and the table of their onsets."""

    def __init__(self, runs: Iterable[tuple[int, RunData]], onsets: pd.DataFrame | None = None) -> None:
        super().__init__(sorted(runs, key=lambda pair: pair[0]))
        self.onsets = onset_table(self) if onsets is None else onsets


def onset_table(runs: Sequence[tuple[int, RunData]]) -> pd.DataFrame:
    """Return the table `onset` of runs by step; no rows with fewer than FEWEST_QUANTITIES.

    It also has no rows for one step or one sequence, or if the steps did not read the same sequences, because these
    could not be resampled together.
    """
    runs = sorted(runs, key=lambda pair: pair[0])
    inputs = [run.manifest["input"] for _, run in runs]
    values: dict[str, np.ndarray] = {}  # quantity → (S, 1 + groups), see `left_out`
    if len(runs) > 1 and inputs[0]["sequences"] > 1 and len({read.get("sha256") for read in inputs}) == 1:
        by_step = [left_out(run) for _, run in runs]
        common = [name for name in QUANTITIES if all(name in of_step for of_step in by_step)]
        if len(common) >= FEWEST_QUANTITIES:
            values = {name: np.stack([of_step[name] for of_step in by_step]) for name in common}
    steps, rows = [step for step, _ in runs], list[tuple]()

    def add(number: str, estimate: Estimate, quantity: str, other: str = "", step: int = -1) -> None:
        nulls = (estimate.null_low, estimate.null_high)
        rows.append((number, quantity, other, step, estimate.value, estimate.low, estimate.high, *nulls))

    if "value_gradient" in values:
        at_first = np.exp(values["value_gradient"][0, 0]) if steps[0] == 0 else 0.0
        uniform = np.nan_to_num(runs[0][1].metric("uniform_gradient_ratio"))
        if null := max(uniform, at_first):
            values["value_gradient"] = values["value_gradient"] - np.log(null)
            add(UNIFORM if uniform >= at_first else STEP_0, Estimate(float(null)), "value_gradient")
    courses = {name: resampled(of) for name, of in values.items()}
    if "sink_rate" in courses:
        courses["sink_rate"] = np.clip(courses["sink_rate"], 0, 100)
    places: dict[str, np.ndarray] = {}
    for name, course in courses.items():
        is_ratio = QUANTITIES[name].is_ratio
        for step, at_step in zip(steps, (np.exp(course) if is_ratio else course).T, strict=True):
            add("course", bootstrap(at_step), name, step=step)
        threshold, places[name] = onset_of(course, None if is_ratio else SINK)
        add("threshold", Estimate(float(np.exp(threshold)) if is_ratio else threshold), name)
        add("onset", steps_between(places[name], steps), name)
    for first, second in combinations(courses, 2):
        add("delay", delay(places[first], places[second], steps), first, second)
    if len(steps) >= FEWEST_STEPS:
        for first, second in permutations(courses, 2):
            add("lag", bootstrap(lag_correlation(*map(np.diff, (courses[first], courses[second])))), first, second)
        for first, second in combinations(courses, 2):
            add("lead", lead_of(courses[first], courses[second]), first, second)
    return pd.DataFrame(rows, columns=[column.name for column in ONSET_COLUMNS]).assign(layer=WHOLE_MODEL)


# --- the findings, from the table


def findings(table: pd.DataFrame) -> list[Finding]:
    """Return the onset of each quantity, the order of each two, and which of the two leads."""
    rows = {(row.number, row.quantity, row.other): row for row in table.itertuples() if row.number != "course"}
    courses = {str(name): course for name, course in table[table["number"] == "course"].groupby("quantity")}
    names = {name: quantity.name for name, quantity in QUANTITIES.items()}
    for name, course in courses.items():
        if QUANTITIES[name].is_ratio and course["value"].iloc[-1] < rows["threshold", name, ""].value:
            names[name] += " (falling)"
    stated = []
    for (number, first, second), row in rows.items():
        if number == "onset":
            nulls = {says: rows[kind, first, ""].value for kind, says in NULLS.items() if (kind, first, "") in rows}
            stated.append(_onset(row, courses[first], rows["threshold", first, ""].value, nulls))
        elif number == "delay":
            stated.append(_order(row, names[first], names[second]))
        elif number == "lead":
            stated.append(_lead(row, rows["lag", first, second].value, rows["lag", second, first].value))
    sentence = "Intervals are over the sequences of this one training: another seed of it may have another order."
    return [*stated, Finding("seeds", SECTION, sentence=sentence)] if stated else []


def _onset(row: Any, course: pd.DataFrame, threshold: float, nulls: Mapping[str, float]) -> Finding:
    quantity, first, last = QUANTITIES[row.quantity], course.iloc[0], course.iloc[-1]
    unit = " %" if quantity.unit == "%" else ""
    sentence = quantity.title + "".join(f" ({says}: {null:.3g})" for says, null in nulls.items())
    sentence += f": {first['value']:.3g}{unit} at step {first['step']}, "
    sentence += f"{last['value']:.3g}{unit} at step {last['step']}; "
    if isnan(row.value):
        sentence += "the two do not differ, so that it has no onset."
    elif isinf(row.value):
        sentence += f"not above {threshold:.3g}{unit} at the last step."
    else:
        side = "above" if last["value"] > threshold else "below"
        low, high = (f"{end:.0f}" if isfinite(end) else "after the last step" for end in (row.low, row.high))
        sentence += f"{side} {threshold:.3g}{unit} from step {row.value:.0f} on [{low}, {high}]."
    outcome = Outcome.PRESENT if isfinite(row.value) else Outcome.ABSENT
    return Finding(
        f"onset-{row.quantity}", SECTION, outcome, row.value, threshold=threshold, low=row.low, high=row.high,
        sentence=sentence,
    )  # fmt: skip


def _order(row: Any, first: str, second: str) -> Finding:
    estimate = Estimate(row.value, row.low, row.high)
    if estimate.high < 0:
        first, second, estimate = second, first, -estimate
    is_resolved = estimate.low > 0
    sentence = f"The {first} has its onset before the {second}"
    if not is_resolved:
        sentence = f"The order of the onsets of {first} and {second} is not resolved"
    if isnan(row.value):
        sentence += ": one of them has no onset."
    else:
        sentence += (
            f": log₁₀(step + 1) of the {second} minus that of the {first} is {estimate.value:.2f} "
            f"[{estimate.low:.2f}, {estimate.high:.2f}]."
        )
    return Finding(
        f"order-{row.quantity}-{row.other}", SECTION, Outcome.PRESENT if is_resolved else Outcome.UNDECIDED, row.value,
        threshold=0.0, low=row.low, high=row.high, is_headline=True, sentence=sentence,
    )  # fmt: skip


def _lead(row: Any, lag: float, reverse: float) -> Finding:
    first, second = (QUANTITIES[name].name for name in (row.quantity, row.other))
    is_resolved = (row.low > 0 and row.value > row.null_high) or (row.high < 0 and row.value < row.null_low)
    leads, follows = (first, second) if row.value > 0 else (second, first)
    sentence = f"Changes of the {leads} precede those of the {follows}"
    if not is_resolved:
        sentence = f"Neither {first} nor {second} leads the changes of the other"
    sentence += f": r = {lag:.2f} for {first} first, {reverse:.2f} for {second} first; the difference is "
    sentence += f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}], and {row.null_low:.2f} to {row.null_high:.2f} "
    sentence += "in a random order of the steps."
    outcome = Outcome.PRESENT if is_resolved else Outcome.UNDECIDED
    if isnan(row.value):
        outcome, sentence = Outcome.UNDEFINED, f"Whether {first} or {second} leads is not known: one does not change."
    return Finding(
        f"lead-{row.quantity}-{row.other}", SECTION, outcome, row.value,
        threshold=row.null_high if row.value > 0 else row.null_low, low=row.low, high=row.high, sentence=sentence,
    )  # fmt: skip
