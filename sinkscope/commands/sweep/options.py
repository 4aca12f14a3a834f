"""The options of `sweep`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import field_validator, model_validator

from sinkscope.options.files import YAML_ENDINGS
from sinkscope.options.measuring import DeviceOptions, ModelOptions
from sinkscope.options.option import MAX_INT, as_folder_name, from_one, option


class SweepOptions(DeviceOptions, ModelOptions):
    """Measure many models × revisions × inputs × settings, as a YAML file lists them.

    Writes a run folder for each combination and a comparison of them all. The same command resumes after an
    interruption; --retry tries failed cells again. --dtype, --device-map, --attn, --trust-remote-code and
    --allow-pickle apply to all models. `accelerate launch -m sinkscope.cli sweep …` measures each on several GPUs."""

    panel: ClassVar = "Running"

    arguments: ClassVar = ("file",)
    writes: ClassVar = "runs/FILE"
    resumable: ClassVar = True
    refused: ClassVar = dict.fromkeys(("model", "revision", "gguf_file", "adapter"), "the file names the models")
    shown: ClassVar = dict.fromkeys(DeviceOptions.model_fields, "the file's")

    file: str = option(
        ...,
        "The sweep: a YAML file, or a name from `sinkscope list sweeps`.",
        panel="Input",
        metavar="FILE",
        names="sinkscope.commands.sweep.file:known_sweeps",
    )
    quick: bool = option(False, "Use the small form of the file, to check that everything works.")
    dry_run: bool = option(
        False, "Only show the combinations, with the memory that each needs, and which of them are done."
    )
    gpu: Literal["H100", "H200", "A100", "L40S", "RTX4090"] = option(
        "H100", "The GPU whose hours --dry-run estimates for trainings.", metavar="GPU"
    )
    engine: Literal["local", "ray"] = option(
        "local", "local: processes on this machine; ray: tasks on a Ray cluster.", metavar="E"
    )
    address: str | None = option(
        None, "Address of a Ray cluster that already runs.", metavar="A", shown="one is started here"
    )
    workers: Annotated[int | Literal["auto"], from_one("at least 1 process is needed")] = option(
        "auto", "Processes at once, or auto: as cores, devices and memory allow.", metavar="N"
    )
    shard: str | None = option(
        None, "I/N: only the I-th of N parts, for arrays of jobs with the same --out.", metavar="I/N"
    )
    retry: bool = option(False, "Try failed cells again.")
    evict: bool = option(False, "Remove each model from the hub's cache once all its cells are done or have failed.")

    @field_validator("shard")
    @classmethod
    def _check_shard(cls, shard: str | None) -> str | None:
        numbers = (shard or "1/1").split("/")
        if len(numbers) != 2 or not all(part.isdecimal() for part in numbers):
            raise ValueError("write it as 1/4: the first of four parts")
        part, of = map(int, numbers)
        if not 1 <= part <= of <= MAX_INT:
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
        return Path("runs", as_folder_name(path.stem if path.suffix in YAML_ENDINGS else path.name))
