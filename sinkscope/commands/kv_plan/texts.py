"""Texts that ask for what was in them: some of their first tokens once more, or the value of a key; and their sinks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from sinkscope.measuring.engine import Setting, run_settings
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.parity import Parity
from sinkscope.measuring.sink_rule import FIRST_TOKENS, SinkRule
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, open_tracer

TEXTS_PER_COPY = 8  # the copy is an eighth of the text
UNKNOWN_COPIES = 8  # first tokens of the copy, from which the model cannot yet tell what is copied
COPY = "copy"
PAIRS = {"needle": 1, "keys": 8}  # task → number of pairs of a key and a value in the first half of a text
KEY = VALUE = 4  # tokens


@dataclass(frozen=True)
class CopiedText:
    """A prompt that is followed by some of its first tokens once more, with its predicted sinks."""

    ids: np.ndarray
    copied: int  # number of last tokens, those after the prompt
    sinks: tuple[int, ...] = ()  # positions
    first: int = 1  # position from which on they are in the prompt
    unknown: int = UNKNOWN_COPIES  # first of them that are not counted

    @classmethod
    def of(cls, ids: np.ndarray) -> Self:
        copied = len(ids) // TEXTS_PER_COPY
        return cls(np.concatenate([ids, ids[1 : 1 + copied]]), copied)

    @classmethod
    def asking(cls, ids: np.ndarray, pairs: np.ndarray, random: np.random.Generator) -> Self:
        """Write pairs (n,8) into ids (T,), and the first one's key at their end, which its value follows."""
        places = FIRST_TOKENS + pairs.shape[1] * random.permutation(len(ids) // (2 * pairs.shape[1]))[: len(pairs)]
        asking = np.append(ids, pairs[0, KEY:])
        asking[places[:, None] + np.arange(pairs.shape[1])] = pairs
        asking[len(ids) - KEY : len(ids)] = pairs[0, :KEY]
        return cls(asking, VALUE, first=int(places[0]) + KEY, unknown=0)

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """The predictions of the prompt, of the tokens after it that count, and of the same tokens before."""
        end = len(self.ids) - self.copied - 1
        before = slice(self.first - 1 + self.unknown, self.first - 1 + self.copied)
        return slice(0, end), slice(end + self.unknown, None), before


def questions_of(sequences: Sequence[np.ndarray], seed: int) -> list[CopiedText]:
    """Return a question in each text, for one task after the other; pairs are random tokens of the texts."""
    random, tokens = np.random.default_rng(seed), np.unique(np.concatenate([ids[1:] for ids in sequences]))
    drawn = ((random.choice(tokens, (n, KEY + VALUE)), ids) for n in PAIRS.values() for ids in sequences)
    return [CopiedText.asking(ids, pairs, random) for pairs, ids in drawn]


def predicted_sinks(
    subject: Subject, texts: Sequence[CopiedText], calibration: int, parity: Parity | None = None
) -> tuple[SinkRule, list[CopiedText]]:
    """Find the rule for sinks on the last `calibration` texts, and apply it to all, in one pass of the dense model."""
    inputs = replace(subject.inputs, sequences=tuple(text.ids for text in texts))

    def observables() -> list[Observable]:
        return [Massive(Settings()), *(parity.fresh() if parity else [])]

    dense = Setting(
        lambda _: open_tracer(subject.loaded.model, subject.family), Tracer.forward, observables=observables
    )
    (done,) = run_settings(replace(subject, inputs=inputs), [dense], batch_size=1)
    entries = done.observables[0].tables()["massive"]
    rule = SinkRule.of(entries[entries["is_massive"] & (entries["sequence"] >= len(texts) - calibration)])
    sinks = rule.of_each(entries, range(len(texts)))
    return rule, [replace(text, sinks=positions) for text, positions in zip(texts, sinks, strict=True)]
