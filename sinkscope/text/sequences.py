"""Makes token sequences: from documents (windows, heads, rows), or by drawing (random, repeated, sampled)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sinkscope.errors import InputError, SinkscopeError, counted, one_line
from sinkscope.text.chats import ChatTemplate
from sinkscope.text.tokens import check_ids, encode, first_tokens, own_prefix, own_suffix, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# (first token, sequences, tokens in each, seed) → ids (sequences, tokens), the first token included
Sampler = Callable[[int, int, int, int], np.ndarray]


@dataclass(frozen=True)
class Document:
    """One document of a source: its text, its chat, or token ids that are used as they are."""

    where: str  # its name in error messages, such as "notes.jsonl, line 3"
    text: str = ""
    ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None  # a chat: role and content of each turn
    notice: str = ""  # for a user who asked for more than one sequence


class Selection(NamedTuple):
    """The sequences chosen from one source, a description of their token at position 0, and notices for the user."""

    sequences: list[list[int]]
    token_zero: str
    notices: list[str]
    per_passage: int = 1  # how many consecutive sequences come from one passage of a text


@dataclass(frozen=True)
class Request:
    """The arguments of `build_inputs` that every source needs."""

    tokenizer: "PreTrainedTokenizerBase | None"
    vocab_size: int
    num_seqs: int
    seq_len: int
    bos: str
    closed: bool
    bos_token_id: int | None
    special_ids: frozenset[int]
    seed: int
    sampler: Sampler | None

    def check(self, max_positions: int | None) -> None:
        """Raise InputError for the first argument that is out of range."""
        length = f"--seq-len {self.seq_len}"
        for wrong, message in (
            (self.num_seqs < 1, f"--num-seqs {self.num_seqs}: at least 1 sequence is needed"),
            (self.seq_len < 2, f"{length}: attention needs at least 2 tokens"),
            (
                max_positions is not None and self.seq_len > max_positions,
                f"{length} is beyond the model's {max_positions} positions: take at most {max_positions}",
            ),
            (self.seed < 0, f"--seed {self.seed}: a seed is 0 or more"),
            (self.bos not in ("auto", "always", "never"), f"--bos {self.bos}: it is auto, always or never"),
        ):
            if wrong:
                raise InputError(message)

    def need_tokenizer(self, label: str) -> None:
        if self.tokenizer is None:
            raise InputError(
                f"{label} needs a tokenizer, and this model has none: "
                "give token ids (.npy, or JSON lines with input_ids), or --input random or repeated"
            )

    def refuse_bos(self, label: str) -> None:
        """Raise InputError if a BOS is asked for before the token ids of a file."""
        if self.bos == "always":
            raise InputError(
                f"{label} gives token ids, which are taken as they are: "
                "--bos always does not apply; write the BOS into the file"
            )

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the BOS policy puts before every sequence: the same for text and drawn tokens, so that runs
        on different inputs can be compared.
        """
        if self.bos == "never":
            return ()
        prefix = own_prefix(self.tokenizer)
        if not prefix and self.bos == "always":
            prefix = (self.known_bos,)
        around = len(prefix) + len(self.suffix)
        if around >= self.seq_len:
            where = "around" if self.suffix else "in front of"
            raise InputError(f"--seq-len {self.seq_len}: {around} tokens are {where} every sequence")
        check_ids(prefix, self.vocab_size, "the tokens in front of every sequence")
        return prefix

    @cached_property
    def suffix(self) -> tuple[int, ...]:
        """The tokens that the policy puts after every sequence."""
        if self.bos == "never" or not self.closed:
            return ()
        suffix = own_suffix(self.tokenizer)
        check_ids(suffix, self.vocab_size, "the tokens after every sequence")
        return suffix

    @property
    def room(self) -> int:
        """How many tokens fit between the prefix and the suffix of a sequence."""
        return self.seq_len - len(self.prefix) - len(self.suffix)

    def framed(self, ids: list[int]) -> list[int]:
        """Return the tokens between prefix and suffix."""
        return [*self.prefix, *ids, *self.suffix]

    @property
    def keeps_bos(self) -> bool:
        """Whether text that the model generates after its BOS keeps the BOS.

        Without a tokenizer it is unknown how a text begins, and `auto` keeps the sequence as it was generated.
        """
        return bool(self.prefix) if self.tokenizer is not None else self.bos != "never"

    @property
    def known_bos(self) -> int:
        """The beginning-of-sequence token that the tokenizer or the model's config names."""
        if self._bos_ids:
            return self._bos_ids[0]
        raise InputError(
            "--bos always: neither the tokenizer nor the model's config names a beginning-of-sequence token; "
            "use --bos auto or never"
        )

    @property
    def _bos_ids(self) -> list[int]:
        named = getattr(self.tokenizer, "bos_token_id", None), self.bos_token_id
        return [int(token) for token in named if token is not None]

    def token_zero(self, otherwise: str) -> str:
        """Describe the token that the policy puts at position 0; return `otherwise` if there is none."""
        return self.describe(self.prefix[0]) if self.prefix else otherwise

    def describe_first(self, sequences: list[list[int]]) -> str:
        """Describe the token at position 0 of a file's sequences."""
        first = {ids[0] for ids in sequences}
        return self.describe(first.pop()) if len(first) == 1 else "varies"

    def describe(self, token_id: int) -> str:
        """Describe a token, for example as "bos <|im_start|> (id 1)"."""
        special = "special token" if token_id in self.special_ids else "token"
        kind = "bos" if token_id in self._bos_ids else special
        text = f" {token_text(self.tokenizer, token_id)}" if self.tokenizer is not None else ""
        return f"{kind}{text} (id {token_id})"


# At most this many documents of a dataset are read for every sequence asked for: without a limit, a dataset of short
# documents would be streamed to its end.
DOCUMENTS_PER_SEQUENCE = 200
TEXT = "first text token"  # describes position 0 of a text without a prefix
# Consecutive windows of a text have the same topic, and are about equally easy to predict: this many tokens count as
# one passage. The shipped text changes its source about as often.
PASSAGE = 512


def windows(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Cut one text into consecutive windows, each with the tokens that the BOS policy adds."""
    request.need_tokenizer(label)
    (document,) = documents
    step = request.room
    ids = first_tokens(request.tokenizer, document.text, request.num_seqs * step)
    count = min(len(ids) // step, request.num_seqs)
    if count == 0:
        raise InputError(
            f"{label} has {counted(len(request.framed(ids)), 'token')}, fewer than one sequence of {request.seq_len}: "
            "give a longer text or a smaller --seq-len"
        )
    check_ids(ids, request.vocab_size, f"{label} through this tokenizer")
    sequences = [request.framed(ids[at * step : (at + 1) * step]) for at in range(count)]
    return Selection(sequences, request.token_zero(TEXT), [], per_passage=max(1, round(PASSAGE / step)))


def prompted(text: str, request: Request) -> Selection:
    """Make one sequence of the first seq_len tokens of a text."""
    label = "--prompt"
    request.need_tokenizer(label)
    own = encode(request.tokenizer, text, special=False)
    ids = request.framed(own)
    check_ids(ids, request.vocab_size, f"{label} through this tokenizer")
    if len(ids) < 2:
        raise InputError(f"{label} has {counted(len(ids), 'token')}; attention needs at least 2")
    cut = f"{label}: the first {request.seq_len} of its {len(ids)} tokens; --seq-len {len(ids)} reads all"
    notices = [cut] if len(ids) > request.seq_len else []
    return Selection([request.framed(own[: request.room])], request.token_zero(TEXT), notices)


def heads(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Take the first seq_len tokens of every document; shorter ones of at least 2 tokens are kept whole."""
    taken, skipped = _take(documents, request, 2)
    if not taken:
        raise InputError(f"{label} holds no document of at least 2 tokens")
    notices = []
    if skipped:
        notices.append(f"{label}: {counted(skipped, 'document')} of fewer than 2 tokens left out")
    cut = sum(len(ids) > request.seq_len for _, ids in taken)
    if cut:
        notices.append(f"{label}: {counted(cut, 'list')} of input_ids cut to {request.seq_len}")
    sequences = [ids[: request.seq_len] for _, ids in taken]
    lengths = {len(ids) for ids in sequences}
    if len(lengths) > 1:
        notices.append(f"{label}: sequences have {min(lengths)} to {max(lengths)} tokens; shorter ones are padded")
    all_text = all(document.ids is None and document.messages is None for document, _ in taken)
    return Selection(sequences, request.token_zero(TEXT) if all_text else request.describe_first(sequences), notices)


def long_heads(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Take the first seq_len tokens of the documents that are long enough, among a limited number of documents."""
    request.need_tokenizer(label)
    limit = DOCUMENTS_PER_SEQUENCE * request.num_seqs
    taken, skipped = _take(islice(documents, limit), request, request.seq_len)
    looked = len(taken) + skipped
    if not taken:
        raise InputError(
            f"{label}: none of its first {counted(looked, 'document')} has {request.seq_len} tokens: "
            "take a smaller --seq-len, or another dataset"
        )
    few = len(taken) < request.num_seqs and looked == limit
    notices = [f"{label}: only its first {looked} documents were looked at"] if few else []
    return Selection([ids for _, ids in taken], request.token_zero(TEXT), notices)


def _take(
    documents: Iterator[Document], request: Request, shortest: int
) -> tuple[list[tuple[Document, list[int]]], int]:
    """Return as many documents with token ids as were asked for, and how many were skipped as too short."""
    taken: list[tuple[Document, list[int]]] = []
    skipped = 0
    with ChatTemplate(request.tokenizer) as template:
        for document in documents:
            if document.ids is None:
                ids = _text_ids(document, request, template)
            else:
                ids, where = document.ids, document.where
                request.refuse_bos(where)
                check_ids(ids, request.vocab_size, where)
                if len(ids) < 2:
                    held = f"input_ids holds {counted(len(ids), 'token')}"
                    raise InputError(f"{where}: {held}; attention needs at least 2")
            if len(ids) < shortest:
                skipped += 1
                continue
            taken.append((document, ids))
            if len(taken) == request.num_seqs:
                break
    return taken, skipped


def rows(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Take the first seq_len ids of every row of an array.

    Raises:
        InputError: the rows are shorter, or ids are outside the vocabulary.
    """
    first = next(documents)
    width = len(first.ids or ())
    if width < request.seq_len:
        raise InputError(
            f"{label} holds sequences of {width} ids, fewer than --seq-len {request.seq_len}: "
            + (f"give --seq-len {width}" if width >= 2 else "give at least 2 a sequence")
        )
    request.refuse_bos(label)
    sequences = []
    for document in islice(chain([first], documents), request.num_seqs):
        ids = (document.ids or [])[: request.seq_len]
        check_ids(ids, request.vocab_size, document.where)
        sequences.append(ids)
    notices = [f"{label}: its sequences of {width} ids are cut to {request.seq_len}"] * (width > request.seq_len)
    notices += [first.notice] * (bool(first.notice) and request.num_seqs > 1)
    return Selection(sequences, request.describe_first(sequences), notices)


def _text_ids(document: Document, request: Request, template: ChatTemplate) -> list[int]:
    """Return the first tokens of a text or a chat, at most seq_len, BOS included; a chat template adds its own BOS."""
    where, text, is_chat = document.where, document.text, document.messages is not None
    request.need_tokenizer(where)
    if document.messages is not None:
        try:
            text = template.text(document.messages)
        except SinkscopeError:
            raise
        except Exception as error:  # a template is a program
            raise InputError(f"{where}: the tokenizer's chat template does not write it: {one_line(error)}") from error
    ids = first_tokens(request.tokenizer, text, request.seq_len if is_chat else request.room)
    check_ids(ids, request.vocab_size, f"{where}, through this tokenizer")
    return ids if is_chat else request.framed(ids)


def random_tokens(request: Request) -> Selection:
    """Draw independent tokens, uniform over the vocabulary without special tokens (WSE §3.3), after the prefix."""
    drawn = _draw((request.num_seqs, request.room), request)
    return Selection([request.framed(row) for row in drawn.tolist()], request.token_zero("random token"), [])


def repeated_tokens(request: Request) -> Selection:
    """Draw one such token per sequence, repeated to its end (WSE §3.3), after the prefix."""
    drawn = np.repeat(_draw((request.num_seqs, 1), request), request.room, axis=1)
    notice = "--input repeated: each sequence is a BOS and one token repeated; --bos never leaves equal tokens alone"
    notices = [notice] if request.prefix and request.bos == "auto" else []
    return Selection([request.framed(row) for row in drawn.tolist()], request.token_zero("repeated token"), notices)


def sampled_tokens(request: Request) -> Selection:
    """Generate text with the model after its BOS, which is kept if the policy puts one before text."""
    if request.sampler is None:
        raise InputError("--input sampled needs a model to sample from")
    bos = request.known_bos
    check_ids([bos], request.vocab_size, "the beginning-of-sequence token")
    left_out = int(not request.keeps_bos)
    drawn = request.sampler(bos, request.num_seqs, request.seq_len + left_out, request.seed)
    token_zero = "the model's own token" if left_out else request.describe(bos)
    return Selection(drawn[:, left_out:].tolist(), token_zero, [])


def _draw(shape: tuple[int, ...], request: Request) -> np.ndarray:
    tokenizer = request.tokenizer
    # many models pad their vocabulary with ids that never occur in text: those are not drawn
    size = request.vocab_size if tokenizer is None else min(request.vocab_size, len(tokenizer))
    ordinary = np.setdiff1d(np.arange(size), list(request.special_ids))
    if len(ordinary) == 0:
        raise InputError(f"all {size} tokens of the vocabulary are special: there is none to draw")
    generator = np.random.default_rng(request.seed)
    return ordinary[generator.integers(len(ordinary), size=shape)]
