"""How much of the text is trained on, and blocks whose first tokens are drawn at random or fixed (WSE §4 and §5)."""

from dataclasses import replace

import numpy as np

from sinkscope.errors import InputError
from sinkscope.models.loading import LoadedModel
from sinkscope.models.towers import vocabulary
from sinkscope.options.training import ArmOptions
from sinkscope.text.tokens import special_token_ids
from sinkscope.training.blocks import Blocks


def check_starts(options: ArmOptions, task: str | None) -> None:
    """Raise InputError for blocks that cannot be made so. Cheap: to be called before a model is loaded."""
    if task is not None and options.random_tokens and options.fixed_position is not None:
        raise InputError(f"--text {task}: give one of --random-tokens and --fixed-position")
    length = options.block_length
    if options.random_tokens >= length or (options.fixed_position or 0) >= length:
        raise InputError(f"--random-tokens and --fixed-position are within the --block-length of {length} tokens")
    if options.tokens is not None and options.tokens < length:
        raise InputError(f"--tokens {options.tokens} are less than one block of {length}")


def limited(blocks: Blocks, options: ArmOptions) -> Blocks:
    """As many tokens to train on as are asked for; all other amounts are measured on the same held-out blocks."""
    if options.tokens is None:
        return blocks
    return replace(blocks, train=blocks.train[: options.tokens // options.block_length])


def begun(blocks: Blocks, loaded: LoadedModel, options: ArmOptions) -> Blocks:
    """Blocks of text with the first tokens that are asked for; a task makes its own (`Opening`).

    Tokens are drawn uniformly from the vocabulary without special tokens. The fixed one is the BOS, or else the padding
    token: with `--bos never` it stands nowhere else.
    """
    train, held_out = blocks.train, blocks.held_out
    if options.random_tokens:
        special = special_token_ids(loaded.tokenizer)
        ordinary = np.setdiff1d(np.arange(vocabulary(loaded.model)), list(special))
        rng = np.random.default_rng([options.seed, options.random_tokens])
        train, held_out = (_with_random(part, options.random_tokens, ordinary, rng) for part in (train, held_out))
    if options.fixed_position is not None:
        train, held_out = (_with_fixed(part, options.fixed_position, fixed_token(loaded)) for part in (train, held_out))
    return replace(blocks, train=train, held_out=held_out)


def fixed_token(loaded: LoadedModel) -> int:
    """The token that stands at `fixed_position` of every block."""
    known = (getattr(loaded.tokenizer, name, None) for name in ("bos_token_id", "pad_token_id"))
    return next((token for token in known if token is not None), 0)


def _with_random(blocks: np.ndarray, count: int, ordinary: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([rng.choice(ordinary, (len(blocks), count)), blocks[:, count:]], axis=1)


def _with_fixed(blocks: np.ndarray, position: int, token: int) -> np.ndarray:
    changed = blocks.copy()
    changed[:, position] = token
    return changed
