"""The options of `scan`."""

from pathlib import Path
from typing import ClassVar

from sinkscope.options.measuring import ModelOptions
from sinkscope.options.option import as_folder_name, option


class ScanOptions(ModelOptions):
    """Scan the weights of a checkpoint for what can become massive, without building or running the model.

    Which neuron can write how much into which coordinate (super weights), gains of norms, and what may overflow
    float16. Reads a few rows at a time, so that any size fits into 2 GB, and from the hub only the tensors that it
    needs. A rank is a candidate, never a finding."""

    matrices: bool = option(
        False, "Also the largest entry and row of every matrix, for which all of the checkpoint is read."
    )

    panel: ClassVar = "Measuring"
    writes: ClassVar = "runs/MODEL-scan"
    refused: ClassVar = {
        "adapter": "merge it into the weights first",
        "trust_remote_code": "no code of the model is run",
    }

    def folder(self) -> Path:
        return Path("runs", as_folder_name(self.folder_name, "scan"))
