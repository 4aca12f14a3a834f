"""The page of a comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkscope.html_page.contents import Contents, PageParts


class ComparePage(PageParts):
    def places(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        return {run["label"]: Path(run["folder"]) for run in manifest.get("runs", ()) if run.get("folder")}

    def data(self, contents: Contents) -> Mapping[str, Any]:
        return {"first_table": "comparison"}
