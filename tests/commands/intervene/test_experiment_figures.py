"""Figures of an experiment show the data of every arm, for any number of arms and with missing tables."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from support.drawn_figures import ELSEWHERE, MANY, SINGLE, experiment
from support.figures import check_all_draw, edges_at, legend_of, said
from support.made_up_runs import grid, make_run

from sinkscope import InputError, Run
from sinkscope.commands.intervene.figures import FAINTEST_MEAN as FAINTEST
from sinkscope.commands.intervene.findings import interval, interval_by_layer
from sinkscope.figures import applicable, draw
from sinkscope.figures.style import Figure

OURS = {"arm-maps", "arm-maps-by-layer", "effects", "effects-by-layer", "over-mixing"}


@pytest.fixture(scope="module")
def run() -> Run:
    return experiment()


def panel(figure: Figure, title: str) -> Axes:
    (ax,) = [
        ax for ax in figure.axes if title in (ax.get_title().replace("\n", " "), ax.get_xlabel().replace("\n", " "))
    ]
    return ax


def shown_map(ax: Axes) -> np.ndarray:
    return np.ma.filled(ax.images[0].get_array(), np.nan)


def map_of(run: Run, condition: str, layer: int) -> np.ndarray:
    table = run.tables["arm_maps"]
    rows = table[(table["condition"] == condition) & (table["layer"] == layer)]
    weights = rows.pivot(index="query", columns="key", values="weight").to_numpy()
    return np.where(np.isnan(weights), np.nan, np.clip(weights, FAINTEST / 10, 1))


def matches(title: str, label: str) -> bool:
    return title.replace("\\$", "$").replace("\n", "").replace(" ", "") == label.replace(" ", "")


def test_an_experiment_has_its_own_figures_and_an_analysis_has_others(run: Run) -> None:
    assert set(applicable(run)) == OURS
    assert not OURS & set(applicable(make_run()))
    with pytest.raises(InputError, match="shows a single arm"):
        draw("sink-map", run)
    with pytest.raises(InputError, match="needs the table 'effect'"):
        draw("effects", make_run())
    assert set(applicable(Run(run.manifest, {"effect": run.tables["effect"]}))) == EFFECTS


MAPS, EFFECTS = {"arm-maps", "arm-maps-by-layer"}, {"effects", "effects-by-layer"}
# unusual data → the figures that read them, and the data
ODD: dict[str, tuple[set[str], dict[str, Any]]] = {
    "one arm, one layer, one token": (OURS, {"watched": SINGLE, "layers": 1, "tokens": 1}),
    "no control": ({"arm-maps", "effects"}, {"draws": 0}),
    "one draw": (EFFECTS, {"watched": SINGLE, "draws": 1}),
    "80 layers": ({"arm-maps-by-layer"}, {"layers": 80}),
    "an arm without maps": (MAPS, {"without_maps": ["transplant-epe"]}),
    "only the unchanged model has maps": (MAPS, {"watched": SINGLE, "without_maps": list(SINGLE)}),
    "different positions for each arm": (EFFECTS, {"watched": ELSEWHERE}),
    "positions beyond the maps": (MAPS, {"watched": {"far": [40, 41]}}),
    "20 arms": (OURS - {"effects-by-layer"}, {"layers": 2, "watched": {f"arm {place}": [0] for place in range(20)}}),
    "a very long label": (OURS, {"watched": {"x" * 90: [0], "a-" * 60: [0], "+" * 9: [0]}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_odd_experiments_are_drawn_without_a_warning(odd: str) -> None:
    names, arguments = ODD[odd]
    check_all_draw(experiment(**arguments), sorted(names))


def test_arm_maps_shows_the_layer_where_the_sink_changes_most() -> None:
    """It is the median over arms that decides, not the one that masks the sink in another layer."""
    run = experiment({"one": [3], "two": [3], "mask": [3]}, layers=3)
    maps = run.tables["arm_maps"]
    to_sink = (maps["key"] == 3) & (maps["query"] > 3)
    maps.loc[maps["key"].isin([0, 3]), "weight"] = 0.5
    maps.loc[to_sink & (maps["layer"] == 2) & maps["condition"].isin(["one", "two"]), "weight"] = 0.01
    maps.loc[to_sink & (maps["layer"] == 0) & (maps["condition"] == "mask"), "weight"] = 0.001
    figure = draw("arm-maps", run)
    assert "layer 2" in figure.get_suptitle()
    names = [ax.get_title().replace("\n", " ") for ax in figure.axes[:5]]
    assert names == ["before", "one", "random control", "two", "random control"]
    conditions = ["before", "one", "one control 0", "two", "two control 0"]
    for ax, condition in zip(figure.axes[:5], conditions, strict=True):
        np.testing.assert_allclose(shown_map(ax), map_of(run, condition, 2))
    assert [said(ax)[0] for ax in figure.axes[:5]] == ["sink 0.50", "sink 0.01", "sink 0.50", "sink 0.01", "sink 0.50"]


def test_maps_of_many_arms_are_each_below_or_next_to_their_names() -> None:
    arms = [f"arm {place}" for place in range(8)]
    run = experiment({arm: [0] for arm in arms}, layers=1)
    figure = draw("arm-maps", run)
    named = [(ax.get_title(), ax) for ax in figure.axes if ax.get_title()]
    assert [name for name, _ in named if name != "random control"] == ["before", *arms]
    assert len(named) == 1 + 2 * len(arms)
    for name, ax in named:
        if name != "random control":
            np.testing.assert_allclose(shown_map(ax), map_of(run, name, 0))


def test_controls_are_left_out_where_maps_of_all_layers_would_be_too_small() -> None:
    arms = [f"arm {place}" for place in range(16)]
    figure = draw("arm-maps-by-layer", experiment({arm: [0] for arm in arms}, layers=1))
    assert [ax.get_ylabel() for ax in figure.axes[:-1]] == ["before", *arms]


@pytest.mark.parametrize("layers", [4, 30])
def test_arm_maps_by_layer_has_every_layer_in_reading_order(layers: int) -> None:
    run = experiment({"one": [0], "two": [0]}, layers=layers)
    maps = run.tables["arm_maps"]
    run = Run(run.manifest, dict(run.tables) | {"arm_maps": maps[(maps["layer"] != 1) | (maps["condition"] != "two")]})
    figure = draw("arm-maps-by-layer", run)
    names = [ax.get_ylabel() for ax in figure.axes[:5]]
    assert names == ["before", "one", "random control", "two", "random control"]
    mosaic = shown_map(figure.axes[1])
    pitch = 8 + 1  # pixels: the tokens of a map, and the gap after it
    across = mosaic.shape[1] // pitch
    assert mosaic.shape == (-(-layers // across) * pitch, across * pitch)
    for layer in range(layers):
        row, column = divmod(layer, across)
        one = mosaic[row * pitch : row * pitch + 8, column * pitch : column * pitch + 8]
        np.testing.assert_allclose(one, map_of(run, "one", layer))
    numbers = [text.get_text() for text in figure.axes[0].texts if text.get_text() != "layer"]
    assert numbers == [str(layer) for layer in range(layers)]
    assert np.isnan(shown_map(figure.axes[3])[:8, 9:17]).all()  # a layer without a map


def test_effects_draws_before_after_and_every_control(run: Run) -> None:
    figure = draw("effects", run)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert all(matches(text, label.replace("+", " + ")) for text, label in zip(labels, MANY, strict=True))
    table = run.tables["effect"].query("condition == 'transplant-epe' and layer == -1")
    for title, metric, position in (
        ("sink rate (share) at position 0", "sink_rate", 0),
        ("window mass (share of attention) at position 1", "window_mass", 1),
        ("perplexity", "perplexity", -1),
        ("largest |activation|", "massive_magnitude", -1),
    ):
        ax = panel(figure, title)
        row = list(MANY).index("transplant-epe")
        in_row = [line for line in ax.lines if all(row - 0.5 <= y <= row + 0.5 for y in line.get_ydata())]
        bar, draws, before, after = (np.asarray(line.get_xdata(), float) for line in in_row)
        by_arm = table[(table["metric"] == metric) & (table["position"] == position)].groupby("arm")["value"]
        (was,), (became,), controls = (by_arm.get_group(arm).to_numpy() for arm in ("before", "after", "control"))
        np.testing.assert_allclose(draws, controls)
        np.testing.assert_allclose(before, [was, was])
        np.testing.assert_allclose(after, [was, became])
        is_log = ax.get_xscale() == "log"
        values = np.log(controls) if is_log else controls
        ends = values.mean() + 2 * values.std(ddof=1) * np.array([-1, 1])
        np.testing.assert_allclose(bar, np.exp(ends) if is_log else ends)
        assert is_log == (position == -1)
    assert "random control, 3 draws" in legend_of(figure)


def test_effects_by_layer_draws_the_sink_rate_and_the_controls_spread(run: Run) -> None:
    figure = draw("effects-by-layer", run)
    ax = panel(figure, "transplant-epe")
    table = run.tables["effect"].query("condition == 'transplant-epe' and metric == 'sink_rate' and layer >= 0")
    before, after, target = (np.asarray(line.get_ydata(), float) for line in ax.lines)
    for values, arm, position in ((before, "before", 0), (after, "after", 0), (target, "after", 1)):
        np.testing.assert_allclose(values, table[(table["arm"] == arm) & (table["position"] == position)]["value"])
    controls = table[(table["arm"] == "control") & (table["position"] == 0)].groupby("layer")["value"]
    for layer, mean in controls.mean().items():
        spread = 2 * controls.std()[layer]
        np.testing.assert_allclose(edges_at(ax, layer), [mean - spread, mean + spread])
    control = "random control: mean ± 2 std of 3 draws"
    assert legend_of(figure) == ["before", "after", "after, at position 1", control]


def test_streaming_by_token_is_that_of_the_shortest_window_with_no_and_with_most_first_tokens() -> None:
    ways = [("dense", -1, 0), *(("window" if keep == 0 else "sinks kept", size, keep) for size in (64, 32)
        for keep in (4, 0, 2))]  # fmt: skip
    table = pd.DataFrame(ways, columns=["method", "window", "keep"])
    table = table.merge(pd.DataFrame({"bucket": [128, 0, 64, -1]}), how="cross").assign(condition="streaming-window")
    table["perplexity"] = np.random.default_rng(0).uniform(10, 90, len(table))
    left, right = draw("streaming-perplexity", experiment({"one": [0]}, streaming=table)).axes
    by_way = table.set_index(["window", "keep", "bucket"])["perplexity"]
    for line, (label, window, keep) in zip(
        left.lines, (("dense", -1, 0), ("last 32", 32, 0), ("first 4 and last 32", 32, 4)), strict=False
    ):
        assert line.get_label() == label
        np.testing.assert_allclose(line.get_ydata(), [by_way[window, keep, bucket] for bucket in (0, 64, 128)])
        np.testing.assert_allclose(line.get_xdata(), [np.arange(64).mean() + bucket for bucket in (0, 64, 128)])
    assert left.lines[-1].get_xdata() == [32, 32]  # where the window begins to slide
    np.testing.assert_allclose(right.lines[0].get_ydata(), by_way[-1, 0, -1])
    for line, window in zip(right.lines[1:], (32, 64), strict=True):
        assert line.get_label() == f"last {window}"
        np.testing.assert_allclose(line.get_ydata(), [by_way[window, keep, -1] for keep in (0, 2, 4)])
    assert [label.get_text() for label in right.get_xticklabels()] == ["0", "2", "4"]


def test_over_mixing_has_the_range_of_each_arms_own_controls() -> None:
    run = experiment({"one": [0], "one and two": [0]})
    table = run.tables["over_mixing_by_sequence"]
    controls = table[table["condition"].str.contains(" control ")]
    assert len(controls["condition"].unique()) > 2
    left, right = draw("over-mixing", run).axes
    by_distance = run.tables["over_mixing"].groupby(["condition", "distance"])["change"].mean()  # over layers
    for line, condition in zip(right.lines, ("before", "one", "one and two"), strict=True):
        np.testing.assert_allclose(line.get_ydata(), by_distance[condition])
    for nth, arm in enumerate(("one", "one and two")):
        own = controls[controls["condition"].str.startswith(f"{arm} control ")]
        for layer, means in own.groupby(["layer", "condition"])["change"].mean().groupby("layer"):
            np.testing.assert_allclose(edges_at(left, layer, nth), [means.min(), means.max()])


def test_effects_by_layer_has_the_interval_of_each_position() -> None:
    """The band of the target is that of its own rate, and not of the sink's."""
    plain = experiment({"transplant-epe": [0, 1]}, draws=0)
    sequences = grid(condition=["before", "transplant-epe"], layer=range(4), sequence=range(6), position=[0, 1])
    random = np.random.default_rng(0)
    drawn = {name: random.uniform(0, 1, len(sequences)) for name in ("sink_rate", "window_mass")}
    sequences = sequences.assign(**drawn)
    read = plain.manifest["input"] | {"sequences": 6}
    run = Run(plain.manifest | {"input": read}, plain.tables | {"attention_by_sequence": sequences})
    figure = draw("effects-by-layer", run)
    ax = panel(figure, "transplant-epe")
    for band, position in enumerate((0, 1)):
        for layer, ends in interval_by_layer(run, "transplant-epe", "sink_rate", position).iterrows():
            np.testing.assert_allclose(edges_at(ax, layer, band), ends)
    assert "change, 95 % over sequences" in legend_of(figure)
    ax = panel(draw("effects", run), "window mass (share of attention) at position 1")
    np.testing.assert_allclose(ax.lines[0].get_xdata(), interval(run, "transplant-epe", "window_mass", 1))
