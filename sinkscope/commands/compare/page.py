"""The page of a comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.quantize import compared
from sinkscope.html_page.contents import Contents, PageParts
from sinkscope.output.comparison import head_findings
from sinkscope.results.findings import Finding


class ComparePage(PageParts):
    def places(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        # the section of formats shows those of one run
        return {} if compared.TABLE in manifest["tables"] else self.linked(folder, manifest)

    def linked(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        return {run["label"]: Path(run["folder"]) for run in manifest.get("runs", ()) if run.get("folder")}

    def findings(self, manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        names = [run["label"] for run in manifest["runs"]]
        if compared.TABLE not in tables:
            return head_findings(tables, names)
        return compared.findings(tables[compared.TABLE], *names)

    def data(self, contents: Contents) -> Mapping[str, Any]:
        return {"first_table": "comparison"}
