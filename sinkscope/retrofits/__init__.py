"""Retrofits: permanent changes that are built into a model and trained with it.

    retrofit_model(model, None, "vga", placement="output")
    model.save_pretrained(folder)                              # AutoModelForCausalLM loads it again

Importing this package registers the model types of saved retrofitted models with transformers (saving.py), so that
AutoModelForCausalLM.from_pretrained(folder) loads them. To add a method, write it here and register it below.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.taps import NAME
from sinkscope.errors import InputError, unknown
from sinkscope.models.edits import unknown_code
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.models.family import WITH_TOWERS, Family, base_type, is_retrofitted
from sinkscope.models.in_memory import on_cpu_by_default, unwrapped
from sinkscope.options.option import filled_in
from sinkscope.retrofits.biases import KeyBiases, LearnableSink, ValueBiases
from sinkscope.retrofits.gates import IGA, VGA
from sinkscope.retrofits.operation import AttentionOperation
from sinkscope.retrofits.register_tokens import RegisterTokens
from sinkscope.retrofits.retrofit import GatePart, Part, Plain, Retrofit
from sinkscope.retrofits.saving import become_retrofitted, register_model_types
from sinkscope.retrofits.vscale import VScale

RETROFITS: dict[str, type[Retrofit]] = {
    retrofit.name: retrofit
    for retrofit in (IGA, KeyBiases, LearnableSink, AttentionOperation, Plain, RegisterTokens, ValueBiases, VGA, VScale)
}


def retrofit_model(model: PreTrainedModel, family: Family | None, method: str, **parameters: Any) -> PreTrainedModel:
    """Build a retrofit into a loaded model, in place.

    The new parameters have their starting values, and are the only ones whose `requires_grad` is set. With `none` the
    model stays as it is; this also allows fine-tuning of a model that has a retrofit already.

    Args:
        model: One of transformers' own causal language models.
        family: The model's row in the table of families; None finds it by the model type.
        method: A name in RETROFITS.
        **parameters: Parameters of the method, as numbers or as text from the command line.

    Returns:
        The same model.

    Raises:
        InputError: The method or a parameter does not exist or does not apply to this model, the model has another
            retrofit, or a tracer is open on it. The model is then unchanged.
    """
    chosen = make_retrofit(method, parameters)
    if unwrapped(model) is not model:
        raise InputError(f"the model is wrapped in a {type(model).__name__}: give retrofit_model the model itself")
    if is_retrofitted(model.config) and method != "none":
        before = model.config.retrofit["method"]
        raise InputError(
            f"this model has been retrofitted with {before} already: apply {method} to the model it was made from"
        )
    family = find_family(model) if family is None else family
    if method != "none" and base_type(model.config.model_type) not in (*FAMILIES, *WITH_TOWERS):
        raise InputError(
            f"'{model.config.model_type}' has no row in the table of families: with {method} built in, it could not be "
            "loaded again"
        )
    code = unknown_code(family.attentions(model).values())
    if method != "none" and code is not None:
        raise InputError(f"this model computes attention by {code}, without which it would be loaded after {method}")
    reason = chosen.inapplicable(model, family)
    if reason is not None:
        raise InputError(f"{method} does not apply to this model: {reason}")
    if any(hasattr(attention, NAME) for attention in family.attentions(model).values()):
        raise InputError("this model has its seams in: close the tracer that is open on it before retrofitting")
    if method != "none":
        become_retrofitted(model, method, chosen.model_dump(), _build_in)
        with on_cpu_by_default():
            chosen.install(model, family)
    return model


def make_retrofit(method: str, parameters: Mapping[str, Any]) -> Retrofit:
    """Create a method from its parameters, given as numbers or as text; raise InputError if one is wrong."""
    if method not in RETROFITS:
        raise InputError(f"retrofit {unknown(method, RETROFITS)}")
    return filled_in(RETROFITS[method], parameters, method)


def _build_in(model: PreTrainedModel) -> None:
    """Install the retrofit that a saved model's configuration names, while the model is built."""
    record: Any = model.config.retrofit
    if not isinstance(record, dict) or not {"method", "parameters"} <= record.keys():
        raise InputError("the configuration says that the model is retrofitted, but not how: `retrofit` is damaged")
    try:
        chosen = make_retrofit(record["method"], record["parameters"])
    except InputError as error:
        raise InputError(f"saved by sinkscope {record.get('sinkscope', '?')}: {error}") from None
    chosen.install(model, find_family(model))


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return path → module for the modules that a retrofit has added."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Part)}


def has_gates(model: nn.Module) -> bool:
    """Return whether a retrofit multiplies the model's values or its heads' outputs."""
    return any(isinstance(part, GatePart) for part in parts_of(model).values())


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
    parts = parts_of(model)
    rows = []
    for index, (path, part) in enumerate(parts.items()):
        layer = index if "." in path else -1  # a part of the model itself belongs to no layer
        for name, moved in part.displacement().items():
            rows += [(layer, head, name, distance) for head, distance in enumerate(moved.tolist())]
    return pd.DataFrame(rows, columns=["layer", "head", "parameter", "displacement"])


__all__ = [
    "RETROFITS",
    "Retrofit",
    "gate_displacement",
    "has_gates",
    "make_retrofit",
    "new_parameters",
    "retrofit_model",
]

register_model_types((*FAMILIES, *WITH_TOWERS), _build_in)
