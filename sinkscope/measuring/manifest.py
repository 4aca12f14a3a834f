"""run.json: everything that one must know to repeat a run, or to doubt it."""

import math
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sinkscope.measuring.subject import Subject
from sinkscope.options.measuring import RunConfig

LIBRARIES = ("torch", "transformers", "nnsight", "accelerate", "pandas")


@dataclass
class Facts:
    """What only the pass itself knows."""

    batch_size: int = 0
    scaling: tuple[float, ...] = ()  # of the logits, a layer each
    loss: float | None = None  # cross-entropy per predicted token, where there was a backward pass
    notices: tuple[str, ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)  # observables that do not apply here, and why


def make_manifest(
    subject: Subject,
    config: RunConfig,
    facts: Facts,
    tables: list[str],
    start: float,
) -> dict[str, Any]:
    loaded, family, inputs = subject.loaded, subject.family, subject.inputs
    parameters = next(loaded.model.parameters())
    text = loaded.model.config.get_text_config()
    return {
        "sinkscope": version("sinkscope"),
        "command": "analyze",
        "config": config.model_dump(mode="json"),
        "condition": inputs.condition,
        "model": {
            "name": loaded.name,
            "source": loaded.source,
            "revision": loaded.revision,
            "commit": loaded.commit,
            "weights": loaded.weights,
            "architecture": type(loaded.model).__name__,
            "parameters": sum(p.numel() for p in loaded.model.parameters()),
            "layer_types": getattr(text, "layer_types", None),
            "sliding_window": getattr(text, "sliding_window", None),
        },
        "family": {"name": family.name, "wiring": family.wiring, "positions": family.positions, "door": family.door},
        "absent": family.absent_sites(),
        "not_measured": facts.not_measured,
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "device": str(parameters.device),
        "kernel": config.attn,
        "scaling": [None if math.isnan(scaling) else scaling for scaling in facts.scaling],
        "batch_size": facts.batch_size,
        "notices": list(facts.notices),
        "input": {
            "sequences": len(inputs),
            "tokens": inputs.num_tokens,
            "token_zero": inputs.token_zero,
            "sha256": inputs.sha256,
        },
        "seed": config.seed,
        "versions": {name: version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "started": datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
        "wall_seconds": round(time.time() - start, 2),
        "peak_memory_mb": _peak_memory_mb(),
        "tables": sorted(tables),
    }


def _peak_memory_mb() -> float:
    """Of the accelerator where there is one, else this process's high-water mark of resident memory."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _git_commit() -> str | None:
    """Of the sinkscope that ran, where it runs from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
