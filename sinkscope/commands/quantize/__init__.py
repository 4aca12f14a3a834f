"""`quantize`: what quantization costs, and where."""

from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "quantize",
        __name__,
        QuantizeOptions,
        public={"quantize": ".command:quantize", "calibrate_ranges": ".study:calibrate_ranges"},
        manifest=".manifest:QuantizeManifest",
        report=".findings:report",
        tables=(
            ".served:FORMAT_TABLES",
            ".cures:CURE_TABLES",
            ".study:QUANTIZATION_TABLES",
            ".split:SPLIT_TABLES",
            ".compared:SCHEME_TABLES",
        ),
        figures={
            "one run": (
                ("formats-cost", "perplexity with weights and inputs in the formats that are served", "formats"),
                ("quantization-cost",
                    "perplexity with the model or single sites quantized", "quantization", "quantization_sites"),
                ("quantization-ranges", "range and median of every linear layer by layer", "quantization_sites"),
                ("quantization-split",
                    "cost with tokens, coordinates, a prefix or a rotation, and random controls", "quantization_split"),
            ),
        },
        of_cells=("formats", "quantization"),  # of presets, of static schemes
        cells_as_text=".served_findings:cells_as_text",
        whole_model=".findings:whole_model",
        files=".findings:files",
        compared={"quantize": ".format_comparison:compared_formats"},
        script="page.js",
    ),
)  # fmt: skip
