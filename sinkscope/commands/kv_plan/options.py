"""The options of `kv-plan`."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import distinct, one_as_tuple, option, split_at_commas

SHORTEST_TEXT = 128  # tokens of a text
LEAST_KEPT = 5  # tokens of each head: the first four and the last


class KvPlanOptions(RunConfig):
    """Plan the KV cache: which heads need all tokens, what the others and fewer bits cost.

    Ranks key/value heads by what they lose with only sinks and a window, looks for the best plan of each budget on
    calibration texts, and measures perplexity and retrieval on others, next to controls of equal memory and to the
    formats that vLLM serves. Shipped texts are read by document. Also writes the plans as JSON and a press for kvpress.
    The model itself does not change."""

    panel: ClassVar = "Planning"

    writes: ClassVar = "runs/MODEL-INPUT-kv-plan"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    by_document: ClassVar = True  # windows of a text whose passages take turns need few of its old tokens
    defaults: ClassVar = {"seq_len": 1024, "num_seqs": 8}
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

    @model_validator(mode="after")
    def _leaves_a_window(self) -> Self:
        """Refuse, before the model is loaded, what no model has a plan for."""
        if self.seq_len < SHORTEST_TEXT:
            raise ValueError(f"--seq-len {self.seq_len}: a plan needs texts of at least {SHORTEST_TEXT} tokens")
        for budget in self.budget:
            if budget * self.seq_len < LEAST_KEPT:
                least = f"a plan keeps at least {LEAST_KEPT} of {self.seq_len} tokens, {LEAST_KEPT / self.seq_len:.2%}"
                raise ValueError(f"--budget {budget:g}: {least}: take a larger one, or longer texts")
        return self

    def folder(self) -> Path:
        return Path("runs", f"{self.run_name}-kv-plan")
