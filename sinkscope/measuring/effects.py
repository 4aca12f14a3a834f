"""The table `effect`: what an experiment compares between its arms."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.summary import WHOLE_MODEL, attention_by_layer
from sinkscope.results.tables import METRIC, VALUE, Column

EFFECT_COLUMNS = (
    Column("name", "the intervention with its parameters", kind="text"),
    Column("arm", "before, after or control", kind="text"),
    Column("draw", "which of the random controls, from 0 on; -1: no control", kind="whole"),
    METRIC,
    Column("position", "watched position; -1: none", kind="whole"),
    VALUE,
)
NO_POSITION = -1


def arm_metrics(tables: Mapping[str, pd.DataFrame], watched: Sequence[int], loss: float) -> pd.DataFrame:
    """The metrics of one arm.

    sink_rate, window_mass    at each watched position, means over heads (GS eq. 1); the model's over layers, too
    massive_magnitude         largest |entry| of a layer's output, mean over sequences; the model's largest layer
    massive_count             massive activations per sequence; the model's sum over layers
    loss, perplexity          of the predicted tokens, in nats; left out where there is none

    `tables` are the arm's `attention` and `massive`, `loss` is per predicted token. Columns: layer, metric, position,
    value.
    """
    rows: list[tuple[int, str, int, float]] = []
    for position in watched:
        by_layer = attention_by_layer(tables["attention"], position)
        for metric in ("sink_rate", "window_mass"):
            rows += [(int(layer), metric, position, float(value)) for layer, value in by_layer[metric].items()]
            rows.append((WHOLE_MODEL, metric, position, float(by_layer[metric].mean())))
    massive = tables["massive"]
    sequences = massive["sequence"].nunique()
    largest = massive["value"].abs().groupby([massive["layer"], massive["sequence"]]).max().groupby("layer").mean()
    counts = massive.groupby("layer")["is_massive"].sum() / sequences
    for metric, series, whole in (
        ("massive_magnitude", largest, largest.max()),
        ("massive_count", counts, counts.sum()),
    ):
        rows += [(int(layer), metric, NO_POSITION, float(value)) for layer, value in series.items()]
        rows.append((WHOLE_MODEL, metric, NO_POSITION, float(whole)))
    if not np.isnan(loss):
        rows += [(WHOLE_MODEL, name, NO_POSITION, x) for name, x in (("loss", loss), ("perplexity", perplexity(loss)))]
    return pd.DataFrame(rows, columns=["layer", "metric", "position", "value"])
