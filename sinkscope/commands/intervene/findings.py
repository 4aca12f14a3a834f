"""The findings of a run of `intervene` with their sentences, from the table `effect`; and intervals of effects.

The change under an arm counts only if it exceeds that of random changes of the same kind (the draws of the control).
"""

from collections.abc import Iterator
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
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate, bootstrap, positive_jackknife, weighted_means
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.verdict import probes
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report, layers_text, with_interval
from sinkscope.verdict.report import interval as estimate_interval

LAYERS_NAMED = 3  # number of the most changed layers that are named

# --- reading the table


def whole_model(run: RunData) -> pd.DataFrame:
    """Return the metrics before, after each intervention, and under its random controls, on average over them.

    A run of streaming alone has none.
    """
    if "effect" not in run.tables:
        return pd.DataFrame(columns=["setting", "metric", "value"])
    effect = run.tables["effect"]
    effect = effect[(effect["layer"] == WHOLE_MODEL) & effect["position"].isin((0, NO_POSITION))]
    words = {"before": "", "after": "{}", "control": "{}, random controls"}
    settings = [words[arm].format(name) for name, arm in zip(effect["name"], effect["arm"], strict=True)]
    return effect.assign(setting=settings).groupby(["setting", "metric"], sort=False)["value"].mean().reset_index()


@dataclass(frozen=True)
class ArmEffect:
    """One number of the model before an arm, under it, and under each of its controls."""

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

    def compared(self, metric: str) -> str:
        """Return for example "55.4% (0.6% before, 0.7% under the control)"."""
        after, before, control = map(METRICS[metric].text, (self.after, self.before, self.control))
        return f"{after} ({before} before{'' if isnan(self.control) else f', {control} under the control'})"


def effect_of(
    run: RunData, label: str, metric: str, position: int = NO_POSITION, layer: int = WHOLE_MODEL
) -> ArmEffect:
    table = run.tables["effect"]
    table = table[(table["condition"] == label) & (table["metric"] == metric) & (table["layer"] == layer)]
    by_arm = {arm: tuple(values) for arm, values in table[table["position"] == position].groupby("arm")["value"]}
    return ArmEffect(by_arm.get("before", (nan,))[0], by_arm.get("after", (nan,))[0], by_arm.get("control", ()))


def arms(run: RunData) -> dict[str, dict[str, Any]]:
    """Return label → the arm's entry in the manifest: do, paper, expects, watched."""
    return run.manifest["arms"]


def _streamed(run: RunData, label: str) -> pd.DataFrame:
    table = run.tables["streaming"]
    return table[(table["condition"] == label) & (table["bucket"] == -1)]


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
    measured = {label: arm["watched"] for label, arm in arms(run).items() if arm["watched"]}
    watched = sorted({position for positions in measured.values() for position in positions})
    columns = [(metric, position) for position in watched for metric in ("sink_rate", "window_mass")]
    following = {positions[0] + 1 for positions in measured.values()} - {*watched}
    columns += [("sink_rate", position) for position in sorted(following)]
    columns += [(metric, NO_POSITION) for metric in ("sink_rate_anywhere", "massive_magnitude", "perplexity")]
    headings = {
        (metric, position): METRICS[metric].short + ("" if position == NO_POSITION else f" @{position}")
        for metric, position in columns
    }
    before: dict[str, str] = {"arm": "before"}
    rows = [before] if measured else []
    for label in measured:
        texts: dict[str, dict[str, str]] = {"before": {}, "after": {}, "control": {}}
        for (metric, position), heading in headings.items():
            effect = effect_of(run, label, metric, position)
            for part, by_heading in texts.items():
                if not isnan(value := getattr(effect, part)):
                    spread = effect.spread if part == "control" else nan
                    by_heading[heading] = METRICS[metric].text_with_spread(value, spread)
        before |= texts["before"]
        rows.append({"arm": label} | texts["after"])
        if headings["perplexity", NO_POSITION] in texts["control"]:
            rows.append({"arm": "  control"} | texts["control"])
    for label in arms(run):
        for row in () if label in measured else _streamed(run, label).itertuples():
            name = f"last {row.window} tokens" + (f" and the first {row.keep}" if row.keep else "")
            name = "dense, as streaming measures it" if row.method == "dense" else name
            perplexity = METRICS["perplexity"].text_with_spread(row.perplexity, nan)
            rows.append({"arm": name, headings["perplexity", NO_POSITION]: perplexity})
    table = pd.DataFrame(rows or [before]).fillna("")
    return table[["arm", *(heading for heading in headings.values() if heading in table)]]


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
    effects = [finding for label in arms(run) for finding in findings_of(run, label)]
    return [*effects, *probes.findings(run), *(
        Finding(kind, section, numbers={"what": name, "reason": reason}, sentence=f"`{name}` {words}: {reason}.")
        for kind, section, words in (
            ("skipped", "Does not apply here", "does not apply"), ("failed", "Failed", "could not be measured"),
        )
        for name, reason in run.manifest.get(kind, {}).items()
    )]  # fmt: skip


def findings_of(run: RunData, label: str) -> list[Finding]:
    """Return the findings of one arm. A sink falls, rises or moves only if its change exceeds that of the controls."""
    arm, section = arms(run)[label], f"`{label}`"
    if not arm["watched"]:
        return list(_streaming(run, label, section))
    sink, *targets = arm["watched"]
    rate = effect_of(run, label, "sink_rate", sink)
    changes = [_change_of_rate(run, label, section, "sink_rate", sink)]
    if rate.outcome == Outcome.UNDEFINED:
        uniform, epsilon = effect_of(run, label, "uniform_mass", sink).before, run.manifest["config"]["epsilon"]
        reason = reason_without_rate(uniform, epsilon)
        sentence = f"Whether the sink at position {sink} changes cannot be said: {reason}."
        numbers = {"metric": "sink_rate", "position": sink, "uniform": uniform, "epsilon": epsilon}
        unknown = Finding("change", section, rate.outcome, threshold=SPREAD, numbers=numbers, sentence=sentence)
        changes = [unknown, _change_of_rate(run, label, section, "window_mass", sink)]
    elif rate.before < NO_SINK and rate.after < NO_SINK:
        sentence = f"There is no sink at position {sink}, before or after."
        changes = [replace(changes[0], outcome=Outcome.ABSENT, sentence=sentence)]
    perplexity, ratio = effect_of(run, label, "perplexity"), _ratio(run, label, "perplexity")
    numbers = {"before": perplexity.before, "control": perplexity.control, "ratio": ratio.value}
    numbers |= estimate_interval(ratio, "ratio_")
    sentence = f"Perplexity is {_times(ratio)}"
    if perplexity.controls:
        numbers["control_ratio"] = perplexity.control / perplexity.before
        sentence += f", and {_times(Estimate(numbers['control_ratio']), 'under the control')}"
    about: dict[str, Any] = {"spread": perplexity.spread, "numbers": numbers, "sentence": f"{sentence}."}
    return [
        *changes,
        *_sinks_anywhere(run, label, section, sink),
        *(_change_of_rate(run, label, section, "window_mass", target) for target in targets),
        Finding("perplexity", section, value=perplexity.after, **about),
        *_largest_elsewhere(run, label, section),
        *([_expected(run, label, section)] if arm["expects"] else []),
    ]


def _ratio(run: RunData, label: str, metric: str, position: int = NO_POSITION) -> Estimate:
    """Return a metric of the model under an arm ÷ before it; the interval resamples the sequences that both read."""
    effect, pair = effect_of(run, label, metric, position), _replicates(run, label, metric, position)
    value = effect.after / (effect.before or nan)
    if pair is None or isnan(value):
        return Estimate(value)
    before, after = pair
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold only sequences without a sink
        ratios = after / before
    return replace((positive_jackknife if metric == "perplexity" else bootstrap)(ratios), value=value)


def _times(ratio: Estimate, of: str = "its value before") -> str:
    form = ".3f" if ratio.value < 10 else ",.4g" if ratio.value < 1000 else ",.0f"
    return with_interval(ratio, form, f" times {of}")


def _change_of_rate(run: RunData, label: str, section: str, metric: str, position: int) -> Finding:
    """Return how a rate or mass changes; for a sink rate that changes, with the layers where it does most."""
    effect, ratio = effect_of(run, label, metric, position), _ratio(run, label, metric, position)
    layers: tuple[int, ...] = ()
    if metric == "sink_rate" and effect.outcome in (Outcome.FALLS, Outcome.RISES):
        table = run.tables["effect"].query("metric == 'sink_rate' and layer >= 0 and arm != 'control'")
        table = table[(table["condition"] == label) & (table["position"] == position)]
        by_arm = table.pivot(index="layer", columns="arm", values="value")
        by_layer = by_arm["after"] - by_arm["before"]
        # in the direction of the model's rate
        by_layer = (by_layer * np.sign(by_layer.sum())).sort_values(ascending=False, kind="stable")
        if len(by_layer) > LAYERS_NAMED:
            layers = tuple(sorted(by_layer.index[:LAYERS_NAMED]))
    sentence = f"The {METRICS[metric].short} at position {position} {CHANGES[effect.outcome]}"
    if effect.outcome != Outcome.UNCHANGED and isfinite(ratio.value):
        sentence += f"{', at' if effect.outcome == Outcome.UNDECIDED else ' to'} {_times(ratio)}"
    sentence += f", most in {layers_text(layers)}." if layers else "."
    numbers = {"metric": metric, "position": position, "before": effect.before, "control": effect.control}
    numbers |= {"layers": layers, "ratio": ratio.value, **estimate_interval(ratio, "ratio_")}
    value, spread = effect.after, effect.spread
    return Finding("change", section, effect.outcome, value, spread, nan, SPREAD, numbers=numbers, sentence=sentence)


def _sinks_anywhere(run: RunData, label: str, section: str, sink: int) -> Iterator[Finding]:
    """Yield where sinks are under the arm: a sink that is prevented at one position may be at another."""
    following = effect_of(run, label, "sink_rate", sink + 1)
    anywhere = effect_of(run, label, "sink_rate_anywhere")
    if isnan(anywhere.after):  # too few queries
        return
    sentence = f"Any position is a sink in {anywhere.compared('sink_rate_anywhere')} of the heads and sequences"
    numbers: dict[str, Any] = {"before": anywhere.before, "control": anywhere.control, "position": sink + 1}
    if not isnan(following.after):
        numbers |= {f"next_{name}": getattr(following, name) for name in ("before", "after", "control")}
        sentence += f", position {sink + 1} in {following.compared('sink_rate')} of the heads"
    table = run.tables.get("sink_positions", pd.DataFrame(columns=["condition", "position"]))
    table = table[(table["condition"] == label) & (table["position"] != sink)]
    if len(table) and len(sinks := clear_sinks(table)):
        by_position = sinks["position"].value_counts(normalize=True)  # the largest first
        most, share = int(by_position.index[0]), float(by_position.iloc[0])
        numbers |= {"most": most, "most_share": share}
        sentence += f"; {share:.0%} of the sinks at other positions than {sink} are at position {most}"
    about: dict[str, Any] = {"threshold": SPREAD, "numbers": numbers, "sentence": f"{sentence}."}
    yield Finding("sinks-anywhere", section, anywhere.outcome, anywhere.after, anywhere.spread, **about)


def _largest_elsewhere(run: RunData, label: str, section: str) -> Iterator[Finding]:
    """Yield the site of the largest activation if it rises although the arm sets massive activations elsewhere."""
    change = effect_of(run, label, "massive_magnitude")
    names = (ZeroMassive.name, MeanMassive.name)
    done: list[Any] = [parse(text) for text in arms(run)[label]["do"] if text.partition(":")[0] in names]
    if not done or "massive" not in run.tables or not change.after > change.before:
        return
    table = run.tables["massive"]
    table = table[table["condition"] == label].assign(magnitude=lambda rows: rows["value"].abs())
    largest = table.loc[table.groupby(["layer", "sequence"])["magnitude"].idxmax()]
    layer = largest.groupby("layer")["magnitude"].mean().idxmax()
    coordinate, position = largest[largest["layer"] == layer][["coordinate", "position"]].value_counts().idxmax()
    where = {"layer": int(layer), "position": int(position), "coordinate": int(coordinate)}
    what = " and ".join(intervention.name for intervention in done)
    for place, value in where.items():
        if not any(value in (getattr(intervention, f"{place}s") or ()) for intervention in done):
            sentence = f"The largest |activation| rises: it is now at coordinate {coordinate} of layer {layer}'s "
            sentence += f"output and position {position}, a {place} that `{what}` does not change."
            numbers = {"before": change.before, "place": place, "what": what} | where
            yield Finding("largest-rises", section, value=change.after, numbers=numbers, sentence=sentence)
            return


def _streaming(run: RunData, label: str, section: str) -> Iterator[Finding]:
    table = _streamed(run, label)
    dense = float(table.query("method == 'dense'")["perplexity"].iloc[0])
    for row in table.query("method != 'dense'").sort_values(["window", "keep"]).itertuples():
        first = f" and the first {row.keep}" if row.keep else ""
        ratio = Estimate(row.perplexity / dense)
        sentence = f"With the last {counted(row.window, 'token')}{first}, perplexity is "
        sentence += f"{_times(ratio, 'that of dense attention')}."
        numbers = {"window": row.window, "keep": row.keep or None, "dense": dense, "ratio": ratio.value}
        yield Finding("streaming", section, value=float(row.perplexity), numbers=numbers, sentence=sentence)


# --- findings of papers, compared with the run

PUBLISHED_EFFECTS = {
    Expectation.SINK_FALLS: "the sink falls",
    Expectation.SINK_STAYS: "the sink stays",
    Expectation.SINK_MOVES: "the sink moves",
    Expectation.PERPLEXITY_COLLAPSES: "perplexity collapses",
    Expectation.PERPLEXITY_UNHARMED: "perplexity is unharmed",
}
BEYOND = "beyond the control's spread"
# the paper's finding, and whether the sink (or the attention to the target of a sink that moves) has changed beyond the
# controls and to the end (less than half of the sink is left; it has left its source) → outcome, and "Here …"
AGAINST_PAPERS = {
    (Expectation.SINK_FALLS, True, True): (Outcome.CONFIRMED, "it does"),
    (Expectation.SINK_FALLS, True, False): (Outcome.PARTLY, f"it does, but at least {HALF:.0%} of it is left"),
    (Expectation.SINK_FALLS, False, False): (Outcome.REFUTED, f"it does not fall {BEYOND}"),
    (Expectation.SINK_STAYS, True, True): (Outcome.REFUTED, f"less than {HALF:.0%} of it is left"),
    (Expectation.SINK_STAYS, True, False): (Outcome.PARTLY, "it does, though part of it is lost"),
    (Expectation.SINK_STAYS, False, False): (Outcome.CONFIRMED, "it does"),
    (Expectation.SINK_MOVES, True, True): (Outcome.CONFIRMED, "the sink moved to position {target}"),
    (Expectation.SINK_MOVES, True, False): (Outcome.PARTLY,
        f"attention to position {{target}} rises, but the sink at position {{source}} does not fall {BEYOND}"),
    (Expectation.SINK_MOVES, False, False): (Outcome.REFUTED,
        f"it did not move: position {{target}} gains no attention {BEYOND}"),
}  # fmt: skip


def _expected(run: RunData, label: str, section: str) -> Finding:
    """Return whether the paper's finding on this arm is confirmed."""
    arm = arms(run)[label]
    expectation, (sink, *targets) = Expectation(arm["expects"]), arm["watched"]
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
            passes += [True] * (min(ends) < 1 < max(ends))  # 1, the ratio without harm, is between the ends
            yes, no = f"it is: it changes by less than {HARM:.0%}", f"it is not: it changes by more than {HARM:.0%}"
        outcome, here = Outcome.UNDECIDED, "the interval of perplexity does not decide"
        if len(set(passes)) == 1:
            outcome, here = (Outcome.CONFIRMED, yes) if passes[0] else (Outcome.REFUTED, no)
    else:
        rate = effect_of(run, label, "sink_rate", sink)
        value, threshold, falls = rate.after, HALF, rate.outcome == Outcome.FALLS
        target = targets[0] if targets else None
        numbers |= {"before": rate.before, "source": sink, "target": target}
        if expectation == Expectation.SINK_MOVES:
            gain = effect_of(run, label, "window_mass", targets[0]).outcome
            is_changed, is_complete, is_undecided = gain == Outcome.RISES, falls, gain == Outcome.UNDECIDED
        else:
            is_changed, is_complete = falls, rate.after < HALF * rate.before
            is_undecided = rate.outcome == Outcome.UNDECIDED
        if rate.outcome == Outcome.UNDEFINED:
            outcome, here = Outcome.UNDEFINED, "there is no sink rate"
        elif rate.before < NO_SINK and expectation != Expectation.SINK_MOVES:
            outcome, here = Outcome.ABSENT, "there is no sink before the intervention"
        elif is_undecided:
            outcome, here = Outcome.UNDECIDED, "there are too few controls to judge it"
        else:
            outcome, words = AGAINST_PAPERS[expectation, is_changed, is_changed and is_complete]
            here = words.format(source=sink, target=target)
        following = effect_of(run, label, "sink_rate", sink + 1)
        if expectation != Expectation.SINK_MOVES and falls and following.outcome == Outcome.RISES:
            numbers |= {"next": following.after, "next_before": following.before, "next_control": following.control}
            here += f", and position {sink + 1} becomes one in {following.compared('sink_rate')} of the heads"
    sentence = f"Published: {PUBLISHED_EFFECTS[expectation]}. Here {here} ({arm['paper']})."
    about: dict[str, Any] = {"threshold": threshold, "numbers": numbers, "is_headline": True, "sentence": sentence}
    return Finding(str(expectation), section, outcome, value, **about)


# --- intervals over sequences
#
# The run before an arm and the arm read the same sequences, so that their difference is more precise than each number:
# sequences are resampled in pairs, and the interval of the change is shifted to the arm's number. For perplexities,
# each passage of the text is left out in turn (jackknife), because sequences of one passage are not independent.


def interval(run: RunData, label: str, metric: str, position: int = NO_POSITION) -> tuple[float, float] | None:
    """Return the 95 % interval of a metric of the model under an arm; the number before the arm is taken as fixed."""
    pair = _replicates(run, label, metric, position)
    return None if pair is None else _interval_of_change(*pair, metric == "perplexity")


def interval_by_layer(run: RunData, label: str, metric: str, position: int) -> pd.DataFrame:
    pair = _replicates(run, label, metric, position, by_layer=True)
    if pair is None:
        return pd.DataFrame(columns=["low", "high"])
    table = run.tables["attention_by_sequence"]
    layers = np.unique(table["layer"][(table["condition"] == label) & (table["position"] == position)])
    ends = [_interval_of_change(before, after) for before, after in zip(*(values.T for values in pair), strict=True)]
    table = pd.DataFrame(ends, columns=["low", "high"], index=layers)
    return table[np.isfinite(table).all(axis=1)]  # NaN for a single sequence


def _interval_of_change(before: np.ndarray, after: np.ndarray, is_factor: bool = False) -> tuple[float, float]:
    """Return the interval of a change, (1 + draws,) each, or of a factor of perplexity, (1 + passages,) each."""
    change = positive_jackknife(after / before) if is_factor else bootstrap(after - before)
    low, high = (before[0] * end if is_factor else before[0] + end for end in (change.low, change.high))
    return float(low), float(high)


def _replicates(
    run: RunData, label: str, metric: str, position: int, by_layer: bool = False
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return values before and under the arm, (1 + draws,) each or (1 + draws, layers); None without sequences."""
    pair = []
    for condition in (BEFORE, label):
        sequences = Sequences(run, condition)
        try:
            if metric == "perplexity":
                if sequences.table("loss_by_sequence").empty:
                    return None  # `claims` measures the model before all arms only once
                pair.append(np.exp(sequences.losses))
            elif metric == "massive_magnitude":
                rows = sequences.table("massive")  # to find the layer with the largest |activation|
                largest = rows["value"].abs().groupby([rows["sequence"], rows["layer"]]).max().unstack("layer")
                largest = largest.reindex(range(sequences.weights.shape[1]))
                pair.append(weighted_means(largest.to_numpy(float), sequences.weights).max(1))
            else:
                pair.append(sequences.means("attention_by_sequence", metric, position=position))
        except Lacks:
            return None
    before, after = pair
    if before.shape != after.shape or not before.size:
        return None
    return (before.mean(1), after.mean(1)) if before.ndim > 1 and not by_layer else (before, after)
