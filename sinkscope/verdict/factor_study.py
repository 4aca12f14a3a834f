"""A factor study: the trainings of a sweep by what differs between them, over seeds and steps, beside WSE's numbers.

A level is what one training has and another has not: parts of the cells' settings, as `position_scheme=alibi` of
`config=llama-1m:position_scheme=alibi`, and the arm. Seeds are repetitions of a level, also where the sweep's file has
them as a setting, so that each is a cell of its own; so may arms be.
"""

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.findings import SINK, Published
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import WSE_TRAININGS

TABLE = "sweep_training"
SHOWN = ("sink_rate", "loss", "bigram_risk", "backcopy_risk")
TOTALS = ("total_weight", "total_weight_at_sink")  # what the sink rate's shares are shares of
LEVEL = "level"
SAID_OTHERWISE = ("seed=", "method=")  # settings that are the column `seed` and the arm
KEYS = [LEVEL, "seed"]
PLAIN = ("none", "softmax")  # arms of which the published rates of other factors are
SIZES = ("num_hidden_layers=", "n_layer=", "num_attention_heads=")  # which make another study of the same factor
ONSET = "tokens to a sink, thousands"
PAPER = "WSE, sink rate in %"


def studied(training: pd.DataFrame) -> pd.DataFrame:
    """Of the table `training` of one cell, what the study is of: the whole model's SHOWN and TOTALS."""
    return training[(training["layer"] == WHOLE_MODEL) & training["metric"].isin([*SHOWN, *TOTALS])]


def levels(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Settings and condition, of a table that has both → the level."""
    pairs = table[["settings", "condition"]].drop_duplicates()
    parts = {(row.settings, row.condition): _parts(row.settings, row.condition) for row in pairs.itertuples()}
    common = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    return {pair: " ".join(part for part in own if part not in common) or own[-1] for pair, own in parts.items()}


def with_levels(table: pd.DataFrame) -> pd.DataFrame:
    """The table `sweep_training` with the column `level`."""
    named = levels(table)
    return table.assign(**{LEVEL: list(map(named.get, zip(table["settings"], table["condition"], strict=True)))})


def _parts(settings: str, condition: str) -> list[str]:
    """`config=a:b=c,d-e=1.0,seed=2` and an arm → a, b=c, d_e=1, the arm."""
    given = [part for part in re.split(r"[:,]", settings) if part and not part.startswith(SAID_OTHERWISE)]
    found = [part.removeprefix("config=") for part in given]
    named = [re.sub(r"^[^=]*=", lambda name: name[0].replace("-", "_"), part) for part in found]
    return [re.sub(r"(=\d+)\.0$", r"\1", part) for part in named] + [condition]


def without_key(levels: Sequence[str]) -> tuple[str, list[str]]:
    """`position_scheme`, and the levels without it, where all have this one setting; otherwise nothing and the same."""
    keys = [[part.partition("=")[0] for part in level.split() if "=" in part] for level in levels]
    common = set.intersection(*map(set, keys))
    if len(common) != 1:
        return "", list(levels)
    (key,) = common
    return key, [" ".join(part.removeprefix(f"{key}=") for part in level.split()) for level in levels]


def published(level: str) -> Published | None:
    """WSE's sink rate in percent; None where it has none of this level, or several of its parts are factors."""
    every = ["softmax"] if level == "none" else level.split()
    parts = [part for part in every if part not in PLAIN and not part.startswith(SIZES)]
    known = [WSE_TRAININGS[part] for part in (parts or every) if part in WSE_TRAININGS]
    return known[0] if len(known) == 1 and len(parts) <= 1 else None


def at_the_end(table: pd.DataFrame) -> pd.DataFrame:
    """Level, seed → each metric at the last step, sink rates in percent; of a table with levels."""
    last = table[table["step"] == table.groupby(KEYS)["step"].transform("max")]
    wide = last.pivot_table(index=KEYS, columns="metric", values="value", sort=False)
    return wide.assign(sink_rate=100 * wide["sink_rate"]) if "sink_rate" in wide else wide


def onsets(table: pd.DataFrame) -> pd.Series:
    """Level, seed → tokens that were read when the sink rate was first logged above SINK; of those where it was."""
    sinks = table[(table["metric"] == "sink_rate") & (100 * table["value"] > SINK)]
    return sinks.groupby(KEYS, sort=False)["tokens"].min()


def measured_at(table: pd.DataFrame) -> str:
    """Where the sink rate was logged: at the first token, or at the one that is fixed."""
    return "the fixed token" if table["settings"].str.contains("fixed-position=").any() else "position 0"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each level as text: mean ± standard deviation over seeds of each metric, after how many tokens a sink
    was there, WSE's sink rate, and total weights; with the number of seeds where not all have one.
    """
    table = with_levels(table)
    end, begun = at_the_end(table), onsets(table)
    rows = []
    for level, own in end.groupby(level=LEVEL, sort=False):
        row = {"level": str(level), "seeds": str(len(own))}
        row |= {_heading(metric): _spread(own[metric]) for metric in SHOWN if metric in own}
        row[ONSET] = _of_some(begun[begun.index.isin(own.index)] / 1000, len(own))
        rate = published(str(level))
        row[PAPER] = "–" if rate is None else f"{rate.value:.2f}{rate.mark}"
        totals = [metric for metric in TOTALS if metric in own]
        row |= {METRICS[metric].short: _of_some(own[metric].dropna(), len(own)) for metric in totals}
        rows.append(row)
    return pd.DataFrame(rows)


def at_a_glance(table: pd.DataFrame) -> pd.DataFrame:
    """`summary` without what a terminal has no room for."""
    whole = summary(table)
    return whole[[name for name in whole if name in ("level", "seeds", _heading("sink_rate"), "loss", PAPER)]]


def _heading(metric: str) -> str:
    return {"sink_rate": "sink rate in %"}.get(metric, metric.replace("_", " "))


def _of_some(values: pd.Series, seeds: int) -> str:
    """As `_spread`, and of how many seeds where not all of them have it."""
    return _spread(values) + (f" ({len(values)} of {seeds})" if 0 < len(values) < seeds else "")


def _spread(values: pd.Series) -> str:
    known: Sequence[float] = values.dropna().to_list()
    if not known:
        return "–"
    return _digits(float(np.mean(known)), 3) + (
        f" ± {_digits(float(np.std(known, ddof=1)), 2)}" if len(known) > 1 else ""
    )


def _digits(x: float, count: int) -> str:
    """So many significant digits: 200, where `.2g` writes 2e+02."""
    return f"{float(f'{x:.{count}g}'):g}"
