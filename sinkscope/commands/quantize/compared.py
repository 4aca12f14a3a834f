"""Two runs of `quantize` side by side: how much more each scheme costs in the second run than in the first.

Where both runs have the losses of presets on the same tokens, the two costs of each text are subtracted, and texts are
resampled. Otherwise the runs are independent: the errors of both costs add in quadrature.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.measuring.engine import resampled_cost
from sinkscope.quantization import settings
from sinkscope.quantization.formats import Precision
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate, bootstrap
from sinkscope.results.tables import LEADING, WHOLE_MODEL, Column, Columns, names_of
from sinkscope.verdict.report import with_interval

TABLE = "comparison_by_scheme"
SCHEME_TABLES: dict[str, Columns] = {
    TABLE: (
        Column("scheme", "of the second run, which names the row's model and condition", kind="text"),
        Column("against", "scheme of the first run: the same, or another if the runs share none", kind="text"),
        Column("part", "what is quantized, as in formats or in quantization", kind="text"),
        Column("first_cost", "in the first run", "nats per token"),
        Column("first_cost_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("first_cost_high", "upper end", "nats per token"),
        Column("cost", "in the second run", "nats per token"),
        Column("cost_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("cost_high", "upper end", "nats per token"),
        Column("difference", "cost minus first_cost", "nats per token"),
        Column("difference_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("difference_high", "upper end", "nats per token"),
        Column("is_paired", "whether the costs of each text are subtracted", kind="truth"),
    ),
}
PARTS = (settings.ALL, settings.WEIGHTS, settings.ACTIVATIONS, settings.KV_CACHE)  # of a static scheme
ROUND_OFF = 1e-5  # nats per token: two passes in float32 with batches of different sizes differ by less
LOSSES = "formats_losses"  # the table of losses by sequence, which runs of presets have
HEADING, NATS = "Difference", METRICS["cost"].text


def differences(first: RunData, second: RunData) -> pd.DataFrame:
    """Return the table of the schemes that both runs have; if there are none, of each scheme against each."""
    of_first, of_second = _costs(first), _costs(second)
    is_shared = not set(of_first["scheme"]).isdisjoint(of_second["scheme"])
    by = ["scheme", "part"] if is_shared else ["part"]
    pairs = of_first.assign(against=of_first["scheme"]).merge(of_second, on=by, suffixes=("_before", ""))
    is_paired = first.manifest["input"]["sha256"] == second.manifest["input"]["sha256"]
    is_paired = is_paired and all(LOSSES in run.tables for run in (first, second))
    labels, rows = {"model": second.model, "condition": second.condition, "layer": WHOLE_MODEL}, []
    for pair in pairs.to_dict(orient="records"):
        before, after = _estimate(pair, "cost", "_before"), _estimate(pair, "cost")
        difference = after - before
        if is_paired:
            drawn = [_resampled(first, pair["against"], pair["part"]), _resampled(second, pair["scheme"], pair["part"])]
            difference = bootstrap(drawn[1] - drawn[0])
        numbers = before.as_columns("first_cost") | difference.as_columns("difference")
        rows.append(pair | labels | numbers | {"is_paired": is_paired})
    return pd.DataFrame(rows)[[*LEADING, *names_of(SCHEME_TABLES[TABLE])]]


def _costs(run: RunData) -> pd.DataFrame:
    """Return the cost of each scheme and part, with its interval."""
    if "formats" in run.tables:
        return run.tables["formats"]
    table, entry = run.tables["quantization"], run.manifest["quantization"]
    is_whole = (table["sequences"] == table["sequences"].max()) & table["setting"].isin(PARTS)
    precision = Precision(**{each.name: entry[each.name] for each in fields(Precision)})
    return table[is_whole].drop(columns="part").assign(scheme=f"{entry['scheme']} {precision}", part=table["setting"])


def _resampled(run: RunData, scheme: str, part: str) -> np.ndarray:
    """Return (1 + draws,) replicates of a cost; every run on the same tokens draws the same texts."""
    table = run.tables[LOSSES]
    rows = table[(table["scheme"] == scheme) & (table["part"] == part)].sort_values("sequence")
    cost, predicted = rows["cost"].to_numpy(), rows["predicted"].to_numpy()
    return resampled_cost(cost, np.zeros_like(cost), predicted, run.text_numbers.tolist())


def _estimate(row: Mapping[str, Any], name: str, ending: str = "") -> Estimate:
    return Estimate(*(row[f"{name}{end}{ending}"] for end in ("", "_low", "_high")))


# --- words


def findings(table: pd.DataFrame, first: str, second: str) -> list[Finding]:
    """Return a finding for each scheme in all parts; `first` and `second` are the names of the runs."""
    rows = table[table["part"] == settings.ALL].to_dict(orient="records")
    return [_difference(row, first, second) for row in rows]


def _difference(row: Mapping[str, Any], first: str, second: str) -> Finding:
    difference, scheme = _estimate(row, "difference"), row["scheme"]
    costs = f"{NATS(row['cost'])} against {NATS(row['first_cost'])}"
    if scheme != row["against"]:
        costs += f" for {row['against']} in {first}"
    if abs(difference.value) < ROUND_OFF:
        outcome, sentence = Outcome.UNCHANGED, f"costs the same in {second}, up to round-off: {costs}"
    elif difference.low > 0 or difference.high < 0:
        outcome, word = (Outcome.RISES, "more") if difference.value > 0 else (Outcome.FALLS, "less")
        size = with_interval(difference if difference.value > 0 else -difference, "z.3f")
        sentence = f"costs {size} nats per token {word} in {second}: {costs}"
    else:
        outcome = Outcome.UNDECIDED
        sentence = f"is not shown to cost more or less in {second}: {costs}, a difference of "
        sentence += f"{with_interval(difference, 'z.3f')} nats per token"
    numbers = {"scheme": scheme, "against": row["against"], "cost": row["cost"], "first_cost": row["first_cost"]}
    about: dict[str, Any] = {"low": difference.low, "high": difference.high, "threshold": 0.0, "numbers": numbers}
    sentence = f"{scheme} {sentence}."
    return Finding("difference", HEADING, outcome, difference.value, is_headline=True, sentence=sentence, **about)


def setting(table: pd.DataFrame) -> Finding:
    sentence = "Unpaired, because the runs have no losses on the same tokens: the errors of both costs add up."
    if table["is_paired"].all():
        sentence = "Paired: both runs read the same tokens, and the two costs of each text are subtracted."
    return Finding("paired", "", numbers={"is_paired": bool(table["is_paired"].all())}, sentence=sentence)


def overview(table: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """Return the table as text: costs in nats per token, with their intervals."""
    rows = []
    for row in table.to_dict(orient="records"):
        name = row["scheme"] if row["scheme"] == row["against"] else f"{row['scheme']} − {row['against']}"
        values = {first: "first_cost", second: "cost", "difference": "difference"}
        texts = {label: with_interval(_estimate(row, of), "z.3f", label="") for label, of in values.items()}
        rows.append({"scheme": name, "part": row["part"], **texts})
    return pd.DataFrame(rows)
