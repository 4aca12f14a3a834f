"""If a figure cannot be drawn, tables, run.json and the other figures are still written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.figures import skip_figures
from tiny import tiny_tokens

import sinkscope
from sinkscope.cli.app import app
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.style import Figure
from sinkscope.output import result as output
from sinkscope.output.run import Run

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 16, "batch_size": 2, "observables": "attention"}
ANALYZE = ("analyze", "--input=random", "--num-seqs=2", "--seq-len=16", "--observables=attention", "--quiet")
TRAINED: dict[str, Any] = {"steps": 2, "save_every": 1, "block_length": 16, "batch_size": 1, "num_seqs": 2}


@pytest.fixture
def misspelled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """misspelled(name, …): drawing these figures raises KeyError; other figures are empty files."""
    plain = FigureSpec.__call__

    def fail(*names: str) -> None:
        def draw(self: FigureSpec, data: Any) -> Figure:
            if self.name in names:
                raise KeyError("sink_rte")
            return plain(self, data) if self.name == "sink-map" else Figure()

        monkeypatch.setattr(FigureSpec, "__call__", draw)
        monkeypatch.setattr(Figure, "lay_out", lambda figure: None)
        monkeypatch.setattr(Figure, "savefig", lambda figure, fname, **options: Path(fname).touch())

    return fail


def check(folder: Path, *names: str) -> None:
    """Check the folder's tables, its files, and that run.json names the figures that failed."""
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["failed_figures"].keys() == {*names}
    assert all("KeyError" in reason for reason in manifest["failed_figures"].values())  # a long path cuts the rest
    assert "drawn" not in manifest
    assert manifest["tables"]
    for table in manifest["tables"]:
        assert list(pd.read_parquet(folder / "tables" / f"{table}.parquet"))
    drawn = {path.stem for path in (folder / "figures").iterdir()}
    assert not drawn & set(names)
    assert {f"figures/{name}.png" for name in drawn} <= set(manifest["files"])
    assert (folder / "index.html").is_file()
    assert not list(folder.rglob(".sinkscope-*"))


def test_the_command_line_names_it_and_ends_with_1(
    tiny: Path, tmp_path: Path, misspelled: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    misspelled("sink-positions")
    with pytest.raises(SystemExit) as ended:
        app([*ANALYZE, str(tiny), "--out", str(tmp_path / "run")], prog_name="sinkscope")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sinkscope: 1 figure could not be drawn, and all else is written: sink-positions (KeyError:")
    check(tmp_path / "run", "sink-positions")
    assert (tmp_path / "run" / "figures" / "sink-map.pdf").is_file()


@pytest.mark.slow
def test_retrofit_and_train_draw_failed_figures_again(
    tiny: Path, tmp_path: Path, misspelled: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "ids.npy"
    np.save(text, tiny_tokens(12, 16).numpy())

    def retrofit() -> Any:
        return sinkscope.retrofit(tiny, "vga", text=text, out=tmp_path / "out", observables="attention", **TRAINED)

    with monkeypatch.context():
        misspelled("retrofit-bars", "sink-map", "by-layer")
        with pytest.warns(UserWarning, match="could not be drawn"):
            done = retrofit()
        check(tmp_path / "out", "retrofit-bars")
        check(tmp_path / "out" / "vga" / "run", "sink-map")
        check(tmp_path / "out" / "comparison", "by-layer")
        assert {"sink-map", "retrofit-bars"} <= set(done.failure.replace("(", " ").split())
        options = {"text": text, "out": tmp_path / "new", "observables": "attention"}
        with pytest.warns(UserWarning, match="could not be drawn"):
            sinkscope.train(tiny / "config.json", "none", **options, **TRAINED)
        check(tmp_path / "new", "retrofit-bars")
    misspelled()
    assert retrofit().failure == ""
    assert (tmp_path / "out" / "vga" / "run" / "figures" / "sink-map.png").is_file()
    assert (tmp_path / "out" / "figures" / "retrofit-bars.png").is_file()


def test_what_was_not_drawn_is_drawn_by_show(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page of one run fails, and drawing the other is interrupted."""

    def fails(error: BaseException) -> Callable[..., None]:
        def raising(*args: Any) -> None:
            raise error

        return raising

    skip_figures(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(output, "page_of", fails(KeyError("sink_rte")))
        with pytest.warns(UserWarning, match=r"all else is written: index.html \(KeyError: 'sink_rte'\)"):
            sinkscope.analyze(tiny, out=tmp_path / "failed", **SMALL)
        patched.setattr(output, "save_figures", fails(KeyboardInterrupt()))
        with pytest.raises(SystemExit):
            app([*ANALYZE, str(tiny), "--out", str(tmp_path / "run")], prog_name="sinkscope")
    told = f"sinkscope: interrupted: the tables in {tmp_path / 'run'} are complete, and its figures are not\n"
    assert capsys.readouterr().err == told
    left = {"failed": ("failed_figures", {"index.html": "KeyError: 'sink_rte'"}), "run": ("drawn", False)}
    for name, (entry, value) in left.items():
        assert json.loads((tmp_path / name / "run.json").read_text())[entry] == value
        assert len(Run.open(tmp_path / name).tables["attention"])
        sinkscope.show(tmp_path / name)
        manifest = json.loads((tmp_path / name / "run.json").read_text())
        assert entry not in manifest
        assert "index.html" in manifest["files"]
        assert (tmp_path / name / "index.html").is_file()
