"""The base class of retrofits, and the points at which a retrofit can act on attention.

    values       after the value projection, before the values are cached: `ValuePart`
    output       before the output projection, on every head's mix: `OutputPart`
    denominator  inside the softmax, a further logit: `taps.Denominator`
    operation    in place of the softmax: `taps.OtherOperation`

The first two are hooks at the paths of modules that every family has, so the model keeps its own attention kernel and
cache, which holds the changed values. They act on the output or input of a projection together with its adapter, if
PEFT has added one, so merging the adapter changes nothing. The others need the attention function of seam.py.

At the taps of seam.py, `value` is the tensor that attention weights multiply, after V-scale or a gate, so ∇v_s = Σ_t
a[t,s] g_t is true there; `mix` is the heads' output before an output gate. The raw value is the output of the
projection.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.taps import NAME, Denominator, Interceptor
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.models.edits import check_own_map
from sinkscope.models.family import Family, text_tower
from sinkscope.models.packed import check_ordinary
from sinkscope.models.projections import Projection, projections

RETROFIT = "retrofit"  # the name of a retrofit's module in the module that it changes; part of saved state dicts


def registers_before(model: nn.Module) -> int:
    """Return the number of register tokens that a retrofit puts before every sequence."""
    return int(getattr(getattr(model, RETROFIT, None), "count", 0))


class PlacedHook:
    """Calls `act` before or after the module at a path of an attention module, whichever module is there when it runs.

    A projection may be replaced: PEFT puts a module of its own at its path, which holds the projection and adds to its
    output (LoRA), multiplies it (IA³) or rotates its input (OFT), and puts the projection back once the adapter is
    merged into its weight. A hook on the projection itself would act before the adapter in the first case and after it
    in the second; a hook on the path acts after the adapter in both. The retrofit's module is also looked up in each
    forward: with `modules_to_save`, PEFT trains a copy of it.

    `act` is called with the retrofit's module, and the arguments and output of the hooked module; it returns a
    replacement of the output (of the arguments, in a hook that acts before), or None.
    """

    def __init__(self, path: str, act: Callable[[Any, tuple, Any], Any], before: bool = False) -> None:
        self.path, self.act, self.before = path, act, before
        self.module: nn.Module | None = None  # the module at the path in the last forward, on which the hook acts
        self.part: Any = None

    def watch(self, attention: nn.Module) -> None:
        self._join(attention.get_submodule(self.path))
        attention.register_forward_pre_hook(self._find)

    def _find(self, attention: nn.Module, args: tuple) -> None:
        if getattr(attention, "_is_replica", False):  # replicas in other threads share its hooks
            raise SinkscopeError("nn.DataParallel cannot run a retrofitted model: use DistributedDataParallel")
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
        """Drop the module: a copy of a projection, which PEFT makes for `modules_to_save`, is not at a path yet."""
        return vars(self) | {"module": None, "part": None}


@dataclass(frozen=True)
class Layer:
    """The properties of one attention layer that a retrofit needs."""

    attention: nn.Module
    value: Projection
    output: str  # as in Family: path of the output projection, whose input is every head's mix, (B,T,H·d)
    heads: int  # H, number of query heads
    value_heads: int  # K, number of key/value heads
    head_dim: int
    width: int  # D, width of the attention's input
    scaling: float  # factor of q·k
    is_biased: bool  # whether the model has ALiBi
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.device))


def layers_of(model: PreTrainedModel, family: Family) -> list[Layer]:
    """Describe every attention layer; raise InputError if the family's row does not have its value projection."""
    config: Any = model.config.get_text_config()
    layers = []
    for index, attention in family.attentions(model).items():
        with torch.device("cpu"):  # `from_pretrained` builds the model on meta, where indices have no values
            value = projections(model, family, index)["value"]
        check_ordinary(value.module)
        head_dim = value.places.shape[1]
        scaling = head_dim**-0.5 if family.scaling is None else family.scaling
        is_biased = family.positions_at(index) == "alibi"
        sizes = (config.num_attention_heads, value.heads, head_dim, value.width)
        device = value.module.weight.device
        layers.append(Layer(attention, value, family.output, *sizes, scaling, is_biased, model.dtype, device))
    return layers


class Part(nn.Module):
    """The module that a retrofit adds to one module, with new parameters and their starting values."""

    head_axis = 0  # axis of the heads in the parameters
    starts: Mapping[str, float] = {}  # parameter → its starting value if it is not 0, and not drawn

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        """Connect this part, which is in the attention module, to the forward pass."""
        raise NotImplementedError

    def draw_start(self, layer: Layer, deviation: float) -> None:
        """Draw the start of all parameters from N(0, deviation²) by torch's random state, and keep it as buffers."""
        for name, parameter in list(self.named_parameters()) if deviation else ():
            drawn = torch.randn(parameter.shape, dtype=layer.dtype, device=layer.device) * deviation
            self.register_buffer(f"first_{name}", drawn)

    def start(self) -> Mapping[str, torch.Tensor]:
        """Return the starting value of each parameter by name."""
        drawn, parameters = dict(self.named_buffers()), dict(self.named_parameters())
        constant = {name: torch.full_like(p, self.starts.get(name, 0.0)) for name, p in parameters.items()}
        return {name: drawn.get(f"first_{name}", value) for name, value in constant.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Set every parameter to its start."""
        for name, value in self.start().items():
            self.get_parameter(name).copy_(value)

    @torch.no_grad()
    def displacement(self) -> dict[str, torch.Tensor]:
        """Return each parameter's distance from its start by head, ‖p − p₀‖, (heads,) in float64."""

        def whole(x: torch.Tensor) -> torch.Tensor:
            return (x.full_tensor() if hasattr(x, "full_tensor") else x).double()  # gathers a DTensor

        distances = {}
        for name, value in self.start().items():
            moved = (whole(self.get_parameter(name)) - whole(value)).movedim(self.head_axis, 0)
            distances[name] = torch.linalg.vector_norm(moved.reshape(len(moved), -1), dim=1)
        return distances


class GatePart(Part):
    """Computes a factor for every head and position at the value projection.

    `forward` returns factors (B,T,heads) for the attention's input x (B,T,D) and the raw values (B,T,K,d). The tracer
    reads this module's inputs and outputs.
    """

    def __init__(self, layer: Layer, method: Any) -> None:
        super().__init__()
        self.method = method
        self.places = layer.value.places  # not a buffer, because it is not saved and never on meta

    def places_on(self, device: torch.device) -> torch.Tensor:
        if self.places.device != device:
            self.places = self.places.to(device)
        return self.places


def gated(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply each head's vectors x (…,heads,d) by its factor (…,heads), in x's dtype."""
    return (factor.unsqueeze(-1) * x).to(x.dtype)


class ValuePart(GatePart):
    """Multiplies each key/value head's values by its factor, before they are cached and attended to."""

    def __init__(self, layer: Layer, method: Any) -> None:
        super().__init__(layer, method)
        self.is_whole = layer.value.is_whole

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        PlacedHook(layer.value.path, ValuePart.scale_values).watch(layer.attention)

    def scale_values(self, args: tuple, output: torch.Tensor) -> torch.Tensor:
        # the factors come from a call of `self`, which may be PEFT's wrapper around a trained copy
        if self.is_whole:
            value = output.unflatten(-1, self.places.shape)
            return self.change(value, self(args[0], value)).flatten(-2)
        places = self.places_on(output.device)
        value = output[..., places]
        return output.index_copy(-1, places.flatten(), self.change(value, self(args[0], value)).flatten(-2))

    def change(self, value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the changed values (B,T,K,d)."""
        return gated(value, factor)

    def pullback(self, x: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the values (B,T,K,d) from that of the changed values, by the equation of the method's
        paper; None if the paper states none. Arguments as in `forward`, and `upstream` as the values."""
        return None


def change_mix(layer: Layer, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Replace every head's mix (B,T,H·d) by `change(part, mix)` before the output projection reads it."""
    if layer.output:
        hook = PlacedHook(layer.output, lambda part, args, output: (change(part, args[0]), *args[1:]), before=True)
        hook.watch(layer.attention)
    else:  # the attention module returns the mix, and the output projection is outside
        layer.attention.register_forward_hook(
            lambda attention, args, output: (change(getattr(attention, RETROFIT), output[0]), *output[1:])
        )


class OutputPart(GatePart):
    """Multiplies each query head's mix by its factor, at the query's own position."""

    def __init__(self, layer: Layer, method: Any) -> None:
        super().__init__(layer, method)
        self.awaited: torch.Tensor | None = None  # the factors (B,T,H) between the value and the output projection

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        PlacedHook(layer.value.path, OutputPart.compute_factors).watch(layer.attention)
        change_mix(layer, OutputPart.scale_heads)
        layer.attention.register_forward_hook(_check_applied)

    def compute_factors(self, args: tuple, output: torch.Tensor) -> None:
        self.awaited = self(args[0], output[..., self.places_on(output.device)])

    def scale_heads(self, mix: torch.Tensor) -> torch.Tensor:
        factor, self.awaited = self.awaited, None
        assert factor is not None
        return gated(mix.unflatten(-1, (factor.shape[-1], -1)), factor).flatten(-2)


def _check_applied(attention: nn.Module, args: tuple, output: Any) -> None:
    """Raise if the output gate was not applied: BLOOM with `slow_but_exact` never calls its output projection."""
    part: Any = getattr(attention, RETROFIT)
    if part.awaited is not None:
        raise SinkscopeError("the attention's output projection was not called: its gates would have no effect")


class DenominatorPart(Part, Denominator):
    """An extra logit in each row's softmax. `scaling` is used if the model's own code computes the logits."""

    def __init__(self, layer: Layer, method: Any) -> None:
        super().__init__()
        self.method = method
        self.scaling = layer.scaling
        self.is_biased = layer.is_biased

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        if family.door == "interceptor":
            Interceptor().watch(layer.attention)
        else:
            text_tower(model)[1].set_attn_implementation(NAME)  # other towers keep their attention function


class Retrofit(BaseModel):
    """One method, with its parameters as fields: a subclass names it, and the class of the part of each layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `sinkscope list`
    paper: ClassVar[str]  # the paper that describes it
    part: ClassVar[Any]  # (layer, method) → its new module: a class of Part; unused by methods with their own `install`

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        """Return why the method does not apply to this model; None if it applies."""
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

    def install(self, model: PreTrainedModel, family: Family) -> None:
        """Add the new modules at their start; also on meta, where `from_pretrained` builds models."""
        for layer in layers_of(model, family):
            part = type(self).part(layer, self)
            part.reset()
            layer.attention.add_module(RETROFIT, part)
            part.attach(layer, model, family)


class PlainTraining(Retrofit):
    """The plain fine-tune with which every retrofit is compared (VGA table 3, "fine-tuning w/o VGA")."""

    name = "none"
    about = "no change: the plain fine-tune with which the others are compared"
    paper = "VGA tab. 3"


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return path → module for the modules that a retrofit has added."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Part)}


def has_gates(model: nn.Module) -> bool:
    """Return whether a retrofit multiplies the model's values or its heads' outputs."""
    return any(isinstance(part, GatePart) for part in model.modules())


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a retrofit has added by name, as in `named_parameters()`; empty without retrofit."""
    return {
        f"{path}.{name}": parameter
        for path, part in parts_of(model).items()
        for name, parameter in part.named_parameters()
    }


def gate_displacement(model: nn.Module) -> pd.DataFrame:
    """Measure how far each head's new parameters are from their start; with FSDP, every process must call this.

    Returns:
        Columns layer (−1 for register tokens, which belong to no layer), head (key/value or query heads, depending on
        the method; the index of a register token), parameter, displacement ‖p − p₀‖ (for V-scale |θ − θ₀|).
    """
    rows = []
    for index, (path, part) in enumerate(parts_of(model).items()):
        layer = index if "." in path else -1  # a part of the model itself belongs to no layer
        for name, moved in part.displacement().items():
            rows += [(layer, head, name, distance) for head, distance in enumerate(moved.tolist())]
    return pd.DataFrame(rows, columns=["layer", "head", "parameter", "displacement"])
