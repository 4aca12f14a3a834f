"""What is built into a model for good, to be trained with it, one method a file.

    retrofit_model(model, None, "vga", placement="output")
    model.save_pretrained(folder)                              # AutoModelForCausalLM loads it again

A new one is a file here, and a line in the register.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.taps import NAME
from sinkscope.errors import InputError, unknown
from sinkscope.models.families import Family, find_family, is_retrofitted
from sinkscope.options.option import filled_in
from sinkscope.retrofits.iga import IGA
from sinkscope.retrofits.key_bias import KeyBiases
from sinkscope.retrofits.learnable_sink import LearnableSink
from sinkscope.retrofits.model_types import teach_transformers
from sinkscope.retrofits.none import Plain
from sinkscope.retrofits.register_tokens import RegisterTokens
from sinkscope.retrofits.retrofit import GatePart, Part, Retrofit
from sinkscope.retrofits.saving import become_retrofitted
from sinkscope.retrofits.vga import VGA
from sinkscope.retrofits.vscale import VScale

RETROFITS: dict[str, type[Retrofit]] = {
    retrofit.name: retrofit for retrofit in (IGA, KeyBiases, LearnableSink, Plain, RegisterTokens, VGA, VScale)
}


def retrofit_model(model: PreTrainedModel, family: Family | None, method: str, **parameters: Any) -> PreTrainedModel:
    """Change a loaded model, in place, into the retrofitted one. → the same model.

    Its new parameters are at their start and are the only ones whose `requires_grad` this sets. With `none` the model
    stays as it is. `family`: the model's row, found where None.

    Errors: InputError for a method or parameter that does not exist or does not apply to this model, for a model that
    has been retrofitted before, or one that sinkscope is measuring just now. The model is then as it was.
    """
    chosen = make_retrofit(method, parameters)
    check_unretrofitted(model, method)
    family = find_family(model) if family is None else family
    reason = chosen.inapplicable(model, family)
    if reason is not None:
        raise InputError(f"{method} does not apply to this model: {reason}")
    if any(hasattr(layer.get_submodule(family.attention), NAME) for layer in family.layer_modules(model)):
        raise InputError("this model has its seams in: close the tracer that is open on it before retrofitting")
    if method != "none":
        become_retrofitted(model, method, chosen.model_dump())
        chosen.install(model, family)
    return model


def make_retrofit(method: str, parameters: Mapping[str, Any]) -> Retrofit:
    """The method with its parameters, as numbers or as the command line has them. Errors: InputError."""
    if method not in RETROFITS:
        raise InputError(f"retrofit {unknown(method, RETROFITS)}")
    return filled_in(RETROFITS[method], parameters, method)


def check_unretrofitted(model: PreTrainedModel, method: str) -> None:
    """Errors: InputError for a model that has a retrofit already."""
    if is_retrofitted(model.config):
        before = model.config.retrofit["method"]
        raise InputError(
            f"this model has been retrofitted with {before} already: apply {method} to the model it was made from"
        )


def install(model: PreTrainedModel) -> None:
    """Put in what the configuration says, when a retrofitted model is built.

    Errors: InputError for a configuration that is damaged, or of a sinkscope that knows other methods.
    """
    record: Any = model.config.retrofit
    if not isinstance(record, dict) or not {"method", "parameters"} <= record.keys():
        raise InputError("the configuration says that the model is retrofitted, but not how: `retrofit` is damaged")
    try:
        chosen = make_retrofit(record["method"], record["parameters"])
    except InputError as error:
        raise InputError(f"saved by sinkscope {record.get('sinkscope', '?')}: {error}") from None
    chosen.install(model, find_family(model))


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Path → what a retrofit has put there."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Part)}


def has_gates(model: nn.Module) -> bool:
    """Does a retrofit multiply its values, or its heads' outputs?"""
    return any(isinstance(part, GatePart) for part in parts_of(model).values())


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name, as in `named_parameters` → parameter, of all that a retrofit has added. Empty for `none`."""
    return {
        f"{path}.{name}": parameter
        for path, part in parts_of(model).items()
        for name, parameter in part.named_parameters()
    }


def gate_displacement(model: nn.Module) -> pd.DataFrame:
    """How far each head's new parameters are from where they started (definitions §8).

    → layer (−1: the whole model's, registers), head (of values or queries, as the parameter counts; registers in
    order), parameter, displacement: ‖p − p₀‖, for V-scale |θ − θ₀|.
    """
    in_model = [path for path in parts_of(model) if "." not in path]
    rows = []
    for index, (path, part) in enumerate(parts_of(model).items()):
        layer = -1 if path in in_model else index
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

teach_transformers()  # so that AutoModelForCausalLM.from_pretrained knows retrofitted models
