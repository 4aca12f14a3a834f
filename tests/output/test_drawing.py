"""Figures that are shared with a second process are all drawn, and fail as they would in a single process."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sinkscope.output import drawing
from sinkscope.output.drawing import FEWEST, save_figures

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

NAMES = [f"name{number}" for number in range(FEWEST + 1)]


class Drawn:
    """A figure whose files hold the id of the process that saved them. `fails` is called while it is drawn."""

    def __init__(self, fails: Callable[[], Any] = lambda: None, full: bool = False) -> None:
        self.lay_out, self.full = fails, full

    def savefig(self, path: Path) -> None:
        if self.full:
            raise OSError(28, "No space left")
        path.write_text(str(os.getpid()))


def failing(error: BaseException) -> Callable[[], Any]:
    def fails() -> None:
        raise error

    return fails


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the processes that are started, as if there were a core for them; none is left at the end."""
    fork, started = os.fork, list[int]()

    def noting() -> int:
        child = fork()
        started.append(child)
        return child

    monkeypatch.setattr(drawing, "_has_second_core", lambda: True)
    monkeypatch.setattr(os, "fork", noting)
    yield started
    for child in started:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def save(folder: Path, draw: Callable[[str], Any], names: Sequence[str] = NAMES) -> tuple[dict[str, str], dict]:
    """Return the failures, and the process that saved each figure."""
    failed = save_figures({name: partial(draw, name) for name in names}, folder)
    assert {path.stem for path in folder.glob("*.png")} == {path.stem for path in folder.glob("*.pdf")}
    return failed, {path.stem: int(path.read_text()) for path in folder.glob("*.pdf")}


def test_two_processes_draw_all_figures(children: list[int], tmp_path: Path) -> None:
    failed, by = save(tmp_path, lambda name: Drawn())
    assert (failed, by) == ({}, {name: children[0] if at % 2 else os.getpid() for at, name in enumerate(NAMES)})
    assert set(save(tmp_path / "few", lambda name: Drawn(), NAMES[: FEWEST - 1])[1].values()) == {os.getpid()}
    assert len(children) == 1


@pytest.mark.parametrize("there", [failing(OSError("no memory")), signal.pause])
def test_figures_that_fail_or_hang_there_are_drawn_here(
    there: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "DRAWING_PATIENCE", 0.2)
    here = os.getpid()
    drawn = save(tmp_path, lambda name: Drawn() if os.getpid() == here else Drawn(there))
    assert drawn == ({}, dict.fromkeys(NAMES, here))


@pytest.mark.parametrize("at", [0, 1])  # in this process, and in the second one
def test_a_failure_is_returned_and_an_interrupt_or_a_full_disk_raised(at: int, tmp_path: Path) -> None:
    def but(wrong: Drawn) -> Callable[[str], Drawn]:
        return lambda name: wrong if name == NAMES[at] else Drawn()

    failed, by = save(tmp_path, but(Drawn(failing(KeyError("x")))))
    assert (failed, by.keys()) == ({NAMES[at]: "KeyError: 'x'"}, {*NAMES} - {NAMES[at]})
    for error, wrong in ((KeyboardInterrupt, Drawn(failing(KeyboardInterrupt()))), (OSError, Drawn(full=True))):
        with pytest.raises(error):
            save(tmp_path, but(wrong))
