"""The result of a command as one JSON object, for --json.

    {"command": "analyze", "folder": "runs/…", "failure": null, "warnings": [], "text": null, "data": {},
     "findings": [{"name": "sink", "value": 78.8, "interval": [77.9, 79.6], "null": null, "threshold": 10.0, …}],
     "metrics": {"sink_rate": 78.8, …}, "tables": {"…": [{…}, …]}}

The object of a command that fails before it has a result is {"command": …, "error": "…", "status": 1 or 2}.
"""

import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from sinkscope.commands.printout import Printout
from sinkscope.errors import printable
from sinkscope.results.tables import WHOLE_MODEL

# of a finding; and of a claim, with pairs of columns that are the ends of a range
FINDING_ENTRIES = ("name", "section", "outcome", "value", "threshold", "numbers", "sentence")
CLAIM_COLUMNS = (
    "claim", "model", "statement", "quantity", "outcome", "value", "test", "published", "tells", "note", "null",
)  # fmt: skip
RANGES = {"interval": ("low", "high"), "null_range": ("null_low", "null_high"), "threshold": ("least", "most")}


def as_json(command: str, result: Printout) -> str:
    value = result.value
    manifest = getattr(value, "manifest", {})
    numbers = {} if result.numbers is None else {"numbers": result.numbers.reset_index()}
    printed = {**numbers, **result.tables} or getattr(value, "summary_tables", {})
    tables = getattr(value, "tables", None)
    tables = tables if isinstance(tables, Mapping) else {}  # the tables of many runs are not a mapping
    findings = [
        {name: getattr(finding, name) for name in FINDING_ENTRIES}
        | {"interval": [finding.low, finding.high], "claim": finding.claim or None}
        | {"null": None}  # only `claims` measures one
        for finding in getattr(value, "findings", ())
    ]
    for row in tables["claim"].to_dict("records") if "claim" in tables else ():
        ranges = {name: [row[low], row[high]] for name, (low, high) in RANGES.items()}
        findings.append({"name": row["claim"]} | {name: row[name] for name in CLAIM_COLUMNS} | ranges)
    metrics = {}
    if "summary" in tables:
        whole = tables["summary"][tables["summary"]["layer"] == WHOLE_MODEL]
        metrics = dict(zip(whole["metric"], whole["value"], strict=True))
    content = {
        "command": command,
        "folder": result.folder,
        "failure": result.failure or None,
        "warnings": [*(manifest.get("notices") or ()), *result.notes],
        "text": result.text or None,
        "data": result.data,
        "findings": findings,
        "metrics": metrics,
        "tables": {title: table.to_dict("records") for title, table in printed.items()},
    }
    return printable(json.dumps(_plain(content), allow_nan=False, ensure_ascii=False))  # its escapes are those of JSON


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: null for NaN, infinity and missing values, and for an interval of such ends."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        parts = [_plain(part) for part in value]
        return None if len(parts) == 2 and parts == [None, None] else parts
    if isinstance(value, Enum | PurePath):
        return str(value)
    if hasattr(value, "item"):  # a numpy number
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
