"""Tables that are measured on a GPU are those of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import tiny_model

import sinkscope

pytestmark = pytest.mark.cuda


OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 6, "seq_len": 24, "positions": 8}


def furthest(here: pd.DataFrame, there: pd.DataFrame) -> float:
    """Return the largest difference of the numbers of two tables, relative to the largest number of its column."""
    assert list(here) == list(there)
    assert len(here) == len(there)
    differences = [0.0]
    for name in here.select_dtypes("float"):
        own, other = here[name].to_numpy(float), there[name].to_numpy(float)
        assert (np.isfinite(own) == np.isfinite(other)).all(), name
        known = np.isfinite(own)
        if known.any():
            differences.append(float(np.abs(own - other)[known].max() / max(np.abs(own[known]).max(), 1e-12)))
    return max(differences)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "bloom", "falcon"])
def test_tables_are_those_of_the_cpu(name: str) -> None:
    here, there = (sinkscope.analyze(tiny_model(name).to(device), **OPTIONS).tables for device in ("cpu", "cuda"))
    assert set(here) == set(there)
    assert {table: furthest(here[table], there[table]) for table in ("attention", "activation", "summary")} == (
        pytest.approx({"attention": 0, "activation": 0, "summary": 0}, abs=1e-3)
    )


def test_half_precision_is_close_to_single() -> None:
    whole = sinkscope.analyze(tiny_model("llama"), **OPTIONS)
    half = sinkscope.analyze(tiny_model("llama", dtype=torch.bfloat16).to("cuda"), **OPTIONS)
    masses = [run.tables["attention"].query("position == 0")["window_mass"].mean() for run in (whole, half)]
    assert masses[0] == pytest.approx(masses[1], rel=0.05)


def test_device_map(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    run = sinkscope.analyze(tmp_path, device_map="auto", **OPTIONS)
    assert "cuda" in str(run.manifest["device"])
    assert furthest(sinkscope.analyze(tmp_path, **OPTIONS).tables["attention"], run.tables["attention"]) < 1e-3
