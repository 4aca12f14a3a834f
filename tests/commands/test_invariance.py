"""No result depends on the batch size, the padding, the chunks or the order of sequences, also for ragged input."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.retrofitted import each_pair
from tiny import ragged_tokens, tiny_model, written
from transformers import PreTrainedModel

import sinkscope
from sinkscope.attention import weights
from sinkscope.output.run import Run
from sinkscope.text.inputs import TokenInputs

SEQUENCES = ragged_tokens((7, 12, 12, 5, 12, 9, 12, 10))
ORDER = (4, 0, 7, 2, 6, 1, 3, 5)
FAMILIES = ("gpt2", "gemma2", "bloom")  # learned positions; rotary and sliding; ALiBi, and its own attention code
# tables of the first sequence only, and the findings, whose intervals draw sequences by their indices
OF_ORDER = ("attention_maps", "massive_map", "finding")


def analyze(model: PreTrainedModel, path: Path, **options: Any) -> Run:
    return sinkscope.analyze(model, input=path, num_seqs=8, seq_len=12, **options)


def intervene(model: PreTrainedModel, path: Path, **options: Any) -> Run:
    arms = {"mask": "mask-sink", "value": "scale-sink-value", "zero": "zero-massive:layers=1,coordinates=3"}
    return sinkscope.intervene(model, arms=arms, draws=1, input=path, num_seqs=8, seq_len=12, **options)


def quantize(model: PreTrainedModel, path: Path, **options: Any) -> Run:
    # with 8 bits an entry at the edge between two steps is rounded by the last bit of a sum
    bits = {"bits_weights": 16, "bits_activations": 16}
    return sinkscope.quantize(
        model, scheme="static", calibration=2, input=path, num_seqs=6, seq_len=12, **bits, **options
    )


COMMANDS: dict[str, Callable[..., Run]] = {"analyze": analyze, "intervene": intervene, "quantize": quantize}


def assert_same(run: Run, expected: Run, order: tuple[int, ...] | None = None) -> None:
    """Compare all tables. `order` maps the run's sequences to those of `expected`."""
    assert run.tables.keys() == expected.tables.keys()
    for name in expected.tables.keys() - (OF_ORDER if order else ()):
        measured, wanted = (each.tables[name].drop(columns="condition") for each in (run, expected))
        if order is not None:
            if "sequence" in measured:
                measured = measured.assign(sequence=np.array(order)[measured["sequence"]])
            if name in ("gradient_by_group", "epe_by_group"):  # each group is one sequence; -1: all of them
                measured = measured.assign(group=np.array([*order, -1])[measured["group"]])
            keys = [column for column in wanted if not pd.api.types.is_float_dtype(wanted[column])]
            measured, wanted = (table.sort_values(keys, ignore_index=True) for table in (measured, wanted))
        # an entry at the edge between two of 2^16 steps, 1.5e-5 of its range, moves the loss by a few millionths
        atol = 2e-5 if name == "quantization" else 2e-6
        pd.testing.assert_frame_equal(measured, wanted, rtol=1e-4, atol=atol, obj=name)


@pytest.mark.slow
@each_pair(FAMILIES, list(COMMANDS), ("name", "command"))
def test_no_table_depends_on_batch_size_order_padding_or_chunks(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, path = partial(COMMANDS[command], tiny_model(name, spread=4.0)), written(tmp_path / "a.jsonl", SEQUENCES)
    expected = measure(path, batch_size=1)
    for size in (3, 8) if command == "analyze" else (3,):
        assert_same(measure(path, batch_size=size), expected)
    if command != "quantize":  # it calibrates on the last sequences
        reordered = written(tmp_path / "other.jsonl", [SEQUENCES[place] for place in ORDER])
        assert_same(measure(reordered, batch_size=3), expected, ORDER)
    plain = TokenInputs.batches
    monkeypatch.setattr(TokenInputs, "batches", lambda inputs, size: plain(inputs, size, padding_side="left"))
    monkeypatch.setattr(weights, "ROW_CHUNK", 5)
    monkeypatch.setattr(weights.column_sums, "__defaults__", (5,))
    monkeypatch.setattr(weights.row_chunks, "__defaults__", (5,))
    assert_same(measure(path, batch_size=3), expected)
