"""Checks on the first batch of each run that the model computes the same under the tracer as without it.

Model code that treats our attention function differently from its own (a mask left out, a scale not applied) would give
wrong numbers without an error. A short check before the run is not enough: attention to the 2048 best keys is dense for
shorter texts.

There are two comparisons:

1. Each layer's attention is compared with the model's own function on the same queries, keys and values (`comparing`).
   Round-off grows from layer to layer, by amounts that depend on the model, so outputs of whole models do not
   distinguish round-off from a fault. Here every layer is compared on its own inputs, in float32 whatever the dtype of
   the model, from the same rounded queries, keys and values. Only the round-off of two float32 computations is left,
   which has a bound (`attention_round_off`). The bound grows with the logits, also with large key biases, which cancel
   in the softmax.
2. The last layer's output is compared with that of the bare model. This finds faults outside the attention function,
   such as wrong padding or a seam that is not called. The round-off of that output is measured on the model itself
   (`round_off`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import MASKED, grouped_matmul, repeat_heads, upcast
from sinkscope.attention.seam import open_seam
from sinkscope.attention.taps import NAME, Seam, attends_by_us
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.passes import batches_of, first_size
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.measuring.tracer import model_inputs
from sinkscope.models.attention_functions import Attend, attending_by, unknown_code
from sinkscope.models.edits import edited_input
from sinkscope.models.family import Family, embedding_weight
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.quantized import is_quantized
from sinkscope.models.wiring import layer_output
from sinkscope.options.measuring import RunConfig
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch

DEVIATIONS = 4.0  # λ: a sum's error is larger than λ √n u with a probability of 2 exp(-λ²/2)
PRECISION = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}  # u by torch.get_float32_matmul_precision()
FEW = 64  # tokens of `check_beforehand`
MARGIN = 4.0  # factor by which the drawn rounding errors exceed real ones
# Upper limits of the tolerance where only outputs can be compared: with sparse attention that rounding may flip, the
# estimate of round-off would explain any difference.
LARGEST = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
ROUNDED = 5e-2  # tolerance where activations are rounded to 8 bits: one step more or less


@dataclass(frozen=True)
class Comparison:
    """One layer's attention under the seam, and the weights read there, compared with the model's own attention.

    Attributes:
        layer: Index of the layer.
        difference: Largest ‖mix - own mix‖ ÷ largest ‖v‖ of the head, over queries and heads.
        excess: Largest ratio of the difference to its round-off bound; above 1, the functions differ.
    """

    layer: int
    difference: float
    excess: float


@contextmanager
def comparing(model: PreTrainedModel, family: Family, batch: Batch) -> Iterator[list[Comparison]]:
    """Compare every layer's attention with the model's own function when the model runs in the block.

    The model itself computes with its own attention. Two kinds of layers are skipped: those with attention code of
    their own, which has no function to call twice, and those whose attention a retrofit has changed.

    Args:
        batch: The batch, without padding, on which the caller runs the model.

    Yields:
        A list that is filled when the model runs; it stays empty if no layer is comparable.
    """
    layers = {attention: layer for layer, attention in family.attentions(model).items()}
    batch = batch.with_registers(registers_before(model))
    found: list[Comparison] = []

    def compared(own: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in layers:
            return own(module, *args, **kwargs)
        if attends_by_us(module):
            return _without_seam(own, module, args, kwargs)
        theirs, read, ours = _outputs_of_both(own, module, args, kwargs, batch)
        found.append(Comparison(layers[module], *_difference(theirs[0], ours, read)))
        return _converted(args[0].dtype, theirs)

    if family.door != "interface":
        yield found
        return
    # `own` calls the seam if the module has one, else the model's own function
    with open_seam(model, family), attending_by(model, compared):
        yield found


def _outputs_of_both(
    own: Attend, module: nn.Module, args: tuple, kwargs: dict[str, Any], batch: Batch
) -> tuple[tuple, AttentionRead, torch.Tensor]:
    """Call the model's own function and ours on the same tensors, in float32 or better if the model's function can.

    Returns:
        The output of the model's function, whose first entry is the mix (B,T,H,d); the tensors read under the seam;
        our mix.
    """
    seam: Any = getattr(module, NAME)
    exact = partial(_converted, torch.float32)
    try:
        given, named = exact(args), exact(kwargs)
        theirs = _without_seam(own, module, given, named)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        given, named = args, kwargs  # the function supports half precision only
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


def _converted(dtype: torch.dtype, given: Any) -> Any:
    """Convert floating-point tensors other than float64 to a dtype, also inside tuples and dicts."""
    if isinstance(given, tuple):
        return tuple(_converted(dtype, part) for part in given)
    if isinstance(given, dict):
        return {name: _converted(dtype, part) for name, part in given.items()}
    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dtype != torch.float64:
        return given.to(dtype)
    return given


def _difference(theirs: torch.Tensor, ours: torch.Tensor, read: AttentionRead) -> tuple[float, float]:
    """Return the largest difference relative to the values, and the largest relative to the round-off bound."""
    theirs, ours = upcast(theirs).transpose(1, 2), upcast(ours).transpose(1, 2)  # (B,H,T,d)
    value = upcast(read.value)
    sizes = repeat_heads(value, theirs.shape[1]).norm(dim=-1).amax(-1, keepdim=True)  # (B,H,1)
    error = (ours - theirs).norm(dim=-1)
    if read.key.shape[2] == read.length:  # the tracer refuses keys that belong to no token
        for rows in row_chunks(read.length):
            keys = read.keys(rows)
            mix = grouped_matmul(read.mix_weights(rows, keys).to(value.dtype), value[:, :, keys])
            error[:, :, rows] = error[:, :, rows].maximum((mix - theirs[:, :, rows]).norm(dim=-1))
    relative = error / sizes.clamp(min=torch.finfo(error.dtype).tiny)
    return float(relative.max()), float((relative / attention_round_off(read)).max())


def attention_round_off(read: AttentionRead) -> torch.Tensor:
    """Return a bound on the difference of two computations of one attention, relative to the largest value: (B,H,T).

    With unit roundoff u, a sum of n products is computed with an error of at most λ √n u Σ|x y| (Higham and Mary, "A
    new approach to probabilistic rounding error analysis", 2019, theorem 2.4; λ n u without probabilities: Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1). So, with g = λ √max(d,T) u, a logit's error
    is at most

        Δ_t = g (scaling ‖q_t‖ max_s ‖k_s‖ + the largest bias + the largest sink logit)

    by Cauchy and Schwarz; a softcap makes it smaller. An error Δ of the logits changes each weight by a factor between
    exp(-2Δ) and exp(2Δ), so the error of a mix of values is at most (exp(2Δ) - 1 + g) max_s ‖v_s‖, where the last g
    comes from the sum over the keys. The bound is twice that, because both computations have errors.

    Args:
        read: The queries, keys and values of both computations; `lse` is not used.
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


@dataclass(frozen=True)
class RoundOff:
    """The differences that a model's round-off explains.

    Attributes:
        tolerance: Largest difference of the last layer's output from the bare model's, relative to the token's norm.
        attention: The comparisons of each layer's attention; empty if the model has attention code of its own.
    """

    tolerance: float
    attention: tuple[Comparison, ...]

    @property
    def other_attention(self) -> Comparison | None:
        """The layer whose attention differs most from the model's own; None if all agree up to round-off."""
        worst = max(self.attention, key=lambda found: found.excess, default=None)
        return worst if worst is not None and worst.excess > 1 else None


def round_off(model: PreTrainedModel, family: Family, batch: Batch, bare: torch.Tensor) -> RoundOff:
    """Estimate round-off by running the model with perturbed layer inputs, and compare one sequence's attention.

    A layer computed with rounding errors gives the exact result for an input with a small relative error (Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, sections 1.5 and 1.8). How much of it reaches the last layer
    depends on the model, and is estimated by adding errors of random sign to the input of every layer (statistical
    condition estimation: Kenney and Laub, 1994). Their size is one unit in the last place or, if larger, that of a sum
    over D channels in float32, √D u (Higham and Mary, 2019), because float64 models compute norms and softmax in
    float32; times MARGIN. MARGIN scales the errors rather than their effect because expert routers are discontinuous:
    a choice that rounding may flip is then flipped here too.

    Args:
        batch: A batch without padding.
        bare: (B,T,D), the last layer's output on that batch.
    """
    layer = family.last_layer(model)
    inputs = model_inputs(model, batch, False, family.first_position)
    with ExitStack() as edits:
        draw: dict[torch.device, torch.Generator] = {}
        for module in family.layer_modules(model):
            edits.enter_context(edited_input(module, lambda _, x: _perturbed(x, draw)))
        moved = layer_output(model, family, layer, inputs)
    first = Batch(batch.token_ids[:1], batch.attention_mask[:1])
    with comparing(model, family, first) as attention:
        layer_output(model, family, layer, model_inputs(model, first, False, family.first_position))
    tolerance = largest_difference(moved, bare, torch.ones(bare.shape[:2]))
    if math.isnan(tolerance):  # half precision has overflowed; the tracer reports it if the bare model does so too
        tolerance = 1.0
    if not family.attentions(model).keys() <= {one.layer for one in attention}:
        tolerance = min(tolerance, LARGEST[bare.dtype])
    return RoundOff(max(tolerance, ROUNDED if is_quantized(model) else 0.0), tuple(attention))


def _perturbed(x: Any, draw: dict[torch.device, torch.Generator]) -> Any:
    """Add a rounding error of random sign to every number of a layer's input."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    if x.device not in draw:
        draw[x.device] = torch.Generator(x.device).manual_seed(0)
    size = MARGIN * max(torch.finfo(x.dtype).eps, math.sqrt(x.shape[-1]) * torch.finfo(torch.float32).eps / 2)
    up = torch.randint(0, 2, x.shape, generator=draw[x.device], device=x.device, dtype=torch.bool)
    return torch.where(up, x * (1 + size), x * (1 - size))


class Parity(Observable):
    """Compares the last layer's output on the first batch with that of the bare model.

    Raises:
        SinkscopeError: While the batch is read, they differ by more than round-off. (The tracer reports NaN.)
    """

    sites = ("layer_out",)

    def __init__(self, layer: int, bare: torch.Tensor, tolerance: float) -> None:
        super().__init__(Settings())
        self.layer = layer
        self.bare = bare  # (B,T,D), of the run's first sequences
        self.tolerance = tolerance
        self.error: float | None = None

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if layer != self.layer or self.error is not None:
            return
        rows, columns = (min(sizes) for sizes in zip(self.bare.shape[:2], reading.tensor.shape[:2], strict=True))
        self.error = largest_difference(
            reading.tensor[:rows, :columns], self.bare[:rows, :columns], batch.attention_mask[:rows, :columns]
        )
        if self.error > self.tolerance:
            padded = "" if batch.valid is None else "in a padded batch "
            advice = "" if batch.valid is None else "take --batch-size 1, which pads nothing; "
            raise _mismatch(
                f"the last layer's output differs by {self.error:.1e} of its norm, by round-off at most "
                f"{self.tolerance:.1e}",
                padded,
                advice,
            )


def _mismatch(how: str, padded: str = "", advice: str = "") -> SinkscopeError:
    return SinkscopeError(
        f"{padded}under the tracer, this model computes something different from the bare model ({how}), so its "
        f"numbers would be wrong; {advice}--skip-parity measures anyway"
    )


def check_attention(found: RoundOff) -> None:
    """Raise SinkscopeError if a layer's attention is not the same function as the model's own."""
    worst = found.other_attention
    if worst is not None:
        raise _mismatch(
            f"layer {worst.layer} computes a different attention: on the same queries and keys, it differs by "
            f"{worst.difference:.1e} of its values' norm, {worst.excess:.0f} times what round-off explains"
        )


def largest_difference(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the largest ‖a - b‖ ÷ ‖b‖ of any real token, for a and b of shape (B,T,D); NaN if one contains NaN."""
    found, expected = upcast(found), upcast(expected.to(found.device))
    sizes = expected.norm(dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return float(((found - expected).norm(dim=-1) / sizes)[mask.bool().to(found.device)].max())


@dataclass
class ParityCheck:
    """The bare model's output on the first batch, and the observables that compare a pass with it.

    Attributes:
        layer: The last layer.
        expected: (B,T,D), its output; None with --skip-parity.
        tolerance: Largest relative difference that is accepted.
    """

    layer: int
    expected: torch.Tensor | None
    tolerance: float = 0.0
    _used: list[Parity] = field(default_factory=list)

    def fresh(self) -> list[Observable]:
        """Return the observables for one pass; none with --skip-parity."""
        self._used = [] if self.expected is None else [Parity(self.layer, self.expected, self.tolerance)]
        return list(self._used)

    @property
    def error(self) -> float | None:
        """The relative difference in the last pass, once it has begun."""
        return self._used[0].error if self._used else None


def parity_check(subject: Subject, config: RunConfig, costs: int = 1) -> ParityCheck:
    """Run the bare model on the first batch, compare its attention and determine the tolerance.

    A padded batch is run one sequence at a time, because padding changes the output of some models.

    Args:
        costs: Memory of the pass to be compared, as in `pass_over`.

    Raises:
        SinkscopeError: A layer's attention is a different function under the tracer.
    """
    model, family = subject.loaded.model, subject.family
    layer, size = family.last_layer(model), first_size(subject.inputs, model, config.batch_size, costs)
    if config.skip_parity or not team().is_first:  # only the first process reads the first batch
        return ParityCheck(layer, None)

    def bare(size: int) -> ParityCheck:
        batch = next(batches_of(subject.inputs, size))
        alone = [batch] if batch.valid is None else list(_without_padding(batch))
        given = [model_inputs(model, each, False, family.first_position) for each in alone]
        outputs = [layer_output(model, family, layer, inputs) for inputs in given]
        found = [round_off(model, family, each, output) for each, output in zip(alone, outputs, strict=True)]
        for one in found:
            check_attention(one)
        expected = outputs[0] if batch.valid is None else _with_padding(outputs, batch)
        return ParityCheck(layer, expected, max(one.tolerance for one in found))

    try:
        return bare(size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return bare(1)


def _without_padding(batch: Batch) -> Iterator[Batch]:
    """Yield the sequences of a padded batch without their padding."""
    for ids, start, length in zip(batch.token_ids, batch.start.tolist(), batch.lengths.tolist(), strict=True):
        alone = ids[None, start : start + length]
        yield Batch(alone, torch.ones_like(alone))


def _with_padding(outputs: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Place the outputs (1,t,D) of the sequences of a padded batch in one tensor (B,T,D), with zeros for padding."""
    width = batch.token_ids.shape[1]
    rows = zip(outputs, batch.start.tolist(), strict=True)
    return torch.cat([F.pad(x, (0, 0, start, width - start - x.shape[1])) for x, start in rows])


@torch.no_grad()
def check_beforehand(model: PreTrainedModel, family: Family, is_calibrated: bool = False) -> None:
    """Compare a model with and without the seams on a few tokens, unless its attention is transformers' own code.

    For uses of a model that measure no text. The tests cover transformers' own code of the known families, so such a
    model is not run here, and the user's hooks are not called.

    Args:
        model: The model that is to be changed or trained.
        family: Its row in the table of families.
        is_calibrated: Whether the row was calibrated instead of taken from the table.

    Raises:
        SinkscopeError: The model computes something else with the seams, or does not call them.
    """
    code = unknown_code(family.attentions(model).values())
    if code is None and not is_calibrated:
        return
    what = f"this model attends by {code or 'code of its own'}"
    ids = torch.arange(3, 3 + min(FEW, position_limit(model, family) or FEW))[None] % len(embedding_weight(model))
    batch, layer = Batch(ids, torch.ones_like(ids)), family.last_layer(model)
    with undisturbed(model):
        inputs = model_inputs(model, batch, False, family.first_position)
        bare = layer_output(model, family, layer, inputs)
        own = round_off(model, family, batch, bare)
        with open_seam(model, family) as seams:
            seamed = layer_output(model, family, layer, inputs)
    check_attention(own)
    if any(seam.call is None for seam in seams.values()):
        raise SinkscopeError(f"{what}, in which sinkscope does not recognize one softmax of q·k")
    error = largest_difference(seamed, bare, batch.attention_mask)
    if error > own.tolerance:
        raise SinkscopeError(
            f"{what}, and under the tracer it computes something different from the bare model (the last layer's "
            f"output differs by {error:.1e} of its norm): a change or training would apply to another model"
        )
