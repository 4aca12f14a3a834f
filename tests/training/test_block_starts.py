"""The amount of text of a training, and the first tokens of each block, which WSE varies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.training import random_blocks
from tiny import VOCAB, tiny_model

from sinkscope.errors import InputError
from sinkscope.models.loading import LoadedModel
from sinkscope.options.option import checked
from sinkscope.options.training import TrainOptions
from sinkscope.training.blocks import begun, check_options, limited

BLOCKS = random_blocks(200)
LENGTH = BLOCKS.train.shape[1]


def options(**given: Any) -> TrainOptions:
    return checked(TrainOptions, {"block_length": LENGTH} | given)


def changed(**given: Any) -> Any:
    tokenizer: Any = SimpleNamespace(all_special_ids=[0, 1, 2], bos_token_id=1, pad_token_id=0)
    loaded = LoadedModel(tiny_model("llama"), tokenizer, "tiny", "tiny", None, None, ())
    return limited(begun(BLOCKS, loaded, options(**given)), options(**given))


def test_tokens_limit_what_is_trained_on_and_not_what_is_measured() -> None:
    assert changed().sha256 == BLOCKS.sha256
    few = changed(tokens=5 * LENGTH + 3)
    assert np.array_equal(few.train, BLOCKS.train[:5])
    assert np.array_equal(few.held_out, BLOCKS.held_out)
    assert np.array_equal(changed(random_tokens=2, tokens=5 * LENGTH).held_out, changed(random_tokens=2).held_out)


def test_random_tokens_are_ordinary_ones_and_the_seeds() -> None:
    two = changed(random_tokens=2)
    for part, before in ((two.train, BLOCKS.train), (two.held_out, BLOCKS.held_out)):
        assert np.array_equal(part[:, 2:], before[:, 2:])
    drawn = two.train[:, :2]
    assert (drawn.min(), drawn.max()) == (3, VOCAB - 1)
    assert len(np.unique(drawn)) > 0.9 * (VOCAB - 3)  # from 400 draws
    assert (drawn[:, 0] != drawn[:, 1]).any()
    assert changed(random_tokens=2).sha256 == two.sha256 != changed(random_tokens=2, seed=1).sha256


def test_one_token_stands_at_the_fixed_position_of_every_block() -> None:
    fixed = changed(fixed_position=3)
    for part, before in ((fixed.train, BLOCKS.train), (fixed.held_out, BLOCKS.held_out)):
        assert (part[:, 3] == 1).all()  # the BOS
        assert np.array_equal(np.delete(part, 3, axis=1), np.delete(before, 3, axis=1))


def test_what_cannot_be_is_refused() -> None:
    for given, task, message in (
        ({"random_tokens": LENGTH}, None, "within the --block-length"),
        ({"fixed_position": LENGTH}, None, "within the --block-length"),
        ({"tokens": LENGTH - 1}, None, "less than one block"),
        ({"text": "random"}, None, "nothing can be learned from it"),
        ({"fixed_position": 0, "random_tokens": 1}, "bigram-backcopy", "give one of --random-tokens and"),
    ):
        with pytest.raises(InputError, match=message):
            check_options(options(**given), task)
