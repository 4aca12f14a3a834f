"""Tokens before each sequence, whose inputs stay in full precision: PrefixQuant (Chen et al. 2024)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sinkscope.errors import InputError, counted
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.models.family import vocabulary
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.inputs import TokenInputs
from sinkscope.text.tokens import check_ids, special_token_ids

OUTLIER_RATIO = 64.0  # times the median over the tokens of a sequence: PrefixQuant's η
RARE_OUTLIER = 0.1  # share of sequences: a single outlier id that is rarer is left out of the prefix


class SparingText(NamedTuple):
    """Sequences to read, and the spared tokens of each (T,)."""

    inputs: TokenInputs
    spared: Sequence[np.ndarray] = ()


class Prefixes:
    """Puts prefixes before the texts that are evaluated and that calibrate."""

    def __init__(self, subject: Subject, calibration: TokenInputs) -> None:
        self.subject, self.calibration = subject, calibration
        loaded, family = subject.loaded, subject.family
        reasons = {
            "it attends in both directions": not family.causal,
            "it is a prefix LM": family.prefix > 0,
            "it has registers before the text": registers_before(loaded.model) > 0,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise InputError(f"--prefix does not apply to {loaded.name}: {reason}")
        of_tokenizer = getattr(loaded.tokenizer, "bos_token_id", None)
        configured = getattr(loaded.model.config.get_text_config(), "bos_token_id", None)
        self.bos: int | None = configured if of_tokenizer is None else of_tokenizer
        sequences = (*subject.inputs.sequences, *calibration.sequences)
        self.begins_with_bos = all(ids[0] == self.bos for ids in sequences)

    def checked(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prefix with the text's own BOS last; InputError if the model cannot read it before the text."""
        model, family = self.subject.loaded.model, self.subject.family
        if not prefix:
            raise InputError("--prefix: it has no token")
        check_ids(prefix, vocabulary(model), "--prefix")
        if self.begins_with_bos and prefix[-1] != self.bos:
            prefix = (*prefix, int(self.bos or 0))
        limit, longest = position_limit(model, family), max(self.subject.inputs.longest, self.calibration.longest)
        if limit is not None and len(prefix) + longest - self.begins_with_bos > limit:
            raise InputError(
                f"--prefix: its {counted(len(prefix), 'token')} and the text are beyond the model's {limit} positions: "
                "take a shorter prefix or --seq-len"
            )
        return prefix

    def before(self, prefix: Sequence[int], inputs: TokenInputs) -> SparingText:
        """Put a prefix before each sequence, in place of its BOS. The same tokens are predicted."""
        texts = [ids[self.begins_with_bos :] for ids in inputs.sequences]
        sequences = tuple(np.concatenate([prefix, ids]).astype(np.int64) for ids in texts)
        first = len(prefix) + (not self.begins_with_bos)
        spared = [np.arange(len(ids)) < len(prefix) for ids in sequences]
        return SparingText(replace(inputs, sequences=sequences, first_predicted=first), spared)

    def random(self, length: int, drawn: np.random.Generator) -> tuple[int, ...]:
        """Return ids of random tokens that are not special."""
        loaded = self.subject.loaded
        ordinary = np.setdiff1d(np.arange(vocabulary(loaded.model)), list(special_token_ids(loaded.tokenizer)))
        return tuple(map(int, drawn.choice(ordinary, length)))


def outlier_prefix(outliers: Sequence[np.ndarray], sequences: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return PrefixQuant's prefix without its last token, a BOS: the most frequent outlier ids, except at position 0.

    Their number is the mean number of outliers of a sequence, position 0 included, in the layer with most, rounded up.

    Args:
        outliers: By sequence (layers, T): whether a token is an outlier.
        sequences: Their token ids.
    """
    number = math.ceil(np.mean([mask.sum(1) for mask in outliers], axis=0).max())
    counts = Counter(
        int(ids[position])
        for mask, ids in zip(outliers, sequences, strict=True)
        for _, position in np.argwhere(mask)
        if position
    )
    if len(counts) == 1 and counts.total() < RARE_OUTLIER * len(sequences):
        return ()
    return tuple(token for token, _ in counts.most_common(number))
