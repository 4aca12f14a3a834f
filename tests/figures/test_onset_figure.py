"""The figure of onsets draws the numbers of its table: courses, onsets with their intervals, leads with their null."""

import numpy as np
from support.drawn_figures import DOUBLED
from support.figures import edges_at
from support.made_up_steps import made_up_steps, sigmoid

from sinkscope.figures import OF_STEPS
from sinkscope.verdict.onsets import FEWEST_STEPS, RunsByStep, onset_table

RISE = sigmoid(DOUBLED, 50)
RUNS = made_up_steps(DOUBLED, {"value_gradient": np.ones(len(DOUBLED)), "norm": 1 + 9 * RISE, "sink_rate": RISE}, 0.4)


def test_it_draws_its_table() -> None:
    table = onset_table(RUNS)
    *axes, below = OF_STEPS["training-onsets"](RunsByStep(RUNS[::-1])).axes
    onsets = table[table["number"] == "onset"].set_index("quantity")
    for ax, (name, onset) in zip(axes, onsets.iterrows(), strict=True):
        course = table[(table["number"] == "course") & (table["quantity"] == name)]
        np.testing.assert_array_equal(ax.lines[0].get_xydata(), course[["step", "value"]])
        for row in course.itertuples():
            np.testing.assert_allclose(edges_at(ax, row.step), (row.low, row.high))
        if np.isnan(onset["value"]):
            assert ax.get_title("right") == "no onset"
            assert len(ax.lines) == 2
        else:
            assert set(ax.lines[2].get_xdata()) == {onset["value"]}
            (span,) = ax.patches
            assert (span.get_x(), span.get_x() + span.get_width()) == (onset["low"], onset["high"])
            assert ax.get_title("right") == "{value:g} [{low:g}, {high:g}]".format(**onset)
    assert list(onsets["value"].isna()) == [True, False, False]
    leads = table[table["number"] == "lead"]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in below.patches]
    np.testing.assert_allclose(bars, leads[["null_low", "null_high"]])
    np.testing.assert_allclose(below.lines[0].get_xdata(), leads["value"])
    np.testing.assert_allclose([part[:, 0] for part in below.collections[0].get_segments()], leads[["low", "high"]])


def test_few_steps_have_no_leads() -> None:
    assert len(OF_STEPS["training-onsets"](RunsByStep(RUNS[: FEWEST_STEPS - 1])).axes) == 3
    assert len(OF_STEPS["training-onsets"](RunsByStep(RUNS[:FEWEST_STEPS])).axes) == 4


def test_it_applies_only_to_steps_with_two_quantities() -> None:
    spec = OF_STEPS["training-onsets"]
    assert spec.applies(RunsByStep(RUNS))
    assert not spec.applies(RunsByStep(RUNS[:1]))
