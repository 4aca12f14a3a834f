"""Rectangles of attention weights and their column sums, compared with complete matrices in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_reads import EACH_KIND, HEADS, KINDS, SEQUENCES, causal_mask, dense, make_read
from support.naming import naming
from tiny import padded, tiny_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from sinkscope.attention import kernels
from sinkscope.attention import weights as attention_weights
from sinkscope.attention.kernels import AttentionCall, ForbiddenKeys
from sinkscope.attention.weights import AttentionRead, ColumnSums, chunks_at_once, column_sums


def dense_weights(read: AttentionRead) -> torch.Tensor:
    """Return weights (B,H,T,T), 0 wherever either token is padding."""
    real = read.batch.attention_mask.bool()
    weights = dense(read.query, read.key, read.value, read.call)[0].nan_to_num(0.0)
    return weights * real[:, None, :, None] * real[:, None, None, :]


def dense_sums(weights: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    length = weights.shape[-1]
    logs = torch.where(weights > 0, weights, 1.0).log()
    return {
        "mass": weights.sum(2),
        "second": (weights**2).sum(2),
        "window": torch.stack([weights[:, :, s : s + window, s].sum(2) for s in range(length)], dim=-1),
        "entropy": -(weights * logs).sum(3),
    }


ALL = slice(0, 23)
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}


@EACH_KIND
def test_any_rectangle_and_the_column_sums_are_those_of_the_dense_matrix(
    kind: str, lengths: tuple | None, side: str
) -> None:
    """Each real query gives 1 in total, minus a learned sink's weight: Σ_s Σ_t a[t,s] = number of queries - missing."""
    read = make_read(kind, lengths=lengths, side=side)
    whole = dense_weights(read)
    for rows, cols in (
        (ALL, ALL),
        (slice(3, 9), slice(0, 9)),
        (slice(20, 23), slice(2, 4)),
        (slice(7, 8), slice(7, 8)),
    ):
        weights, logs = read.weights(rows, cols)
        torch.testing.assert_close(weights, whole[:, :, rows, cols], **CLOSE)
        assert logs.isfinite().all()
        positive = weights > 0
        torch.testing.assert_close(logs[positive], weights[positive].log(), **CLOSE)
    expected = dense_sums(whole, 4)
    for chunk in (1, 7, 64, 128):
        with naming(chunk):
            assert_sums(column_sums(read, 6, 4, chunk), expected)
    missing = (read.missing_mass * read.batch.attention_mask.bool()[:, None]).sum(-1)
    queries = read.batch.lengths[:, None].expand(-1, HEADS)
    torch.testing.assert_close(expected["mass"].sum(-1) + missing, queries.double(), **CLOSE)
    assert bool((missing > 0.01).all()) == (kind == "sink")


def assert_sums(sums: ColumnSums, expected: dict[str, torch.Tensor]) -> None:
    for name, sum_ in expected.items():
        torch.testing.assert_close(getattr(sums, name), sum_, **CLOSE)


@pytest.mark.parametrize(("columns", "chunk"), [(1, 7), (6, 1), (6, 7), (6, 128), (22, 7), (23, 1), (40, 128)])
def test_a_long_sequence_is_read_by_first_columns_and_diagonal_band(
    chunk: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sequence is short here or one chunk of logits: the sparse path gives the same results as the dense one."""
    for window in (1, 4, 7, 9, 23):
        with naming(window):
            monkeypatch.setattr(attention_weights, "SHORT_SEQUENCE", 0)
            monkeypatch.setattr(attention_weights, "ROW_CHUNK", 0)
            for kind, lengths in (("causal", None), ("window", (23, 15)), ("additive", None), ("sink", (23, 15))):
                read = make_read(kind, lengths=lengths)
                sums, expected = column_sums(read, columns, window, chunk), dense_sums(dense_weights(read), window)
                expected |= {name: expected[name][..., :columns] for name in ("mass", "second")}
                if columns < 23:
                    assert sums.entropy is None
                    del expected["entropy"]
                assert_sums(sums, expected)


@pytest.mark.parametrize("columns", [[2, 9], [2, 9, 40], [22, 40], [40]], ids=str)
def test_sums_of_forbidden_keys_are_those_of_a_mask(columns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key hidden from all later queries keeps its own weight; keys past a short sequence's end change nothing."""
    monkeypatch.setattr(attention_weights, "SHORT_SEQUENCE", 0)
    read, heads = make_read("causal"), torch.tensor([True, False, True, True])[:, None, None]

    def pairs(rows: slice, cols: slice, device: torch.device) -> torch.Tensor:
        row, col = torch.arange(rows.start, rows.stop)[:, None], torch.arange(cols.start, cols.stop)
        return (torch.isin(col, torch.tensor(columns)) & (row > col)) & heads[None]

    forbidden = ForbiddenKeys(pairs, lambda device: torch.tensor([columns]), (0, 2, 3))
    mask = causal_mask(read.length) & ~pairs(ALL, ALL, read.lse.device)
    weights, _, lse = dense(read.query, read.key, read.value, replace(read.call, mask=mask))
    sums = column_sums(replace(read, lse=lse, call=replace(read.call, forbidden=(forbidden,))), columns=4, window=5)
    torch.testing.assert_close(sums.window, dense_sums(weights, 5)["window"], **CLOSE)


def test_logits_are_those_of_the_definition_under_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {kind: make_read(kind).logits(ALL, ALL) for kind in KINDS}
    monkeypatch.setattr(attention_weights, "ROW_CHUNK", 0)
    for kind, logits in whole.items():
        cut = make_read(kind).logits(slice(5, 9), slice(0, 7))
        torch.testing.assert_close(cut, logits[:, :, 5:9, :7], **CLOSE)


def test_padding_is_never_allowed_even_where_a_mask_lets_it_through() -> None:
    read = make_read("bool mask", lengths=(15, 23), side="left")
    lax = replace(read, call=AttentionCall(None, 0.7))
    torch.testing.assert_close(lax.allowed(ALL, ALL).expand(2, 1, 23, 23)[0, 0, 8:, 8:], causal_mask(15))
    assert not lax.allowed(ALL, ALL)[0, :, :, :8].any()
    assert not lax.allowed(ALL, ALL)[0, :, :8].any()


def test_chunks_at_once_cover_every_row_once_and_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    read = make_read("causal")
    heads = SEQUENCES * HEADS
    for room in (1, 40, 100, 10_000):
        monkeypatch.setattr(kernels, "ON_CPU", heads * room)
        for columns in (4, 23):
            chunks = list(chunks_at_once(read, columns))
            assert [chunk.start for chunk in chunks] == [0] + [chunk.stop for chunk in chunks[:-1]]
            assert chunks[-1].stop == read.length
            for chunk in chunks:
                rows = chunk.stop - chunk.start
                assert rows == 1 or rows * min(columns, chunk.stop) <= room


class Launches(TorchDispatchMode):
    """Counts the operations that would each launch a kernel on a GPU, and keeps the size of their largest result."""

    count, largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **kwargs or {})
        name, returned = func._schema.name, func._schema.returns[0].alias_info
        is_view = name == "aten::_unsafe_view" or (returned is not None and not returned.is_write)
        if isinstance(output, torch.Tensor) and output.device.type == "meta" and not is_view:
            self.count += 1
            self.largest = max(self.largest, output.numel())
        return output


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launches]:
    """Return a function that counts the launches of `column_sums` of 8 sequences and 32 heads in half precision."""
    monkeypatch.setattr(kernels, "HALF_PRODUCTS", {"meta"})

    def counted(length: int, columns: int, is_padded: bool = False, width: int = 128) -> Launches:
        batch = padded([*tiny_tokens(7, length).numpy(), tiny_tokens(1, length - is_padded).numpy()[0]])
        query = torch.empty(8, length, 32, width, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        seen = torch.ones(8, 1, length, length, dtype=torch.bool, device="meta") if is_padded else None
        call = AttentionCall(seen, width**-0.5)
        read = AttentionRead(query, query, query, torch.empty(8, 32, length, device="meta"), call, batch)
        with Launches() as counts:
            column_sums(read, columns, 64)
        return counts

    return counted


@pytest.mark.parametrize(
    ("columns", "is_padded", "budget"), [(2048, False, 255), (2048, True, 276), (16, False, 48), (16, True, 180)]
)
def test_budget_of_launches_at_8_by_2048(
    columns: int, is_padded: bool, budget: int, launches: Callable[..., Launches]
) -> None:
    """With a CPU's chunks there would be more than 3,000 at 16 columns, and 34,000 at all: lower it with a saving."""
    assert launches(2048, columns, is_padded).count <= budget


def test_memory_does_not_grow_with_the_square_of_the_length(launches: Callable[..., Launches]) -> None:
    for length in (2048, 8192):
        assert launches(length, length, width=16).largest <= 1.1 * kernels.ON_ACCELERATOR
