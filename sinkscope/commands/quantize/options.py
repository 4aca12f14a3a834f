"""The options of `quantize`."""

from pathlib import Path
from typing import ClassVar, Literal

from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import option
from sinkscope.quantization.formats import PerActivation, PerCache, PerWeight


class QuantizeOptions(RunConfig):
    """Simulate W8A8: its cost in perplexity, and the sites whose outliers cause it.

    Quantizes input, weight and output of every linear layer except the LM head: weights symmetric, activations
    asymmetric, by default with one static range per tensor. Also writes the modules to keep in full precision, as JSON
    and as a recipe for llm-compressor. The model itself does not change."""

    panel: ClassVar = "Quantizing"

    writes: ClassVar = "runs/MODEL-INPUT-W8A8"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    forward_only: ClassVar = True
    refused: ClassVar = {"observables": "`quantize` always measures perplexity and outliers"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    scheme: Literal["linear", "full"] = option(
        "linear", "linear layers alone, or full: also embeddings, residual sums, attention scores and softmax outputs."
    )
    bits_weights: int = option(8, "Bits of weights, symmetric.", metavar="B", ge=2, le=16)
    bits_activations: int = option(8, "Bits of inputs and outputs, asymmetric.", metavar="B", ge=2, le=16)
    bits_kv_cache: int = option(8, "Bits of keys and values, asymmetric.", metavar="B", ge=2, le=16)
    weights_per: PerWeight = option("tensor", "One range per tensor, or per output channel.", metavar="WHAT")
    activations_per: PerActivation = option(
        "tensor", "One static range per tensor, or a dynamic one per token.", metavar="WHAT"
    )
    kv_cache_per: PerCache | None = option(
        None,
        "Quantize keys and values, too: one static range, one per token and head, or a static one per channel.",
        metavar="WHAT",
        shown="not quantized",
    )
    calibration: int = option(16, "Sequences, after those evaluated, that the ranges come from.", metavar="N", ge=1)
    prefix: str | None = option(
        None,
        "Split the cost by tokens and coordinates, and try a prefix: auto (outlier tokens), token ids (5,8), or text.",
        metavar="WHAT",
        shown="no split",
    )
    prefix_draws: int = option(20, "Random prefixes to compare with.", metavar="N", ge=1)

    def folder(self) -> Path:
        cache = "" if self.kv_cache_per is None else f"KV{self.bits_kv_cache}"
        per = {"weights": self.weights_per, "activations": self.activations_per, "cache": self.kv_cache_per}
        parts = [f"{what}-per-{grid}" for what, grid in per.items() if grid not in ("tensor", None)]
        scheme = [] if self.scheme == "linear" else [self.scheme]
        parts += [] if self.prefix is None else ["prefix"]
        name = f"{self.run_name}-W{self.bits_weights}A{self.bits_activations}{cache}"
        return Path("runs", "-".join([name, *scheme, *parts]))
