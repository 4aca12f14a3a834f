"""The four terms of logits, Δ by sequence, and the states that EPE explains, against products by hand in float64."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from gradient_reference import in_double
from tiny import batched, ragged_tokens, tiny_model
from transformers import PreTrainedModel

from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.observables.query_bias import Epe, LogitTerms, QueryBias, effective_bias
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.projections import projections
from sinkscope.models.wiring import read_sites

LENGTHS = (9, 4, 12, 2, 7)
POSITIONS, HEADS, WIDTH = 5, 4, 8
LEARNED = ("gpt2", "opt", "opt-post-norm", "gpt2-by-layer")
TERMS = ["biases", "content", "delta", "key bias"]


def double(name: str) -> PreTrainedModel:
    model = tiny_model(name.removesuffix("-by-layer"), dtype=torch.float64)
    if name == "gpt2-by-layer":  # an option of GPT-2: logits ÷ (layer + 1)
        for layer, block in enumerate(model.transformer.h):
            block.attn.scaling /= layer + 1
    return model


def tables_of(model: PreTrainedModel, size: int = 2, side: str = "right") -> dict[str, pd.DataFrame]:
    family = find_family(model)
    with in_double(model), open_tracer(model, family) as tracer:
        observables = [kind(Settings(positions=POSITIONS)) for kind in (QueryBias, LogitTerms, Epe)]
        for observable in observables:
            observable.prepare(model, family, 1)
        for batch in batched(ragged_tokens(LENGTHS), size, side):
            tracer.forward(batch, observables)
        return {name: table for observable in observables for name, table in observable.tables().items()}


def halves(attention: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights (H,d,D) and biases (H,d) of queries and keys."""
    if hasattr(attention, "c_attn"):  # (in, out), all queries, then all keys
        weight, bias = attention.c_attn.weight.T[:64], attention.c_attn.bias[:64]
    else:
        weight, bias = (
            torch.cat([getattr(attention.q_proj, part), getattr(attention.k_proj, part)]) for part in ("weight", "bias")
        )
    return list(weight.view(2, HEADS, WIDTH, 32)), list(bias.view(2, HEADS, WIDTH))


@cache
def measured(name: str) -> tuple[PreTrainedModel, dict[str, pd.DataFrame]]:
    model = double(name)
    return model, tables_of(model)


@cache
def plain_sites(name: str) -> list[list[dict[str, torch.Tensor]]]:
    """Return the sites (1,T,D) of each layer, for each sequence alone."""
    model, _ = measured(name)
    with in_double(model):
        return [read_sites(model, find_family(model), torch.as_tensor(ids)[None]) for ids in ragged_tokens(LENGTHS)]


def by_hand(name: str, layer: int, attention: Any, sites: dict[str, torch.Tensor]) -> dict[str, list[np.ndarray]]:
    """Return by term, for every later query and head, its value at position 0 and its mean over the other keys."""
    x = sites["layer_in" if name == "opt-post-norm" else "attn_norm"][0]
    (w_q, w_k), (b_q, b_k) = halves(attention)
    scaling = WIDTH**-0.5 / (layer + 1 if name == "gpt2-by-layer" else 1)
    found: dict[str, list[np.ndarray]] = {term: [] for term in TERMS}
    for t in range(1, len(x)):
        for head in range(HEADS):
            query, keys = w_q[head] @ x[t], x[: t + 1] @ w_k[head].T
            parts = {
                "content": keys @ query,
                "key bias": (query @ b_k[head]).expand(t + 1),
                "delta": keys @ b_q[head],
                "biases": (b_q[head] @ b_k[head]).expand(t + 1),
            }
            for term, part in parts.items():
                found[term].append(scaling * np.array([float(part[0]), float(part[1:].mean())]))
    return found


@pytest.mark.parametrize("name", LEARNED)
def test_each_term_is_the_product_of_its_factors(name: str) -> None:
    model, tables = measured(name)
    found = tables["logit_terms_by_sequence"].set_index(["layer", "sequence", "term"])
    attentions = find_family(model).attentions(model)
    for sequence, layers in enumerate(plain_sites(name)):
        for layer, sites in enumerate(layers):
            for term, values in by_hand(name, layer, attentions[layer], sites).items():
                row = found.loc[layer, sequence, term]
                np.testing.assert_allclose(row[["at_first", "at_others"]].astype(float), np.mean(values, 0), rtol=1e-6)


@pytest.mark.parametrize("name", LEARNED[:3])
def test_the_terms_gaps_add_up_to_the_logits_gap(name: str) -> None:
    model, tables = measured(name)
    rows = tables["logit_terms_by_sequence"]
    gaps = (rows["at_first"] - rows["at_others"]).groupby([rows["layer"], rows["sequence"]]).sum()
    twin = reference.eager_twin(model)
    for sequence, ids in enumerate(ragged_tokens(LENGTHS)):
        with in_double(twin):
            layers = reference.record(twin, ids).layers
        for layer, seen in enumerate(layers):
            expected = np.mean([
                [head[t, 0] - head[t, 1 : t + 1].mean() for t in range(1, len(ids))] for head in seen.logits
            ])  # fmt: skip
            assert gaps[layer, sequence] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "size", "side"), [("gpt2", 5, "right"), ("opt", 3, "left")])
def test_padding_and_batch_size_change_nothing(name: str, size: int, side: str) -> None:
    model, tables = measured(name)
    for table, found in tables_of(model, size, side).items():
        pd.testing.assert_frame_equal(found, tables[table], rtol=1e-5, atol=1e-6)


def test_only_models_with_query_biases_and_learned_positions_have_these_terms() -> None:
    for name in ("gpt2", "opt", "opt-post-norm", "gpt_neo", "qwen2", "bloom", "llama"):
        model = tiny_model(name)
        for kind in (LogitTerms, Epe):
            assert (kind.inapplicable(model, find_family(model)) is None) == (name in LEARNED), name


def test_a_rotated_query_has_no_effective_bias() -> None:
    """It is not a multiple of the projected query."""
    model = double("gpt2")
    projection = projections(model, find_family(model), 0)["query"]
    x = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = torch.einsum("hdc,tc->htd", projection.weight, x) + projection.bias[:, None]
    found = effective_bias(projection, x, 0.3 * made)
    torch.testing.assert_close(found, 0.3 * projection.bias)
    assert effective_bias(projection, x, made.roll(1, dims=-1)) is None


# --- Δ by sequence


@pytest.mark.parametrize("name", ["gpt2", "opt-post-norm"])
def test_deltas_mean_over_sequences_is_the_runs(name: str) -> None:
    model, tables = measured(name)
    found = tables["query_bias_by_sequence"].set_index(["layer", "sequence"])
    whole = tables["query_bias"].query("head == -1 and position == 0").set_index("layer")["delta_mean"]
    np.testing.assert_allclose(found["delta"].groupby("layer").mean(), whole, rtol=1e-5)
    attentions = find_family(model).attentions(model)
    for sequence, layers in enumerate(plain_sites(name)):
        for layer, sites in enumerate(layers):
            (_, w_k), (b_q, _) = halves(attentions[layer])
            x = sites["layer_in" if name == "opt-post-norm" else "attn_norm"][0]
            later = torch.einsum("hdc,tc,hd->t", w_k, x, b_q).numpy()[1:]
            row = found.loc[layer, sequence]
            assert row["delta_later"] == pytest.approx(later.mean(), rel=1e-5)
            assert row["delta_later_std"] == pytest.approx(later.std(), rel=1e-5, abs=1e-5)


# --- EPE


def epe_of(name: str, model: PreTrainedModel) -> torch.Tensor:
    if name.startswith("gpt2"):
        p, mlp = model.transformer.wpe.weight[:POSITIONS], model.transformer.h[0].mlp
        hidden = torch.nn.functional.gelu(p @ mlp.c_fc.weight + mlp.c_fc.bias, approximate="tanh")
        return p + hidden @ mlp.c_proj.weight + mlp.c_proj.bias
    p, first = model.model.decoder.embed_positions.weight[2 : 2 + POSITIONS], model.model.decoder.layers[0]
    return p + torch.relu(p @ first.fc1.weight.T + first.fc1.bias) @ first.fc2.weight.T + first.fc2.bias


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_epe_and_the_states_of_the_first_layer(name: str) -> None:
    """The cosine of EPE with the first layer's mean output, and of b_Q with the key without EPE."""
    model, tables = measured(name)
    epe = epe_of(name, model)
    states = [layers[0]["layer_out"][0] for layers in plain_sites(name)]
    found = tables["epe_by_group"].set_index(["group", "position"])["cosine"]
    assert sorted({group for group, _ in found.index}) == [-1, *range(len(LENGTHS))]
    for (group, position), cosine in found.items():
        kept = [x[position] for at, x in enumerate(states) if at != group and len(x) > position]
        expected = torch.cosine_similarity(torch.stack(kept).mean(0), epe[position], dim=0)
        assert cosine == pytest.approx(float(expected), rel=1e-9)

    rest = tables["epe_rest_by_sequence"].set_index(["layer", "sequence"])
    attentions = find_family(model).attentions(model)
    for sequence, layers in enumerate(plain_sites(name)):
        for layer, sites in enumerate(layers):
            (_, w_k), (b_q, _) = halves(attentions[layer])
            first = sites["layer_in"][0, 0]
            for column, x in (("cosine", first - epe[0]), ("cosine_whole", first)):
                expected = torch.cosine_similarity((w_k @ x).flatten(), b_q.flatten(), dim=0)
                assert rest.loc[layer, sequence][column] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
