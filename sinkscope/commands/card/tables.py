"""The tables of `card`: what runs measured, in a form to share.

models    a row for each run of `analyze`, with a column for each metric of the whole model
metrics   a row for each metric of a run, also of models that were changed
layers    the same by layer, of runs of `analyze`
"""

from collections.abc import Sequence

import pandas as pd

from sinkscope.options.register import records
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.tables import LEADING, METRIC, VALUE, WHOLE_MODEL, Column, names_of

MODELS, VALUES, LAYERS = "models", "metrics", "layers"
COORDINATES = (
    Column("family", "family of the model, as the file with its cell names it; empty for other runs", kind="text"),
    Column("parameters", "number of parameters of the model", kind="whole"),
    Column("revision", "revision of the model, if one was named", kind="text"),
    Column("commit", "commit of the model on the hub; empty for a model from elsewhere", kind="text"),
    Column("sequences", "number of sequences that were measured", kind="whole"),
    Column("tokens", "number of their tokens", kind="whole"),
    Column("window", "option", "tokens", kind="whole"),
    Column("epsilon", "option"),
    Column("dtype", "data type of the weights", kind="text"),
    Column("token_zero", "description of the token at position 0", kind="text"),
    Column("input_sha256", "checksum of the token ids", kind="text"),
)
SETTING = Column("setting", "an intervention, or what is in fewer bits; empty for the model as it is", kind="text")
CARD_TABLES = {
    MODELS: COORDINATES,
    VALUES: (*COORDINATES, SETTING, METRIC, VALUE),
    LAYERS: (*COORDINATES, METRIC, VALUE),
}


def card_tables(runs: Sequence[tuple[RunData, str]]) -> dict[str, pd.DataFrame]:
    """Return the tables of runs, each with the family of its model; tables without rows are left out."""
    parts: dict[str, list[pd.DataFrame]] = {MODELS: [], VALUES: [], LAYERS: []}
    for run, family in runs:
        model, read, config = (run.manifest[name] for name in ("model", "input", "config"))
        place = {"model": run.model, "condition": run.condition, "family": family, "dtype": run.manifest["dtype"]}
        place |= {"parameters": model.get("parameters") or 0, "input_sha256": read["sha256"]}
        place |= {name: model.get(name) or "" for name in ("revision", "commit")}
        place |= {name: read[name] for name in ("sequences", "tokens", "token_zero")}
        place |= {name: config[name] for name in ("window", "epsilon")}
        values = values_of(run)
        parts[VALUES].append(values.assign(layer=WHOLE_MODEL, **place))
        if "summary" in run.tables:
            by_name = dict(zip(values["metric"], values["value"], strict=True))
            parts[MODELS].append(pd.DataFrame([{**place, "layer": WHOLE_MODEL, **by_name}]))
            summary = run.tables["summary"]
            parts[LAYERS].append(summary[summary["layer"] != WHOLE_MODEL].assign(**place))
    tables = {}
    for name, listed in parts.items():
        if listed:
            table = pd.concat(listed, ignore_index=True)
            measured = [metric for metric in METRICS if metric in table]
            tables[name] = table[[*LEADING, *names_of(CARD_TABLES[name]), *measured]]
    return tables


def values_of(run: RunData) -> pd.DataFrame:
    """Return setting, metric and value, for every finite metric of the whole model that a run measured."""
    record = records()[run.command]
    table = record.imported(record.whole_model)(run)[[SETTING.name, METRIC.name, VALUE.name]]
    is_finite_metric = table["metric"].isin(METRICS.keys()) & table["value"].abs().lt(float("inf"))
    return table[is_finite_metric].reset_index(drop=True)
