"""The options of `compare`."""

from typing import ClassVar, Literal

from sinkscope.options.files import UserPath
from sinkscope.options.option import Options, option


class CompareOptions(Options):
    """Compare runs: metrics of the whole model; for two runs also difference and ratio.

    Runs of `intervene` show which route carries the sink in which model, two runs of `quantize` how much more each
    number format costs in the second, folders of `claims` show claims × models. For a single folder of `sweep`,
    `retrofit`, `train`, `claims` or a training's steps, its own tables are printed.
    Settings that differ are listed. With --out, also writes tables and figures."""

    arguments: ClassVar = ("runs",)
    writes: ClassVar = "nothing"

    runs: tuple[UserPath, ...] = option(
        (), "Two or more run folders of one command, or one folder that holds several.", metavar="RUN"
    )
    format: Literal["text", "markdown", "latex"] = option(
        "text", "How the tables are printed: text, markdown, or latex with booktabs.", panel="Output", metavar="FORMAT"
    )
