"""Drawing and saving of figures, every other one in a second process if there is a second core."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any

from sinkscope.errors import described, was_interrupted
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.style import Figure

Drawings = Mapping[str, Callable[[], Figure]]  # name → draws the figure

FEWEST = 4  # figures from which on a second process is started
DRAWING_PATIENCE = 20.0  # seconds that it may take in addition to four times the duration of this process's half


def drawings_of(specs: Mapping[str, FigureSpec[Any]], data: Any) -> Drawings:
    """Return the figures of a register that the data allow."""
    return {name: partial(spec, data) for name, spec in specs.items() if spec.applies(data)}


def save_figures(drawings: Drawings, folder: Path) -> dict[str, str]:
    """Draw figures, save them as NAME.png and NAME.pdf, and return why some failed; OSError if writing fails.

    A fork of this process draws every other figure, which saves 3 of the 7 seconds of a run. If the fork fails or takes
    too long (a lock that another thread held at the fork is never released in it), this process draws the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names, failed = list(drawings), dict[str, str]()

    def save(names: Sequence[str]) -> None:
        for name in names:
            failed.update(_save(name, drawings[name], folder))

    if len(names) < FEWEST or not _has_second_core():
        save(names)
    else:
        there = (drawings, names[1::2], folder, os.getpid())
        second = get_context("fork").Process(target=_save_there, args=there, daemon=True)
        second.start()
        try:
            began = time.monotonic()
            save(names[::2])
            second.join(DRAWING_PATIENCE + 4 * (time.monotonic() - began))
        finally:
            second.kill()
            second.join()
        if second.exitcode:
            save(names[1::2])
    return dict(sorted(failed.items()))


def _save(name: str, draw: Callable[[], Figure], folder: Path) -> dict[str, str]:
    """Draw and save one figure. Return its name and the reason if it failed, else nothing."""
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
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        return {name: described(error)}
    return {}


def _has_second_core() -> bool:
    """Return whether a second process may draw: only Linux has a safe fork, and a daemon may not fork."""
    return sys.platform == "linux" and (os.cpu_count() or 1) > 1 and not current_process().daemon


def _save_there(drawings: Drawings, names: Sequence[str], folder: Path, parent: int) -> None:
    """Save figures silently, until one fails or the parent process has ended."""
    status = 1
    try:
        status = int(any(os.getppid() != parent or _save(name, drawings[name], folder) for name in names))
    finally:
        os._exit(status)
