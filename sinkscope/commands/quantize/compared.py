"""Two runs of `quantize` side by side: how much more each scheme costs in the second run than in the first.

Where both runs have the losses of presets on the same tokens, the two costs of each text are subtracted, and texts are
resampled. Otherwise the runs are independent: the errors of both costs add in quadrature.
"""

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
        Column("first_scheme", "of the first run: the same, or another if the runs share none", kind="text"),
        Column("part", "what is quantized, as in formats or in quantization", kind="text"),
        Column("first_cost", "in the first run, whose tables have its interval", "nats per token"),
        Column("cost", "in the second run", "nats per token"),
        Column("difference", "cost minus first_cost", "nats per token"),
        Column("difference_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("difference_high", "upper end", "nats per token"),
        Column("is_paired", "whether the costs of each text are subtracted", kind="truth"),
    ),
}
PARTS = (settings.ALL, settings.WEIGHTS, settings.ACTIVATIONS, settings.KV_CACHE)  # of a static scheme
ROUND_OFF = 1e-5  # nats per token: two passes in float32 with batches of different sizes differ by less
LOSSES = "formats_losses"  # the table of losses by sequence, which runs of presets have
NATS = METRICS["cost"].text


def differences(first: RunData, second: RunData) -> pd.DataFrame:
    """Return the table of the schemes that both runs have; if there are none, of each scheme against each."""
    before, after = _costs(first).add_prefix("first_"), _costs(second)
    by = ["scheme", "part"] if set(before["first_scheme"]) & set(after["scheme"]) else ["part"]
    pairs = before.merge(after, left_on=[f"first_{name}" for name in by], right_on=by)
    is_paired = first.manifest["input"]["sha256"] == second.manifest["input"]["sha256"]
    is_paired = is_paired and LOSSES in first.tables and LOSSES in second.tables
    rows = []
    for _, pair in pairs.iterrows():
        difference = Estimate.of_columns(pair, "cost") - Estimate.of_columns(pair, "first_cost")
        if is_paired:
            drawn = _resampled(second, pair["scheme"], pair["part"])
            difference = bootstrap(drawn - _resampled(first, pair["first_scheme"], pair["part"]))
        rows.append(difference.as_columns("difference"))
    labels = {"model": second.model, "condition": second.condition, "layer": WHOLE_MODEL, "is_paired": is_paired}
    return pairs.join(pd.DataFrame(rows)).assign(**labels)[[*LEADING, *names_of(SCHEME_TABLES[TABLE])]]


def _costs(run: RunData) -> pd.DataFrame:
    """Return the cost of each scheme and part, with its interval."""
    columns = ["scheme", "part", "cost", "cost_low", "cost_high"]
    if "formats" in run.tables:
        return run.tables["formats"][columns]
    table, entry = run.tables["quantization"], run.manifest["quantization"]
    is_whole = (table["sequences"] == table["sequences"].max()) & table["setting"].isin(PARTS)
    precision = Precision(**{each.name: entry[each.name] for each in fields(Precision)})
    return table[is_whole].assign(scheme=f"{entry['scheme']} {precision}", part=table["setting"])[columns]


def _resampled(run: RunData, scheme: str, part: str) -> np.ndarray:
    """Return (1 + draws,) replicates of a cost; every run on the same tokens draws the same texts."""
    table = run.tables[LOSSES]
    rows = table[(table["scheme"] == scheme) & (table["part"] == part)].sort_values("sequence")
    cost, predicted = rows["cost"].to_numpy(), rows["predicted"].to_numpy()
    return resampled_cost(cost, np.zeros_like(cost), predicted, run.text_numbers.tolist())


# --- words


def findings(table: pd.DataFrame, first: str, second: str) -> list[Finding]:
    """Return a finding for each scheme in all parts; `first` and `second` are the names of the runs."""
    rows = [_finding(row, first, second) for _, row in table[table["part"] == settings.ALL].iterrows()]
    sentence = "Unpaired, as the runs have no losses on the same tokens: the errors of both costs add in quadrature."
    if table["is_paired"].all():
        sentence = "Paired: both runs read the same tokens, and the two costs of each text are subtracted."
    return [*rows, Finding("paired", "Intervals", numbers={"paired": len(rows)}, sentence=sentence)]


def _finding(row: pd.Series, first: str, second: str) -> Finding:
    difference = Estimate.of_columns(row, "difference")
    size, outcome = with_interval(difference, "z.3f"), Outcome.UNDECIDED
    sentence = f"is not shown to cost more or less in {second}; the difference is {size} nats per token"
    if abs(difference.value) < ROUND_OFF:
        outcome, sentence = Outcome.UNCHANGED, f"costs the same in {second}, up to round-off"
    elif difference.low > 0:
        outcome, sentence = Outcome.RISES, f"costs {size} nats per token more in {second}"
    elif difference.high < 0:
        outcome, sentence = Outcome.FALLS, f"costs {with_interval(-difference, 'z.3f')} nats per token less in {second}"
    of_first = "" if row["scheme"] == row["first_scheme"] else f" for {row['first_scheme']} in {first}"
    sentence = f"{row['scheme']} {sentence}: {NATS(row['cost'])} against {NATS(row['first_cost'])}{of_first}."
    numbers = {name: row[name] for name in ("scheme", "first_scheme", "cost", "first_cost")}
    about: dict[str, Any] = {"low": difference.low, "high": difference.high, "threshold": 0.0, "numbers": numbers}
    return Finding("difference", "Difference", outcome, difference.value, is_headline=True, sentence=sentence, **about)


def overview(table: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """Return the table as text: costs in nats per token."""
    schemes = [" − ".join(dict.fromkeys(pair)) for pair in zip(table["scheme"], table["first_scheme"], strict=True)]
    differences = [with_interval(Estimate.of_columns(row, "difference"), "z.3f") for _, row in table.iterrows()]
    costs = {first: table["first_cost"].map(NATS), second: table["cost"].map(NATS), "difference": differences}
    return pd.DataFrame({"scheme": schemes, "part": table["part"], **costs})
