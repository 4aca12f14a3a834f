"""Types of models, as configurations name them: transformers' own, and those under which retrofitted ones are saved."""

from typing import Any

PREFIX = "sinkscope_"  # of the types of retrofitted models


def base_type(model_type: str) -> str:
    """`sinkscope_llama` → `llama`; any other model type is its own."""
    return model_type.removeprefix(PREFIX)


def is_retrofitted(config: Any) -> bool:
    """Whether a model has the configuration of a retrofit."""
    return str(getattr(config, "model_type", "")).startswith(PREFIX)
