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
from sinkscope.results.findings import Finding

CLAIM = ("claim", "statement", "quantity", "outcome", "value", "test", "published", "tells", "note")


def as_json(command: str, result: Printout) -> str:
    value = result.value
    manifest = getattr(value, "manifest", {})
    numbers = {} if result.numbers is None else {"numbers": result.numbers.reset_index()}
    tables = {**numbers, **result.tables} or getattr(value, "summary_tables", {})
    of_value = getattr(value, "tables", None)
    of_value = of_value if isinstance(of_value, Mapping) else {}  # a sweep's are of all its cells
    claims = of_value["claim"].to_dict("records") if "claim" in of_value else []
    found = {
        "command": command,
        "folder": result.folder,
        "failure": result.failure or None,
        "warnings": [*(manifest.get("notices") or ()), *result.notes],
        "text": result.text or None,
        "data": result.data,
        "findings": [*map(_finding, getattr(value, "findings", ())), *map(_claim, claims)],
        "metrics": _metrics(of_value["summary"]) if "summary" in of_value else {},
        "tables": {title: table.to_dict("records") for title, table in tables.items()},
    }
    return printable(json.dumps(_plain(found), allow_nan=False, ensure_ascii=False))  # its escapes are those of JSON


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "name": found.name,
        "section": found.section,
        "outcome": found.outcome,
        "value": found.value,
        "interval": [found.low, found.high],
        "null": None,  # only `claims` measures one
        "threshold": found.threshold,
        "claim": found.claim or None,
        "numbers": found.numbers,
        "sentence": found.sentence,
    }


def _claim(row: Mapping[str, Any]) -> dict[str, Any]:
    ends = {"interval": ("low", "high"), "null_range": ("null_low", "null_high"), "threshold": ("least", "most")}
    return {
        "name": row["claim"],
        "model": row["model"],
        **{name: row[name] for name in CLAIM},
        "null": row["null"],
        **{name: [row[low], row[high]] for name, (low, high) in ends.items()},
    }


def _metrics(summary: Any) -> dict[str, float]:
    """Return the metrics of the whole model by name."""
    whole = summary[summary["layer"] == -1]
    return dict(zip(whole["metric"], whole["value"], strict=True))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: null for NaN, infinity and missing values, and for an interval of such ends."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        parts = [_plain(part) for part in value]
        return None if len(parts) == 2 and parts == [None, None] else parts
    if isinstance(value, Enum | PurePath):
        return str(value)
    if hasattr(value, "item"):  # of numpy
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
