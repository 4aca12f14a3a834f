"""Computes any rectangle of a layer's attention weights from query, key and log-sum-exp; never all weights at once.

    a[t,s] = exp(logit[t,s] - lse[t])

A few columns cost O(T·d), a diagonal band O(T·W·d), and all columns one more Q·Kᵀ in row chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import (
    MASKED,
    ROW_CHUNK,
    AttentionCall,
    causal,
    factor,
    is_visible,
    numbers_at_once,
    products,
    raw_logits,
    repeat_heads,
    rows_at_once,
    sink_rows,
    upcast,
)
from sinkscope.text.batch import Batch

SHORT_SEQUENCE = 256  # all columns are read up to this length, where this costs little
SMALLEST = -80.0  # the logarithm of a weight is clamped here, at 2e-35


@dataclass(frozen=True)
class AttentionRead:
    """One layer's attention on one batch, as read at its taps (shapes: seam.py)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lse: torch.Tensor
    call: AttentionCall
    batch: Batch

    def detached(self) -> "AttentionRead":
        """Return the same tensors without their graph."""
        tensors = (self.query.detach(), self.key.detach(), self.value.detach(), self.lse.detach())
        return AttentionRead(*tensors, self.call, self.batch)

    @property
    def length(self) -> int:
        return self.query.shape[2]

    @property
    def is_linear(self) -> bool:
        """Whether the logits are only scaling · q·k: softmax, no softcap, no additive bias (ALiBi)."""
        additive = self.call.mask is not None and self.call.mask.dtype != torch.bool
        return (self.call.scores, self.call.softcap, self.call.operation) == (None, None, None) and not additive

    @property
    def is_plain(self) -> bool:
        """Whether logits are linear and only the causal mask applies: no window, no padding. Sums are then cheaper."""
        return self.is_plain_except_forbidden and not self.call.forbidden

    @property
    def is_plain_except_forbidden(self) -> bool:
        """Whether the call is plain except for keys that an intervention may have hidden from all queries."""
        by_column = all(forbidden.columns for forbidden in self.call.forbidden)
        return self.call.causal and self.is_linear and self.call.mask is None and self.batch.valid is None and by_column

    def keys(self, rows: slice, columns: int | None = None) -> slice:
        """Return the keys (among the first `columns`) that any of these queries may see."""
        seen = self.length if self.call.looks_ahead else rows.stop
        return slice(0, seen if columns is None else min(columns, seen))

    def allowed(self, rows: slice, cols: slice) -> torch.Tensor | None:
        """Return which keys each real query may attend to, (B|1,H|1,R,C) bool; None: all of them."""
        call, device = self.call, self.query.device
        parts = [~forbidden.pairs(rows, cols, device) for forbidden in call.forbidden]
        mask = call.mask if call.scores is None else call.scores  # includes causality
        if mask is not None:
            mask = mask[:, :, rows, cols]
            parts.append(is_visible(mask))
        elif not call.looks_ahead and rows.start < cols.stop - 1:
            parts.append(causal(rows, cols, 0, device)[None, None])
        valid = self.batch.on(device, "valid")
        if valid is not None:
            parts += [valid[:, None, rows, None], valid[:, None, None, cols]]
        return reduce(torch.logical_and, parts) if parts else None

    def logits(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return pre-softmax logits (B,H,R,C) in float32 or better; undefined but finite where `allowed` is False."""
        if self._is_long:
            return self._logits(rows, cols)
        return self._all_logits[:, :, rows, cols]

    @property
    def _is_long(self) -> bool:
        """Whether logits are computed in chunks; otherwise they are cached, and must not be changed in place."""
        return self.length > ROW_CHUNK

    @cached_property
    def _all_logits(self) -> torch.Tensor:
        return self._logits(slice(0, self.length), slice(0, self.length))

    @cached_property
    def _key(self) -> torch.Tensor:
        return factor(self.key).contiguous()  # once, because every chunk would make its own copy

    def _logits(self, rows: slice, cols: slice) -> torch.Tensor:
        if self.call.scores is not None:
            return upcast(self.call.scores[:, :, rows, cols]).clamp(min=MASKED)
        key = self._key if self._is_long else self.key
        logits = raw_logits(self.query[:, :, rows], key[:, :, cols], self.call)
        mask = self.call.mask
        if mask is None or mask.dtype == torch.bool:
            return logits
        return (logits + mask[:, :, rows, cols]).clamp_(min=MASKED)

    def weights(self, rows: slice, cols: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a[t,s] (of other operations |sim| ÷ Σ|sim|) and its logarithm, (B,H,R,C) each.

        Where the query may not attend, or is padding, the weight is 0 and the logarithm undefined but finite.
        """
        logits, operation = self.logits(rows, cols), self.call.operation
        log_sim = logits if operation is None else operation.log_similarity(logits)
        # Without the clamp, exp is 30 times slower (denormals).
        lse = self.lse[:, :, rows, None]
        log_weights = (log_sim.sub_(lse) if self._is_long else log_sim - lse).clamp_(SMALLEST, 0.0)
        weights = log_weights.exp()
        if self.is_plain:
            hidden = slice(max(cols.start, rows.start), cols.stop)  # all queries see all keys before the first query
            if hidden.start < hidden.stop - 1:
                weights[..., hidden.start - cols.start :].mul_(_near(rows, hidden, self.length, 0, weights))
            return weights, log_weights
        allowed = self.allowed(rows, cols)
        if allowed is not None:  # mixed types are several times slower
            weights.mul_(allowed.to(weights.dtype))
        if self.batch.valid is not None:  # a padding query may see no key, and then has no lse
            weights.nan_to_num_(0.0)
            log_weights.nan_to_num_(0.0)
        return weights, log_weights

    def mix_weights(self, rows: slice, cols: slice) -> torch.Tensor:
        """Return the factors of the values, (B,H,R,C): softmax weights, or sim ÷ Z of another operation."""
        if self.call.operation is None:
            return self.weights(rows, cols)[0]
        keys = self.keys(rows)  # all keys, because Z is their sum
        logits = self.logits(rows, keys)
        allowed = self.allowed(rows, keys)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        return self.call.operation.weights(logits)[0][..., cols]

    @cached_property
    def missing_mass(self) -> torch.Tensor:
        """1 - Σ_s a[t,s] of each row (B,H,T): the weight of the sink logits; 0 without them."""
        sinks = sink_rows(self.call, slice(0, self.length))
        return torch.zeros_like(self.lse) if sinks is None else (sinks.to(self.lse.dtype) - self.lse).exp()


@dataclass(frozen=True)
class ColumnSums:
    """Sums down the columns of a layer's attention weights over the real queries that may see the key."""

    mass: torch.Tensor  # (B,H,C): Σ_t a[t,s] for the first C columns
    second: torch.Tensor  # (B,H,C): Σ_t a[t,s]²
    window: torch.Tensor  # (B,H,T): Σ_t a[t,s] for every column, with |t - s| < W
    entropy: torch.Tensor | None  # (B,H,T): -Σ_s a[t,s] log a[t,s] of each row; None unless all columns were read


def column_sums(read: AttentionRead, columns: int, window: int, chunk: int | None = None) -> ColumnSums:
    """Compute column statistics of a layer's attention weights, in chunks of rows (None: by `chunks_at_once`).

    `mass` and `second` cover the first `columns` columns, or all if the sequence is SHORT_SEQUENCE.
    """
    length = read.length
    whole = columns >= length or length <= SHORT_SEQUENCE
    columns = length if whole else columns
    mass = read.lse.new_zeros(*read.lse.shape[:2], columns)
    second = torch.zeros_like(mass)
    windows = torch.zeros_like(read.lse)
    entropy = torch.zeros_like(read.lse) if whole else None
    plain = not whole and read.is_plain_except_forbidden
    if plain:
        windows = plain_window_sums(read, window, max(chunk or ROW_CHUNK, window))
        _correct_forbidden(read, windows)
    # without `whole` and `plain` each chunk also has a band
    chunks = chunks_at_once(read, columns, None if whole or plain else window)
    for rows in row_chunks(length, chunk) if chunk else chunks:
        cols = read.keys(rows, columns)
        weights, log_weights = read.weights(rows, cols)
        mass[..., cols].add_(weights.sum(2))
        if entropy is not None:
            entropy[..., rows] = -log_weights.mul_(weights).sum(-1)
        # square() is several times slower
        second[..., cols].add_(torch.mul(weights, weights, out=log_weights).sum(2))
        if plain:
            continue
        band = slice(max(0, rows.start - window + 1), min(read.keys(rows).stop, rows.stop + window - 1))
        band_weights = weights[..., band] if whole else read.weights(rows, band)[0]
        if max(rows.stop - 1 - band.start, band.stop - 1 - rows.start) >= window:
            band_weights = band_weights * _near(rows, band, window - 1, window - 1, weights)
        windows[..., band].add_(band_weights.sum(2))
    return ColumnSums(mass, second, windows, entropy)


def _near(rows: slice, cols: slice, before: int, after: int, like: torch.Tensor) -> torch.Tensor:
    """Return 1 for keys from `before` tokens before the query to `after` tokens after it, else 0: (R,C), not bool.

    Products of mixed types are several times slower.
    """
    ones, diagonal = like.new_ones(rows.stop - rows.start, cols.stop - cols.start), rows.start - cols.start
    return ones.tril_(diagonal + after).triu_(diagonal - before)


def plain_window_sums(read: AttentionRead, window: int, block: int) -> torch.Tensor:
    """Return Σ a[t,s] over t = s … s+W-1 for every key (B,H,T), under the plain causal mask.

    Each block of `block` ≥ W queries is multiplied by its own keys and the W-1 before them, several blocks at once.
    """
    reach = window - 1
    blocks = -(-read.length // block)
    groups = (read.key.shape[1], read.query.shape[1] // read.key.shape[1])  # query heads grouped by their key head
    keys = F.pad(factor(read.key), (0, 0, reach, blocks * block - read.length))
    keys = keys.unfold(2, block + reach, block)  # (B,K,blocks,d,C)
    # query r of a block sees column c = r … r + W-1 of its keys
    near = _near(slice(reach, reach + block), slice(0, reach + block), reach, 0, read.lse)
    sums = read.lse.new_zeros(*read.lse.shape[:2], blocks * block + reach)  # with `reach` columns before the first key
    of_block = read.lse[..., 0].numel() * near.numel()
    at_once = max(1, numbers_at_once(read.lse.device, of_block * blocks) // of_block)
    for first in range(0, blocks, at_once):
        rows = slice(first * block, min(first + at_once, blocks) * block)
        padding = max(0, rows.stop - read.length)
        query, lse = read.query[:, :, rows], read.lse[:, :, rows]
        if padding:  # without padding, F.pad would still copy the tensor
            query, lse = F.pad(query, (0, 0, 0, padding)), F.pad(lse, (0, padding), value=torch.inf)
        query, lse = (x.unflatten(2, (-1, block)).unflatten(1, groups).transpose(2, 3) for x in (query, lse))
        key = keys[:, :, first : first + at_once]
        logits = products(query.flatten(3, 4).flatten(0, 1), key.flatten(0, 1))  # (B·K,blocks at once,H/K · block,C)
        logits = logits.unflatten(0, query.shape[:2]).unflatten(3, (groups[1], block))
        weights = torch.add(-lse.unsqueeze(-1), logits, alpha=read.call.scaling, out=logits)
        weights.clamp_(SMALLEST, 0.0).exp_()
        columns = weights.mul_(near).sum(4).transpose(2, 3).flatten(1, 2)  # (B,H,blocks at once,C)
        sums[..., rows].unflatten(2, (-1, block))[..., :reach].add_(columns[..., :reach])
        sums[..., reach:][..., rows].add_(columns[..., reach:].flatten(2))
    return sums[..., reach : reach + read.length]


def _correct_forbidden(read: AttentionRead, windows: torch.Tensor) -> None:
    """Set the sums of keys that are hidden from all later queries to their own token's weight."""
    for forbidden in read.call.forbidden:
        assert forbidden.columns is not None
        columns = forbidden.columns(windows.device)[0]  # no padding: the same in all sequences
        first = columns.amin()  # in place of keys past the end, so that equal entries get equal sums
        tokens = columns.where(columns < read.length, first).clamp(max=read.length - 1)
        query, key = (repeat_heads(x.index_select(2, tokens), windows.shape[1]) for x in (read.query, read.key))
        logits = read.call.scaling * torch.linalg.vecdot(upcast(query), upcast(key))
        weights = (logits - read.lse.index_select(2, tokens)).clamp(SMALLEST, 0.0).exp()
        hidden = forbidden.hidden(windows.shape[1], windows.device)[:, 0] & (first < read.length)
        windows.scatter_(2, tokens.expand_as(weights), torch.where(hidden, weights, windows.index_select(2, tokens)))


def keys_seen(read: AttentionRead) -> torch.Tensor:
    """Return how many keys each real query may attend to, (B|1,H|1,T)."""
    counts = []
    for rows in chunks_at_once(read, read.length):
        allowed = read.allowed(rows, read.keys(rows))
        if allowed is None:
            allowed = torch.ones(1, 1, rows.stop - rows.start, read.keys(rows).stop, device=read.lse.device)
        counts.append(allowed.sum(-1))
    shape = torch.broadcast_shapes(*(count.shape[:2] for count in counts))
    return torch.cat([count.expand(*shape, -1) for count in counts], dim=-1).to(read.lse.dtype)


def chunks_at_once(read: AttentionRead, columns: int, window: int | None = None) -> Iterator[slice]:
    """Yield chunks of as many rows as the device computes at once, of weights to `columns` keys.

    Under a causal mask the first rows see few keys, so that their chunks are larger. With `window`, there is also room
    for the rows' own keys and `window` further ones.
    """
    row, length, on_cpu = read.lse[..., 0].numel(), read.length, read.lse.device.type == "cpu"
    wanted = row * length * (columns if window is None else length)
    room, start = numbers_at_once(read.lse.device, wanted) // row, 0
    most = min(length, room // read.query.shape[-1]) if on_cpu else length  # the queries are in a CPU's cache, too
    if window is not None:
        most = min(most, ROW_CHUNK if on_cpu else rows_at_once(room, window))
    while start < length:
        causal_rows = 0 if read.call.looks_ahead else rows_at_once(room, start)
        rows = max(1, min(most, max(causal_rows, room // columns)))
        yield slice(start, min(start + rows, length))
        start += rows


def row_chunks(length: int, chunk: int = ROW_CHUNK) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))
