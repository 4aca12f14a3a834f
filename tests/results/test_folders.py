"""Folders of runs: replacing, writing by one process at a time, kills, links, and resuming."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faults import kill
from support.forked import forked
from support.made_up_runs import run_manifest
from tiny import tiny_model

import sinkscope
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.compare.options import CompareOptions
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.options.option import checked
from sinkscope.options.output import OutputOptions
from sinkscope.results.folders import alone_in, check_output, check_resumable, claim, new_folder, own_folder, resumable
from sinkscope.results.manifest import MANIFEST, make_manifest, read_manifest, write_manifest
from sinkscope.results.swap import LOCK, NEW, OLD, beside, locked, new_file

pytestmark = pytest.mark.usefixtures("here")


def run_in(folder: Path, **changes: Any) -> Path:
    with new_folder(folder) as fresh:
        (fresh / "tables").mkdir()
        (fresh / "tables" / "summary.parquet").write_text("")
        (fresh / "verdict.md").write_text("")
        write_manifest(fresh, run_manifest(**changes))
    return folder


def refused(folder: Path, *reads: Path, overwrite: bool = True) -> str:
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError) as caught, own_folder(folder, overwrite, reads=reads):
        pytest.fail("it would be replaced")
    assert sorted(folder.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_files_of_one_name_are_not_exchanged(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    (run / "verdict.md").unlink()
    write_manifest(run, run_manifest())

    def write_both() -> None:
        with own_folder(run, overwrite=True) as folder, new_folder(folder) as fresh:
            (run / "verdict.md").write_text("mine")
            (fresh / "verdict.md").write_text("new")
            write_manifest(fresh, run_manifest())

    with pytest.raises(SinkscopeError, match=r"verdict.md was written by another process in the meantime"):
        write_both()
    assert (run / "verdict.md").read_text() == "mine"
    assert not beside(run, NEW).exists()


def test_only_what_a_run_wrote_is_replaced(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    assert read_manifest(run)["files"] == ["tables/summary.parquet", "verdict.md"]
    assert "already holds a run: --overwrite" in refused(run, overwrite=False)
    read = run / "verdict.md"
    assert f"it holds {read}, which is read" in refused(run, read)
    check_output(run, True, reads=(None, "org/name", "natural", tmp_path / "other.npy", "\0", "~nosuchuser/x"))
    check_output(run_in(Path("natural")), True, reads=("natural",))
    for name in ("notes.txt", "tables/mine.parquet", ".git/config"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("days of work")
        assert f"run is not replaced: it holds {name}, which no run wrote" in refused(run)
        (run / name).unlink()
    for content in ("{}", '{"command": "npm start"}', '{"command": "analyze", "config": {}, "tables": []}', "no JSON"):
        (run / "run.json").write_text(content)
        assert "is not replaced: " in refused(run)


def test_runs_in_a_run_are_looked_into(tmp_path: Path) -> None:
    with new_folder(tmp_path / "series") as fresh:
        run_in(fresh / "step1")
        write_manifest(fresh, run_manifest())
    series = tmp_path / "series"
    assert read_manifest(series)["files"] == ["step1/run.json"]
    check_output(series, overwrite=True)
    (series / "step1" / "notes.txt").write_text("")
    assert "it holds step1/notes.txt, which no run wrote" in refused(series)
    (series / "step1" / "notes.txt").unlink()
    run_in(series / "mine")
    assert "it holds mine/run.json, which no run wrote" in refused(series)
    shutil.rmtree(series / "mine")
    (series / "step1" / "run.json").write_text("{")
    assert "step1/run.json is not readable JSON" in refused(series)


def holding(folder: Path, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which runs while another process writes the folder."""
    ready, go = os.pipe(), os.pipe()

    def hold() -> None:
        with own_folder(folder, overwrite=True):
            os.write(ready[1], b".")
            os.read(go[0], 1)
            with new_folder(folder) as fresh:
                write_manifest(fresh, run_manifest())

    with forked(hold) as process:
        os.read(ready[0], 1)
        result = work()
        os.write(go[1], b".")
        assert process.wait() == 0
    return result


def test_the_second_process_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    message = holding(folder, lambda: refused(folder, overwrite=False))
    assert message == f"--out {folder} is being written by another process: wait for it, or name another folder"
    assert list(folder.parent.iterdir()) == [folder]
    assert "already holds a run" in refused(folder, overwrite=False)
    (tmp_path / "link").symlink_to(folder)
    assert "is being written" in holding(folder, lambda: refused(tmp_path / "link"))
    with own_folder(tmp_path / "twice", overwrite=False):
        assert "is being written" in refused(tmp_path / "twice")
    assert not list(tmp_path.glob("*twice*"))


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    def killed() -> None:
        with alone_in(tmp_path / "deep" / "run"):
            kill()

    with forked(killed) as process:
        assert process.wait() == -signal.SIGKILL
    with alone_in(tmp_path / "deep" / "run"):
        pass
    assert not list((tmp_path / "deep").glob(".*"))


def test_many_at_once_never_have_it_together(tmp_path: Path) -> None:
    """The lock file is removed and made again for each process; a lock on a removed file does not count."""
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def often() -> None:
        taken = 0
        while taken < 50:
            try:
                with locked(tmp_path / "run"):
                    os.write(log, b"(")
                    os.write(log, b")")
                taken += 1
            except BlockingIOError:
                pass

    with forked(often) as one, forked(often) as two, forked(often) as three:
        assert [process.wait() for process in (one, two, three)] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "()" * 150


def test_what_a_kill_left_is_repaired(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run")
    beside(folder, NEW).mkdir()
    os.replace(folder, beside(folder, OLD))  # between two renames
    with alone_in(folder):
        assert read_manifest(folder)["command"] == "analyze"
    shutil.copytree(folder, beside(folder, OLD))  # after both
    with alone_in(folder):
        pass
    os.replace(folder, beside(folder, OLD))
    assert read_manifest(folder)["command"] == "analyze"  # a reader also repairs it
    assert not list(tmp_path.glob(".sinkscope-*"))


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A folder to which links lead, and which must stay as it is."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "notes.txt").write_text("days of work")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (folder / "notes.txt").read_text() == "days of work"


def test_a_file_is_never_written_through_a_link(tmp_path: Path, foreign: Path) -> None:
    path = tmp_path / "run.json"
    for link in (path, beside(path, NEW)):
        path.unlink(missing_ok=True)
        link.symlink_to(foreign / "notes.txt")
        with new_file(path) as fresh:
            fresh.write_text("{}")
        assert path.read_text() == "{}"
        assert not path.is_symlink()
    beside(path, NEW).write_text("another's")  # another process may still have the file open, or it may be a hard link
    os.link(beside(path, NEW), tmp_path / "hard")
    with new_file(path) as fresh:
        fresh.write_text("{}")
    assert (tmp_path / "hard").read_text() == "another's"


def test_a_folder_is_never_written_through_a_link(tmp_path: Path, foreign: Path) -> None:
    for what in (NEW, OLD):
        beside(tmp_path / what, what).symlink_to(foreign)
        run_in(tmp_path / what)
        assert not (tmp_path / what).is_symlink()
    for target in (foreign / "notes.txt", foreign / "none"):
        beside(tmp_path / "run", LOCK).symlink_to(target)
        with pytest.raises(InputError, match="cannot be written"), alone_in(tmp_path / "run"):
            pass
        beside(tmp_path / "run", LOCK).unlink()


def test_a_folder_with_links_is_not_resumed(tmp_path: Path, foreign: Path) -> None:
    for name, target in (("figures", foreign), ("vga/checkpoints/checkpoint-0", foreign / "none")):
        folder = tmp_path / name[:3]
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(target)
        write_manifest(folder, make_manifest("claims", {}, 0.0))
        with pytest.raises(InputError, match=f"{name} is a link"):
            check_resumable(folder, "claims", {"config": {}}, overwrite=False)
        with pytest.raises(InputError, match=f"{name} is a link|{name}, which no run wrote"):
            check_output(folder, overwrite=True, commands=("claims",))


OPTIONS: dict[str, Any] = {"config": {"steps": 3, "names": ("a", "b")}, "text": "natural"}


def begun(folder: Path, command: str = "retrofit") -> None:
    claim(folder, make_manifest(command, start=time.time(), arms={}, tables=[], **OPTIONS))


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = make_manifest("compare", {"runs": []}, time.time() - 2, ("b", "a"), extra=1)
    assert manifest["tables"] == ["a", "b"]
    assert manifest["wall_seconds"] >= 2
    assert manifest["peak_memory_mb"] > 0
    assert {"sinkscope", "versions", "python", "git_commit", "started", "extra"} < manifest.keys()
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path, ("compare",)) == manifest | {"files": []}
    run_in(tmp_path / "one")
    with pytest.raises(InputError, match=r"of `sinkscope compare`, not of `analyze`.*but holds runs: name one"):
        read_manifest(tmp_path, ("analyze",))


def test_only_the_same_options_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert resumable(out, "retrofit", OPTIONS) is None
    (out / "vga" / ".sinkscope-run-new" / "tables").mkdir(parents=True)  # left by a kill
    begun(out)
    assert not list((out / "vga").iterdir())
    manifest = resumable(out, "retrofit", OPTIONS)
    assert manifest is not None
    assert manifest["config"] == {"steps": 3, "names": ["a", "b"]}
    for changes, named in (
        ({"config": {"steps": 4, "names": ("a", "b")}}, "steps was 3, now 4"),
        ({"config": {"steps": 3}}, r"names was \['a', 'b'\], now None"),
        ({"text": "other.txt"}, "text was natural, now other.txt"),
        ({"seeds": 2}, "seeds was None, now 2"),
    ):
        with pytest.raises(InputError, match=f"made with other options .{named}.: repeat them"):
            check_resumable(out, "retrofit", OPTIONS | changes, overwrite=False)
        check_resumable(out, "retrofit", OPTIONS | changes, overwrite=True)


def test_a_number_that_may_grow_resumes_if_it_is_larger(tmp_path: Path) -> None:
    def with_steps(steps: Any) -> dict[str, Any]:
        return {"config": {"steps": steps, "names": ("a", "b")}}

    begun(tmp_path)
    assert resumable(tmp_path, "retrofit", OPTIONS | with_steps(4), may_grow=("steps",)) is not None
    for steps in (2, None, "4"):
        with pytest.raises(InputError, match=f"steps was 3, now {steps}"):
            resumable(tmp_path, "retrofit", OPTIONS | with_steps(steps), may_grow=("steps",))
    for damaged in (1, None, "3"):
        claim(tmp_path, json.loads((tmp_path / "run.json").read_text()) | with_steps(damaged))
        with pytest.raises(InputError, match=f"steps was {damaged}, now 4"):
            resumable(tmp_path, "retrofit", OPTIONS | with_steps(4), may_grow=("steps",))


def test_another_commands_folder_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    begun(out, "train")
    with pytest.raises(InputError, match="of `sinkscope train`, not of `retrofit`"):
        check_resumable(out, "retrofit", OPTIONS, overwrite=False)
    with pytest.raises(InputError, match="holds what `train` wrote, and is not replaced"):
        check_output(out, overwrite=True)
    for content in ("{", "[]", json.dumps({"command": "retrofit"})):
        (out / MANIFEST).write_text(content)
        for overwrite in (False, True):
            with pytest.raises(InputError, match="is not the manifest of a run"):
                check_resumable(out, "retrofit", OPTIONS, overwrite)


def written(folder: Path, name: str, error: BaseException | None = None) -> None:
    with alone_in(folder), new_folder(folder) as fresh:
        (fresh / name).touch()
        if error is not None:
            raise error


def test_a_new_folder_is_complete_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "run"
    with pytest.raises(SinkscopeError, match=r"nothing of it is left: .* No space left"):
        written(target, "half", OSError(28, "No space left on device"))
    assert not list(tmp_path.glob("deep"))
    written(target, "one")
    with pytest.raises(KeyboardInterrupt):
        written(target, "two", KeyboardInterrupt())
    assert [path.name for path in target.iterdir()] == ["one"]
    assert [path.name for path in target.parent.iterdir()] == ["run"]


@pytest.mark.slow
def test_home_is_replaced_in_every_path_and_a_run_stays_itself_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is that of the moment when it is given, and no folder is called ~."""
    home, elsewhere = tmp_path / "home", tmp_path / "other"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(home)
    with own_folder("~/runs/a", overwrite=False) as folder:
        assert folder == home / "runs" / "a"
    for kind, name in ((OutputOptions, "out"), (OutputOptions, "from_"), (AnalyzeOptions, "images")):
        assert getattr(checked(kind, {name: "~/runs/b"}), name) == home / "runs" / "b"
    assert checked(CompareOptions, {"runs": ["~/runs/b", Path("~/c")]}).runs == (home / "runs" / "b", home / "c")
    (home / "ids.jsonl").write_text('{"input_ids": [5, 6, 7]}')
    (home / "stories").mkdir()
    shutil.copy(home / "ids.jsonl", home / "stories" / "train.jsonl")
    for options in ({"input": "~/ids.jsonl"}, {"input": Path("~/ids.jsonl")}, {"dataset": "~/stories"}):
        run = sinkscope.analyze(tiny_model("llama"), observables="attention", num_seqs=1, **options)
        assert run.manifest["input"]["tokens"] == 3
    run.save("~/runs/m")
    assert sinkscope.Run.open("~/runs/m/run.json").folder == home / "runs" / "m"
    mine = sinkscope.Run.open("runs/m")
    monkeypatch.chdir(elsewhere)
    more = sinkscope.analyze(tiny_model("llama"), observables="attention", input=[[8, 9, 10, 11]], out="runs/m")
    assert more.folder == elsewhere / "runs" / "m"
    assert mine.tables["attention"]["position"].max() == 2
    assert not list(tmp_path.rglob("~"))
