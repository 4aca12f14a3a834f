"""Which of transformers' classes a configuration is a model of."""

from collections.abc import Collection
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

# In this order a configuration is looked for, unless it names a class itself or is an encoder's.
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMaskedLM)


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The class of AUTO_CLASSES that makes the models of a configuration; None where none does.

    An encoder's is AutoModelForMaskedLM: BERT and its kin have a causal class, too, which they ask for by `is_decoder`.
    Else it is the one whose model the configuration names in `architectures`, else the first that knows the
    configuration, or, of code that comes with a model, the first that the code is for.
    """
    kind, named = type(config), set(config.architectures or ())
    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in AutoModelForMaskedLM._model_mapping and not is_decoder:
        return AutoModelForMaskedLM
    known = [auto for auto in AUTO_CLASSES if kind in auto._model_mapping]
    own = getattr(config, "auto_map", None) or {}
    coded = [auto for auto in AUTO_CLASSES if auto.__name__ in own]
    meant = [auto for auto in known if auto._model_mapping[kind].__name__ in named]
    return next(iter((*meant, *known, *coded)), None)


def lacks_head(model: PreTrainedModel, missing: Collection[str]) -> bool:
    """Whether all weights that the checkpoint of an encoder lacks are those that predict its masked tokens.

    So it is of sentence encoders, classifiers and ELECTRA's discriminators.
    """
    kind, known = type(model.config), AutoModelForMaskedLM._model_mapping
    is_encoder = kind in known and known[kind] is type(model)
    return is_encoder and bool(missing) and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing)
