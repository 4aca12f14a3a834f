"""The page of an experiment."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sinkscope.html_page.contents import Contents, PageParts, spreads
from sinkscope.results.tables import WHOLE_MODEL


class IntervenePage(PageParts):
    def data(self, contents: Contents) -> Mapping[str, Any]:
        """Return the mean, standard deviation and number of controls for every arm, metric and position."""
        table = contents.all_tables.get("effect", pd.DataFrame())
        if table.empty:
            return {"controls": []}
        rows = table[(table["layer"] == WHOLE_MODEL) & (table["arm"] == "control")]
        arm = "condition" if contents.manifest.get("arms") else "name"  # as the page calls them
        return {"controls": spreads(rows, [arm, "metric", "position"])}
