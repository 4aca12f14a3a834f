"""The options of `quantize`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, ClassVar, Self, get_args

from pydantic import model_validator

from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import distinct, flag, option, split_at_commas, text_as_tuple
from sinkscope.quantization.formats import (
    PRESETS,
    STATIC_SCHEMES,
    CureName,
    PerActivation,
    PerCache,
    PerWeight,
    Precision,
    SchemeName,
)


class QuantizeOptions(RunConfig):
    """Measure what number formats cost: INT8, FP8, INT4, MXFP4, NVFP4 as they are served; or the papers' static W8A8.

    Simulates weights and inputs of every linear layer except the LM head in each format, separately and together, and
    shows how much of the cost sink tokens have. Schemes that are named are also measured with cures. Writes recipes for
    llm-compressor. A static scheme shows the sites whose outliers cost most. The model itself does not change."""

    panel: ClassVar = "Quantizing"

    writes: ClassVar = "runs/MODEL-INPUT-formats"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    forward_only: ClassVar = True
    refused: ClassVar = {"observables": "`quantize` always measures perplexity and outliers"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    scheme: Annotated[
        tuple[SchemeName, ...],
        split_at_commas,
        distinct("name a scheme, as FP8"),
        text_as_tuple,
    ] = option(
        tuple(PRESETS),
        "Presets of compressed-tensors; or static (every linear layer in the papers' W8A8), or full (also embeddings, "
        "residual sums, attention scores and softmax outputs).",
        metavar="A,B",
        shown="all presets",
    )
    cure: Annotated[
        tuple[CureName, ...] | None, split_at_commas, distinct("name a cure, as smoothquant"), text_as_tuple
    ] = option(
        None,
        "Of presets: what may help, each next to a control: spare (the costliest modules in full precision), "
        "smoothquant, awq, rotation (of the residual stream) or prefix.",
        metavar="A,B",
        shown="all, if --scheme names presets",
    )
    alpha: float = option(0.5, "SmoothQuant's exponent: 0 leaves all outliers in inputs.", metavar="X", ge=0, le=1)
    bits_weights: int = option(8, "Of a static scheme: bits of weights, symmetric.", metavar="B", ge=2, le=16)
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

    @property
    def static_scheme(self) -> str | None:
        """The papers' scheme that is measured; None for presets."""
        return self.scheme[0] if self.scheme[0] in STATIC_SCHEMES else None

    @property
    def cures(self) -> tuple[CureName, ...]:
        """The cures of presets that are measured."""
        if self.cure is not None:
            return self.cure
        return get_args(CureName) if self.is_changed("scheme") and self.static_scheme is None else ()

    @model_validator(mode="after")
    def _check_scheme(self) -> Self:
        if len(self.scheme) > 1 and set(self.scheme) & set(STATIC_SCHEMES):
            raise ValueError("--scheme: static and full are measured alone, in a run of their own")
        if self.static_scheme is not None and self.cure is not None:
            raise ValueError("--cure is a setting of presets")
        if self.static_scheme is None:
            for name in ("prefix", *(field.name for field in fields(Precision))):
                if self.is_changed(name):
                    raise ValueError(f"{flag(name)} is a setting of --scheme static or full")
        for name, is_read, setting in (
            ("alpha", "smoothquant" in self.cures, "the cure smoothquant"),
            ("bits_kv_cache", self.kv_cache_per is not None, "--kv-cache-per"),
            ("prefix_draws", self.prefix is not None, "--prefix"),
        ):
            if self.is_changed(name) and not is_read:
                raise ValueError(f"{flag(name)} is a setting of {setting}, which is not measured")
        return self

    def folder(self) -> Path:
        if self.static_scheme is None:
            return Path("runs", f"{self.run_name}-{'-'.join(self.scheme) if self.is_changed('scheme') else 'formats'}")
        cache = "" if self.kv_cache_per is None else f"KV{self.bits_kv_cache}"
        per = {"weights": self.weights_per, "activations": self.activations_per, "cache": self.kv_cache_per}
        parts = [f"{what}-per-{grid}" for what, grid in per.items() if grid not in ("tensor", None)]
        parts += [] if self.prefix is None else ["prefix"]
        name = f"{self.run_name}-{self.static_scheme}-W{self.bits_weights}A{self.bits_activations}{cache}"
        return Path("runs", "-".join([name, *parts]))
