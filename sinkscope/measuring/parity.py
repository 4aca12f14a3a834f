"""Checks on the first batch of each run that the model computes the same under the tracer as without it.

Model code that treats our attention function differently from its own (a mask left out, a scale not applied) would give
wrong numbers without an error. A short check before the run is not enough, because sparse attention is dense for short
texts. There are two comparisons:

1. Each layer's attention is compared with the model's own function on the same queries, keys and values, in float32
   whatever the dtype of the model (`comparing`). Only the round-off of two computations is left, which has a bound
   (`attention_round_off`); the round-off of a whole model has none.
2. The last layer's output is compared with that of the bare model. This finds faults outside the attention function,
   such as wrong padding or a seam that is not called. Its round-off is measured on the model itself (`round_off`).
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import MASKED, grouped_matmul, repeat_heads, upcast
from sinkscope.attention.seam import open_seam, recorded_taps, without_seam
from sinkscope.attention.taps import NAME, attends_by_us
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.passes import first_size
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.measuring.tracer import model_inputs
from sinkscope.models.edits import Attend, attending_by, edited_input, unknown_code
from sinkscope.models.family import Family, embedding_weight
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.packed import packed_tolerance
from sinkscope.models.wiring import output_of
from sinkscope.options.measuring import RunConfig
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch, on_cpu

DEVIATIONS = 4.0  # λ: a sum's error is larger than λ √n u with a probability of 2 exp(-λ²/2)
UNIT_ROUNDOFF = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}  # u by torch.get_float32_matmul_precision()
CHECKED_TOKENS = 64  # tokens of `check_beforehand`
ROUNDING_MARGIN = 4.0  # factor by which the drawn rounding errors exceed real rounding errors
# Upper limits of the tolerance where only outputs can be compared: with sparse attention that rounding may flip, the
# estimate of round-off would explain any difference.
LARGEST_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class AttentionComparison:
    """One layer's attention under the seam, and the weights read there, compared with the model's own attention."""

    layer: int
    difference: float  # largest ‖mix - own mix‖ ÷ largest ‖v‖ of the head, over queries and heads
    excess: float  # largest ratio of the difference to its round-off bound; above 1, the functions differ


@contextmanager
def comparing(model: PreTrainedModel, family: Family, batch: Batch) -> Iterator[list[AttentionComparison]]:
    """Compare every layer's attention with the model's own function when the caller runs the model on this batch.

    The batch has no padding. Layers with attention code of their own are skipped, because it has no function to call
    twice, and so are layers changed by a retrofit. The list is filled when the block ends.
    """
    layers = {attention: layer for layer, attention in family.attentions(model).items()}
    batch = batch.with_registers(registers_before(model))
    comparisons: list[AttentionComparison] = []
    differences: list[tuple[int, torch.Tensor]] = []  # by layer, on their device

    def compared(attend: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in layers:
            return attend(module, *args, **kwargs)
        if attends_by_us(module):
            return without_seam(attend, module, args, kwargs)
        try:  # in float32 or better
            values, named = _converted(torch.float32, (args, kwargs))
            theirs = without_seam(attend, module, values, named)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            values, named = args, kwargs  # the function supports half precision only
            theirs = without_seam(attend, module, values, named)
        layer, seam = layers[module], getattr(module, NAME)
        with recorded_taps({layer: seam}) as seen:
            ours = attend(module, *values, **named)[0]
        read = AttentionRead(**seen[layer], call=seam.call, batch=batch)
        seam.call = None
        differences.append((layer, _difference(theirs[0], ours, read)))
        return _converted(args[0].dtype, theirs)

    if family.door != "interface":
        yield comparisons
        return
    # `attend` calls the seam if the module has one, else the model's own function
    with open_seam(model, family), attending_by(model, compared):
        yield comparisons
    for (layer, _), difference in zip(differences, on_cpu(x for _, x in differences), strict=True):
        comparisons.append(AttentionComparison(layer, *difference.tolist()))


def _converted(dtype: torch.dtype, values: Any) -> Any:
    """Convert floating-point tensors other than float64 to a dtype, also inside tuples and dicts."""
    if isinstance(values, tuple):
        return tuple(_converted(dtype, part) for part in values)
    if isinstance(values, dict):
        return {name: _converted(dtype, part) for name, part in values.items()}
    is_converted = isinstance(values, torch.Tensor) and values.is_floating_point() and values.dtype != torch.float64
    return values.to(dtype) if is_converted else values


def _difference(theirs: torch.Tensor, ours: torch.Tensor, read: AttentionRead) -> torch.Tensor:
    """Return the largest difference relative to the values, and the largest relative to the round-off bound, (2,)."""
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
    return torch.stack([relative.max(), (relative / attention_round_off(read)).max()])


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
    """
    query, key = upcast(read.query), upcast(read.key)
    u = UNIT_ROUNDOFF[torch.get_float32_matmul_precision()]  # softmax of float64 is in float32 in many models
    if read.query.dtype in (torch.float16, torch.bfloat16):
        u = torch.finfo(read.query.dtype).eps / 2
    g = DEVIATIONS * math.sqrt(max(query.shape[-1], key.shape[2])) * u
    largest = repeat_heads(key, query.shape[1]).norm(dim=-1).amax(-1, keepdim=True)
    logits = abs(read.call.scaling) * query.norm(dim=-1) * largest
    mask, sinks = read.call.mask, read.call.sink_logits
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask.masked_fill(mask <= MASKED, 0.0).abs().max()
    if sinks is not None:
        logits = logits + sinks.abs().max()
    return 2 * (torch.expm1(2 * g * logits) + g)


@dataclass(frozen=True)
class RoundOff:
    """The differences that a model's round-off explains."""

    tolerance: float  # largest difference of the last layer's output from the bare model's, relative to its norm
    attention: tuple[AttentionComparison, ...]  # one per layer; empty if the model has attention code of its own

    def check_attention(self) -> None:
        """Raise SinkscopeError if a layer's attention is not the same function as the model's own."""
        worst = max(self.attention, key=lambda one: one.excess, default=None)
        if worst is not None and worst.excess > 1:
            raise _mismatch(
                f"layer {worst.layer} computes a different attention: on the same queries and keys, it differs by "
                f"{worst.difference:.1e} of its values' norm, {worst.excess:.0f} times the bound on round-off"
            )


def last_output(model: PreTrainedModel, family: Family, batch: Batch) -> torch.Tensor:
    """Return the output (B,T,D) of the bare model's last layer on a batch, on the CPU."""
    last = family.last_layer(model)
    path, _, _ = family.block(last).sites["layer_out"].rpartition(".")
    module = family.layer_modules(model)[last].get_submodule(path)
    stream = family.stream(output_of(module, model, model_inputs(model, batch, False, family.first_position)))
    return stream.view(len(batch.token_ids), -1, stream.shape[-1])


def round_off(model: PreTrainedModel, family: Family, batch: Batch, bare: torch.Tensor) -> RoundOff:
    """Estimate round-off by running the model with perturbed layer inputs, and compare one sequence's attention.

    A layer computed with rounding errors gives the exact result for an input with a small relative error (Higham,
    "Accuracy and Stability of Numerical Algorithms", 2002, sections 1.5 and 1.8). How much of it reaches the last layer
    depends on the model, and is estimated by adding errors of random sign to the input of every layer (statistical
    condition estimation: Kenney and Laub, 1994). Their size is one unit in the last place or, if larger, that of a sum
    over D channels in float32, √D u (Higham and Mary, 2019), because float64 models compute norms and softmax in
    float32, or that of a factor in TF32 if it is allowed; times ROUNDING_MARGIN, which scales the errors rather than
    their effect because expert routers are discontinuous: a choice that rounding may flip is then flipped here too.
    `bare` (B,T,D) is the last layer's output on the batch, which has no padding.
    """
    with perturbed_layers(model, family):
        moved = last_output(model, family, batch)
    first = Batch(batch.token_ids[:1], batch.attention_mask[:1])
    with comparing(model, family, first) as attention:
        last_output(model, family, first)
    tolerance = largest_difference(moved, bare, torch.ones(bare.shape[:2]))
    if math.isnan(tolerance):  # half precision has overflowed; the tracer reports it if the bare model does so too
        tolerance = 1.0
    if not family.attentions(model).keys() <= {one.layer for one in attention}:
        tolerance = min(tolerance, LARGEST_TOLERANCES[bare.dtype])
    return RoundOff(max(tolerance, packed_tolerance(model)), tuple(attention))


@contextmanager
def perturbed_layers(model: PreTrainedModel, family: Family, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Add rounding errors of a dtype, by default the model's, to every layer's input until the end of the block."""
    draw: dict[torch.device, torch.Generator] = {}
    rounded = 2 * UNIT_ROUNDOFF[torch.get_float32_matmul_precision()]  # TF32 rounds the factors of each product

    def perturbed(module: nn.Module, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        if x.device not in draw:
            draw[x.device] = torch.Generator(x.device).manual_seed(0)
        sum_over_channels = math.sqrt(x.shape[-1]) * torch.finfo(torch.float32).eps / 2
        size = ROUNDING_MARGIN * max(torch.finfo(dtype or x.dtype).eps, rounded, sum_over_channels)
        up = torch.randint(0, 2, x.shape, generator=draw[x.device], device=x.device, dtype=torch.bool)
        return torch.where(up, x * (1 + size), x * (1 - size))

    with ExitStack() as edits:
        for module in family.layer_modules(model):
            edits.enter_context(edited_input(module, perturbed))
        yield


class Parity(Observable):
    """Compares the last layer's output on the first batch with the bare model's. Raises SinkscopeError while the batch
    is read if they differ by more than round-off. (The tracer reports NaN.)
    """

    sites = ("layer_out",)

    def __init__(self, layer: int, bare: torch.Tensor | None, tolerance: float = 0.0) -> None:
        super().__init__(Settings())
        self.layer = layer  # the last layer
        self.bare = bare  # (B,T,D), of the run's first sequences; None with --skip-parity
        self.tolerance = tolerance  # largest relative difference that is accepted
        self.error: float | None = None  # the relative difference in the last pass, once it has begun

    def fresh(self) -> list[Observable]:
        """Return the observables for one pass: this one, or none with --skip-parity."""
        self.error = None
        return [] if self.bare is None else [self]

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if layer != self.layer or self.error is not None or self.bare is None:
            return
        rows, columns = (min(sizes) for sizes in zip(self.bare.shape[:2], reading.tensor.shape[:2], strict=True))
        self.error = largest_difference(
            reading.tensor[:rows, :columns], self.bare[:rows, :columns], batch.attention_mask[:rows, :columns]
        )
        if self.error > self.tolerance:
            how = f"differs by {self.error:.1e} of its norm, by round-off at most {self.tolerance:.1e}"
            raise _mismatch(f"the last layer's output {how}", is_padded=batch.valid is not None)


def _mismatch(how: str, is_padded: bool = False) -> SinkscopeError:
    where, advice = ("in a padded batch ", "take --batch-size 1, which pads nothing; ") if is_padded else ("", "")
    return SinkscopeError(
        f"{where}under the tracer, this model computes something different from the bare model ({how}), so its "
        f"numbers would be wrong; {advice}--skip-parity measures anyway"
    )


def largest_difference(actual: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the largest ‖a - b‖ ÷ ‖b‖ of any real token, for a and b of shape (B,T,D); NaN if one contains NaN."""
    actual, expected = upcast(actual), upcast(expected.to(actual.device))
    sizes = expected.norm(dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return float(((actual - expected).norm(dim=-1) / sizes)[mask.bool().to(actual.device)].max())


def _unpadded(batch: Batch) -> list[Batch]:
    """Return each sequence of a padded batch as a batch without padding."""
    rows = zip(batch.token_ids, batch.start.tolist(), batch.lengths.tolist(), strict=True)
    texts = [ids[None, start : start + length] for ids, start, length in rows]
    return [Batch(ids, torch.ones_like(ids)) for ids in texts]


def parity_check(subject: Subject, config: RunConfig, backward: bool = False) -> Parity:
    """Run the bare model on the first batch, compare its attention and determine the tolerance.

    A padded batch is run one sequence at a time, because padding changes the output of some models. The batch whose
    lengths differ most shows whether a short sequence is read differently beside a long one. Raises SinkscopeError if
    it is, or if a layer's attention is a different function.
    """
    model, family = subject.loaded.model, subject.family
    layer, size = family.last_layer(model), first_size(subject.inputs, model, config.batch_size, backward)
    if config.skip_parity or not team().is_first:  # only the first process reads the first batch
        return Parity(layer, None)

    def bare(size: int) -> Parity:
        batch = next(subject.inputs.batches(size))
        alone = [batch] if batch.valid is None else _unpadded(batch)
        outputs = [last_output(model, family, each) for each in alone]
        estimates = [round_off(model, family, each, output) for each, output in zip(alone, outputs, strict=True)]
        for estimate in estimates:
            estimate.check_attention()
        tolerance = max(estimate.tolerance for estimate in estimates)
        if batch.valid is not None:  # zeros for padding
            width, padded = batch.token_ids.shape[1], zip(outputs, batch.start.tolist(), strict=True)
            outputs = [torch.cat([F.pad(x, (0, 0, start, width - start - x.shape[1])) for x, start in padded])]
        check_padding(tolerance, size)
        return Parity(layer, outputs[0], tolerance)

    def check_padding(tolerance: float, size: int) -> None:
        widest = max(subject.inputs.batches(size), key=lambda batch: int(batch.lengths.max() - batch.lengths.min()))
        if widest.valid is None or widest.first == 0:  # the first batch is compared anyway
            return
        ends = [int(widest.lengths.argmin()), int(widest.lengths.argmax())]
        pair = Batch(widest.token_ids[ends], widest.attention_mask[ends])
        short, start = _unpadded(pair)[0], int(pair.start[0])
        alone, beside = last_output(model, family, short), last_output(model, family, pair)
        with perturbed_layers(model, family):
            moved = last_output(model, family, short)
        everything = torch.ones(alone.shape[:2])
        error = largest_difference(beside[:1, start : start + alone.shape[1]], alone, everything)
        if error > max(tolerance, largest_difference(moved, alone, everything)):
            how = f"a text's last layer beside a longer text differs by {error:.1e} of its norm"
            raise _mismatch(how, is_padded=True)

    try:
        return bare(size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return bare(1)


@torch.no_grad()
def check_beforehand(model: PreTrainedModel, family: Family, is_calibrated: bool = False) -> None:
    """Compare a model with and without the seams on a few tokens, for uses of a model that measure no text.

    A model of a known family with transformers' own code is not run, and the user's hooks are not called. Raises
    SinkscopeError if the model computes something else with the seams, or does not call them.
    """
    code = unknown_code(family.attentions(model).values())
    if code is None and not is_calibrated:
        return
    what = f"this model attends by {code or 'code of its own'}"
    length = min(CHECKED_TOKENS, position_limit(model, family) or CHECKED_TOKENS)
    ids = torch.arange(3, 3 + length)[None] % len(embedding_weight(model))
    batch = Batch(ids, torch.ones_like(ids))
    with undisturbed(model):
        bare = last_output(model, family, batch)
        estimate = round_off(model, family, batch, bare)
        with open_seam(model, family) as seams:
            seamed = last_output(model, family, batch)
    estimate.check_attention()
    if any(seam.call is None for seam in seams.values()):
        raise SinkscopeError(f"{what}, in which sinkscope does not recognize one softmax of q·k")
    error = largest_difference(seamed, bare, batch.attention_mask)
    if error > estimate.tolerance:
        raise SinkscopeError(
            f"{what}, and under the tracer it computes something different from the bare model (the last layer's "
            f"output differs by {error:.1e} of its norm): a change or training would apply to another model"
        )
