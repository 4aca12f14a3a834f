"""Computes any rectangle of a layer's attention weights from query, key and log-sum-exp; never all weights at once.

    a[t,s] = exp(logit[t,s] - lse[t])

A few columns cost O(T·d), a diagonal band O(T·W·d), and all columns one more Q·Kᵀ in row chunks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import MASKED, ROW_CHUNK, AttentionCall, causal, raw_logits, sink_rows, upcast
from sinkscope.text.batch import Batch

SHORT = 256  # all columns are read up to this length, where this costs little
SMALLEST = -80.0  # the logarithm of a weight is clamped here, at 2e-35
AT_ONCE = 400_000  # weights in memory at a time: with their derived tensors they fit into a CPU's cache


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
        """Whether the call is plain except for keys that an intervention may have forbidden."""
        return self.call.causal and self.is_linear and self.call.mask is None and self.batch.valid is None

    def keys(self, rows: slice, columns: int | None = None) -> slice:
        """Return the keys (among the first `columns`) that any of these queries may see."""
        seen = self.length if self.call.looks_ahead else rows.stop
        return slice(0, seen if columns is None else min(columns, seen))

    def allowed(self, rows: slice, cols: slice) -> torch.Tensor | None:
        """Return which keys each real query may attend to, (B|1,H|1,R,C) bool; None: all of them."""
        call, device = self.call, self.query.device
        sees_all = call.looks_ahead or rows.start >= cols.stop - 1  # except for the mask
        nothing_else = (call.mask, call.scores, self.batch.valid) == (None, None, None) and not call.forbidden
        if sees_all and nothing_else:
            return None
        size = (rows.stop - rows.start, cols.stop - cols.start)
        seen = torch.ones(size, dtype=torch.bool, device=device) if sees_all else causal(rows, cols, 0, device)
        seen = seen[None, None]
        for forbidden in call.forbidden:
            seen = seen & ~forbidden.pairs(rows, cols, device)
        if call.scores is not None:
            seen = seen & (call.scores[:, :, rows, cols] > MASKED)
        elif call.mask is not None:
            mask = call.mask[:, :, rows, cols]
            seen = seen & (mask if mask.dtype == torch.bool else mask > MASKED)
        if self.batch.valid is not None:
            valid = self.batch.valid.to(device)
            seen = seen & valid[:, None, rows, None] & valid[:, None, None, cols]
        return seen

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

    def _logits(self, rows: slice, cols: slice) -> torch.Tensor:
        if self.call.scores is not None:
            return upcast(self.call.scores[:, :, rows, cols]).clamp(min=MASKED)
        logits = raw_logits(self.query[:, :, rows], self.key[:, :, cols], self.call)
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
        # under the plain causal mask all of these queries see all keys before the first query
        hidden = slice(min(max(cols.start, rows.start), cols.stop), cols.stop) if self.is_plain else cols
        allowed = self.allowed(rows, hidden)
        if allowed is not None:  # mixed types are several times slower
            weights[..., hidden.start - cols.start :].mul_(allowed.to(weights.dtype))
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
    """Compute column statistics of a layer's attention weights, in chunks of rows (None: as many as AT_ONCE allows).

    `mass` and `second` cover the first `columns` columns, or all if the sequence is SHORT.
    """
    length = read.length
    whole = columns >= length or length <= SHORT
    columns = length if whole else columns
    mass = read.lse.new_zeros(*read.lse.shape[:2], columns)
    second = torch.zeros_like(mass)
    windows = torch.zeros_like(read.lse)
    entropy = torch.zeros_like(read.lse) if whole else None
    plain = not whole and read.is_plain_except_forbidden
    if plain:
        windows = plain_window_sums(read, window, max(chunk or ROW_CHUNK, window))
        _correct_forbidden(read, windows)
    most = length if whole or plain else ROW_CHUNK  # each chunk then also has a band
    for rows in row_chunks(length, chunk) if chunk else chunks_at_once(read, columns, most):
        cols = read.keys(rows, columns)
        weights, log_weights = read.weights(rows, cols)
        mass[..., cols] += weights.sum(2)
        if entropy is not None:
            entropy[..., rows] = -log_weights.mul_(weights).sum(-1)
        second[..., cols] += torch.mul(weights, weights, out=log_weights).sum(2)  # square() is several times slower
        if plain:
            continue
        band = slice(max(0, rows.start - window + 1), min(read.keys(rows).stop, rows.stop + window - 1))
        band_weights = weights[..., band] if whole else read.weights(rows, band)[0]
        if max(rows.stop - 1 - band.start, band.stop - 1 - rows.start) >= window:
            row = torch.arange(rows.start, rows.stop, device=weights.device)[:, None]
            column = torch.arange(band.start, band.stop, device=weights.device)
            band_weights = band_weights * ((row - column).abs() < window)
        windows[..., band] += band_weights.sum(2)
    return ColumnSums(mass, second, windows, entropy)


def plain_window_sums(read: AttentionRead, window: int, block: int) -> torch.Tensor:
    """Return Σ a[t,s] over t = s … s+W-1 for every key (B,H,T), under the plain causal mask.

    Each block of `block` ≥ W queries is multiplied by its own keys and the W-1 before them, several blocks at once.
    """
    reach = window - 1
    blocks = -(-read.length // block)
    groups = (read.key.shape[1], read.query.shape[1] // read.key.shape[1])  # query heads grouped by their key head
    keys = F.pad(upcast(read.key) * read.call.scaling, (0, 0, reach, blocks * block - read.length))
    keys = keys.unfold(2, block + reach, block)  # (B,K,blocks,d,C)
    # query r of a block sees column c = r … r + W-1 of its keys
    distance = torch.arange(block + reach, device=keys.device) - torch.arange(block, device=keys.device)[:, None]
    near = ((distance >= 0) & (distance <= reach)).to(keys.dtype)
    sums = read.lse.new_zeros(*read.lse.shape[:2], blocks * block + reach)  # with `reach` columns before the first key
    at_once = max(1, AT_ONCE // (read.lse[..., 0].numel() * near.numel()))
    for first in range(0, blocks, at_once):
        rows = slice(first * block, min(first + at_once, blocks) * block)
        padding = max(0, rows.stop - read.length)
        query, lse = upcast(read.query[:, :, rows]), read.lse[:, :, rows]
        if padding:  # without padding, F.pad would still copy the tensor
            query, lse = F.pad(query, (0, 0, 0, padding)), F.pad(lse, (0, padding), value=torch.inf)
        query, lse = (x.unflatten(2, (-1, block)).unflatten(1, groups).transpose(2, 3) for x in (query, lse))
        products = query.flatten(3, 4) @ keys[:, :, first : first + at_once]  # (B,K,blocks at once,H/K · block,C)
        weights = products.unflatten(3, (groups[1], block)).sub_(lse.unsqueeze(-1)).clamp_(SMALLEST, 0.0).exp_()
        columns = weights.mul_(near).sum(4).transpose(2, 3).flatten(1, 2)  # (B,H,blocks at once,C)
        sums[..., rows].unflatten(2, (-1, block))[..., :reach] += columns[..., :reach]
        sums[..., reach:][..., rows] += columns[..., reach:].flatten(2)
    return sums[..., reach : reach + read.length]


def _correct_forbidden(read: AttentionRead, windows: torch.Tensor) -> None:
    """Set the sums of keys that are hidden from all later queries to their own token's weight."""
    for forbidden in read.call.forbidden:
        for column in forbidden.columns(windows.device)[0].tolist():  # no padding: the same in all sequences
            if column < read.length:
                itself = slice(column, column + 1)
                own, _ = read.weights(itself, itself)
                windows[:, forbidden.heads, column] = own[:, forbidden.heads, 0, 0]


def keys_seen(read: AttentionRead) -> torch.Tensor:
    """Return how many keys each real query may attend to, (B|1,H|1,T)."""
    counts = []
    for rows in row_chunks(read.length):
        allowed = read.allowed(rows, read.keys(rows))
        if allowed is None:
            allowed = torch.ones(1, 1, rows.stop - rows.start, read.keys(rows).stop, device=read.lse.device)
        counts.append(allowed.sum(-1))
    shape = torch.broadcast_shapes(*(count.shape[:2] for count in counts))
    return torch.cat([count.expand(*shape, -1) for count in counts], dim=-1).to(read.lse.dtype)


def chunks_at_once(read: AttentionRead, columns: int, most: int) -> Iterator[slice]:
    """Yield chunks of at most `most` rows, with AT_ONCE numbers in the weights to `columns` keys and the queries.

    Under a causal mask the first rows see few keys, so that their chunks are larger.
    """
    room, start = AT_ONCE // read.lse[..., 0].numel(), 0
    while start < read.length:
        # solves rows · (start + rows) = room: the rows see start + rows keys
        causal_rows = 0 if read.call.looks_ahead else (math.isqrt(start**2 + 4 * room) - start) // 2
        rows = max(1, min(most, max(causal_rows, room // columns), room // read.query.shape[-1]))
        yield slice(start, min(start + rows, read.length))
        start += rows


def row_chunks(length: int, chunk: int = ROW_CHUNK) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))
