"""Saving and loading of retrofitted models by transformers' own code, under separate model types.

`sinkscope_llama` is Llama with a retrofit: its configuration is Llama's with a field that names the method, and
`SinkscopeLlamaForCausalLM` builds the method in when it is created. `save_pretrained` then writes the new parameters
with all others, and `from_pretrained` loads them. Without `import sinkscope.retrofits`, the type is unknown to
transformers, which refuses the folder; it never loads the model without its retrofit.

`import sinkscope.retrofits` registers the configurations of all families in the table (0.16 s). A model without a row
cannot be loaded with its retrofit. The class of a model, which imports its modeling code, is registered when the first
configuration of its type is created.
"""

from collections.abc import Callable, Iterable
from functools import cache, wraps
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

import sinkscope.attention.seam  # noqa: F401  # registers the attention function that retrofitted models name
from sinkscope.attention.taps import NAME, attends_by_us
from sinkscope.errors import InputError
from sinkscope.models.family import PREFIX
from sinkscope.models.loading import AUTO_CLASSES
from sinkscope.retrofits.retrofit import RETROFIT

BuildIn = Callable[[PreTrainedModel], None]  # installs the method that the configuration names in a model

README = """# {name}

A `{base}` model with the method `{method}`{parameters}, built in by sinkscope {sinkscope}. transformers loads it where
sinkscope is installed and has registered its model types:

```python
import sinkscope.retrofits
from transformers import {auto}

model = {auto}.from_pretrained("this folder")
```
"""


def register_model_types(model_types: Iterable[str], build_in: BuildIn) -> None:
    """Register `sinkscope_TYPE` with transformers' auto classes for each of the types."""
    for model_type in model_types:
        if model_type in CONFIG_MAPPING:  # the installed version of transformers has this type
            config_class(model_type, build_in)


@cache
def config_class(base: str, build_in: BuildIn) -> type[PreTrainedConfig]:
    """Create and register the configuration class of `sinkscope_BASE`: the base's with the field `retrofit`."""
    parent: Any = CONFIG_MAPPING[base]

    class Config(parent):
        model_type = PREFIX + base
        retrofit: dict | None = None  # method, parameters, and the version of sinkscope

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            register_models(base, build_in)  # auto classes create the configuration before they look up the model class

    Config.__name__ = Config.__qualname__ = f"Sinkscope{parent.__name__}"
    AutoConfig.register(PREFIX + base, Config)
    return Config


@cache
def register_models(base: str, build_in: BuildIn) -> None:
    """Register a class for `sinkscope_BASE` with each auto class that has one for the base."""
    parent: Any = CONFIG_MAPPING[base]
    for auto in AUTO_CLASSES:
        if parent in auto._model_mapping:
            ours = model_class(base, auto._model_mapping[parent], build_in)
            auto.register(config_class(base, build_in), ours, exist_ok=True)


@cache
def model_class(base: str, parent: Any, build_in: BuildIn) -> type[PreTrainedModel]:
    names, configuration = list(signature(parent.forward).parameters)[1:], config_class(base, build_in)

    class Model(parent):
        config_class = configuration
        # transformers determines this from the source of the class's module, which is not this module
        _can_set_attn_implementation_cached_value = parent._can_set_attn_implementation()

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            build_in(self)

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(save_directory, *args, **kwargs)
            readme = Path(save_directory, "README.md")
            if not kwargs.get("is_main_process", True) or readme.exists():
                return
            record: Any = self.config.retrofit
            parameters = ", ".join(f"{key} = {value}" for key, value in record["parameters"].items())
            auto = next(auto for auto in AUTO_CLASSES if auto._model_mapping.get(configuration, None) is Model)
            text = README.format(
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

        @wraps(parent.prepare_inputs_for_generation)
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            registers, cache = getattr(self, RETROFIT, None), kwargs.get("past_key_values")
            is_continued = cache is not None and kwargs.get("is_first_iteration") and cache.get_seq_length() > 0
            if registers is not None and is_continued and kwargs.get("next_sequence_length") is not None:
                kwargs["next_sequence_length"] += registers.count  # in the cache, but not in the text
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
    for known, name in ((base, PREFIX + base), (parent.__name__, Model.__name__)):
        conversion = get_checkpoint_conversion_mapping(known)
        if conversion is not None:
            register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    return Model


def become_retrofitted(model: PreTrainedModel, method: str, parameters: dict[str, Any], build_in: BuildIn) -> None:
    """Give a loaded model the retrofitted class, with the method in its configuration but not yet installed.

    A model other than the plain causal language model of its configuration raises InputError.
    """
    config: Any = model.config
    plain: Any = type(model)
    known = [auto._model_mapping[type(config)] for auto in AUTO_CLASSES if type(config) in auto._model_mapping]
    if plain not in known:
        named = " or ".join(dict.fromkeys(kind.__name__ for kind in known)) or "no such class"
        raise InputError(f"a {plain.__name__} cannot be retrofitted: only transformers' own ({named})")
    base = config.model_type
    if PREFIX + base not in CONFIG_MAPPING:
        raise InputError(f"a retrofitted {plain.__name__} could not be loaded again: '{base}' is not registered")
    register_models(base, build_in)
    model.__class__ = model_class(base, plain, build_in)
    config.__class__ = config_class(base, build_in)
    config.retrofit = {"method": method, "parameters": parameters, "sinkscope": version("sinkscope")}
