"""Figures are drawn and saved, every other one in a second process where there is a core for it."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import NoReturn

from sinkscope import figures
from sinkscope.figures.style import Figure
from sinkscope.results.run import RunData

FEWEST = 4  # pieces of work for which a process is started
PATIENCE = 20.0  # seconds more, beside four times what half of the work took here, until the process is given up


def save_all(run: RunData, folder: Path) -> None:
    """Save every applicable figure of a run, one drawn at a time, or two by two processes."""
    folder.mkdir(parents=True, exist_ok=True)
    shared_out(lambda name: save_figures({name: figures.draw(name, run)}, folder), figures.applicable(run))


def save_figures(drawn: Mapping[str, Figure], folder: Path) -> None:
    """Save each figure as NAME.png and NAME.pdf."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figure.lay_out()
        for kind in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{kind}")


def shared_out(work: Callable[[str], object], names: Sequence[str]) -> None:
    """work(name) for every name, every other one in a second process, which has a copy of all that there is here.

    Work there leaves nothing behind but files, and computes nothing with torch, whose threads it lacks. Where it fails,
    or takes too long (a library's lock that another thread held at the fork is held there for ever), all of it is done
    again here, so that its errors are raised here.
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
    """Only on Linux: elsewhere there is no fork, or libraries do not stand it. A daemon may start no process."""
    return sys.platform == "linux" and (os.cpu_count() or 1) > 1 and not current_process().daemon


def _work_and_exit(work: Callable[[str], object], names: Sequence[str], parent: int) -> NoReturn:
    """Without a word, and no longer than the process lives that waits for it."""
    try:
        for name in names:
            if os.getppid() != parent:
                break
            work(name)
        os._exit(0)
    except BaseException:
        os._exit(1)
