"""Tables are read by their declared columns; NU tables 1 and 2 for GPT-2, computed from weights by plain torch."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import sinkscope
from sinkscope import InputError, Run, show
from sinkscope.measuring.tables import all_tables
from sinkscope.results.papers import GPT2_MASSIVE, paper_tables, printed_gamma
from sinkscope.results.tables import LEADING, LEADING_COLUMNS, METRIC, MOST_ROWS, VALUE, Column, read_table, write_table

REPORT = Path(__file__).parents[2] / "reports"
REPORTS = sorted(REPORT.glob("*/tables/*.parquet"))
COLUMNS = (*LEADING_COLUMNS, METRIC, VALUE)
ROWS = pd.DataFrame([("m", "natural", -1, "loss", 1.5)], columns=[*LEADING, "metric", "value"])


def test_declared_columns_are_those_that_were_written() -> None:
    for path in REPORTS:
        table = read_table(path, (*LEADING_COLUMNS, *all_tables()[path.stem]))
        assert list(table)[:3] == list(LEADING), path


def test_tables_are_read_by_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "summary.parquet"
    for rows in (
        ROWS,
        ROWS.assign(value=2),  # a whole number is a number
        ROWS.assign(more=1),
        ROWS.assign(metric=None),  # text may be missing
        ROWS[:0].astype(object),  # without rows, values have no kind
    ):
        rows.to_parquet(path, index=False)
        assert len(read_table(path, COLUMNS)) == len(rows)
    for rows in (
        ROWS.drop(columns="metric"),
        ROWS.assign(value="1.5"),
        ROWS.assign(value=True),
        ROWS.assign(metric=3),
        ROWS.assign(layer=0.5),
        ROWS.assign(layer=None),
    ):
        rows.to_parquet(path, index=False)
        with pytest.raises(InputError, match="is not the table 'summary': it has no column"):
            read_table(path, COLUMNS)
    for share in (0.0, 0.3, 0.9):
        ROWS.to_parquet(path, index=False)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        with pytest.raises(InputError, match=r"summary.parquet is damaged"):
            read_table(path, (Column("layer", "", kind="whole"),))


@pytest.mark.parametrize(
    ("report", "name", "edit", "fault"),
    [
        ("smollm2-135m-streaming", "streaming", lambda table: table[:0], "it has no rows"),
        ("smollm2-135m-w8a8", "quantization_sites", lambda table: pd.concat([table, table]), "it has rows twice"),
        (
            *("smollm2-135m-w8a8", "quantization_sites"),
            lambda table: pd.concat([table, table.assign(cost=0.5)]),
            "two rows have the same labels",
        ),
        ("smollm2-135m-w8a8", "quantization", lambda table: table[:1], "does not fit to the others"),
        ("smollm2-135m-w8a8", "quantization", lambda table: table.assign(layer=10**9), "there is no layer 1000000000"),
        ("mgm", "massive", lambda table: table.assign(value=float("nan")), "a column has no values"),
        ("mgm", "massive", lambda table: pd.concat([table, table]), "it has rows twice"),
        ("mgm", "attention", lambda table: table.assign(head=-5), "there is no head -5"),
    ],
)  # fmt: skip
def test_a_table_that_was_edited(report: str, name: str, edit: Any, fault: str, tmp_path: Path) -> None:
    """What reads it ends with one line that names it, and no array is as large as its numbers say."""
    run = Path(shutil.copytree(REPORT / report, tmp_path / "run"))
    path = run / "tables" / f"{name}.parquet"
    write_table(edit(pd.read_parquet(path)), path)
    for opened in (lambda: Run.open(run).verdict, lambda: show(run, again=True)):
        with pytest.raises(InputError) as refused:
            opened()
        (line,) = str(refused.value).splitlines()
        assert line.startswith(str(path)), line
        assert fault in line


def test_a_table_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file can hold any number of equal rows."""
    path, columns = tmp_path / "summary.parquet", (Column("layer", "", kind="whole"),)
    pyarrow.parquet.write_table(pyarrow.table({"layer": np.zeros(MOST_ROWS + 1, np.int8)}), path)
    assert path.stat().st_size < MOST_ROWS / 100
    with pytest.raises(InputError, match=r"summary.parquet has 100,000,001 rows, which would fill the memory"):
        read_table(path, columns)
    ROWS.to_parquet(path, index=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=39))
    with pytest.raises(InputError, match="has 1 rows, which would fill the memory"):  # 5 numbers of 8 bytes
        read_table(path, columns)


def test_a_gpt2_of_random_weights_against_plain_torch() -> None:
    """|W_k b_Q| uses W_k as GPT-2 stores it, (in, out), without a norm; mean ± 2 deviations are over all entries."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=16, n_inner=32, bos_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(config).eval().requires_grad_(False)
    model.transformer.wpe.weight[0, list(GPT2_MASSIVE)] = torch.tensor([40.0, -60.0])
    for block in model.transformer.h:
        block.attn.c_attn.bias.normal_()
    asked = {"input": "random", "num_seqs": 1, "seq_len": 16, "bos": "never", "skip_parity": True}
    run = sinkscope.analyze(model, observables=("query-bias",), **asked)
    table = paper_tables(run)["gamma"]
    for block, row in zip(model.transformer.h, table.to_dict("records"), strict=True):
        weight, bias = block.attn.c_attn.weight.detach().double(), block.attn.c_attn.bias.detach().double()
        gamma = (weight[:, 768:1536] @ bias[:768]).abs()
        assert row["baseline"] == f"{round(float(gamma.mean()), 3)} ± {round(2 * float(gamma.std(correction=0)), 3)}"
        assert [row["d=138"], row["d=447"]] == [round(float(gamma[at]), 3) for at in GPT2_MASSIVE]
    assert table["d=447, NU prints"].tolist() == printed_gamma()["d=447, NU prints"].tolist()
    assert table.loc[6, ["layer", "baseline, NU prints", "d=138, NU prints"]].tolist() == [
        "layer 7", "1.12 ± 2.701", "12.453"
    ]  # fmt: skip
