"""The reductions of one_pass.py by kernels of Triton, one program for each token or block of entries."""

from typing import Any

import torch
import triton
import triton.language as tl

from sinkscope.measuring.one_pass import DIGITS

ENTRIES_OF_PROGRAM = 4096  # that count digits


@triton.jit
def _reduce_token(x: Any, sums: Any, tokens: Any, width: Any, BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    entries = tl.load(x + token * width + column, mask=column < width, other=0.0).to(sums.dtype.element_ty)
    mean = tl.sum(entries, 0) / width
    centered = tl.where(column < width, entries - mean, 0.0)
    squares = centered * centered
    tl.store(sums + token, mean)
    tl.store(sums + tokens + token, tl.sum(squares, 0))
    tl.store(sums + 2 * tokens + token, tl.sum(squares * centered, 0))
    tl.store(sums + 3 * tokens + token, tl.sum(squares * squares, 0))
    tl.store(sums + 4 * tokens + token, tl.max(tl.abs(entries), 0))


def token_sums(x: torch.Tensor) -> torch.Tensor:
    sums = x.new_empty((5, *x.shape[:-1]), dtype=torch.promote_types(x.dtype, torch.float32))
    block = triton.next_power_of_2(x.shape[-1])
    warps = min(16, max(1, block // 512))
    if tokens := sums[0].numel():
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _reduce_token[(tokens,)](x.contiguous(), sums, tokens, x.shape[-1], BLOCK=block, num_warps=warps)
    return sums


@triton.jit
def _count_digits(
    bits: Any, prefix: Any, counts: Any, entries: Any, shift: Any, magnitude: tl.constexpr, is_first: tl.constexpr,
    digits: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counted = column < entries
    numbers = tl.load(bits + row * entries + column, mask=counted, other=0).to(tl.int64) & magnitude
    if not is_first:
        counted = counted & (numbers >> (shift + 16) == tl.load(prefix + row))
    digit = (numbers >> shift) & (digits - 1)
    tl.atomic_add(counts + row * digits + digit, 1, mask=counted)


def digit_counts(bits: torch.Tensor, prefix: torch.Tensor, shift: int) -> torch.Tensor:
    counts = torch.zeros(len(bits), DIGITS, dtype=torch.int32, device=bits.device)
    programs = len(bits), triton.cdiv(bits.shape[1], ENTRIES_OF_PROGRAM)
    with torch.cuda.device_of(bits):
        _count_digits[programs](
            bits, prefix.expand(len(bits), 1).contiguous(), counts, bits.shape[1], shift, torch.iinfo(bits.dtype).max,
            shift + 16 == 8 * bits.itemsize, DIGITS, BLOCK=ENTRIES_OF_PROGRAM,
        )  # fmt: skip
    return counts
