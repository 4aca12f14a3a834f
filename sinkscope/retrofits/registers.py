"""How many register tokens a model has before its text."""

from torch import nn

from sinkscope.attention.taps import RETROFIT


def registers_before(model: nn.Module) -> int:
    """How many register tokens a retrofit puts before every sequence: the layers see so many tokens more."""
    return int(getattr(getattr(model, RETROFIT, None), "count", 0))
