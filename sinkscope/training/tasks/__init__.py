"""Synthetic tasks that `train` takes in place of a text, one a file; a new one is a file here and a line in TASKS."""

from typing import ClassVar, Protocol

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinkscope.models.family import Family
from sinkscope.training.blocks import Blocks
from sinkscope.training.tasks.backcopy import WITH_BOS, BackcopyTask, BackcopyWithTextTask, Opening


class Task(Protocol):
    """A source of blocks with a tokenizer of its own, and with measurements that only make sense for it.

    `name` is what --text calls it, `about` what its blocks are, `opening` how each of them begins.
    """

    name: ClassVar[str]
    about: ClassVar[str]

    def __init__(self, opening: Opening = WITH_BOS) -> None: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        """Draw that many blocks of `length` tokens to train on, and others to measure by."""
        ...

    def probe(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
        """Measure a model at step 0 and at every log: layer (−1: the whole model), metric, value."""
        ...

    def tables(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> dict[str, pd.DataFrame]:
        """Look closely at the trained model: name → table, as `results/tables.py` lists its columns."""
        ...


TASKS: dict[str, type[Task]] = {task.name: task for task in (BackcopyTask, BackcopyWithTextTask)}
