"""The options of `analyze`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
)

from sinkscope.options.files import UserPath, kind_of, names_in, user_path
from sinkscope.options.measuring import RunConfig
from sinkscope.options.option import (
    Options,
    option,
    split_all_names,
    split_at_commas,
)


def _spelled(heads: Any) -> Any:
    """Return heads, given as LAYER.HEAD,… or as pairs, as a list of texts."""
    listed = heads if isinstance(heads, list | tuple) else [heads]
    if any(isinstance(head, float) for head in listed):
        raise ValueError("write heads as text, as in '3.0,7.4': a number loses the last zero of 3.10")
    texts = [".".join(map(str, head)) if isinstance(head, list | tuple) else head for head in listed]
    return None if heads is None else split_all_names(texts)


def _check_head(name: str) -> str:
    if not re.fullmatch(r"\d{1,5}\.\d{1,5}", name):
        raise ValueError("a head is LAYER.HEAD, as in 3.0,7.4")
    return name


class CloseUpOptions(Options):
    """What is kept of the first sequences, to look at."""

    heads: Annotated[
        tuple[Annotated[str, AfterValidator(_check_head)], ...] | None,
        BeforeValidator(_spelled, json_schema_input_type=str | Sequence[tuple[int, int]]),
    ] = option(
        None,
        "Measuring",
        "Heads of the table and figure attention-maps, LAYER.HEAD,… The page shows the maps of all heads.",
        metavar="L.H,…",
        shown="six, from strong to weak sinks",
    )
    keep: Annotated[tuple[str, ...], split_at_commas] = option(
        (),
        "Measuring",
        "Also write raw activations of these sites (`sinkscope list activations`), as safetensors.",
        metavar="A,B",
        shown="none",
    )
    keep_seqs: int = option(8, "Measuring", "Sequences of --keep, from the first on; up to 4 GB.", metavar="N", ge=1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The layer and head of each of `heads`."""
        return [(int(layer), int(head)) for layer, _, head in (name.partition(".") for name in self.heads or ())]


class AnalyzeOptions(CloseUpOptions, RunConfig):
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
        "Measuring",
        "Also write which tokens are sinks in which layers, and the massive coordinates, as spike_mask.safetensors: "
        "for sparse autoencoders, steering and probes.",
    )
    images: UserPath | None = option(
        None,
        "Input",
        "A folder of pictures. A model that reads them is also measured on each with a question; a vision transformer "
        "(ViT, DINOv2, CLIP, SigLIP) is measured on them alone.",
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
        return "config.json" not in names and any(
            name.startswith("checkpoint-") and kind_of(folder / name) == "folder" for name in names
        )

    def folder(self) -> Path:
        named = self.model_copy(update={"revision": "steps"}) if self.has_steps else self
        return Path("runs", named.run_name)
