"""The entries of a run.json of `quantize`."""

from typing import Literal, Self

from pydantic import model_validator

from sinkscope.quantization.formats import PerActivation, PerCache, PerWeight
from sinkscope.results.schema import Count, ManifestPart, RunManifest


class Quantization(ManifestPart):
    scheme: Literal["static", "full"]
    bits_weights: Count
    bits_activations: Count
    bits_kv_cache: Count
    weights_per: PerWeight
    activations_per: PerActivation
    kv_cache_per: PerCache | None
    calibration: Count
    linear_layers: int
    not_quantized: dict[str, float]  # module → its share of the parameters
    full_precision_modules: list[str] | None
    prefix: list[int] = []  # token ids; empty without --prefix
    prefix_text: str = ""
    without_cache: str = ""  # why its keys and values were not saved
    without_rotation: str = ""  # why the model was not rotated


class EncodingEntry(ManifestPart):
    """The fields of `Encoding`."""

    type: Literal["int", "float"]
    num_bits: Literal[4, 8]
    strategy: Literal["tensor", "channel", "token", "group", "tensor_group"]
    group_size: Count | None
    dynamic: bool | Literal["local"]


class PresetEntry(ManifestPart):
    weights: EncodingEntry
    inputs: EncodingEntry | None


class Served(ManifestPart):
    schemes: dict[str, PresetEntry]
    absent: dict[str, str]  # scheme → why it does not apply
    alpha: float  # of SmoothQuant
    absent_cures: dict[str, dict[str, str]]  # scheme → cure → why it does not apply
    calibration: Count
    matrices: Count
    share: float  # of the model's parameters in them
    not_quantized: dict[str, float]  # other matrices in layers → their share of the parameters
    full_precision_modules: list[str] | None  # None: not all linear layers are torch.nn.Linear
    sink_layer: int  # -1 if no massive activation predicts sinks
    sinks: float  # mean number of a sequence


class QuantizeManifest(RunManifest):
    quantization: Quantization | None = None  # of a static scheme
    served: Served | None = None  # of presets

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.quantization is None) == (self.served is None):
            raise ValueError("it has one of `quantization` and `served`")
        return self
