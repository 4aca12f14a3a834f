"""The options of `compare`."""

from typing import Annotated, ClassVar, Literal

from sinkscope.options.files import UserPath
from sinkscope.options.option import Options, option, split_at_commas


class CompareOptions(Options):
    """Compare runs: metrics of the whole model; for two runs also the difference with its 95 % interval, and ratio.

    The interval is over texts, paired where both runs read the same tokens. --by head names the heads that differ.
    Runs of `intervene` show which route carries the sink in which model, two runs of `quantize` how much more each
    number format costs in the second, folders of `claims` show claims × models. For a single folder of `sweep`,
    `retrofit`, `train`, `claims` or a training's steps, its own tables are printed.
    Settings that differ are listed. With --out, also writes tables and figures."""

    arguments: ClassVar = ("runs",)
    writes: ClassVar = "nothing"

    runs: tuple[UserPath, ...] = option(
        (), "Two or more run folders of one command, or one folder that holds several.", metavar="RUN"
    )
    metrics: Annotated[tuple[str, ...], split_at_commas] = option(
        (), "Metrics to compare.", metavar="a,b,…", shown="all", names="sinkscope.results.metrics:METRICS"
    )
    by: Literal["head"] | None = option(
        None,
        "head: which heads of two runs of one architecture differ, at a false discovery rate of 5 %.",
        metavar="head",
    )
    format: Literal["text", "markdown", "latex"] = option(
        "text", "How the tables are printed: text, markdown, or latex with booktabs.", panel="Output", metavar="FORMAT"
    )
