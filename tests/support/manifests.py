"""The smallest valid run.json, for runs that tests make up."""

from typing import Any

from sinkscope.results.manifest import FORMAT


def run_manifest(**changes: Any) -> dict[str, Any]:
    """Return the manifest of a run of `analyze`; `changes` replace complete entries."""
    return {
        "sinkscope": "0.1.0",
        "format": FORMAT,
        "command": "analyze",
        "condition": "natural",
        "config": {"seq_len": 64, "window": 64, "positions": 16, "epsilon": 0.3},
        "model": {
            "name": "org/model", "source": "org/model", "revision": None, "layer_types": None, "sliding_window": None,
        },
        "family": {"name": "llama", "wiring": "sequential", "positions": "rotary"},
        "absent": {},
        "input": {
            "sequences": 100, "tokens": 6400, "shortest": 64, "longest": 64, "token_zero": "bos",
            "sha256": "0123456789abcdef",
        },
        "dtype": "float32",
        "kernel": "sdpa",
        "tables": [],
    } | changes  # fmt: skip
