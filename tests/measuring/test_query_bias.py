"""The query bias (Δ, γ, alignment), the terms of logits, and EPE against products by hand; where they do not apply."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gradient_reference import in_double
from tiny import batched, measured, ragged_tokens, tiny_model
from transformers import PreTrainedModel

import sinkscope
from sinkscope import InputError, Run
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.observables.query_bias import BINS, Moments, effective_bias
from sinkscope.models.families import find_family
from sinkscope.models.loading import LoadedModel
from sinkscope.models.projections import effective_positions, massive_coordinates, projections
from sinkscope.models.wiring import read_sites
from sinkscope.results.papers import paper_tables

BIASED = ("gpt2", "opt", "opt-post-norm", "qwen2", "phi", "gpt_neox", "gpt_neox-sequential", "bloom", "gpt_oss")
LEARNED = ("gpt2", "opt", "opt-post-norm")
LENGTHS = (9, 4, 12, 1, 7)
PAIRS = (9, 4, 12, 2, 7)  # every sequence has a later query
TERMS = ("logit-terms", "epe", "geometry")
POSITIONS, HEADS, WIDTH = 5, 4, 8


def double(name: str) -> PreTrainedModel:
    model = tiny_model(name.removesuffix("-by-layer"), dtype=torch.float32 if name == "gpt_oss" else torch.float64)
    if name == "gpt2-by-layer":  # an option of GPT-2: logits ÷ (layer + 1)
        for layer, block in enumerate(model.transformer.h):
            block.attn.scaling /= layer + 1
    return model


def exactly(model: PreTrainedModel) -> Any:
    return in_double(model) if model.dtype == torch.float64 else nullcontext()


def tables_of(
    model: PreTrainedModel, lengths: Sequence[int] = LENGTHS, names: Sequence[str] = ("query-bias",)
) -> dict[str, pd.DataFrame]:
    with exactly(model):
        return measured(model, batched(ragged_tokens(lengths), 2), Settings(positions=POSITIONS), names)


def factors(model: PreTrainedModel, layer: int) -> tuple[torch.Tensor, ...]:
    """Return W_q, W_k (H,d,D), b_Q and b_K (H,d) of a layer, each query head with the key head that it reads."""
    query, key = (projections(model, find_family(model), layer)[role] for role in ("query", "key"))
    w_k, b_k = (x.repeat_interleave(len(query.weight) // len(x), dim=0) for x in (key.weight, key.bias))
    return query.weight, w_k, query.bias, b_k


@cache
def found_and_expected(name: str) -> tuple[PreTrainedModel, dict[str, pd.DataFrame], list[dict[str, torch.Tensor]]]:
    """Return the tables, and by layer W_k, b_Q and Δ (H,T) of each sequence alone, from plain transformers."""
    model = double(name)
    family = find_family(model)
    sequences = ragged_tokens(LENGTHS)
    layers: list[dict[str, Any]] = []
    for layer in range(3):
        _, weight, bias, _ = factors(model, layer)
        layers.append({"weight": weight, "bias": bias, "deltas": []})
    with exactly(model):
        for ids in sequences:
            for record, sites in zip(layers, read_sites(model, family, torch.as_tensor(ids)[None]), strict=True):
                x = sites["layer_in" if name == "opt-post-norm" else "attn_norm"][0]
                keys = torch.einsum("hdc,tc->htd", record["weight"], x)
                record["deltas"].append((keys * record["bias"][:, None]).sum(-1))
    return model, tables_of(model), layers


def rows(table: pd.DataFrame, **where: Any) -> pd.DataFrame:
    for column, value in where.items():
        table = table[table[column] == value]
    return table


@pytest.mark.parametrize("name", BIASED)
def test_delta_and_gamma_are_products_of_weights_and_tokens(name: str) -> None:
    model, tables, layers = found_and_expected(name)
    tolerance = 1e-10 if model.dtype == torch.float64 else 1e-4
    for layer, record in enumerate(layers):
        padded = torch.full((len(LENGTHS), 1 + HEADS, max(LENGTHS)), torch.nan, dtype=torch.float64)
        for row, delta in zip(padded, record["deltas"], strict=True):
            row[:, : delta.shape[1]] = torch.cat([delta.sum(0, keepdim=True), delta])  # all heads together, then each
        of_layer = rows(tables["query_bias"], layer=layer).sort_values(["head", "position"])
        for column, expected in (("delta_mean", np.nanmean(padded, 0)), ("delta_std", np.nanstd(padded, 0))):
            np.testing.assert_allclose(of_layer[column], expected.flatten(), rtol=tolerance, atol=tolerance)
        together = padded[:, 0].numpy()
        by_sequence = rows(tables["query_bias_by_sequence"], layer=layer)
        np.testing.assert_allclose(by_sequence["delta"], together[:, 0], rtol=1e-4)
        longer = np.array(LENGTHS) > 1
        for column, average in (("delta_later", np.nanmean), ("delta_later_std", np.nanstd)):
            expected = average(together[longer, 1:], axis=1)
            np.testing.assert_allclose(by_sequence[column][longer], expected, rtol=1e-4, atol=1e-5)
        gamma = rows(tables["gamma"], layer=layer)
        expected = sum(record["weight"][head].T @ record["bias"][head] for head in range(4))
        np.testing.assert_allclose(gamma["gamma"], expected.numpy(), rtol=1e-5, atol=1e-6)
        bins = []
        for group, values in {"position 0": together[:, 0], "later": together[:, 1:]}.items():
            of_layer = rows(tables["delta_distribution"], layer=layer, group=group)
            bins.append(of_layer["delta"].to_numpy())
            assert len(of_layer) == BINS
            assert of_layer["count"].sum() == np.isfinite(values).sum()
            mean = np.average(of_layer["delta"], weights=of_layer["count"])
            assert abs(mean - np.nanmean(values)) <= 0.5 * np.diff(bins[0])[0]
        np.testing.assert_array_equal(*bins)
    if name not in LEARNED:  # without learned positions there is no EPE
        assert tables["query_bias"]["key_alignment"].isna().all()
        assert tables["gamma"]["epe_0"].isna().all()
        assert not tables["gamma"]["is_massive_epe"].any()


def test_a_small_spread_with_a_large_mean_is_kept() -> None:
    values = 1e8 + torch.arange(6.0, dtype=torch.float64).view(6, 1, 1)
    moments = Moments()
    for part in values.split(4):
        moments.add(part, torch.ones(part.shape[:2], dtype=torch.bool))
    count, mean, squares = moments.sums.flatten().tolist()
    assert mean == 1e8 + 2.5
    assert squares / count == pytest.approx(35 / 12, rel=1e-12)


@pytest.mark.parametrize("name", LEARNED)
def test_alignment_and_epe_of_learned_positions(name: str) -> None:
    """EPE is the first MLP's output for the bare positional vector, plus that vector."""
    model, tables, layers = found_and_expected(name)
    epe = effective_positions(model, find_family(model), 12)
    for layer, record in enumerate(layers):
        gamma = rows(tables["gamma"], layer=layer)
        np.testing.assert_allclose(gamma["epe_0"], epe[0], rtol=1e-12)
        assert gamma[gamma["is_massive_epe"]]["coordinate"].tolist() == massive_coordinates(epe[0])
        keys = torch.einsum("hdc,pc->phd", record["weight"], epe)
        together = torch.cosine_similarity(keys.flatten(1), record["bias"].flatten(), dim=-1)
        expected = torch.stack([together, *torch.cosine_similarity(keys, record["bias"], dim=-1).T])
        alignments = rows(tables["query_bias"], layer=layer).sort_values(["head", "position"])["key_alignment"]
        np.testing.assert_allclose(alignments, expected.flatten(), rtol=1e-9, atol=1e-12)


def gapped(*massive: float) -> torch.Tensor:
    """Return ordinary entries up to 1, with the massive entries at 3, 10, 17 …"""
    vector = torch.linspace(-1, 1, 100)
    for index, entry in enumerate(massive):
        vector[3 + 7 * index] = entry
    return vector


def test_massive_coordinates_are_set_apart_by_a_gap() -> None:
    for vector, expected in (
        (gapped(60.0, -25.0), [3, 10]),
        (gapped(1.9), []),  # no gap
        (gapped(4.0), []),  # a gap, but not far from the median
        (torch.cat([torch.tensor([9.0, 3.0]), 0.01 * torch.ones(8)]), [0, 1]),
        (2.0 ** -torch.arange(40.0), [0]),  # all gaps are equal: the first is taken
        (torch.zeros(10), []),
        (torch.tensor([5.0, *[0.0] * 9]), [0]),
    ):
        assert massive_coordinates(vector) == expected
        assert massive_coordinates(-3 * vector) == expected
        assert massive_coordinates(vector.flip(0)) == sorted(len(vector) - 1 - index for index in expected)


@cache
def terms_of(name: str) -> tuple[PreTrainedModel, dict[str, pd.DataFrame], list[list[dict[str, torch.Tensor]]]]:
    """Return the model, its tables, and for each sequence alone the sites (1,T,D) of each layer."""
    model = double(name)
    with in_double(model):
        sequences = map(torch.as_tensor, ragged_tokens(PAIRS))
        sites = [read_sites(model, find_family(model), ids[None]) for ids in sequences]
    return model, tables_of(model, PAIRS, names=TERMS), sites


def terms_by_hand(
    name: str, model: PreTrainedModel, layer: int, sites: dict[str, torch.Tensor]
) -> dict[str, list[float]]:
    """Return by term the means over heads and later queries of its value at position 0 and its mean at other keys."""
    x = sites["layer_in" if name == "opt-post-norm" else "attn_norm"][0]
    w_q, w_k, b_q, b_k = factors(model, layer)
    scaling = WIDTH**-0.5 / (layer + 1 if name == "gpt2-by-layer" else 1)
    query, key = (torch.einsum("hdc,tc->htd", weight, x) for weight in (w_q, w_k))
    pairs = {
        "content": query @ key.transpose(1, 2),
        "key bias": query @ b_k[..., None],
        "delta": b_q[:, None] @ key.transpose(1, 2),
        "biases": (b_q * b_k).sum(1)[:, None, None],
    }
    means = {}
    for term, products in pairs.items():
        by_key = scaling * products.expand(HEADS, len(x), len(x))
        others = torch.stack([by_key[:, t, 1 : t + 1].mean(1) for t in range(1, len(x))])
        means[term] = [float(by_key[:, 1:, 0].mean()), float(others.mean())]
    return means


@pytest.mark.parametrize("name", [*LEARNED, "gpt2-by-layer"])
def test_each_term_is_the_product_of_its_factors(name: str) -> None:
    """Their gaps add up to that of the logits."""
    model, tables, sites_of = terms_of(name)
    terms = tables["logit_terms_by_sequence"].set_index(["layer", "sequence", "term"])
    for sequence, layers in enumerate(sites_of):
        for layer, sites in enumerate(layers):
            for term, values in terms_by_hand(name, model, layer, sites).items():
                row = terms.loc[layer, sequence, term]
                np.testing.assert_allclose(row[["at_first", "at_others"]].astype(float), values, rtol=1e-6)
    gaps = (terms["at_first"] - terms["at_others"]).groupby(["layer", "sequence"]).sum()
    logits = tables["geometry_by_sequence"].groupby(["layer", "sequence"])["sink_logit_gap"].mean()
    pd.testing.assert_series_equal(gaps, logits, rtol=1e-5, atol=1e-6, check_names=False, check_dtype=False)


def test_a_rotated_query_has_no_effective_bias() -> None:
    """It is not a multiple of the projected query."""
    model = double("gpt2")
    projection = projections(model, find_family(model), 0)["query"]
    x = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = torch.einsum("hdc,tc->htd", projection.weight, x) + projection.bias[:, None]
    bias = effective_bias(projection, x, 0.3 * made)
    torch.testing.assert_close(bias, 0.3 * projection.bias)
    assert effective_bias(projection, x, made.roll(1, dims=-1)) is None


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_epe_and_the_states_of_the_first_layer(name: str) -> None:
    """The cosine of EPE with the first layer's mean output, and of b_Q with the key without EPE."""
    model, tables, sites_of = terms_of(name)
    epe = effective_positions(model, find_family(model), POSITIONS)
    states = [layers[0]["layer_out"][0] for layers in sites_of]
    cosines = tables["epe_by_group"].set_index(["group", "position"])["cosine"]
    assert sorted({group for group, _ in cosines.index}) == [-1, *range(len(PAIRS))]
    for (group, position), cosine in cosines.items():
        kept = [x[position] for at, x in enumerate(states) if at != group and len(x) > position]
        expected = torch.cosine_similarity(torch.stack(kept).mean(0), epe[position], dim=0)
        assert cosine == pytest.approx(float(expected), rel=1e-9)

    others = tables["epe_rest_by_sequence"].set_index(["layer", "sequence"])
    for sequence, layers in enumerate(sites_of):
        for layer, sites in enumerate(layers):
            _, w_k, b_q, _ = factors(model, layer)
            first = sites["layer_in"][0, 0]
            for column, x in (("cosine", first - epe[0]), ("cosine_whole", first)):
                expected = torch.cosine_similarity((w_k @ x).flatten(), b_q.flatten(), dim=0)
                assert others.loc[layer, sequence][column] == pytest.approx(float(expected), rel=1e-5, abs=1e-6)


def run_of(model: PreTrainedModel, **options: Any) -> Run:
    return sinkscope.analyze(model, **{"input": "random", "num_seqs": 3, "seq_len": 12, "positions": 4} | options)


NO_BIAS = "its queries have no bias"


def test_an_observable_that_does_not_apply_is_left_out_with_the_reason_and_rejected_by_name() -> None:
    model = tiny_model("llama")
    run = run_of(model)
    assert run.manifest["not_measured"] == {"query-bias": NO_BIAS}
    assert not {"query_bias", "gamma", "delta_distribution"} & set(run.tables)
    assert f"query-bias ({NO_BIAS})" in run.verdict
    with pytest.raises(InputError, match=f"observables=query-bias does not apply to .*: {NO_BIAS}"):
        run_of(model, observables=("attention", "query-bias"))
    with pytest.raises(InputError, match=f"figure 'gamma': query-bias does not apply to .*: {NO_BIAS}"):
        run.figure("gamma")


def with_massive_position() -> PreTrainedModel:
    """Return a gpt2 whose position 0 has a huge entry at coordinate 7, which every layer's bias reads."""
    model = tiny_model("gpt2", spread=1.0)
    model.transformer.wpe.weight[0, 7] += 30.0
    for block in model.transformer.h:
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        weight[7, 32:64] = 0.5 * bias[:32]
    return model


@pytest.fixture(scope="module")
def massive_run() -> Run:
    return run_of(with_massive_position(), num_seqs=5)


def test_the_summary_says_how_far_position_0_is_apart(massive_run: Run) -> None:
    run = massive_run
    assert run.manifest["not_measured"] == {}
    table, layers = rows(run.tables["query_bias"], head=-1), range(3)
    gaps = []
    for layer in layers:
        at = rows(table, layer=layer).set_index("position")
        assert run.metric("delta_first", layer) == at["delta_mean"][0]
        assert run.metric("delta_later", layer) == pytest.approx(at["delta_mean"][1:].mean())
        assert run.metric("key_alignment_first", layer) == at["key_alignment"][0]
        assert run.metric("key_alignment_later", layer) == pytest.approx(at["key_alignment"][1:].mean())
        gamma = rows(run.tables["gamma"], layer=layer)["gamma"].abs().to_numpy()
        assert run.metric("gamma_ratio", layer) == pytest.approx(gamma[7] / gamma.mean())
        later = at[1:]  # the gap is in standard deviations over all later tokens
        spread = ((later["delta_std"] ** 2).mean() + later["delta_mean"].var(ddof=0)) ** 0.5
        gaps.append((at["delta_mean"][0] - later["delta_mean"].mean()) / spread)
        assert run.metric("delta_gap", layer) == pytest.approx(gaps[-1])
    assert run.metric("delta_gap") == pytest.approx(np.mean(gaps))
    assert run.metric("delta_outlier_share") == np.mean(np.array(gaps) > 2) > 0
    assert "The query bias lifts the logits of position 0" in run.verdict
    assert "EPE₀ is massive at coordinate 7, where |γ| is" in run.verdict


@pytest.mark.real_model
def test_a_trained_gpt2_has_one_massive_coordinate_that_its_bias_reads(mgm: LoadedModel, tmp_path: Path) -> None:
    ids = torch.randint(5, 9000, (6, 64), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = mgm.model.config.bos_token_id
    np.save(tmp_path / "ids.npy", ids.numpy())
    run = sinkscope.analyze(mgm, input=tmp_path / "ids.npy", num_seqs=6, observables=("query-bias",))
    gamma = run.tables["gamma"]
    assert gamma[gamma["is_massive_epe"]]["coordinate"].unique().tolist() == [165]
    assert run.metric("gamma_ratio") > 4
    assert run.metric("key_alignment_first") > 0.4 > run.metric("key_alignment_later")
    assert paper_tables(run)["gamma"].columns.tolist() == ["layer", "baseline", "d=165"]
