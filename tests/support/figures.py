"""Runs without figures: drawing and saving them all takes seconds, and tests/figures does it."""

from pathlib import Path
from typing import Any

import pytest

import sinkscope.figures
from sinkscope.figures.style import SETTINGS, Figure


def skip_figures(patch: pytest.MonkeyPatch, *, of_runs_only: bool = False) -> None:
    """No run has an applicable figure any more, wherever figures are saved from; files of other figures are empty.

    Args:
        patch: undoes it.
        of_runs_only: save those of several runs, steps or arms as ever.
    """
    patch.setattr(sinkscope.figures, "applicable", lambda run: [])
    if not of_runs_only:
        patch.setattr(Figure, "lay_out", lambda figure: None)
        patch.setattr(Figure, "savefig", _save_nothing)


def rough_figures(patch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and saved in half of the time: without a layout, and in few pixels."""
    patch.setattr(Figure, "lay_out", lambda figure: figure.set_layout_engine("none"))
    patch.setitem(SETTINGS, "savefig.dpi", 50)


def _save_nothing(figure: Figure, fname: Any, **kwargs: Any) -> None:
    Path(fname).touch()
