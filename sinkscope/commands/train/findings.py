"""The findings on trained arms: the table `retrofit`, the Bigram-Backcopy task, and movements of new parameters."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from math import isnan, nan
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import ARM_TABLES, METRICS, PERPLEXITY_IN_W8A8
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate, mean_of_runs
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.results.trainings import HELD_OUT, UNTOUCHED, at_equal_loss, courses, sinking_layer
from sinkscope.verdict.report import interval, with_interval
from sinkscope.verdict.table_formats import as_markdown, table_with_spread

BACKCOPY_COLUMNS = (
    "bigram_risk", "backcopy_risk", "attention_to_start", "early_attention_to_start", "attention_to_triggers",
    "value_ratio", "attended_ratio", "delta_logit",
)  # fmt: skip


def backcopy_markdown(training: pd.DataFrame, note: str = "") -> str:
    """Return the last step in the `sinking_layer`, mean ± standard deviation over seeds; `note` is in the title."""
    layers = (WHOLE_MODEL, sinking_layer(training))
    last = training[(training["step"] == training["step"].max()) & training["layer"].isin(layers)]
    wide = last.pivot_table(index=["condition", "seed"], columns="metric", values="value", sort=False)
    wide["value_ratio"] = wide["start_value_norm"] / wide["other_value_norm"]
    wide["attended_ratio"] = wide["start_attended_norm"] / wide["other_attended_norm"]
    arms = training["condition"].unique()
    mean, spread = (wide.groupby("condition").agg(how).reindex(arms) for how in ("mean", "std"))
    table = as_markdown(table_with_spread(mean, spread, BACKCOPY_COLUMNS), numbers=True)
    title = f"## Non-trigger queries at step {last['step'].iloc[0]} (VGA figures 4 to 6)"
    return f"{title}{note and f'; {note}'}\n\n{table}\n"


def equal_loss_markdown(training: pd.DataFrame) -> str:
    """Return the sink rates of every two arms at the lowest held-out loss of both: means over seeds, 95 % intervals."""
    by_arm, rows = courses(training, HELD_OUT), []
    for pair in combinations(dict.fromkeys(arm for arm, _ in by_arm), 2):
        seeds = [seed for arm, seed in by_arm if arm == pair[0] and (pair[1], seed) in by_arm]
        of_seeds = [at_equal_loss(*(by_arm[arm, seed] for arm in pair)).to_numpy() for seed in seeds]
        of_seeds = [both for both in of_seeds if np.isfinite(both).all()]
        if not of_seeds:
            continue
        steps, losses, rates = np.moveaxis(np.stack(of_seeds), -1, 0)  # (seeds, arms) each
        gap = mean_of_runs(100 * (rates[:, 1] - rates[:, 0]))
        interval = f" [{gap.low:.1f}, {gap.high:.1f}]" if len(of_seeds) > 1 else ""
        row = {"A": pair[0], "B": pair[1], "held-out loss": f"{losses.mean():.3f}"}
        for name, step, rate in zip("AB", steps.mean(0), 100 * rates.mean(0), strict=True):
            row |= {f"step of {name}": f"{step:.0f}", f"sink rate of {name}, %": f"{rate:.1f}"}
        rows.append(row | {"B − A, points": f"{gap.value:+.1f}{interval}", "seeds": len(of_seeds)})
    title = "## Sink rates by total weight at equal held-out loss, the lowest of both arms"
    return f"{title}\n\n{as_markdown(pd.DataFrame(rows), numbers=True)}\n" if rows else ""


def without_start(runs: Iterable[RunData]) -> str:
    """Return the note for trainings whose sequences do not begin with the <s> of metric names; "" for others."""
    begin_with_it = all(run.manifest["input"]["token_zero"].startswith("bos") for run in runs)
    return "" if begin_with_it else "the first token takes the place of <s>"


def findings(tables: Mapping[str, pd.DataFrame], manifest: Mapping[str, Any]) -> list[Finding]:
    """Return each method against plain training, and how far its new parameters have moved."""
    compared = methods_compared(tables["retrofit"], manifest["arms"], manifest.get("sequences"))
    return compared + gates_moved(tables["gates"])


def methods_compared(
    retrofit: pd.DataFrame, arms: Mapping[str, Mapping[str, Any]], sequences: int | None = None
) -> list[Finding]:
    """Compare the sink rate and perplexities of each method with those of plain training, seed by seed.

    A command without plain training compares with the untouched model.

    Args:
        retrofit: the table `retrofit`.
        arms: the entry of run.json: label of an arm → its method, seed and label in tables.
        sequences: the number of held-out sequences on which all arms were measured.
    """
    plain = next((arm["label"] for arm in arms.values() if arm["method"] == "none"), UNTOUCHED)
    wide = retrofit.pivot_table(index=["condition", "seed"], columns="metric", values="value", sort=False)
    methods = dict.fromkeys(arm["label"] for arm in arms.values() if arm["label"] != plain)
    if plain not in wide.index or not methods:
        return []
    against = "the untouched model" if plain == UNTOUCHED else "plain training"
    compared = []
    numbers: dict[str, Any]
    for method in methods:
        ours, others = wide.loc[method].align(wide.loc[plain], join="inner", axis=0)  # seeds may be added to one arm
        if ours.empty:
            sentence = f"{method} has no seed in common with {against}, with which it would be compared."
            numbers = {"method": method, "seeds": 0, "sequences": sequences}
            compared.append(Finding("method", "Methods", Outcome.UNDEFINED, numbers=numbers, sentence=sentence))
            continue
        rates = 100 * (ours["sink_rate"] - others["sink_rate"]) if "sink_rate" in wide else pd.Series(nan, ours.index)
        points = mean_of_runs(rates.to_numpy())
        rate = f"sink rate {with_interval(points, '+.1f', ' points')}"
        rate = "no sink rate, as uniform attention exceeds ε" if isnan(points.value) else rate
        measured_on = f" on {measured_sequences(sequences)}" if sequences else ""
        sentence = f"{method}, compared with {against}{measured_on}: {rate}"
        numbers = {"method": method, "seeds": len(ours), "sequences": sequences}
        for name, what in (("perplexity", "perplexity"), (PERPLEXITY_IN_W8A8, "in W8A8")):
            ratios = np.log(ours[name] / others[name]) if name in wide else pd.Series(dtype=float)
            if not len(ratios) or not np.isfinite(ratios).all():
                continue
            mean = mean_of_runs(ratios.to_numpy())
            ratio = Estimate(*np.exp((mean.value, mean.low, mean.high)))
            numbers |= {f"{name}_ratio": ratio.value, **interval(ratio, f"{name}_ratio_")}
            sentence += f", {what} × {with_interval(ratio, '.3f', label='')}"
        sentence += "." if len(ours) > 1 else "; one seed has no interval."
        about: dict[str, Any] = {"numbers": numbers, "sentence": sentence, "is_headline": True, **interval(points)}
        compared.append(Finding("method", "Methods", value=points.value, **about))
    return compared


def measured_sequences(count: int) -> str:
    """Return the words for held-out sequences, with a mark for a single one, whose choice no interval covers."""
    return f"{count} held-out sequences" if count > 1 else "one held-out sequence, which may not stand for others"


def gates_moved(gates: pd.DataFrame) -> list[Finding]:
    moved = []
    for arm, rows in gates.groupby("condition", sort=False):
        most, mean = rows.loc[rows["displacement"].idxmax()], rows["displacement"].mean()
        layer = most["layer"] if most["layer"] >= 0 else None
        sentence = (
            f"{arm}: new parameters moved by {METRICS['gate_displacement_mean'].text(mean)} on average, by "
            f"{METRICS['gate_displacement_max'].text(most['displacement'])} at most"
        )
        sentence += "" if layer is None else f", in layer {layer}"
        numbers = {"arm": str(arm), "mean": mean, "layer": layer}
        moved.append(Finding("gates-moved", "Gates", value=most["displacement"], numbers=numbers, sentence=sentence))
    return moved


def retrofit_summaries(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return heading → table of arms, mean ± standard deviation over seeds, without columns that no arm has."""
    arms = table["condition"].unique()
    wide, spread = (
        table.pivot_table(index="condition", columns="metric", values="value", aggfunc=how, dropna=False).reindex(arms)
        for how in ("mean", "std")
    )
    known = {heading: [name for name in metrics if name in wide] for heading, metrics in ARM_TABLES.items()}
    return {heading: table_with_spread(wide, spread, metrics) for heading, metrics in known.items() if metrics}


def retrofit_markdown(table: pd.DataFrame, findings: Iterable[Finding] = (), sequences: int | None = None) -> str:
    parts = [f"# {model}" for model in table["model"].unique()]
    parts += ["\n".join(f"- {finding.sentence}" for finding in findings if finding.is_headline)]
    parts += [f"All arms were measured on {measured_sequences(sequences)}."] if sequences else []
    for heading, summary in retrofit_summaries(table).items():
        parts += [f"## {heading}", as_markdown(summary, numbers=True)]
    return "\n\n".join(part for part in parts if part) + "\n"
