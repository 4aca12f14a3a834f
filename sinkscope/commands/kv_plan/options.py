"""The options of `kv-plan`."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import distinct, one_as_tuple, option, split_at_commas


class KvPlanOptions(RunConfig):
    """Plan the KV cache: which heads need all tokens, what the others and fewer bits cost.

    Ranks key/value heads by what they lose with only sinks and a window, looks for the best plan of each budget on
    calibration texts, and measures perplexity and retrieval on others, next to controls of equal memory. Also writes
    the plans as JSON and a press for kvpress. The model itself does not change."""

    panel: ClassVar = "Planning"

    writes: ClassVar = "runs/MODEL-INPUT-kv-plan"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    defaults: ClassVar = {"seq_len": 2048, "num_seqs": 4}
    refused: ClassVar = {
        "observables": "`kv-plan` always measures perplexity and retrieval",
        "batch_size": "texts are read one by one, because each has its own sinks",
        "attn": "a plan has a kernel of its own",
    }
    hidden: ClassVar = (*ObservableOptions.model_fields, "batch_size", "attn")

    budget: Annotated[
        tuple[Annotated[float, Field(gt=0, lt=1)], ...],
        split_at_commas,
        distinct("name a budget, as 0.25"),
        one_as_tuple,
    ] = option((0.25,), "Share of the dense cache's memory, above 0 and below 1.", metavar="A,B")
    calibration: int = option(1, "Sequences, after those measured, that plans are made on.", metavar="N", ge=1)

    def folder(self) -> Path:
        return Path("runs", f"{self.run_name}-kv-plan")
