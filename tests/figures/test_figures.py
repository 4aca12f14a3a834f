"""Figures of a run show the data of its tables, allow missing data, and do not change matplotlib's settings."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from support.figures import check_all_draw, edges_at, legend_of, rough_figures
from support.made_up_runs import grid, make_run, picture_tables

from sinkscope import InputError, Run
from sinkscope.figures import FIGURES as ALL_FIGURES
from sinkscope.figures import KINDS, applicable, draw
from sinkscope.figures.labels import title
from sinkscope.figures.query_bias import standard_quantiles
from sinkscope.figures.runs import SINK_TOKENS
from sinkscope.figures.style import SETTINGS
from sinkscope.interventions.heads import AblateHeads
from sinkscope.output.drawing import save_figures

# figures of `analyze`; figures of other commands are tested in other files
FIGURES = {  # of the tables of a made-up run
    name: spec
    for name, spec in ALL_FIGURES.items()
    if spec.command == "analyze" and not {"head_scores", "super_weights"} & set(spec.tables)
}
draw_comparison = KINDS["several runs"]["by-layer"]


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


def ydata(ax: Axes, label: str) -> np.ndarray:
    (line,) = [line for line in ax.lines if line.get_label().startswith(label)]
    return np.asarray(line.get_ydata(), float)


def test_a_title_names_the_tokens_of_each_sequence_if_these_are_equally_many(run: Run) -> None:
    assert title(run, 7) == "Tiny-1M · natural · 3 × 24 tokens"
    run = make_run()
    run.manifest["input"] |= {"sequences": 3, "tokens": 70}
    assert title(run, 7) == "Tiny-1M · natural · 3 sequences, 70 tokens"
    assert title(run, 7, "one sequence") == "Tiny-1M · natural · one sequence"


def test_sinks_by_layer_draws_token_0_the_mean_and_the_maximum(run: Run) -> None:
    columns = ("sink_mass", "sink_rate", "layer_out", "mlp_out")
    for ax, column in zip(draw("sinks-by-layer", run).axes, columns, strict=True):
        table, value = run.tables["attention"], column
        if column.endswith("out"):
            table, value = run.tables["activation"].query(f"site == '{column}'"), "norm_mean"
        means = table.pivot_table(index="layer", columns="position", values=value)  # over heads
        np.testing.assert_allclose(ydata(ax, "position 0"), means[0])
        np.testing.assert_allclose(ydata(ax, "mean"), means.loc[:, 1:].mean(axis=1))
        np.testing.assert_allclose(ydata(ax, "maximum"), means.loc[:, 1:].max(axis=1))
        assert ax.get_yscale() == ("log" if column.endswith("out") else "linear")


def test_sink_map_is_the_window_mass_of_position_0(run: Run) -> None:
    ax, bar = draw("sink-map", run).axes
    first = run.tables["attention"].query("position == 0")
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), first.pivot_table("window_mass", "layer", "head"))
    assert image.get_clim() == (0, 1)
    dots = ax.lines[0].get_xydata()
    marked = first[first["sink_rate"] > 0.5][["head", "layer"]]
    assert {tuple(map(int, dot)) for dot in dots} == set(marked.itertuples(index=False, name=None))
    assert "window mass" in bar.get_ylabel()


def test_query_key_geometry_draws_means_and_quantiles_over_heads(run: Run) -> None:
    columns = ("query_norm", "key_norm", "value_norm", "qk_cosine", "qk_norm_product", "sink_logit_gap")
    for ax, column in zip(draw("query-key-geometry", run).axes, columns, strict=True):
        table = run.tables["geometry"].pivot_table(index=["layer", "head"], columns="position", values=column)
        means = table.assign(others=table.loc[:, 1:].mean(axis=1)).reset_index()
        first, others = (means.pivot_table(name, "layer", "head") for name in (0, "others"))
        np.testing.assert_allclose(ydata(ax, "position 0"), first.mean(axis=1))
        np.testing.assert_allclose(ydata(ax, "mean"), others.mean(axis=1))
        for layer, low, high in zip(first.index, first.quantile(0.1, axis=1), first.quantile(0.9, axis=1), strict=True):
            np.testing.assert_allclose(edges_at(ax, layer), [low, high])


def test_massive_activations_takes_the_three_largest_of_each_sequence() -> None:
    rows = [(0, 0, 5.0), (0, 0, -9.0), (0, 0, 1.0), (0, 0, 2.0), (0, 1, 30.0), (0, 1, 20.0), (0, 1, 10.0)]
    massive = pd.DataFrame([*rows, (1, 0, 400.0), (1, 1, -600.0)], columns=["layer", "sequence", "value"])
    massive = massive.assign(median=massive["sequence"] + 1.0, is_massive=massive["layer"] == 1)
    figure = draw("massive-activations", make_run(massive=massive))
    ax = figure.axes[0]
    np.testing.assert_allclose(ydata(ax, "largest"), [(9 + 30) / 2, 500])
    np.testing.assert_allclose(ydata(ax, "second"), [(5 + 20) / 2])
    np.testing.assert_allclose(ydata(ax, "third"), [(2 + 10) / 2])
    np.testing.assert_allclose(ydata(ax, "median"), [1.5, 1.5])
    (shade,) = ax.patches
    assert (shade.get_x(), shade.get_width()) == (0.5, 1.0)


def test_massive_map_separates_the_largest_coordinates(run: Run) -> None:
    figure = draw("massive-map", run)
    top, others = figure.axes[:2]
    assert [label.get_text() for label in top.get_yticklabels()] == ["20", "8"]  # the largest first
    assert [label.get_text() for label in others.get_yticklabels()] == [str(4 * i) for i in (0, 1, 3, 4, 6, 7, 8, 9)]
    row = run.tables["massive_map"].query("coordinate == 20").sort_values("position")["magnitude"]
    scale = top.images[0].norm
    np.testing.assert_allclose(top.images[0].get_array()[0], row.clip(lower=scale.vmin))
    assert scale.vmax == 9e3
    names = [label.get_text() for label in others.get_xticklabels()]
    assert names[:7] == ["<s>", "␣the", "⏎", ".", "␣\\$x\\$", "id 5", "id 6"]
    assert "layer 3" in figure.get_suptitle()


def test_attention_maps_shows_each_head_below_the_diagonal(run: Run) -> None:
    figure = draw("attention-maps", run)
    table = run.tables["attention_maps"]
    names = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert names == [f"layer {layer}, head {head}" for layer in (0, 3) for head in (0, 1)]
    weights = table[(table["layer"] == 3) & (table["head"] == 1)].pivot_table("weight", "query", "key")
    shown = next(ax for ax in figure.axes if ax.get_title() == "layer 3, head 1").images[0].get_array()
    lower = np.tril_indices(len(weights))
    np.testing.assert_allclose(shown[lower], np.clip(weights.to_numpy()[lower], 1e-4, 1))
    assert shown.mask[np.triu_indices(len(weights), 1)].all()


def test_sink_positions_counts_sinks_with_enough_queries_after_them(run: Run) -> None:
    by_layer, by_position, by_token = draw("sink-positions", run).axes
    sinks = run.tables["sink_positions"].query("position <= 24 - 16")
    pairs = 4 * 4 * 3  # layers × heads × sequences
    later = sinks[sinks["position"] > 0]  # here each token has one position, so each row is a pair
    any_later = later.groupby(["layer", "head", "sequence"]).size().groupby("layer").size()
    first, others = by_layer.lines
    np.testing.assert_allclose(first.get_ydata(), sinks[sinks["position"] == 0].groupby("layer").size() / (pairs / 4))
    np.testing.assert_allclose(others.get_ydata(), any_later / (pairs / 4))
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in by_position.patches] == list(range(1, 9))
    np.testing.assert_allclose(heights(by_position), later.groupby("position").size() / pairs)
    expected = (later.groupby("token_id").size() / pairs).sort_values(ascending=False).head(SINK_TOKENS)
    np.testing.assert_allclose([bar.get_width() for bar in by_token.patches], expected)
    twice = pd.DataFrame({"layer": 0, "head": 0, "sequence": 0, "position": [0, 3, 5], "token_id": [1, 4, 4]})
    twice = twice.assign(token=["a", ",", ","], queries=[24, 21, 19], window_mass=0.9, uniform_mass=0.05)
    by_layer, by_position, by_token = draw("sink-positions", make_run(sink_positions=twice)).axes
    assert [bar.get_width() for bar in by_token.patches] == [1 / 48]  # a token counts once in a sequence
    np.testing.assert_allclose(heights(by_position), [1 / 48] * 2)
    np.testing.assert_allclose(by_layer.lines[1].get_ydata(), [1 / 12, 0, 0, 0])
    (alone,) = draw("sink-positions", make_run(sink_positions=twice[:1])).axes
    assert alone.get_title() == "position 0: 2.1 %; no sink at positions 1–8"
    np.testing.assert_allclose(alone.lines[0].get_ydata(), [1 / 12, 0, 0, 0])


def heights(ax: Axes) -> list[float]:
    return [bar.get_height() for bar in ax.patches]


def test_query_bias_distribution_is_in_standard_deviations_of_the_later_positions() -> None:
    random = np.random.default_rng(0).normal(30.0, 5.0, 200_000)
    counts, edges = np.histogram(random, 60)
    bins = pd.DataFrame({"delta": (edges[1:] + edges[:-1]) / 2, "count": counts})
    normal = [-1.2816, 0.0, 1.2816]  # quantiles 0.1, 0.5 and 0.9 of the standard normal distribution
    np.testing.assert_allclose(standard_quantiles(bins.sample(frac=1, random_state=0)), normal, atol=0.02)
    assert standard_quantiles(bins.assign(count=0)) is None
    rows = pd.concat([bins.assign(layer=layer, group=group) for layer in range(4) for group in ("later", "position 0")])
    run = make_run(delta_distribution=rows)
    (ax,) = draw("query-bias-distribution", run).axes
    np.testing.assert_allclose([bar.get_y() for bar in ax.patches], [normal[0]] * 4, atol=0.02)
    gaps = run.tables["summary"].query("metric == 'delta_gap' and layer >= 0")["value"]
    np.testing.assert_allclose(ax.lines[1].get_ydata(), gaps)


def test_states_are_next_to_the_sinks_of_the_layer_that_reads_them(run: Run) -> None:
    left, right = draw("entropy-by-layer", run).axes
    table = run.tables["entropy"]
    np.testing.assert_allclose(ydata(left, "without position 0"), table["entropy_without_first"])
    np.testing.assert_allclose(ydata(right, "lower bound"), table["anisotropy_bound"])
    (rate,) = [line for line in right.lines if line.get_label() == "sink rate of the next layer"]
    rates = run.tables["attention"].query("position == 0").groupby("layer")["sink_rate"].mean()
    np.testing.assert_allclose(rate.get_xydata(), np.transpose([[0, 1, 2], rates[1:]]))


def test_tokens_that_join_the_first_sink_are_counted_without_it(run: Run) -> None:
    shares, counts = draw("sink-tokens", run).axes
    np.testing.assert_allclose(ydata(shares, "parallel"), [0.3] * 4)
    np.testing.assert_allclose(ydata(shares, "and with 3"), [0.01] * 4)
    assert [bar.get_width() for bar in counts.patches] == [3, 3]  # of two tokens, in three sequences
    assert [label.get_text() for label in counts.get_yticklabels()] == ["⏎", "id 5"]


def test_residual_sinks_are_drawn_without_spikes(run: Run) -> None:
    shares, norms, cosines = draw("residual-sinks", run).axes
    assert [line.get_label() for line in shares.lines] == ["7", "rotated"]
    expected = run.tables["residual_sinks"].query("coordinate == 7")["share"]
    np.testing.assert_allclose(shares.lines[0].get_ydata(), expected)
    np.testing.assert_allclose(norms.lines[0].get_ydata(), run.tables["spikes"]["norm_ratio"])
    assert [line.get_label() for line in norms.lines[1:]] == ["step up: layer 0"]
    np.testing.assert_allclose(ydata(cosines, "tokens"), run.tables["spikes"]["cosine_of_others"])


def test_decoding_draws_means_over_sequences_of_some_layers_and_shades_thoughts() -> None:
    random = np.random.default_rng(0)
    table = grid(layer=range(7), sequence=range(3), step=range(5))
    table = table.assign(position=10 * (1 + table["sequence"]) + table["step"])
    columns = {"sink_mass": random.random(len(table)), "largest": 1 + random.random(len(table))}
    table = table.assign(**columns, uniform=1 / (table["position"] + 1))
    table["is_thought"] = (table["step"] == 1) & (table["sequence"] < 2) | (table["step"] == 3) & (
        table["sequence"] < 1
    )
    figure = draw("decoding", make_run(layers=7, decoding=table))
    for ax, column in zip(figure.axes, columns, strict=True):
        means = table.groupby(["step", "layer"])[column].mean().unstack()
        assert [line.get_label() for line in ax.lines[:5]] == [
            *(f"layer {x}" for x in (0, 2, 4, 6)),
            "mean over layers",
        ]
        for layer in (0, 2, 4, 6):
            np.testing.assert_allclose(ydata(ax, f"layer {layer}"), means[layer])
        np.testing.assert_allclose(ydata(ax, "mean over layers"), means.mean(axis=1))
        assert ax.lines[4].get_xdata().tolist() == [0, 1, 2, 3, 4]
        (shade,) = ax.patches  # most sequences think at step 1
        assert (shade.get_x(), shade.get_x() + shade.get_width()) == (0.5, 1.5)
    np.testing.assert_allclose(ydata(figure.axes[0], "uniform"), table.groupby("step")["uniform"].mean())


def test_the_super_weight_is_the_largest_of_the_early_layers() -> None:
    pairs = pd.DataFrame({"layer": range(4), "written": [1.0, -9.0, 2.0, 30.0], "input": [3.0, 4.0, 5.0, 6.0]})
    pairs = pairs.assign(sequence=0, expert=-1, row=7, column=3, output=1.0, weight=0.5, share=[0.1, 0.9, 0.2, 0.3])
    figure = draw("super-weights", make_run(super_weights=pairs))
    for ax, expected in zip(figure.axes, ([1, 9, 2, 30], [3, 4, 5, 6], [0.1, 0.9, 0.2, 0.3]), strict=True):
        line, star = ax.lines
        assert line.get_ydata().tolist() == expected
        assert star.get_xydata().tolist() == [[1, expected[1]]]
    assert legend_of(figure) == ["super weight: layer 1, row 7, column 3"]


def test_flagged_heads_are_those_with_the_lowest_norm_and_the_most_mass() -> None:
    heads = pd.DataFrame({"layer": np.repeat(range(3), 4), "head": [0, 1, 2, 3] * 3, "output_norm": 1.0})
    heads = heads.assign(relative_norm=12.0 - np.arange(12), first_mass=np.roll(np.arange(12) / 12, -1))
    ax, _ = draw("head-scores", make_run(head_scores=heads)).axes
    norms, masses = (line.get_xydata() for line in ax.lines)
    count = max(1, round(AblateHeads().share * len(heads)))
    points = heads[["first_mass", "relative_norm"]].to_numpy()
    np.testing.assert_allclose(norms, points[-count:])
    np.testing.assert_allclose(masses, points[-1 - count : -1])


def test_gamma_is_drawn_at_the_largest_massive_coordinates_and_over_all(run: Run) -> None:
    figure = draw("gamma", run)
    assert legend_of(figure)[:2] == ["d = 7", "d = 38"]  # by the magnitude of EPE₀
    gamma = run.tables["gamma"].pivot(index="layer", columns="coordinate", values="gamma").abs()
    ax = figure.axes[0]
    mean, spread = gamma.mean(axis=1), 2 * gamma.std(axis=1, ddof=0)
    np.testing.assert_allclose([bar.get_y() for bar in ax.patches], (mean - spread).clip(lower=0))
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in ax.patches], mean + spread)
    np.testing.assert_allclose([line.get_ydata() for line in ax.lines[:3]], [mean, gamma[7], gamma[38]])


def test_alignment_is_drawn_of_position_0_and_of_the_later_ones(run: Run) -> None:
    together, each = draw("query-bias-alignment", run).axes
    table = run.tables["query_bias"]
    rows = table[table["head"] == -1]
    np.testing.assert_allclose(together.lines[0].get_ydata(), rows[rows["position"] > 0]["key_alignment"])
    np.testing.assert_allclose(together.lines[1].get_ydata(), rows[rows["position"] == 0]["key_alignment"])
    later = table[(table["head"] >= 0) & (table["position"] > 0)].groupby("layer")["key_alignment"]
    spans = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in each.patches]
    np.testing.assert_allclose(spans, np.transpose([later.quantile(0.1), later.quantile(0.9)]))


def test_maps_over_pictures_mark_what_is_above_the_threshold() -> None:
    """The layer has most sinks; a picture in tiles shows its last one, and an encoder its last layer."""
    tables = picture_tables()
    visual = tables["visual_patch"]
    visual["phi"] = np.where((visual["layer"] == 2) & (visual["row"] == visual["column"]), 30.0, 10.0)
    visual.loc[visual["layer"] < 2, "phi"] = 40.0  # the first layers do not count
    figure = draw("visual-sinks", make_run(**tables))
    assert "layer 2" in figure.get_suptitle()
    last_tiles = visual[(visual["layer"] == 2) & (visual["tile"] == 1)].groupby("sequence")
    for ax, (_, patches) in zip(figure.axes[2:4], last_tiles, strict=True):
        shown = patches.pivot_table("mass", "row", "column")
        np.testing.assert_allclose(ax.images[0].get_array(), shown)
        assert ax.lines[0].get_xydata().tolist() == [[0, 0], [1, 1]]
    encoder = tables["encoder_patch"]
    encoder["norm"] = np.where((encoder["row"] == 1) & (encoder["column"] == encoder["layer"]), 9.0, 2.0)
    figure = draw("outlier-patches", make_run(**tables))
    assert "layer 1" in figure.get_suptitle()
    np.testing.assert_allclose(figure.axes[2].images[0].get_array(), [[1, 1], [1, 4.5]])
    assert figure.axes[2].lines[0].get_xydata().tolist() == [[1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, np.nan, 0.0, np.inf, 1.0])
def test_small_runs_and_columns_without_information_are_drawn(value: float | None) -> None:
    if value is None:
        runs = [make_run(1, 1, 1, positions=1, length=2), make_run(positions=2, kv_heads=1, sequences=1)]
    else:
        tables = make_run(layers=2, heads=2).tables.items()
        same = {name: dict.fromkeys(table.select_dtypes("float").columns, value) for name, table in tables}
        runs = [Run(make_run().manifest, {name: table.assign(**same[name]) for name, table in tables})]
    for run in runs:  # figures of learned positions have nothing to draw if no position has a vector
        drawn = applicable(run)
        left = set(FIGURES) - set(drawn) - {"query-bias-alignment", "epe-coordinates", "gamma"}
        assert not left, "tests/support/made_up_runs.py has no table for them"
        check_all_draw(run, drawn, layout=not value and run is runs[0])


def test_figures_that_cannot_be_drawn_are_refused_with_the_reason(run: Run) -> None:
    with pytest.raises(InputError, match="did you mean 'sink-map'"):
        draw("sink-maps", run)
    only = Run(run.manifest, {"geometry": run.tables["geometry"], "attention_maps": run.tables["attention_maps"][:0]})
    assert applicable(only) == ["query-key-geometry"]
    with pytest.raises(InputError, match=r"needs the table 'sink_positions'.* run the observable attention$"):
        draw("sink-positions", only)
    with pytest.raises(InputError, match="run the observables attention, activation"):
        draw("sinks-by-layer", only)
    with pytest.raises(InputError, match="'attention_maps'"):
        draw("attention-maps", only)


def test_figures_are_saved_with_truetype_fonts_and_no_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(dict.items(mpl.rcParams))  # reading it in this way does not choose a backend
    monkeypatch.setitem(SETTINGS, "pdf.compression", 0)  # so that the fonts' names can be read
    rough_figures(monkeypatch)
    names = sorted(FIGURES)[::4]  # others are saved in the same way, and tests of commands save all of a run
    drawings = make_run(layers=2, heads=2).drawings
    assert save_figures({name: drawings[name] for name in names}, tmp_path) == {}
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        pdf = (tmp_path / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF")
        assert b"/Type3" not in pdf
        assert b"/FontFile2" in pdf  # TrueType, embedded
        assert b"CreationDate" not in pdf
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(names * 2)
    assert dict(dict.items(mpl.rcParams)) == before


def test_a_comparison_draws_each_runs_summary() -> None:
    runs = [make_run(), make_run(condition="random"), make_run(condition="repeated")]
    figure = draw_comparison(runs)
    assert figure.get_suptitle() == "Tiny-1M"
    assert legend_of(figure) == ["natural", "random", "repeated"]
    metrics = ("sink_rate", "value_drain", "norm_ratio", "massive_count")
    for ax, metric in zip(figure.axes, metrics, strict=True):
        for run, line in zip(runs, ax.lines, strict=False):
            rows = run.tables["summary"].query(f"metric == '{metric}' and layer >= 0")
            np.testing.assert_allclose(line.get_xydata(), rows[["layer", "value"]])
    figure = draw_comparison([make_run(), make_run(layers=7, model="org/Other"), make_run(layers=1, model="One")])
    assert legend_of(figure) == ["Tiny-1M", "Other", "One"]
    ends = [line.get_xdata()[[0, -1]].tolist() for line in figure.axes[0].lines]
    assert ends == [[0, 1], [0, 1], [0, 0]]
    assert figure.axes[0].get_xlabel() == "relative depth"
