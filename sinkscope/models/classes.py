"""Which of transformers' classes a configuration is a model of."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

# In this order a configuration is looked for, unless it names a class itself. The last two also read pictures or sound:
# of their models the part that reads text is measured (towers.py).
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The class of AUTO_CLASSES that makes the models of a configuration; None where none does.

    It is the one whose model the configuration names in `architectures`, else the first that knows the configuration,
    or, of code that comes with a model, the first that the code is for.
    """
    kind, named = type(config), set(config.architectures or ())
    known = [auto for auto in AUTO_CLASSES if kind in auto._model_mapping]
    own = getattr(config, "auto_map", None) or {}
    coded = [auto for auto in AUTO_CLASSES if auto.__name__ in own]
    meant = [auto for auto in known if auto._model_mapping[kind].__name__ in named]
    return next(iter((*meant, *known, *coded)), None)


def is_encoder_decoder(config: PreTrainedConfig) -> bool:
    """Whether the part of a model that gives text reads what another part has made of the text it is given."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return any(getattr(part, "is_encoder_decoder", False) for part in (config, *parts))
