"""Runs of `analyze` made by hand, of which the metrics are given."""

from typing import Any

import pandas as pd

from sinkscope.report.run import Run


def summarized(
    summary: dict[str, list[float]] | None = None,
    whole: dict[str, float] | None = None,
    tables: dict[str, pd.DataFrame] | None = None,
    **manifest: Any,
) -> Run:
    """A run with these metrics by layer, and of the whole model: the means, or as given."""
    rows = [(layer, metric, value) for metric, values in (summary or {}).items() for layer, value in enumerate(values)]
    means = {metric: sum(values) / len(values) for metric, values in (summary or {}).items()} | (whole or {})
    rows += [(-1, metric, value) for metric, value in means.items()]
    record = {
        "model": {"name": "tiny", "source": "org/tiny", "layer_types": None, "sliding_window": None},
        "family": {"positions": "rotary", "wiring": "pre-norm"},
        "input": {"sequences": 2, "token_zero": "bos", "shortest": 64, "longest": 64},
        "config": {"seq_len": 64, "window": 64, "epsilon": 0.3},
        "condition": "natural",
        "dtype": "float32",
        "absent": {},
    }
    measured = {"summary": pd.DataFrame(rows, columns=["layer", "metric", "value"])} | (tables or {})
    return Run(record | manifest, measured)
