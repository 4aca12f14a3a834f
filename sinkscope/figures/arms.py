"""The arms of a training, and how they look: each the same in every figure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sinkscope.figures.labels import escape, heading, model_name, shorten
from sinkscope.figures.style import Look, line_looks
from sinkscope.results.run import RunData
from sinkscope.training.tables import UNTOUCHED

NAME_LENGTH = 40  # characters of an arm's name
WIDEST, THINNEST = 2.0, 0.9  # lines: later ones are thinner and lie on top, so that lines that coincide are all seen
FAINT: Look = {"marker": "", "linewidth": 0.6, "alpha": 0.8}  # later positions


@dataclass(frozen=True)
class Arms:
    """The arms of one training, of one seed.

    Attributes:
        tables: The training's tables, each of all arms (column `condition`) and seeds.
        runs: Arm → its run on held-out text.
    """

    tables: Mapping[str, pd.DataFrame]
    runs: Mapping[str, RunData]

    def rows(self, table: str) -> int:
        """0 for a table that does not exist."""
        return len(self.tables.get(table, ()))

    @property
    def seeds(self) -> int:
        """How many the tables hold."""
        seeds = [seed for table in self.tables.values() if "seed" in table for seed in table["seed"].unique()]
        return len(set(seeds))

    def seeds_text(self, of_runs: bool = False) -> str:
        """«3 seeds»; of a figure of runs, which are of the first one, «seed 0 of 3»."""
        if self.seeds < 2:
            return "1 seed"
        return f"first of {self.seeds} seeds" if of_runs else f"{self.seeds} seeds"

    def all_have(self, *tables: str) -> bool:
        """Whether every arm's run has these tables."""
        return all(set(tables) <= set(run.tables) for run in self.runs.values())

    def title(self, *more: str) -> str:
        """The model that all arms were made from, and more."""
        return heading(model_name(next(iter(self.runs.values())).model), *more)


def arm_looks(arms: Iterable[str]) -> dict[str, Look]:
    """Arm → label, color, dashes, marker and width of its line.

    The untouched model is gray and takes no color, so that figures of the trained arms alone have the same ones.
    """
    arms = list(arms)
    looks = line_looks()
    untouched: Look = {"color": "0.6", "linestyle": "-", "marker": "P"}
    return {
        arm: (untouched if arm == UNTOUCHED else next(looks))
        | {"label": escape(shorten(arm, NAME_LENGTH)), "linewidth": width}
        for arm, width in zip(arms, np.linspace(WIDEST, THINNEST, len(arms)), strict=True)
    }
