"""A retrofitted model's own class, so that saving and loading are transformers' own and nothing is dropped in silence.

`SinkscopeLlamaForCausalLM` is `LlamaForCausalLM` with the retrofit of its configuration put in when it is built, so
`save_pretrained` writes the new parameters with the others, and `from_pretrained` finds their places. The folder's
model type is `sinkscope_llama` (model_types.py): transformers without sinkscope does not know it, and says so.
"""

from functools import cache, wraps
from importlib.metadata import version
from inspect import signature
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.attention.seam import attend
from sinkscope.attention.taps import has_denominators
from sinkscope.errors import InputError
from sinkscope.models.families import PREFIX, base_type
from sinkscope.retrofits.model_types import config_class
from sinkscope.retrofits.registers import RETROFIT


@cache
def register_model(base: str) -> Any:
    """The model class of `sinkscope_<base>`, known to AutoModelForCausalLM from now on."""
    parent: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[base]]
    model_class = _model_class(parent, config_class(base))
    AutoModelForCausalLM.register(config_class(base), model_class, exist_ok=True)
    # Checkpoints of mixtures of experts name and stack their weights otherwise than the model does: by model type.
    for known, ours in ((base, PREFIX + base), (parent.__name__, model_class.__name__)):
        conversion = get_checkpoint_conversion_mapping(known)
        if conversion is not None:
            register_checkpoint_conversion_mapping(ours, conversion, overwrite=True)
    return model_class


def _model_class(parent: Any, config: Any) -> Any:
    names = list(signature(parent.forward).parameters)[1:]

    class Model(parent):
        config_class = config
        # transformers finds this out by reading the source of the class's module, which is not this one
        _can_set_attn_implementation_cached_value = parent._can_set_attn_implementation()

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            from sinkscope.retrofits import install  # which imports this module

            install(self)

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
            """Errors: InputError for one that would leave the retrofit's denominators out."""
            wanted = ALL_ATTENTION_FUNCTIONS.get(attn_implementation) if isinstance(attn_implementation, str) else None
            if wanted is not attend and has_denominators(self):
                raise InputError(
                    f"attention '{attn_implementation}' knows nothing of this model's {self.config.retrofit['method']}"
                    ": it would be left out"
                )
            super().set_attn_implementation(attn_implementation, *args, **kwargs)

    Model.__name__ = Model.__qualname__ = f"Sinkscope{parent.__name__}"
    return Model


def become_retrofitted(model: PreTrainedModel, method: str, parameters: dict[str, Any]) -> None:
    """A loaded model becomes one of the retrofitted class, its retrofit written into its configuration.

    Errors: InputError for a model that is not the plain causal language model of its configuration.
    """
    config: Any = model.config
    base = base_type(config.model_type)
    plain: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if type(model) is not plain:
        named = "no such class" if plain is None else plain.__name__
        raise InputError(f"a {type(model).__name__} cannot be retrofitted: only transformers' own ({named})")
    model.__class__ = register_model(base)
    config.__class__ = config_class(base)
    config.retrofit = {"method": method, "parameters": parameters, "sinkscope": version("sinkscope")}
