"""The options of `benchmark`."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from sinkscope.options.measuring import DeviceOptions, ModelOptions, SeedOptions
from sinkscope.options.option import MOST, as_folder_name, option, split_all_names

HELLASWAG = "hellaswag"  # WSE figure 10


class BenchmarkOptions(SeedOptions, DeviceOptions, ModelOptions):
    about: ClassVar[str] = """Score one model on tasks of lm-evaluation-harness: pip install 'sinkscope[lm-eval]'.

    Any task that it knows by name, or one of your own with --task-path. In a sweep scores stand beside sinks."""
    writes: ClassVar = "runs/MODEL-benchmark"
    refused: ClassVar = {"attn": "the harness runs the model as it is"}

    tasks: tuple[str, ...] = option((HELLASWAG,), "Benchmarks", "Tasks or groups of them by name.", metavar="A,B")
    task_path: str | None = option(None, "Benchmarks", "A folder with YAML files of your own tasks.", metavar="DIR")
    shots: int | None = option(
        None, "Benchmarks", "Examples in front of each question.", metavar="N", shown="each task's own", ge=0, le=MOST
    )
    limit: int | None = option(
        None, "Benchmarks", "Only the first N questions of each task.", metavar="N", shown="all", ge=1, le=MOST
    )
    batch_size: int = option(8, "Benchmarks", "Requests at once.", metavar="N", ge=1)

    @field_validator("tasks", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        return split_all_names(names)

    @field_validator("tasks")
    @classmethod
    def _once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError("name a task, as hellaswag")
        return tuple(dict.fromkeys(names))

    def folder(self) -> Path:
        return Path("runs", as_folder_name(self.folder_name, "benchmark"))
