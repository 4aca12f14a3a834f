"""A model that is loaded onto a GPU by name; simulated_devices.py, which tests/gpu.sh runs there, has all else."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny import tiny_model

import sinkscope

OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 6, "seq_len": 24, "positions": 8}


@pytest.mark.cuda
def test_device_map(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    here, there = (sinkscope.analyze(tmp_path, device_map=where, **OPTIONS) for where in ("cpu", "auto"))
    assert "cuda" in str(there.manifest["device"])
    pd.testing.assert_frame_equal(here.tables["attention"], there.tables["attention"], rtol=1e-3, atol=1e-4)
