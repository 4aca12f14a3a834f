"""The page of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.sweep import factor_study
from sinkscope.commands.sweep.tables import SWEEP, SweepTables, cells_as_text
from sinkscope.html_page.contents import Contents, PageParts, spreads
from sinkscope.results.tables import WHOLE_MODEL


class SweepPage(PageParts):
    def linked(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        return {name: folder.parent / "cells" / name for name in manifest.get("cells", ())}

    def overviews(self, contents: Contents) -> Mapping[str, pd.DataFrame]:
        texts = cells_as_text(contents.tables)
        if "token_zero" not in contents.tables.get(SWEEP, ()):
            return texts
        return texts | {"Sink rate at position 0, by model and input": SweepTables(dict(contents.tables), {}).overview}

    def data(self, contents: Contents) -> Mapping[str, Any]:
        """Return the level of each training with WSE's sink rate, and the spread of every level's last values."""
        training = contents.tables.get(factor_study.STUDY, pd.DataFrame())
        data: dict[str, Any] = {
            "first_table": SWEEP,
            "spread": bool(cells_as_text(contents.tables)),
            "levels": [],
            "last_steps": [],
        }
        if training.empty:
            return data
        named = factor_study.levels(training)
        rates = {level: factor_study.published(level) for level in named.values()}
        shown = {level: (rate.value / 100, rate.mark) if rate else (None, "") for level, rate in rates.items()}
        rows = factor_study.with_levels(training[training["layer"] == WHOLE_MODEL])
        last = rows.loc[rows.groupby([*factor_study.KEYS, "metric"])["step"].idxmax()]
        return data | {
            "levels": [(*pair, level, *shown[level]) for pair, level in named.items()],
            "last_steps": spreads(last, [factor_study.LEVEL, "metric"]),
        }
