"""The options of `card`."""

from pathlib import Path
from typing import ClassVar

from sinkscope.options.files import UserPath
from sinkscope.options.option import Options, as_folder_name, option


class CardOptions(Options):
    """Make a model card of runs, and a dataset of many models to share on the hub.

    Prints for each model the metrics as the `model-index` of a model card (YAML), and the main findings. --out and
    --push write a folder with these cards and a dataset instead: by model, by metric and by layer. Reads folders of
    `analyze`, `quantize`, `intervene`, `claims`, and of `sweep` with such cells."""

    arguments: ClassVar = ("runs",)
    writes: ClassVar = "nothing"

    runs: tuple[UserPath, ...] = option((), "The folders of commands.", metavar="RUN")
    push: str | None = option(
        None,
        "Upload the folder as this dataset on the hub, which is made, public, if there is none. Needs HF_TOKEN or "
        "`hf auth login`.",
        panel="Output",
        metavar="REPO",
    )

    def folder(self) -> Path | None:
        return Path("runs", as_folder_name("card", self.push)) if self.push else None
