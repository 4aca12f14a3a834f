"""What a run of `intervene` found: the table `effect` becomes a table of arms and findings.

An arm's change counts only if it is larger than what random changes of the same kind do (the control's draws).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.interventions import parse
from sinkscope.interventions.intervention import Expectation
from sinkscope.interventions.massive import MeanMassive, ZeroMassive
from sinkscope.measuring.summary import NO_POSITION, WHOLE_MODEL
from sinkscope.results.findings import COLLAPSE, HALF, HARM, MATERIAL, NO_SINK, SPREAD, Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.markdown import Report

MOST_CHANGED = 3  # layers that are named
Layers = tuple[int, ...]


# --- reading the table


@dataclass(frozen=True)
class Effect:
    """One metric of one arm."""

    before: float
    after: float
    controls: tuple[float, ...]

    @property
    def outcome(self) -> Outcome:
        """Whether a rate or mass falls or rises by more than random changes of the same kind make it.

        Undecided with fewer than two of these.
        """
        if len(self.controls) < 2:
            return Outcome.UNDECIDED
        change = self.after - self.before
        controls = np.sign(change) * (np.array(self.controls) - self.before)
        reach = controls.mean() + SPREAD * controls.std(ddof=1)
        if not abs(change) > max(reach, controls.max(), MATERIAL):
            return Outcome.UNCHANGED
        return Outcome.RISES if change > 0 else Outcome.FALLS

    @property
    def control(self) -> float:
        """Mean of the controls; NaN without any."""
        return float(np.mean(self.controls)) if self.controls else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation of the controls (n − 1); NaN with fewer than two."""
        return float(np.std(self.controls, ddof=1)) if len(self.controls) > 1 else float("nan")


def effect_of(run: RunData, label: str, metric: str, position: int = NO_POSITION, layer: int = WHOLE_MODEL) -> Effect:
    table = run.tables["effect"]
    table = table[table["condition"] == label]
    found = table[(table["metric"] == metric) & (table["position"] == position) & (table["layer"] == layer)]
    by_arm = {arm: tuple(values) for arm, values in found.groupby("arm")["value"]}
    nothing = (float("nan"),)
    return Effect(by_arm.get("before", nothing)[0], by_arm.get("after", nothing)[0], by_arm.get("control", ()))


def arms(run: RunData) -> dict[str, dict[str, Any]]:
    """Label → what the manifest says of the arm: do, paper, expects, watched."""
    return run.manifest["arms"]


# --- the report


def report(run: RunData) -> Report:
    """The verdict on an experiment, as data."""
    controls = max((len(arm["controls"]) for arm in arms(run).values()), default=0)
    setting = settings(run) + ([Finding("control", "", value=controls)] if controls else [])
    return Report(f"{run.model}: interventions", setting, overview(run), findings(run))


def overview(run: RunData) -> pd.DataFrame:
    """One row an arm, and one its control: texts."""
    measured = [label for label, arm in arms(run).items() if arm["watched"]]
    watched = sorted({position for label in measured for position in arms(run)[label]["watched"]})
    columns = [(metric, position) for position in watched for metric in ("sink_rate", "window_mass")]
    columns += [("massive_magnitude", NO_POSITION), ("perplexity", NO_POSITION)]
    before: dict[str, str] = {"arm": "before"}
    rows = [before] if measured else []
    for label in measured:
        effects = {column: effect_of(run, label, *column) for column in columns}
        before |= _texts({column: (effect.before, np.nan) for column, effect in effects.items()})
        rows.append({"arm": label} | _texts({column: (effect.after, np.nan) for column, effect in effects.items()}))
        if effects["perplexity", NO_POSITION].controls:
            spreads = {column: (effect.control, effect.spread) for column, effect in effects.items()}
            rows.append({"arm": "  control"} | _texts(spreads))
    for label in arms(run):
        if label not in measured:
            rows += [{"arm": _streaming_name(row)} | _texts({("perplexity", NO_POSITION): (row.perplexity, np.nan)})
                     for row in _streamed(run, label).itertuples()]  # fmt: skip
    table = pd.DataFrame(rows or [before]).fillna("")
    return table[["arm", *(heading for heading in map(_heading, columns) if heading in table)]]


def _heading(column: tuple[str, int]) -> str:
    metric, position = column
    return METRICS[metric].short + ("" if position == NO_POSITION else f" @{position}")


def _texts(cells: Mapping[tuple[str, int], tuple[float, float]]) -> dict[str, str]:
    """Heading → value and spread as text, of what was measured."""
    return {
        _heading(column): METRICS[column[0]].text_with_spread(value, spread)
        for column, (value, spread) in cells.items()
        if not np.isnan(value)
    }


def _streamed(run: RunData, label: str) -> pd.DataFrame:
    """The perplexities of a streaming arm over all tokens."""
    table = run.tables["streaming"]
    return table[(table["condition"] == label) & (table["bucket"] == -1)]


def _streaming_name(row: Any) -> str:
    if row.method == "dense":
        return "dense, as streaming measures it"
    return f"last {row.window} tokens" + (f" and the first {row.keep}" if row.keep else "")


# --- findings


def findings(run: RunData) -> list[Finding]:
    """What every arm does, and what the papers expect of it; then what does not apply."""
    found = [finding for label in arms(run) for finding in findings_of(run, label)]
    for name, reason in run.manifest["skipped"].items():
        found.append(Finding("skipped", "Does not apply here", numbers={"what": name, "reason": reason}))
    for name, reason in run.manifest.get("failed", {}).items():
        found.append(Finding("failed", "Failed", numbers={"what": name, "reason": reason}))
    return found


def findings_of(run: RunData, label: str) -> list[Finding]:
    """Of one arm. A sink falls, rises or moves only if it does so beyond the control's spread."""
    arm, section = arms(run)[label], f"`{label}`"
    if not arm["watched"]:
        return list(_streaming(run, label, section))
    sink, *targets = arm["watched"]
    found = [_sink_rate(run, label, section, sink)]
    found += [_change("window_mass", section, effect_of(run, label, "window_mass", at), at) for at in targets]
    perplexity = effect_of(run, label, "perplexity")
    numbers = {"before": perplexity.before, "control": perplexity.control}
    found.append(Finding("perplexity", section, value=perplexity.after, spread=perplexity.spread, numbers=numbers))
    found += _largest_elsewhere(run, label, section)
    if arm["expects"]:
        found.append(_expected(run, label, section, Expectation(arm["expects"])))
    return found


def _change(
    metric: str, section: str, effect: Effect, position: int, outcome: Outcome | None = None, layers: Layers = ()
) -> Finding:
    numbers = {"metric": metric, "position": position, "before": effect.before, "control": effect.control}
    numbers |= {"layers": layers}
    return Finding("change", section, outcome or effect.outcome, effect.after, effect.spread, SPREAD, (), numbers)


def _sink_rate(run: RunData, label: str, section: str, position: int) -> Finding:
    rate = effect_of(run, label, "sink_rate", position)
    if rate.before < NO_SINK and rate.after < NO_SINK:
        return _change("sink_rate", section, rate, position, Outcome.ABSENT)
    moved = rate.outcome in (Outcome.FALLS, Outcome.RISES)
    return _change("sink_rate", section, rate, position, layers=_most_changed(run, label, position) if moved else ())


def _most_changed(run: RunData, label: str, position: int) -> tuple[int, ...]:
    """The layers in which the sink rate changed most, in the direction of the whole model's."""
    table = run.tables["effect"].query("metric == 'sink_rate' and layer >= 0 and arm != 'control'")
    table = table[(table["condition"] == label) & (table["position"] == position)]
    by_arm = table.pivot(index="layer", columns="arm", values="value")
    change = by_arm["after"] - by_arm["before"]
    change = (change * np.sign(change.sum())).sort_values(ascending=False, kind="stable")
    return tuple(sorted(change.index[:MOST_CHANGED])) if len(change) > MOST_CHANGED else ()


def _largest_elsewhere(run: RunData, label: str, section: str) -> Iterator[Finding]:
    """For an arm that sets massive activations while the largest one rises: where the largest one is now, and whether
    its layer, position or coordinate is not among those that the arm sets.
    """
    change = effect_of(run, label, "massive_magnitude")
    names = (ZeroMassive.name, MeanMassive.name)
    done: list[Any] = [parse(one) for one in arms(run)[label]["do"] if one.partition(":")[0] in names]
    if not done or "massive" not in run.tables or not change.after > change.before:
        return
    table = run.tables["massive"]
    table = table[table["condition"] == label].assign(magnitude=lambda rows: rows["value"].abs())
    largest = table.loc[table.groupby(["layer", "sequence"])["magnitude"].idxmax()]
    layer = largest.groupby("layer")["magnitude"].mean().idxmax()
    coordinate, position = largest[largest["layer"] == layer][["coordinate", "position"]].value_counts().idxmax()
    where = {"layer": int(layer), "position": int(position), "coordinate": int(coordinate)}
    set_there = [{"layer": one.layers, "position": one.positions, "coordinate": one.coordinates} for one in done]
    for place, value in where.items():
        if not any(value in (chosen[place] or ()) for chosen in set_there):
            what = " and ".join(one.name for one in done)
            numbers = {"before": change.before, "place": place, "what": what} | where
            yield Finding("largest-rises", section, value=change.after, numbers=numbers)
            return


def _streaming(run: RunData, label: str, section: str) -> Iterator[Finding]:
    table = _streamed(run, label)
    dense = float(table.query("method == 'dense'")["perplexity"].iloc[0])
    for row in table.query("method != 'dense'").sort_values(["window", "keep"]).itertuples():
        numbers = {"window": row.window, "keep": row.keep or None, "dense": dense}
        yield Finding("streaming", section, value=float(row.perplexity), numbers=numbers)


# --- what papers found, and whether it is so here


def _expected(run: RunData, label: str, section: str, expectation: Expectation) -> Finding:
    arm = arms(run)[label]
    sink, *targets = arm["watched"]
    numbers = {"paper": arm["paper"]}
    if expectation in _OF_PERPLEXITY:
        perplexity = effect_of(run, label, "perplexity")
        value, threshold, is_so = _OF_PERPLEXITY[expectation](perplexity.after / perplexity.before)
        outcome = Outcome.CONFIRMED if is_so else Outcome.REFUTED
    else:
        rate = effect_of(run, label, "sink_rate", sink)
        value, threshold = rate.after, HALF
        numbers |= {"before": rate.before, "source": sink, "target": targets[0] if targets else None}
        gain = effect_of(run, label, "window_mass", targets[0]).outcome if targets else Outcome.UNDECIDED
        outcome = _OF_SINK[expectation](rate, gain)
    return Finding(str(expectation), section, outcome, value, None, threshold, (), numbers, is_headline=True)


def _falls(rate: Effect, gain: Outcome) -> Outcome:
    if rate.before < NO_SINK:
        return Outcome.ABSENT
    if rate.outcome != Outcome.FALLS:
        return _unless_undecided(rate.outcome, Outcome.REFUTED)
    return Outcome.CONFIRMED if rate.after < HALF * rate.before else Outcome.PARTLY


def _stays(rate: Effect, gain: Outcome) -> Outcome:
    if rate.before < NO_SINK:
        return Outcome.ABSENT
    if rate.outcome != Outcome.FALLS:
        return _unless_undecided(rate.outcome, Outcome.CONFIRMED)
    return Outcome.REFUTED if rate.after < HALF * rate.before else Outcome.PARTLY


def _moves(rate: Effect, gain: Outcome) -> Outcome:
    if gain != Outcome.RISES:
        return _unless_undecided(gain, Outcome.REFUTED)
    return Outcome.CONFIRMED if rate.outcome == Outcome.FALLS else Outcome.PARTLY


def _unless_undecided(change: Outcome, outcome: Outcome) -> Outcome:
    return Outcome.UNDECIDED if change == Outcome.UNDECIDED else outcome


# How the sink rate changes, and how the window mass at the target does → whether the expectation is met
_OF_SINK: dict[Expectation, Callable[[Effect, Outcome], Outcome]] = {
    Expectation.SINK_FALLS: _falls,
    Expectation.SINK_STAYS: _stays,
    Expectation.SINK_MOVES: _moves,
}
# By what perplexity is multiplied → the number to report, its threshold, and whether the expectation is met
_OF_PERPLEXITY: dict[Expectation, Callable[[float], tuple[float, float, bool]]] = {
    Expectation.PERPLEXITY_COLLAPSES: lambda factor: (factor, COLLAPSE, factor > COLLAPSE),
    Expectation.PERPLEXITY_UNHARMED: lambda factor: (factor - 1, HARM, abs(factor - 1) < HARM),
}
