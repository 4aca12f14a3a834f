"""What the model reads: natural text, random or repeated tokens, a file or a dataset become token sequences.

`build_inputs` is a pure function of its source, the tokenizer and a few numbers; it never sees the model. Ids are
checked against the vocabulary here, so that nothing later can index outside the embedding. What stands at position 0
decides much about sinks, so it is always recorded. Every error is an `InputError` that says what to do.

    "natural"     the text shipped with sinkscope, in consecutive windows
    "code", "documentation"
                  of Python's standard library, likewise: other domains (WSE fig. 9)
    "random"      independent tokens, uniform over the vocabulary without special tokens (WSE §3.3)
    "repeated"    one such token a sequence, repeated to its end (WSE §3.3)
    "sampled"     what the model itself says after its BOS: natural to a model without tokenizer
    FILE.txt      UTF-8 text, in consecutive windows
    FILE.jsonl    (or .json) one JSON object a line: `input_ids`, taken as they are, `messages` (a chat: role and
                  content) as the tokenizer's chat template writes them, or else `text`, one document a sequence; cut to
                  seq_len, and kept when shorter
    FILE.npy      integer token ids (N, T) or (T,), T ≥ seq_len, cut to seq_len

WSE is "When Attention Sink Emerges in Language Models"; its experiments take 100 sequences of 64 tokens.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from sinkscope.errors import InputError, counted
from sinkscope.options.measuring import PROMPT
from sinkscope.text.batch import IGNORED
from sinkscope.text.masking import Masked
from sinkscope.text.request import Request, Sampler
from sinkscope.text.sequences import prompted
from sinkscope.text.sources import DRAWN, open_source
from sinkscope.text.tokens import special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Token sequences, ready for the model.

    condition: "natural", "random", "repeated", a file's stem or a dataset's name: the tables' `condition`.
    sequences: read-only 1-D int64 arrays of 2 … seq_len ids; all of one length, but for JSON lines. The
        tables' `sequence` is the index in here, so that the order never changes.
    token_zero: what stands at position 0, for example "bos <|im_start|> (id 1)".
    sha256: of all lengths and ids: equal hashes mean that two runs read the same tokens.
    masked: for an encoder, each sequence as it has to predict it; None where each token's successor is predicted.
    notices: what the user should know, one line each.
    per_passage: so many consecutive sequences are of one passage of a text; what they share is no accident.
    """

    condition: str
    sequences: tuple[np.ndarray, ...]
    token_zero: str
    sha256: str
    notices: tuple[str, ...] = ()
    masked: tuple[Masked, ...] | None = None
    first_predicted: int = 1  # as Batch has it
    per_passage: int = 1

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.sequences)

    @property
    def predicted(self) -> list[int]:
        """How many of each sequence's tokens: all that have one before them, of a prefix LM those behind the prefix, of
        an encoder those that are hidden.
        """
        if self.masked is None:
            return [max(0, len(ids) - self.first_predicted) for ids in self.sequences]
        return [one.predicted for one in self.masked]

    @property
    def num_predicted(self) -> int:
        return sum(self.predicted)

    @property
    def shortest(self) -> int:
        return min(len(ids) for ids in self.sequences)

    @property
    def longest(self) -> int:
        return max(len(ids) for ids in self.sequences)

    @property
    def repeats_one_token(self) -> bool:
        """Whether every sequence is one token, repeated; False with a BOS in front."""
        return self.condition == "repeated" and all((ids == ids[0]).all() for ids in self.sequences)

    def part(self, first: int, last: int) -> "TokenInputs":
        """Sequences first … last − 1 as inputs by themselves."""
        sequences, masked = self.sequences[first:last], self.masked and self.masked[first:last]
        return replace(self, sequences=sequences, sha256=_sha256(sequences), notices=(), masked=masked)

    def batches(
        self, batch_size: int, *, pad_id: int = 0, padding_side: str = "right"
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and attention mask, both (B, T) int64, in order; the last batch may be smaller.

        T is the longest sequence of the batch; where a shorter one is padded the mask is 0, elsewhere 1.
        """
        if batch_size < 1:
            raise InputError(f"--batch-size {batch_size}: at least 1 sequence is needed in a batch")
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side is 'left' or 'right', not {padding_side!r}")
        for first in range(0, len(self.sequences), batch_size):
            ids = [torch.tensor(ids) for ids in self.sequences[first : first + batch_size]]
            yield _padded(ids, pad_id, padding_side), _padded([torch.ones_like(row) for row in ids], 0, padding_side)

    def masked_batch(self, first: int, count: int, padding_side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
        """Ids with tokens hidden and labels, both (B, T), of sequences first … first + count − 1 of an encoder."""
        some = (self.masked or ())[first : first + count]
        ids, labels = ([torch.tensor(part) for part in parts] for parts in zip(*some, strict=True))
        return _padded(ids, 0, padding_side), _padded(labels, IGNORED, padding_side)


def _padded(rows: list[torch.Tensor], value: int, side: str) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)


def build_inputs(
    source: str | os.PathLike[str] = "natural",
    *,
    vocab_size: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dataset: str | None = None,
    prompt: str | None = None,
    max_positions: int | None = None,
    num_seqs: int = 100,
    seq_len: int = 64,
    bos: str = "auto",
    closed: bool = False,
    bos_token_id: int | None = None,
    special_ids: Iterable[int | None] = (),
    seed: int = 0,
    sampler: Sampler | None = None,
) -> TokenInputs:
    """The first `num_seqs` sequences of `seq_len` tokens of a source; fewer, with a notice, if it has fewer.

    Args:
        source: an input kind or a file, see the head of this module.
        vocab_size: the model's; ids must be below it, and drawn ids below the tokenizer's length, too.
        dataset: instead of a source, "NAME", "NAME:CONFIG" or "NAME:CONFIG:SPLIT" (train unless given) of a
            HuggingFace dataset or a local folder: its documents of at least seq_len tokens, cut.
        prompt: instead of a source, one text.
        max_positions: the longest sequence that the model takes; None: no limit.
        bos: what is in front of every sequence and counts in seq_len, the same for texts and drawn tokens. "auto":
            what the tokenizer puts in front of a text by itself; "always": that, or else the BOS; "never": nothing.
            Ids from a file stay as they are; what a model without a tokenizer writes keeps its BOS but for "never".
        closed: whether what the tokenizer puts behind a text belongs to it, as [SEP] does for an encoder. It then
            stands behind every sequence that has something in front.
        bos_token_id: the model config's, for a tokenizer that names none.
        special_ids: ids never drawn, beside the tokenizer's special tokens and `bos_token_id`; None is ignored.
        sampler: draws text from the model, for "sampled".

    Raises:
        InputError: a source that cannot be read, ids outside the vocabulary, or arguments that do not fit.
    """
    source = os.fspath(source)
    special = special_token_ids(tokenizer) | {at for at in (*special_ids, bos_token_id) if at is not None}
    request = Request(tokenizer, vocab_size, num_seqs, seq_len, bos, closed, bos_token_id, special, seed, sampler)
    request.check(max_positions)
    if prompt is not None:
        condition, selection, num_seqs = PROMPT, prompted(prompt, request), 1
    elif source in DRAWN and dataset is None:
        condition, selection = source, DRAWN[source](request)
    else:
        found = open_source(source, dataset)
        condition, selection = found.name, found.cut(found.documents, found.label, request)
    sequences = tuple(np.array(ids, dtype=np.int64) for ids in selection.sequences)
    notices = list(selection.notices)
    if len(sequences) < num_seqs:
        label = f"--dataset {dataset}" if dataset else f"--input {source}"
        of = "of" if all(len(ids) == seq_len for ids in sequences) else "of at most"
        held = f"{counted(len(sequences), 'sequence')} {of} {seq_len} tokens; {num_seqs} were asked for"
        notices.append(f"{label} holds {held}")
    for ids in sequences:
        ids.setflags(write=False)
    made = TokenInputs(condition, sequences, selection.token_zero, _sha256(sequences), tuple(notices))
    return replace(made, per_passage=selection.per_passage)


def _sha256(sequences: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.array([len(ids)], dtype="<i8").tobytes())
        digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()
