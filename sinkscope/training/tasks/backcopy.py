"""The Bigram-Backcopy task as `train` uses it (VGA §4.1), alone and mixed with text: its blocks, and what is measured
besides the loss.
"""

from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedModel

from sinkscope.models.family import Family
from sinkscope.text.sources import documents
from sinkscope.training.blocks import Blocks
from sinkscope.training.tasks.backcopy_measures import example, measure
from sinkscope.training.tasks.bigram_backcopy import NAME, bigram_backcopy
from sinkscope.training.tasks.opening import WITH_BOS, Opening

MEASURED = 64  # held-out sequences, at every log
SHOWN = 20  # tokens of the one sequence that is drawn


class BackcopyTask:
    name: ClassVar = NAME
    about: ClassVar = "characters that depend on the last one, and triggers after which the one before them is repeated"

    def __init__(self, opening: Opening = WITH_BOS) -> None:
        self.opening = opening
        self.chain = bigram_backcopy()
        self.tokenizer = self.chain.tokenizer()

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        """No block is read twice: the chain has no end."""
        return self.chain.blocks(length, train, held_out, seed, self.opening)

    def probe(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
        return measure(self.chain, model, family, held_out[:MEASURED], self.opening.length)

    def tables(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> dict[str, pd.DataFrame]:
        return example(self.chain, model, family, held_out[0, :SHOWN])


class BackcopyWithTextTask(BackcopyTask):
    """Passages begin at random places, behind the same opening. In text a token depends on more than the last one, and
    triggers copy nothing.
    """

    name: ClassVar = f"{NAME}-with-text"
    about: ClassVar = f"{NAME}, every second block a passage of the text that its pairs are of; held out is the task"

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        drawn = super().blocks(length, train, held_out, seed)
        text = self.tokenizer("".join(documents("natural")[1]), add_special_tokens=False)["input_ids"]
        passage = length - self.opening.length
        starts = np.random.default_rng([seed, 2]).integers(len(text) - passage + 1, size=train // 2)
        drawn.train[1::2, -passage:] = sliding_window_view(np.array(text), passage)[starts]
        return Blocks(drawn.train, drawn.held_out, self.name)
