"""What an intervention did: read from the table `effect`, and the sentences that it allows.

An arm's change counts only if it is beyond what random changes of the same kind do (the control's draws).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.measuring.effects import NO_POSITION
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.paper_tables import as_markdown
from sinkscope.results.run import RunData

NO_SINK = 0.01  # a sink rate below this is none
SPREAD = 2.0  # standard deviations of the control
MATERIAL = 0.005  # a rate or mass that changes less than this has not changed


# --- reading the table


@dataclass(frozen=True)
class Effect:
    """One metric of one arm."""

    before: float
    after: float
    controls: tuple[float, ...]

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def is_beyond(self) -> bool:
        """Is the change of a rate or mass larger than what random changes of the same kind do? Never said without
        two of them.
        """
        if len(self.controls) < 2:
            return False
        changes = np.array(self.controls) - self.before
        sign = np.sign(self.change)
        reach = sign * changes.mean() + SPREAD * changes.std(ddof=1)
        return bool(abs(self.change) > max(reach, (sign * changes).max(), MATERIAL))

    @property
    def falls(self) -> bool:
        return self.change < 0 and self.is_beyond

    @property
    def rises(self) -> bool:
        return self.change > 0 and self.is_beyond


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


# --- in words and numbers


def verdict(run: RunData) -> str:
    """Markdown: a table of the arms, and a sentence each."""
    sentences = [f"- {finding(run, label)}" for label in arms(run)]
    sentences += [f"- `{name}` does not apply: {reason}." for name, reason in run.manifest["skipped"].items()]
    given = run.manifest["input"]
    setting = (
        f"Measured on {given['sequences']} sequences of {run.manifest['config']['seq_len']} tokens "
        f"({run.manifest['condition']}), position 0 being {given['token_zero']}."
    )
    draws = max((len(arm["controls"]) for arm in arms(run).values()), default=0)
    if draws:
        count = "1 draw" if draws == 1 else f"{draws} draws, mean ± standard deviation"
        setting += f" A control is a random change of the same kind, {count}."
    return f"## {run.model}: interventions\n\n{as_markdown(overview(run), numbers=True)}\n\n{setting}\n\n" + "\n".join(
        sentences
    )


def overview(run: RunData) -> pd.DataFrame:
    """One row an arm, and one its control: texts."""
    measured = [label for label, arm in arms(run).items() if arm["watched"]]
    watched = sorted({position for label in measured for position in arms(run)[label]["watched"]})
    columns: list[tuple[str, str, int, str]] = []
    for position in watched:
        columns.append((f"sink rate @{position}", "sink_rate", position, "{:.1%}"))
        columns.append((f"window mass @{position}", "window_mass", position, "{:.3f}"))
    columns.append(("massive", "massive_magnitude", NO_POSITION, "{:,.0f}"))
    columns.append(("perplexity", "perplexity", NO_POSITION, "{:,.4g}"))
    before: dict[str, str] = {"arm": "before"}
    rows = [before] if measured else []
    for label in measured:
        cells = {name: (effect_of(run, label, metric, position), form) for name, metric, position, form in columns}
        before |= {
            name: form.format(effect.before) for name, (effect, form) in cells.items() if _is_known(effect.before)
        }
        after = {name: form.format(effect.after) for name, (effect, form) in cells.items() if _is_known(effect.after)}
        rows.append({"arm": label} | after)
        if cells["perplexity"][0].controls:
            spreads = {name: _spread(effect.controls, form) for name, (effect, form) in cells.items()}
            rows.append({"arm": "  control"} | spreads)
    for label in arms(run):
        if label not in measured:
            rows += _streaming_rows(run, label)
    table = pd.DataFrame(rows).fillna("")
    return table[["arm", *(name for name, *_ in columns if name in table)]]


def _is_known(value: float) -> bool:
    return not np.isnan(value)


def _spread(controls: Sequence[float], form: str) -> str:
    if not controls:
        return ""
    mean, deviation = np.mean(controls), np.std(controls, ddof=1) if len(controls) > 1 else float("nan")
    return form.format(mean) + ("" if np.isnan(deviation) else f" ± {form.format(deviation)}")


def _streaming_rows(run: RunData, label: str) -> list[dict[str, str]]:
    rows = _streamed(run, label).itertuples()
    return [{"arm": _streaming_name(row), "perplexity": f"{row.perplexity:,.4g}"} for row in rows]


def _streamed(run: RunData, label: str) -> pd.DataFrame:
    """Of one streaming arm, its ways of reading over all tokens."""
    table = run.tables["streaming"]
    return table[(table["condition"] == label) & (table["bucket"] == -1)]


def _streaming_name(row: Any) -> str:
    if row.method == "dense":
        return "dense, as streaming measures it"
    return f"last {row.window} tokens" + (f" and the first {row.keep}" if row.keep else "")


def finding(run: RunData, label: str) -> str:
    """One arm in a plain sentence or two. That a sink fell, rose or moved is said only beyond the control's spread."""
    arm = arms(run)[label]
    if not arm["watched"]:
        return _streaming_finding(run, label)
    sink, *others = arm["watched"]
    parts = [_sink_sentence(run, label, sink), *(_target_sentence(run, label, target) for target in others)]
    perplexity = effect_of(run, label, "perplexity")
    control = _control_words(perplexity, "{:,.4g}")
    words = f"perplexity {perplexity.before:,.4g} → {perplexity.after:,.4g}"
    parts.append(f"{words} ({control})" if control else words)
    said = "; ".join(parts)
    outcome = EXPECTATIONS[arm["expects"]](run, label) if arm["expects"] in EXPECTATIONS else None
    verdict = f" {arm['paper']} found: {arm['expects']}. Here: {outcome}." if outcome else ""
    return f"`{label}`: {said}.{verdict}"


def _sink_sentence(run: RunData, label: str, position: int) -> str:
    rate = effect_of(run, label, "sink_rate", position)
    if rate.before < NO_SINK and rate.after < NO_SINK:
        return f"there is no sink at position {position}, before or after"
    moved = "falls" if rate.falls else "rises" if rate.rises else _within(rate)
    layers = _layers_that_changed(run, label, position) if rate.falls or rate.rises else ""
    details = [f"{rate.before:.1%} → {rate.after:.1%}", _control_words(rate, "{:.1%}"), layers]
    return f"the sink rate at position {position} {moved} ({', '.join(filter(None, details))})"


def _within(effect: Effect) -> str:
    return (
        "changes no more than under the control"
        if len(effect.controls) > 1
        else "changes, with too few controls to judge by"
    )


def _target_sentence(run: RunData, label: str, position: int) -> str:
    mass = effect_of(run, label, "window_mass", position)
    moved = "rises" if mass.rises else "falls" if mass.falls else _within(mass)
    details = [f"{mass.before:.3f} → {mass.after:.3f}", _control_words(mass, "{:.3f}")]
    return f"the window mass at position {position} {moved} ({', '.join(filter(None, details))})"


def _control_words(effect: Effect, form: str) -> str:
    return f"control {_spread(effect.controls, form)}" if effect.controls else ""


def _layers_that_changed(run: RunData, label: str, position: int) -> str:
    """The three layers in which the sink rate changed most, in the direction of the whole model's."""
    table = run.tables["effect"].query("metric == 'sink_rate' and layer >= 0 and arm != 'control'")
    table = table[(table["condition"] == label) & (table["position"] == position)]
    by_arm = table.pivot(index="layer", columns="arm", values="value")
    change = by_arm["after"] - by_arm["before"]
    change = change * np.sign(change.sum())
    most = sorted(change.sort_values(ascending=False, kind="stable").head(3).index)
    return f"most in layers {', '.join(str(layer) for layer in most)}" if len(change) > 3 else ""


def _streaming_finding(run: RunData, label: str) -> str:
    table = _streamed(run, label)
    dense = float(table.query("method == 'dense'")["perplexity"].iloc[0])
    words = []
    for window, rows in table.query("method != 'dense'").groupby("window"):
        by_keep = rows.set_index("keep")["perplexity"].sort_index()
        kept = ", ".join(f"{value:,.4g} with the first {keep}" for keep, value in by_keep.items() if keep)
        bare = f"{by_keep[0]:,.4g} with the last {window} tokens alone" if 0 in by_keep.index else ""
        words.append("; ".join(part for part in (bare, kept) if part))
    return f"`{label}`: perplexity {dense:,.4g} with dense attention; " + "; ".join(words) + "."


# --- what papers found, and whether it is so here


def _sink_falls(run: RunData, label: str) -> str:
    rate = effect_of(run, label, "sink_rate", arms(run)[label]["watched"][0])
    if rate.before < NO_SINK:
        return "there is no sink to begin with"
    if not rate.falls:
        return "it does not fall beyond the control's spread"
    return "it does" if rate.after < 0.5 * rate.before else "it does, but more than half of it is left"


def _sink_stays(run: RunData, label: str) -> str:
    rate = effect_of(run, label, "sink_rate", arms(run)[label]["watched"][0])
    if rate.before < NO_SINK:
        return "there is no sink to begin with"
    if rate.falls and rate.after < 0.5 * rate.before:
        return "it does not: less than half of it is left"
    return "it does, though some of it goes" if rate.falls else "it does"


def _sink_moves(run: RunData, label: str) -> str:
    source, target = arms(run)[label]["watched"]
    left = effect_of(run, label, "sink_rate", source).falls
    arrived = effect_of(run, label, "window_mass", target).rises
    if left and arrived:
        return f"the sink moved to position {target}"
    if arrived:
        return f"position {target} becomes a sink, and position {source} stays one"
    return f"it did not move: position {target} gains nothing beyond the control's spread"


def _perplexity_collapses(run: RunData, label: str) -> str:
    perplexity = effect_of(run, label, "perplexity")
    factor = perplexity.after / perplexity.before
    return f"it is multiplied by {factor:,.4g}" + ("" if factor > 10 else ", which is no collapse")


def _perplexity_unharmed(run: RunData, label: str) -> str:
    perplexity = effect_of(run, label, "perplexity")
    change = perplexity.after / perplexity.before - 1
    return f"it changes by {change:+.1%}" + ("" if abs(change) < 0.05 else ", which is harm")


EXPECTATIONS: dict[str, Callable[[RunData, str], str]] = {
    "sink falls": _sink_falls,
    "sink stays": _sink_stays,
    "sink moves": _sink_moves,
    "perplexity collapses": _perplexity_collapses,
    "perplexity unharmed": _perplexity_unharmed,
}
