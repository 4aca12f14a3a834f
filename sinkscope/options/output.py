"""The options for output, and the options of commands that do not measure."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from sinkscope.options.files import ENDINGS, UserPath
from sinkscope.options.measuring import DeviceOptions, InputOptions, ModelOptions
from sinkscope.options.option import MOST, Options, as_folder_name, from_one, option


class OutputOptions(Options):
    """Options that do not affect results and are not saved in run.json."""

    out: UserPath | None = option(None, "Output", "Folder to write.", metavar="DIR")
    overwrite: bool = option(False, "Output", "Replace what an earlier run wrote to --out.")
    from_: UserPath | None = option(
        None,
        "Output",
        "Repeat a run, by its folder or run.json, with all its options except permissions to run code.",
        metavar="RUN",
    )
    quiet: bool = option(False, "Output", "Print nothing but errors.")
    json_: bool = option(False, "Output", "Print the result, or the error, as one JSON object on standard output.")
    no_page: bool = option(False, "Output", "Write no index.html, the page to look at in a browser.")
    record: dict[str, Any] | None = option(None, "Output", "The recipe that runs the command, for its run.json.")

    @property
    def where(self) -> dict[str, Any]:
        """The options with the names that the Python functions of the commands have."""
        return {"out": self.out, "overwrite": self.overwrite, "quiet": self.quiet, "page": not self.no_page}


class CompareOptions(Options):
    """Compare runs: metrics of the whole model; for two runs also difference and ratio.

    Runs of `intervene` show which route carries the sink in which model, folders of `claims` show claims × models. For
    a single folder of `sweep`, `retrofit`, `train`, `claims` or a training's steps, its own tables are printed.
    Settings that differ are listed. With --out, also writes tables and figures."""

    arguments: ClassVar = ("runs",)
    writes: ClassVar = "nothing"

    runs: tuple[UserPath, ...] = option(
        (), "Input", "Two or more run folders of one command, or one folder that holds several.", metavar="RUN"
    )
    format: Literal["text", "markdown", "latex"] = option(
        "text", "Output", "How the tables are printed: text, markdown, or latex with booktabs.", metavar="FORMAT"
    )


class CardOptions(Options):
    """Make a model card of runs, and a dataset of many models to share on the hub.

    Prints for each model the metrics as the `model-index` of a model card (YAML), and the main findings. --out and
    --push write a folder with these cards and a dataset instead: by model, by metric and by layer. Reads folders of
    `analyze`, `quantize`, `intervene`, `claims`, and of `sweep` with such cells."""

    arguments: ClassVar = ("runs",)
    writes: ClassVar = "nothing"

    runs: tuple[UserPath, ...] = option((), "Input", "The folders of commands.", metavar="RUN")
    push: str | None = option(
        None,
        "Output",
        "Upload the folder as this dataset on the hub, which is made, public, if there is none. Needs HF_TOKEN or "
        "`hf auth login`.",
        metavar="REPO",
    )

    def folder(self) -> Path | None:
        return Path("runs", as_folder_name("card", self.push)) if self.push else None


class RunOptions(InputOptions, DeviceOptions, ModelOptions):
    """Run a recipe: an experiment or a paper's figure, with all its options, on any model.

    Options given here replace the recipe's. Writes what the recipe's command writes, with the recipe's
    figures, and prints the verdict, or a comparison of its runs."""

    arguments: ClassVar = ("recipe",)
    writes: ClassVar = "runs/RECIPE-MODEL"
    resumable: ClassVar = True
    shown: ClassVar = dict.fromkeys(
        (*ModelOptions.model_fields, *DeviceOptions.model_fields, *InputOptions.model_fields), "the recipe's"
    )

    recipe: str = option(..., "Input", "A YAML file, or a name from `sinkscope list recipes`.", metavar="RECIPE")


class ShowOptions(Options):
    """Open the page of a folder in the browser: index.html, which commands write into their folders.

    If it is missing, it is made from the folder's tables. --print names the file and opens nothing."""

    arguments: ClassVar = ("run",)

    run: UserPath = option(..., "Input", "The folder of any command, or its run.json.", metavar="RUN")
    print: bool = option(False, "Output", "Print the path of the page and open no browser.")
    again: bool = option(False, "Output", "Write the page again if it exists.")


class ListOptions(Options):
    """List the kinds of names, or the names of one: observables, interventions, recipes, …"""

    arguments: ClassVar = ("kind",)

    kind: str | None = option(None, "Input", "One kind of names, or all.", metavar="KIND", shown="the kinds")


class SweepOptions(DeviceOptions, ModelOptions):
    """Measure many models × revisions × inputs × settings, as a YAML file lists them.

    Writes a run folder for each combination and a comparison of them all. The same command resumes after an
    interruption; --retry tries failed cells again. --dtype, --device-map, --attn, --trust-remote-code and
    --allow-pickle apply to all models. `accelerate launch -m sinkscope.cli sweep …` measures each on several GPUs."""

    arguments: ClassVar = ("file",)
    writes: ClassVar = "runs/FILE"
    resumable: ClassVar = True
    refused: ClassVar = dict.fromkeys(("model", "revision", "gguf_file", "adapter"), "the file names the models")
    shown: ClassVar = dict.fromkeys(DeviceOptions.model_fields, "the file's")

    file: str = option(..., "Input", "The sweep: a YAML file, or a name from `sinkscope list sweeps`.", metavar="FILE")
    quick: bool = option(False, "Running", "Use the small form of the file, to check that everything works.")
    dry_run: bool = option(
        False, "Running", "Only show the combinations, with the memory that each needs, and which of them are done."
    )
    engine: Literal["local", "ray"] = option(
        "local", "Running", "local: processes on this machine; ray: tasks on a Ray cluster.", metavar="E"
    )
    address: str | None = option(
        None, "Running", "Address of a Ray cluster that already runs.", metavar="A", shown="one is started here"
    )
    workers: Annotated[int | Literal["auto"], from_one("at least 1 process is needed")] = option(
        "auto", "Running", "Processes at once, or auto: as cores, devices and memory allow.", metavar="N"
    )
    shard: str | None = option(
        None, "Running", "I/N: only the I-th of N parts, for arrays of jobs with the same --out.", metavar="I/N"
    )
    retry: bool = option(False, "Running", "Try failed cells again.")
    evict: bool = option(
        False, "Running", "Remove each model from the hub's cache once all its cells are done or have failed."
    )

    @field_validator("shard")
    @classmethod
    def _check_shard(cls, shard: str | None) -> str | None:
        numbers = (shard or "1/1").split("/")
        if len(numbers) != 2 or not all(part.isdecimal() for part in numbers):
            raise ValueError("write it as 1/4: the first of four parts")
        part, of = map(int, numbers)
        if not 1 <= part <= of <= MOST:
            raise ValueError(f"the parts are 1/{of} to {of}/{of}")
        return shard

    @model_validator(mode="after")
    def _address_is_of_ray(self) -> "SweepOptions":
        if self.address is not None and self.engine != "ray":
            raise ValueError("--address names a Ray cluster: it needs --engine ray")
        return self

    @property
    def part(self) -> tuple[int, int]:
        """The shard (i, n): the i-th of n parts, from 1 on."""
        part, of = (self.shard or "1/1").split("/")
        return int(part), int(of)

    def folder(self) -> Path:
        path = Path(self.file)
        return Path("runs", as_folder_name(path.stem if path.suffix in ENDINGS else path.name))
