"""The table `gate` against the factors of a plain forward pass, by hooks in float64."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.every_model import tiny_of
from support.hooked import calls_of
from support.retrofitted import METHODS, NAMES, SETTINGS, each_pair, in_double, retrofitted, shared
from tiny import batched, measured, ragged_tokens, tiny_tokens
from torch import nn
from transformers import PreTrainedModel

import sinkscope
from sinkscope.commands.doctor.command import doctor
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.tables import column_names
from sinkscope.models.families import find_family
from sinkscope.models.projections import projections
from sinkscope.results.findings import CLOSED

GATED = [label for label in METHODS if label.startswith(("vga", "iga", "vscale"))]
SEQUENCES = ragged_tokens([10, 7, 10])  # 7: shorter than the positions reported
KEYS = ["layer", "head", "position"]


def direct(model: PreTrainedModel, sequences: Sequence[np.ndarray] = SEQUENCES) -> pd.DataFrame:
    """Return the gate factor of each head from its vectors before and after: values or, if unchanged, heads' outputs.

    Sequences are read one at a time, without a tracer.
    """
    family, rows = find_family(model), []
    for ids in sequences:
        values, mixes = _seen(model, torch.as_tensor(ids)[None])
        for layer in values:
            value = projections(model, family, layer)["value"]
            raw, attended = (x[0][:, value.places] for x in values[layer])
            before, after = raw, attended
            if torch.equal(raw, attended):
                heads = model.config.get_text_config().num_attention_heads
                before, after = (x[0].unflatten(-1, (heads, -1)) for x in mixes[layer])
            gates = (after * before).sum(-1) / before.square().sum(-1)
            norms = raw.norm(dim=-1).repeat_interleave(gates.shape[1] // raw.shape[1], dim=1)
            for position in range(min(len(ids), SETTINGS.positions)):
                for head, pair in enumerate(zip(gates[position].tolist(), norms[position].tolist(), strict=True)):
                    rows.append((layer, head, position, *pair))
    table = pd.DataFrame(rows, columns=[*KEYS, "gate", "raw_value_norm"])
    return table.groupby(KEYS, as_index=False).mean()


@torch.no_grad()
def _seen(model: PreTrainedModel, ids: torch.Tensor) -> tuple[dict[int, list], dict[int, list]]:
    """Return outputs of the value projection and inputs of the output projection, before and after their hooks."""
    family = find_family(model)
    values: dict[int, list] = defaultdict(list)
    mixes: dict[int, list] = defaultdict(list)

    def keep_output(layer: int, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        values[layer].append(output.clone())

    def keep_input(layer: int, module: nn.Module, args: tuple) -> None:
        mixes[layer].append(args[0].clone())

    hooks = []
    for (layer, attention), first in product(family.attentions(model).items(), (True, False)):
        value, output = projections(model, family, layer)["value"].module, attention.get_submodule(family.output)
        hooks.append(value.register_forward_hook(partial(keep_output, layer), prepend=first))
        hooks.append(output.register_forward_pre_hook(partial(keep_input, layer), prepend=first))
    try:
        with in_double(model):
            model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return values, mixes


def ours(model: PreTrainedModel, side: str = "right", kernel: str = "sdpa", names: tuple = ("gate",)) -> pd.DataFrame:
    with in_double(model):
        return measured(model, batched(SEQUENCES, 2, side), SETTINGS, names, kernel)["gate"]


def assert_same(table: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(table[expected.columns], expected, rtol=1e-9, check_dtype=False)


@each_pair(NAMES, GATED)
def test_gates_and_raw_values_are_those_of_a_plain_forward(name: str, label: str) -> None:
    model = shared(name, label)
    measured_gates, expected = ours(model), direct(model)
    assert_same(measured_gates, expected)
    assert measured_gates["gate"].std() > 1e-6  # the gates differ
    assert_same(ours(model, "left", "eager"), expected)
    heads, groups = model.config.get_text_config().num_attention_heads, measured_gates["kv_head"].nunique()
    assert measured_gates["head"].nunique() == (heads if "output" in label else groups)
    assert (measured_gates["kv_head"] == measured_gates["head"] // (measured_gates["head"].nunique() // groups)).all()


def test_analyze_measures_gates_where_there_are_any() -> None:
    options: dict[str, Any] = {"input": "random", "num_seqs": 3, "seq_len": 12}
    model = retrofitted("llama", "vga", torch.float32)
    run = sinkscope.analyze(model, **options)
    gate = run.tables["gate"]
    assert list(gate.columns) == ["model", "condition", "layer", *column_names("gate")]
    first = gate["position"] == 0
    assert run.metric("gate_first") == pytest.approx(gate[first]["gate"].mean())
    assert run.metric("gate_later", 1) == pytest.approx(gate[~first & (gate["layer"] == 1)]["gate"].mean())
    assert "mean gate at position 0" in run.verdict
    assert "gate" in doctor(model).facts["observables"]


@pytest.mark.parametrize("model_type", ["qwen3_next", "afmoe"])
def test_own_gates_are_found_and_are_those_that_the_models_code_computes(model_type: str, tmp_path: Path) -> None:
    model = tiny_of(model_type)
    family, _ = family_of(model)
    assert family.gated
    ids = tiny_tokens(1, 12)
    np.save(tmp_path / "ids.npy", ids.numpy())
    run = sinkscope.analyze(model, input=tmp_path / "ids.npy", seq_len=12, positions=12, window=12, observables="gate")
    layer, attention = next(iter(family.attentions(model).items()))
    projection = attention.q_proj if model_type == "qwen3_next" else attention.gate_proj
    calls = calls_of(model, {"gate": projection, "output": attention.o_proj}, ids)
    ((_, projected),), ((taken,), _) = calls["gate"], calls["output"][0]
    by_head = projected.view(1, 12, model.config.num_attention_heads, -1)
    gate = torch.sigmoid(by_head.chunk(2, dim=-1)[1] if model_type == "qwen3_next" else by_head)
    mix = taken.view(gate.shape) / gate
    expected = (gate * mix.square()).sum(-1) / mix.square().sum(-1)
    gates = run.tables["gate"].query(f"layer == {layer}").pivot(index="position", columns="head", values="gate")
    np.testing.assert_allclose(gates.to_numpy(), expected[0].numpy(), rtol=1e-4)
    moments = run.tables["gate_heads"].query(f"layer == {layer}")
    np.testing.assert_allclose(moments["mean"], expected[0].mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments["deviation"], expected[0].std(0, correction=0), rtol=1e-3)


@pytest.mark.parametrize("label", ["vga", "iga-output", "vscale"])
def test_moments_of_gates_are_those_of_all_tokens(label: str) -> None:
    """`direct` returns a row for each token of a sequence that is no longer than the positions reported."""
    model = shared("llama", label)
    ids = [ids[: SETTINGS.positions - shorter] for shorter, ids in enumerate(SEQUENCES)]
    with in_double(model):
        moments = measured(model, batched(ids, 2), SETTINGS, ["gate"])["gate_heads"].set_index(["layer", "head"])
    gates = pd.concat([direct(model, [own]) for own in ids]).groupby(["layer", "head"])["gate"]
    near = {"check_names": False, "rtol": 1e-6}
    pd.testing.assert_series_equal(moments["mean"], gates.mean(), **near)
    pd.testing.assert_series_equal(moments["closed"], gates.agg(lambda gate: (gate < CLOSED).mean()), **near)
    pd.testing.assert_series_equal(moments["deviation"], gates.std(ddof=0), atol=1e-9, **near)
