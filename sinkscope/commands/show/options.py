"""The options of `show`."""

from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from sinkscope.options.files import UserPath
from sinkscope.options.option import Options, one_as_tuple, option, split_at_commas


class ShowOptions(Options):
    """Open the page of a folder in the browser: index.html, which commands write into their folders.

    If it is missing, it is made from the folder's tables. --print names the file and opens nothing.
    --metric prints one metric of a run with its 95 % intervals over texts instead, from the run's tables."""

    arguments: ClassVar = ("run",)

    run: UserPath = option(..., "The folder of any command, or its run.json.", metavar="RUN")
    print: bool = option(False, "Print the path of the page and open no browser.", panel="Output")
    metric: str | None = option(
        None, "Print this metric.", metavar="NAME", names="sinkscope.results.metric_estimates:SOURCES", panel="Numbers"
    )
    by: Annotated[tuple[Literal["layer", "head"], ...], split_at_commas] = option(
        (), "A row for each layer, or for each head.", metavar="layer|head", shown="the whole model", panel="Numbers"
    )
    epsilon: Annotated[tuple[float, ...], one_as_tuple, split_at_commas] = option(
        (), "Thresholds of a sink rate, as in 0.2,0.3.", metavar="E,…", shown="that of the run", panel="Numbers"
    )
    null: UserPath | None = option(
        None,
        "The run whose values are the null, such as one of `analyze --random-weights`.",
        metavar="RUN",
        shown="uniform attention",
        panel="Numbers",
    )
    format: Literal["text", "latex", "csv", "json"] = option(
        "text", "How the metric is printed; latex: with booktabs.", metavar="FORMAT", panel="Numbers"
    )
    again: bool = option(False, "Write the page again if it exists.", panel="Output")

    @model_validator(mode="after")
    def _check_metric(self) -> "ShowOptions":
        if self.metric is None and (self.by or self.epsilon or self.null or self.format != "text"):
            raise ValueError("--by, --epsilon, --null and --format are those of a metric: name it by --metric")
        return self
