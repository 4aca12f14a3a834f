"""The findings of a run of `intervene` with their sentences, from the table `effect`; and intervals of effects.

The change under an arm counts only if it exceeds that of random changes of the same kind (the draws of the control).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, isnan, nan
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import counted
from sinkscope.interventions import parse
from sinkscope.interventions.intervention import Expectation
from sinkscope.interventions.massive import MeanMassive, ZeroMassive
from sinkscope.measuring.summary import NO_POSITION, clear_sinks
from sinkscope.results.findings import COLLAPSE, HALF, HARM, MATERIAL, NO_SINK, SPREAD, Finding, Outcome
from sinkscope.results.metrics import METRICS, reason_without_rate
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.sequences import Lacks, Sequences, table_of
from sinkscope.results.statistics import Estimate, bootstrap, positive_jackknife, weighted_means
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.verdict import probes
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report, layers_text, with_interval
from sinkscope.verdict.report import interval as estimate_interval

MOST_CHANGED = 3  # number of layers that are named

# --- reading the table


@dataclass(frozen=True)
class Effect:
    before: float
    after: float
    controls: tuple[float, ...]

    @property
    def outcome(self) -> Outcome:
        """Whether a rate or mass changes by more than under the controls; undecided with fewer than two controls."""
        change = self.after - self.before
        if isnan(change):
            return Outcome.UNDEFINED
        if len(self.controls) < 2:
            return Outcome.UNDECIDED
        controls = np.sign(change) * (np.array(self.controls) - self.before)
        reach = controls.mean() + SPREAD * controls.std(ddof=1)
        if not abs(change) > max(reach, controls.max(), MATERIAL):
            return Outcome.UNCHANGED
        return Outcome.RISES if change > 0 else Outcome.FALLS

    @property
    def control(self) -> float:
        return float(np.mean(self.controls)) if self.controls else nan

    @property
    def spread(self) -> float:
        """Standard deviation of the controls (n − 1)."""
        return float(np.std(self.controls, ddof=1)) if len(self.controls) > 1 else nan


def effect_of(run: RunData, label: str, metric: str, position: int = NO_POSITION, layer: int = WHOLE_MODEL) -> Effect:
    table = run.tables["effect"]
    table = table[table["condition"] == label]
    found = table[(table["metric"] == metric) & (table["position"] == position) & (table["layer"] == layer)]
    by_arm = {arm: tuple(values) for arm, values in found.groupby("arm")["value"]}
    return Effect(by_arm.get("before", (nan,))[0], by_arm.get("after", (nan,))[0], by_arm.get("control", ()))


def arms(run: RunData) -> dict[str, dict[str, Any]]:
    """Return label → the arm's entry in the manifest: do, paper, expects, watched."""
    return run.manifest["arms"]


# --- the report


def report(run: RunData) -> Report:
    controls = max((len(arm["controls"]) for arm in arms(run).values()), default=0)
    setting = settings(run)
    if controls:
        sentence = f"Controls are random changes of the same kind, at most {controls:g} for each arm; several are "
        sentence += "given as mean ± standard deviation."
        setting.append(Finding("control", "", value=controls, sentence=sentence))
    return Report(f"{run.model}: interventions", setting, overview(run), findings(run))


def overview(run: RunData) -> pd.DataFrame:
    measured = [label for label, arm in arms(run).items() if arm["watched"]]
    watched = sorted({position for label in measured for position in arms(run)[label]["watched"]})
    columns = [(metric, position) for position in watched for metric in ("sink_rate", "window_mass")]
    following = {arms(run)[label]["watched"][0] + 1 for label in measured} - {*watched}
    columns += [("sink_rate", position) for position in sorted(following)] + [("sink_rate_anywhere", NO_POSITION)]
    columns += [("massive_magnitude", NO_POSITION), ("perplexity", NO_POSITION)]
    before: dict[str, str] = {"arm": "before"}
    rows = [before] if measured else []
    for label in measured:
        effects = {column: effect_of(run, label, *column) for column in columns}
        before |= _texts(effects, "before")
        rows.append({"arm": label} | _texts(effects, "after"))
        if effects["perplexity", NO_POSITION].controls:
            rows.append({"arm": "  control"} | _texts(effects, "control"))
    for label in arms(run):
        for row in () if label in measured else _streamed(run, label).itertuples():
            name = f"last {row.window} tokens" + (f" and the first {row.keep}" if row.keep else "")
            name = "dense, as streaming measures it" if row.method == "dense" else name
            rows.append({"arm": name} | _texts({("perplexity", NO_POSITION): Effect(nan, row.perplexity, ())}, "after"))
    table = pd.DataFrame(rows or [before]).fillna("")
    return table[["arm", *(heading for heading in (_heading(*column) for column in columns) if heading in table)]]


def _heading(metric: str, position: int) -> str:
    return METRICS[metric].short + ("" if position == NO_POSITION else f" @{position}")


def _texts(effects: Mapping[tuple[str, int], Effect], part: str) -> dict[str, str]:
    texts = {}
    for (metric, position), effect in effects.items():
        if not isnan(value := getattr(effect, part)):
            spread = effect.spread if part == "control" else nan
            texts[_heading(metric, position)] = METRICS[metric].text_with_spread(value, spread)
    return texts


def _streamed(run: RunData, label: str) -> pd.DataFrame:
    table = run.tables["streaming"]
    return table[(table["condition"] == label) & (table["bucket"] == -1)]


# --- findings

CHANGES = {
    Outcome.FALLS: "falls",
    Outcome.RISES: "rises",
    Outcome.UNCHANGED: "changes no more than under the control",
    Outcome.UNDECIDED: "has too few controls to be judged",
    Outcome.UNDEFINED: "is not defined",
}


def findings(run: RunData) -> list[Finding]:
    """Return the effects of every arm, compared with the findings of papers, and the arms that were not measured."""
    found = [finding for label in arms(run) for finding in findings_of(run, label)] + list(probes.findings(run))
    for kind, section, words in (
        ("skipped", "Does not apply here", "does not apply"), ("failed", "Failed", "could not be measured"),
    ):  # fmt: skip
        for name, reason in run.manifest.get(kind, {}).items():
            sentence = f"`{name}` {words}: {reason}."
            found.append(Finding(kind, section, numbers={"what": name, "reason": reason}, sentence=sentence))
    return found


def findings_of(run: RunData, label: str) -> list[Finding]:
    """Return the findings of one arm. A sink falls, rises or moves only if its change exceeds that of the controls."""
    arm, section = arms(run)[label], f"`{label}`"
    if not arm["watched"]:
        return list(_streaming(run, label, section))
    sink, *targets = arm["watched"]
    rate = effect_of(run, label, "sink_rate", sink)
    moved = rate.outcome in (Outcome.FALLS, Outcome.RISES)
    layers = _most_changed(run, label, sink) if moved else ()
    found = [_change_of(run, label, section, "sink_rate", sink, layers)]
    if rate.outcome == Outcome.UNDEFINED:
        found = [_without_rate(run, label, section, sink), _change_of(run, label, section, "window_mass", sink)]
    if rate.before < NO_SINK and rate.after < NO_SINK:
        sentence = f"There is no sink at position {sink}, before or after."
        found = [replace(found[0], outcome=Outcome.ABSENT, sentence=sentence)]
    found += _elsewhere(run, label, section, sink)
    found += [_change_of(run, label, section, "window_mass", at) for at in targets]
    found.append(_perplexity(run, label, section))
    found += _largest_elsewhere(run, label, section)
    if arm["expects"]:
        found.append(_expected(run, label, section, Expectation(arm["expects"])))
    return found


def _ratio(run: RunData, label: str, metric: str, position: int = NO_POSITION) -> Estimate:
    """Return a metric of the model under an arm ÷ before it; the interval resamples the sequences that both read."""
    effect, pair = effect_of(run, label, metric, position), _pair(run, label, metric, position)
    value = effect.after / (effect.before or nan)
    if pair is None or isnan(value):
        return Estimate(value)
    before, after = (found if found.ndim == 1 else found.mean(1) for found in pair)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold only sequences without a sink
        ratios = after / before
    return replace((positive_jackknife if metric == "perplexity" else bootstrap)(ratios), value=value)


def _times(ratio: Estimate, of: str = "its value before") -> str:
    form = ".3f" if ratio.value < 10 else ",.4g" if ratio.value < 1000 else ",.0f"
    return with_interval(ratio, form, f" times {of}")


def _change_of(
    run: RunData, label: str, section: str, metric: str, position: int, layers: tuple[int, ...] = ()
) -> Finding:
    effect, ratio = effect_of(run, label, metric, position), _ratio(run, label, metric, position)
    sentence = f"The {METRICS[metric].short} at position {position} {CHANGES[effect.outcome]}"
    if effect.outcome != Outcome.UNCHANGED and isfinite(ratio.value):
        sentence += f"{', at' if effect.outcome == Outcome.UNDECIDED else ' to'} {_times(ratio)}"
    sentence += f", most in {layers_text(layers)}." if layers else "."
    numbers = {"metric": metric, "position": position, "before": effect.before, "control": effect.control}
    numbers |= {"layers": layers, "ratio": ratio.value, **estimate_interval(ratio, "ratio_")}
    about: dict[str, Any] = {"threshold": SPREAD, "numbers": numbers, "sentence": sentence}
    return Finding("change", section, effect.outcome, effect.after, effect.spread, **about)


def _without_rate(run: RunData, label: str, section: str, position: int) -> Finding:
    uniform, epsilon = effect_of(run, label, "uniform_mass", position).before, run.manifest["config"]["epsilon"]
    sentence = (
        f"Whether the sink at position {position} changes cannot be said: {reason_without_rate(uniform, epsilon)}."
    )
    numbers = {"metric": "sink_rate", "position": position, "uniform": uniform, "epsilon": epsilon}
    return Finding("change", section, Outcome.UNDEFINED, threshold=SPREAD, numbers=numbers, sentence=sentence)


def _elsewhere(run: RunData, label: str, section: str, sink: int) -> Iterator[Finding]:
    """Yield where sinks are under the arm: a sink that is prevented at one position may be at another."""
    following = effect_of(run, label, "sink_rate", sink + 1)
    anywhere = effect_of(run, label, "sink_rate_anywhere")
    if isnan(anywhere.after):  # of an older format, or too few queries
        return
    sentence = f"Any position is a sink in {_compared('sink_rate_anywhere', anywhere)} of the heads and sequences"
    numbers: dict[str, Any] = {"before": anywhere.before, "control": anywhere.control, "position": sink + 1}
    if not isnan(following.after):
        numbers |= {f"next_{name}": getattr(following, name) for name in ("before", "after", "control")}
        sentence += f", position {sink + 1} in {_compared('sink_rate', following)} of the heads"
    if len(later := _positions_of_sinks(run, label, sink)):
        most, share = int(later.index[0]), float(later.iloc[0])
        numbers |= {"most": most, "most_share": share}
        sentence += f"; {share:.0%} of the sinks at other positions than {sink} are at position {most}"
    about: dict[str, Any] = {"threshold": SPREAD, "numbers": numbers, "sentence": f"{sentence}."}
    yield Finding("sinks-anywhere", section, anywhere.outcome, anywhere.after, anywhere.spread, **about)


def _compared(metric: str, effect: Effect) -> str:
    """Return for example "55.4% (0.6% before, 0.7% under the control)"."""
    before, control = METRICS[metric].text(effect.before), METRICS[metric].text(effect.control)
    under = "" if isnan(effect.control) else f", {control} under the control"
    return f"{METRICS[metric].text(effect.after)} ({before} before{under})"


def _positions_of_sinks(run: RunData, label: str, sink: int) -> pd.Series:
    """Return the share of each position among an arm's sinks at other positions than `sink`, the largest first."""
    table = run.tables.get("sink_positions")
    if table is None:
        return pd.Series(dtype=float)
    sinks = clear_sinks(table[(table["condition"] == label) & (table["position"] != sink)])
    return sinks["position"].value_counts(normalize=True)


def _perplexity(run: RunData, label: str, section: str) -> Finding:
    cost, ratio = effect_of(run, label, "perplexity"), _ratio(run, label, "perplexity")
    numbers = {"before": cost.before, "control": cost.control, "ratio": ratio.value}
    numbers |= estimate_interval(ratio, "ratio_")
    sentence = f"Perplexity is {_times(ratio)}"
    if not isnan(cost.control):
        numbers["control_ratio"] = cost.control / cost.before
        sentence += f", and {_times(Estimate(numbers['control_ratio']), 'under the control')}"
    about: dict[str, Any] = {"numbers": numbers, "sentence": f"{sentence}."}
    return Finding("perplexity", section, value=cost.after, spread=cost.spread, **about)


def _most_changed(run: RunData, label: str, position: int) -> tuple[int, ...]:
    """Return the layers in which the sink rate changed most, in the same direction as the rate of the model."""
    table = run.tables["effect"].query("metric == 'sink_rate' and layer >= 0 and arm != 'control'")
    table = table[(table["condition"] == label) & (table["position"] == position)]
    by_arm = table.pivot(index="layer", columns="arm", values="value")
    change = by_arm["after"] - by_arm["before"]
    change = (change * np.sign(change.sum())).sort_values(ascending=False, kind="stable")
    return tuple(sorted(change.index[:MOST_CHANGED])) if len(change) > MOST_CHANGED else ()


def _largest_elsewhere(run: RunData, label: str, section: str) -> Iterator[Finding]:
    """Yield the site of the largest activation if it rises although the arm sets massive activations elsewhere."""
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
    for place, value in where.items():
        if any(value in (getattr(one, f"{place}s") or ()) for one in done):
            continue
        what = " and ".join(one.name for one in done)
        sentence = f"The largest |activation| rises: it is now at coordinate {coordinate} of layer {layer}'s output "
        sentence += f"and position {position}, a {place} that `{what}` does not change."
        numbers = {"before": change.before, "place": place, "what": what} | where
        yield Finding("largest-rises", section, value=change.after, numbers=numbers, sentence=sentence)
        return


def _streaming(run: RunData, label: str, section: str) -> Iterator[Finding]:
    table = _streamed(run, label)
    dense = float(table.query("method == 'dense'")["perplexity"].iloc[0])
    for row in table.query("method != 'dense'").sort_values(["window", "keep"]).itertuples():
        kept = f" and the first {row.keep}" if row.keep else ""
        ratio = Estimate(row.perplexity / dense)
        sentence = f"With the last {counted(row.window, 'token')}{kept}, perplexity is "
        sentence += f"{_times(ratio, 'that of dense attention')}."
        numbers = {"window": row.window, "keep": row.keep or None, "dense": dense, "ratio": ratio.value}
        yield Finding("streaming", section, value=float(row.perplexity), numbers=numbers, sentence=sentence)


# --- findings of papers, compared with the run

FOUND = {
    Expectation.SINK_FALLS: "the sink falls",
    Expectation.SINK_STAYS: "the sink stays",
    Expectation.SINK_MOVES: "the sink moves",
    Expectation.PERPLEXITY_COLLAPSES: "perplexity collapses",
    Expectation.PERPLEXITY_UNHARMED: "perplexity is unharmed",
}
TOO_FEW = Outcome.UNDECIDED, "there are too few controls to judge it"


def _expected(run: RunData, label: str, section: str, expectation: Expectation) -> Finding:
    arm = arms(run)[label]
    sink, *targets = arm["watched"]
    numbers = {"paper": arm["paper"]}
    if expectation in (Expectation.PERPLEXITY_COLLAPSES, Expectation.PERPLEXITY_UNHARMED):
        factor = _ratio(run, label, "perplexity")
        ends = tuple(estimate_interval(factor).values()) or (factor.value,)
        if expectation == Expectation.PERPLEXITY_COLLAPSES:
            value, threshold = factor.value, COLLAPSE
            passes = [end > COLLAPSE for end in ends]
            yes, no = "it does", f"it does not: the factor is not above {COLLAPSE:g}"
        else:
            value, threshold = factor.value - 1, HARM
            passes = [abs(end - 1) < HARM for end in ends]
            passes += [True] * (min(ends) < 1 < max(ends))  # unharmed lies between the ends
            yes, no = f"it is: it changes by less than {HARM:.0%}", f"it is not: it changes by more than {HARM:.0%}"
        is_decided = len(set(passes)) == 1
        outcome = (Outcome.CONFIRMED if passes[0] else Outcome.REFUTED) if is_decided else Outcome.UNDECIDED
        here = (yes if passes[0] else no) if is_decided else "the interval of perplexity does not decide"
    else:
        rate = effect_of(run, label, "sink_rate", sink)
        value, threshold = rate.after, HALF
        target = targets[0] if targets else None
        numbers |= {"before": rate.before, "source": sink, "target": target}
        if expectation == Expectation.SINK_MOVES:
            gain = Outcome.UNDECIDED if target is None else effect_of(run, label, "window_mass", target).outcome
            outcome, here = _moves(rate, gain, sink, target)
        else:
            outcome, here = _falls_or_stays(rate, expectation == Expectation.SINK_FALLS)
            following = effect_of(run, label, "sink_rate", sink + 1)
            if rate.outcome == Outcome.FALLS and following.outcome == Outcome.RISES:
                numbers |= {"next": following.after, "next_before": following.before, "next_control": following.control}
                here += f", and position {sink + 1} becomes one in {_compared('sink_rate', following)} of the heads"
    sentence = f"Published: {FOUND[expectation]}. Here {here} ({arm['paper']})."
    about: dict[str, Any] = {"threshold": threshold, "numbers": numbers, "is_headline": True, "sentence": sentence}
    return Finding(str(expectation), section, outcome, value, **about)


def _falls_or_stays(rate: Effect, falls: bool) -> tuple[Outcome, str]:
    """Return whether the sink falls (or stays, if not `falls`), and the end of the sentence "Here …"."""
    if rate.outcome == Outcome.UNDEFINED:
        return Outcome.UNDEFINED, "there is no sink rate"
    if rate.before < NO_SINK:
        return Outcome.ABSENT, "there is no sink before the intervention"
    if rate.outcome == Outcome.UNDECIDED:
        return TOO_FEW
    has_fallen = rate.outcome == Outcome.FALLS
    if has_fallen and rate.after >= HALF * rate.before:
        part = f"but at least {HALF:.0%} of it is left" if falls else "though part of it is lost"
        return Outcome.PARTLY, f"it does, {part}"
    if has_fallen == falls:
        return Outcome.CONFIRMED, "it does"
    words = "it does not fall beyond the control's spread" if falls else f"less than {HALF:.0%} of it is left"
    return Outcome.REFUTED, words


def _moves(rate: Effect, gain: Outcome, source: int, target: int | None) -> tuple[Outcome, str]:
    beyond = "beyond the control's spread"
    if rate.outcome == Outcome.UNDEFINED:
        return Outcome.UNDEFINED, "there is no sink rate"
    if gain == Outcome.UNDECIDED:
        return TOO_FEW
    if gain != Outcome.RISES:
        return Outcome.REFUTED, f"it did not move: position {target} gains no attention {beyond}"
    if rate.outcome == Outcome.FALLS:
        return Outcome.CONFIRMED, f"the sink moved to position {target}"
    words = f"attention to position {target} rises, but the sink at position {source} does not fall {beyond}"
    return Outcome.PARTLY, words


# --- intervals over sequences
#
# The run before an arm and the arm read the same sequences, so that their difference is more precise than each number:
# sequences are resampled in pairs, and the interval of the change is shifted to the arm's number. For perplexities,
# each passage of the text is left out in turn (jackknife), because sequences of one passage are not independent.


def interval(run: RunData, label: str, metric: str, position: int = NO_POSITION) -> tuple[float, float] | None:
    """Return the 95 % interval of a metric of the model under an arm; the number before the arm is taken as fixed."""
    pair = _pair(run, label, metric, position)
    if pair is None:
        return None
    before, after = (found if found.ndim == 1 else found.mean(1) for found in pair)
    return _change(before, after, metric == "perplexity")


def interval_by_layer(run: RunData, label: str, metric: str, position: int) -> pd.DataFrame:
    pair = _pair(run, label, metric, position)
    if pair is None:
        return pd.DataFrame(columns=["low", "high"])
    ends = [_change(before, after) for before, after in zip(*(found.T for found in pair), strict=True)]
    table = table_of(run, "attention_by_sequence")
    layers = np.unique(table["layer"][(table["condition"] == label) & (table["position"] == position)])
    found = pd.DataFrame(ends, columns=["low", "high"], index=layers)
    return found[np.isfinite(found).all(axis=1)]  # NaN for a single sequence


def _change(before: np.ndarray, after: np.ndarray, is_factor: bool = False) -> tuple[float, float]:
    """Return the interval of a change, (1 + draws,) each, or of a factor of perplexity, (1 + passages,) each."""
    found = positive_jackknife(after / before) if is_factor else bootstrap(after - before)
    low, high = (before[0] * end if is_factor else before[0] + end for end in (found.low, found.high))
    return float(low), float(high)


def _pair(run: RunData, label: str, metric: str, position: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return values before and under the arm, (1 + draws,) or (1 + draws, layers) each; None without sequences."""
    try:
        before, after = (_replicates(Sequences(run, name), metric, position) for name in (BEFORE, label))
    except Lacks:
        return None
    return (before, after) if before.shape == after.shape and before.size else None


def _replicates(sequences: Sequences, metric: str, position: int) -> np.ndarray:
    if metric == "perplexity":
        is_empty = sequences.table("loss_by_sequence").empty  # `claims` measures the model before all arms only once
        return np.empty(0) if is_empty else np.exp(sequences.losses)
    if metric != "massive_magnitude":
        return sequences.means("attention_by_sequence", metric, position=position)
    massive = table_of(sequences.run, "massive")  # to find the layer with the largest |activation|
    rows = massive[massive["condition"] == sequences.condition]
    largest = rows["value"].abs().groupby([rows["sequence"], rows["layer"]]).max().unstack("layer")
    count = sequences.weights.shape[1]
    return weighted_means(largest.reindex(range(count)).to_numpy(float), sequences.weights).max(1)
