"""Super weights, scores of heads and over-mixing against plain transformers, in float64."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from gradient_reference import in_double
from support.hooked import calls_of
from tiny import TINY, batched, measured, padded, ragged_tokens, tiny_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.observables.over_mixing import SUBSTITUTIONS, substituted
from sinkscope.measuring.observables.super_weight import SuperWeight
from sinkscope.models.families import find_family
from sinkscope.models.feed_forward import feed_forwards

SEQUENCES = ragged_tokens([17, 12, 15])


def double(name: str) -> PreTrainedModel:
    return tiny_model(name, dtype=torch.float64, spread=4.0)


def table_of(model: PreTrainedModel, name: str, side: str = "left") -> dict[str, pd.DataFrame]:
    with in_double(model):
        return measured(model, batched(SEQUENCES, 2, side), Settings(), (name,))


def recorded(model: PreTrainedModel, module: nn.Module, ids: Any) -> tuple[tuple, torch.Tensor]:
    """Return the arguments and the output of a module in a plain call."""
    return calls_of(model, {"": module}, torch.as_tensor(ids)[None])[""][0]


@pytest.mark.parametrize("name", TINY)
def test_every_family_has_the_map_that_ends_its_feed_forward_network(name: str) -> None:
    model = double(name)
    parts = feed_forwards(model, find_family(model))
    assert list(parts) == [0, 1, 2]
    for part in parts.values():
        args, output = recorded(model, part.module, SEQUENCES[0])
        total = torch.zeros_like(output).flatten(0, -2)
        for expert, tokens, u in part.inputs(args):
            m = u @ part.weight(expert).T + (0 if part.bias(expert) is None else part.bias(expert))
            routing = (args[2] * (args[1] == expert)).sum(-1, keepdim=True)[tokens] if part.experts else 1
            total.index_add_(0, tokens, m * routing)
        torch.testing.assert_close(total.view_as(output), output, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "falcon-new", "mpt"])
def test_the_pair_is_that_of_the_largest_entry_that_the_layer_adds(name: str) -> None:
    model = double(name)
    table = table_of(model, "super-weight")["super_weights"].set_index(["layer", "sequence"])
    for number, sequence in enumerate(reference.record_each(model, SEQUENCES)):
        layers, ids = sequence.layers, sequence.ids
        for layer, part in feed_forwards(model, find_family(model)).items():
            (u,), m = recorded(model, part.module, ids)
            added = np.abs(layers[layer].sites["mlp_out"])
            position, row = np.unravel_index(added.argmax(), added.shape)
            u, m = u.flatten(0, -2)[position], m.flatten(0, -2)[position]
            column = int(u.abs().argmax())
            weight = part.module.weight.T if isinstance(part.module, Conv1D) else part.module.weight
            pair = table.loc[layer, number]
            assert (pair["position"], pair["row"], pair["column"], pair["expert"]) == (position, row, column, -1)
            expected = (layers[layer].sites["mlp_out"][position, row], u[column], m[row], weight[row, column])
            np.testing.assert_allclose(pair[["written", "input", "output", "weight"]].astype(float), expected, 1e-6)
            assert pair["share"] == pytest.approx(float(weight[row, column] * u[column] / m[row]), rel=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_an_expert_is_as_large_as_its_largest_output_on_a_real_token(name: str) -> None:
    model = double(name)
    tables = table_of(model, "super-weight")
    largest = tables["super_experts"].set_index(["layer", "expert"])["largest"]
    expected: dict[tuple[int, int], float] = {}
    for ids in SEQUENCES:
        for layer, part in feed_forwards(model, find_family(model)).items():
            args, _ = recorded(model, part.module, ids)
            for expert, _, u in part.inputs(args):
                m = u @ part.weight(expert).T + (0 if part.bias(expert) is None else part.bias(expert))
                expected[layer, expert] = max(expected.get((layer, expert), 0.0), float(m.abs().max()))
    assert largest.to_dict() == pytest.approx(expected, rel=1e-6)
    chosen = tables["super_weights"]
    assert {(row.layer, row.expert) for row in chosen.itertuples()} <= expected.keys()


def test_a_super_expert_is_far_above_the_others_and_early() -> None:
    """It is above the 99.5th percentile, not only above a tenth of the largest, in the first ¾ of five layers."""
    observable = SuperWeight(Settings())
    observable.experts.update({(layer, expert): torch.tensor(1.0) for layer in range(5) for expert in range(80)})
    observable.experts.update({(3, 7): torch.tensor(100.0), (4, 2): torch.tensor(99.0), (2, 1): torch.tensor(50.0)})
    number = dict.fromkeys(("sequence", "position", "token_id", "row", "column", "expert"), 0)
    observable.rows.add({"layer": np.arange(5), "weight": 1.0, "input": 1.0, "output": 1.0, "written": 1.0} | number)
    experts = observable.tables()["super_experts"]
    assert [*zip(*experts[experts["is_super"]][["layer", "expert"]].to_numpy().T, strict=True)] == [(3, 7)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_scores_of_heads(name: str) -> None:
    model = double(name)
    scores = table_of(model, "head-scores")["head_scores"].set_index(["layer", "head"])
    norms, masses = [], []
    for sequence in reference.record_each(model, SEQUENCES):
        weights = np.stack([layer.weights for layer in sequence.layers])  # (L,H,T,T)
        outputs = [
            recorded(model, attention.get_submodule(find_family(model).output), sequence.ids)[0][0]
            for attention in find_family(model).attentions(model).values()
        ]
        mix = torch.stack([x[0].unflatten(-1, (4, -1)) for x in outputs])  # (L,T,H,d)
        norms.append(mix.norm(dim=-1).mean(1).numpy())
        masses.append(weights[..., 0].mean(-1))
    relative = [norm / norm.mean(1, keepdims=True) for norm in norms]
    for column, values in (("output_norm", norms), ("relative_norm", relative), ("first_mass", masses)):
        np.testing.assert_allclose(scores[column].unstack(), np.mean(values, axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_change_of_later_tokens_by_a_changed_one(name: str, side: str) -> None:
    model = double(name)
    tables = table_of(model, "over-mixing", side)
    by_sequence = tables["over_mixing_by_sequence"].set_index(["layer", "sequence"])["change"]
    at_distance: dict[tuple[int, int], list[float]] = {}

    def states_of(ids: np.ndarray) -> list[np.ndarray]:
        return [layer.sites["layer_out"] for layer in reference.record(model, ids).layers]

    for number, ids in enumerate(SEQUENCES):
        means: dict[int, list[float]] = {}
        for nth in range(1, SUBSTITUTIONS + 1):
            changed_ids = substituted(padded([ids]), nth / (SUBSTITUTIONS + 1))[0].numpy()
            (at,) = np.flatnonzero(changed_ids != ids)
            assert changed_ids[at] in ids
            assert 0 < at < len(ids) - 1
            for layer, (before, after) in enumerate(zip(states_of(ids), states_of(changed_ids), strict=True)):
                change = np.linalg.norm(before - after, axis=1) / np.linalg.norm(before, axis=1)
                assert (change[:at] == 0).all()
                means.setdefault(layer, []).append(change[at + 1 :].mean())
                for distance, value in enumerate(change[at + 1 :], 1):
                    at_distance.setdefault((layer, 1 << (distance.bit_length() - 1)), []).append(value)
        for layer, values in means.items():
            assert by_sequence[layer, number] == pytest.approx(np.mean(values), rel=1e-6)
    changes = tables["over_mixing"].set_index(["layer", "distance"])["change"]
    assert changes.to_dict() == pytest.approx({key: np.mean(values) for key, values in at_distance.items()}, rel=1e-6)


def test_a_token_is_replaced_by_the_nearest_other_one_after_it_or_else_before_it() -> None:
    """A sequence of equal tokens has none, and position 0 neither changes nor counts."""
    batch = padded([np.full(9, 5), np.array([3, 4])])
    assert torch.equal(substituted(batch, 0.5), batch.token_ids)
    batch = padded([np.array([1, 2, 3, 7, 7, 7]), np.array([1, 2, 3, 7, 7, 5]), np.array([6, 3, 4, 5])], "left")
    expected = padded([np.array([1, 2, 3, 3, 7, 7]), np.array([1, 2, 3, 5, 7, 5]), np.array([6, 3, 5, 5])], "left")
    assert torch.equal(substituted(batch, 0.6), expected.token_ids)
