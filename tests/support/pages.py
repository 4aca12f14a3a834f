"""Contents of pages made by hand, and the data of a page."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinkscope.html_page import Contents
from sinkscope.output.run import Run
from sinkscope.results.activations import Activations
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.tables import LEADING
from support.made_up_runs import grid, make_run, picture_tables

Table = dict[str, list[Any]]


def led(tables: Mapping[str, pd.DataFrame], model: str = "org/Tiny-1M", condition: str = "natural") -> dict:
    """Return the tables with their leading columns, as they are published."""
    shaped = {}
    for name, table in tables.items():
        whole = {"model": model, "condition": condition, "layer": -1}
        missing = {column: value for column, value in whole.items() if column not in table}
        shaped[name] = table.assign(**missing)[[*LEADING, *(name for name in table if name not in LEADING)]]
    return shaped


def analysis(**sizes: Any) -> Contents:
    """Return the contents for a run of `analyze`, with findings. `given`: as for `make_run`."""
    run = make_run(**{"layers": 4, "heads": 4, "positions": 8, "length": 12} | sizes)
    manifest = run.manifest | {"command": "analyze", "tables": [], "dtype": "float32"}
    findings = [
        Finding(
            "not-measured", "Sink", Outcome.MEASURED, numbers={"what": "A `finding`", "reason": "why"}, is_headline=True
        ),
        Finding("gradient-null", "Gradients", value=2.0),
    ]
    tables = led(run.tables, run.model)
    length = tables["attention_maps"]["key"].max() + 1
    heads = (1, int(tables["attention"]["head"].max()) + 1, length, length)
    weights = {f"attention.{layer}": np.random.default_rng(layer).uniform(0, 1, heads) ** 4 for layer in range(4)}
    activations = Activations({name: torch.tensor(of).tril().half() for name, of in weights.items()})
    return Contents(manifest, tables, findings=findings, activations=activations)


def pictures() -> Contents:
    """Return the contents for a run of `analyze --images`."""
    manifest = {"command": "analyze", "config": {}, "tables": [], "condition": "natural"}
    return Contents(manifest, led({name: table for name, table in picture_tables().items() if name != "encoder_patch"}))


def experiment() -> Contents:
    """Return the contents for a run of `intervene`: three arms with controls."""
    random = np.random.default_rng(0)
    names = [f"do-{number}" for number in range(3)]
    effect = grid(name=names, draw=[-2, -1, 0, 1], metric=["sink_rate", "perplexity"], layer=[-1, 0, 1])
    effect["arm"] = effect["draw"].map({-2: "before", -1: "after"}).fillna("control")
    effect = effect.assign(draw=effect["draw"].clip(-1), position=0, value=random.uniform(0.1, 1, len(effect)))
    attention = grid(condition=["before", *names], layer=range(4), head=range(4), position=range(2))
    attention = attention.assign(kv_head=0, window_mass=random.uniform(0, 1, len(attention)))
    maps = grid(condition=["before", *names], layer=range(4), query=range(3), key=range(3)).query("key <= query")
    maps = maps.assign(weight=random.uniform(0, 1, len(maps)))
    manifest = {"command": "intervene", "config": {}, "tables": [], "condition": "natural"}
    return Contents(manifest, led({"effect": effect, "attention": attention, "arm_maps": maps}))


def training() -> Contents:
    """Return the contents for `retrofit`: two methods, two seeds, by step."""
    random = np.random.default_rng(0)
    table = grid(condition=["none", "vga"], seed=[0.0, 1.0], step=range(0, 50, 10), metric=["loss", "gradient_norm"])
    gates = grid(condition=["vga"], layer=range(4), head=range(4), seed=[0.0, 1.0], parameter=["weight"])
    gates["displacement"] = random.uniform(0, 1, len(gates))
    manifest = {"command": "retrofit", "config": {}, "tables": [], "arms": {}}
    value = random.uniform(1, 9, len(table))
    return Contents(manifest, led({"training": table.assign(value=value), "gates": gates}))


def claims() -> Contents:
    """Return the contents for `claims`: three claims, two models."""
    table = grid(model=["one", "two"], claim=["GS-1", "GS-2", "W-1"], part=[0, 1])
    outcomes = {"GS-1": "holds", "GS-2": "fails", "W-1": "not measured"}
    value = np.arange(len(table)) / 10
    texts = {name: name for name in ("paper", "reference", "statement", "quantity", "test", "passes", "published")}
    table = table.assign(value=value, low=value - 0.1, high=value + 0.1, null=np.nan, least=0.5, most=np.inf, **texts)
    table = table.assign(outcome=table["claim"].map(outcomes), is_ours=True, note=None)
    return Contents({"command": "claims", "config": {}, "tables": []}, led({"claim": table}))


def sweep() -> Contents:
    """Return the contents for a sweep: two models on three inputs."""
    table = grid(model=["one", "two"], input=["natural", "random", "repeated"], layer=[-1, 0, 1], metric=["sink_rate"])
    table = table.assign(cell=table["model"] + table["input"], step=-1, parameters=7, value=np.arange(len(table)) / 20)
    return Contents({"command": "sweep", "config": {}, "tables": [], "cells": []}, led({"sweep": table}))


def factors() -> Contents:
    """Return the contents for a sweep of trainings: five weight decays, two arms, two seeds, three steps."""
    decays = ["weight-decay=0", "weight-decay=0.5", "weight-decay=1.0", "weight-decay=2", "weight-decay=5"]
    table = grid(settings=decays, condition=["softmax", "sigmoid"], seed=[0, 1], step=[0, 10, 20],
                 metric=["loss", "sink_rate"])  # fmt: skip
    table = table.assign(layer=-1, cell=table["settings"], tokens=32 * table["step"], value=np.arange(len(table)) / 200)
    return Contents({"command": "sweep", "config": {}, "tables": [], "cells": []}, led({"sweep_training": table}))


def side_by_side() -> Contents:
    """Return the contents for two analyses side by side."""
    runs = {
        f"run {number}": make_run(model=f"org/{number}", layers=2 + number, positions=6, length=8)
        for number in range(2)
    }
    parts = {
        label: Run(run.manifest | {"command": "analyze"}, led(run.tables, run.model)) for label, run in runs.items()
    }
    comparison = pd.DataFrame({"metric": ["sink_rate", "loss"], "run 0": [0.5, 3.0], "run 1": [0.25, 2.0]})
    return Contents({"command": "compare", "config": {}, "tables": []}, {"comparison": comparison}, parts)


KINDS = {"analysis": analysis, "experiment": experiment, "training": training, "claims": claims, "sweep": sweep,
         "factors": factors, "side by side": side_by_side, "pictures": pictures}  # fmt: skip


# --- reading


def data_of(html: str) -> dict[str, Any]:
    """Return the data that a page's scripts read."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def table_of(data: Mapping[str, Any], name: str) -> Table:
    table = next(table for table in data["tables"] if table["name"] == name)
    return {column["name"]: expanded(column["values"]) for column in table["columns"]}


def expanded(values: Any) -> list[Any]:
    if isinstance(values, dict) and "of" in values:
        return [None if at < 0 else values["of"][at] for at in expanded(values["at"])]
    if isinstance(values, dict):
        values = [
            value for value, count in zip(values["runs"][::2], values["runs"][1::2], strict=True) for _ in range(count)
        ]
    return [float(value) if value in ("inf", "-inf") else value for value in values]
