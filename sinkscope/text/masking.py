"""What an encoder has to predict: some tokens of each sequence hidden, as in masked language modeling.

The draw is that of transformers' DataCollatorForLanguageModeling with its defaults, which are BERT's and those of
Bondarenko et al. 2023: of all tokens but special ones 15 % are predicted; of these 80 % are replaced by the mask token,
10 % by a random one, and 10 % stay. Each sequence has a generator of its own, seeded by the run's seed and by its own
ids: neither the batch nor the order of the sequences changes what is drawn.
"""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling

from sinkscope.text.batch import IGNORED
from sinkscope.text.tokens import check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Masked(NamedTuple):
    """One sequence with tokens hidden, and at their places the tokens to be predicted, IGNORED elsewhere."""

    ids: np.ndarray
    labels: np.ndarray

    @property
    def predicted(self) -> int:
        return int((self.labels != IGNORED).sum())


def masked(
    sequences: Iterable[np.ndarray], tokenizer: "PreTrainedTokenizerBase", vocab_size: int, seed: int
) -> tuple[Masked, ...]:
    """Every sequence with tokens hidden.

    Raises:
        InputError: the tokenizer has ids that the model lacks.
        ValueError: the tokenizer has no mask token.
    """
    collator = DataCollatorForLanguageModeling(tokenizer)
    found = []
    for ids in sequences:
        collator.generator = torch.Generator().manual_seed(_seed_of(ids, seed))
        hidden, labels = collator.torch_mask_tokens(torch.tensor(ids)[None])
        check_ids(hidden[0].tolist(), vocab_size, "a sequence with tokens masked")
        found.append(Masked(hidden[0].numpy(), labels[0].numpy()))
    return tuple(found)


def _seed_of(ids: np.ndarray, seed: int) -> int:
    digest = hashlib.sha256(seed.to_bytes(8, "little") + ids.astype("<i8").tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
