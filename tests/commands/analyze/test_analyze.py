"""Runs from end to end on tiny models: their tables, their manifest, and the behavior when memory runs out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from support.tables import assert_same_tables
from tiny import ragged_tokens, tiny_model, written
from transformers import PreTrainedModel

import sinkscope
from sinkscope import InputError
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.measuring.observables.activation import Outlier
from sinkscope.measuring.observables.close_ups import OTHER_COORDINATES, TOP_COORDINATES
from sinkscope.measuring.random_weights import randomized
from sinkscope.measuring.tracer import Tracer
from sinkscope.output.run import Run

LENGTHS = (20, 7, 13, 20, 3)
POSITIONS, WINDOW = 10, 6


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of JSON lines with five sequences, some shorter than `positions` and `window`."""
    return written(tmp_path / "ragged.jsonl", ragged_tokens(LENGTHS))


def run_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    defaults = {"num_seqs": 5, "seq_len": 20, "positions": POSITIONS, "window": WINDOW}
    return sinkscope.analyze(model, **defaults | {"input": source} | options)


def forward_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    """Measure without a backward pass, so that all passes go through Tracer.forward."""
    return run_of(model, source, observables=("activation", "attention", "geometry", "massive", "outlier"), **options)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon-alibi"])
def test_the_tables_are_the_references(name: str, lines: Path) -> None:
    """Ragged sequences are padded in batches of two."""
    model = tiny_model(name)
    recorded = reference.record_each(model, ragged_tokens(LENGTHS))
    epsilon = reference.clear_threshold(recorded, WINDOW)
    run = run_of(model, lines, batch_size=2, epsilon=epsilon)
    reference.assert_same(dict(run.tables), reference.tables(recorded, POSITIONS, WINDOW, epsilon), 1e-5)


def test_neither_kernel_nor_repetition_changes_a_table(model: PreTrainedModel, lines: Path) -> None:
    fused, again, eager = (run_of(model, lines, attn=kernel) for kernel in ("sdpa", "sdpa", "eager"))
    assert eager.manifest["kernel"] == "eager"
    assert_same_tables(fused.tables, again.tables, check_exact=True)  # bit for bit
    assert_same_tables(fused.tables, eager.tables, rtol=1e-5, atol=1e-5)
    assert fused.manifest["input"] == again.manifest["input"]
    hashes = {forward_of(model, seed=seed).manifest["input"]["sha256"] for seed in (0, 1)}
    assert len(hashes) == 2


def test_random_weights_are_those_that_the_seed_draws(model: PreTrainedModel) -> None:
    at_random = forward_of(model, random_weights=True, seed=3)
    expected = forward_of(randomized(model, 3), seed=3)
    assert at_random.manifest["model"]["name"] == f"{expected.manifest['model']['name']} (random weights)"
    assert at_random.manifest["model"]["weights"] == "random"
    for name, table in expected.tables.items():
        if name != "finding":  # a sentence names what is compared
            pd.testing.assert_frame_equal(at_random.tables[name].assign(model=""), table.assign(model=""))
    assert not at_random.tables["attention"]["sink_mass"].equals(
        forward_of(model, seed=3).tables["attention"]["sink_mass"]
    )
    folder = AnalyzeOptions(model="org/name", random_weights=True).folder()
    assert folder == Path("runs/name-natural-random-weights")
    with pytest.raises(InputError, match="the weights of this run are random, and are not stored: pass the model"):
        dataclasses.replace(at_random, loaded=None).attention(0, text=[1, 2, 3])


def test_only_the_chosen_observables_are_measured(model: PreTrainedModel) -> None:
    run = run_of(model, observables=("massive",))
    assert set(run.tables) == {"massive", "massive_elsewhere", "massive_map", "summary", "finding"}
    assert run.manifest["tables"] == sorted(run.tables)


def test_positions_and_window_are_cut_to_the_longest_sequence(model: PreTrainedModel, tmp_path: Path) -> None:
    run = run_of(model, written(tmp_path / "short.jsonl", ragged_tokens((4, 6))), num_seqs=2, epsilon=0.6)
    attention = run.tables["attention"]
    assert sorted(attention["position"].unique()) == list(range(6))
    assert attention.notna().all(axis=None)
    np.testing.assert_allclose(attention["window_mass"], attention["sink_mass"], rtol=1e-5)


def test_maps_are_those_of_the_first_sequence(model: PreTrainedModel, lines: Path) -> None:
    """The maps show the weights of some heads, and the magnitudes in the layer with the largest ratio."""
    run = run_of(model, lines)
    recorded = reference.record(model, ragged_tokens(LENGTHS)[0])
    maps = run.tables["attention_maps"]
    assert 1 <= len(maps.groupby(["layer", "head"])) <= 6
    for (layer, head), rows in maps.groupby(["layer", "head"]):
        assert len(rows) == 20 * 21 / 2
        weights = recorded.layers[layer].weights[head]
        np.testing.assert_allclose(rows["weight"], weights[rows["query"], rows["key"]], rtol=1e-4, atol=1e-8)
        assert rows["token_id"].tolist() == recorded.ids[rows["key"]].tolist()
    layer = run.tables["massive"].loc[run.tables["massive"]["ratio"].idxmax(), "layer"]
    rows = run.tables["massive_map"]
    assert set(rows["layer"]) == {layer}
    hidden = np.abs(recorded.layers[layer].sites["layer_out"])
    np.testing.assert_allclose(rows["magnitude"], hidden[rows["position"], rows["coordinate"]], rtol=1e-4)
    assert set(rows[rows["is_top"]]["coordinate"]) == set(np.argsort(hidden.max(0))[-TOP_COORDINATES:])
    assert TOP_COORDINATES < rows["coordinate"].nunique() <= TOP_COORDINATES + OTHER_COORDINATES
    longer = run_of(model, seq_len=100, observables=("attention",)).tables["attention_maps"]
    assert longer["query"].max() == longer["key"].max() == 63


OUT_OF_MEMORY = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to …"),
}


@pytest.mark.parametrize(("kind", "where"), [("gpu", "tracer"), ("cpu", "model"), ("cpu", "observable")])
def test_out_of_memory_halves_the_batch(kind: str, where: str, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is also halved if nnsight passes the error on; earlier sums are discarded."""
    model, tried = tiny_model("llama"), []
    expected = forward_of(model, lines, batch_size=2)

    def check(sequences: int) -> None:
        tried.append(sequences)
        if sequences > 2:
            raise OUT_OF_MEMORY[kind]

    def checked(plain: Any, batch_at: int) -> Any:
        return lambda *args: check(len(args[batch_at].lengths)) or plain(*args)

    if where == "tracer":
        monkeypatch.setattr(Tracer, "forward", checked(Tracer.forward, 1))
    elif where == "model":
        model.model.layers[2].register_forward_pre_hook(lambda module, args: check(len(args[0])))
    else:
        monkeypatch.setattr(Outlier, "see_stack", checked(Outlier.see_stack, 2))
    run = forward_of(model, lines, batch_size=5)
    batches = [size for size in tried if size > 1]  # the parity check reads single sequences
    assert batches[:2] == [5, 2]  # 5 // 2
    assert run.manifest["batch_size"] == 2
    assert_same_tables(run.tables, expected.tables, check_exact=True)


def test_the_manifest_says_how_to_read_the_numbers(model: PreTrainedModel) -> None:
    manifest = run_of(model).manifest
    wired = {"name": "llama", "wiring": "sequential", "positions": "rotary", "door": "interface"}
    absent = dict.fromkeys(("kinds", "unknown", "copies", "layer_positions"))
    assert manifest["family"] == wired | absent | {"gated": False, "causal": True, "prefix": 0}
    assert manifest["scaling"] == pytest.approx([8**-0.5] * 3)
    assert (manifest["input"]["sequences"], manifest["input"]["tokens"]) == (5, 100)
    assert AnalyzeOptions(**manifest["config"]).positions == POSITIONS
    unknown = run_of(tiny_model("bloom"), observables=("attention",)).manifest  # its scaling cannot be read
    assert unknown["scaling"] == [None] * 3
    assert json.loads(json.dumps(unknown, allow_nan=False)) == unknown  # JSON has no NaN
