"""Whether each layer attends under the seam as it does by itself, on the same queries, keys and values.

Round-off grows from layer to layer, and more in some models than in others: outputs of whole models do not tell it from
a fault. Here every layer is compared on the inputs that it has, and in float32 whatever the model's dtype is, from the
same rounded queries, keys and values. What is left is the round-off of two computations in float32, for which there is
a bound. It depends on how large the logits are, so large key biases, which cancel in the softmax, raise it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import MASKED, grouped_matmul, repeat_heads, upcast
from sinkscope.attention.seam import open_seam
from sinkscope.attention.taps import NAME, Seam, attends_by_us
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.errors import is_out_of_memory
from sinkscope.models.attention_functions import Attend, attending_by
from sinkscope.models.family import Family
from sinkscope.retrofits.registers import registers_before
from sinkscope.text.batch import Batch

DEVIATIONS = 4.0  # λ: a sum's error is larger than λ √n u with a probability of 2 exp(-λ²/2)
PRECISION = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}  # u by torch.get_float32_matmul_precision()


@dataclass(frozen=True)
class Comparison:
    """One layer's attention under the seam, and its weights as they are read, against its own.

    Attributes:
        layer: its index.
        difference: the largest of any query and head, ‖mix - own mix‖ ÷ the largest ‖v‖ of the head.
        excess: the largest difference ÷ what round-off explains; above 1 the two are not the same function.
    """

    layer: int
    difference: float
    excess: float


@contextmanager
def comparing(model: PreTrainedModel, family: Family, batch: Batch) -> Iterator[list[Comparison]]:
    """Compare every layer's attention with the model's own function, wherever the model runs on a batch in the block.

    The model computes with its own attention meanwhile. Layers are left out that attend by code of their own, for there
    is no function that could be called twice, and those in which sinkscope itself has changed the attention.

    Args:
        batch: without padding; the model is to be run on it.

    Yields:
        A list that is filled when the model runs; empty where no layer can be compared.
    """
    layers = {attention: layer for layer, attention in family.attentions(model).items()}
    batch = batch.with_registers(registers_before(model))
    found: list[Comparison] = []

    def compared(own: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in layers:
            return own(module, *args, **kwargs)
        if attends_by_us(module):
            return _without_seam(own, module, args, kwargs)
        theirs, read, ours = _both(own, module, args, kwargs, batch)
        found.append(Comparison(layers[module], *_difference(theirs[0], ours, read)))
        return _as(args[0].dtype, theirs)

    if family.door != "interface":
        yield found
        return
    # inside the seam: `own` calls it where the module has one, and else the model's own function
    with open_seam(model, family), attending_by(model, compared):
        yield found


def _both(
    own: Attend, module: nn.Module, args: tuple, kwargs: dict[str, Any], batch: Batch
) -> tuple[tuple, AttentionRead, torch.Tensor]:
    """Call the model's own function and ours on the same tensors, in float32 or better if its function can.

    Returns:
        The output of its function, whose first entry is the mix (B,T,H,d); the tensors read under the seam; our mix.
    """
    seam: Any = getattr(module, NAME)
    exact = partial(_as, torch.float32)
    try:
        given, named = exact(args), exact(kwargs)
        theirs = _without_seam(own, module, given, named)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        given, named = args, kwargs  # a function for half precision alone
        theirs = _without_seam(own, module, given, named)
    with _tapped(seam) as seen:
        ours = own(module, *given, **named)[0]
    assert seam.call is not None
    read = AttentionRead(seen["query"], seen["key"], seen["value"], seen["lse"], seam.call, batch)
    seam.call = None
    return theirs, read, ours


def _without_seam(own: Attend, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
    seam = module._modules.pop(NAME)
    try:
        given: tuple = own(module, *args, **kwargs)
        return given
    finally:
        module._modules[NAME] = seam


@contextmanager
def _tapped(seam: Seam) -> Iterator[dict[str, torch.Tensor]]:
    """Record the tensors that pass the seam's taps in the block."""
    seen: dict[str, torch.Tensor] = {}

    def kept(name: str) -> Callable[..., None]:
        return lambda tap, args, output: seen.update({name: output})

    with ExitStack() as hooks:
        for name in ("query", "key", "value", "lse"):
            hooks.enter_context(getattr(seam, name).register_forward_hook(kept(name)))
        yield seen


def _as(dtype: torch.dtype, given: Any) -> Any:
    """Tensors in half precision as float32, or those in float32 as half precision, alone or in tuples and dicts."""
    if isinstance(given, tuple):
        return tuple(_as(dtype, part) for part in given)
    if isinstance(given, dict):
        return {name: _as(dtype, part) for name, part in given.items()}
    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dtype != torch.float64:
        return given.to(dtype)
    return given


def _difference(theirs: torch.Tensor, ours: torch.Tensor, read: AttentionRead) -> tuple[float, float]:
    """The largest difference relative to the values, and the largest relative to what round-off explains."""
    theirs, ours = upcast(theirs).transpose(1, 2), upcast(ours).transpose(1, 2)  # (B,H,T,d)
    value = upcast(read.value)
    sizes = repeat_heads(value, theirs.shape[1]).norm(dim=-1).amax(-1, keepdim=True)  # (B,H,1)
    error = (ours - theirs).norm(dim=-1)
    if read.key.shape[2] == read.length:  # other keys than the tokens' are refused where they are measured
        for rows in row_chunks(read.length):
            keys = read.keys(rows)
            mix = grouped_matmul(read.mix_weights(rows, keys).to(value.dtype), value[:, :, keys])
            error[:, :, rows] = error[:, :, rows].maximum((mix - theirs[:, :, rows]).norm(dim=-1))
    relative = error / sizes.clamp(min=torch.finfo(error.dtype).tiny)
    return float(relative.max()), float((relative / round_off(read)).max())


def round_off(read: AttentionRead) -> torch.Tensor:
    """How far two computations of one attention may be apart, relative to the largest value: (B,H,T).

    With unit roundoff u, a sum of n products is computed with an error of at most λ √n u Σ|x y| (Higham and Mary, "A
    new approach to probabilistic rounding error analysis", 2019, theorem 2.4; λ n u without probabilities: Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1). So, with g = λ √max(d,T) u, a logit's error
    is at most

        Δ_t = g (scaling ‖q_t‖ max_s ‖k_s‖ + the largest bias + the largest sink logit)

    by Cauchy and Schwarz; a softcap makes it smaller. Logits that are wrong by Δ change each weight by a factor between
    exp(-2Δ) and exp(2Δ), so that a mix of values is wrong by at most (exp(2Δ) - 1 + g) max_s ‖v_s‖, where the last g is
    of the sum over the keys. Both computations may be wrong by so much.

    Args:
        read: of the same queries, keys and values that both have; `lse` is not used.
    """
    query, key = upcast(read.query), upcast(read.key)
    u = PRECISION[torch.get_float32_matmul_precision()]  # softmax of float64 is in float32 in many models
    if read.query.dtype in (torch.float16, torch.bfloat16):
        u = torch.finfo(read.query.dtype).eps / 2
    g = DEVIATIONS * math.sqrt(max(query.shape[-1], key.shape[2])) * u
    largest = repeat_heads(key, query.shape[1]).norm(dim=-1).amax(-1, keepdim=True)
    logits = abs(read.call.scaling) * query.norm(dim=-1) * largest
    mask, sinks = read.call.mask, read.call.sink_logits
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + float(mask.masked_fill(mask <= MASKED, 0.0).abs().max())
    if sinks is not None:
        logits = logits + float(sinks.abs().max())
    return 2 * (torch.expm1(2 * g * logits) + g)
