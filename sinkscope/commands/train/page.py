"""The page of a training's arms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.train.findings import findings, retrofit_summaries
from sinkscope.html_page.contents import Contents, PageParts
from sinkscope.results.findings import Finding
from sinkscope.results.trainings import UNTOUCHED


class TrainPage(PageParts):
    def places(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        labels = (UNTOUCHED, *manifest["arms"])
        return {label: place for label in labels if (place := folder / label / "run").is_dir()}

    def findings(self, manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        return findings(tables, manifest) if {"training", "gates", "retrofit"} <= tables.keys() else ()

    def overviews(self, contents: Contents) -> Mapping[str, pd.DataFrame]:
        if "retrofit" not in contents.tables:
            return {}
        return dict(reversed(retrofit_summaries(contents.tables["retrofit"]).items()))  # sinks first
