"""The entries of a run.json of `quantize`."""

from typing import Literal

from sinkscope.quantization.formats import PerActivation, PerCache, PerWeight
from sinkscope.results.schema import Count, ManifestPart, RunManifest


class Quantization(ManifestPart):
    scheme: Literal["linear", "full"]
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


class QuantizeManifest(RunManifest):
    quantization: Quantization
