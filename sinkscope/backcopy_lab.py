"""The Bigram-Backcopy lab (VGA §4.1): the task in place of a text for `train`, and what is looked at besides."""

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from sinkscope.backcopy_measures import example, measure
from sinkscope.bigram_backcopy import NAME, BigramBackcopy, bigram_backcopy
from sinkscope.blocks import Blocks
from sinkscope.families import Family
from sinkscope.figures.backcopy_training import sinking_layer
from sinkscope.paper_tables import as_markdown, with_spread

# metric → how it is called in the table of the lab, and how its numbers are written
COLUMNS = {
    "bigram_risk": ("Bigram risk", "{:.4f}"),
    "backcopy_risk": ("Backcopy risk", "{:.4f}"),
    "attention_to_start": ("Attention on `<s>`", "{:.3f}"),
    "early_attention_to_start": ("before any trigger", "{:.3f}"),
    "attention_to_triggers": ("on triggers", "{:.3f}"),
    "value_ratio": ("‖v‖ of `<s>` ÷ others", "{:.3f}"),
    "attended_ratio": ("behind the gate", "{:.3f}"),
    "delta_logit": ("Δlogit of `<s>`", "{:.2f}"),
}
MEASURED = 64  # held-out sequences, at every log
SHOWN = 20  # tokens of the one sequence that is drawn


class BackcopyLab:
    """What a workshop asks of a task."""

    name = NAME

    def __init__(self) -> None:
        self.task: BigramBackcopy = bigram_backcopy()
        self.tokenizer = self.task.tokenizer()

    def blocks(self, length: int, wanted: int, held_out: int, seed: int) -> Blocks:
        """None is seen twice: the chain has no end."""
        return self.task.blocks(length, wanted, held_out, seed)

    def probe(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
        """At step 0 and at every log: layer, metric, value."""
        return measure(self.task, model, family, held_out[:MEASURED])

    def tables(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> dict[str, pd.DataFrame]:
        """Of the trained model."""
        return example(self.task, model, family, held_out[0, :SHOWN])


def lab_markdown(training: pd.DataFrame) -> str:
    """What the probe found at the last step, an arm a row: mean ± standard deviation (n − 1) over seeds; of layers the
    one whose attention the first arm sinks most. `training`: the table of that name, of all arms.
    """
    last = training[
        (training["step"] == training["step"].max()) & training["layer"].isin((-1, sinking_layer(training)))
    ]
    wide = last.pivot_table(index=["condition", "seed"], columns="metric", values="value", sort=False)
    wide["value_ratio"] = wide["start_value_norm"] / wide["other_value_norm"]
    wide["attended_ratio"] = wide["start_attended_norm"] / wide["other_attended_norm"]
    arms = training["condition"].unique()
    mean, spread = (getattr(wide.groupby("condition"), how)().reindex(arms) for how in ("mean", "std"))
    table = pd.DataFrame({"Method": arms})
    for metric, (name, form) in COLUMNS.items():
        cells = zip(mean[metric], spread[metric], strict=True)
        table[name] = [with_spread(value, deviation, form) for value, deviation in cells]
    return f"## Non-trigger queries at step {last['step'].iloc[0]} (VGA figures 4 to 6)\n\n{as_markdown(table, True)}\n"
