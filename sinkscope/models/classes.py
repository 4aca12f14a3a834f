"""The class of transformers by which a checkpoint is loaded: what its configuration describes."""

from collections.abc import Collection
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from sinkscope.errors import InputError


def class_for(config: PreTrainedConfig, name: str) -> Any:
    """The automatic class of a causal language model or of an encoder.

    BERT and its kin have a causal class, too, which their configuration asks for by `is_decoder`.

    Args:
        name: of the checkpoint, for the error.

    Raises:
        InputError: it is neither.
    """
    kind, code = type(config), getattr(config, "auto_map", None) or {}
    refused = f"{name} ({config.model_type}) is neither a causal language model nor an encoder of masked tokens"
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{refused}: it is an encoder–decoder")
    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in MODEL_FOR_MASKED_LM_MAPPING and not is_decoder:
        return AutoModelForMaskedLM
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in code:
        return AutoModelForCausalLM
    if "AutoModelForMaskedLM" in code:
        return AutoModelForMaskedLM
    raise InputError(f"{refused}: transformers has no such class for it")


def lacks_head(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Whether all weights that the checkpoint of an encoder lacks are those that predict its masked tokens.

    So it is of sentence encoders, classifiers and ELECTRA's discriminators.
    """
    body = f"{model.base_model_prefix}."
    kind = type(model.config)
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING and MODEL_FOR_MASKED_LM_MAPPING[kind] is type(model)
    return is_encoder and bool(missing) and not any(name.startswith(body) for name in missing)
