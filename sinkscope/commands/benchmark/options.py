"""The options of `benchmark`."""

from pathlib import Path
from typing import Annotated, ClassVar

from sinkscope.errors import InputError
from sinkscope.options.measuring import DeviceOptions, ModelOptions, SeedOptions
from sinkscope.options.option import MAX_INT, as_folder_name, distinct, option, split_at_commas


class BenchmarkOptions(SeedOptions, DeviceOptions, ModelOptions):
    """Score one model on tasks of lm-evaluation-harness: pip install 'sinkscope[lm-eval]'.

    Any of its tasks by name, or your own with --task-path. Sweeps show scores next to sinks."""

    panel: ClassVar = "Benchmarks"

    writes: ClassVar = "runs/MODEL-benchmark"
    refused: ClassVar = {"attn": "the harness runs the model as it is"}
    forward_only: ClassVar = True

    tasks: Annotated[tuple[str, ...], split_at_commas, distinct("name a task, as hellaswag")] = option(
        ("hellaswag",), "Tasks or groups of them by name.", metavar="A,B"
    )  # WSE figure 10
    task_path: str | None = option(None, "A folder with YAML files of your own tasks.", metavar="DIR")
    shots: int | None = option(
        None, "Examples before each question.", metavar="N", shown="each task's own", ge=0, le=MAX_INT
    )
    limit: int | None = option(
        None, "Only the first N questions of each task.", metavar="N", shown="all", ge=1, le=MAX_INT
    )
    batch_size: int = option(8, "Requests at once.", metavar="N", ge=1)

    def folder(self) -> Path:
        return Path("runs", as_folder_name(self.folder_name, "benchmark"))

    def check_of_a_file(self) -> None:
        if self.task_path is not None and not self.trust_remote_code:
            raise InputError(
                f"task-path {self.task_path}: tasks can run code. If you trust their author, add --trust-remote-code"
            )
