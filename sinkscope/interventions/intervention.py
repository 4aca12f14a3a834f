"""What every intervention is, and how tensors are edited at given positions of every sequence."""

import inspect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

import pandas as pd
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.operations import MASKED
from sinkscope.attention.taps import Seam
from sinkscope.errors import InputError, SinkscopeError, counted
from sinkscope.models.edits import edited_output
from sinkscope.models.family import Family
from sinkscope.models.origin import check_parameters
from sinkscope.models.projections import Projection, Role, check_plain, lacking, projections
from sinkscope.retrofits.retrofit import registers_before


class Layout(threading.local):
    """The start of each sequence of the current batch, recorded by a hook on the model for each thread."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self.past = 0  # tokens in the cache
        self.length = 0  # tokens in the cache and the batch

    def record(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of the whole model."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        tokens = next(x for x in map(kwargs.get, ("input_ids", "inputs_embeds")) if isinstance(x, torch.Tensor))
        if isinstance(mask, dict):  # made by `generate`, one for each type of layer
            mask = mask.get("full_attention", next(iter(mask.values())))
        self.mask = mask if isinstance(mask, torch.Tensor) else None
        self.past = int(cache.get_seq_length()) if cache is not None else 0  # of a static cache a tensor that grows
        self.length = self.past + tokens.shape[1] + (0 if self.past else registers_before(module))

    def start(self, device: torch.device) -> torch.Tensor:
        """The column of each sequence's position 0, (B,) or (1,), counted from the first column of the cache.

        Raises:
            InputError: a mask (B,1,T,T) that may be a padded batch's or a sliding window's.
        """
        if self.mask is not None and self.mask.dim() == 2:
            return self.mask.to(device).int().argmax(dim=1)
        if self.mask is not None:
            seen = self.mask[:, 0, -1, 0]  # of the first column, by the last token
            if not bool((seen if seen.dtype == torch.bool else seen > MASKED).all()):
                raise InputError(
                    "where each sequence begins cannot be told from a mask of four dimensions: pass an attention_mask "
                    "of two, and no static cache with a padded batch or a sliding window"
                )
        return torch.zeros(1, dtype=torch.long, device=device)

    def locate(self, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows and columns of x (B,T,…) at which sequences have this position."""
        columns = (self.start(x.device) + position - self.past).expand(x.shape[0])
        rows = ((columns >= 0) & (columns < x.shape[1])).nonzero().flatten()
        return rows, columns[rows]


@dataclass
class Target:
    """A model with its seams in."""

    model: PreTrainedModel
    family: Family
    seams: dict[int, Seam]  # by layer, of those that have attention
    layout: Layout = field(default_factory=Layout)

    @property
    def layers(self) -> list[nn.Module]:
        return self.family.layer_modules(self.model)

    def attending(self, layers: tuple[int, ...] | None = None) -> list[int]:
        """The named layers, or all that have attention.

        Raises:
            InputError: a named one has none.
        """
        have = list(self.family.attentions(self.model))
        without = next((layer for layer in layers or () if layer not in have), None)
        if without is not None:
            raise InputError(f"layer {without} has no attention: {self.family.block(without).kind} stands in its place")
        return have if layers is None else list(layers)

    @property
    def width(self) -> int:
        """D of the residual stream."""
        return int(self.model.config.get_text_config().hidden_size)

    def without_projection(self, role: Role) -> str | None:
        """Why it is not known what this projection gives; None where it is."""
        return lacking(self.family, self.family.attentions(self.model), role)

    def without_weights(self, role: Role) -> str | None:
        """Why the weights of this projection cannot be edited; None where they can."""
        reason = self.without_projection(role)
        if reason is not None:
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


def chosen(numbers: tuple[int, ...] | None, count: int) -> list[int]:
    """The numbers that were named, or all of `count`."""
    return list(range(count)) if numbers is None else list(numbers)


MOST_NUMBERS = 1_000_000  # in a range


def _numbers(value: Any) -> Any:
    """As the command line has them: `all`, `3`, `1-3`, `138,447`, `0-2,5`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, tuple | list):
        return tuple(dict.fromkeys(value))
    if not isinstance(value, str):
        return value
    if value.strip() == "all":
        return None
    found: list[int] = []
    for part in value.replace("+", ",").split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match:
            raise ValueError(f"'{part.strip()}' is no number, no range as 1-3 and not all")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} is empty")
        if last - first >= MOST_NUMBERS:
            raise ValueError(f"the range {part.strip()} has more than {MOST_NUMBERS} numbers")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def _named_numbers(value: Any) -> Any:
    if isinstance(value, str) and value.strip() == "all":
        raise ValueError("all is not meant here: name some")
    return _numbers(value)


def _reals(value: Any) -> Any:
    """As the command line has them: `0.5`, `0.5,-1e-3`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    return re.split(r"(?<!e)\+|,", value) if isinstance(value, str) else value


Index = Annotated[int, Field(ge=0, lt=2**62)]
Indices = Annotated[tuple[Index, ...], BeforeValidator(_named_numbers), Field(min_length=1)]
Chosen = Annotated[Annotated[tuple[Index, ...], Field(min_length=1)] | None, BeforeValidator(_numbers)]  # None: all
Open = Annotated[
    Annotated[tuple[Index, ...], Field(min_length=1)] | None, BeforeValidator(_named_numbers)
]  # None: to be decided
Real = Annotated[float, Field(allow_inf_nan=False)]
Reals = Annotated[tuple[Real, ...], BeforeValidator(_reals)]


@dataclass
class Known:
    """What is known of the model before it is changed, from which defaults and random controls are chosen."""

    target: Target
    length: int  # of the shortest sequence
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # of the arm `before`
    hidden_means: Callable[[int, int], torch.Tensor] | None = None  # (layer, position) → (D,) mean over sequences
    value_means: Callable[[int, int], torch.Tensor] | None = None  # likewise → (heads · d,) of the value projection


class Expectation(StrEnum):
    """What a paper found that an intervention does."""

    SINK_FALLS = "sink-falls"
    SINK_STAYS = "sink-stays"
    SINK_MOVES = "sink-moves"
    PERPLEXITY_COLLAPSES = "perplexity-collapses"
    PERPLEXITY_UNHARMED = "perplexity-unharmed"


class Intervention(BaseModel, ABC):
    """One mechanism, with its parameters. A new one is a file of this folder and a line in the register."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `sinkscope list`
    paper: ClassVar[str]  # whose experiment it is
    control_about: ClassVar[str] = ""  # what its random control changes; "" if it has none
    expects: ClassVar[Expectation | None] = None  # what the paper found
    is_control: ClassVar[bool] = False  # of use only beside another
    expected: ClassVar[bool] = True  # of any model: where it does not apply, the doctor says so
    measured_by: ClassVar[str] = "pass"  # a key of experiment.Experiment.WAYS; what is not measured in passes is alone
    heads_of: ClassVar[Role] = "query"  # what the parameter `heads` counts

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        """Why this cannot be done to this model; None where it can."""
        return None

    def check(self, target: Target, length: int | None = None) -> None:
        """Check the parameters against the model and, if given, the length of the sequences.

        Raises:
            InputError: a parameter names a layer, head, coordinate or position that does not exist.
        """
        counts: dict[str, tuple[str, Callable[[], int | None]]] = {
            "layers": ("layer", lambda: len(target.layers)),
            "heads": (f"{self.heads_of} head", lambda: target.projection(target.attending()[0], self.heads_of).heads),
            "coordinates": ("coordinate", lambda: target.width),
            **dict.fromkeys(("positions", "source", "target"), ("position", lambda: length)),
        }
        for name in type(self).model_fields.keys() & counts.keys():
            what, count = counts[name]
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            total = count() if numbers else None
            if total is not None and max(numbers) >= total:
                whose = "the sequences have" if what == "position" else "this model has"
                raise InputError(f"{self.name}: there is no {what} {max(numbers)}: {whose} {total}, from 0 on")

    def resolved(self, known: Known) -> Self:
        """The same with every parameter decided that was left open.

        Raises:
            InputError: a parameter cannot be decided and has to be named.
        """
        return self

    def control(self, known: Known, draw: torch.Generator) -> "Intervention | None":
        """The same kind of change at a random place or in a random direction; None if this has no control."""
        return None

    @property
    def watched(self) -> tuple[int, ...]:
        """The positions at which this should have an effect, the sink's own first."""
        return getattr(self, "positions", (0,))

    @property
    def reads_means(self) -> tuple[int, ...]:
        """The positions at which `resolved` asks for the model's hidden means."""
        return ()

    def begins_at(self, target: Target) -> int:
        """The first layer that computes or gives anything else; the layers before it are as they are anyway. 0 where
        what enters the layers may be another.
        """
        return 0

    def at_other_positions(self, known: Known, draw: torch.Generator) -> Self:
        """A control: the same at as many random positions."""
        mine: tuple[int, ...] = self.watched
        return self.model_copy(update={"positions": random_positions(len(mine), known, draw, mine)})

    def at_other_coordinates(self, known: Known, draw: torch.Generator) -> Self:
        """A control: the same at as many random coordinates of the residual stream."""
        mine: tuple[int, ...] = getattr(self, "coordinates", None) or ()
        others = random_choice(len(mine), known.target.width, draw, mine, "coordinate")
        return self.model_copy(update={"coordinates": others})

    @abstractmethod
    def applied(self, target: Target) -> AbstractContextManager[None]:
        """Change the model until the end of the block; then it is bit for bit what it was.

        Raises:
            InputError: a parameter names what the model does not have, or nothing would change.
            SinkscopeError: at the end, nothing was changed because no forward pass had the position.
        """

    def __str__(self) -> str:
        """As after --do: parameters that are not at their default."""
        given = [
            f"{name}={_text(getattr(self, name))}"
            for name, entry in type(self).model_fields.items()
            if getattr(self, name) != entry.default
        ]
        return f"{self.name}:{','.join(given)}" if given else self.name


def _text(value: Any) -> str:
    if value is None:
        return "all"
    if isinstance(value, str):
        return value
    numbers = value if isinstance(value, tuple) else (value,)
    return "+".join(repr(number).replace("e+", "e") for number in numbers)  # exact, and no + of its own


@contextmanager
def applied(target: Target, interventions: Iterable[Intervention]) -> Iterator[None]:
    """Apply interventions in their order until the end of the block, each to the model as those before left it."""
    with ExitStack() as stack:
        handle = target.model.register_forward_pre_hook(target.layout.record, with_kwargs=True, prepend=True)
        stack.callback(handle.remove)
        for intervention in interventions:
            reason = intervention.inapplicable(target)
            if reason is not None:
                raise InputError(f"{intervention.name} does not apply to this model: {reason}")
            intervention.check(target)
            stack.enter_context(intervention.applied(target))
        yield


class UntouchedError(SinkscopeError):
    """Nothing was changed, because no forward pass had what was to be."""


@contextmanager
def must_touch(name: str, missing: str) -> Iterator[Callable[[], None]]:
    """Give a function to call whenever an edit changes something.

    Raises:
        UntouchedError: at the end, it was never called; `missing` says why.
    """
    is_touched = False

    def touch() -> None:
        nonlocal is_touched
        is_touched = True

    yield touch
    if not is_touched:
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
    """Edit the outputs (B,T,X) of modules at some positions: edit(module, position, (n,X)) → (n,X).

    Latents are also kept as (B,1,T,X), as one head's.

    Args:
        edited: `edited_input` for the modules' inputs instead.

    Raises:
        SinkscopeError: at the end, no forward pass had any of the positions.
    """

    def changed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.clone().flatten(1, -2)
        for position in positions:
            rows, columns = target.layout.locate(x, position)
            if len(rows):
                x[rows, columns] = edit(module, position, x[rows, columns])
                touch()
        return x.view(shape)

    with must_touch(name, f"position {', '.join(map(str, positions))}") as touch, ExitStack() as stack:
        for module in modules:
            stack.enter_context(edited(module, changed))
        yield


def random_positions(count: int, known: Known, draw: torch.Generator, but: Iterable[int]) -> tuple[int, ...]:
    """Positions for a control: none of `but`, not 0, the usual sink, and not the last, which no later query sees."""
    return random_choice(count, known.length - 1, draw, {0, *but}, "position")


def random_choice(count: int, total: int, draw: torch.Generator, but: Iterable[int], what: str) -> tuple[int, ...]:
    """`count` different numbers below `total`, none of `but`."""
    free = sorted(set(range(total)) - set(but))
    if len(free) < count:
        raise InputError(f"a random control needs {counted(count, f'other {what}')}, and there are {len(free)}")
    order = torch.randperm(len(free), generator=draw)[:count]
    return tuple(sorted(free[place] for place in order.tolist()))


Stack = tuple[Intervention, ...]


def random_controls(stack: Stack, known: Known, seed: int, draws: int) -> list[Stack]:
    """The stack with each part replaced by its random control where it has one, `draws` times, all different if there
    are so many; empty where no part has a control.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Stack] = []
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        controls = [part.control(known, generator) for part in stack]
        if all(control is None for control in controls):
            break
        drawn = tuple((control or part).resolved(known) for part, control in zip(stack, controls, strict=True))
        if drawn not in found:
            found.append(drawn)
    return found


def _learned_positions_and_query_bias(target: Target) -> bool:
    if target.family.kinds_of_positions != {"learned"} or target.without_weights("query"):
        return False
    return any(target.projection(layer, "query").bias is not None for layer in target.attending())


# short name of a paper → of which models it speaks; of all where it is not here
SCOPES: dict[str, Callable[[Target], bool]] = {"NU": _learned_positions_and_query_bias}


def expectation(intervention: Intervention, target: Target) -> Expectation | None:
    """What the paper found, if it speaks of such a model."""
    in_scope = SCOPES.get(intervention.paper.partition(" ")[0])
    return intervention.expects if in_scope is None or in_scope(target) else None
