"""The page of a scorecard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.claims.columns import CLAIM
from sinkscope.commands.claims.scorecard import unusual
from sinkscope.html_page.contents import PageParts
from sinkscope.results.findings import Finding


class ClaimsPage(PageParts):
    def linked(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        return {place.name: place for place in sorted(folder.glob("runs/*")) if place.is_dir()}

    def findings(self, manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        return unusual(tables[CLAIM]) if CLAIM in tables else ()
