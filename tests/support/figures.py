"""Helpers for tests of figures, and for tests that skip figures because drawing all of them takes seconds."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

import sinkscope.figures
from sinkscope.figures.style import SETTINGS, Figure
from sinkscope.results.run import RunData


def skip_figures(patch: pytest.MonkeyPatch, *, of_runs_only: bool = False) -> None:
    """Skip all figures of runs wherever figures are saved; other figures' files are empty, unless `of_runs_only`."""
    patch.setattr(sinkscope.figures, "applicable", lambda run: [])
    if not of_runs_only:
        patch.setattr(Figure, "lay_out", lambda figure: None)
        patch.setattr(Figure, "savefig", _save_nothing)


def quick_sweeps(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers of sweeps, which then import nothing, and draw no figures, which tests/figures checks."""
    patch.setattr("sinkscope.commands.sweep.pools.METHOD", "fork")
    patch.setattr("sinkscope.commands.sweep.output.drawings_of", lambda specs, data: {})
    patch.setattr("sinkscope.commands.claims.scorecard.drawings_of", lambda specs, data: {})
    skip_figures(patch)


def rough_figures(patch: pytest.MonkeyPatch) -> None:
    """Draw and save figures in half of the time: without a layout, and with few pixels."""
    patch.setattr(Figure, "lay_out", lambda figure: figure.set_layout_engine("none"))
    patch.setitem(SETTINGS, "savefig.dpi", 50)


def check_all_draw(run: RunData, names: Iterable[str], layout: bool = True) -> None:
    """Draw the figures without any warning: of missing glyphs, odd scales or, with the layout, too little room."""
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            render(sinkscope.figures.draw(name, run), layout)


def render(figure: Figure, layout: bool) -> None:
    if not layout:
        figure.set_layout_engine("none")
    figure.draw_without_rendering()


def said(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def edges_at(ax: Axes, x: float, band: int = 0) -> tuple[float, float]:
    vertices = ax.collections[band].get_paths()[0].vertices
    edges = np.asarray(vertices)[vertices[:, 0] == x, 1]
    return edges.min(), edges.max()


def _save_nothing(figure: Figure, fname: Any, **kwargs: Any) -> None:
    Path(fname).touch()
