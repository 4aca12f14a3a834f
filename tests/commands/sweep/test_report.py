"""The comparison of a sweep: figures are drawn where there is something to compare, and show the table."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sinkscope.commands.sweep.cells import Planned
from sinkscope.commands.sweep.figures import ROW_SPREAD
from sinkscope.commands.sweep.file import Cell, ModelEntry
from sinkscope.commands.sweep.output import SweepComparison, one_cell_per_model, summaries, summary_tables, words
from sinkscope.commands.sweep.tables import ALPHA, EPSILON, SCORES, SWEEP, SweepTables, _by_epsilon, sweep_tables
from sinkscope.commands.sweep.worker import State
from sinkscope.figures import KINDS
from sinkscope.results.manifest import make_manifest, write_manifest
from sinkscope.results.papers import WSE_TABLE_1
from sinkscope.results.run import policy_of
from sinkscope.results.tables import write_tables

CELL: dict[str, Any] = {
    "model": "a", "condition": "natural", "layer": -1, "cell": "", "revision": "", "step": -1, "family": "", "base": "",
    "parameters": 10**6, "input": "natural", "settings": "", "seq_len": 64, "window": 64, "epsilon": 0.3, "seed": 0,
    "dtype": "float32", "token_zero": "bos", "metric": "sink_rate", "value": 0.5,
}  # fmt: skip


def tables_of(*cells: dict[str, Any], papers: dict[str, str] | None = None) -> SweepTables:
    of_input = ({"cell": str(place), "condition": cell.get("input", "natural")} for place, cell in enumerate(cells))
    table = pd.DataFrame([CELL | common | cell for common, cell in zip(of_input, cells, strict=True)])
    table = table.assign(bos=table["token_zero"].map(policy_of))
    shared = table.drop(columns=["metric", "value"]).drop_duplicates("cell")
    by_epsilon = pd.concat([shared.assign(epsilon=epsilon, sink_rate=1 - epsilon) for epsilon in (0.2, 0.3, 0.9)])
    return SweepTables({SWEEP: table, EPSILON: by_epsilon}, papers or {})


def lines(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """Return label → points; a row of dots has its points at its middle."""
    return {
        str(line.get_label()): [(round(float(x), 6), round(float(y))) for x, y in line.get_xydata()]
        for line in figure.axes[0].lines
        if not str(line.get_label()).startswith("_")
    }


RANDOM = {"input": "random", "value": 0.25}
DRAWN: dict[str, tuple[list[dict[str, Any]], dict[str, list[tuple[float, float]]]]] = {
    "sweep-inputs": ([{}, RANDOM, {"model": "b", "value": 1.0}], {"natural": [(50, 0), (100, 1)], "random": [(25, 0)]}),
    "sweep-sizes": (
        [{"family": "F"}, {"model": "b", "family": "F", "parameters": 10**7, "value": 0.75}, {"model": "c"},
         *({"model": name, "family": "of one size"} for name in "de"),
         {"model": "f", "family": "of one size on each input", "input": "random"},
         {"model": "g", "family": "of one size on each input", "parameters": 10**7}],
        {"F": [(1e6, 50), (1e7, 75)]}),
    "sweep-steps": (
        [{"revision": "step0", "step": 0, "value": 0.0}, {"revision": "step8", "step": 8}, {"revision": "main"},
         *({"model": "b", "step": step, "settings": f"seed={step}"} for step in (0, 8))],
        {"a": [(0, 0), (8, 50)]}),
    "sweep-chat": ([{}, {"model": "b", "base": "a", "value": 0.75}], {"base": [(50, 0)], "tuned": [(75, 0)]}),
    "sweep-epsilon": ([{}, {"settings": "seed=1"}], {"a": [(0.2, 80), (0.3, 70), (0.9, 10)]}),
    "sweep-lengths": (
        [{"settings": "seq-len=64"}, {"settings": "seq-len=16", "seq_len": 16, "window": 16, "value": 0.75},
         {"settings": "seq-len=32", "seq_len": 32}],
        {"a": [(16, 75), (64, 50)]}),
    "sweep-domains": (
        [{}, {"input": "code", "value": 0.75}, RANDOM, {"input": "drawn", "condition": "random"}, {"model": "b"}],
        {"natural": [(50, 0)], "code": [(75, 0)]}),
}  # fmt: skip


OF_OTHER_TABLES = {
    "sweep-benchmarks",
    "sweep-factor",
    "sweep-training-sink",
    "sweep-training-loss",
    "formats-models",
}  # elsewhere


@pytest.mark.parametrize("name", [name for name in KINDS["cells of a sweep"] if name not in OF_OTHER_TABLES])
def test_a_figure_shows_the_rates_of_the_table(name: str) -> None:
    cells, expected = DRAWN[name]
    assert lines(KINDS["cells of a sweep"][name](tables_of(*cells))) == expected


def test_a_tuned_model_is_compared_with_its_base_on_the_same_input() -> None:
    tuned = {"model": "b", "base": "a"}
    tables = tables_of(RANDOM, {}, tuned | {"input": "random", "value": 1.0}, tuned | {"value": 0.75})
    figure = KINDS["cells of a sweep"]["sweep-chat"](tables)
    assert lines(figure) == {"base": [(25, 0), (50, 1)], "tuned": [(100, 0), (75, 1)]}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["b · random", "b · natural"]
    joined = [line.get_xdata().tolist() for line in figure.axes[0].lines if str(line.get_label()).startswith("_")]
    assert joined == [[25, 100], [50, 75]]


def test_the_first_setting_and_the_last_revision_are_compared_by_input() -> None:
    tables = tables_of(
        {"revision": "step0", "settings": "seed=0", "value": 0.1},
        {"revision": "step8", "settings": "seed=0", "value": 0.2},
        {"revision": "step8", "settings": "seed=1", "value": 0.3, "seq_len": 16},
        {"cell": "1", "revision": "step8", "settings": "seed=0", "layer": 0, "value": 0.4},
        {"cell": "1", "revision": "step8", "settings": "seed=0", "metric": "kurtosis", "value": 5.0},
    )
    assert tables.main["sink_rate"].tolist() == [0.2]
    assert tables.overview.to_dict("records") == [{"model": "a", "BOS": "with", "natural": "20.0%"}]
    assert list(summary_tables(tables)) == ["Sink rate at position 0 (T = 64, ε = 0.3)"]


def test_the_score_of_the_last_revision_stands_next_to_its_sink_rate() -> None:
    plain = tables_of({"revision": "step0", "value": 0.1}, {"revision": "step8", "value": 0.2})
    scores = [
        CELL | {"cell": revision, "revision": revision, "condition": "t", "metric": "acc", "score": score}
        | {"filter": "none", "error": 0.01, "questions": 9, "is_asked": True}
        for revision, score in (("step0", 0.3), ("step8", 0.4))
    ]  # fmt: skip
    tables = SweepTables(plain.tables | {SCORES: pd.DataFrame(scores)}, {})
    assert tables.overview.to_dict("records") == [{"model": "a", "BOS": "with", "natural": "20.0%", "t (acc)": "0.400"}]


def test_rates_under_different_bos_policies_are_in_rows_of_their_own() -> None:
    without = {"token_zero": "random token", "value": 0.0}
    text = words(tables_of(RANDOM | without, {}, {"model": "b"}), {"content": {"title": "x"}})
    rows = ["| a | without | 0.0% | – |", "| a | with | – | 50.0% |"]  # in the order of the cells
    assert [line for line in text.splitlines() if line.startswith("| a")] == rows
    text_first = {"token_zero": "first text token", "value": 0.0}
    cells = [
        cell | {"settings": f"bos={bos},seq-len={length}"}
        for length in (16, 64)
        for bos, own in (("always", {}), ("never", text_first))
        for cell in (own, RANDOM | own)
    ]
    tables = tables_of(*cells)
    assert tables.by_policy["settings"].str.contains("16").all()  # the BOS policy does not hide the length
    columns = {"model": ["a", "a"], "BOS": ["with", "without"], "natural": ["50.0%", "0.0%"]}
    assert tables.overview.to_dict("list") == columns | {"random": ["25.0%", "0.0%"]}
    assert tables.main["bos"].tolist() == ["with", "with"]
    names = [text.get_text() for text in KINDS["cells of a sweep"]["sweep-inputs"](tables).axes[0].get_yticklabels()]
    assert names == ["a, with BOS", "a, without BOS"]


def test_published_rates_are_rings_in_the_rows_of_their_models_at_their_inputs() -> None:
    cells, papers = [{}, RANDOM, {"token_zero": "first text token"}, {"model": "b"}], {"a": "GPT2-XL"}
    figure = KINDS["cells of a sweep"]["sweep-inputs"](tables_of(*cells, papers=papers))
    rings = [line.get_xydata()[0] for line in figure.axes[0].lines if line.get_fillstyle() == "none"]
    places = {"natural": -ROW_SPREAD, "random": ROW_SPREAD, "repeated": 0}  # the last one is not measured
    published = [(rate.value, places[reads]) for reads, rate in WSE_TABLE_1["GPT2-XL"].items()]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["a, with BOS", "a, without BOS", "b, with BOS"]
    np.testing.assert_allclose(rings, [(rate, row + place) for row in (0, 1) for rate, place in published])
    of_window = KINDS["cells of a sweep"]["sweep-inputs"](tables_of({"window": 32}, papers=papers))
    assert {line.get_fillstyle() for line in of_window.axes[0].lines} == {"full"}


def test_published_rates_are_those_of_the_same_setting() -> None:
    paper, rates = next((paper, rates) for paper, rates in WSE_TABLE_1.items() if "natural" in rates)
    said = [f"{rates['natural'].value:.1f}%{rates['natural'].mark}", "–"]
    for setting, expected in (({}, said), ({"window": 32}, None), ({"seq_len": 128}, None)):
        cells = [setting, setting | {"model": "b"}]
        (table,) = summary_tables(tables_of(*cells, papers={"a": paper})).values()
        assert table.to_dict("list").get("natural (WSE)") == expected


def test_a_folder_has_the_published_rates_of_the_models_that_name_their_paper(tmp_path: Path) -> None:
    paper, rates = next((paper, rates) for paper, rates in WSE_TABLE_1.items() if "natural" in rates)
    write_tables(tables_of({}).tables, tmp_path)
    content = {"title": "One", "models": [{"name": "a", "model": "org/a", "paper": paper}]}
    write_manifest(tmp_path, make_manifest("sweep", {"content": content}, 0.0, tables=[SWEEP, EPSILON]))
    (table,) = summaries(tmp_path).values()
    assert table["natural (WSE)"].tolist() == [f"{rates['natural'].value:.1f}%{rates['natural'].mark}"]


def test_claims_are_compared_in_the_last_revision_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", "step0", "c0"), ("a", "step8", "c1"), ("a", "step8", "c2"), ("b", "", "c3"), ("b", "", "c3")]
    claims = pd.DataFrame(rows, columns=["model", "revision", "cell"])
    assert one_cell_per_model(claims)["cell"].tolist() == ["c1", "c3", "c3"]
    monkeypatch.setattr("sinkscope.commands.claims.figures.drawings_by_model", lambda tables: tables)
    drawn = SweepComparison({}, {"claim": claims, "route": claims}, compared=SweepTables({}, {})).drawings
    assert [drawn[name]["cell"].tolist() for name in ("claim", "route")] == [["c1", "c3", "c3"]] * 2


def test_the_table_of_a_cell_has_its_coordinates(tmp_path: Path) -> None:
    entry = ModelEntry(model="org/a", name="a", family="F", base="b", paper="GPT2-XL")
    manifest = {
        "config": {"seq_len": 12, "window": 7, "epsilon": 0.2, "seed": 3}, "model": {"parameters": 9},
        "tables": ["summary"], "dtype": "bfloat16", "input": {"token_zero": "bos <s> (id 1)"},
    }  # fmt: skip
    measured = {"model": "org/a", "condition": "random", "layer": 1, "metric": "sink_rate", "value": 0.5}
    write_tables({"summary": pd.DataFrame([measured])}, tmp_path)
    cell = Cell("a-1", entry, "step8", "mine", "seed=3", "analyze", None)
    tables = sweep_tables([Planned(cell, tmp_path, State.DONE, manifest=manifest)])
    assert tables.tables[SWEEP].to_dict("records") == [measured | {
        "model": "a", "cell": "a-1", "revision": "step8", "step": 8, "family": "F", "base": "b", "parameters": 9,
        "input": "mine", "settings": "seed=3", "seq_len": 12, "window": 7, "epsilon": 0.2, "seed": 3,
        "dtype": "bfloat16", "token_zero": "bos <s> (id 1)", "bos": "with",
    }]  # fmt: skip
    assert tables.papers == {"a": "GPT2-XL"}


def test_a_threshold_that_uniform_attention_exceeds_has_no_rate(tmp_path: Path) -> None:
    """Position 0 has 0.9 of the window in one head of each layer, and 0.1 in the other; uniform attention has 0.32."""
    places = pd.MultiIndex.from_product([range(2), range(2), range(3)], names=["layer", "head", "sequence"])
    table = pd.DataFrame(index=places).reset_index().assign(uniform_mass=0.32)
    table["window_mass"] = np.where(table["head"] == 0, 0.9, 0.1)
    (tmp_path / "tables").mkdir()
    table.to_parquet(tmp_path / "tables" / f"{ALPHA}.parquet")
    manifest = {"config": {"epsilon": 0.33}, "condition": "natural", "input": {"sequences": 3}}
    rates = _by_epsilon(SimpleNamespace(folder=tmp_path, manifest=manifest)).set_index("epsilon")
    assert rates.loc[:0.32, "sink_rate"].isna().all()
    assert not np.isfinite(rates.loc[:0.32, ["low", "high"]]).any(axis=None)
    assert (rates.loc[0.33:0.85, ["sink_rate", "low", "high"]] == 0.5).all(axis=None)
    assert rates.loc[0.95, "sink_rate"] == 0
    assert 0.33 in rates.index


def test_a_text_that_is_read_twice_narrows_no_interval(tmp_path: Path) -> None:
    masses, texts = np.random.default_rng(0).random((2, 2, 6)), np.arange(6)  # by layer, head and text
    rates = []
    for times in (1, 2):
        table = pd.Series(np.concatenate([masses] * times, axis=2).ravel(), name="window_mass").to_frame()
        places = pd.MultiIndex.from_product([range(2), range(2), range(6 * times)], names=["layer", "head", "sequence"])
        (tmp_path / str(times) / "tables").mkdir(parents=True)
        table.set_index(places).reset_index().assign(uniform_mass=0.1).to_parquet(
            tmp_path / str(times) / "tables" / f"{ALPHA}.parquet"
        )
        read = {"sequences": 6 * times, "texts": [*texts] * times}
        manifest = {"config": {"epsilon": 0.3}, "condition": "natural", "input": read}
        rates.append(_by_epsilon(SimpleNamespace(folder=tmp_path / str(times), manifest=manifest)))
    pd.testing.assert_frame_equal(*rates)
    assert (rates[0]["low"] < rates[0]["high"]).any()


def test_scores_are_drawn_against_sink_rates() -> None:
    """Each task has a panel, with a family's models by size and other models by name, on the first input."""
    of_models: dict[str, dict[str, Any]] = {"a": {"family": "F", "parameters": 2 * 10**6}, "b": {"family": "F"}}
    of_c = {"model": "c", "revision": "step0", "value": 0.9}, {"model": "c", "value": 0.1}  # the second has scores
    cells = [of_models["a"], RANDOM, {"model": "b", "family": "F", "value": 0.75}, *of_c]
    plain = tables_of(*cells, {"model": "without"})
    scores = [
        CELL | of_models.get(model, {}) | {"model": model, "condition": task, "cell": f"{model}-scores", "input": ""}
        | {"metric": "acc", "filter": "none", "score": score, "error": 0.01, "questions": 9, "is_asked": True}
        for model, task, score in (
            ("a", "u", 0.9), ("a", "t", 0.4), ("b", "t", 0.3), ("c", "t", 0.2), ("gone", "t", 0.1))
    ]  # fmt: skip
    tables = SweepTables(plain.tables | {SCORES: pd.DataFrame(scores)}, plain.papers)
    figure = KINDS["cells of a sweep"]["sweep-benchmarks"](tables)
    assert [ax.get_title() for ax in figure.axes] == ["u (acc)", "t (acc)"]
    points = {
        bars.get_label(): [tuple(map(float, point)) for point in bars.lines[0].get_xydata()]
        for bars in figure.axes[1].containers
    }
    assert points == {"F": [(75, 0.3), (50, 0.4)], "c": [(10, 0.2)]}
    assert tables.overview.to_dict("list") == {
        "model": ["a", "b", "c", "without", "gone"],
        "BOS": ["with", "with", "with", "with", "–"],
        "natural": ["50.0%", "75.0%", "10.0%", "50.0%", "–"],
        "random": ["25.0%", "–", "–", "–", "–"],
        "t (acc)": ["0.400", "0.300", "0.200", "–", "0.100"],
        "u (acc)": ["0.900", "–", "–", "–", "–"],
    }
    assert "| gone | – | – | – | – | 0.100 |" in words(tables, {"content": {"title": "Scores"}})


def test_scores_are_drawn_against_sink_rates_under_the_first_setting() -> None:
    cells = [
        {"model": model, "settings": f"seq-len={length}", "value": rate}
        for model, length, rate in (("a", 16, 0.5), ("a", 32, 0.9), ("b", 16, 0.75), ("b", 32, 0.1))
    ]
    scores = [
        CELL | {"model": model, "condition": "t", "metric": "acc", "filter": "none", "score": score, "error": 0.01}
        | {"cell": f"{model}-scores", "input": "", "questions": 9, "is_asked": True}
        for model, score in (("a", 0.4), ("b", 0.3))
    ]  # fmt: skip
    tables = SweepTables(tables_of(*cells).tables | {SCORES: pd.DataFrame(scores)}, {})
    (ax,) = KINDS["cells of a sweep"]["sweep-benchmarks"](tables).axes
    points = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in ax.containers}
    assert points == {"a": [[50, 0.4]], "b": [[75, 0.3]]}
    errors = [bars.lines[2][0].get_segments()[0].tolist() for bars in ax.containers]
    np.testing.assert_allclose(errors, [[[50, 0.39], [50, 0.41]], [[75, 0.29], [75, 0.31]]])


def test_a_band_goes_from_the_lowest_to_the_highest_of_several_cells() -> None:
    models = {"a": (10**6, 0.4), "b": (10**6, 0.5), "c": (10**6, 0.9), "d": (10**7, 0.75)}
    cells = [{"model": name, "family": "F", "parameters": size, "value": rate} for name, (size, rate) in models.items()]
    figure = KINDS["cells of a sweep"]["sweep-sizes"](tables_of(*cells))
    assert lines(figure) == {"F": [(1e6, 60), (1e7, 75)]}
    (band,) = figure.axes[0].collections
    drawn = np.concatenate([path.vertices for path in band.get_paths()])
    assert {*drawn[drawn[:, 0] == 10**6, 1].round(6)} == {40.0, 90.0}
    assert "lowest to highest" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("name", ["sweep-inputs", "sweep-epsilon"])
def test_intervals_over_sequences_are_drawn(name: str) -> None:
    tables = tables_of({}, RANDOM)
    ends = tables.tables[EPSILON]
    of_natural = ends["sink_rate"].where(ends["input"] == "natural")  # the other has no values by sequence
    with_ends = SweepTables(tables.tables | {EPSILON: ends.assign(low=of_natural - 0.1, high=0.9 + 0 * of_natural)}, {})
    figure = KINDS["cells of a sweep"][name](with_ends)
    assert "95 % over sequences" in [text.get_text() for text in figure.legends[0].get_texts()]
    drawn = np.concatenate([path.vertices for path in figure.axes[0].collections[0].get_paths()])
    assert {60.0, 90.0} <= set(drawn.round(6).ravel())
    if name == "sweep-epsilon":  # every input has its panel
        assert [ax.get_title() for ax in figure.axes] == ["natural", "random"]
        assert figure.axes[1].lines[0].get_label() == "a"
