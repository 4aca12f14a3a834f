"""Work that is shared with a second process is completed, and fails as it would in a single process."""

import os
import signal
from pathlib import Path

import pytest

from sinkscope.output import drawing
from sinkscope.output.drawing import FEWEST, shared_out

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

NAMES = [f"name{number}" for number in range(FEWEST + 1)]


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the processes that are started, as if there were a core for them."""
    fork, started = os.fork, list[int]()

    def noting() -> int:
        child = fork()
        started.append(child)
        return child

    monkeypatch.setattr(drawing, "_has_second_core", lambda: True)
    monkeypatch.setattr(os, "fork", noting)
    return started


def is_gone(child: int) -> bool:
    try:
        os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def pids(folder: Path) -> dict[str, int]:
    return {path.name: int(path.read_text()) for path in sorted(folder.iterdir())}


def test_two_processes_do_all_of_it(children: list[int], tmp_path: Path) -> None:
    shared_out(lambda name: (tmp_path / name).write_text(str(os.getpid())), NAMES)
    (child,) = children
    assert pids(tmp_path) == {name: child if at % 2 else os.getpid() for at, name in enumerate(NAMES)}
    assert is_gone(child)


def test_little_work_is_done_here(children: list[int], tmp_path: Path) -> None:
    shared_out(lambda name: (tmp_path / name).write_text(str(os.getpid())), NAMES[: FEWEST - 1])
    assert set(pids(tmp_path).values()) == {os.getpid()}
    assert not children


@pytest.mark.parametrize("fails", [True, False])
def test_work_that_fails_or_hangs_there_is_done_here(
    fails: bool, children: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "PATIENCE", 0.2)
    here = os.getpid()

    def work(name: str) -> None:
        if os.getpid() != here and fails:
            raise OSError("no memory")
        if os.getpid() != here:
            signal.pause()
        (tmp_path / name).touch()

    shared_out(work, NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert is_gone(children[0])


@pytest.mark.parametrize("at", [0, 1])  # in this process, and in the second one
def test_an_error_is_raised_here(at: int, children: list[int]) -> None:
    def work(name: str) -> None:
        if name == NAMES[at]:
            raise KeyError(name)

    with pytest.raises(KeyError, match=NAMES[at]):
        shared_out(work, NAMES)
    assert is_gone(children[0])
