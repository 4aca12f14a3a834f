"""The base class of interventions, editing of tensors at given positions, random controls, and expectations."""

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import is_visible
from sinkscope.attention.taps import Seam
from sinkscope.errors import InputError, SinkscopeError, counted
from sinkscope.models.edits import Edit, check_changes, check_parameters, edited_output, replaced
from sinkscope.models.family import Family
from sinkscope.models.projections import Projection, Role, check_plain, lacking_projection, projections
from sinkscope.retrofits.retrofit import registers_before


class Layout(threading.local):
    """The start of each sequence of the current batch, recorded per thread by a hook on the model."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self.past = 0  # tokens in the cache
        self.length = 0  # tokens in the cache and the batch
        self._places: dict[tuple, Any] = {}  # what `once` has computed for the current batch

    def record(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        kwargs = inspect.signature(type(module).forward).bind_partial(module, *args).arguments | kwargs
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        tokens = next(x for x in map(kwargs.get, ("input_ids", "inputs_embeds")) if isinstance(x, torch.Tensor))
        if isinstance(mask, dict):  # `generate` makes one for each type of layer
            mask = mask.get("full_attention", next(iter(mask.values())))
        self.mask = mask if isinstance(mask, torch.Tensor) else None
        self.past = int(cache.get_seq_length()) if cache is not None else 0  # a static cache returns a mutable tensor
        self.length = self.past + tokens.shape[1] + (0 if self.past else registers_before(module))
        self._places = {}

    def once(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Return compute(*arguments), which all layers of the current batch share: each would wait for the device."""
        if (compute, *arguments) not in self._places:
            self._places[compute, *arguments] = compute(*arguments)
        return self._places[compute, *arguments]

    def start(self, device: torch.device) -> torch.Tensor:
        """Return the column of each sequence's position 0, (B,) or (1,), counted from the first column of the cache."""
        if self.mask is None:
            return torch.zeros(1, dtype=torch.long, device=device)
        if self.mask.dim() == 2:
            return self.mask.to(device).int().argmax(dim=1)
        seen = self.mask[:, 0, -1, 0]  # whether the last token sees the first column
        if not bool(is_visible(seen).all()):  # padding, or a sliding window
            raise InputError(
                "the start of each sequence is unknown with a four-dimensional mask: pass a two-dimensional "
                "attention_mask, and no static cache with a padded batch or a sliding window"
            )
        return torch.zeros(1, dtype=torch.long, device=device)

    def locate(
        self, device: torch.device, sequences: int, length: int, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows and columns of a batch (B,T) that are at this position of their sequence."""
        columns = (self.start(device) + position - self.past).expand(sequences)
        rows = ((columns >= 0) & (columns < length)).nonzero().flatten()
        return rows, columns[rows]


@dataclass
class Target:
    """A model with its seams in place."""

    model: PreTrainedModel
    family: Family
    seams: dict[int, Seam]  # by layer, for the layers that have attention
    layout: Layout = field(default_factory=Layout)

    @property
    def layers(self) -> list[nn.Module]:
        return self.family.layer_modules(self.model)

    def attending(self, layers: tuple[int, ...] | None = None) -> list[int]:
        """Return the named layers, or all that have attention; raise InputError if a named layer has none."""
        have = list(self.family.attentions(self.model))
        for layer in layers or ():
            if layer not in have:
                raise InputError(f"layer {layer} has no attention: it has {self.family.block(layer).kind} instead")
        return have if layers is None else list(layers)

    @property
    def width(self) -> int:
        """The width D of the residual stream."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def query_heads(self) -> int:
        """The number of query heads of a layer."""
        return int(self.model.config.get_text_config().num_attention_heads)

    @property
    def has_query_bias(self) -> bool:
        return any(self.projection(layer, "query").bias is not None for layer in self.attending())

    def without_projection(self, role: Role) -> str | None:
        """Return why the output of this projection is unknown, or None if it is known."""
        return lacking_projection(self.family, self.family.attentions(self.model), role)

    def without_weights(self, role: Role) -> str | None:
        """Return why the weights of this projection cannot be edited, or None if they can."""
        if reason := self.without_projection(role):
            return reason
        try:
            for layer in self.attending():
                module = self.projection(layer, role).module
                check_plain(module)
                check_parameters(module)
        except InputError as error:
            return str(error)
        return None

    def projection(self, layer: int, role: Role) -> Projection:
        return projections(self.model, self.family, layer)[role]


@dataclass
class Known:
    """Facts about the unchanged model, from which defaults and random controls are chosen."""

    target: Target
    length: int  # length of the shortest sequence
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # tables of the arm `before`
    # (layer, position) → (D,) mean over sequences of the layer's output; with of_values=True (heads · d,) of its values
    means: Callable[..., torch.Tensor] | None = None

    def table(self, name: str, missing: str) -> pd.DataFrame:
        """Return a table of the arm `before`; raise InputError, with this message, if it was not measured."""
        if name not in self.tables:
            raise InputError(missing)
        return self.tables[name]

    def draw_positions(self, count: int, draw: torch.Generator, but: Iterable[int]) -> tuple[int, ...]:
        """Draw positions for a control, except `but`, 0 (the usual sink) and the last (which no later query sees)."""
        return draw_others(count, self.length - 1, draw, {0, *but}, "position")


class Expectation(StrEnum):
    """The effect of an intervention according to its paper."""

    SINK_FALLS = "sink-falls"
    SINK_STAYS = "sink-stays"
    SINK_MOVES = "sink-moves"
    PERPLEXITY_COLLAPSES = "perplexity-collapses"
    PERPLEXITY_UNHARMED = "perplexity-unharmed"


POSITIONS = ("positions", "source", "target", "hidden", "beside")  # parameters that are positions

# returns why an intervention does not apply to a model; None if it applies
Requirement = Callable[[Target], str | None]


class Intervention(BaseModel, ABC):
    """One mechanism with its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `sinkscope list`
    paper: ClassVar[str]  # the paper that did the experiment
    control_about: ClassVar[str] = ""  # the change in its random control; "" if it has none
    redraws: ClassVar[Literal["", "positions", "coordinates"]] = ""  # the parameter that its random control redraws
    expects: ClassVar[Expectation | None] = None  # the effect according to the paper
    is_control: ClassVar[bool] = False  # useful only as the control of another intervention
    expected: ClassVar[bool] = True  # applies to most models: the doctor reports models where it does not
    reads: ClassVar[tuple[str, ...]] = ()  # observables of the unchanged model, beyond the usual, that `resolved` reads
    measured_by: ClassVar[str] = "pass"  # a key of Experiment.METHODS; can be combined only if "pass"
    heads_of: ClassVar[Role] = "query"  # the heads that the parameter `heads` counts
    opens: ClassVar[tuple[str, ...]] = ()  # parameters that `measured` decides if one of them is None
    asks_for: ClassVar[str] = ""  # what a refusal asks for if nothing was measured; "": all of `opens`
    requires: ClassVar[tuple[Requirement, ...]] = ()

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        """Return why the intervention does not apply to this model, or None if it applies."""
        return next(filter(None, (requirement(target) for requirement in cls.requires)), None)

    def check(self, target: Target, length: int | None = None) -> None:
        """Raise InputError if a parameter names a layer, head, coordinate or position that does not exist.

        `length` is that of the sequences; None if it is unknown.
        """
        counts: dict[str, tuple[str, Callable[[], int]]] = {
            "layers": ("layer", lambda: len(target.layers)),
            "heads": (f"{self.heads_of} head", lambda: target.projection(target.attending()[0], self.heads_of).heads),
            "coordinates": ("coordinate", lambda: target.width),
        }
        if length is not None:
            counts |= dict.fromkeys(POSITIONS, ("position", lambda: length))
        for name, (what, count) in counts.items():
            value = getattr(self, name, None)
            largest = max(value, default=None) if isinstance(value, tuple) else value
            if largest is not None and largest >= count():
                whose = "the sequences have" if what == "position" else "this model has"
                raise InputError(f"{self.name}: there is no {what} {largest}: {whose} {count()}, from 0 on")

    def from_the_start(self, lengths: Collection[int]) -> Self:
        """Return the intervention with positions below 0, which count from the end of sequences, counted from 0 on.

        Raises InputError if the numbers of tokens of the sequences, `lengths`, differ or are not known.
        """
        named = {name: value for name in POSITIONS if (value := getattr(self, name, None)) is not None}
        least = min((min(value) if isinstance(value, tuple) else value for value in named.values()), default=0)
        if least < 0 and len(set(lengths)) != 1:
            why = (
                f"the sequences have {min(lengths)} to {max(lengths)} tokens" if lengths else "no length is known here"
            )
            raise InputError(f"{self.name}: position {least} counts from the end, and {why}: count from 0 on")
        if least < -max(lengths, default=0):
            raise InputError(f"{self.name}: there is no position {least}: the sequences have {max(lengths)}")

        def counted_up(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(dict.fromkeys(map(counted_up, value)))
            return value + max(lengths) if value < 0 else value

        return self.model_copy(update={name: counted_up(value) for name, value in named.items()})

    def resolved(self, known: Known) -> Self:
        """Return the intervention with all open parameters decided; raise InputError if one cannot be decided."""
        is_decided = all(getattr(self, name) is not None for name in self.opens)
        return self if is_decided else self.model_copy(update=self.measured(known))

    def measured(self, known: Known) -> dict[str, Any]:
        """Return values of the open parameters from the unchanged model; raise InputError if they are not known."""
        return {}

    def control(self, known: Known, draw: torch.Generator) -> "Intervention | None":
        """Return the same kind of change at a random place or in a random direction, or None."""
        if not self.redraws:
            return None
        numbers: tuple[int, ...] = getattr(self, self.redraws) or ()
        if self.redraws == "positions":
            others = known.draw_positions(len(numbers), draw, numbers)
        else:
            others = draw_others(len(numbers), known.target.width, draw, numbers, "coordinate")
        return self.model_copy(update={self.redraws: others})

    @property
    def watched(self) -> tuple[int, ...]:
        """The positions at which an effect is expected, first that of the sink."""
        return getattr(self, "positions", (0,))

    def begins_at(self, target: Target) -> int:
        """Return the first affected layer; earlier layers are unaffected. 0 if the input of the layers may change."""
        layers: tuple[int, ...] | None = getattr(self, "layers", (0,))  # None: all layers with attention
        return min(target.attending() if layers is None else layers)

    @abstractmethod
    def applied(self, target: Target) -> AbstractContextManager[None]:
        """Change the model until the end of the block, and then restore it bit for bit.

        Raises InputError if nothing would change, and UntouchedError at the end if no forward pass had the positions.
        """

    def __str__(self) -> str:
        """Write it as --do does, without parameters at their default."""
        changed = []
        for name, entry in type(self).model_fields.items():
            value = getattr(self, name)
            if value == entry.default:
                continue
            if not isinstance(value, str):
                numbers = value if isinstance(value, tuple) else (value,)
                value = "+".join(repr(number).replace("e+", "e") for number in numbers)  # exact, with no other +
            changed.append(f"{name}={value}")
        return f"{self.name}:{','.join(changed)}" if changed else self.name


@contextmanager
def applied(target: Target, interventions: Iterable[Intervention]) -> Iterator[None]:
    """Apply interventions in order until the end of the block, each to the model with the previous ones applied."""
    with ExitStack() as stack:
        handle = target.model.register_forward_pre_hook(target.layout.record, with_kwargs=True, prepend=True)
        stack.callback(handle.remove)
        for intervention in interventions:
            reason = intervention.inapplicable(target)
            if reason is not None:
                raise InputError(f"{intervention.name} does not apply to this model: {reason}")
            intervention.from_the_start(()).check(target)
            if any(getattr(intervention, name) is None for name in intervention.opens):
                wanted = intervention.asks_for or f"the {' and the '.join(intervention.opens)}"
                raise InputError(f"{intervention.name}: name {wanted}")
            stack.enter_context(intervention.applied(target))
        yield


class WeightEdits(Intervention):
    """Replaces parameters of the model until the end of the block."""

    @abstractmethod
    def edits(self, target: Target) -> list[Edit]:
        """Return the parameters with their new values."""

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        edits = self.edits(target)
        check_changes(self.name, edits)
        with replaced(edits):
            yield


class UntouchedError(SinkscopeError):
    """Nothing was changed, because no forward pass had the positions to change."""


@contextmanager
def must_change(name: str, missing: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call at each change of a tensor; raise UntouchedError at the end if it was not called."""
    touched = threading.Event()
    yield touched.set
    if not touched.is_set():
        raise UntouchedError(f"{name} changed nothing: no forward pass held {missing}")


@contextmanager
def edited_positions(
    name: str,
    target: Target,
    modules: Iterable[nn.Module],
    positions: Iterable[int],
    edit: Callable[[nn.Module, int, torch.Tensor], torch.Tensor],
    edited: Callable[[nn.Module, Callable], AbstractContextManager[None]] = edited_output,
) -> Iterator[None]:
    """Edit the outputs of modules, (B,T,X) or (B,1,T,X), at some positions: edit(module, position, (n,X)) → (n,X).

    With `edited=edited_input` the modules' inputs are edited instead.
    """

    def changed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.clone().flatten(1, -2)
        for position in positions:
            rows, columns = target.layout.once(target.layout.locate, x.device, *x.shape[:2], position)
            if len(rows):
                x[rows, columns] = edit(module, position, x[rows, columns])
                touch()
        return x.view(shape)

    with must_change(name, f"position {', '.join(map(str, positions))}") as touch, ExitStack() as stack:
        for module in modules:
            stack.enter_context(edited(module, changed))
        yield


def draw_others(count: int, total: int, draw: torch.Generator, but: Iterable[int], what: str) -> tuple[int, ...]:
    """Draw `count` different numbers below `total`, except those in `but`."""
    free = sorted(set(range(total)) - set(but))
    if len(free) < count:
        raise InputError(f"a random control needs {counted(count, f'other {what}')}, and there are {len(free)}")
    order = torch.randperm(len(free), generator=draw)[:count]
    return tuple(sorted(free[index] for index in order.tolist()))


Stack = tuple[Intervention, ...]


def random_controls(stack: Stack, known: Known, seed: int, draws: int) -> list[Stack]:
    """Draw `draws` different random controls of a stack of interventions, or fewer if there are not that many.

    Every intervention that has a control is replaced by it. If none has a control, the list is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    different: list[Stack] = []
    for _ in range(20 * draws):
        controls = [part.control(known, generator) for part in stack]
        if len(different) == draws or not any(controls):
            break
        drawn = tuple((control or part).resolved(known) for part, control in zip(stack, controls, strict=True))
        if drawn not in different:
            different.append(drawn)
    return different


def expectation(intervention: Intervention, target: Target) -> Expectation | None:
    """Return the effect according to the paper, if the paper's findings apply to this kind of model.

    NU's findings apply to models with learned positions and a query bias, other papers' to all models.
    """
    if not intervention.paper.startswith("NU "):
        return intervention.expects
    applies = target.family.kinds_of_positions == {"learned"} and not target.without_weights("query")
    return intervention.expects if applies and target.has_query_bias else None
