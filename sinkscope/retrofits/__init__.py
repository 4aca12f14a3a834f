"""Retrofits: permanent changes that are built into a model, trained, saved and loaded with it.

    retrofit_model(model, None, "vga", placement="output")
    model.save_pretrained(folder)                              # AutoModelForCausalLM loads it again

To add a method, write it here and register it below. Saving and loading is transformers' own code, under separate model
types: `sinkscope_llama` is Llama with a retrofit. Its configuration is Llama's with a field that names the method, and
`SinkscopeLlamaForCausalLM` builds the method in when it is created. `save_pretrained` then writes the new parameters
with all others, and `from_pretrained` loads them. Without `import sinkscope.retrofits`, the type is unknown to
transformers, which refuses the folder; it never loads the model without its retrofit.

Importing this package registers the configurations of all families in the table (0.16 s). A model without a row cannot
be loaded with its retrofit. The class of a model, which imports its modeling code, is registered when the first
configuration of its type is created.
"""

from collections.abc import Mapping
from functools import cache, wraps
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

import sinkscope.attention.seam  # noqa: F401  # registers the attention function that retrofitted models name
from sinkscope.attention.taps import NAME, attends_by_us
from sinkscope.errors import InputError, unknown
from sinkscope.models.edits import ACCELERATE, unknown_code
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.models.family import RETROFITTED, WITH_TOWERS, Family, is_retrofitted
from sinkscope.models.in_memory import on_cpu_by_default, unwrapped
from sinkscope.models.loading import AUTO_CLASSES
from sinkscope.options.option import from_parameters
from sinkscope.plugins import load_plugins
from sinkscope.retrofits.biases import KeyBiases, LearnableSink, OffByOne, ValueBiases
from sinkscope.retrofits.gates import IGA, VGA, VScale
from sinkscope.retrofits.gradient_valve import GradientValve
from sinkscope.retrofits.operation import AttentionOperation
from sinkscope.retrofits.register_tokens import RegisterTokens
from sinkscope.retrofits.retrofit import (
    RETROFIT,
    PlainTraining,
    Retrofit,
    gate_displacement,
    has_gates,
    new_parameters,
    parts_of,
)

RETROFITS: dict[str, type[Retrofit]] = {
    retrofit.name: retrofit
    for retrofit in (
        GradientValve, IGA, KeyBiases, LearnableSink, OffByOne, AttentionOperation, PlainTraining, RegisterTokens,
        ValueBiases, VGA, VScale,
    )
}  # fmt: skip

MODEL_README = """# {name}

A `{base}` model with the method `{method}`{parameters}, built in by sinkscope {sinkscope}. transformers loads it where
sinkscope is installed and has registered its model types:

```python
import sinkscope.retrofits
from transformers import {auto}

model = {auto}.from_pretrained("this folder")
```
"""


def retrofit_model(model: PreTrainedModel, family: Family | None, method: str, **parameters: Any) -> PreTrainedModel:
    """Build a retrofit into a loaded model, in place.

    The new parameters have their starting values, and are the only ones whose `requires_grad` is set. With `none` the
    model stays as it is; this also allows fine-tuning of a model that has a retrofit already.

    Args:
        model: One of transformers' own language models, causal or an encoder with a head for masked tokens.
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
    family = find_family(model) if family is None else family
    attentions = family.attentions(model).values()
    if any(hasattr(attention, NAME) for attention in attentions):
        raise InputError("this model has its seams in: close the tracer that is open on it before retrofitting")
    if method == "none":
        return model
    config: Any = model.config
    if is_retrofitted(config):
        before = config.retrofit["method"]
        raise InputError(
            f"this model has been retrofitted with {before} already: apply {method} to the model it was made from"
        )
    base = config.model_type
    if base not in (*FAMILIES, *WITH_TOWERS):
        raise InputError(
            f"'{base}' has no row in the table of families: with {method} built in, it could not be loaded again"
        )
    if (code := unknown_code(attentions)) is not None:
        raise InputError(f"this model computes attention by {code}, without which it would be loaded after {method}")
    if (reason := chosen.inapplicable(model, family)) is not None:
        raise InputError(f"{method} does not apply to this model: {reason}")
    plain: Any = type(model)
    known = [auto._model_mapping[type(config)] for auto in AUTO_CLASSES if type(config) in auto._model_mapping]
    if plain not in known:
        named = " or ".join(dict.fromkeys(kind.__name__ for kind in known)) or "no such class"
        raise InputError(f"a {plain.__name__} cannot be retrofitted: only transformers' own ({named})")
    if RETROFITTED + base not in CONFIG_MAPPING:
        raise InputError(f"a retrofitted {plain.__name__} could not be loaded again: '{base}' is not registered")
    _register_models(base)
    model.__class__ = _model_class(base, plain)
    if ACCELERATE in vars(model):  # its hook has kept the forward of the class before
        model._old_forward = model.__class__.forward.__get__(model)
    config.__class__ = CONFIG_MAPPING[RETROFITTED + base]
    config.retrofit = {"method": method, "parameters": chosen.model_dump(), "sinkscope": version("sinkscope")}
    with on_cpu_by_default():
        chosen.install(model, family)
    return model


def make_retrofit(method: str, parameters: Mapping[str, Any]) -> Retrofit:
    """Create a method from its parameters, given as numbers or as text; raise InputError if one is wrong."""
    load_plugins()
    if method not in RETROFITS:
        raise InputError(f"retrofit {unknown(method, RETROFITS)}")
    return from_parameters(RETROFITS[method], parameters, method)


def _register_configuration(base: str) -> None:
    """Create and register the configuration class of `sinkscope_BASE`: the base's with the field `retrofit`."""
    parent: Any = CONFIG_MAPPING[base]

    class Config(parent):
        model_type = RETROFITTED + base
        retrofit: dict | None = None  # method, parameters, and the version of sinkscope

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            _register_models(base)  # auto classes create the configuration before they look up the model class

    Config.__name__ = Config.__qualname__ = f"Sinkscope{parent.__name__}"
    AutoConfig.register(RETROFITTED + base, Config)


@cache
def _register_models(base: str) -> None:
    """Register a class for `sinkscope_BASE` with each auto class that has one for the base."""
    parent: Any = CONFIG_MAPPING[base]
    for auto in AUTO_CLASSES:
        if parent in auto._model_mapping:
            ours = _model_class(base, auto._model_mapping[parent])
            auto.register(CONFIG_MAPPING[RETROFITTED + base], ours, exist_ok=True)


@cache
def _model_class(base: str, parent: Any) -> type[PreTrainedModel]:
    names, configuration = list(signature(parent.forward).parameters)[1:], CONFIG_MAPPING[RETROFITTED + base]

    class Model(parent):
        config_class = configuration
        # transformers determines this from the source of the class's module, which is not this module
        _can_set_attn_implementation_cached_value = parent._can_set_attn_implementation()

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            record = config.retrofit
            if not isinstance(record, dict) or not {"method", "parameters"} <= record.keys():
                raise InputError(
                    "the configuration says that the model is retrofitted, but not how: `retrofit` is damaged"
                )
            try:
                chosen = make_retrofit(record["method"], record["parameters"])
            except InputError as error:
                raise InputError(f"saved by sinkscope {record.get('sinkscope', '?')}: {error}") from None
            chosen.install(self, find_family(self))

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(save_directory, *args, **kwargs)
            readme = Path(save_directory, "README.md")
            if not kwargs.get("is_main_process", True) or readme.exists():
                return
            record: Any = self.config.retrofit
            parameters = ", ".join(f"{key} = {value}" for key, value in record["parameters"].items())
            auto = next(auto for auto in AUTO_CLASSES if auto._model_mapping.get(configuration, None) is Model)
            text = MODEL_README.format(
                name=Model.__name__,
                auto=auto.__name__,
                base=base,
                method=record["method"],
                parameters=f" ({parameters})" if parameters else "",
                sinkscope=record["sinkscope"],
            )
            readme.write_text(text, encoding="utf-8")

        @wraps(parent.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            registers = getattr(self, RETROFIT, None)
            if registers is None:
                return super().forward(*args, **kwargs)
            inputs = dict(zip(names, args, strict=False)) | kwargs
            return registers.around(super().forward, self.get_input_embeddings(), inputs)

        if hasattr(parent, "prepare_inputs_for_generation"):  # an encoder has no such method

            @wraps(parent.prepare_inputs_for_generation)
            def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
                registers, cache = getattr(self, RETROFIT, None), kwargs.get("past_key_values")
                is_continued = cache is not None and kwargs.get("is_first_iteration") and cache.get_seq_length() > 0
                if registers is not None and is_continued and kwargs.get("next_sequence_length") is not None:
                    kwargs["next_sequence_length"] += registers.count  # registers are in the cache, but not in the text
                return super().prepare_inputs_for_generation(*args, **kwargs)

        def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
            """Raise InputError for an attention function that would leave the retrofit out."""
            if not str(attn_implementation).startswith(NAME) and any(map(attends_by_us, self.modules())):
                raise InputError(
                    f"attention '{attn_implementation}' does not support this model's {self.config.retrofit['method']}"
                    ": it would be left out"
                )
            super().set_attn_implementation(attn_implementation, *args, **kwargs)

    Model.__name__ = Model.__qualname__ = f"Sinkscope{parent.__name__}"
    # Checkpoints of mixtures of experts name and stack weights differently from the model: conversions by model type.
    for known, name in ((base, RETROFITTED + base), (parent.__name__, Model.__name__)):
        conversion = get_checkpoint_conversion_mapping(known)
        if conversion is not None:
            register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    return Model


__all__ = [
    "RETROFITS",
    "Retrofit",
    "gate_displacement",
    "has_gates",
    "make_retrofit",
    "new_parameters",
    "parts_of",
    "retrofit_model",
]

for _base in (*FAMILIES, *WITH_TOWERS):
    if _base in CONFIG_MAPPING:  # the installed version of transformers has this type
        _register_configuration(_base)
