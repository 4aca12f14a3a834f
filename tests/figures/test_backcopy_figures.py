"""Figures of the Bigram-Backcopy task show the data of the tables, for any number of arms, seeds, layers and heads."""

import numpy as np
import pandas as pd
import pytest
from support.drawn_figures import STEPS, backcopy_maps, backcopy_training
from support.figures import edges_at

from sinkscope.figures import OF_ARMS
from sinkscope.figures.style import Figure
from sinkscope.figures.training import ROWS, Arms
from sinkscope.results.run import RunData
from sinkscope.training.tables import sinking_layer

RUNS = {"arm 0": RunData({"model": {"name": "tiny"}, "input": {"token_zero": "bos <s> (id 0)"}}, {})}


def draw_backcopy_training(training: pd.DataFrame) -> Figure:
    return OF_ARMS["backcopy-training"](Arms({"training": training}, RUNS))


def test_lines_are_means_over_seeds_and_bands_reach_the_extremes() -> None:
    table = backcopy_training(arms=2, seeds=3)
    figure = draw_backcopy_training(table)
    axes = np.array(figure.axes).reshape(len(ROWS), 2)
    for column, arm in enumerate(("arm 0", "arm 1")):
        for ax, curves in zip(axes[:, column], ROWS.values(), strict=True):
            assert len(ax.collections) == len(curves)
            for nth, (line, metric) in enumerate(zip(ax.lines, curves, strict=True)):
                rows = table[(table["condition"] == arm) & (table["metric"] == metric)].groupby("step")["value"]
                assert line.get_xdata().tolist() == list(STEPS)
                assert line.get_ydata().tolist() == pytest.approx(rows.mean().tolist())
                for step in STEPS:
                    assert edges_at(ax, step, nth) == pytest.approx((rows.min()[step], rows.max()[step]))


def test_the_layer_with_the_largest_sink_is_drawn() -> None:
    table = backcopy_training(layers=3, seeds=1)
    at = (table["metric"] == "attention_to_start") & (table["step"] == 100) & (table["condition"] == "arm 0")
    table.loc[at & (table["layer"] == 1), "value"] = 2.0
    assert sinking_layer(table) == 1
    figure = draw_backcopy_training(table)
    line = np.array(figure.axes).reshape(len(ROWS), 3)[1, 0].lines[0]
    assert line.get_ydata()[-1] == 2.0
    assert "layer 1" in figure.get_suptitle()


def test_maps_and_bars_show_the_tables() -> None:
    weights, norms = backcopy_maps(arms=2)
    figure = OF_ARMS["backcopy-maps"](Arms({"attention_maps": weights, "value_norms": norms}, RUNS))
    above, below = np.array(figure.axes[:4]).reshape(2, 2)
    for column, arm in enumerate(("arm 0", "arm 1")):
        shown = above[column].images[0].get_array()
        for row in weights[weights["condition"] == arm].itertuples():
            assert shown[row.query, row.key] == row.weight
        assert np.ma.masked_invalid(shown).mask[np.triu_indices(6, 1)].all()
        assert [bar.get_height() for bar in below[column].patches] == [1, 2, 3, 4, 5, 6]
    assert not below[0].collections  # there is no gate
    gated = [segment[0, 1] for segment in below[1].collections[0].get_segments()]
    assert gated == [0.5, 1, 1.5, 2, 2.5, 3]
    colors = [label.get_color() for label in below[0].get_xticklabels()]
    assert [color != "black" for color in colors] == [False, False, True, False, False, True]  # triggers
