"""What the weights of a checkpoint show besides its networks: query and key biases, tied ends, and every matrix."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from sinkscope.models.checkpoint import Stored
from sinkscope.models.family import Family
from sinkscope.models.projections import head_places
from sinkscope.results.tables import HEAD, KV_HEAD, WHOLE_MODEL, Column

Layers = Mapping[int, Mapping[str, Stored]]  # layer → name within the layer, without .weight → tensor

MATRIX_TABLES = {
    "scan_biases": (
        HEAD, KV_HEAD,
        Column("query_norm", "norm of the query bias b_Q"), Column("key_norm", "norm of the key bias b_K"),
        Column("logit", "b_Q · b_K ÷ √d, their part of every logit where positions rotate neither"),
        Column("bound", "‖b_Q‖ ‖b_K‖ ÷ √d, their largest part under any rotation"),
    ),
    "scan_matrices": (
        Column("tensor", "name of the matrix in the checkpoint, within the layer", kind="text"),
        Column("row", "row of the largest |entry|, as stored", kind="whole"),
        Column("column", "its column", kind="whole"),
        Column("largest", "largest |entry|"),
        Column("largest_norm", "largest norm of a row"), Column("median_norm", "median norm of the rows"),
    ),
}  # fmt: skip


def built_config(settings: Mapping[str, Any]) -> Any:
    """Return the configuration of the text model by transformers' own class; None if it has none (as for GGUF)."""
    is_known = settings.get("model_type") in CONFIG_MAPPING
    return AutoConfig.for_model(**settings).get_text_config() if is_known else None


def biases(row: Family, config: Any, layers: Layers) -> Iterator[dict[str, Any]]:
    """Yield what query and key biases add to logits, for every query head of layers that have both.

    Scales of attention other than 1/√d are not considered.
    """
    for layer, tensors in layers.items():
        stored = [tensors[name] for name in (f"{row.attention}.{module}.bias" for module in row.qkv) if name in tensors]
        if config is None or not stored or len(stored) < len(row.qkv):
            continue
        vectors = [next(vector.rows(0, 1))[1][0].double() for vector in stored]
        places = head_places(row, config, [len(vector) for vector in vectors])
        queries, keys = (vectors[number][rows] for number, rows in (places["query"], places["key"]))
        for head, query in enumerate(queries):
            kv_head = head * len(keys) // len(queries)
            key, root = keys[kv_head], len(query) ** 0.5
            norms = {"query_norm": float(query.norm()), "key_norm": float(key.norm())}
            numbers = {"logit": float(query @ key) / root, "bound": prod(norms.values()) / root}
            yield {"layer": layer, "head": head, "kv_head": kv_head, **norms, **numbers}


def find_ends(tensors: Mapping[str, Stored], width: int) -> dict[str, Stored]:
    """Return the matrices outside all layers with a side of the model's width: embeddings, and the output if stored."""
    outside = {name: stored for name, stored in tensors.items() if not re.search(r"\.\d+\.", name)}
    return {name: stored for name, stored in outside.items() if len(stored.shape) == 2 and width in stored.shape}


def are_tied(config: Any, ends: Mapping[str, Stored]) -> bool:
    """Return whether the input and the output embedding are one matrix: only one is stored, or the settings say so."""
    sizes = [prod(stored.shape) for stored in ends.values()]
    return bool(sizes) and (sizes.count(max(sizes)) == 1 or bool(getattr(config, "tie_word_embeddings", False)))


def every_matrix(layers: Layers, ends: Mapping[str, Stored]) -> Iterator[dict[str, Any]]:
    """Yield statistics of each matrix of the layers and of the ends, read a few rows at a time."""
    for layer, tensors in {**layers, WHOLE_MODEL: ends}.items():
        for name, stored in tensors.items():
            if len(stored.shape) < 2:
                continue
            norms, largest = [], (-1.0, 0, 0)
            for part, rows in stored.rows(0, prod(stored.shape[:-1])):
                norms.append(rows.norm(dim=1))
                index = int(rows.abs().argmax())
                row, column = divmod(index, rows.shape[1])
                largest = max(largest, (float(rows[row, column].abs()), part.start + row, column), key=lambda x: x[0])
            values = torch.cat(norms)
            place = dict(zip(("largest", "row", "column"), largest, strict=True))
            of_rows = {"largest_norm": float(values.max()), "median_norm": float(values.median())}
            yield {"layer": layer, "tensor": name, **place, **of_rows}
