"""`sweep`: all cells are checked first, cells equal the runs of their commands, and a failure affects only its cell."""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pandas as pd
import pytest
import torch
from rich.console import Console
from support.faults import CHANGES, WRITES, before_change, kill, refuse
from support.figures import quick_sweeps
from support.forked import forked
from support.ranks import on_two_ranks
from support.retrofit_command import command_line, succeeded
from support.tables import assert_same_tables, tables_in

import sinkscope
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.sweep import worker
from sinkscope.commands.sweep.command import Progress, SweepRun
from sinkscope.commands.sweep.tables import EPSILON, SWEEP, SWEEP_TABLES
from sinkscope.commands.sweep.worker import Reads, State, Task
from sinkscope.commands.train.options import RetrofitOptions
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.processes import Team
from sinkscope.output.run import finished
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import foreign_files, make_manifest, noting, read_manifest, write_manifest
from sinkscope.results.tables import LEADING, names_of

SMALL = "options: {num-seqs: 2, seq-len: 12, observables: [attention]}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_sweeps(monkeypatch)


def written(folder: Path, content: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(f"title: Tiny models\n{content}\n", encoding="utf-8")
    return path


def grid(models: Path, folder: Path, more: str = "") -> Path:
    """Write a sweep of two models × two inputs."""
    return written(
        folder, f"models: [{models / 'llama'}, {models / 'gpt2'}{more}]\ninputs: [random, repeated]\n{SMALL}"
    )


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> SweepRun:
    """An uninterrupted sweep with one worker. Tests must not change it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        quick_sweeps(patch)
        return sinkscope.sweep(grid(models, folder), out=folder / "out", workers=1)


def assert_same(out: Path, whole: SweepRun, **close: Any) -> None:
    """Compare the tables of all cells and of the comparison, and check that no temporary file is left."""
    assert_same_tables(tables_in(out), tables_in(whole.folder), **close)
    assert not list(out.parent.rglob(".sinkscope-*"))
    assert not list(foreign_files(out))


@pytest.mark.slow
def test_a_cell_is_what_its_command_writes(whole: SweepRun) -> None:
    """This includes the second cell of a shared load."""
    for each in whole.plan:
        assert each.state == State.DONE
        alone = sinkscope.analyze(each.cell.options.model, config=each.cell.options)
        run = sinkscope.Run.open(whole.folder / "cells" / each.cell.name)
        assert_same_tables(run.tables, alone.tables, check_exact=True)
        assert {key: run.manifest[key] for key in ("model", "input", "config")} == {
            key: alone.manifest[key] for key in ("model", "input", "config")
        }


def test_the_tables_of_all_cells(whole: SweepRun, tmp_path: Path) -> None:
    folder = whole.folder / "comparison" / "tables"
    table, by_epsilon = (pd.read_parquet(folder / f"{name}.parquet") for name in (SWEEP, EPSILON))
    for name, written_table in ((SWEEP, table), (EPSILON, by_epsilon)):
        assert list(written_table.columns) == [*LEADING, *names_of(SWEEP_TABLES[name])]
    inputs = {(model, reads) for model in ("llama", "gpt2") for reads in ("random", "repeated")}
    assert set(zip(table["model"], table["input"], strict=True)) == inputs
    rates = table.query("metric == 'sink_rate' and layer == -1").set_index("cell")["value"]
    for each in whole.plan:
        assert rates[each.cell.name] == sinkscope.Run.open(whole.folder / "cells" / each.cell.name).metric("sink_rate")
    at_own = by_epsilon.query("epsilon == 0.3").set_index("cell")["sink_rate"]
    pd.testing.assert_series_equal(at_own, rates, check_names=False, rtol=1e-12)
    options = whole.plan[2].cell.options.model_copy(update={"epsilon": 0.35})
    at_other = by_epsilon[(by_epsilon["cell"] == whole.plan[2].cell.name) & (by_epsilon["epsilon"] == 0.35)]
    rate = sinkscope.analyze(options.model, config=options).metric("sink_rate")
    assert at_other["sink_rate"].item() == pytest.approx(rate, rel=1e-12)
    assert 0 < rate < 1
    for format in ("markdown", "latex"):
        printed = command_line("compare", whole.folder, "--format", format)
        assert printed.stdout.strip() == whole.formatted(format)
        assert "llama" in printed.stdout


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({}, "0 of 40 done"),
        ({State.DONE: 12, State.FAILED: 1}, "12 of 40 done, 1 failed · 3 cells a minute · 9 min left"),
        ({State.DONE: 40}, "40 of 40 done · 9.23 cells a minute · 0 s left"),
    ],
)
def test_the_time_left_is_that_of_the_cells_that_have_not_ended(
    ended: dict[State, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.commands.sweep.command.time.monotonic", lambda: 270.0)
    assert Progress(40, ended=Counter(ended), start=10.0).summary == words


def test_two_workers_and_shards_end_with_the_same_tables(models: Path, whole: SweepRun, tmp_path: Path) -> None:
    file, out = grid(models, tmp_path), tmp_path / "out"
    first = sinkscope.sweep(file, out=out, shard="1/2", workers=2)
    assert [each.cell.name for each in first.plan] == [each.cell.name for each in whole.plan[:2]]
    assert len(list((out / "cells").iterdir())) == 2
    sinkscope.sweep(file, out=out, shard="2/2", workers=2)
    assert_same(out, whole)


def test_processes_that_measure_each_cell_together(models: Path, whole: SweepRun, tmp_path: Path) -> None:
    """One model is broken, and the second process returns the same result."""
    file, out = grid(models, tmp_path, f", {tmp_path / 'gone'}"), tmp_path / "there" / "out"

    def work() -> None:
        done = sinkscope.sweep(file, out=out)
        (tmp_path / f"told-{os.environ['RANK']}").write_text(done.failure)

    log = tmp_path / "log"
    assert on_two_ranks(work, log) == [0, 0], log.read_text()[-4000:]
    first, second = ((tmp_path / f"told-{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert first.startswith("2 of 6 cells failed (--retry tries them again): gone-random-")
    cell = whole.plan[0].cell.name
    assert json.loads((out / "cells" / cell / "run.json").read_text())["processes"] == 2
    assert_same(out, whole, check_exact=False, rtol=1e-9, atol=1e-9)


def replay(whole: SweepRun, task: Task) -> None:
    run = sinkscope.Run.open(whole.folder / "cells" / task.name)
    with own_folder(task.folder, True) as folder:
        finished(sinkscope.Run(run.manifest, dict(run.tables), folder), Console(quiet=True), ())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process was ended by signal 9: memory may have run out"),
        (partial(os._exit, 3), "its process ended with status 3"),
        (
            partial(torch.empty, 1 << 60),
            "memory ran out: take a shorter --seq-len, --dtype bfloat16 or --device-map auto",
        ),
        (partial(int, "x"), "unexpected ValueError: invalid literal for int() with base 10: 'x'"),
    ],
)
def test_a_worker_that_is_lost_fails_one_cell(
    fault: Any, message: str, models: Path, whole: SweepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: Task, loaded: Any) -> None:
        if task.name.startswith("llama-random"):
            fault()
        replay(whole, task)

    file, out = grid(models, tmp_path), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_measure", measure)
        done = sinkscope.sweep(file, out=out, workers=1)
    first, *others = done.plan  # cells of one load, and of another
    assert (first.state, first.message) == (State.FAILED, message)
    assert {each.state for each in others} == {State.DONE}
    assert message in done.failure
    monkeypatch.setattr(worker, "_measure", lambda task, models: replay(whole, task))
    again = sinkscope.sweep(file, out=out, workers=1)
    assert again.failure == done.failure  # a failed cell is tried again only with --retry
    assert sinkscope.sweep(file, out=out, workers=1, retry=True).failure == ""
    assert_same(out, whole)
    assert not list((out / "failed").iterdir())


def test_a_cell_is_measured_with_its_figures_and_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is merged by the command, so that the loaded model is not used; --force skips the check of memory."""
    analyze, load, figures = MagicMock(), MagicMock(return_value="loaded"), ("sink-map",)
    record = SimpleNamespace(imported=lambda: SimpleNamespace(analyze=analyze))
    monkeypatch.setattr(worker, "records", lambda: {"analyze": record})
    monkeypatch.setattr("sinkscope.commands.load.load", load)
    for options in ({"adapter": "org/adapter"}, {"force": True}, {"force": False}):
        worker._measure(Task("a", "analyze", AnalyzeOptions(model="org/a", **options), tmp_path, figures), {})
    assert [call.args for call in analyze.call_args_list] == [("org/a",), ("loaded",), ("loaded",)]
    assert [call.kwargs["figures"] for call in analyze.call_args_list] == [figures] * 3
    assert [call.kwargs["check"] is None for call in load.call_args_list] == [True, False]


@pytest.mark.parametrize(("fault", "number"), [("full", 1), ("full", 12), ("kill", 6), ("kill", 18), ("kill", 30)])
def test_killed_or_on_a_full_disk_it_is_resumed(
    fault: str, number: int, models: Path, whole: SweepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep's own process is killed before one of its changes, and its worker ends with it."""
    monkeypatch.setattr(worker, "_measure", lambda task, models: replay(whole, task))
    file, out = grid(models, tmp_path), tmp_path / "there" / "out"

    def killed() -> None:
        parent = os.getpid()
        before_change(number, out.parent, lambda: os.getpid() == parent and kill(), CHANGES)
        sinkscope.sweep(file, out=out, workers=1)

    def full() -> None:
        before_change(number, out.parent, refuse, WRITES)
        with pytest.raises(SinkscopeError, match=r"\A.*(No space left on device|cells failed).*\Z"):  # one line
            raise SinkscopeError(sinkscope.sweep(file, out=out, workers=1).failure)

    with forked(killed if fault == "kill" else full) as process:
        assert process.wait() == (-signal.SIGKILL if fault == "kill" else 0)
    assert sinkscope.sweep(file, out=out, workers=1, retry=fault == "full").failure == ""
    assert_same(out, whole)


def measured_again(before: SweepRun, told: str) -> set[str]:
    """Return the models whose cells the same sweep measures again, after checking its message."""
    manifests = [before.folder / "cells" / each.cell.name / "run.json" for each in before.plan]
    for path in manifests:  # times are in seconds
        path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "before"}))
    result = succeeded("sweep", before.sweep.path, "--out", before.folder, "--workers", 1)
    assert [line for line in result.stderr.splitlines() if "measured again" in line] == ([told] if told else [])
    started = [read_manifest(path.parent)["started"] for path in manifests]
    cells = [each.cell for each, at in zip(before.plan, started, strict=True) if at != "before"]
    return {f"{cell.model} {cell.input}" for cell in cells}


@pytest.mark.slow
def test_a_model_that_changes_is_measured_again(models: Path, tmp_path: Path) -> None:
    """The last bytes of its weights change, its settings, or its text; no other cell is measured."""
    own, text = Path(shutil.copytree(models, tmp_path / "models")), tmp_path / "ids.jsonl"
    text.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 2)
    inputs = f"inputs: {{random: , mine: {{input: {text}}}}}"
    file = written(tmp_path, f"models: [{own / 'llama'}, {own / 'gpt2'}]\n{inputs}\n{SMALL}")
    done = sinkscope.sweep(file, out=tmp_path / "out", workers=1)
    assert measured_again(done, "") == set()
    weights = own / "llama" / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat().st_mtime_ns
    content[-4:] = bytes(4)
    weights.write_bytes(content)
    os.utime(weights, ns=(times, times))
    told = f"2 cells measured again: model {own / 'llama'} changed since"
    assert measured_again(done, told) == {"llama random", "llama mine"}
    settings = own / "gpt2" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"layer_norm_epsilon": 1e-3}))
    told = f"2 cells measured again: model {own / 'gpt2'} changed since"
    assert measured_again(done, told) == {"gpt2 random", "gpt2 mine"}
    text.write_text('{"input_ids": [9, 2, 3, 4, 5, 6, 7, 8]}\n' * 2)
    told = f"2 cells measured again: input {text} changed since"
    assert measured_again(done, told) == {"llama mine", "gpt2 mine"}
    weights.write_bytes(b"cut")  # cells that changed and fail are not compared
    assert "2 of 4 cells failed" in sinkscope.sweep(done.sweep.path, out=done.folder, workers=1).failure
    table = pd.read_parquet(done.folder / "comparison" / "tables" / "sweep.parquet")
    assert set(table["model"]) == {"gpt2"}
    compared = {each.cell.name for each in done.plan if each.cell.model == "gpt2"}
    assert set(read_manifest(done.folder / "comparison", ("sweep",))["cells"]) == compared
    shutil.rmtree(own / "gpt2")  # nothing can be measured again, and earlier results are kept
    assert sinkscope.sweep(done.sweep.path, out=done.folder, dry_run=True).plan[-1].state == State.DONE


def test_an_interrupted_training_is_resumed_only_on_the_same_text(models: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "ids.jsonl", tmp_path / "out"
    text.write_text('{"text": "the of and drain"}\n')
    task = Task("vga", "retrofit", RetrofitOptions(model=str(models / "llama"), text=str(text)), out)
    task = replace(task, read=Reads().of(task.options))
    with noting(read=task.read):
        out.mkdir()
        config = task.options.model_dump(mode="json", exclude={"method"})
        write_manifest(out, make_manifest("retrofit", config, 0.0, arms={}))
    assert worker.can_resume(task)
    text.write_text('{"text": "the of and drains"}\n')
    assert not worker.can_resume(replace(task, read=Reads().of(task.options)))


def test_on_the_command_line(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, f"models: [{models / 'llama'}, {tmp_path / 'gone'}]\ninputs: [random]\n{SMALL}")
    dry = succeeded("sweep", path, "--dry-run")
    assert list(tmp_path.iterdir()) == [path]
    words = ("llama-random-", "29,408", "0.6 GiB", "to do", "gone-random-", "no such file or folder")
    assert [word for word in words if word not in " ".join(dry.stdout.split())] == []
    done = command_line("sweep", path)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("sinkscope: 1 of 2 cells failed (--retry tries them again): gone-")
    assert all(word in done.stdout for word in ("done", "failed", "sink rate"))
    assert len(list(Path("runs/sweep/cells").iterdir())) == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"shard": "3/2"}, "shard=3/2: the parts are 1/2 to 2/2"),
        ({"address": "auto"}, "address=… names a Ray cluster"),
        ({"model": "a/b"}, "model=… does not apply: the file names the models"),
        ({"shard": "1/2", "overwrite": True}, "overwrite=True removes the cells of all shards"),
        ({"engine": "ray"}, r"engine=ray needs Ray: pip install 'sinkscope\[ray\]'"),
        ({"engine": "ray", "team": 2}, "engine=ray: under `accelerate launch`"),
    ],
)
def test_options_that_do_not_fit(
    typed: dict[str, Any], message: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    members = Team(0, typed.get("team", 1))
    monkeypatch.setattr("sinkscope.commands.sweep.command.team", lambda: members)
    options = {name: value for name, value in typed.items() if name != "team"}
    with pytest.raises(InputError, match=message):
        sinkscope.sweep(grid(models, tmp_path), out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
