"""Repeated tokens: states and attention against plain transformers and WSE's closed forms, in float64."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from gradient_reference import in_double
from support.every_model import tiny_of
from tiny import batched, measured, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.errors import InputError
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import family_of
from sinkscope.models.varied_llama import VariedLlamaConfig

LENGTH, HEADS = 12, 4
SEQUENCES = [np.full(LENGTH, token) for token in (7, 30, 61)]


def double(name: str) -> PreTrainedModel:
    return tiny_model(name, dtype=torch.float64, spread=4.0)


def table_of(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> pd.DataFrame:
    family, *_ = family_of(model)
    with in_double(model):
        tables = measured(model, batched(sequences, 2), Settings(), ("equal-tokens",), family=family)
    return tables["equal_tokens"].set_index(["layer", "sequence"])


def plain(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> dict[tuple[int, int], reference.Layer]:
    with in_double(model):
        recorded = reference.record_each(model, sequences)
    return {(at, number): layer for number, one in enumerate(recorded) for at, layer in enumerate(one.layers)}


def state_difference(layer: reference.Layer) -> float:
    states = layer.sites["layer_out"]
    return float(np.linalg.norm(states - states[0], axis=1).max() / np.linalg.norm(states[0]))


def causal_softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.where(np.tri(logits.shape[-1], dtype=bool), np.exp(logits), 0.0)
    return weights / weights.sum(-1, keepdims=True)


DISTANCE = np.arange(LENGTH)[:, None] - np.arange(LENGTH)


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_attention_to_the_first_token_against_its_bound(name: str) -> None:
    model = double(name)
    table = table_of(model, SEQUENCES)
    assert set(table["positions"]) == {"rotary"}
    for place, layer in plain(model, SEQUENCES).items():
        key_norm = np.linalg.norm(layer.key, axis=-1).repeat(HEADS // len(layer.key), axis=0)
        xi = np.linalg.norm(layer.query, axis=-1) * key_norm[:, :1] / np.sqrt(layer.query.shape[-1])
        bound = np.exp(2 * xi) / (np.exp(2 * xi) + np.arange(LENGTH))  # t − 1, counted from 1
        ratios = (layer.weights[:, :, 0] / bound)[:, 1:]
        assert table.loc[place, "bound_ratio"] == pytest.approx(ratios.max(), rel=1e-6)
        assert table.loc[place, "bound_share"] == (ratios <= 1).mean() == 1.0
        assert table.loc[place, "state_difference"] == pytest.approx(state_difference(layer), abs=1e-10)
        assert table.loc[place, "state_difference"] < 1e-10
        assert np.isnan(table.loc[place, "weight_difference"])


@pytest.mark.parametrize("name", ["mpt", "bloom", "falcon-alibi"])
def test_alibi_attention_has_the_published_slopes(name: str) -> None:
    model = double(name)
    table = table_of(model, SEQUENCES)
    assert set(table["positions"]) == {"alibi"}
    slopes = 2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)  # Press et al. 2022
    slopes /= np.sqrt(8) if name == "falcon-alibi" else 1.0  # Falcon scales them with the logits
    closed = causal_softmax(-slopes[:, None, None] * DISTANCE)
    for place, layer in plain(model, SEQUENCES).items():
        tolerance = 5e-3 if name == "falcon-alibi" else 1e-10  # its slopes are bfloat16's
        assert np.abs(layer.weights - closed).max() < tolerance
        assert table.loc[place, "weight_difference"] < tolerance
        assert np.isnan(table.loc[place, "bound_share"])


def test_without_positions_attention_is_uniform() -> None:
    model = tiny_of("smollm3").double()
    table = table_of(model, SEQUENCES)
    assert set(table["positions"]) == {"rotary", "none"}
    uniform = causal_softmax(np.zeros((LENGTH, LENGTH)))
    for place, layer in plain(model, SEQUENCES).items():
        expected = np.abs(layer.weights - uniform).max()
        if table.loc[place, "positions"] == "none":
            assert expected < 1e-10
            assert table.loc[place, "weight_difference"] == pytest.approx(expected, abs=1e-10)
        else:
            assert expected > 1e-4


@pytest.mark.parametrize("name", ["mpt", "llama", "gpt2"])
def test_tokens_that_differ_have_the_differences_of_plain_transformers(name: str) -> None:
    """In gpt2, learned positions make equal tokens differ."""
    model = double(name)
    sequences = [np.arange(3, 3 + LENGTH)] if name != "gpt2" else SEQUENCES
    table = table_of(model, sequences)
    for place, layer in plain(model, sequences).items():
        assert table.loc[place, "state_difference"] == pytest.approx(state_difference(layer), rel=1e-6)
        assert table.loc[place, "state_difference"] > 1e-2
    if name == "mpt":
        assert table["weight_difference"].min() > 1e-3


def test_only_repeated_tokens_are_measured() -> None:
    model = tiny_model("llama")
    run = sinkscope.analyze(model, input="repeated", num_seqs=2, seq_len=8, bos="never", skip_parity=True)
    assert len(run.tables["equal_tokens"]) == 2 * 3
    for options in ({"input": "random"}, {"input": "repeated", "bos": "always"}):
        run = sinkscope.analyze(
            model, num_seqs=2, seq_len=8, observables=("attention",), skip_parity=True, **{"bos": "never"} | options
        )
        assert "equal_tokens" not in run.tables
        assert "equal-tokens" not in run.manifest["not_measured"]
        with pytest.raises(InputError, match=r"equal-tokens does not apply .* not one and the same"):
            sinkscope.analyze(model, num_seqs=2, seq_len=8, observables=("equal-tokens",), **{"bos": "never"} | options)


def test_with_relative_positions_attention_depends_on_distances_alone() -> None:
    """T5's buckets, with a bias of each that is drawn; ragged copies of one token, and texts that differ."""
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = VariedLlamaConfig(**fields, vocab_size=64, position_scheme="relative")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.model.positions.by_bucket.weight.data.normal_(std=2.0)
    table = table_of(model, [*SEQUENCES, np.full(LENGTH - 4, 9)])
    assert set(table["positions"]) == {"relative"}
    assert table["weight_difference"].max() < 1e-10
    for place, layer in plain(model, SEQUENCES).items():
        uniform = causal_softmax(np.zeros((LENGTH, LENGTH)))
        assert np.abs(layer.weights - uniform).max() > 0.1
        assert table.loc[place, "state_difference"] < 1e-10
    assert table_of(model, [np.arange(3, 3 + LENGTH)])["weight_difference"].min() > 1e-3
