"""The Bigram-Backcopy lab (VGA §4.1): the task in place of a text for `train`, and what is looked at besides."""

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from sinkscope.models.families import Family
from sinkscope.training.blocks import Blocks
from sinkscope.training.tasks.backcopy_measures import example, measure
from sinkscope.training.tasks.bigram_backcopy import NAME, BigramBackcopy, bigram_backcopy

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
