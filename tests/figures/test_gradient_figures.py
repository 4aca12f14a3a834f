"""Figures of gradients and of steps show the data of the tables, and allow missing data."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from support.drawn_figures import DOUBLED, STEP_METRICS, checkpoint
from support.figures import edges_at, legend_of, said
from support.made_up_runs import make_run
from support.made_up_steps import made_up_steps, sigmoid

from sinkscope.commands.steps.onsets import FEWEST_STEPS, RunsByStep, onset_table
from sinkscope.figures import KINDS, draw
from sinkscope.figures.gradients import GROUP_LOOKS
from sinkscope.measuring.summary import compress_fits
from sinkscope.output.run import Run

PATHWAYS = ("query", "key", "value")


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


def of_width(ax: Axes, width: float) -> list[Any]:
    return [line for line in ax.lines if line.get_linewidth() == width]


def test_gradient_norms_draws_every_layer_and_their_mean(run: Run) -> None:
    axes = draw("gradient-norms", run).axes
    table = run.tables["gradient"].query("head == -1")
    for ax, pathway in zip(axes, PATHWAYS, strict=False):
        norms = table[table["pathway"] == pathway].pivot_table("grad_norm", "layer", "position").replace(0, np.nan)
        layers = of_width(ax, 0.5)
        np.testing.assert_allclose([line.get_ydata() for line in layers], norms)
        outline, mean = (of_width(ax, width) for width in (3, 1.4))
        np.testing.assert_allclose(mean[0].get_ydata(), norms.mean())
        np.testing.assert_allclose(outline[0].get_ydata(), norms.mean())
        assert ax.get_yscale() == "log"
        assert ax.get_title() == pathway
    assert [ax.get_ylim() for ax in axes[1:3]] == [axes[0].get_ylim()] * 2  # one scale, so that panels can be compared


def test_reshaping_draws_a_point_for_each_layer_and_position_by_the_papers_token_groups(run: Run) -> None:
    figure = draw("gradient-reshaping", run)
    table = run.tables["gradient_ratio"].query("branch == 'attn'")
    for ax, name in zip(figure.axes, ("bloat", "compress", "change"), strict=True):
        drawn = np.concatenate([line.get_xydata() for line in ax.lines if line.get_linestyle() == "None"])
        points = sorted(map(tuple, drawn))
        np.testing.assert_allclose(points, table[["input_norm", name]].sort_values("input_norm"))
        assert ax.get_title().startswith(name)
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    groups = {
        "position 0": (0, 0),
        "position 1": (1, 1),
        "positions 2–3": (2, 3),
        "positions 4–7": (4, 7),
        "positions 8–15": (8, 15),
    }
    for (first, last), (color, marker) in zip(groups.values(), GROUP_LOOKS, strict=False):
        rows = table[table["position"].between(first, last)]
        later, earliest = [line for line in figure.axes[0].lines if line.get_marker() == marker]
        np.testing.assert_allclose(later.get_xydata(), rows.query("layer > 0")[["input_norm", "bloat"]])
        np.testing.assert_allclose(earliest.get_xydata(), rows.query("layer == 0")[["input_norm", "bloat"]])
        assert later.get_markerfacecolor() == earliest.get_markeredgecolor() == color
        assert earliest.get_markerfacecolor() == "none"
    assert set(legend_of(figure)) == {*groups, "first layer", "fit", "slope −1; no change"}


def test_the_fitted_line_is_the_summarys(run: Run) -> None:
    table = run.tables["gradient_ratio"].query("branch == 'attn'")
    ax = draw("gradient-reshaping", run).axes[1]
    guide, line = (np.log10(line.get_xydata()) for line in ax.lines if line.get_linestyle() != "None")
    points = np.log10(table[["input_norm", "compress"]])
    slope, offset = np.polyfit(*points.to_numpy().T, 1)
    np.testing.assert_allclose(line[:, 1], offset + slope * line[:, 0])
    np.testing.assert_allclose(line[:, 0], [points["input_norm"].min(), points["input_norm"].max()])
    np.testing.assert_allclose(np.diff(guide, axis=0)[0], np.diff(guide[:, 0]) * [1, -1])
    np.testing.assert_allclose(guide.mean() * 2, guide.mean(0).sum())
    fits = compress_fits(table)
    np.testing.assert_allclose(slope, fits["compress_slope"])
    expected = f"slope {fits['compress_slope']:.2f}\nr = {fits['compress_correlation']:.2f}"
    assert said(ax) == [expected.replace("-", "−")]


def test_bounds_draws_theorem_1_at_position_0(run: Run) -> None:
    axes = {ax.get_title(): ax for ax in draw("gradient-bounds", run).axes}
    left, holds, identity = (axes[name] for name in ("theorem 1 at position 0", "theorem 1 holds", "identity"))
    means = run.tables["gradient_check"].query("position == 0").groupby("layer").mean()
    lower, upper, measured = left.lines
    np.testing.assert_allclose(lower.get_ydata(), means["lower_bound"])
    np.testing.assert_allclose(upper.get_ydata(), means["upper_bound"])
    np.testing.assert_allclose(measured.get_ydata(), means["measured"])
    for layer, row in means.iterrows():
        np.testing.assert_allclose(edges_at(left, layer), row[["lower_bound", "upper_bound"]])
    check = run.tables["gradient_check"]
    np.testing.assert_allclose(holds.lines[0].get_ydata(), check.groupby("layer")["holds"].mean())
    above, below = check["measured"] > check["upper_bound"], check["measured"] < check["lower_bound"]
    assert said(holds) == [f"{check['holds'].sum()} of 256 hold\n{above.sum()} above, {below.sum()} below"]
    np.testing.assert_allclose(identity.lines[0].get_ydata(), check.groupby("layer")["identity_residual"].max())
    assert said(identity) == ["round-off of float32"]
    assert identity.lines[1].get_ydata() == [np.finfo(np.float32).eps] * 2
    for title, branch in (("theorem 2: attention branch", "attn"), ("theorem 2: MLP branch", "mlp")):
        rows = run.tables["norm_bound"].query(f"branch == '{branch}'").pivot_table("tightness", "layer", "position")
        first, others, limit = axes[title].lines
        np.testing.assert_allclose(first.get_ydata(), rows[0])
        np.testing.assert_allclose(others.get_ydata(), rows.loc[:, 1:].mean(axis=1))
        assert limit.get_ydata() == [1, 1]


def test_training_draws_each_steps_numbers_in_their_order() -> None:
    runs = [checkpoint(step) for step in (300, 100, 200)]
    axes = KINDS["training steps"]["training-by-step"](runs).axes
    ordered = sorted(runs, key=lambda pair: pair[0])
    whole = {
        metric: [run.tables["summary"].query("layer == -1").set_index("metric")["value"][metric] for _, run in ordered]
        for metric in STEP_METRICS
    }
    norms = [run.tables["activation"].query("site == 'layer_out'") for _, run in ordered]
    by_position = [table.pivot_table("norm_mean", "layer", "position") for table in norms]
    ratios = [run.tables["summary"].query("layer >= 0 and metric == 'norm_ratio'")["value"].max() for _, run in ordered]
    expected = [
        [whole["loss"]],
        [whole["sink_rate"]],
        [whole["value_gradient_ratio"], whole["key_gradient_ratio"]],
        [[table[0].max() for table in by_position], [table.loc[:, 1:].mean(axis=1).max() for table in by_position]],
        [ratios],
        [whole["compress_slope"], whole["compress_correlation"]],
    ]
    for ax, curves in zip(axes, expected, strict=True):
        for line, curve in zip(ax.lines, curves, strict=False):
            np.testing.assert_allclose(line.get_xdata(), [100, 200, 300])
            np.testing.assert_allclose(line.get_ydata(), curve)
    assert axes[0].figure.get_suptitle() == "Tiny-1M · natural · steps 100–300"


def test_training_draws_gs_figure_2_with_a_line_a_step() -> None:
    runs = [checkpoint(step) for step in (0, 10, 1000)]
    figure = KINDS["training steps"]["training-gradient-norms"](runs)
    *axes, bar = figure.axes
    for ax, pathway in zip(axes, PATHWAYS, strict=True):
        for (_, run), line in zip(runs, ax.lines, strict=True):
            table = run.tables["gradient"].query(f"head == -1 and pathway == '{pathway}'")
            means = table.groupby("position")["grad_norm"].mean().replace(0, np.nan)
            np.testing.assert_allclose(line.get_ydata(), means)
        assert said(ax) == (["0"] if pathway == "query" else [])
    assert [label.get_text() for label in bar.get_yticklabels()] == ["1k", "10", "0"]


RISE = sigmoid(DOUBLED, 50)
RUNS = made_up_steps(DOUBLED, {"value_gradient": np.ones(len(DOUBLED)), "norm": 1 + 9 * RISE, "sink_rate": RISE}, 0.4)


def test_it_draws_its_table() -> None:
    table = onset_table(RUNS)
    *axes, below = KINDS["training steps"]["training-onsets"](RunsByStep(RUNS[::-1])).axes
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


def test_few_steps_have_no_leads_and_one_step_has_no_figure() -> None:
    spec = KINDS["training steps"]["training-onsets"]
    assert [len(spec(RunsByStep(RUNS[:count])).axes) for count in (FEWEST_STEPS - 1, FEWEST_STEPS)] == [3, 4]
    assert spec.applies(RunsByStep(RUNS))
    assert not spec.applies(RunsByStep(RUNS[:1]))
