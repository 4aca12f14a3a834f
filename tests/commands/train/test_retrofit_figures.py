"""Figures of retrofits and of the Bigram-Backcopy task show the data of the tables."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from support.drawn_figures import STEPS, backcopy_maps, backcopy_training
from support.figures import edges_at, said
from support.made_up_runs import grid

from sinkscope import InputError, Run
from sinkscope.commands.train.figures import BACKCOPY_ROWS, BAR_METRICS, TrainedArms, relative_to_later
from sinkscope.figures import KINDS
from sinkscope.figures.plot import arm_looks
from sinkscope.results.run import RunData
from sinkscope.results.trainings import UNTOUCHED, sinking_layer

ARMS = (UNTOUCHED, "vga", "none")
DRAW = KINDS["arms of a training"]
SITES = ("layer_out", "mlp_out", "attn_out")


def random(seed: int, *columns: str, heads: int = 2) -> pd.DataFrame:
    table = grid(layer=range(3), head=range(heads), position=range(4))
    drawn = np.random.default_rng(seed).uniform(0.1, 0.9, (len(columns), len(table)))
    return table.assign(**dict(zip(columns, drawn, strict=True)))


def run_of(arm: str, seed: int, sites: tuple[str, ...] = SITES) -> Run:
    norms = [random(seed + place, "norm_mean", heads=1).assign(site=site) for place, site in enumerate(sites)]
    tables = {
        "attention": random(seed + 5, "sink_rate"),
        "activation": pd.concat(norms, ignore_index=True),
        "geometry": random(seed + 6, "value_norm"),
    }
    if arm == "vga":
        tables["gate"] = random(seed + 7, "gate", "raw_value_norm", heads=1)
    return Run({"model": {"name": "org/model_$1$"}, "condition": arm}, tables)


RUNS = {arm: run_of(arm, 10 * place) for place, arm in enumerate(ARMS)}


def drawn(ax: Axes, arm: str, solid: bool = True) -> np.ndarray:
    """Return the line of an arm, found by its color; with `solid=False` the faint line."""
    look = arm_looks(ARMS, UNTOUCHED)[arm]
    (line,) = [line for line in ax.lines if line.get_color() == look["color"] and (line.get_alpha() is None) == solid]
    return np.asarray(line.get_ydata(), float)


def test_layers_are_position_0_against_the_mean_of_the_others() -> None:
    axes = DRAW["retrofit-layers"](TrainedArms({}, RUNS)).axes
    for arm, run in RUNS.items():
        tables = [run.tables["attention"].rename(columns={"sink_rate": "norm_mean"})]
        activation = run.tables["activation"]
        tables += [activation[activation["site"] == site] for site in SITES]
        for ax, table in zip(axes, tables, strict=True):
            for solid, at in ((True, table["position"] == 0), (False, table["position"] > 0)):
                expected = table[at].groupby("layer")["norm_mean"].mean()
                np.testing.assert_allclose(drawn(ax, arm, solid), expected)
    assert axes[0].get_ylim()[1] > 1
    assert [ax.get_yscale() for ax in axes] == ["linear", "log", "log", "log"]


def test_values_and_gates_are_by_layer_and_in_a_single_layer_by_position() -> None:
    single = {
        arm: Run(run.manifest, {name: table[table["layer"] == 0] for name, table in run.tables.items()})
        for arm, run in RUNS.items()
    }
    for runs, is_deep in ((RUNS, True), (single, False)):
        axes = DRAW["retrofit-values"](TrainedArms({}, runs)).axes
        assert len(axes) == 3
        assert all(ax.get_yscale() == "linear" and ax.get_ylim()[0] == 0 for ax in axes)
        for arm, run in runs.items():
            attended = relative_to_later(run.tables["geometry"], "value_norm")
            raw = relative_to_later(run.tables["gate"], "raw_value_norm") if arm == "vga" else attended
            for ax, table in zip(axes, (raw, attended), strict=False):
                np.testing.assert_allclose(drawn(ax, arm), table[0] if is_deep else table.loc[0])
        for place, ax in enumerate(axes[:2] if is_deep else ()):
            of_arms = [(run.tables["geometry"], "value_norm") for run in runs.values()]
            of_arms[1] = of_arms[1] if place else (runs["vga"].tables["gate"], "raw_value_norm")
            later = pd.concat([relative_to_later(*table).drop(columns=0) for table in of_arms], axis=1)
            for layer, ends in later.quantile([0.1, 0.9], axis=1).items():
                np.testing.assert_allclose(edges_at(ax, layer), ends)
        gates = runs["vga"].tables["gate"].pivot(index="layer", columns="position", values="gate")
        np.testing.assert_allclose(drawn(axes[2], "vga"), gates[0] if is_deep else gates.loc[0])
        if is_deep:
            np.testing.assert_allclose(drawn(axes[2], "vga", solid=False), gates[[1, 2, 3]].mean(axis=1))
        assert len(axes[2].lines) == 2 + is_deep  # the one gated arm, its later positions, and the line of no effect
    ungated = {arm: run for arm, run in RUNS.items() if arm != "vga"}
    (_,) = DRAW["retrofit-values"](TrainedArms({}, ungated)).axes  # values are attended to as projected


def test_norms_are_relative_to_the_later_positions_of_their_head() -> None:
    table = grid(layer=range(2), head=range(2), position=range(3))
    table = table.assign(norm=[1.0, 2, 6, 3, 1, 1, 5, 4, 6, 2, 1, 3])  # later means 4 and 1, then 5 and 2
    expected = [[1.625, 0.75, 1.25], [1.0, 0.65, 1.35]]
    np.testing.assert_allclose(relative_to_later(table, "norm"), expected)


def bars_of(**by_metric: list[float]) -> Any:
    rows = [
        ("org/model", arm, -1, metric, value)
        for metric, values in by_metric.items()
        for arm, value in zip(ARMS, values, strict=True)
        if not np.isnan(value)
    ]
    table = pd.DataFrame(rows, columns=["model", "condition", "layer", "metric", "value"])
    axes = DRAW["retrofit-bars"](TrainedArms({"retrofit": table}, RUNS)).axes
    return dict(zip([name for name in BAR_METRICS if name in by_metric], axes, strict=False))


def test_bars_begin_at_0_and_have_their_numbers_next_to_them() -> None:
    axes = bars_of(
        perplexity=[17.03, 16.94, 17.01], perplexity_quantized=[np.inf, 18.5, np.nan], sink_rate=[0.731, 0, 1]
    )
    assert [bar.get_width() for bar in axes["perplexity"].patches] == [17.03, 16.94, 17.01]
    assert [bar.get_x() for bar in axes["perplexity"].patches] == [0, 0, 0]
    assert said(axes["perplexity"]) == ["17.03", "16.94", "17.01"]
    assert axes["perplexity"].lines[0].get_xdata() == [17.03, 17.03]  # the first arm
    assert [bar.get_width() for bar in axes["perplexity_quantized"].patches] == [0, 18.5, 0]
    assert said(axes["perplexity_quantized"]) == ["∞", "18.50", "–"]
    assert said(axes["sink_rate"]) == ["73.1%", "0.0%", "100.0%"]
    assert [label.get_text() for label in axes["perplexity"].get_yticklabels()] == list(ARMS)
    with pytest.raises(InputError, match="no arm of this retrofit has been measured"):
        bars_of()


def test_bars_show_every_seed_and_their_spread() -> None:
    table = grid(model=["org/m"], condition=ARMS, layer=[-1], seed=range(3), metric=["perplexity", "massive_count"])
    table["value"] = (10.0 + 2 * table["seed"]).where(table["metric"] == "perplexity", 0.0)
    arms = TrainedArms({"retrofit": table}, RUNS)
    assert (arms.seeds_text(), arms.seeds_text(of_runs=True)) == ("3 seeds", "first of 3 seeds")
    figure = DRAW["retrofit-bars"](arms)
    ax = figure.axes[0]
    assert [bar.get_width() for bar in ax.patches] == [12.0] * 3
    dots = [line for line in ax.lines if len(line.get_xdata()) == 3 and line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [[10.0, 12.0, 14.0]] * 3
    (whiskers,) = [bars for bars in ax.containers if hasattr(bars, "has_xerr")]
    ends = [segment[:, 0].tolist() for segment in whiskers[2][0].get_segments()]
    assert ends == [[10.0, 14.0]] * 3  # one standard deviation, n - 1
    assert said(ax) == ["12.00 ± 2.00"] * 3
    assert "3 seeds" in figure.get_suptitle()
    assert figure.get_suptitle().endswith("massive activations per sequence: 0")  # a metric that is 0 has no panel
    assert len([ax for ax in figure.axes if ax.get_visible()]) == 1


@pytest.mark.parametrize("probed", [(), ("held_out_loss", "sink_rate")])
def test_a_training_is_drawn_as_means_over_seeds_in_a_band_to_the_extremes(probed: tuple[str, ...]) -> None:
    """Gates are means over layers, and metrics of a probe those of the whole model; a task logs `sink_rate`, too."""
    of_arms = {"model": ["org/m"], "condition": ARMS[1:], "seed": range(2), "step": range(3)}
    gates = ["gate_displacement_mean", "gate_displacement_max", "sink_rate"]
    parts = [grid(**of_arms, layer=range(2), metric=gates)]
    parts.append(grid(**of_arms, layer=[-1], metric=["loss", *(probed or ["sink_rate"])]))
    table = pd.concat(parts, ignore_index=True)
    table["value"] = np.random.default_rng(0).uniform(size=len(table))
    figure = DRAW["retrofit-training"](TrainedArms({"training": table}, RUNS))
    axes = [ax for ax in figure.axes if ax.get_visible()]
    layers_of = {"loss": (-1,), "gate_displacement_mean": (0, 1), **dict.fromkeys(probed, (-1,))}
    for ax, (metric, layers) in zip(axes, layers_of.items(), strict=True):
        for nth, arm in enumerate(ARMS[1:]):
            rows = table[(table["condition"] == arm) & (table["metric"] == metric) & table["layer"].isin(layers)]
            of_seeds = rows.groupby(["step", "seed"])["value"].mean().unstack()
            np.testing.assert_allclose(drawn(ax, arm), of_seeds.mean(axis=1))
            for step, values in of_seeds.iterrows():
                assert edges_at(ax, step, nth) == pytest.approx((values.min(), values.max()))


def test_sinks_are_drawn_against_the_loss() -> None:
    rows = [
        ("org/m", arm, layer, seed, step, metric, value + place)
        for place, arm in enumerate(ARMS[1:])
        for layer in (-1, 0)
        for seed in range(2)
        for metric, values in (("held_out_loss", (5.0, 4.0, 3.0)), ("sink_rate_by_weight", (0.0, 0.1, 0.3 + layer)))
        for step, value in enumerate(values)
    ]
    table = pd.DataFrame(rows, columns=["model", "condition", "layer", "seed", "step", "metric", "value"])
    figure = DRAW["retrofit-equal-loss"](TrainedArms({"training": table}, RUNS))
    (ax,) = figure.axes
    lines = [line for line in ax.lines if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in lines] == [[5.0, 4.0, 3.0]] * 2 + [[6.0, 5.0, 4.0]] * 2
    assert lines[2].get_ydata() == pytest.approx([100.0, 110.0, 30.0])
    ends = [(*line.get_xdata(), *line.get_ydata()) for line in ax.lines if len(line.get_xdata()) == 1]
    assert ends == [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    assert ax.get_xlim() == pytest.approx((5.1, 2.9))  # 5 % beyond the losses from the second log on
    assert ax.xaxis_inverted()
    with pytest.raises(InputError, match="no arm has a held-out loss by step"):
        DRAW["retrofit-equal-loss"](TrainedArms({"training": table[table["step"] < 0]}, RUNS))


def test_many_seeds_are_pale_beside_their_mean() -> None:
    rows = [
        ("org/m", ARMS[1], -1, seed, step, metric, value)
        for seed in range(9)
        for metric, values in (("held_out_loss", (5.0 + seed, 4.0)), ("sink_rate_by_weight", (0.0, 0.1 * seed)))
        for step, value in enumerate(values)
    ]
    table = pd.DataFrame(rows, columns=["model", "condition", "layer", "seed", "step", "metric", "value"])
    figure = DRAW["retrofit-equal-loss"](TrainedArms({"training": table}, RUNS))
    *seeds, mean = (line for line in figure.axes[0].lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-")
    assert [line.get_alpha() for line in seeds] == [0.35] * 9
    assert mean.get_alpha() is None
    assert list(mean.get_xdata()) == [9.0, 4.0]
    assert mean.get_ydata() == pytest.approx([0.0, 40.0])


TASK_RUNS = {"arm 0": RunData({"model": {"name": "tiny"}, "input": {"token_zero": "bos <s> (id 0)"}}, {})}


def test_lines_are_means_over_seeds_and_bands_reach_the_extremes() -> None:
    table = backcopy_training(arms=2, seeds=3)
    figure = DRAW["backcopy-training"](TrainedArms({"training": table}, TASK_RUNS))
    axes = np.array(figure.axes).reshape(len(BACKCOPY_ROWS), 2)
    for column, arm in enumerate(("arm 0", "arm 1")):
        for ax, curves in zip(axes[:, column], BACKCOPY_ROWS.values(), strict=True):
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
    figure = DRAW["backcopy-training"](TrainedArms({"training": table}, TASK_RUNS))
    line = np.array(figure.axes).reshape(len(BACKCOPY_ROWS), 3)[1, 0].lines[0]
    assert line.get_ydata()[-1] == 2.0
    assert "layer 1" in figure.get_suptitle()


def test_maps_and_bars_show_the_tables() -> None:
    weights, norms = backcopy_maps(arms=2, layers=2, heads=2)
    to_start = (weights["key"] == 0) & (weights["query"] > 0)
    most = {"arm 0": 1, "arm 1": 0}  # the layer and the head that attend most to <s> are drawn
    place = weights["condition"].map(most)
    weights.loc[to_start & (weights["layer"] == place) & (weights["head"] == place), "weight"] = 0.99
    norms[["norm", "attended_norm"]] = norms[["norm", "attended_norm"]].mul(1 + norms["layer"], axis=0)
    figure = DRAW["backcopy-maps"](TrainedArms({"attention_maps": weights, "value_norms": norms}, TASK_RUNS))
    above, below = np.array(figure.axes[:4]).reshape(2, 2)
    for column, arm in enumerate(("arm 0", "arm 1")):
        shown = above[column].images[0].get_array()
        assert above[column].get_title().endswith(f"layer {most[arm]}, head {most[arm]}")
        is_shown = (weights["condition"] == arm) & (weights["layer"] == most[arm]) & (weights["head"] == most[arm])
        for row in weights[is_shown].itertuples():
            assert shown[row.query, row.key] == row.weight
        assert np.ma.masked_invalid(shown).mask[np.triu_indices(6, 1)].all()
        assert [bar.get_height() for bar in below[column].patches] == [n * (1 + most[arm]) for n in range(1, 7)]
    assert not below[0].collections  # there is no gate
    gated = [segment[0, 1] for segment in below[1].collections[0].get_segments()]
    assert gated == [0.5, 1, 1.5, 2, 2.5, 3]
    colors = [label.get_color() for label in below[0].get_xticklabels()]
    assert [color != "black" for color in colors] == [False, False, True, False, False, True]  # triggers
