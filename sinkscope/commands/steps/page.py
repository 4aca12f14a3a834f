"""The page of a training's steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.steps.onsets import ONSET, findings
from sinkscope.html_page.contents import STEP, PageParts
from sinkscope.results.findings import Finding


class StepsPage(PageParts):
    named_by = STEP

    def places(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        return {step["step"]: folder / step["folder"] for step in manifest["steps"]}

    def findings(self, manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        return findings(tables[ONSET]) if ONSET in tables else ()
