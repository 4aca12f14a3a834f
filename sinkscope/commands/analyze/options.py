"""The options of `analyze`."""

from pathlib import Path
from typing import ClassVar

from sinkscope.options.files import UserPath, kind_of, names_in, user_path
from sinkscope.options.measuring import CloseUpOptions
from sinkscope.options.option import option


class AnalyzeOptions(CloseUpOptions):
    """Measure one model: tables, figures and a verdict.

    Writes a run folder (run.json, tables/*.parquet, figures/, verdict.md, index.html) and prints the verdict.

    Steps of training (--revision step0,step512,… or a folder of checkpoint-…): a run folder each, figures by step,
    and the order in which sink, norm and value gradient appear.

    `accelerate launch -m sinkscope.cli analyze …` distributes the sequences over several GPUs."""

    writes: ClassVar = "runs/MODEL-INPUT"
    repeatable: ClassVar = True
    in_memory: ClassVar = True

    export_mask: bool = option(
        False,
        "Also write which tokens are sinks in which layers, and the massive coordinates, as spike_mask.safetensors: "
        "for sparse autoencoders, steering and probes.",
    )
    random_weights: bool = option(
        False,
        "Measure the model with random weights, each tensor drawn from --seed with its own mean and spread: what the "
        "architecture shows before it has learned.",
        panel="Model",
    )
    generate: int | None = option(
        None,
        "Also continue each sequence greedily by N tokens, and measure each step: attention to position 0, decoded "
        "tokens that become sinks, and the largest activations.",
        metavar="N",
        shown="none",
        ge=1,
    )
    images: UserPath | None = option(
        None,
        "A folder of pictures. A model that reads them is also measured on each with a question; a vision transformer "
        "(ViT, DINOv2, CLIP, SigLIP) is measured on them alone.",
        panel="Input",
        metavar="DIR",
        shown="none",
    )

    @property
    def has_steps(self) -> bool:
        """Whether the run is over training steps: revisions separated by commas, or a folder of only checkpoints."""
        if self.revision is not None:
            return "," in self.revision
        folder = user_path(self.model) if self.model else None
        if folder is None or self.gguf_file is not None or kind_of(folder) != "folder":
            return False
        names = names_in(folder)
        checkpoints = [folder / name for name in names if name.startswith("checkpoint-")]
        return "config.json" not in names and any(kind_of(path) == "folder" for path in checkpoints)

    def folder(self) -> Path:
        named = self.model_copy(update={"revision": "steps"}) if self.has_steps else self
        return Path("runs", named.run_name + "-random-weights" * self.random_weights)
