"""Rounding to the numbers of a format that is served, with the arithmetic of compressed-tensors 0.20, bit for bit.

    x̂ = s · round(clamp(x ÷ s))        round: half to even, to integers or to the numbers of e4m3fn or e2m1

A scale s belongs to a tensor, to a row (an output channel of a weight, a token of an input), or to a group of entries
that follow each other in a row. It is computed from the largest magnitude a of its entries:

    int        a ÷ ((2^bits - 1) ÷ 2), for the integers from -2^(bits-1) to 2^(bits-1) - 1
    e4m3fn     a ÷ 448
    MX         2^(⌊log₂ a⌋ - 2), and twice that if the mantissa of a is at least 1.75; the OCP specification never
               doubles it
    NVFP4      e4m3fn(G · a ÷ 6) ÷ G, where G = 448 · 6 ÷ the largest magnitude of the tensor

Scales are computed in float32 or better. Products are those of the model, in its dtype.
"""

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError
from sinkscope.quantization.formats import Encoding

E4M3, E2M1 = 448.0, 6.0  # the largest numbers of float8_e4m3fn and of float4_e2m1


def snap(
    encoding: Encoding,
    x: torch.Tensor,
    largest: float | torch.Tensor | None = None,
    float8: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Round x (…,D) to the nearest numbers of a format, in float32 or better; returns x's dtype.

    Args:
        largest: The largest magnitude of the tensor, if it is not that of x, or of the tensor of each row, (…,1).
            Larger entries are clamped.
        float8: The floats of 8 bits. The largest of e5m2 is 448 · 2⁷, so that the scale of e4m3 serves it, too.

    Raises:
        InputError: D is not a multiple of the group size.
    """
    entries = upcast(x)
    if encoding.group_size is not None:
        if x.shape[-1] % encoding.group_size:
            raise InputError(f"{x.shape[-1]} entries are not divided by groups of {encoding.group_size}")
        entries = entries.unflatten(-1, (-1, encoding.group_size))
    scale = scales(encoding, entries, largest)
    if encoding.type == "int":
        half = 2 ** (encoding.num_bits - 1)
        snapped = (entries / scale).clamp_(-half, half - 1).round_()
    elif encoding.num_bits == 8:
        snapped = (entries / scale).clamp_(-E4M3, E4M3).to(float8).to(entries.dtype)
    else:
        snapped = round_to_e2m1(entries / scale)
    return snapped.mul_(scale).reshape(x.shape).to(x.dtype)


def scales(encoding: Encoding, entries: torch.Tensor, largest: float | torch.Tensor | None) -> torch.Tensor:
    """Return the scale of entries (…,D), or of each row or group (…,1); `largest` as in `snap`."""
    is_of_tensor = encoding.strategy == "tensor"
    most = _of_tensor(entries, largest) if is_of_tensor else entries.abs().amax(-1, keepdim=True)
    if encoding.is_mx:
        mantissa, exponent = torch.frexp(most)  # most = mantissa · 2^exponent, with 0.5 ≤ mantissa < 1
        scale = torch.ldexp(torch.ones_like(most), exponent - 3 + (mantissa >= 0.875))
    elif encoding.strategy == "tensor_group":
        whole = _of_tensor(entries, largest)[..., None].clamp_min(torch.finfo(entries.dtype).tiny)
        of_tensor = E4M3 * E2M1 / whole
        local = (most / E2M1 * of_tensor).clamp_max(E4M3).to(torch.float8_e4m3fn).to(most.dtype)
        scale = local.masked_fill_(local == 0, 0.125) / of_tensor
    else:
        scale = most / (E4M3 if encoding.type == "float" else (2**encoding.num_bits - 1) / 2)
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _of_tensor(entries: torch.Tensor, largest: float | torch.Tensor | None) -> torch.Tensor:
    """Return the largest magnitude of the tensor of entries."""
    if largest is None:
        return entries.abs().max()
    return largest.to(entries) if isinstance(largest, torch.Tensor) else entries.new_full((), largest)


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4, ±6, ties to the even code; larger magnitudes become ±6."""
    magnitude = x.abs().clamp_max(E2M1)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x)
    return ((magnitude / step).round_() * step).copysign(x)
