"""An entry of the register of figures: name, description, the tables that the figure needs, and its function."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from sinkscope.errors import InputError, unknown
from sinkscope.figures.style import Figure, in_style

# The data of a figure: a run, several runs, runs by training step, or the arms of a training.
Data_contra = TypeVar("Data_contra", contravariant=True)
Draw = TypeVar("Draw", bound=Callable[..., Figure])


def needs(has: Callable[[Any], object], reason: str) -> Callable[[Draw], Draw]:
    """Declare what the data of a figure must have, and the reason that a user reads if they lack it."""

    def declare(draw: Draw) -> Draw:
        vars(draw)["needs"] = ((has, reason), *vars(draw).get("needs", ()))
        return draw

    return declare


@dataclass(frozen=True)
class FigureSpec(Generic[Data_contra]):
    """A figure in the register."""

    name: str  # in `sinkscope list figures`, and of the image files
    module: str  # the module with the function `draw_NAME`, which is imported when it is used
    about: str  # description in one line
    tables: tuple[str, ...]  # tables that the figure needs, with at least one row each
    command: str = "analyze"  # the command whose runs have them

    def lacking(self, data: Data_contra) -> str | None:
        """Return the reason why the figure cannot be drawn although the data have its tables, or None."""
        return next((reason for has, reason in vars(self._draw).get("needs", ()) if not has(data)), None)

    def applies(self, data: Data_contra) -> bool:
        """Return whether there is anything to draw. If the check itself fails, drawing raises the same error."""
        try:
            return self.lacking(data) is None
        except Exception:
            return True

    def __call__(self, data: Data_contra, **options: Any) -> Figure:
        """Draw the figure in sinkscope's style; its function declares its options, after the data.

        Raises InputError if the data have nothing to draw, or it has no such option.
        """
        accepted = ["figsize", *[*inspect.signature(self._draw).parameters][1:]]
        for name in options:
            if name not in accepted:
                raise InputError(f"figure '{self.name}': option {unknown(name, accepted)}")
        reason = self.lacking(data)
        if reason is not None:
            raise InputError(f"figure '{self.name}' has nothing to draw: {reason}")
        with in_style():
            return self._draw(data, **options)

    @property
    def _draw(self) -> Any:
        return getattr(import_module(self.module), f"draw_{self.name.replace('-', '_')}")
