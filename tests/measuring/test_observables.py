"""Observables, batches and running means in small exact cases; test_tracer.py tests complete models."""

import numpy as np
import pandas as pd
import pytest
import torch
from support.attention_reads import EACH_KIND, EACH_PADDING, make_read, scored
from tiny import FORWARD, batched, measured, padded, ragged_tokens, tiny_model

from sinkscope.attention import weights as attention_weights
from sinkscope.attention.kernels import AttentionCall, chunked_attention
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables import OBSERVABLES, geometry
from sinkscope.measuring.observables.activation import (
    SITES,
    infinity_norm,
    kurtosis,
    token_norms,
    token_peaks,
    value_norms,
)
from sinkscope.measuring.observables.attention import Attention, mean_over_queries, window_means
from sinkscope.measuring.observables.geometry import causal_pair_means, masked_pair_means, pair_means, sum_from
from sinkscope.measuring.observables.massive import (
    SAMPLED,
    Massive,
    is_massive,
    largest_entries,
    median_magnitude,
    selected,
)
from sinkscope.measuring.observables.observable import ATTENTION_SITES, Mean, Reading, Settings, long_form
from sinkscope.measuring.tables import column_names
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

LEFT = padded(ragged_tokens((3, 5)), "left")  # columns 2 … 4 and 0 … 4 are real
ALIKE = ragged_tokens((9, 9, 9))


# --------------------------------------------------------------------------------------------- batches


def test_a_batch_knows_where_its_sequences_begin_and_end() -> None:
    assert LEFT.start.tolist() == [2, 0]
    assert LEFT.lengths.tolist() == [3, 5]
    assert LEFT.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert LEFT.valid.tolist() == [[False, False, True, True, True], [True] * 5]
    assert LEFT.present(4).tolist() == [[True, True, True, False], [True] * 4]
    assert LEFT.queries(5).tolist() == [[3, 2, 1, 1, 1], [5, 4, 3, 2, 1]]
    assert [LEFT.columns(2), LEFT.columns(9), padded(ragged_tokens((3, 5))).columns(2)] == [4, 5, 2]
    unpadded = padded(ragged_tokens((4, 4)))
    assert unpadded.valid is unpadded.present(4) is None
    assert unpadded.present(5).tolist() == [[True] * 4 + [False]] * 2


def test_columns_become_positions() -> None:
    columns = torch.arange(10.0).view(2, 1, 5)
    at = LEFT.at_positions(columns, 3)
    assert at.tolist() == [[[2.0, 3.0, 4.0]], [[5.0, 6.0, 7.0]]]
    assert LEFT.at_positions(columns[:, 0], 3).tolist() == at[:, 0].tolist()
    assert padded(ragged_tokens((3, 5))).at_positions(columns, 3)[:, 0].tolist() == [[0.0, 1, 2], [5.0, 6, 7]]


# ----------------------------------------------------------------------------------------------- means


def test_a_running_mean_does_not_depend_on_the_batches() -> None:
    x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    present = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    expected = [[x[present[:, p], h, p].double().mean() for p in range(3)] for h in range(2)]
    for size in (1, 2, 4, 6):
        mean = Mean()
        for at in range(0, 6, size):
            mean.add("key", x[at : at + size], present[at : at + size])
        np.testing.assert_allclose(mean["key"], expected, rtol=1e-12)


def test_a_running_mean_ignores_absent_values_and_is_in_float64() -> None:
    mean = Mean()
    mean.add("key", torch.tensor([[1.0, torch.nan], [3.0, 5.0]]), torch.tensor([[True, False], [True, True]]))
    assert mean["key"].tolist() == [2.0, 5.0]
    mean.add("other", torch.tensor([[1.0, torch.inf]]), torch.tensor([[True, False]]))
    np.testing.assert_array_equal(mean["other"], [1.0, np.nan])
    mean.add("at once", torch.tensor([1e8, 1.0, -1e8]))  # in float32, 1e8 + 1 is 1e8
    for entry in (1e8, 1.0, -1e8):
        mean.add("one by one", torch.tensor([[entry]]))
    assert mean["at once"] == mean["one by one"] == pytest.approx(1 / 3, rel=1e-12)


def test_long_form_has_one_row_per_entry() -> None:
    frame = long_form({"layer": 7, "head": range(2), "position": range(3)}, {"x": np.arange(6).reshape(2, 3)})
    assert frame.columns.tolist() == ["layer", "head", "position", "x"]
    assert frame.to_numpy().tolist() == [[7, h, p, 3 * h + p] for h in range(2) for p in range(3)]


# ------------------------------------------------------------------------------------------- attention


def uniform_read(length: int, batch: Batch | None = None) -> AttentionRead:
    """Return uniform attention of two heads: all queries are 0."""
    batch = batch or padded(ragged_tokens((length,)))
    sequences = len(batch.token_ids)
    key = torch.randn(sequences, 2, length, 4, dtype=torch.float64)
    query = torch.zeros_like(key)
    seen = torch.ones(length, length, dtype=torch.bool).tril() & batch.attention_mask.bool()[:, None, None]
    call = AttentionCall(None if batch.valid is None else seen, 0.5)
    _, lse = chunked_attention(query, key, key, call)
    return AttentionRead(query, key, key, lse, call, batch)


def table(name: str, read: AttentionRead, settings: Settings) -> dict[str, pd.DataFrame]:
    observable = OBSERVABLES[name](settings)
    observable.see_attention(0, read, read.batch)
    return observable.tables()


@pytest.mark.parametrize("batch", [None, padded(ragged_tokens((20, 12)), "left")], ids=["one", "padded"])
def test_uniform_attention_has_the_exact_statistics(batch: Batch | None) -> None:
    """a[t,s] = 1/(t+1): α_s, M̄_s and S̄_s are means of 1/(t+1) and 1/(t+1)², the entropy is the mean of log(t+1)."""
    positions, window = 16, 8
    tables = table("attention", uniform_read(20, batch), Settings(positions=positions, window=window, epsilon=0.3))
    lengths = [20] if batch is None else batch.lengths.tolist()
    weights = [1 / np.arange(1, length + 1) for length in lengths]
    rows = tables["attention"].query("head == 1").set_index("position")
    assert len(rows) == positions
    for s in range(positions):
        present = [row for row in weights if len(row) > s]
        alphas = [row[s : s + window].mean() for row in present]
        assert rows["window_mass"][s] == pytest.approx(np.mean(alphas), rel=1e-12)
        assert rows["sink_mass"][s] == pytest.approx(np.mean([row[s:].mean() for row in present]), rel=1e-12)
        second = np.mean([(row[s:] ** 2).mean() for row in present])
        assert rows["sink_second_moment"][s] == pytest.approx(second, rel=1e-12)
        assert rows["sink_rate"][s] == np.mean([alpha > 0.3 for alpha in alphas])
    heads = tables["attention_heads"]
    entropy = np.mean([np.log(np.arange(1, length + 1)).mean() for length in lengths])
    np.testing.assert_allclose(heads["attention_entropy"], entropy, rtol=1e-12)
    assert (heads["missing_mass"] == 0).all()


def test_the_sink_indicator_is_strict() -> None:
    """α_0 of two tokens under uniform attention is (1 + ½)/2 = ¾ exactly."""
    for epsilon, expected in ((0.75, 0.0), (np.nextafter(0.75, 0), 1.0)):
        tables = table("attention", uniform_read(2), Settings(positions=1, window=2, epsilon=epsilon))
        assert tables["attention"]["sink_rate"].tolist() == [expected] * 2
        sinks = tables["sink_positions"].query("position == 0")
        assert len(sinks) == 2 * expected


def test_the_sink_indicator_is_computed_per_sequence() -> None:
    """The mean is above ε, and half of the sequences are below it."""
    batch = padded(ragged_tokens((2, 8)))
    tables = table("attention", uniform_read(8, batch), Settings(positions=1, window=8, epsilon=0.5))
    row = tables["attention"].iloc[0]
    alphas = [(1 + 1 / 2) / 2, np.mean(1 / np.arange(1, 9))]
    assert row["window_mass"] == pytest.approx(np.mean(alphas))
    assert np.mean(alphas) > 0.5 > alphas[1]
    assert row["sink_rate"] == 0.5


def test_sinks_are_listed_at_every_position_with_their_token() -> None:
    batch = Batch(torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.ones(2, 3, dtype=torch.long), first=4)
    # `positions` does not bound where sinks are looked for
    observable = Attention(Settings(positions=1, window=2, epsilon=0.4))
    read = uniform_read(3, batch)
    observable.see_attention(3, read, batch)
    sinks = observable.tables()["sink_positions"].query("head == 0")
    # α: (1 + ½)/2, (½ + ⅓)/2, ⅓
    assert sinks["layer"].tolist() == [3] * 4
    assert sinks[["sequence", "position", "token_id"]].to_numpy().tolist() == [
        [4, 0, 5],
        [4, 1, 6],
        [5, 0, 8],
        [5, 1, 9],
    ]
    np.testing.assert_allclose(sinks["window_mass"], [0.75, 5 / 12] * 2)


def test_a_run_without_sinks_has_an_empty_list() -> None:
    sinks = table("attention", uniform_read(5), Settings(positions=1, window=5, epsilon=0.99))["sink_positions"]
    assert sinks.empty
    assert sinks.columns.tolist() == ["layer", "head", "sequence", "position", "token_id", "queries", "window_mass"]


def test_windows_of_all_tokens_and_of_one() -> None:
    """With W = T window mass is sink mass; with W = 1 it is a token's weight on itself."""
    read = make_read("causal")
    rows = table("attention", read, Settings(positions=23, window=23))["attention"]
    np.testing.assert_allclose(rows["window_mass"], rows["sink_mass"], rtol=1e-12)
    rows = table("attention", read, Settings(positions=23, window=1))["attention"]
    weights, _ = read.weights(slice(0, 23), slice(0, 23))
    np.testing.assert_allclose(rows["window_mass"], weights.diagonal(dim1=-2, dim2=-1).mean(0).flatten(), rtol=1e-12)


def test_key_value_heads_are_numbered_by_group() -> None:
    for name in ("attention", "geometry"):
        rows = table(name, make_read("causal"), Settings(positions=2, window=2))[name]
        assert rows.groupby("head")["kv_head"].first().tolist() == [0, 0, 1, 1]


def test_means_over_queries_leave_padding_out() -> None:
    window_sums = torch.ones(2, 1, 5)
    expected = [[1 / 2, 1 / 2, 1], [1 / 2, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(window_means(window_sums, padded(ragged_tokens((3, 5)), "left"), 2, 3)[:, 0], expected)
    rows = torch.tensor([[[torch.nan, 7.0, 1.0, 2.0, 3.0]], [[1.0, 1.0, 1.0, 1.0, 6.0]]])
    assert mean_over_queries(rows, LEFT.valid)[:, 0].tolist() == [2.0, 2.0]


# -------------------------------------------------------------------------------------------- geometry


def dense_pairs(read: AttentionRead, columns: int) -> dict[str, torch.Tensor]:
    """Average cosine, product of norms and logit gap over the pairs (t, s) in which t may attend to s; else NaN."""
    every = slice(0, read.length)
    logits, allowed = read.logits(every, every), read.allowed(every, every)
    seen = allowed.expand_as(logits).double()
    key = read.key.repeat_interleave(read.query.shape[1] // read.key.shape[1], dim=1)
    norms = read.query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
    others = seen.sum(-1, keepdim=True) - 1
    rest = ((logits.masked_fill(~allowed, 0.0)).sum(-1, keepdim=True) - logits) / others
    compared = seen * (others > 0)
    pairs = {
        "qk_cosine": (read.query @ key.transpose(-1, -2) / norms, seen),
        "qk_norm_product": (norms, seen),
        "sink_logit_gap": (logits - rest, compared),
    }
    return {
        name: (x.masked_fill(weight == 0, 0.0).sum(2) / weight.sum(2))[..., :columns]
        for name, (x, weight) in pairs.items()
    }


def norms_of(read: AttentionRead) -> tuple[torch.Tensor, torch.Tensor]:
    heads = read.query.shape[1]
    return read.query.norm(dim=-1), read.key.norm(dim=-1).repeat_interleave(heads // read.key.shape[1], dim=1)


@EACH_KIND
def test_pair_means_are_those_of_the_loops(kind: str, lengths: tuple | None, side: str) -> None:
    read = make_read(kind, length=23, lengths=lengths, side=side)
    means, expected = pair_means(read, *norms_of(read), 23), dense_pairs(read, 23)
    for name, truth in expected.items():
        real = ~truth.isnan()
        torch.testing.assert_close(means[name][real], truth[real], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("columns", [1, 5, 23])
def test_sums_of_queries_give_the_same_as_pairs_of_tokens(columns: int) -> None:
    """The sums in O(T·d) equal those over pairs in O(T²): Σ_{t≥s} q_t·k_s = k_s · Σ_{t≥s} q_t."""
    read = make_read("causal")
    fast, slow = (means(read, *norms_of(read), columns) for means in (causal_pair_means, masked_pair_means))
    for name in fast:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-10, atol=1e-12)


def test_the_row_chunk_changes_no_pair_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    read = make_read("softcap")
    whole = masked_pair_means(read, *norms_of(read), 23)
    monkeypatch.setattr(attention_weights, "ROW_CHUNK", 0)  # so that no logits are kept
    for rows in (1, 7):
        monkeypatch.setattr(
            geometry, "row_chunks", lambda length, rows=rows: attention_weights.row_chunks(length, rows)
        )
        for name, mean in masked_pair_means(make_read("softcap"), *norms_of(read), 23).items():
            torch.testing.assert_close(mean, whole[name], rtol=1e-11, atol=1e-13)


@EACH_PADDING
def test_scores_of_the_models_own_give_the_same_pair_means(lengths: tuple | None, side: str) -> None:
    plain = make_read("bool mask", lengths=lengths, side=side)
    own = scored(plain)
    expected = dense_pairs(plain, 23)
    for name, mean in pair_means(own, *norms_of(own), 23).items():
        real = ~expected[name].isnan()
        torch.testing.assert_close(mean[real], expected[name][real], rtol=1e-9, atol=1e-11)


def test_a_key_that_no_query_compares_has_no_gap() -> None:
    read = uniform_read(1)  # one token sees only itself
    means = pair_means(read, *norms_of(read), 1)
    assert means["sink_logit_gap"].isnan().all()
    assert means["qk_norm_product"].isfinite().all()


def test_equal_keys_have_no_gap_and_parallel_ones_cosine_one() -> None:
    vector = torch.tensor([1.0, 2.0, -2.0, 0.5], dtype=torch.float64)
    key = vector.expand(1, 2, 6, 4)
    query = vector * torch.arange(1, 7, dtype=torch.float64)[:, None].expand(1, 2, 6, 1)
    call = AttentionCall(None, 0.5)
    _, lse = chunked_attention(query, key, key, call)
    read = AttentionRead(query, key, key, lse, call, padded(ragged_tokens((6,))))
    means = pair_means(read, *norms_of(read), 6)
    torch.testing.assert_close(means["qk_cosine"], torch.ones(1, 2, 6, dtype=torch.float64))
    torch.testing.assert_close(means["sink_logit_gap"], torch.zeros(1, 2, 6, dtype=torch.float64), rtol=0, atol=1e-13)
    lengths = torch.arange(1, 7, dtype=torch.float64) * vector.norm() ** 2
    expected = torch.stack([lengths[s:].mean() for s in range(6)])
    torch.testing.assert_close(means["qk_norm_product"], expected.expand(1, 2, 6))


def test_a_zero_query_has_no_direction_and_no_nan() -> None:
    read = uniform_read(6)
    for means in (causal_pair_means, masked_pair_means):
        assert (means(read, *norms_of(read), 6)["qk_cosine"] == 0).all()


def test_sums_from_a_position_on() -> None:
    x = torch.arange(12.0).view(2, 6)
    assert sum_from(x, 4).tolist() == [[float(row[s:].sum()) for s in range(4)] for row in x]


def test_means_over_pairs_lose_nothing_at_the_last_positions() -> None:
    """In float32 the difference of two long sums would leave the round-off of a long sum there."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 2000, 8, generator=generator) for heads in (2, 1, 1)]
    batch = Batch(torch.zeros(1, 2000, dtype=torch.long), torch.ones(1, 2000, dtype=torch.long))
    found = {}
    for dtype in (torch.float32, torch.float64):
        query, key, value = (x.to(dtype) for x in tensors)
        read = AttentionRead(query, key, value, torch.zeros(1, 2, 2000, dtype=dtype), AttentionCall(None, 0.35), batch)
        found[dtype] = causal_pair_means(read, query.norm(dim=-1), key.norm(dim=-1).expand(1, 2, -1), 2000)
    for name, exact in found[torch.float64].items():
        torch.testing.assert_close(found[torch.float32][name].double(), exact, rtol=1e-5, atol=2e-6, equal_nan=True)


# ------------------------------------------------------------------------------------------ activation


def test_norms_are_over_coordinates_and_value_norms_over_all_heads() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]])
    assert token_norms(x, Batch(torch.zeros(1, 2), torch.ones(1, 2))).tolist() == [[5.0, 2.0]]
    value = torch.tensor([[[[1.0, 2.0]], [[2.0, 4.0]]]])  # (1, 2 heads, 1 token, 2)
    assert value_norms(value).tolist() == [[5.0]]
    half = torch.tensor([[[3e4, 4e4]]], dtype=torch.float16)  # their squares overflow
    batch = Batch(torch.zeros(1, 1), torch.ones(1, 1))
    assert token_norms(half, batch).item() == pytest.approx(5e4, rel=1e-3)
    assert value_norms(half[:, None]).item() == pytest.approx(5e4, rel=1e-3)
    assert kurtosis(half, batch).isfinite().all()


def test_the_highest_norm_is_kept_over_batches() -> None:
    observable = OBSERVABLES["activation"](Settings(positions=2))
    for scale in (1.0, 5.0, 2.0):
        batch = Batch(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
        observable.see(0, "mid", Reading(torch.tensor([[[scale], [1.0]]]), batch), batch)
    rows = observable.tables()["activation"]
    assert rows["norm_max"].tolist() == [5.0, 1.0]
    np.testing.assert_allclose(rows["norm_mean"], [8 / 3, 1.0])


def test_a_position_that_no_sequence_has_is_nan() -> None:
    observable = OBSERVABLES["activation"](Settings(positions=4))
    batch = padded(ragged_tokens((2, 3)))
    hidden = torch.tensor([[[1.0], [2.0], [99.0]], [[3.0], [1.0], [4.0]]])
    observable.see(0, "mid", Reading(hidden, batch), batch)
    rows = observable.tables()["activation"]
    assert rows["norm_max"].tolist()[:3] == [3.0, 2.0, 4.0]
    np.testing.assert_array_equal(rows["norm_mean"], [2.0, 1.5, 4.0, np.nan])


# --------------------------------------------------------------------------------------------- massive


def hidden_state(median: float, *others: float) -> torch.Tensor:
    """Return a state (T,D) with this median magnitude and alternating signs, and with `others` as its first entries."""
    entries = torch.full((4, 25), median)
    entries[:, 1::2] *= -1
    entries.view(-1)[: len(others)] = torch.tensor(others)
    return entries


@pytest.mark.parametrize(
    ("median", "entry", "massive"),
    [
        (0.125, 125.0, True),  # exactly 1000 × the median counts
        (0.125, np.nextafter(np.float32(125), np.float32(0)), False),
        (0.0625, 100.0, False),  # exactly 100 does not
        (0.0625, np.nextafter(np.float32(100), np.float32(200)), True),
        (0.0625, -150.0, True),
        (0.5, 499.0, False),
        (0.0, 101.0, True),
    ],
)
def test_the_criterion_is_above_100_and_at_least_1000_medians(median: float, entry: float, massive: bool) -> None:
    hidden = hidden_state(median, entry)
    assert median_magnitude(hidden) == median
    assert bool(is_massive(hidden[0, 0].abs(), median_magnitude(hidden))) is massive
    batch = Batch(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    observable = Massive(Settings())
    observable.see(0, "layer_out", Reading(hidden[None], batch), batch)
    rows = observable.tables()["massive"]
    assert bool(rows["is_massive"][0]) is massive
    assert rows["value"][0] == pytest.approx(entry)
    assert len(rows) == 3


def largest_places(hidden: torch.Tensor) -> torch.Tensor:
    """Return the indices of the largest entries of one hidden state (T,D) in the flattened state."""
    batch = Batch(torch.zeros(1, len(hidden), dtype=torch.long), torch.ones(1, len(hidden), dtype=torch.long))
    peaks, median = token_peaks(hidden[None], batch), median_magnitude(hidden)
    _, column, coordinate = largest_entries(hidden[None], peaks, median[None], batch)
    return column * hidden.shape[1] + coordinate


def test_every_massive_activation_is_listed_and_at_least_three_entries() -> None:
    for count in (0, 1, 3, 5):
        hidden = hidden_state(0.01, *[200.0 + n for n in range(count)])
        places = largest_places(hidden)
        assert len(places) == max(3, count)
        assert sorted(places[:count].tolist()) == list(range(count))
        values = hidden.abs().flatten()[places]
        assert (values.diff() <= 0).all()  # largest first


def test_the_median_is_the_lower_of_two_and_of_magnitudes() -> None:
    for x in (torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.rand(101), torch.rand(100), torch.tensor([7.0])):
        for dtype in (torch.float32, torch.float64):
            assert median_magnitude(x.to(dtype)) == x.median() == sorted(x.tolist())[(len(x) - 1) // 2]
    x = torch.tensor([[-5.0, 1.0, -3.0], [2.0, -4.0, 0.0]])
    assert median_magnitude(x) == median_magnitude(x.bfloat16()) == 2.0
    assert x.tolist() == [[-5.0, 1.0, -3.0], [2.0, -4.0, 0.0]]  # the input is not sorted in place


def test_selection_is_exact_for_any_sample() -> None:
    numbers = np.random.default_rng(0).integers(0, 1000, 5000)
    misleading = numbers.copy()
    misleading[::SAMPLED] += 2000  # all sampled numbers are above the rest
    for each in (numbers, misleading, -misleading, np.zeros_like(numbers), numbers[:7]):
        for place in (0, len(each) // 2, len(each) - 1):
            before = each.copy()
            assert selected(each, place) == np.sort(each)[place]
            assert np.array_equal(each, before)


@pytest.mark.parametrize(("side", "size"), [("right", 1), ("left", 3)])
def test_other_tokens_at_the_coordinate_of_the_largest_entry_are_those_of_plain_states(side: str, size: int) -> None:
    model, sequences = tiny_model("llama", spread=1.0), ragged_tokens((9, 6, 2))
    given = (Settings(positions=4, window=4), ("massive",))
    table = measured(model, batched(sequences, size, side), *given)["massive_elsewhere"]
    assert len(table) == 3 * model.config.num_hidden_layers
    for row in table.itertuples():
        ids = torch.tensor(sequences[row.sequence])[None]
        hidden = model.model(ids, output_hidden_states=True).hidden_states
        if row.layer + 1 == model.config.num_hidden_layers:
            continue  # transformers gives the last one after the final norm
        entries = hidden[row.layer + 1][0].detach().abs().numpy()
        position, coordinate = np.unravel_index(entries.argmax(), entries.shape)
        assert (row.position, row.coordinate) == (position, coordinate)
        assert row.largest == pytest.approx(entries.max(), rel=1e-5)
        others = np.delete(entries[:, coordinate], position)
        assert row.elsewhere == pytest.approx(np.median(others), rel=1e-4)


def test_a_planted_massive_activation_is_found_with_its_token_and_coordinate() -> None:
    """Only token 40 has 1e7 at coordinate 5, with padding on either side."""
    model = tiny_model("llama")
    model.get_input_embeddings().weight[40, 5] = 1e7
    sequences = [ids.copy() for ids in ragged_tokens((9, 6, 8))]
    for ids in sequences:
        ids[ids == 40] = 41
    sequences[1][4] = 40
    for side in ("right", "left"):
        tables = measured(model, batched(sequences, 3, side), Settings(positions=4, window=4), ("massive",))
        rows = tables["massive"]
        massive = rows[rows["is_massive"]]
        assert massive["layer"].tolist() == [0, 1, 2]
        assert (massive[["sequence", "position", "token_id", "coordinate"]] == [1, 4, 40, 5]).all(axis=None)
        np.testing.assert_allclose(massive["value"], 1e7, rtol=1e-3)
        assert len(rows) == 3 * 3 * 3  # layers, sequences, the three largest


def test_the_median_leaves_padding_out() -> None:
    batch = padded(ragged_tokens((1, 3)))
    hidden = torch.tensor([[[1.0, 3.0], [1e6, 1e6], [1e6, 1e6]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    observable = Massive(Settings())
    observable.see(2, "layer_out", Reading(hidden, batch), batch)
    rows = observable.tables()["massive"]
    assert rows.groupby("sequence")["median"].first().tolist() == [1.0, 3.0]
    assert rows["value"].max() == 6.0
    assert rows.groupby("sequence").size().tolist() == [2, 3]  # the first sequence has two entries


# --------------------------------------------------------------------------------------------- outlier


def one_sequence(x: torch.Tensor) -> tuple[torch.Tensor, Batch]:
    hidden = x.reshape(1, 1, -1)
    return hidden, Batch(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long))


def test_kurtosis_of_few_numbers_and_of_known_distributions() -> None:
    """It is not the excess kurtosis, and neither shift nor scale changes it; n-1 zeros and a one have n-2+1/(n-1)."""
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for entries, expected, tolerance in (
        ([1.0, -1.0], 1.0, 1e-9),  # the smallest possible
        ([0.0, 0.0, 0.0, 1.0], 7 / 3, 1e-9),
        ([5.0, 7.0, 5.0, 7.0, 6.0], 1.25, 1e-9),
        ([-2.0, -1.0, 0.0, 1.0, 2.0], 1.7, 1e-9),
        ([0.0] * 99 + [-4e4], 98 + 1 / 99, 1e-9),
        (quantiles, 1.8, 1e-6),
        (torch.special.ndtri(quantiles), 3.0, 1e-3),
        (torch.distributions.Laplace(0.0, 1.0).icdf(quantiles), 6.0, 1e-2),
    ):
        x = torch.as_tensor(entries, dtype=torch.float64)
        for shifted in (x, 3 - 2 * x, x + 100):
            assert kurtosis(*one_sequence(shifted)).item() == pytest.approx(expected, rel=tolerance)


def test_outliers_are_those_of_real_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for side in ("left", "right"):
        batch = padded(ragged_tokens((3, 5)), side)
        x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
        x = torch.where(batch.attention_mask.bool()[..., None], x, 1e6)
        before = x.clone()
        for row, (start, length) in enumerate(zip(batch.start.tolist(), batch.lengths.tolist(), strict=True)):
            alone = one_sequence(x[row, start : start + length])
            assert kurtosis(x, batch)[row].item() == pytest.approx(kurtosis(*alone).item(), rel=1e-12)
            assert infinity_norm(token_peaks(x, batch), batch)[row].item() == x[row, start : start + length].abs().max()
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_outliers_of_norms_are_those_of_plain_hooks(name: str) -> None:
    model, family = tiny_model(name), find_family(tiny_model(name))
    now: dict[tuple[int, str], torch.Tensor] = {}
    norms = [site for site in ("attn_norm", "mlp_norm") if site in family.sites]
    for at, layer in enumerate(family.layer_modules(model)):
        for site in norms:
            module = layer.get_submodule(family.sites[site].removesuffix(".output"))
            module.register_forward_hook(lambda m, args, output, place=(at, site): now.update({place: output.clone()}))
    model(torch.tensor(np.stack(ALIKE)))
    seen = dict(now)  # the hooks stay
    table = measured(model, batched(ALIKE, 1), Settings(), ("outlier",))["outlier_norms"]
    assert len(table) == len(seen) == 3 * len(norms)
    for row in table.itertuples():
        x = seen[row.layer, row.site].double().flatten(1)
        centered = x - x.mean(1, keepdim=True)
        expected = (centered**4).mean(1) / (centered**2).mean(1) ** 2
        assert row.kurtosis == pytest.approx(float(expected.mean()), rel=1e-4)
        assert row.max_inf_norm == pytest.approx(float(x.abs().amax(1).mean()), rel=1e-5)


# ------------------------------------------------------------------------------------------------- all


def test_observables_do_not_affect_each_other() -> None:
    model, batch, settings = tiny_model("falcon"), padded(ragged_tokens((9, 6))), Settings(positions=4, window=4)
    together = measured(model, [batch], settings, FORWARD)
    for name in FORWARD:
        for table_name, rows in measured(model, [batch], settings, (name,)).items():
            assert rows.equals(together[table_name])
    for name, rows in together.items():
        assert rows.columns[0] == "layer"
        assert {*rows.columns} == {"layer", *column_names(name)} - {"token"}


def test_every_observable_has_a_description_and_known_sites() -> None:
    assert set(FORWARD) <= set(OBSERVABLES)
    for name, observable in OBSERVABLES.items():
        assert observable.name == name
        assert observable.about
        assert set(observable.sites) <= {*SITES, "attn_norm", "mlp_norm", *ATTENTION_SITES}
