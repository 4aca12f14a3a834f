"""Where a command writes and what it prints, and the options of commands that measure nothing themselves."""

from typing import Any, ClassVar, Literal

from sinkscope.options.files import UserPath
from sinkscope.options.measuring import DeviceOptions, InputOptions, ModelOptions
from sinkscope.options.option import Options, option


class OutputOptions(Options):
    """They decide no number, and stand in no run.json."""

    out: UserPath | None = option(None, "Output", "Folder to write.", metavar="DIR")
    overwrite: bool = option(False, "Output", "Replace what an earlier run wrote to --out.")
    from_: UserPath | None = option(
        None,
        "Output",
        "Repeat a run, by its folder or run.json, with all its options but permissions to run code.",
        metavar="RUN",
    )
    quiet: bool = option(False, "Output", "Print nothing but errors.")
    no_page: bool = option(False, "Output", "Write no index.html, the page to look at in a browser.")
    record: dict[str, Any] | None = option(None, "Output", "The recipe by which the command runs, for its run.json.")

    @property
    def where(self) -> dict[str, Any]:
        """As the Python functions of the commands take it."""
        return {"out": self.out, "overwrite": self.overwrite, "quiet": self.quiet, "page": not self.no_page}


class CompareOptions(Options):
    about: ClassVar[str] = """Put runs side by side: metrics of the whole model; of two runs also difference and ratio.

    Of runs of `intervene`: which route carries the sink in which model. Of folders of `claims`: claims × models. Of a
    single folder of `sweep`, `retrofit`, `train`, `claims` or a training's steps: its own tables.
    Says in which settings they differ. With --out, also tables and figures."""
    arguments: ClassVar = ("runs",)
    writes: ClassVar = "nothing"

    runs: tuple[UserPath, ...] = option(
        (), "Input", "Run folders, two or more, of one command; or one that holds several.", metavar="RUN"
    )
    format: Literal["text", "markdown", "latex"] = option(
        "text", "Output", "How the tables are printed: text, markdown, or latex with booktabs.", metavar="FORMAT"
    )


class RunOptions(InputOptions, DeviceOptions, ModelOptions):
    about: ClassVar[str] = """Run a recipe: an experiment or a paper's figure, with all its options, on any model.

    Options given here take the place of the recipe's. Writes what the recipe's command writes, with the recipe's
    figures, and prints the verdict, or a comparison of its runs."""
    arguments: ClassVar = ("recipe",)
    writes: ClassVar = "runs/RECIPE-MODEL"
    resumable: ClassVar = True
    shown: ClassVar = dict.fromkeys(
        (*ModelOptions.model_fields, *DeviceOptions.model_fields, *InputOptions.model_fields), "the recipe's"
    )

    recipe: str = option(..., "Input", "A YAML file, or a name from `sinkscope list recipes`.", metavar="RECIPE")


class ShowOptions(Options):
    about: ClassVar[
        str
    ] = """Open the page of a folder in the browser: index.html, which commands leave in their folders.

    Where it is missing, it is made from the folder's tables. --print names the file and opens nothing."""
    arguments: ClassVar = ("run",)

    run: UserPath = option(..., "Input", "The folder of any command, or its run.json.", metavar="RUN")
    print: bool = option(False, "Output", "Print the path of the page and open no browser.")
    anew: bool = option(False, "Output", "Make the page anew, also where there is one.")


class ListOptions(Options):
    about: ClassVar[str] = "Show what can be named, kind by kind: observables, interventions, recipes, metrics, …"
    arguments: ClassVar = ("kind",)

    kind: str | None = option(None, "Input", "One kind of them.", metavar="KIND", shown="all")
