"""Rules for every figure: labels at the axes, ticks that do not overlap, visible seeds, decades on log axes."""

import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.transforms import Bbox
from support.drawn_figures import TEXTS, names
from support.drawn_figures import drawn as draw_example

from sinkscope.figures import KINDS
from sinkscope.figures.style import Figure

drawn = cache(draw_example)  # each figure is drawn once for all rules
TOUCHING = 1.0  # pixels that two labels may share


@pytest.mark.parametrize("name", names())
def test_axes_have_labels_and_tick_labels_do_not_overlap(name: str) -> None:
    figure = drawn(name)
    figure.lay_out()
    figure.draw_without_rendering()
    panels = [ax for ax in figure.axes if ax.get_visible() and ax.axison and ax.get_label() != "<colorbar>"]
    assert panels
    for ax in panels:
        for which in "xy":
            assert _is_labelled(figure, ax, which), f"{which} axis of '{ax.get_title() or ax.get_xlabel()}'"
            _check_apart(getattr(ax, f"{which}axis"), name)
            _check_decades(getattr(ax, f"{which}axis"), name)
    for bar in (ax for ax in figure.axes if ax.get_label() == "<colorbar>"):
        assert bar.get_ylabel() or bar.get_xlabel()


def _is_labelled(figure: Figure, ax: Axes, which: str) -> bool:
    """Return whether an axis is labeled by itself, a panel with the same scale, the figure, or names of ticks."""
    shared = ax.get_shared_x_axes() if which == "x" else ax.get_shared_y_axes()
    alike = [ax, *shared.get_siblings(ax)]
    of_figure = figure.get_supxlabel() if which == "x" else figure.get_supylabel()
    axis: Axis = getattr(ax, f"{which}axis")
    ticks = [text.get_text() for neighbor in alike for text in getattr(neighbor, f"{which}axis").get_ticklabels()]
    words = [text.strip("0123456789.,%−- $^{}kM").replace("\\mathdefault", "") for text in ticks]
    labels = (getattr(neighbor, f"get_{which}label")() for neighbor in alike if neighbor.get_visible())
    return bool(of_figure or any(labels) or any(words) or not len(axis.get_ticklocs()))


def _check_apart(axis: Axis, name: str) -> None:
    boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]
    inside = [box for box in boxes if box.width and box.height]
    for first, second in pairwise(sorted(inside, key=lambda box: (box.x0, box.y0))):
        shared = Bbox.intersection(first, second)
        assert shared is None or min(shared.width, shared.height) <= TOUCHING, name


def _check_decades(axis: Axis, name: str) -> None:
    if axis.get_scale() != "log" or getattr(axis.get_transform(), "base", 10) != 10:
        return
    low, high = sorted(axis.get_view_interval())
    ticks = [float(tick) for tick in axis.get_majorticklocs() if low * 0.999 <= tick <= high * 1.001]
    powers = [tick for tick in ticks if abs(np.log10(tick) - round(np.log10(tick))) < 1e-6]
    assert len(powers) >= 2, (name, low, high, ticks)


def test_every_row_of_the_register_has_its_function_and_is_drawn_here() -> None:
    specs = [spec for register in KINDS.values() for spec in register.values()]
    assert set(names()) == {spec.name for spec in specs} - TEXTS
    assert len({spec.name for spec in specs}) == len(specs)
    assert all(spec.about and "\n" not in spec.about and spec.tables for spec in specs)
    assert all(callable(spec._draw) for spec in specs)


@pytest.mark.slow
def test_a_run_of_analyze_imports_no_claim_and_no_figure_that_it_does_not_draw(tmp_path: Path) -> None:
    """The verdict and the page show numbers and statements of claims, without importing claims."""
    code = f"""
import sys, transformers, sinkscope, sinkscope.commands.analyze.command
figures = {{name.rpartition(".")[2] for name in sys.modules if ".figures." in name}}
assert figures <= {{"spec", "style", "labels"}}, figures
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
given = dict(input="random", num_seqs=2, seq_len=32, figures=["sink-map"])
run = sinkscope.analyze(model, out={str(tmp_path / "run")!r}, **given)
assert "There is a sink at the first token." in (run.folder / "index.html").read_text(encoding="utf-8")
light = ("claims", "options", "columns")  # its record, and what this names
print(*(name for name in sys.modules if "commands.claims" in name and not name.endswith(light)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
