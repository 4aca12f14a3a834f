"""Whether a model overflows in a dtype: predicted by one pass in the model's own precision, then checked by runs.

The pass keeps the largest magnitude of every tensor that enters or leaves a module, in the order in which they appear:
a residual sum is a norm's input, the product of gate and up projection is the down projection's. It also keeps what a
kernel may hide: the largest |q·k|, and the largest square and sum of squares in norms. In float16 and bfloat16 the
model is then run with its weights cast. In float8 linear layers are run as they are served, with a scale for each
output channel of a weight and each token of an input (the preset FP8_DYNAMIC); and, for a note, without scales, with
their inputs rounded to float8 and back.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from sinkscope.attention.kernels import products as products_of
from sinkscope.attention.kernels import upcast
from sinkscope.attention.seam import open_seam
from sinkscope.attention.taps import NAME
from sinkscope.attention.weights import row_chunks
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.engine import Setting, logits_on, resampled_cost, run_settings
from sinkscope.measuring.losses import loss_in_chunks
from sinkscope.measuring.observables.gradient import NormGain, norm_gains
from sinkscope.measuring.parity import LARGEST_TOLERANCES, largest_difference
from sinkscope.measuring.subject import Subject
from sinkscope.models.edits import Edit, edited_input, edited_output, replaced, wrapped_forward
from sinkscope.models.family import RESIDUAL_SITES, Family
from sinkscope.models.packed import check_not_packed
from sinkscope.models.projections import LINEAR_LAYERS, NO_LAYER, layer_and_kind, linear_modules
from sinkscope.models.wiring import first_floats
from sinkscope.quantization.formats import PRESETS
from sinkscope.quantization.products import Matrix, Product, changed_products, matrices_of
from sinkscope.quantization.rounding import snap
from sinkscope.results.findings import HEADROOM
from sinkscope.results.statistics import bootstrap
from sinkscope.results.tables import COORDINATE, TOKEN_PLACE, Column, Columns
from sinkscope.text.batch import Batch

OVERFLOW_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
ROWS = PRESETS["FP8_DYNAMIC"].weights  # a scale for each row: an output channel, or a token of an input
RESIDUAL_STREAM = ("layer_in", "mid", "layer_out")  # the residual stream itself
BRANCHES = ("attn_out", "mlp_out")
SQUARE, CENTERED, TOTAL = "x²", "(x − mean)²", "sum of squares"  # numbers inside an RMSNorm or a LayerNorm
QK, SCALED_QK = "q·k", "scaled q·k"  # and inside attention
FULL, DECOMPOSED, CLIPPED, RESCALED = "as it is", "norms decomposed", "clipped", "rescaled"  # settings
SCALED = "scaled"  # float8 as it is served

OVERFLOW_TABLES: dict[str, Columns] = {
    "overflow": (
        Column("order", "place in the order in which the tensors are computed, from 0 on", kind="whole"),
        Column(
            "site",
            "a site of the residual stream, query, key, value or attn_mix, or else the module's path in its layer and "
            "whether its input or output is meant; inside a kernel: q·k, scaled q·k, or a norm's x² or (x − mean)² and "
            "their sum",
            kind="text",
        ),
        Column(
            "path",
            "where the tensor first appears: a module's path, .input or .output; inside a kernel also what it is",
            kind="text",
        ),
        Column("largest", "largest magnitude over all sequences, in the model's own precision"),
        Column("headroom", "the largest finite number of the dtype ÷ largest"),
        Column("is_inside", "whether it is inside a kernel, where it overflows only if decomposed", kind="truth"),
        Column("overflows", "whether it rounds to more than the dtype's largest finite number", kind="truth"),
        Column("is_finite", "whether all its numbers are finite when run in the dtype", kind="truth"),
        Column("clip", "bound of a clip that keeps it a factor 2 below the limit; NaN if none is needed"),
        *TOKEN_PLACE, COORDINATE,
    ),
    "overflow_runs": (
        Column("setting", "as it is, with norms decomposed, clipped, rescaled, or scaled as served", kind="text"),
        Column("dtype", "dtype of the run", kind="text"),
        Column("factor", "the bound of a clip, or the power of two by which the residual stream is divided"),
        Column("loss", "cross-entropy per predicted token", "nats"),
        Column("cost", "the loss minus that of the model as it is, in its own precision", "nats"),
        Column("divergence", "Kullback–Leibler divergence from that model's next tokens, mean over tokens", "nats"),
        Column("difference", "largest ‖logits − its logits‖ ÷ ‖its logits‖ of a token"),
        Column("site", "first site that is not finite (in `layer`); empty if all are", kind="text"),
    ),
    "overflow_scaled": (
        Column("cost", "of float8 scaled as served, as in overflow_runs", "nats per token"),
        Column("cost_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("cost_high", "upper end", "nats per token"),
    ),
}  # fmt: skip


def limit_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def overflows_from(dtype: torch.dtype) -> float:
    """Return the smallest magnitude that does not round to a finite number: 65520 in float16."""
    largest = limit_of(dtype)
    return largest + torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) / 2


@dataclass
class Magnitude:
    """The largest magnitude of one tensor over all sequences, and where it is."""

    layer: int
    site: str
    path: str  # its address: where it first appears
    is_inside: bool = False
    largest: float = 0.0
    sequence: int = -1
    position: int = -1  # -1: the tensor has no axis of tokens
    token_id: int = -1
    coordinate: int = -1


# (address, module, tensor); address: the module's path, .input or .output
SeeTensor = Callable[[str, nn.Module, torch.Tensor], None]


@contextmanager
def watched(model: nn.Module, see: SeeTensor) -> Iterator[None]:
    """Show the first floating-point input and output of every module, in the order in which they are computed."""

    def show(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], *output: Any) -> None:
        x = first_floats(output[0] if output else (*args, *kwargs.values()))
        if x is not None and x.numel():
            see(f"{path}.output" if output else f"{path}.input", module, x)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path:
                hooks.enter_context(module.register_forward_pre_hook(partial(show, path), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(show, path), with_kwargs=True))
        yield


class Prediction:
    """The largest magnitudes of a model's tensors over pictures and sequences, in the order of their computation."""

    def __init__(self, subject: Subject, pictures: Sequence[Batch] = ()) -> None:
        self.model, self.family = subject.loaded.model, subject.family
        self.magnitudes: dict[str, Magnitude] = {}  # by the tensor's first address; inside a kernel, its part follows
        self.first_address: dict[str, str] = {}  # address → the first address of the tensor that is there
        norms = [(path, module) for path, module in self.model.named_modules() if _epsilon(module) is not None]
        self.norms = norm_gains({path: (module, len(module.weight)) for path, module in norms})
        # address → layer and site, for the sites of the residual stream and the mix of values
        self._names: dict[str, tuple[int, str]] = {}
        for layer in range(len(self.family.layer_modules(self.model))):
            block = self.family.block(layer)
            sites = {site: block.sites[site] for site in RESIDUAL_SITES if site in block.sites}
            if block.attention and self.family.output:
                sites["attn_mix"] = f"{block.attention}.{self.family.output}.input"
            for site, address in sites.items():
                self._names[f"{self.family.layers}.{layer}.{address}"] = layer, site
        # transformers' eager attention computes q·k before it scales it
        config: Any = self.model.config
        self._has_logits = self.family.door == "interface" and config._attn_implementation == "eager"

        @contextmanager
        def opened(_: Any) -> Iterator[None]:
            with open_seam(self.model, self.family), watched(self.model, self._see):
                yield

        def read(opened: None, batch: Batch, observables: Any) -> None:
            self._batch = batch.masked or batch
            self._tensors = WeakTensorKeyDictionary()  # tensor → its version and its first address
            self._inside: dict[str, torch.Tensor] = {}
            logits_on(subject, self._batch)

        with torch.no_grad():  # one sequence at a time, so there is no padding
            with opened(None):
                for batch in pictures:
                    read(None, batch, ())
            of_pictures = dict(self.first_address)
            run_settings(subject, [Setting(opened, read)], batch_size=1)
            self.first_address |= of_pictures  # embeddings of text reach the language model as they are

    def added(self) -> Iterator[str]:
        """Yield the first address of each tensor that a branch adds to the residual stream."""
        for layer in range(len(self.family.layer_modules(self.model))):
            block = self.family.block(layer)
            for site in (site for site in BRANCHES if site in block.sites):
                addresses = [f"{self.family.layers}.{layer}.{term.address}" for term in block.terms(site)]
                yield from (self.first_address[address] for address in addresses if address in self.first_address)

    def _see(self, address: str, module: nn.Module, x: torch.Tensor) -> None:
        path, _, end = address.rpartition(".")
        if NAME in path.split("."):
            if end == "output":
                self._see_tap(address, x)
            return
        version, first = self._tensors.get(x, (None, address))
        if version != x._version:  # a new tensor, or one that was changed in place
            first = address
            self._tensors[x] = x._version, first
            self._note(first, x, *self._names.get(address, layer_and_kind(address, self.family)))
        self.first_address[address] = first
        magnitude = self.magnitudes[first]
        if address in self._names and magnitude.site not in RESIDUAL_SITES:
            magnitude.layer, magnitude.site = self._names[address]
        if end == "input" and path in self.norms:
            x, (layer, site) = upcast(x), layer_and_kind(path, self.family)
            squares = (x - x.mean(-1, keepdim=True) if self.norms[path].centered else x).square()
            kind = CENTERED if self.norms[path].centered else SQUARE
            self._note(f"{address} {kind}", squares, layer, f"{site} {kind}", is_inside=True)
            total = squares.sum(-1, keepdim=True)
            self._note(f"{address} {TOTAL}", total, layer, f"{site} {TOTAL}", is_inside=True)

    def _see_tap(self, address: str, x: torch.Tensor) -> None:
        """Note query, key and value as attention reads them, and the largest product of a query and a key."""
        path, _, _ = address.rpartition(".")
        attention, _, tap = path.rpartition(f".{NAME}.")
        layer, _ = layer_and_kind(attention, self.family)
        if tap in ("query", "key", "value"):
            self._inside[tap] = x
            self._note(f"{attention} {tap}", x, layer, tap, first_row=0)  # (1,H,T,d)
        if tap != "lse":
            return
        query, key = self._inside["query"], self._inside["key"]
        seam: Any = self.model.get_submodule(f"{attention}.{NAME}")
        for rows in row_chunks(query.shape[2]):
            # only positive ones: the softmax of -inf is 0
            products = products_of(query[:, :, rows], key.transpose(-1, -2)).clamp(min=0)
            for kind, x in ((QK, products), (SCALED_QK, products * abs(seam.call.scaling))):
                self._note(f"{attention} {kind}", x, layer, kind, not self._has_logits, rows.start)

    def _note(
        self, key: str, x: torch.Tensor, layer: int, site: str, is_inside: bool = False, first_row: int | None = None
    ) -> None:
        """Keep the largest magnitude of a tensor whose last axis is channels, or keys for queries from a first row."""
        magnitude = self.magnitudes.setdefault(key, Magnitude(layer, site, key, is_inside))
        largest = float(torch.maximum(x.amax(), -x.amin()))
        if magnitude.largest >= largest:
            return
        place = [int(index) for index in torch.unravel_index(x.abs().argmax(), x.shape)]
        length, ids = self._batch.token_ids.shape[1], self._batch.token_ids[0]
        if layer == NO_LAYER and self._batch.pictures:  # patches may be as many as tokens
            length = -1
        sizes = zip(place[:-1], x.shape[:-1], strict=True)
        position = next((index for index, size in sizes if size == length), -1)
        position = position if first_row is None else first_row + place[-2]
        magnitude.largest, magnitude.sequence, magnitude.position = largest, self._batch.first, position
        magnitude.token_id = int(ids[position]) if position >= 0 else -1
        magnitude.coordinate = place[-1] if x.shape[-1] > 1 else -1


def _epsilon(module: nn.Module) -> str | None:
    """Return the attribute with a norm's ε; None if the module is not a norm with a gain."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1:
        return None
    return next((name for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)


# --- changes of the model


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> list[Edit]:
    """Return copies of the weights in a dtype, except those that transformers keeps in float32."""
    in_float32 = {*(model._keep_in_fp32_modules_strict or ())}
    in_float32 |= {*(model._keep_in_fp32_modules or ())} if dtype == torch.float16 else set()
    copies: dict[int, torch.Tensor] = {}  # tied weights share one copy
    edits: list[Edit] = []
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            stays = any(f".{part}." in f".{path}.{name}." for part in in_float32)
            if weight is not None and weight.is_floating_point() and not stays:
                edits.append((module, name, copies.setdefault(id(weight), weight.detach().to(dtype))))
    return edits


@contextmanager
def rounding_inputs(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Round the input of every linear layer to a dtype and back."""
    limit, beyond = limit_of(dtype), overflows_from(dtype)

    def rounded(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        snapped = x.clamp(-limit, limit).to(dtype).to(x.dtype)
        # e4m3 has NaN in place of infinity; torch's own cast may saturate, depending on version and device
        return torch.where(x.abs() < beyond, snapped, x * torch.inf)

    with ExitStack() as stack:
        for _, module in linear_modules(model):
            stack.enter_context(edited_input(module, rounded))
        yield


def scaled_product(
    dtype: torch.dtype, matrix: Matrix, product: Product, x: torch.Tensor, weight: torch.Tensor, tokens: Any
) -> torch.Tensor:
    """Multiply a float8 input by a float8 weight, with the scales of FP8_DYNAMIC."""
    return product(snap(ROWS, x, float8=dtype), snap(ROWS, weight, float8=dtype))


@contextmanager
def decomposed_norms(model: PreTrainedModel, norms: Mapping[str, NormGain]) -> Iterator[None]:
    """Compute every norm's squares and their mean in the dtype of its input, as a graph without a fused norm does."""

    def inverse_deviation(x: torch.Tensor, gain: NormGain) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if gain.centered else x
        return (x.square().mean(-1, keepdim=True) + gain.epsilon).rsqrt()

    def around(gain: NormGain, bias: torch.Tensor | None, forward: Any, x: torch.Tensor, *args: Any, **kw: Any) -> Any:
        output = forward(x, *args, **kw)
        in_dtype, in_float32 = (inverse_deviation(z, gain) for z in (x, upcast(x)))
        offset = 0.0 if bias is None else bias
        return offset + (output - offset) * (in_dtype / in_float32).to(output.dtype)

    with ExitStack() as stack:
        for path, gain in norms.items():
            module = model.get_submodule(path)
            bias = module._parameters.get("bias")
            stack.enter_context(wrapped_forward(module, partial(around, gain, bias)))
        yield


@contextmanager
def clipped(model: PreTrainedModel, bounds: Mapping[str, float]) -> Iterator[None]:
    """Clamp the tensors at these addresses to ± their bounds, for all modules that read them."""

    def clamp(bound: float, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-bound, bound)

    def clamp_in_place(bound: float, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x = first_floats((*args, *kwargs.values()))  # as `watched` shows it
        assert x is not None
        x.clamp_(-bound, bound)  # the residual stream continues with the same tensor

    with ExitStack() as stack:
        for address, bound in bounds.items():
            path, _, end = address.rpartition(".")
            module = model.get_submodule(path)
            if end == "output":
                stack.enter_context(edited_output(module, partial(clamp, bound)))
            else:
                hook = partial(clamp_in_place, bound)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


@contextmanager
def rescaled(prediction: Prediction, factor: float) -> Iterator[None]:
    """Divide the residual stream by a power of two: the same function if norms are all that reads it.

    What enters the first layer and what each branch adds are divided by the factor, and the ε of norms that read the
    stream by its square. Where a linear layer computes what a branch adds, its weight and bias are divided.
    """
    model, family, first = prediction.model, prediction.family, prediction.first_address

    def divided(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x / factor

    with ExitStack() as stack:
        stack.enter_context(edited_input(family.layer_modules(model)[0], divided))
        for path in dict.fromkeys(address.rpartition(".")[0] for address in prediction.added()):
            module = model.get_submodule(path)
            if isinstance(module, LINEAR_LAYERS):
                parts = [(name, x) for name, x in module._parameters.items() if x is not None]
                stack.enter_context(replaced([(module, name, x / factor) for name, x in parts]))
            else:
                stack.enter_context(edited_output(module, divided))
        for path in prediction.norms:
            module, name = model.get_submodule(path), _epsilon(model.get_submodule(path))
            read = prediction.magnitudes.get(first.get(f"{path}.input", ""))
            if name is not None and read is not None and read.site in RESIDUAL_STREAM:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, getattr(module, name) / factor**2)
        yield


def no_rescaling(family: Family) -> str | None:
    """Return why the residual stream of a family cannot be rescaled; None if it may be, which a run then shows."""
    if family.copies is not None:
        return "it keeps its residual stream in several copies"
    wirings = {block.wiring for block in family.blocks} or {family.wiring}
    without_norms = sorted(wirings & {"post-norm", "unknown"})
    return f"its wiring is {' and '.join(without_norms)}, so that not only norms read it" if without_norms else None


# --- runs

ModelChange = Callable[[], AbstractContextManager[Any]]


@dataclass
class OverflowRun:
    """The model under one setting in one dtype."""

    setting: str
    dtype: str
    changes: Sequence[ModelChange]  # in the order in which they are made
    factor: float = math.nan
    differences: list[float] = field(default_factory=list)  # of pictures, as in `overflow_runs`
    broken: dict[str, None] = field(default_factory=dict)  # first addresses of tensors that are not finite, in order


class OverflowCheck:
    """The tables `overflow` and `overflow_runs` of a model in one dtype, and why a remedy was left out.

    Loss, cost and divergence are those of the text, without the pictures.

    Raises:
        InputError: the weights are quantized, offloaded or in float16.
        SinkscopeError: the model gives NaN in its own precision.
    """

    def __init__(
        self, subject: Subject, dtype: str, console: Console | None = None, pictures: Sequence[Batch] = ()
    ) -> None:
        self.subject, self.pictures, self.name, self.dtype = subject, pictures, dtype, OVERFLOW_DTYPES[dtype]
        self.model, self.family, self.limit = subject.loaded.model, subject.family, limit_of(self.dtype)
        check_not_packed(self.model, "doctor --dtype")
        if self.model.dtype == torch.float16 or any(weight.is_meta for weight in self.model.parameters()):
            raise InputError("doctor --dtype predicts from weights in memory in float32 or bfloat16: load the model so")
        self.refused: dict[str, str] = {}  # remedy → why it was left out
        self.prediction = Prediction(subject, pictures)
        everywhere, first = self.prediction.magnitudes, self.prediction.first_address
        is_float8 = self.dtype.itemsize == 1
        inputs = {first.get(f"{path}.input") for path, _ in linear_modules(self.model)}  # of linear layers
        counted = inputs if is_float8 else everywhere.keys()
        self.magnitudes = {key: one for key, one in everywhere.items() if key in counted and math.isfinite(one.largest)}
        outside = [one for one in self.magnitudes.values() if not one.is_inside]
        self.is_tight = max((one.largest for one in outside), default=0.0) > self.limit / HEADROOM
        self.bounds: dict[str, float] = {}  # first address → the bound of its clip
        runs = self._rounding_runs() if is_float8 else self._casting_runs()
        self.tables: dict[str, pd.DataFrame] = {}
        self.tables["overflow_runs"] = self._measured(runs, console)
        table = pd.DataFrame([asdict(one) for one in self.magnitudes.values()])
        self.tables["overflow"] = table.assign(
            order=range(len(table)),
            headroom=self.limit / table["largest"],  # infinite if it is 0
            overflows=table["largest"] >= overflows_from(self.dtype),
            is_finite=[key not in runs[0].broken for key in self.magnitudes],
            clip=[self.bounds.get(key, math.nan) for key in self.magnitudes],
        )

    def _rounding_runs(self) -> list[OverflowRun]:
        rounding, scaled = partial(rounding_inputs, self.model, self.dtype), partial(scaled_product, self.dtype)
        serving = partial(changed_products, self.model, matrices_of(self.model, self.family), scaled)
        return [OverflowRun(FULL, self.name, [rounding]), OverflowRun(SCALED, self.name, [serving])]

    def _casting_runs(self) -> list[OverflowRun]:
        casting = partial(replaced, cast_weights(self.model, self.dtype))
        runs = [OverflowRun(FULL, self.name, [casting])]
        squares = [one.largest for one in self.magnitudes.values() if one.site.endswith((SQUARE, CENTERED))]
        if max(squares, default=0.0) >= overflows_from(self.dtype):
            decomposed = partial(decomposed_norms, self.model, self.prediction.norms)
            runs.append(OverflowRun(DECOMPOSED, self.name, [casting, decomposed]))
        own_dtype = str(self.model.dtype).removeprefix("torch.")
        for setting, change, factor in self._remedies() if self.is_tight else ():
            runs.append(OverflowRun(setting, own_dtype, [change], factor))
            runs.append(OverflowRun(setting, self.name, [casting, change], factor))
        return runs

    def _remedies(self) -> Iterator[tuple[str, ModelChange, float]]:
        bound = self.limit / HEADROOM
        added = {key: one for key, one in self.magnitudes.items() if one.site in (*RESIDUAL_STREAM, *BRANCHES)}
        self.bounds = {key: bound for key, one in added.items() if one.site in RESIDUAL_STREAM and one.largest > bound}
        highest = max((one.largest for one in added.values()), default=0.0)
        if self.bounds:
            yield CLIPPED, partial(clipped, self.model, self.bounds), bound
        if highest <= bound:
            self.refused[RESCALED] = "no number of the residual stream or of what is added to it is too large"
        elif reason := no_rescaling(self.family):
            self.refused[RESCALED] = reason
        else:
            factor = 2.0 ** math.ceil(math.log2(highest / bound))
            yield RESCALED, partial(rescaled, self.prediction, factor), factor

    def _measured(self, runs: Sequence[OverflowRun], console: Console | None) -> pd.DataFrame:
        """Run the model as it is and every setting on each sequence. Returns the table `overflow_runs`."""
        has_loss, base = self.subject.without_loss is None, dict[str, torch.Tensor]()

        def read_base(opened: None, batch: Batch, observables: Any) -> torch.Tensor:
            base.clear()  # frees the logits of the sequence before
            base["logits"] = logits = logits_on(self.subject, batch.masked or batch)
            if not bool(logits.isfinite().all()):
                raise SinkscopeError(f"the model itself gives NaN or infinite numbers in {self.model.dtype}")
            if has_loss:
                base["loss"] = loss_in_chunks(logits, batch.masked or batch).sum()
                base["logs"] = upcast(logits).log_softmax(-1)
            return torch.zeros(1, 4, dtype=torch.float64)

        @contextmanager
        def opened(run: OverflowRun, _: Any) -> Iterator[None]:
            def see(address: str, module: nn.Module, x: torch.Tensor) -> None:
                first = self.prediction.first_address.get(address)
                if first in self.magnitudes and first not in run.broken and not bool(x.isfinite().all()):
                    run.broken[first] = None

            with ExitStack() as stack:
                for change in run.changes:
                    stack.enter_context(change())
                stack.enter_context(watched(self.model, see))
                yield

        def read(opened: None, batch: Batch, observables: Any) -> torch.Tensor:
            """Return difference, loss, cost and divergence, (1,4)."""
            batch = batch.masked or batch
            logits = logits_on(self.subject, batch)
            values = [largest_difference(logits, base["logits"], batch.attention_mask), *[math.nan] * 3]
            if has_loss:
                loss, logs = loss_in_chunks(logits, batch).sum(), upcast(logits).log_softmax(-1)
                divergence = F.kl_div(logs, base["logs"], reduction="sum", log_target=True)
                values[1:] = float(loss), float(loss - base["loss"]), float(divergence)
            return torch.tensor([values], dtype=torch.float64)

        settings = [Setting(nullcontext, read_base), *(Setting(partial(opened, run), read) for run in runs)]
        with torch.no_grad():  # one sequence at a time, so there is no padding
            for batch in self.pictures:
                read_base(None, batch, ())
                for run in runs:
                    with opened(run, None):
                        run.differences.append(float(read(None, batch, ())[0, 0]))
            _, *passes = run_settings(self.subject, settings, batch_size=1, console=console, by_batch=True)
        tokens, predicted = self.subject.inputs.num_tokens, self.subject.inputs.num_predicted or math.nan
        rows = []
        for run, done in zip(runs, passes, strict=True):
            _, loss, cost, divergence = done.losses.cumsum(0)[-1].tolist()
            difference = torch.tensor([*run.differences, *done.losses[:, 0]]).max()
            numbers = (float(difference), loss / predicted, cost / predicted, divergence / tokens)
            if run.setting == SCALED:
                costs = done.losses[:, 2].numpy()
                scaled = resampled_cost(costs, 0 * costs, self.subject.inputs.predicted, self.subject.inputs.texts)
                row = {"layer": NO_LAYER, **bootstrap(scaled).as_columns("cost")}
                self.tables["overflow_scaled"] = pd.DataFrame([row])
            first = next((one for key, one in self.magnitudes.items() if key in run.broken), None)  # in order of layers
            place = (NO_LAYER, "") if first is None else (first.layer, first.site)
            rows.append((run.setting, run.dtype, run.factor, *numbers, *place))
        columns = ["setting", "dtype", "factor", "difference", "loss", "cost", "divergence", "layer", "site"]
        table = pd.DataFrame(rows, columns=columns)
        is_rescaled = table["setting"] == RESCALED
        differences = table["difference"][is_rescaled & (table["dtype"] != self.name)]
        if not (differences <= LARGEST_TOLERANCES[self.model.dtype]).all():
            self.refused[RESCALED] = "this model computes something else then: not only norms read its residual stream"
            table = table[~is_rescaled].reset_index(drop=True)
        return table
