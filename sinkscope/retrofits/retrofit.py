"""What every retrofit is, and the places at which it can act on attention.

    values       after the value projection, before anything is cached: `ValuePart`
    output       before the output projection, on every head's mix: `OutputPart`
    denominator  inside the softmax, a further logit: `taps.Denominator`
    operation    in place of the softmax: `taps.OtherOperation`

The first two are hooks at the places of modules that every family has, so the model keeps its own attention kernel and
its own kind of cache: what is cached is the changed value. They act on what a projection gives or reads together with
its adapter, if PEFT has put one there, so that merging the adapter changes nothing. The others need the attention
function of seam.py.

What the taps of seam.py show: `value` is what is attended to, after V-scale or a gate, so that ∇v_s = Σ_t a[t,s] g_t
holds there; `mix` is the heads' output before an output gate; the raw value is what the projection gives out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.interceptor import Interceptor
from sinkscope.attention.taps import NAME, Denominator
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.models.family import Family
from sinkscope.models.origin import check_own_map
from sinkscope.models.projections import Projection, check_ordinary, projections
from sinkscope.models.towers import text_tower

RETROFIT = "retrofit"  # the name of a retrofit's module inside the module it changes; part of saved state dicts


def registers_before(model: nn.Module) -> int:
    """How many register tokens a retrofit puts before every sequence: the layers see so many tokens more."""
    return int(getattr(getattr(model, RETROFIT, None), "count", 0))


# (the retrofit's module, what the module in the place is called with, what it gives) → what takes the place of its
# output, or of a hook that acts before, of its arguments; None: nothing does
Act = Callable[[Any, tuple, Any], Any]


class PlacedHook:
    """Calls `act` before or after the module at a path within an attention module, in every forward of the latter.

    The retrofit's module is looked up in each forward as well: with `modules_to_save`, PEFT trains a copy of it.
    """

    def __init__(self, path: str, act: Act, before: bool = False) -> None:
        self.path, self.act, self.before = path, act, before
        self.module: nn.Module | None = None  # in the place at the last forward; only there the hook acts
        self.part: Any = None

    def watch(self, attention: nn.Module) -> None:
        self._join(attention.get_submodule(self.path))
        attention.register_forward_pre_hook(self._find)

    def _find(self, attention: nn.Module, args: tuple) -> None:
        if getattr(attention, "_is_replica", False):  # its hooks are those of the other replicas, in other threads
            raise SinkscopeError("nn.DataParallel cannot run a retrofitted model: take DistributedDataParallel")
        self.module, self.part = attention.get_submodule(self.path), getattr(attention, RETROFIT)
        self._join(self.module)

    def _join(self, module: nn.Module) -> None:
        hooks: Any = module._forward_pre_hooks if self.before else module._forward_hooks
        if self not in hooks.values():
            join: Any = module.register_forward_pre_hook if self.before else module.register_forward_hook
            join(self)

    def __call__(self, module: nn.Module, args: tuple, output: Any = None) -> Any:
        return self.act(self.part, args, output) if module is self.module else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a projection, which PEFT makes for `modules_to_save`, is in no place yet."""
        return vars(self) | {"module": None, "part": None}


@dataclass(frozen=True)
class Layer:
    """What a retrofit needs to know of one attention layer."""

    attention: nn.Module
    value: Projection
    output: str  # path of the output projection in the attention module; its input is every head's mix, (B,T,H·d)
    heads: int  # H, query heads
    scaling: float  # of q·k
    is_biased: bool  # ALiBi
    dtype: torch.dtype
    device: torch.device

    @property
    def value_heads(self) -> int:
        """K, key/value heads."""
        return self.value.heads

    @property
    def head_dim(self) -> int:
        return self.value.places.shape[1]

    @property
    def width(self) -> int:
        """D, of what the attention reads."""
        return self.value.width

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.device))


def layers_of(model: PreTrainedModel, family: Family) -> list[Layer]:
    """Every attention layer; InputError if the family's row does not say how its values are projected."""
    config: Any = model.config.get_text_config()
    layers = []
    for index, attention in family.attentions(model).items():
        with torch.device("cpu"):  # `from_pretrained` builds the model on meta, where indices would have no values
            value = projections(model, family, index)["value"]
        check_ordinary(value.module)
        head_dim = value.places.shape[1]
        layers.append(
            Layer(
                attention,
                value,
                family.output,
                config.num_attention_heads,
                head_dim**-0.5 if family.scaling is None else family.scaling,
                family.positions_at(index) == "alibi",
                model.dtype,
                value.module.weight.device,
            )
        )
    return layers


class Part(nn.Module):
    """What a retrofit adds to one module: its new parameters, and where they start."""

    head_axis: ClassVar[int] = 0  # of the parameters

    def start(self) -> Mapping[str, torch.Tensor]:
        """Parameter → its value before any training, of its shape."""
        raise NotImplementedError

    @torch.no_grad()
    def reset(self) -> None:
        for name, value in self.start().items():
            self.get_parameter(name).copy_(value)

    @torch.no_grad()
    def displacement(self) -> dict[str, torch.Tensor]:
        """Parameter → distance of each head's from its start, ‖p − p₀‖, (heads,) in float64.

        Where FSDP has sharded the parameters, every process must call this.
        """
        moved = {name: _whole(self.get_parameter(name)) - _whole(value) for name, value in self.start().items()}
        return {name: _by_head(x, self.head_axis) for name, x in moved.items()}


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A tensor, or the whole of a DTensor, in float64."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).double()


def _by_head(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Each head's norm over all other axes, (heads,)."""
    return torch.linalg.vector_norm(x.movedim(axis, 0).reshape(x.shape[axis], -1), dim=1)


class AttentionPart(Part):
    """One that a module of attention gets. Its parameters start at 0 unless it says otherwise."""

    def draw_start(self, layer: Layer, deviation: float) -> None:
        """Let all parameters start at N(0, deviation²), of torch's random state. What is drawn is saved with them."""
        for name, parameter in list(self.named_parameters()):
            drawn = torch.randn(parameter.shape, dtype=layer.dtype, device=layer.device) * deviation
            self.register_buffer(f"first_{name}", drawn)

    def start(self) -> Mapping[str, torch.Tensor]:
        drawn = dict(self.named_buffers())
        return {name: drawn.get(f"first_{name}", torch.zeros_like(p)) for name, p in self.named_parameters()}

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        """Have this part, which is in the attention module, run."""
        raise NotImplementedError


class GatePart(AttentionPart):
    """A factor for every head and position, computed where the values are. The tracer reads this module's inputs and
    outputs: the raw values and the factors.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.places = layer.value.places  # no buffer: nothing to save, and never on meta

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What the attention reads x (B,T,D), raw values (B,T,K,d) → factors (B,T,heads)."""
        raise NotImplementedError


def gated(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Each head's vectors x (…,heads,d) times its factor (…,heads), in x's dtype."""
    return (factor.unsqueeze(-1) * x).to(x.dtype)


class ValuePart(GatePart):
    """Multiplies each key/value head's values by its factor, before they are cached and attended to."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.is_whole = layer.value.is_whole

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        PlacedHook(layer.value.path, _changed).watch(layer.attention)


def _changed(part: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """The value projection's output with each head's values times their factor."""
    if part.is_whole:
        value = output.unflatten(-1, part.places.shape)
        return gated(value, part(args[0], value)).flatten(-2)
    places = _on(output.device, part)
    value = output[..., places]
    return output.index_copy(-1, places.flatten(), gated(value, part(args[0], value)).flatten(-2))


class OutputPart(GatePart):
    """Multiplies each query head's mix by its factor, at the query's own position."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.awaited: torch.Tensor | None = None  # the factors (B,T,H) between the value and the output projection

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        PlacedHook(layer.value.path, _made).watch(layer.attention)
        PlacedHook(layer.output, _gated, before=True).watch(layer.attention)
        layer.attention.register_forward_hook(_was_used)


def _made(part: Any, args: tuple, output: torch.Tensor) -> None:
    part.awaited = part(args[0], output[..., _on(output.device, part)])


def _gated(part: Any, args: tuple, output: None) -> tuple:
    factor, part.awaited = part.awaited, None
    return (gated(args[0].unflatten(-1, (factor.shape[-1], -1)), factor).flatten(-2), *args[1:])


def _was_used(attention: nn.Module, args: tuple, output: Any) -> None:
    """BLOOM with `slow_but_exact` multiplies by slices of its projection's weight and never calls it."""
    part: Any = getattr(attention, RETROFIT)
    if part.awaited is not None:
        raise SinkscopeError("the attention's output projection was not called: its gates would be without effect")


def _on(device: torch.device, part: Any) -> torch.Tensor:
    """The places of the values among the outputs of the value projection, on the device of those outputs."""
    if part.places.device != device:
        part.places = part.places.to(device)
    places: torch.Tensor = part.places
    return places


class DenominatorPart(AttentionPart, Denominator):
    """A further logit in each row's softmax. `scaling` is used if the model's own code makes the logits."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.scaling = layer.scaling
        self.is_biased = layer.is_biased

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        if family.door == "interceptor":
            Interceptor().watch(layer.attention)
        else:
            text_tower(model)[1].set_attn_implementation(NAME)  # no other tower has a use for it


class Retrofit(BaseModel):
    """One method, with its parameters as fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `sinkscope list`
    paper: ClassVar[str]  # that describes it

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        """The reason why the method does not apply to this model; None if it does."""
        if not family.output:
            return f"'{family.name}' has no projection of its heads' outputs in its attention module"
        if not family.qkv:
            return f"how '{family.name}' keeps q, k and v is not known: its row needs `qkv`"
        try:
            for layer in family.attentions(model):
                module = projections(model, family, layer)["value"].module
                check_ordinary(module)
                check_own_map(module)
        except InputError as error:
            return f"a projection of values: {error}"
        return None

    def part(self, layer: Layer) -> "AttentionPart":
        """The new module of one attention layer; not of methods with an `install` of their own."""
        raise NotImplementedError

    def install(self, model: PreTrainedModel, family: Family) -> None:
        """Add the new modules, with their parameters at their start; also on meta, where `from_pretrained` builds."""
        for layer in layers_of(model, family):
            part = self.part(layer)
            part.reset()
            layer.attention.add_module(RETROFIT, part)
            part.attach(layer, model, family)


class Plain(Retrofit):
    name: ClassVar[str] = "none"
    about: ClassVar[str] = "nothing: the plain fine-tune that the others are compared with; the model stays what it is"
    paper: ClassVar[str] = "VGA tab. 3"

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        return None

    def install(self, model: PreTrainedModel, family: Family) -> None:
        pass
