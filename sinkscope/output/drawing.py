"""Drawing and saving of figures, every other one in a second process if there is a second core."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any, NoReturn

from sinkscope.errors import described, was_interrupted
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.style import Figure

Drawings = Mapping[str, Callable[[], Figure]]  # name → draws the figure

FEWEST = 4  # pieces of work from which on a second process is started
PATIENCE = 20.0  # seconds that it may take in addition to four times the duration of this process's half


class _FailedFigure(Exception):
    """A figure could not be drawn; the message says why."""


def drawings_of(specs: Mapping[str, FigureSpec[Any]], data: Any) -> Drawings:
    """Return the figures of a register that the data allow."""
    return {name: partial(spec, data) for name, spec in specs.items() if spec.applies(data)}


def save_figures(drawings: Drawings, folder: Path) -> dict[str, str]:
    """Draw figures, save them as NAME.png and NAME.pdf, and return why some failed; OSError if writing fails."""
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    here = os.getpid()

    def save(name: str) -> None:
        try:
            _save(name, drawings[name], folder)
        except _FailedFigure as error:
            if os.getpid() != here:  # this process draws the figure again and records the reason
                raise
            failed[name] = str(error)

    shared_out(save, list(drawings))
    return dict(sorted(failed.items()))


def _save(name: str, draw: Callable[[], Figure], folder: Path) -> None:
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    drawn = False
    try:
        figure = draw()
        figure.lay_out()
        drawn = True
        for path in paths:
            figure.savefig(path)
    except Exception as error:  # a mistake in one figure must not prevent the others
        if drawn and isinstance(error, OSError):
            raise
        for path in paths:
            path.unlink(missing_ok=True)
        raise (KeyboardInterrupt() if was_interrupted(error) else _FailedFigure(described(error))) from error


def shared_out(work: Callable[[str], object], names: Sequence[str]) -> None:
    """Call work(name) for every name, for every other one in a second process, a fork of this one.

    The work there may only write files, and compute nothing with torch, whose threads a fork lacks. Where it fails or
    takes too long (a library's lock that another thread held at the fork is never released there), this process does
    it again, and raises its errors.
    """
    if len(names) < FEWEST or not _has_second_core():
        for name in names:
            work(name)
        return
    mine, others = names[::2], names[1::2]
    second = get_context("fork").Process(target=_work_and_exit, args=(work, others, os.getpid()), daemon=True)
    second.start()
    try:
        began = time.monotonic()
        for name in mine:
            work(name)
        second.join(PATIENCE + 4 * (time.monotonic() - began))
    finally:
        second.kill()
        second.join()
    if second.exitcode:
        for name in others:
            work(name)


def _has_second_core() -> bool:
    """Return whether a second process may draw: only Linux has a safe fork, and a daemon may not fork."""
    return sys.platform == "linux" and (os.cpu_count() or 1) > 1 and not current_process().daemon


def _work_and_exit(work: Callable[[str], object], names: Sequence[str], parent: int) -> NoReturn:
    """Do the work silently, and exit if the parent process has ended."""
    try:
        for name in names:
            if os.getppid() != parent:
                break
            work(name)
        os._exit(0)
    except BaseException:
        os._exit(1)
