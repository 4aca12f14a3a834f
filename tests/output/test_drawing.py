"""Figures that are shared with a second process are all drawn, and fail as they would in a single process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sinkscope.output import drawing
from sinkscope.output.drawing import FEWEST, save_figures

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

NAMES = [f"name{number}" for number in range(FEWEST + 1)]


class Drawn:
    """A figure whose files hold the id of the process that saved them."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def lay_out(self) -> None:
        if self.error is not None:
            raise self.error

    def savefig(self, path: Path) -> None:
        path.write_text(str(os.getpid()))


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


def save(folder: Path, names: list[str] = NAMES, draw: Any = Drawn) -> tuple[dict[str, str], dict[str, int]]:
    """Return the failures, and the process that saved each figure."""
    failed = save_figures(dict.fromkeys(names, draw), folder)
    return failed, {
        path.stem: int(path.read_text()) for path in folder.glob("*.pdf") if path.with_suffix(".png").exists()
    }


def test_two_processes_draw_all_figures(children: list[int], tmp_path: Path) -> None:
    failed, by = save(tmp_path)
    (child,) = children
    assert (failed, by) == ({}, {name: child if at % 2 else os.getpid() for at, name in enumerate(NAMES)})
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)
    assert set(save(tmp_path / "few", NAMES[: FEWEST - 1])[1].values()) == {os.getpid()}
    assert len(children) == 1


@pytest.mark.parametrize("fails", [True, False])
def test_figures_that_fail_or_hang_there_are_drawn_here(
    fails: bool, children: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "PATIENCE", 0.2)
    here = os.getpid()

    def draw() -> Drawn:
        if os.getpid() != here and not fails:
            signal.pause()
        return Drawn(OSError("no memory") if os.getpid() != here else None)

    assert save(tmp_path, draw=draw) == ({}, dict.fromkeys(NAMES, here))
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)


def test_a_failure_in_either_process_is_returned(tmp_path: Path) -> None:
    drawings: Any = {name: lambda at=at: Drawn(KeyError(at) if at in (0, 1) else None) for at, name in enumerate(NAMES)}
    assert save_figures(drawings, tmp_path) == {"name0": "KeyError: 0", "name1": "KeyError: 1"}
    assert sorted({path.stem for path in tmp_path.iterdir()}) == NAMES[2:]


@pytest.mark.parametrize("at", [0, 1])  # in this process, and in the second one
def test_an_interrupt_and_a_full_disk_are_raised_here(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, method in ((KeyboardInterrupt(), "lay_out"), (OSError(28, "No space left"), "savefig")):

        def fails(figure: Drawn, path: Path | None = None, error: BaseException = error) -> None:
            if figure.error is not None:
                raise figure.error

        monkeypatch.setattr(Drawn, "lay_out", lambda figure: None)
        monkeypatch.setattr(Drawn, method, fails)
        drawings: Any = {
            name: lambda n=n, error=error: Drawn(error if n == at else None) for n, name in enumerate(NAMES)
        }
        with pytest.raises(type(error)):
            save_figures(drawings, tmp_path)
