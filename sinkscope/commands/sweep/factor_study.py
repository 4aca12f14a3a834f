"""A factor study: the trainings of a sweep, grouped by the settings in which they differ, with WSE's numbers.

A level consists of the settings that not all trainings share, and of the arm: `position_scheme=alibi` and the arm for
`config=llama-1m:position_scheme=alibi`. Trainings that differ only in the seed repeat a level.
"""

import re
from collections.abc import Sequence

import pandas as pd

from sinkscope.results.findings import SINK, Published
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import WSE_TRAININGS
from sinkscope.results.tables import WHOLE_MODEL

STUDY = "sweep_training"
# metric → its heading
SHOWN = {"sink_rate": "sink rate in %", "loss": "loss"}
SHOWN |= {metric: METRICS[metric].short for metric in ("bigram_risk", "backcopy_risk")}
TOTALS = ("total_weight", "total_weight_at_sink")  # the denominators of the sink rate's shares
LEVEL = "level"
KEYS = [LEVEL, "seed"]
PLAIN = ("none", "softmax")  # arms of the published rates of other factors
SIZES = ("num_hidden_layers=", "n_layer=", "num_attention_heads=")  # settings that have their own studies
ONSET = "tokens to a sink, thousands"
PAPER = "WSE, sink rate in %"


def study_rows(training: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the table `training` of a cell for the study: SHOWN and TOTALS of the whole model."""
    return training[(training["layer"] == WHOLE_MODEL) & training["metric"].isin([*SHOWN, *TOTALS])]


def levels(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Return (settings, condition) → level, for a table with both columns."""
    pairs = table[["settings", "condition"]].drop_duplicates()
    parts: dict[tuple[str, str], list[str]] = {}  # [a, b=c, d_e=1, arm] for `config=a:b=c,d-e=1.0,seed=2` and an arm
    for settings, arm in pairs.itertuples(index=False, name=None):
        listed = [part.removeprefix("config=") for part in re.split(r"[:,]", settings)]
        # the column `seed` and the arm already contain these
        listed = [part for part in listed if part and not part.startswith(("seed=", "method="))]
        named = [re.sub(r"^[^=]*=", lambda name: name[0].replace("-", "_"), part) for part in listed]
        parts[settings, arm] = [*(re.sub(r"(=\d+)\.0$", r"\1", part) for part in named), arm]
    common = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    return {pair: " ".join(part for part in each if part not in common) or each[-1] for pair, each in parts.items()}


def with_levels(table: pd.DataFrame) -> pd.DataFrame:
    named = levels(table)
    return table.assign(**{LEVEL: list(map(named.get, zip(table["settings"], table["condition"], strict=True)))})


def without_key(levels: Sequence[str]) -> tuple[str, list[str]]:
    """Return the only setting that all levels have, and the levels without its name; otherwise "" and the levels."""
    keys = [[part.partition("=")[0] for part in level.split() if "=" in part] for level in levels]
    common = set.intersection(*map(set, keys))
    if len(common) != 1:
        return "", list(levels)
    (key,) = common
    return key, [" ".join(part.removeprefix(f"{key}=") for part in level.split()) for level in levels]


def published(level: str) -> Published | None:
    """Return WSE's sink rate in percent; None if WSE has none for this level, or several of its parts are factors."""
    every = ["softmax"] if level == "none" else level.split()
    parts = [part for part in every if part not in PLAIN and not part.startswith(SIZES)]
    known = [WSE_TRAININGS[part] for part in (parts or every) if part in WSE_TRAININGS]
    return known[0] if len(known) == 1 and len(parts) <= 1 else None


def at_the_end(table: pd.DataFrame) -> pd.DataFrame:
    """Return level, seed → each metric at the last step, sink rates in percent, for a table with levels."""
    last = table[table["step"] == table.groupby(KEYS)["step"].transform("max")]
    wide = last.pivot_table(index=KEYS, columns="metric", values="value", sort=False)
    return wide.assign(sink_rate=100 * wide["sink_rate"]) if "sink_rate" in wide else wide


def onsets(table: pd.DataFrame) -> pd.Series:
    """Return level, seed → tokens read when the logged sink rate first exceeded SINK, for seeds with a sink."""
    sinks = table[(table["metric"] == "sink_rate") & (100 * table["value"] > SINK)]
    return sinks.groupby(KEYS, sort=False)["tokens"].min()


def measured_at(table: pd.DataFrame) -> str:
    return "the fixed token" if table["settings"].str.contains("fixed-position=").any() else "position 0"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row of texts for each level: means ± standard deviations over seeds, and WSE's sink rate."""
    table = with_levels(table)
    onset, rows = onsets(table), []
    for level, end in at_the_end(table).groupby(level=LEVEL, sort=False):
        row = {"level": str(level), "seeds": str(len(end))}
        row |= {heading: _spread(end[metric]) for metric, heading in SHOWN.items() if metric in end}
        row[ONSET] = _spread(onset[onset.index.isin(end.index)] / 1000, len(end))
        rate = published(str(level))
        row[PAPER] = "–" if rate is None else f"{rate.value:.2f}{rate.mark}"
        row |= {METRICS[metric].short: _spread(end[metric], len(end)) for metric in TOTALS if metric in end}
        rows.append(row)
    return pd.DataFrame(rows)


def at_a_glance(table: pd.DataFrame) -> pd.DataFrame:
    whole = summary(table)
    return whole[[name for name in whole if name in ("level", "seeds", SHOWN["sink_rate"], "loss", PAPER)]]


def _spread(values: pd.Series, seeds: int = 0) -> str:
    """Return mean ± standard deviation (n − 1) of the known values, with their number if it is below `seeds`."""
    known = values.dropna().to_numpy(float)
    if not len(known):
        return "–"
    spread = f" ± {_digits(known.std(ddof=1), 2)}" if len(known) > 1 else ""
    return _digits(known.mean(), 3) + spread + (f" ({len(known)} of {seeds})" if len(known) < seeds else "")


def _digits(x: float, count: int) -> str:
    """Return a number with `count` significant digits and without an exponent: 200 in place of the 2e+02 of `.2g`."""
    return f"{float(f'{x:.{count}g}'):g}"
