"""No-op or broadcast: the terms of heads' outputs against loops in float64, and planted heads of both kinds."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from gradient_reference import in_double
from support.attention_reads import EACH_KIND, HEADS, WIDTH, causal_mask, dense, make_read
from tiny import batched, measured, ragged_tokens, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from sinkscope.attention.kernels import chunked_attention
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.observables.sink_output import SinkOutput
from sinkscope.models.families import find_family

norm = np.linalg.norm


def share(weights: np.ndarray, value: np.ndarray) -> float:
    """‖a[t,0] v_0‖ ÷ (‖a[t,0] v_0‖ + ‖Σ a[t,j] v_j‖) of one query, term by term."""
    first, rest = weights[0] * value[0], np.zeros_like(value[0])
    for weight, v in zip(weights[1:], value[1:], strict=True):
        rest = rest + weight * v
    return norm(first) / (norm(first) + norm(rest))


def effective_rank(x: np.ndarray) -> float:
    p = np.linalg.svd(x, compute_uv=False) ** 2
    p = p[p > 1e-30] / p.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def of_head(weights: np.ndarray, seen: np.ndarray, value: np.ndarray, into: np.ndarray) -> dict[str, float]:
    """The columns for one head of one sequence: weights (T,T), seen (T,T), value (T,d), and W_O's columns (D,d)."""
    queries = range(1, len(weights))
    shares = [share(weights[t], value) for t in queries]
    sizes = [norm(into @ v) for v in value]
    outputs = np.stack([weights[t] @ value for t in queries])
    without = np.stack([weights[t, 1:] @ value[1:] for t in queries])
    singular = np.linalg.svd(outputs @ into.T, compute_uv=False)
    return {
        "share": np.mean(shares),
        "share_spread": np.std(shares),
        "uniform_share": np.mean([share(seen[t] / seen[t].sum(), value) for t in queries]),
        "at_half": np.mean([weights[t, 0] >= 0.5 for t in queries]),
        "value_ratio": sizes[0] / np.mean(sizes[1:]),
        "effective_rank": effective_rank(outputs),
        "effective_rank_without": effective_rank(without),
        "stable_rank": (singular**2).sum() / singular[0] ** 2,
    }


def table_of(read: AttentionRead, projection: nn.Module | None = None) -> pd.DataFrame:
    observable = SinkOutput(Settings())
    if projection is not None:
        observable.projections[0] = projection
    observable.see_attention(0, read, read.batch)
    tables = observable.tables()
    means = tables["sink_output_by_sequence"].groupby("head", as_index=False).mean().drop(columns="sequence")
    pd.testing.assert_frame_equal(tables["sink_output"][means.columns], means, check_dtype=False, rtol=1e-5)
    return tables["sink_output_by_sequence"].set_index(["sequence", "head"])


@EACH_KIND
def test_the_columns_are_those_of_loops_under_every_mask_and_padding(
    kind: str, lengths: tuple[int, ...] | None, side: str
) -> None:
    torch.manual_seed(0)
    read = make_read(kind, lengths=lengths, side=side)
    linear = nn.Linear(HEADS * WIDTH, 17, dtype=torch.float64)
    matrix, transposed = linear.weight.detach().numpy(), Conv1D(17, HEADS * WIDTH).double()
    transposed.weight.data = linear.weight.data.T
    table = table_of(read, linear)
    pd.testing.assert_frame_equal(table, table_of(read, transposed))
    weights, _, _ = dense(read.query, read.key, read.value, read.call)
    for (sequence, head), row in table.iterrows():
        tokens = read.batch.attention_mask[sequence].bool().numpy()
        at = np.ix_(tokens, tokens)
        seen = causal_mask(len(tokens), window=5 if kind == "window" else None).numpy()[at]
        value = read.value[sequence, head // 2].numpy()[tokens]
        into = matrix[:, head * WIDTH : (head + 1) * WIDTH]
        assert row.kv_head == head // 2
        expected = of_head(weights[sequence, head].numpy()[at], seen, value, into)
        np.testing.assert_allclose(row[list(expected)], list(expected.values()), rtol=2e-6, atol=1e-7, err_msg=kind)


def test_without_a_plain_projection_the_values_themselves_are_compared() -> None:
    read = make_read("causal")
    plain = table_of(read)
    pd.testing.assert_frame_equal(plain, table_of(read, nn.Linear(HEADS * WIDTH + 1, 9)))  # it reads something else
    value = read.value.numpy()
    for (sequence, head), row in plain.iterrows():
        norms = norm(value[sequence, head // 2], axis=-1)
        assert row.value_ratio == pytest.approx(norms[0] / norms[1:].mean(), rel=1e-6)


def test_values_are_not_projected_where_a_projection_does_more_than_its_matrix() -> None:
    model, observable = tiny_model("llama"), SinkOutput(Settings())
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, output: 2 * output)
    observable.prepare(model, find_family(model), 0)
    assert set(observable.projections) == {0, 2}


def test_a_planted_no_op_and_a_planted_broadcast() -> None:
    """Every query gives position 0 nearly all of its attention; its value is tiny in one key head, large in another."""
    read = make_read("causal")
    query, key, value = torch.ones_like(read.query), -20 * torch.ones_like(read.key), read.value.clone()
    key[:, :, 0] = 0.0
    value[:, 0, 0], value[:, 1, 0] = 0.0, 100.0
    value[0, 0, 0, 0] = 1e-9
    _, lse = chunked_attention(query, key, value, read.call)
    table = table_of(replace(read, query=query, key=key, value=value, lse=lse))
    assert (table["at_half"] == 1).all()
    no_ops, broadcasts = (table[table["kv_head"] == number] for number in (0, 1))
    assert (no_ops["value_ratio"] < 1e-8).all()
    assert no_ops.loc[1, "share"].eq(0).all()  # the value is 0
    assert (broadcasts["value_ratio"] > 30).all()
    np.testing.assert_allclose(broadcasts[["share", "effective_rank", "stable_rank"]], 1, atol=1e-6)
    assert (broadcasts["effective_rank_without"] > 1.5).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_in_batches_a_model_has_the_numbers_of_each_sequence_alone(name: str, side: str) -> None:
    """The last sequence has no query after position 0."""
    model, sequences = tiny_model(name, dtype=torch.float64, spread=4.0), ragged_tokens([17, 12, 15, 1])
    with in_double(model):
        tables = measured(model, batched(sequences, 2, side), Settings(), ("sink-output",))
    family = find_family(model)
    rows = []
    for number, sequence in enumerate(reference.record_each(model, sequences[:-1])):
        for layer, attention in family.attentions(model).items():
            recorded, module = sequence.layers[layer], attention.get_submodule(family.output)
            matrix = (module.weight.T if isinstance(module, Conv1D) else module.weight).detach().numpy()
            heads, width = len(recorded.weights), recorded.value.shape[-1]
            for head in range(heads):
                value, into = recorded.value[head * len(recorded.value) // heads], matrix[:, head * width :][:, :width]
                columns = of_head(recorded.weights[head], recorded.allowed[head], value, into)
                rows.append({"layer": layer, "head": head, "sequence": number} | columns)
    expected = pd.DataFrame(rows).set_index(["layer", "sequence", "head"]).sort_index()
    by_sequence = tables["sink_output_by_sequence"].set_index(["layer", "sequence", "head"])
    assert by_sequence.xs(3, level="sequence")[expected.columns].isna().all(axis=None)
    np.testing.assert_allclose(by_sequence[expected.columns].dropna(), expected, rtol=2e-6, atol=1e-7)
    means = tables["sink_output"].set_index(["layer", "head"])[expected.columns]
    np.testing.assert_allclose(means, expected.groupby(["layer", "head"]).mean(), rtol=1e-6)
