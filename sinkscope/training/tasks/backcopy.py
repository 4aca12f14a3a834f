"""The Bigram-Backcopy task as `train` uses it (VGA §4.1): its blocks, and what is measured besides the loss."""

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from sinkscope.models.family import Family
from sinkscope.training.blocks import Blocks
from sinkscope.training.tasks.backcopy_measures import example, measure
from sinkscope.training.tasks.bigram_backcopy import NAME, bigram_backcopy

MEASURED = 64  # held-out sequences, at every log
SHOWN = 20  # tokens of the one sequence that is drawn


class BackcopyTask:
    name = NAME

    def __init__(self) -> None:
        self.chain = bigram_backcopy()
        self.tokenizer = self.chain.tokenizer()

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        """No block is read twice: the chain has no end."""
        return self.chain.blocks(length, train, held_out, seed)

    def probe(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
        return measure(self.chain, model, family, held_out[:MEASURED])

    def tables(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> dict[str, pd.DataFrame]:
        return example(self.chain, model, family, held_out[0, :SHOWN])
