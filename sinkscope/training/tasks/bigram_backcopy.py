"""The Bigram-Backcopy task (Guo et al. 2024; VGA §4.1): a Markov chain of characters, with triggers that copy.

    <s> h t h i s a t a n …      t, e and the space are triggers: after one comes what stood before it

Every sequence begins with <s>, or as an `Opening` says. After a token that is no trigger, the
next one is drawn by the frequencies of character pairs in the text that `--input natural` reads: it depends on that
token alone, so attention is not needed. After a trigger, the token before the trigger is repeated: there attention is
needed. The first character is drawn by its frequency among those that are no triggers, so that every trigger has
something to copy that is no trigger.

As in the paper's code, the triggers are the three most frequent characters, and there are 64 characters; its text is
tiny Shakespeare.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sinkscope.text.sources import documents
from sinkscope.training.blocks import Blocks
from sinkscope.training.tasks.opening import WITH_BOS, Opening

NAME = "bigram-backcopy"
START = "<s>"
CHARACTERS = 64
TRIGGERS = 3


@dataclass(frozen=True, eq=False)
class BigramBackcopy:
    """`tokens`: <s>, then the characters from the most to the least frequent, so that the triggers are ids 1 … 3.

    `transitions` (V,V): row by row, what follows each token that is no trigger; a trigger's row is zero.
    """

    tokens: tuple[str, ...]
    transitions: np.ndarray

    start: int = 0
    triggers: tuple[int, ...] = tuple(range(1, 1 + TRIGGERS))

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.tokens)

    def sample(self, count: int, length: int, seed: int | list[int] = 0, bos: bool = True) -> np.ndarray:
        """Sequences (count, length) of token ids, int64; without `bos` the <s> in front is cut off."""
        if not bos:
            return self.sample(count, length + 1, seed)[:, 1:]
        rng = np.random.default_rng(seed)
        ids = np.full((count, length), self.start, dtype=np.int64)
        for place in range(1, length):
            last = ids[:, place - 1]
            drawn = (self._cumulative[last] <= rng.random((count, 1))).sum(1)
            ids[:, place] = np.where(self.is_trigger(last), ids[:, place - 2], drawn)
        return ids

    def begin(self, opening: Opening, count: int, length: int, seed: list[int]) -> np.ndarray:
        """Sequences (count, length) as `sample` draws them, behind an opening."""
        if opening.random_tokens:
            rng = np.random.default_rng([*seed, 1])
            front = rng.integers(1, self.vocabulary, (count, opening.in_front))
        else:
            front = self.sample(count, opening.in_front, [*seed, 1], opening.bos)
        chain = self.sample(count, length - opening.in_front, seed, opening.has_start)
        return np.concatenate([front, chain], axis=1)

    def blocks(self, length: int, train: int, held_out: int, seed: int = 0, opening: Opening = WITH_BOS) -> Blocks:
        """Sequences to train on and others to measure by."""
        to_train = self.begin(opening, train, length, [seed, 0])
        return Blocks(to_train, self.begin(opening, held_out, length, [seed, 1]), NAME)

    def is_trigger(self, ids: np.ndarray) -> np.ndarray:
        return np.isin(ids, self.triggers)

    @cached_property
    def entropies(self) -> np.ndarray:
        """(V,): entropy of what follows each token, in nats. 0 after a trigger, where the next token is certain."""
        p = self.transitions
        return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(1)

    def optimum(self, length: int) -> dict[str, float]:
        """The lowest mean loss that any model can have on sequences of `length` tokens, in nats.

        Returns:
            `bigram` and `backcopy`: over the positions of each kind, from position 1 on; `predicted`: over all
            predictions, the one at <s> included.
        """
        chain, triggers = self.transitions, list(self.triggers)
        plain = np.zeros(self.vocabulary)  # the probability of each token at a position, by what stands there
        plain[self.start] = 1.0
        copied = np.zeros(self.vocabulary)  # … and of what stands before it, where it is a trigger
        losses, bigrams = [], []
        for _ in range(length - 1):
            losses.append(plain @ self.entropies)
            bigrams.append(plain.sum())
            following = plain @ chain
            following[triggers] = 0.0
            plain, copied = following + copied, plain * chain[:, triggers].sum(1)
        return {
            "bigram": float(sum(losses[1:]) / sum(bigrams[1:])),
            "backcopy": 0.0,
            "predicted": float(np.mean(losses)),
        }

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token per character, with <s> in front. Other characters are dropped, as when the pairs were counted."""
        core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(self.tokens)}, unk_token=START))
        known = "".join(f"\\x{{{ord(character):x}}}" for character in self.tokens[1:])
        core.normalizer = normalizers.Replace(Regex(f"[^{known}]"), "")
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, self.start)])
        core.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=START, clean_up_tokenization_spaces=False)

    @cached_property
    def _cumulative(self) -> np.ndarray:
        sums = self.transitions.cumsum(1)
        return sums / np.maximum(sums[:, -1:], np.finfo(float).tiny)  # up to exactly 1, so that no u < 1 is beyond it


def bigram_backcopy(text: str | None = None) -> BigramBackcopy:
    """The task with the character frequencies of a text; None: of the bundled text."""
    if text is None:
        text = "".join(documents("natural")[1])
    counts = Counter(text)
    characters = sorted(counts, key=lambda character: (-counts[character], character))[:CHARACTERS]
    tokens = (START, *characters)
    place = {token: index for index, token in enumerate(tokens)}
    pairs = np.zeros((len(tokens), len(tokens)))
    for before, after in pairwise(character for character in text if character in place):
        pairs[place[before], place[after]] += 1
    pairs[0, 1:] = [counts[character] for character in characters]  # <s>
    pairs[0, 1 : 1 + TRIGGERS] = 0.0
    pairs[1 : 1 + TRIGGERS] = 0.0
    return BigramBackcopy(tokens, pairs / np.maximum(pairs.sum(1, keepdims=True), 1.0))
