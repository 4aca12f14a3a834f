"""How many register tokens a model has before its text."""

from torch import nn

RETROFIT = "retrofit"  # the name of a retrofit's module inside the module it changes; part of saved state dicts


def registers_before(model: nn.Module) -> int:
    """How many register tokens a retrofit puts before every sequence: the layers see so many tokens more."""
    return int(getattr(getattr(model, RETROFIT, None), "count", 0))
