"""Synthetic tasks that `train` can use instead of a text. To add one, add a file here and a line in TASKS."""

from typing import ClassVar, Protocol

import numpy as np
import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.tasks.backcopy import WITH_BOS, BackcopyTask, BackcopyWithTextTask, Opening
from sinkscope.models.family import Family


class TrainingTask(Protocol):
    """A source of blocks with its own tokenizer and its own measurements."""

    name: ClassVar[str]  # the value of --text that selects it
    about: ClassVar[str]  # a line on its blocks for `sinkscope list tasks`

    def __init__(self, opening: Opening = WITH_BOS) -> None: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        """Draw `train` blocks of `length` tokens to train on, and `held_out` others to measure."""

    def probe(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
        """Measure a model; called at step 0 and at every log. Returns layer (−1: the whole model), metric, value."""

    def tables(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> dict[str, pd.DataFrame]:
        """Measure the trained model in detail: name → table, with the columns of `results/tables.py`."""


TASKS: dict[str, type[TrainingTask]] = {task.name: task for task in (BackcopyTask, BackcopyWithTextTask)}
