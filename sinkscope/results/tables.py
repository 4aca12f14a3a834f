"""The parquet tables: their columns, and reading and writing them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

# Every table begins with these; then its own, in this order. A contract with users: columns are added, not renamed.
LEADING = ("model", "condition", "layer")
COLUMNS: dict[str, tuple[str, ...]] = {
    "attention": (
        "head", "kv_head", "position", "window_mass", "sink_fraction", "sink_mass", "sink_second_moment",
    ),
    "attention_heads": ("head", "kv_head", "attention_entropy", "missing_mass"),
    "sink_positions": ("head", "sequence", "position", "token_id", "token", "window_mass"),
    "geometry": (
        "head", "kv_head", "position",
        "query_norm", "key_norm", "value_norm", "qk_cosine", "qk_norm_product", "sink_logit_gap",
    ),
    "gate": ("head", "kv_head", "position", "gate", "raw_value_norm"),
    "activation": ("site", "position", "norm_mean", "norm_max"),
    "massive": (
        "sequence", "position", "token_id", "token", "coordinate", "value", "median", "ratio", "is_massive",
    ),
    "outlier": ("site", "max_inf_norm", "kurtosis"),
    "attention_maps": ("head", "sequence", "query", "key", "token_id", "token", "weight"),
    "massive_map": ("sequence", "position", "token_id", "token", "coordinate", "magnitude", "is_top"),
    "gradient": ("pathway", "head", "position", "grad_norm"),
    "gradient_ratio": ("branch", "position", "input_norm", "bloat", "compress", "change"),
    "gradient_check": ("head", "position", "identity_residual", "lower_bound", "measured", "upper_bound", "holds"),
    "norm_bound": ("branch", "position", "measured", "bound", "holds", "tightness"),
    "query_bias": ("head", "position", "delta_mean", "delta_std", "key_alignment"),
    "gamma": ("coordinate", "gamma", "epe_0", "is_massive_epe"),
    "delta_distribution": ("group", "delta", "count"),
    "streaming": ("method", "window", "keep", "bucket", "tokens", "loss", "perplexity"),
    "effect": ("name", "arm", "draw", "metric", "position", "value"),
    "arm_maps": ("query", "key", "weight"),
    "quantisation": (
        "setting", "site", "part", "quantised", "kept", "sequences",
        "loss", "perplexity", "cost", "max_inf_norm", "kurtosis",
    ),
    "quantisation_sites": (
        "site", "part", "path", "low", "high", "median_abs", "max_abs", "is_massive", "step", "zeroed", "sqnr",
    ),
    "training": ("seed", "step", "metric", "value"),
    "gates": ("seed", "head", "parameter", "displacement"),
    "retrofit": ("seed", "metric", "value"),
    "value_norms": ("sequence", "position", "token_id", "token", "is_trigger", "norm", "attended_norm"),
    "summary": ("metric", "value"),
}  # fmt: skip


def shape_table(name: str, table: pd.DataFrame, model: str, condition: str, tokens: Mapping[int, str]) -> pd.DataFrame:
    """An observable's table as it is published: model and condition in front, token text beside token ids."""
    table = table.assign(model=model, condition=condition)
    if "token_id" in table:
        table["token"] = table["token_id"].map(tokens)
    return table[[*LEADING, *COLUMNS[name]]]


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Under a temporary name and then renamed: a killed run leaves no half table."""
    temporary = path.with_suffix(".parquet.tmp")
    table.to_parquet(temporary, index=False)
    os.replace(temporary, path)


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Write each as FOLDER/tables/NAME.parquet."""
    (folder / "tables").mkdir(exist_ok=True)
    for name, table in tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")


def read_table(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path)
