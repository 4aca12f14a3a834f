"""`sweep` and the hub: simultaneous downloads, a hub that fails, a full disk, and models that are removed."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hub import CUT, Hub, Repo
from huggingface_hub import constants
from support.figures import quick_sweeps

import sinkscope
from sinkscope.commands.sweep.cells import Size
from sinkscope.commands.sweep.command import SweepRun, check_disk
from sinkscope.commands.sweep.worker import State
from sinkscope.errors import InputError
from sinkscope.models import files

SMALL = "options: {num-seqs: 2, seq-len: 12, observables: [attention]}"
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked, and use the hub of this process."""
    quick_sweeps(monkeypatch)
    monkeypatch.setattr(files, "PAUSES", (0.0, 0.0))


@pytest.fixture
def stocked(hub: Hub, tiny: Path) -> Iterator[Hub]:
    """A hub with two models, one of which has two revisions."""
    hub.repos |= {"org/one": Repo({"main": tiny}), "org/two": Repo({"main": tiny, "step1": tiny})}
    yield hub
    hub.faults.clear()


def swept(tmp_path: Path, content: str, **options: Any) -> SweepRun:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"title: Of the hub\n{content}\ninputs: [random]\n{SMALL}\n", encoding="utf-8")
    return sinkscope.sweep(path, out=tmp_path / "out", **options)


def fetched(hub: Hub, name: str = WEIGHTS) -> int:
    return sum(request.startswith("GET ") and request.endswith(name) for request in hub.requests)


@pytest.mark.parametrize(("at_once", "needed"), [(None, 6), (1, 3), (2, 5), (9, 6)])
def test_a_disk_has_to_hold_the_largest_models_that_are_there_at_once(
    at_once: int | None, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of one model read one download."""
    downloads = [("org/one", 1), ("org/two", 3), ("org/two", 3), ("org/three", 2)]
    todo: list[Any] = [
        SimpleNamespace(cell=SimpleNamespace(source=(name, None)), size=Size(download=gigabytes * 10**9))
        for name, gigabytes in downloads
    ]
    room = needed * 10**9 + files.SPARE
    monkeypatch.setattr("sinkscope.commands.sweep.command.free_room", lambda: room)
    check_disk(todo, at_once)
    monkeypatch.setattr("sinkscope.commands.sweep.command.free_room", lambda: room - 1)
    with pytest.raises(InputError, match="still on the hub") as caught:
        check_disk(todo, at_once)
    assert ("--evict removes" in str(caught.value)) == (at_once is None)


def assert_right(done: SweepRun, tiny: Path) -> None:
    """Check that all cells equal the run of the model, and that the cache has no incomplete file."""
    assert (done.failure, {each.state for each in done.plan}) == ("", {State.DONE})
    alone = sinkscope.analyze(tiny, input="random", num_seqs=2, seq_len=12, observables=("attention",), figures=())
    for each in done.plan:
        table = pd.read_parquet(done.folder / "cells" / each.cell.name / "tables" / "attention.parquet")
        columns = [column for column in table if column != "model"]
        if each.cell.options.dtype is None:
            pd.testing.assert_frame_equal(table[columns], alone.tables["attention"][columns])
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_two_workers_that_need_the_same_files_fetch_them_once(stocked: Hub, tiny: Path, tmp_path: Path) -> None:
    """The model has two groups, since its second dtype needs another load."""
    asked = "models: [org/one, {model: org/one, name: half, options: {dtype: bfloat16}}]"
    assert_right(swept(tmp_path, asked, workers=2), tiny)
    assert fetched(stocked) == 1


@pytest.mark.parametrize("faults", [[503, 500], [CUT, CUT, CUT], [503, CUT]])
def test_a_hub_that_fails_for_a_while(faults: list[int], stocked: Hub, tiny: Path, tmp_path: Path) -> None:
    stocked.faults[WEIGHTS] = list(faults)
    assert_right(swept(tmp_path, "models: [org/one]", workers=1), tiny)
    assert stocked.faults[WEIGHTS] == []


@pytest.mark.parametrize("fault", [503, CUT])
def test_a_hub_that_goes_on_failing(
    fault: int, stocked: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other model is measured; the failure is reported, and the cell is measured when the hub works again."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    asked = f"models: [{{model: org/one, name: here}}, {tiny}]"
    stocked.faults[WEIGHTS] = [fault] * 100
    done = swept(tmp_path, asked, workers=1)
    assert [each.state for each in done.plan] == [State.FAILED, State.DONE]
    assert done.failure.startswith("1 of 2 cells failed (--retry tries them again): here-random-")
    assert "downloading org/one failed" in done.failure
    (recorded,) = (done.folder / "failed").iterdir()
    assert json.loads(recorded.read_text())["error"] in done.failure
    stocked.faults.clear()
    assert_right(swept(tmp_path, asked, workers=1, retry=True), tiny)


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached(
    stocked: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked once and reported in one line; the local model is measured, and the others by the same command."""
    asks: list[bool] = []
    download = files.snapshot_download

    def counted(*args: Any, local_files_only: bool, **options: Any) -> str:
        asks.append(not local_files_only)
        return download(*args, local_files_only=local_files_only, **options)

    monkeypatch.setattr(files, "snapshot_download", counted)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    asked = f"models: [org/one, {{model: org/two, revisions: [main, step1]}}, {tiny}]"
    done = swept(tmp_path, asked, workers=1, quiet=False)
    assert [each.state for each in done.plan] == [State.FAILED] * 3 + [State.DONE]
    assert sum(asks) == 1
    assert done.failure.count("the hub cannot be reached") == 1
    assert capsys.readouterr().err.count("cannot be reached") == 1
    monkeypatch.setattr(constants, "ENDPOINT", stocked.url)
    done = swept(tmp_path, asked, workers=1)
    assert_right(done, tiny)
    table = pd.read_parquet(done.folder / "comparison" / "tables" / "sweep.parquet").drop_duplicates("cell")
    assert list(zip(table["revision"], table["step"], strict=True)) == [("", -1), ("main", -1), ("step1", 1), ("", -1)]


@pytest.mark.slow
def test_a_disk_without_room_for_all_models(stocked: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any download; with --evict only the models of the workers need room."""
    (content,) = stocked.repos["org/one"].commits.values()
    size = len(content[WEIGHTS]) + files.SPARE
    monkeypatch.setattr("sinkscope.commands.sweep.command.free_room", lambda: size + 10)
    monkeypatch.setattr(files, "free_room", lambda: size + 100_000)
    asked = "models: [org/one, {model: org/two, revisions: [main, step1]}]"
    with pytest.raises(InputError, match=r"are still on the hub take 0.0 GiB, and the disk .* evict=True removes each"):
        swept(tmp_path, asked, workers=1)
    assert fetched(stocked) == 0
    with pytest.raises(InputError, match=r"GiB left: make room"):
        swept(tmp_path, asked, workers=2, evict=True)
    assert swept(tmp_path, asked, workers=1, evict=True).failure == ""


def snapshots() -> set[str]:
    root = Path(constants.HF_HUB_CACHE)
    return {path.relative_to(root).parts[0] for path in root.glob("*/snapshots/*/*.safetensors")}


@pytest.mark.slow
def test_models_leave_when_their_cells_are_done(stocked: Hub, tiny: Path, tmp_path: Path) -> None:
    """A model with two cells is removed after the last one, also across shards; models that no cell uses stay."""
    stocked.repos["org/kept"] = Repo({"main": tiny})
    sinkscope.load("org/kept")
    asked = "models: [org/one, {model: org/two, revisions: [main, step1]}]\nsettings: {seed: [0, 1]}"
    first = swept(tmp_path, asked, workers=1, evict=True, shard="1/2")  # org/one, and half of org/two
    assert [each.cell.description for each in first.plan][-1] == "two main × random × seed=0 (analyze)"
    assert snapshots() == {"models--org--kept", "models--org--two"}
    done = swept(tmp_path, asked, workers=1, evict=True, shard="2/2")
    assert done.failure == ""
    assert snapshots() == {"models--org--kept"}
    assert fetched(stocked) == 4
    assert swept(tmp_path, asked, workers=1, evict=True).failure == ""  # nothing is left to do or to fetch
    assert fetched(stocked) == 4
