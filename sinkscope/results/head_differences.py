"""Which heads differ between two runs, at a false discovery rate, and how many differ between halves of one run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy

from sinkscope.errors import InputError
from sinkscope.results.metric_estimates import BY_HEAD, SOURCES, difference_of, level_of, reads_the_same, replicates
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import RESAMPLING_SEED, differences, p_values, weighted_means

FALSE_DISCOVERIES = 0.05  # share of falsely named heads among all that are named, in the mean over studies
SPLITS = 20  # random halves of a run's texts


def head_differences(runs: Sequence[RunData], metric: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Compare every head of two runs, each at its own ε: paired over texts if both runs read the same tokens.

    A rank test over texts gives each head a p-value; Benjamini and Hochberg's procedure (1995) names those that differ.

    Heads without a value in a run, such as a sink rate where uniform attention exceeds ε, are not tested.

    Returns:
        A row for each head (layer, head, metric, first, second, difference with its ends, p, q, differs); and how many
        of the tested heads differ over how many texts, those in which every one has a value, next to the mean and the
        most of SPLITS random halves of each run, which differ by texts alone. With fewer than two such texts, no head
        is tested.

    Raises:
        InputError: a run has no values by head of the metric, or the runs have different heads.
    """
    if len(runs) != 2:
        raise InputError(f"heads are compared between two runs; {len(runs)} were given")
    level_of(metric, BY_HEAD)
    first, second = both = [Sequences(run) for run in runs]
    heads, drawn, values = [], [], []
    try:
        for each in both:
            labels, index = SOURCES[metric].labels(each, BY_HEAD)
            numbers, index = each.run.text_numbers, (slice(None), *index)
            copies = (np.unique(numbers)[:, None] == numbers).astype(float)
            heads.append(labels)
            drawn.append(replicates(each, metric, BY_HEAD)[index])
            values.append(weighted_means(SOURCES[metric].values(each)[index], copies))  # (texts, heads)
    except Lacks as lack:
        raise InputError(f"{metric} has no values by head in one of the runs: {lack}") from lack
    if not heads[0].equals(heads[1]):
        raise InputError("heads are compared between runs of models with the same layers and heads")
    is_paired = reads_the_same(first, second)
    is_tested = np.logical_and(*(np.isfinite(of_run).any(0) for of_run in values))
    values = [of_run[:, is_tested] for of_run in values]
    tested = list(map(_complete, [differences(*values)] if is_paired else values))
    is_tested &= min(map(len, tested)) > 1
    p, q = np.full((2, len(is_tested)), np.nan)
    if is_tested.any():
        p[is_tested] = p_values(*tested)
        q[is_tested] = scipy.stats.false_discovery_control(p[is_tested])
    estimates = [difference_of(*each, metric, first, second) for each in zip(drawn[0].T, drawn[1].T, strict=True)]
    table = heads[0].assign(metric=metric, first=drawn[0][0], second=drawn[1][0])
    table = table.join(pd.DataFrame([each.as_columns("difference") for each in estimates]))
    table = table.assign(p=p, q=q, differs=q <= FALSE_DISCOVERIES)
    counts = {"metric": metric, "heads": is_tested.sum(), "untested": (~is_tested).sum()}
    counts |= {"differing": table["differs"].sum(), "is_paired": is_paired, "splits": SPLITS}
    for name, x, of_run in zip(("first", "second"), tested * (1 + is_paired), values, strict=True):
        halves = differing_halves(_complete(of_run)) if is_tested.any() else [np.nan]
        counts |= {f"{name}_texts": len(x), f"{name}_halves": np.mean(halves), f"{name}_halves_most": max(halves)}
    return table, counts


def _complete(values: np.ndarray) -> np.ndarray:
    """Return the texts in which every head has a value."""
    return values[np.isfinite(values).all(1)]


def differing_halves(values: np.ndarray) -> list[int]:
    """Return how many heads differ between random halves of the texts, for SPLITS splits of values (texts, heads)."""
    random, half = np.random.default_rng(RESAMPLING_SEED), len(values) // 2
    splits = [values[random.permutation(len(values))] for _ in range(SPLITS)]
    of_splits = [scipy.stats.false_discovery_control(p_values(split[:half], split[half:])) for split in splits]
    return [int((q <= FALSE_DISCOVERIES).sum()) for q in of_splits]
