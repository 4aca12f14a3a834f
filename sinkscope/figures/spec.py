"""What every figure declares: its name, what it shows, the tables that it needs, and how it is drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from sinkscope.errors import InputError, Known
from sinkscope.figures.style import Figure, in_style

# What a figure is drawn from: a run, several runs, runs by training step, or the arms of a training.
Data_contra = TypeVar("Data_contra", contravariant=True)


@dataclass(frozen=True)
class FigureSpec(Generic[Data_contra]):
    """One figure.

    Attributes:
        name: As in `sinkscope list figures`, and of its files.
        about: What it shows, in one line.
        tables: The tables that it needs, with at least one row each.
        lacking: What the data lack beyond that, or None if the figure can be drawn.
        draw: Draws it.
    """

    name: str
    about: str
    tables: tuple[str, ...]
    lacking: Callable[[Data_contra], str | None]
    draw: Callable[[Data_contra], Figure]

    def __call__(self, data: Data_contra) -> Figure:
        """Draw it in sinkscope's style.

        Raises:
            InputError: the data have nothing to draw.
        """
        reason = self.lacking(data)
        if reason is not None:
            raise InputError(f"figure '{self.name}' has nothing to draw: {reason}")
        with in_style():
            return self.draw(data)


Draws = Callable[[Data_contra], Figure]


def declare(
    name: str, about: str, *tables: str, lacking: Callable[..., str | None] = lambda _: None
) -> Callable[[Draws[Data_contra]], FigureSpec[Data_contra]]:
    """Make a figure of the function that draws it; the arguments are those of FigureSpec."""
    return lambda draw: FigureSpec(name, about, tables, lacking, draw)


def draw_all(specs: Mapping[str, FigureSpec[Data_contra]], data: Data_contra) -> dict[str, Figure]:
    """The figures that the data allow, by name."""
    return Known("figure", {name: spec(data) for name, spec in specs.items() if spec.lacking(data) is None})
