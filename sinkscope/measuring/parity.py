"""Whether the model computes under the tracer what it computes by itself: looked at in each run's first batch.

Code that treats our attention otherwise than its own (a mask left out, a scale not applied) would give wrong numbers
without an error. A short check beforehand would not find all: attention to the 2048 best keys is dense below that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sinkscope.attention.seam import open_seam
from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.passes import batches_of, first_size
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.measuring.tracer import model_inputs
from sinkscope.models.attention_functions import unknown_code
from sinkscope.models.family import Family, embedding_weight
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.quantized import is_quantized
from sinkscope.models.wiring import layer_output
from sinkscope.options.measuring import RunConfig
from sinkscope.text.batch import Batch

# How far an output may differ by the order of sums, relative to the norm of its token
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
FEW = 64  # tokens of a check beforehand
ROUNDED = 5e-2  # where activations are rounded to 8 bits: one step more or less


def tolerance(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """How far an output of this dtype may differ from the bare model's."""
    return max(TOLERANCE[dtype], ROUNDED if is_quantized(model) else 0.0)


class Parity(Observable):
    """The last layer's output on the first batch, compared with that of the bare model.

    Raises:
        SinkscopeError: while the batch is read, they differ by more than round-off. (NaN is the tracer's to report.)
    """

    sites = ("layer_out",)

    def __init__(self, model: PreTrainedModel, layer: int, bare: torch.Tensor) -> None:
        super().__init__(Settings())
        self.model = model
        self.layer = layer
        self.bare = bare  # (B,T,D), of the run's first sequences
        self.error: float | None = None

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if layer != self.layer or self.error is not None:
            return
        rows, columns = (min(sizes) for sizes in zip(self.bare.shape[:2], reading.tensor.shape[:2], strict=True))
        self.error = largest_difference(
            reading.tensor[:rows, :columns], self.bare[:rows, :columns], batch.attention_mask[:rows, :columns]
        )
        if self.error > tolerance(self.model, reading.tensor.dtype):
            padded = "" if batch.valid is None else "in a padded batch "
            advice = "" if batch.valid is None else "take --batch-size 1, which pads nothing; "
            raise SinkscopeError(
                f"{padded}under the tracer this model computes something else than by itself (the last layer's output "
                f"differs by {self.error:.1e} of its norm), and numbers would be wrong; {advice}--skip-parity measures "
                "all the same"
            )


def largest_difference(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest ‖a - b‖ ÷ ‖b‖ of any real token, for a and b of shape (B,T,D); NaN where one of them holds a NaN."""
    found, expected = found.float(), expected.to(found.device).float()
    sizes = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found - expected).norm(dim=-1) / sizes)[mask.bool().to(found.device)].max())


@dataclass
class ParityCheck:
    """The bare model's output on the first batch, and the observables that a pass compares with it.

    expected: (B,T,D) of the layer; None with --skip-parity.
    """

    model: PreTrainedModel
    layer: int
    expected: torch.Tensor | None
    _used: list[Parity] = field(default_factory=list)

    def fresh(self) -> list[Observable]:
        """Observables for one pass; none with --skip-parity."""
        self._used = [] if self.expected is None else [Parity(self.model, self.layer, self.expected)]
        return list(self._used)

    @property
    def error(self) -> float | None:
        """Of the last pass, once it has begun."""
        return self._used[0].error if self._used else None


def parity_check(subject: Subject, config: RunConfig, costs: int = 1) -> ParityCheck:
    """Run the bare model on the first batch; where that is padded, on each sequence alone: some models let padding
    change what they give.

    Args:
        costs: memory of the pass that is to be compared, as for `pass_over`.
    """
    model, family = subject.loaded.model, subject.family
    layer, size = family.last_layer(model), first_size(subject.inputs, model, config.batch_size, costs)
    if config.skip_parity or not team().is_first:  # the first of several processes reads the first batch
        return ParityCheck(model, layer, None)

    def bare(size: int) -> torch.Tensor:
        batch = next(batches_of(subject.inputs, size))
        alone = [batch] if batch.valid is None else _each_alone(batch)
        given = [model_inputs(model, each, False, family.first_position) for each in alone]
        outputs = [layer_output(model, family, layer, inputs) for inputs in given]
        return outputs[0] if batch.valid is None else _at_their_places(outputs, batch)

    try:
        return ParityCheck(model, layer, bare(size))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return ParityCheck(model, layer, bare(1))


def _each_alone(batch: Batch) -> Iterator[Batch]:
    """The sequences of a padded batch, without the padding."""
    for ids, start, length in zip(batch.token_ids, batch.start.tolist(), batch.lengths.tolist(), strict=True):
        alone = ids[None, start : start + length]
        yield Batch(alone, torch.ones_like(alone))


def _at_their_places(outputs: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Outputs (1,t,D) of the sequences of a padded batch as that holds them, (B,T,D), with zeros for the padding."""
    width = batch.token_ids.shape[1]
    rows = zip(outputs, batch.start.tolist(), strict=True)
    return torch.cat([F.pad(x, (0, 0, start, width - start - x.shape[1])) for x, start in rows])


@torch.no_grad()
def check_beforehand(model: PreTrainedModel, family: Family, is_calibrated: bool = False) -> None:
    """Compare a model with itself under the seams on few tokens, where its attention is not transformers' own code.

    For uses of a model that measure no text. transformers' own code of a known family is compared by the tests, so that
    such a model does not run here, and hooks of the user see nothing of it.

    Args:
        model: that is to be changed or trained.
        family: its row.
        is_calibrated: whether the row is not in the table of families.

    Raises:
        SinkscopeError: it computes something else under the seams, or not through them.
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
        with open_seam(model, family) as seams:
            seamed = layer_output(model, family, layer, inputs)
    if any(seam.call is None for seam in seams.values()):
        raise SinkscopeError(f"{what}, in which sinkscope does not recognize one softmax of q·k")
    error = largest_difference(seamed, bare, batch.attention_mask)
    if error > tolerance(model, next(model.parameters()).dtype):
        raise SinkscopeError(
            f"{what}, and under the tracer it computes something else than by itself (the last layer's output differs "
            f"by {error:.1e} of its norm): what is changed or trained would be another model"
        )
