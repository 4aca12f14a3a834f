"""The number formats that are simulated; nothing here imports torch.

`PRESETS` has those that are served: the presets of compressed-tensors, which vLLM reads and llm-compressor writes.
`Precision` has those of the papers, the static scheme: its fields are the only list of their settings, which options,
run.json and `quantized` share.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sinkscope.errors import InputError, unknown

PresetName = Literal["W8A8", "FP8", "FP8_DYNAMIC", "W4A16", "MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16"]
StaticName = Literal["static", "full"]  # Bondarenko et al. 2023; VGA's W8A8 is static
STATIC_SCHEME, FULL_SCHEME = STATIC_SCHEMES = get_args(StaticName)
SchemeName = PresetName | StaticName

CureName = Literal["spare", "smoothquant", "awq", "rotation", "prefix"]

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


@dataclass(frozen=True)
class Encoding:
    """How one tensor is stored; the fields are arguments of compressed-tensors' `QuantizationArgs`."""

    type: Literal["int", "float"]
    num_bits: int
    strategy: Literal["tensor", "channel", "token", "group", "tensor_group"]
    group_size: int | None = None
    dynamic: bool | Literal["local"] = False  # whether scales are those of the input itself; local: those of its groups

    @property
    def is_mx(self) -> bool:
        """Whether the scales of groups are powers of two."""
        return self.type == "float" and self.strategy == "group"

    def __str__(self) -> str:
        kind = f"int{self.num_bits}" if self.type == "int" else {8: "e4m3", 4: "e2m1"}[self.num_bits]
        per = {"tensor_group": "group"}.get(self.strategy, self.strategy)
        return f"{kind} per {per}" + f" of {self.group_size}" * (self.group_size is not None)


@dataclass(frozen=True)
class Preset:
    """How weights and inputs of linear layers are stored; None: as they are. Outputs are never quantized."""

    weights: Encoding
    inputs: Encoding | None = None

    @property
    def is_calibrated(self) -> bool:
        """Whether scales depend on a text that calibrates, or on weights that read the same inputs."""
        return self.weights.strategy == "tensor_group" or (self.inputs is not None and self.inputs.dynamic is not True)

    def fitted(self, widths: Collection[int]) -> "Preset":
        """Return the preset for inputs of these widths: groups of integers are smaller if they do not divide all.

        Raises:
            InputError: A group does not divide a width.
        """
        size = self.weights.group_size
        if size is None:
            return self
        sizes = [size, size // 2, size // 4] if self.weights.type == "int" else [size]
        divisor = next((each for each in sizes if not any(width % each for width in widths)), None)
        if divisor is None:
            alternatives = " or ".join(map(str, sizes))
            raise InputError(f"groups of {alternatives} do not divide inputs of {', '.join(map(str, sorted(widths)))}")
        return replace(self, weights=replace(self.weights, group_size=divisor))


_FP8, _MXFP4 = Encoding("float", 8, "tensor"), Encoding("float", 4, "group", 32)
_NVFP4 = Encoding("float", 4, "tensor_group", 16)
PRESETS: dict[str, Preset] = {
    "W8A8": Preset(Encoding("int", 8, "channel"), Encoding("int", 8, "token", dynamic=True)),
    "FP8": Preset(_FP8, _FP8),
    "FP8_DYNAMIC": Preset(Encoding("float", 8, "channel"), Encoding("float", 8, "token", dynamic=True)),
    "W4A16": Preset(Encoding("int", 4, "group", 128)),
    "MXFP4": Preset(_MXFP4, replace(_MXFP4, dynamic=True)),
    "MXFP4A16": Preset(_MXFP4),
    "NVFP4": Preset(_NVFP4, replace(_NVFP4, dynamic="local")),
    "NVFP4A16": Preset(_NVFP4),
}
