"""Observables and running means in small exact cases; test_tracer.py tests complete models, also with padding."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from support.hooked import calls_of
from tiny import batched, measured, padded, ragged_tokens, tiny_model

from sinkscope.attention.kernels import AttentionCall, chunked_attention
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.activation import kurtosis, powers, value_norms
from sinkscope.measuring.observables.geometry import causal_pair_means, causal_pair_sums, masked_pair_means
from sinkscope.measuring.observables.massive import (
    SAMPLED,
    Massive,
    is_massive,
    median_magnitude,
    selected,
    selected_by_digits,
)
from sinkscope.measuring.observables.observable import Means, Reading, Settings, SiteStack
from sinkscope.measuring.one_pass import token_norms
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

ALIKE = ragged_tokens((9, 9, 9))


def test_a_running_mean_ignores_absent_values_and_is_in_float64() -> None:
    means, nan, inf = Means("position"), torch.nan, torch.inf
    parts = (([[1e8, 5.0, nan]], [[1, 1, 0]]), ([[1.0, nan, inf], [-1e8, 7.0, nan]], [[1, 0, 0], [1, 1, 0]]))
    for x, present in parts:  # in float32, 1e8 + 1 is 1e8
        means.add({"x": torch.tensor(x)}, torch.tensor(present, dtype=torch.bool), layer=3)
    np.testing.assert_allclose(means.table()["x"], [1 / 3, 6.0, nan], rtol=1e-12)


@pytest.mark.parametrize(("causal", "prefix"), [(True, 0), (True, 3), (False, 0)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_window_mass_under_uniform_attention_is_that_of_equal_logits(causal: bool, prefix: int, side: str) -> None:
    lengths, window = (4, 9), 3
    uniform_masses = padded(ragged_tokens(lengths), side).uniform(9, window, causal, prefix)
    for length, masses in zip(lengths, uniform_masses.tolist(), strict=True):
        seen = torch.ones(length, length) if not causal else torch.ones(length, length).tril()
        seen[:, :prefix] = 1
        weights = seen / seen.sum(1, keepdim=True)
        for key in range(length):
            queries = [t for t in range(length) if seen[t, key] and abs(t - key) < window]
            assert masses[key] == pytest.approx(float(weights[queries, key].mean()))


def uniform_read(length: int) -> AttentionRead:
    """Return uniform attention of two heads: all queries are 0."""
    key = torch.randn(1, 2, length, 4, dtype=torch.float64)
    query, call = torch.zeros_like(key), AttentionCall(None, 0.5)
    _, lse = chunked_attention(query, key, key, call)
    return AttentionRead(query, key, key, lse, call, padded(ragged_tokens((length,))))


def test_the_sink_indicator_is_strict() -> None:
    """All later tokens of a read whose first key is far ahead attend to it alone: α_0 = 1 exactly."""
    read = uniform_read(2)
    read.query[:], read.key[:] = 100.0, torch.tensor([100.0, -100.0]).double()[:, None]
    read = replace(read, lse=chunked_attention(read.query, read.key, read.key, read.call)[1])
    for epsilon, expected in ((1.0, 0.0), (np.nextafter(1.0, 0), 1.0)):
        observable = OBSERVABLES["attention"](Settings(positions=1, window=2, epsilon=epsilon))
        observable.see_attention(0, read, read.batch)
        observable.finish(read.batch)
        tables = observable.tables()
        assert tables["attention"]["sink_rate"].tolist() == [expected] * 2
        assert tables["sink_positions"]["position"].tolist() == [0, 0][: int(2 * expected)]


def norms_of(read: AttentionRead) -> dict[str, torch.Tensor]:
    key_norm = read.key.norm(dim=-1).repeat_interleave(read.query.shape[1] // read.key.shape[1], dim=1)
    return {"query_norm": read.query.norm(dim=-1), "key_norm": key_norm}


def pair_means(read: AttentionRead, columns: int) -> dict[str, torch.Tensor]:
    norms = norms_of(read)
    sums = causal_pair_sums(read, *norms.values(), columns)
    return causal_pair_means(**sums, norms=norms, scaling=read.call.scaling)


def test_a_key_that_no_query_compares_has_no_gap_and_a_zero_query_no_nan() -> None:
    read = uniform_read(1)  # one token sees only itself
    means = pair_means(read, 1)
    assert means["sink_logit_gap"].isnan().all()
    assert means["qk_norm_product"].isfinite().all()
    read = uniform_read(6)
    assert (pair_means(read, 6)["qk_cosine"] == 0).all()
    assert (masked_pair_means(read, *norms_of(read).values(), 6)["qk_cosine"] == 0).all()


def test_means_over_pairs_lose_nothing_at_the_last_positions() -> None:
    """In float32 the difference of two long sums would leave the round-off of a long sum there."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 2000, 8, generator=generator) for heads in (2, 1, 1)]
    batch = Batch(torch.zeros(1, 2000, dtype=torch.long), torch.ones(1, 2000, dtype=torch.long))
    by_dtype = {}
    for dtype in (torch.float32, torch.float64):
        query, key, value = (x.to(dtype) for x in tensors)
        read = AttentionRead(query, key, value, torch.zeros(1, 2, 2000, dtype=dtype), AttentionCall(None, 0.35), batch)
        by_dtype[dtype] = pair_means(read, 2000)
    for name, exact in by_dtype[torch.float64].items():
        torch.testing.assert_close(by_dtype[torch.float32][name].double(), exact, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_norms_whose_squares_overflow_are_computed_in_float32() -> None:
    half = torch.tensor([[[3e4, 4e4]]], dtype=torch.float16)
    batch = Batch(torch.zeros(1, 1), torch.ones(1, 1))
    assert token_norms(half).item() == pytest.approx(5e4, rel=1e-3)
    assert value_norms(half[:, None]).item() == pytest.approx(5e4, rel=1e-3)
    assert kurtosis(powers(half[:, None], batch), 2, batch).isfinite().all()


def hidden_state(median: float, *others: float) -> torch.Tensor:
    """Return a state (T,D) with this median magnitude and alternating signs, and with `others` as its first entries."""
    entries = torch.full((4, 25), median)
    entries[:, 1::2] *= -1
    entries.view(-1)[: len(others)] = torch.tensor(others)
    return entries


def massive_table(hidden: torch.Tensor) -> pd.DataFrame:
    batch = Batch(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    observable = Massive(Settings())
    observable.see_stack(SiteStack([(0, "layer_out", 0)], Reading(hidden[None, None], batch)), batch)
    observable.finish(batch)
    return observable.tables()["massive"]


@pytest.mark.parametrize(
    ("median", "entry", "massive"),
    [
        (0.125, 125.0, True),  # exactly 1000 × the median counts
        (0.125, np.nextafter(np.float32(125), np.float32(0)), False),
        (0.0625, 100.0, False),  # exactly 100 does not
        (0.0625, -np.nextafter(np.float32(100), np.float32(200)), True),
        (0.0, 101.0, True),
    ],
)
def test_the_criterion_is_above_100_and_at_least_1000_medians(median: float, entry: float, massive: bool) -> None:
    hidden = hidden_state(median, entry)
    assert bool(is_massive(hidden[0, 0].abs(), median_magnitude(hidden))) is massive
    rows = massive_table(hidden)
    assert bool(rows["is_massive"][0]) is massive
    assert rows["value"][0] == pytest.approx(entry)
    assert rows["median"].tolist() == [median] * 3


def test_every_massive_activation_is_listed_and_at_least_three_entries() -> None:
    for count in (0, 1, 3, 5):
        rows = massive_table(hidden_state(0.01, *[200.0 + n for n in range(count)]))
        assert rows["coordinate"].tolist()[:count] == list(reversed(range(count)))  # largest first
        assert rows["is_massive"].tolist() == [True] * count + [False] * max(0, 3 - count)


def test_selection_is_exact_for_any_sample() -> None:
    numbers = np.random.default_rng(0).integers(0, 1000, 5000)
    misleading = numbers.copy()
    misleading[::SAMPLED] += 2000  # all sampled numbers are above the rest
    for each in (numbers, misleading, -misleading, np.zeros_like(numbers), numbers[:7]):
        for place in (0, len(each) // 2, len(each) - 1):
            before = each.copy()
            assert selected(each, place) == np.sort(each)[place]
            assert np.array_equal(each, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_selection_by_digits_is_exact(dtype: torch.dtype) -> None:
    """Numbers that differ only in their last bits, equal numbers, zeros, the smallest and the largest of the dtype."""
    drawn = torch.randn(4, 3, 501, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    near = torch.ones((), dtype=dtype).nextafter(torch.tensor(2.0, dtype=dtype)) - 1  # the last bit of numbers near 1
    numbers = torch.stack([drawn[0], 1 + drawn[1].round() * near, drawn[2].round(), 1e-8 * drawn[3]]).to(dtype)
    numbers[0, 0, :2] = torch.tensor([torch.finfo(dtype).max, torch.inf], dtype=dtype)
    for place in (0, 250, 400, 500):
        expected = numbers.sort(-1).values[..., place]
        assert torch.equal(selected_by_digits(numbers, torch.tensor([place])).to(dtype), expected)
    places = torch.tensor([3, 70, 444, 500]).view(4, 1, 1)  # by row
    expected = numbers.sort(-1).values.gather(-1, places.expand(4, 3, 1))[..., 0]
    assert torch.equal(selected_by_digits(numbers, places).to(dtype), expected)


@pytest.mark.parametrize(("side", "size"), [("right", 1), ("left", 3)])
def test_other_tokens_at_the_coordinate_of_the_largest_entry_are_those_of_plain_states(side: str, size: int) -> None:
    model, sequences = tiny_model("llama", spread=1.0), ragged_tokens((9, 6, 2))
    arguments = (Settings(positions=4, window=4), ("massive",))
    table = measured(model, batched(sequences, size, side), *arguments)["massive_elsewhere"]
    assert len(table) == 3 * model.config.num_hidden_layers
    recorded = reference.record_each(model, sequences)
    for row in table.itertuples():
        entries = np.abs(recorded[row.sequence].layers[row.layer].sites["layer_out"])
        position, coordinate = np.unravel_index(entries.argmax(), entries.shape)
        assert (row.position, row.coordinate) == (position, coordinate)
        assert row.largest == pytest.approx(entries.max(), rel=1e-5)
        others = np.delete(entries[:, coordinate], position)
        assert row.elsewhere == pytest.approx(np.median(others), rel=1e-4)


def test_kurtosis_of_few_numbers_and_of_known_distributions() -> None:
    """It is not the excess kurtosis, and neither shift nor scale changes it; n-1 zeros and a one have n-2+1/(n-1)."""
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    batch = Batch(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long))
    for entries, expected, tolerance in (
        ([1.0, -1.0], 1.0, 1e-9),  # the smallest possible
        ([0.0] * 99 + [-4e4], 98 + 1 / 99, 1e-9),
        (quantiles, 1.8, 1e-6),
        (torch.special.ndtri(quantiles), 3.0, 1e-3),
    ):
        x = torch.as_tensor(entries, dtype=torch.float64)
        for shifted in (x, 3 - 2 * x, x + 100):
            computed = kurtosis(powers(shifted.view(1, 1, 1, -1), batch), len(x), batch)
            assert computed.item() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_outliers_of_norms_are_those_of_plain_hooks(name: str) -> None:
    model, family = tiny_model(name), find_family(tiny_model(name))
    norms = [site for site in ("attn_norm", "mlp_norm") if site in family.sites]
    modules = {
        (at, site): layer.get_submodule(family.sites[site].removesuffix(".output"))
        for at, layer in enumerate(family.layer_modules(model))
        for site in norms
    }
    seen = calls_of(model, modules, np.stack(ALIKE))
    table = measured(model, batched(ALIKE, 1), Settings(), ("outlier",))["outlier_norms"]
    assert len(table) == len(seen) == 3 * len(norms)
    for row in table.itertuples():
        ((_, output),) = seen[row.layer, row.site]
        x = output.double().flatten(1)
        centered = x - x.mean(1, keepdim=True)
        expected = (centered**4).mean(1) / (centered**2).mean(1) ** 2
        assert row.kurtosis == pytest.approx(float(expected.mean()), rel=1e-4)
        assert row.max_inf_norm == pytest.approx(float(x.abs().amax(1).mean()), rel=1e-5)
