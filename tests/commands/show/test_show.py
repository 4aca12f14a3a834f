"""`show`: the page of a folder is opened or printed, and made again from the tables alone."""

import io
import json
import shutil
import webbrowser
from math import nan
from pathlib import Path

import pandas as pd
import pytest
from support.figures import skip_figures
from support.pages import data_of, table_of
from support.retrofit_command import command_line
from tiny import tiny_model

import sinkscope
from sinkscope.results.manifest import foreign_files, make_manifest, read_manifest, write_manifest

ASKED = {"observables": "attention,massive", "input": "random", "num_seqs": 2, "seq_len": 12, "bos": "never"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        skip_figures(patch)
        return sinkscope.analyze(tiny_model("llama"), out=tmp_path_factory.mktemp("runs") / "run", **ASKED).folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_a_page_has_the_numbers_of_its_run_and_is_made_again_from_the_tables(run: Path, tmp_path: Path) -> None:
    page, opened = run / "index.html", sinkscope.Run.open(run)
    before = data_of(page.read_text(encoding="utf-8"))
    values = [nan if value is None else value for value in table_of(before, "summary")["value"]]
    assert values == pytest.approx(opened.tables["summary"]["value"].tolist(), rel=1e-5, nan_ok=True)
    assert "index.html" in opened.manifest["files"]
    page.unlink()
    assert sinkscope.show(run) == page
    after = data_of(page.read_text(encoding="utf-8"))
    assert after["tables"] == before["tables"] == data_of(sinkscope.page(opened).html)["tables"]
    assert after["findings"] == before["findings"]
    outer = tmp_path / "sweep"  # of a folder of runs the comparison is shown
    shutil.copytree(run, outer / "comparison")
    write_manifest(outer, make_manifest("sweep", {}, 0.0))
    assert sinkscope.show(outer) == outer / "comparison" / "index.html"


def test_a_page_that_is_added_is_the_commands_own(tmp_path: Path, no_figures: None) -> None:
    run = sinkscope.analyze(tiny_model("llama"), out=tmp_path / "run", page=False, **ASKED).folder
    assert not (run / "index.html").exists()
    sinkscope.show(run)
    assert list(foreign_files(run)) == []  # --overwrite may replace the folder
    assert read_manifest(run)["files"].count("index.html") == 1


def test_it_opens_the_browser_or_prints_the_path(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) is None)
    assert command_line("show", run).output == ""
    assert asked == [(run / "index.html").as_uri()]
    printed = command_line("show", run / "run.json", "--print")
    assert printed.output == f"{run / 'index.html'}\n"
    assert len(asked) == 1
    monkeypatch.setattr(webbrowser, "open", lambda url: False)  # there is none
    assert command_line("show", run).output == printed.output
    (run / "index.html").write_text("an older page")
    command_line("show", run, "--again")
    assert "an older page" not in (run / "index.html").read_text(encoding="utf-8")


def test_of_a_recipe_only_its_figures_are_drawn_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("sinkscope.output.result.save_figures", lambda drawings, folder: drawn.extend(drawings) or {})
    for content in ({"figures": ["sink-map"]}, {}):
        write_manifest(run, read_manifest(run) | {"drawn": False, "recipe": {"name": "x", "content": content}})
        sinkscope.show(run)
    assert drawn == ["sink-map"]


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(sinkscope.InputError, match="is not a run folder"):
        sinkscope.show(tmp_path)
    (run / "tables" / "summary.parquet").write_text("")
    with pytest.raises(sinkscope.InputError, match="is damaged"):
        sinkscope.show(run, again=True)


def test_it_prints_a_metric_with_intervals(run: Path) -> None:
    asked = ("show", run, "--metric", "sink_rate", "--by", "layer", "--epsilon", "0.4,0.5")
    table = sinkscope.Run.open(run).estimate("sink_rate", by="layer", epsilon=[0.4, 0.5])
    assert pd.read_csv(io.StringIO(command_line(*asked, "--format", "csv").stdout)).equals(pd.DataFrame(table))
    assert json.loads(command_line(*asked, "--format", "json").stdout) == json.loads(table.to_json(orient="records"))
    assert command_line(*asked, "--format", "latex").stdout.strip() == table.to_latex()
    cells = command_line(*asked).stdout.splitlines()[3].replace("│", " ").split()
    assert cells[:4] == ["sink_rate", "0", "0.4", f"{table['value'][0]:.4g}"]
    to_itself = command_line(*asked, "--null", run, "--format", "csv").stdout
    assert (pd.read_csv(io.StringIO(to_itself))["null"] == table["value"]).all()
    other = sinkscope.analyze(tiny_model("gpt2"), out=run.parent / "null", figures=(), page=False, **ASKED)
    to_other = command_line(*asked, "--null", other.folder, "--format", "csv").stdout
    expected = other.estimate("sink_rate", by="layer", epsilon=[0.4, 0.5])["value"]
    assert pd.read_csv(io.StringIO(to_other))["null"].tolist() == pytest.approx(expected.tolist())
    assert (expected != table["value"]).any()
    for without_metric in (("--format", "csv"), ("--by", "layer"), ("--epsilon", "0.2"), ("--null", run)):
        refused = command_line("show", run, *without_metric)
        assert refused.exit_code == 2
        assert "those of a metric: name it by --metric" in refused.stderr
