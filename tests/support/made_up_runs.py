"""Runs of `analyze` with a made-up summary, and folders of them."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.output.run import Run
from sinkscope.results.tables import write_table
from support.manifests import run_manifest


def made_up(condition: str = "natural", sink_rate: float = 0.5, layers: int = 2, **changes: Any) -> Run:
    """Return a run that has only a summary. `changes` are merged into the manifest, including nested dicts."""
    manifest = run_manifest(condition=condition, tables=["summary"])
    for name, value in changes.items():
        manifest[name] = manifest[name] | value if isinstance(value, dict) else value
    rows = [(layer, metric, value + layer) for layer in range(layers) for metric, value in (("sink_rate", 0.0),)]
    rows += [(-1, "sink_rate", sink_rate), (-1, "kurtosis", 0.0)]
    summary = pd.DataFrame(rows, columns=["layer", "metric", "value"])
    summary = summary.assign(model=manifest["model"]["name"], condition=condition)
    return Run(manifest, {"summary": summary[["model", "condition", "layer", "metric", "value"]]})


def save(run: Run, folder: Path) -> Path:
    (folder / "tables").mkdir(parents=True)
    for name, table in run.tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")
    (folder / "run.json").write_text(json.dumps(run.manifest))
    return folder
