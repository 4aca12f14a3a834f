"""Turns natural text, random or repeated tokens, a file or a dataset into token sequences for the model.

`build_inputs` is a pure function of its source, the tokenizer and a few numbers; it never sees the model. Ids are
checked against the vocabulary here, so that no later code indexes outside the embedding. The token at position 0 has a
large effect on sinks, so it is always recorded. Every error is an `InputError` with advice.

    "natural"     the text shipped with sinkscope, in consecutive windows
    "code", "documentation"
                  text from Python's standard library, also in windows: other domains (WSE fig. 9)
    "random"      independent tokens, uniform over the vocabulary without special tokens (WSE §3.3)
    "repeated"    one of these tokens per sequence, repeated to its end (WSE §3.3)
    "sampled"     text that the model itself generates after its BOS: natural input for a model without tokenizer
    FILE.txt      UTF-8 text, in consecutive windows
    FILE.jsonl    (or .json) one JSON object per line: `input_ids`, used as they are, `messages` (a chat: role and
                  content) as the tokenizer's chat template renders them, or else `text`, one document per sequence; cut
                  to seq_len, and kept if shorter
    FILE.npy      integer token ids (N, T) or (T,), T ≥ seq_len, cut to seq_len
    objects       in Python: texts, chats and token ids as lines of JSON, rows of a dataset or a DataFrame as those of
                  --dataset

A line, a row and an object are parsed in one place (options/records.py). Every run says what it read, on the console
and in run.json (`TokenInputs.said`). A text that begins with the tokens that would be put before it, such as one that
a chat template has rendered, does not get them twice.

WSE is "When Attention Sink Emerges in Language Models"; its experiments use 100 sequences of 64 tokens.

Encoders predict masked tokens. Tokens are masked as by transformers' DataCollatorForLanguageModeling with its defaults,
which are those of BERT and of Bondarenko et al. 2023: 15 % of all tokens except special ones are predicted; 80 % of
these are replaced by the mask token, 10 % by a random token, and 10 % stay. Each sequence has its own generator, seeded
by the run's seed and the sequence's ids: the draw does not depend on the batch or the order of the sequences.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling

from sinkscope.errors import InputError, counted, one_line
from sinkscope.options.given import Given
from sinkscope.options.measuring import PROMPT
from sinkscope.text.batch import IGNORED, Batch
from sinkscope.text.sources import DRAWN, Request, open_source, prompted
from sinkscope.text.tokens import check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BEGINNING, LONGEST_BEGINNING = 12, 48  # tokens and characters of the first sequence that `said` quotes


class Masked(NamedTuple):
    """One sequence with masked tokens, and labels: the tokens to be predicted, IGNORED elsewhere."""

    ids: np.ndarray
    labels: np.ndarray


def masked(
    sequences: Iterable[np.ndarray],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    seed: int,
    reading: int | None = None,
) -> tuple[Masked, ...]:
    """Mask tokens of every sequence for an encoder; raise ValueError if its tokenizer has no mask token.

    A training reads a sequence several times, each time with other masks: `reading` counts all that it has read before.
    """
    key = b"".join(number.to_bytes(8, "little") for number in (seed, reading) if number is not None)
    collator = DataCollatorForLanguageModeling(tokenizer)
    pairs = []
    for ids in sequences:
        digest = hashlib.sha256(key + ids.astype("<i8").tobytes()).digest()
        collator.generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        hidden, labels = collator.torch_mask_tokens(torch.tensor(ids)[None])
        check_ids(hidden[0].tolist(), vocab_size, "a sequence with tokens masked")
        pairs.append(Masked(hidden[0].numpy(), labels[0].numpy()))
    return tuple(pairs)


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Token sequences, ready for the model."""

    condition: str  # in tables: "natural", "random", "repeated", a file's stem or a dataset's name
    # Read-only 1-D int64 arrays of 2 … seq_len ids, of equal length except if they are from JSON lines. The tables'
    # `sequence` is the index in this tuple, so the order never changes.
    sequences: tuple[np.ndarray, ...]
    token_zero: str  # describes the token at position 0, for example "bos <|im_start|> (id 1)"
    sha256: str  # hash of all lengths and ids; equal hashes mean that two runs read the same tokens
    notices: tuple[str, ...] = ()  # messages for the user, one line each
    masked: tuple[Masked, ...] | None = None  # for an encoder; None if each token's successor is predicted
    first_predicted: int = 1  # see Batch
    per_passage: int = 1  # number of consecutive sequences from one passage of a text, which are not independent
    said: str = ""  # what was read: the source, the number of sequences, and how the first begins
    cut: int = 0  # number of documents that are longer than their sequences
    windows_of: int = 0  # number of documents that the sequences are windows of; 0: each is from another document
    # longer sequences share a batch only with those of their length: the model would read them differently
    equal_past: int | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.sequences)

    @property
    def predicted(self) -> list[int]:
        """The number of predicted tokens of each sequence: from `first_predicted` on, or an encoder's masked ones."""
        if self.masked is None:
            return [max(0, len(ids) - self.first_predicted) for ids in self.sequences]
        return [int((labels != IGNORED).sum()) for _, labels in self.masked]

    @property
    def num_predicted(self) -> int:
        return sum(self.predicted)

    @property
    def read(self) -> tuple[np.ndarray, ...]:
        """All sequences that the model reads: as they are, and for an encoder then with masked tokens."""
        return (*self.sequences, *(hidden for hidden, _ in self.masked or ()))

    @property
    def shortest(self) -> int:
        return min(len(ids) for ids in self.sequences)

    @property
    def longest(self) -> int:
        return max(len(ids) for ids in self.sequences)

    @cached_property
    def texts(self) -> tuple[int, ...]:
        """The number of each sequence's text, counted from 0: copies of a text have the same number."""
        return numbered(self.sequences)

    @property
    def documents(self) -> int:
        """The number of documents that the sequences are from; copies of one count once."""
        return self.windows_of or len(set(self.texts))

    @property
    def repeats_one_token(self) -> bool:
        """Whether every sequence is one token, repeated; False if a BOS is before it."""
        return self.condition == "repeated" and all((ids == ids[0]).all() for ids in self.sequences)

    def part(self, first: int, last: int) -> "TokenInputs":
        """Return only the sequences first … last − 1."""
        sequences, masked = self.sequences[first:last], self.masked and self.masked[first:last]
        return replace(self, sequences=sequences, sha256=_sha256(sequences), notices=(), masked=masked, said="")

    def batches(self, batch_size: int, padding_side: str = "right") -> Iterator[Batch]:
        """Yield the sequences in order, each batch padded to its longest; some may be smaller."""
        first, limit = 0, self.longest if self.equal_past is None else self.equal_past
        kinds = [max(len(ids), limit) for ids in self.sequences]
        for last in range(1, len(self) + 1):
            if last < len(self) and last - first < batch_size and kinds[last] == kinds[first]:
                continue
            ids = self.sequences[first:last]
            mask, masked = _padded(map(np.ones_like, ids), 0, padding_side), None
            texts = self.texts[first:last]
            if self.masked is not None:
                hidden, labels = zip(*self.masked[first:last], strict=True)
                hidden, labels = _padded(hidden, 0, padding_side), _padded(labels, IGNORED, padding_side)
                masked = Batch(hidden, mask, first, labels, texts=texts)
            of_text = _padded(ids, 0, padding_side)
            yield Batch(of_text, mask, first, masked=masked, first_predicted=self.first_predicted, texts=texts)
            first = last

    def whole(self) -> Batch:
        """Return all sequences in one batch, for computations without a model."""
        return next(replace(self, equal_past=None).batches(len(self)))


def numbered(sequences: Iterable[np.ndarray]) -> tuple[int, ...]:
    """Number distinct arrays from 0 in their order; return the number of each."""
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(ids.tobytes(), len(numbers)) for ids in sequences)


def _padded(rows: Iterable[np.ndarray], value: int, side: str) -> torch.Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def build_inputs(
    source: str | os.PathLike[str] | Given = "natural",
    *,
    dataset: str | None = None,
    prompt: str | None = None,
    max_positions: int | None = None,
    by_document: bool = False,
    **options: Any,
) -> TokenInputs:
    """Return the first `num_seqs` sequences of `seq_len` tokens of a source; fewer, with a notice, if it is too short.

    A `dataset` or a `prompt` replaces the source; `max_positions` is the longest sequence that the model accepts;
    `by_document` is that of `open_source`, and the options are the fields of `Request`.
    """
    source, request = source if isinstance(source, Given) else os.fspath(source), Request(**options)
    num_seqs, seq_len = request.num_seqs, request.seq_len
    if max_positions is not None and seq_len > max_positions:
        limit = f"the model's {max_positions} positions: take at most {max_positions}"
        raise InputError(f"--seq-len {seq_len} is beyond {limit}")
    if prompt is not None:
        condition, reads, selection, num_seqs = PROMPT, PROMPT, prompted(prompt, request), 1
    elif isinstance(source, str) and source in DRAWN and dataset is None:
        condition, reads, selection = source, f"{source} tokens", DRAWN[source](request)
    else:
        opened = open_source(source, dataset, by_document=by_document)
        condition, selection = opened.name, opened.cut(opened.documents, opened.label, request)
        reads = opened.reads(" and ".join(f"`{entry}`" for entry in selection.entries))
    sequences = tuple(np.array(ids, dtype=np.int64) for ids in selection.sequences)
    notices, held = list(selection.notices), counted(len(sequences), "sequence")
    if len(sequences) < num_seqs and isinstance(source, str):
        label = f"--dataset {dataset}" if dataset else f"--input {source}"
        of = "of" if all(len(ids) == seq_len for ids in sequences) else "of at most"
        notices.append(f"{label} holds {held} {of} {seq_len} tokens; {num_seqs} were requested")
    for ids in sequences:
        ids.setflags(write=False)
    inputs = TokenInputs(
        condition,
        sequences,
        selection.token_zero,
        _sha256(sequences),
        per_passage=selection.per_passage,
        said=f"{reads}, {held}, the first begins `{beginning(sequences[0], request.tokenizer)}`",
        cut=selection.cut,
        windows_of=selection.windows_of,
    )
    if (distinct := len(set(inputs.texts))) < len(sequences):
        notices.append(f"{reads}: only {distinct} of its {held} are distinct; intervals count copies of a text once")
    return replace(inputs, notices=tuple(notices))


def beginning(ids: np.ndarray, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Return the beginning of a text, on one line and without control characters."""
    first = ids[:BEGINNING].tolist()
    if tokenizer is None or max(first) >= len(tokenizer):  # a vocabulary may be padded with ids that mean nothing
        return ", ".join(map(str, first))
    text = str(tokenizer.decode(first, clean_up_tokenization_spaces=False)).rstrip("\ufffd")  # half of a character
    return one_line("".join(letter if letter.isprintable() else " " for letter in text), LONGEST_BEGINNING)


def _sha256(sequences: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.array([len(ids)], dtype="<i8").tobytes())
        digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()
