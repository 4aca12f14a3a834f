"""The number formats that are simulated; nothing here imports torch.

The fields of `Precision` are the only list of them: options, run.json and `quantized` have the same names and choices.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from sinkscope.errors import InputError, unknown

PerWeight = Literal["tensor", "channel"]
PerActivation = Literal["tensor", "token"]
PerCache = Literal["tensor", "token", "channel"]


@dataclass(frozen=True)
class Precision:
    """Numbers of bits, and what has a grid of its own.

    weights      symmetric; one grid per tensor, or one per output channel
    activations  asymmetric; one static grid per tensor, or one dynamic grid per token. Attention scores and softmax
                 outputs always have a static grid, because a row of scores covers all keys including padding.
    kv_cache     keys and values as attention reads them, asymmetric; one static grid, one static grid per channel of a
                 key/value head, or one dynamic grid per token and head
    """

    bits_weights: int = 8
    bits_activations: int = 8
    bits_kv_cache: int = 8
    weights_per: PerWeight = "tensor"
    activations_per: PerActivation = "tensor"
    kv_cache_per: PerCache | None = None  # None: not quantized

    def __post_init__(self) -> None:
        for name, choices in (
            ("weights_per", get_args(PerWeight)),
            ("activations_per", get_args(PerActivation)),
            ("kv_cache_per", (None, *get_args(PerCache))),
        ):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} {unknown(getattr(self, name), filter(None, choices))}")

    def __str__(self) -> str:
        cache = "" if self.kv_cache_per is None else f"KV{self.bits_kv_cache}"
        return f"W{self.bits_weights}A{self.bits_activations}{cache}"
