"""Model types in configurations: types of transformers, and the types of saved retrofitted models."""

from typing import Any

PREFIX = "sinkscope_"  # prefix of the model types of retrofitted models


def base_type(model_type: str) -> str:
    """Return `llama` for `sinkscope_llama`, and any other model type unchanged."""
    return model_type.removeprefix(PREFIX)


def is_retrofitted(config: Any) -> bool:
    """Return whether a configuration is that of a retrofitted model."""
    return str(getattr(config, "model_type", "")).startswith(PREFIX)
