"""The class of transformers by which a checkpoint is loaded: what its configuration describes."""

from collections.abc import Collection
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from sinkscope.errors import InputError

# In this order a configuration is looked for, unless it names a class itself or is an encoder's. The last two also read
# pictures or sound: of their models the part that reads text is measured (towers.py).
AUTO_CLASSES: tuple[Any, ...] = (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)


def class_for(config: PreTrainedConfig, name: str) -> Any:
    """The one of AUTO_CLASSES that makes the models of a configuration.

    An encoder's is AutoModelForMaskedLM: BERT and similar models have a causal class, too, which they ask for by
    `is_decoder`. Else it is the one whose model the configuration names in `architectures`, else the first that knows
    the configuration, or, of code that comes with a model, the first that the code is for.

    Args:
        config: of the checkpoint.
        name: of the checkpoint, for the error.

    Raises:
        InputError: there is none, or its models read a text with all of its tokens at once.
    """
    kind, refused = type(config), f"{name} ({config.model_type}) is neither a causal language model nor an encoder"
    if _is_encoder_decoder(config):
        raise InputError(f"{refused}: it is an encoder–decoder")
    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in AutoModelForMaskedLM._model_mapping and not is_decoder:
        return AutoModelForMaskedLM
    named, code = set(config.architectures or ()), getattr(config, "auto_map", None) or {}
    known = [auto for auto in AUTO_CLASSES if kind in auto._model_mapping]
    meant = [auto for auto in known if auto._model_mapping[kind].__name__ in named]
    coded = [auto for auto in AUTO_CLASSES if auto.__name__ in code]
    if not known and not coded:
        raise InputError(f"{refused}: transformers has no such class for it")
    return (*meant, *known, *coded)[0]


def lacks_head(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Whether all weights that the checkpoint of an encoder lacks are those that predict its masked tokens.

    So it is of sentence encoders, classifiers and ELECTRA's discriminators.
    """
    kind, known = type(model.config), AutoModelForMaskedLM._model_mapping
    is_encoder = kind in known and known[kind] is type(model)
    return is_encoder and bool(missing) and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing)


def _is_encoder_decoder(config: PreTrainedConfig) -> bool:
    """Whether the part of a model that gives text reads what another part has made of the text it is given."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return any(getattr(part, "is_encoder_decoder", False) for part in (config, *parts))
