"""How token sequences are made: from documents (windows, heads, rows), or drawn (random, repeated, sampled)."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from sinkscope.errors import InputError, SinkscopeError, counted, one_line
from sinkscope.text.chats import ChatTemplate, Messages
from sinkscope.text.readers import Document
from sinkscope.text.request import Request, Selection
from sinkscope.text.tokens import check_ids, encode, first_tokens

# Of a dataset, at most this many documents are looked at for every sequence asked for: without a limit, a
# dataset of short documents would be streamed to its end.
DOCUMENTS_PER_SEQUENCE = 200
TEXT = "first text token"  # what position 0 is where nothing stands in front of a text
# Consecutive windows of a text speak of the same thing, and are equally easy to predict: so many tokens count as one
# passage. The text that is shipped changes its source about as often.
PASSAGE = 512


def windows(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Consecutive windows of one text, each with the BOS in front that the policy asks for."""
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
    """One text, or its first seq_len tokens."""
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
    """The first seq_len tokens of every document; shorter documents are kept whole, from 2 tokens on."""
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
    return Selection(sequences, request.token_zero(TEXT) if all_text else request.common_first(sequences), notices)


def long_heads(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """The first seq_len tokens of those documents that have so many, among a limited number of documents."""
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
    """Documents with their token ids, as many as were asked for, and how many were skipped as too short."""
    taken: list[tuple[Document, list[int]]] = []
    skipped = 0
    with ChatTemplate(request.tokenizer) as template:
        for document in documents:
            if document.ids is None:
                ids = _text_ids(document, request, template)
            else:
                ids = _given_ids(document, document.ids, request)
            if len(ids) < shortest:
                skipped += 1
                continue
            taken.append((document, ids))
            if len(taken) == request.num_seqs:
                break
    return taken, skipped


def rows(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """The first seq_len ids of every row of an array; rows that are shorter are refused."""
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
    return Selection(sequences, request.common_first(sequences), notices)


def _text_ids(document: Document, request: Request, template: ChatTemplate) -> list[int]:
    """The first tokens of one document, at most seq_len, BOS included."""
    request.need_tokenizer(document.where)
    if document.messages is not None:
        return _chat_ids(document.where, document.messages, request, template)
    ids = first_tokens(request.tokenizer, document.text, request.room)
    check_ids(ids, request.vocab_size, f"{document.where}, through this tokenizer")
    return request.framed(ids)


def _chat_ids(where: str, messages: Messages, request: Request, template: ChatTemplate) -> list[int]:
    """The first seq_len tokens of a chat as the tokenizer's template writes it, which decides what is in front."""
    try:
        text = template.text(messages)
    except SinkscopeError:
        raise
    except Exception as error:  # a template is a program
        raise InputError(f"{where}: the tokenizer's chat template does not write it: {one_line(error)}") from error
    ids = first_tokens(request.tokenizer, text, request.seq_len)
    check_ids(ids, request.vocab_size, f"{where}, through this tokenizer")
    return ids


def _given_ids(document: Document, ids: list[int], request: Request) -> list[int]:
    request.refuse_bos(document.where)
    check_ids(ids, request.vocab_size, document.where)
    if len(ids) < 2:
        raise InputError(f"{document.where}: input_ids holds {counted(len(ids), 'token')}; attention needs at least 2")
    return ids


def random_tokens(request: Request) -> Selection:
    """Independent tokens, uniform over the vocabulary without special tokens (WSE §3.3), after the policy's BOS."""
    return _in_frame(_draw((request.num_seqs, request.room), request), "random token", request)


def repeated_tokens(request: Request) -> Selection:
    """One such token a sequence, repeated to its end (WSE §3.3), after the policy's BOS."""
    drawn = np.repeat(_draw((request.num_seqs, 1), request), request.room, axis=1)
    notice = "--input repeated: each sequence is a BOS and one token repeated; --bos never leaves equal tokens alone"
    return _in_frame(drawn, "repeated token", request, [notice] if request.prefix and request.bos == "auto" else [])


def sampled_tokens(request: Request) -> Selection:
    """Text that the model itself makes after its BOS, which stays where the policy puts one in front of text."""
    if request.sampler is None:
        raise InputError("--input sampled needs a model to sample from")
    bos = request.known_bos
    check_ids([bos], request.vocab_size, "the beginning-of-sequence token")
    left_out = int(not request.keeps_bos)
    drawn = request.sampler(bos, request.num_seqs, request.seq_len + left_out, request.seed)
    token_zero = "the model's own token" if left_out else request.described(bos)
    return Selection(drawn[:, left_out:].tolist(), token_zero, [])


def _draw(shape: tuple[int, ...], request: Request) -> np.ndarray:
    tokenizer = request.tokenizer
    # many models pad their vocabulary with ids that no text can give: those are not drawn
    size = request.vocab_size if tokenizer is None else min(request.vocab_size, len(tokenizer))
    ordinary = np.setdiff1d(np.arange(size), list(request.special_ids))
    if len(ordinary) == 0:
        raise InputError(f"all {size} tokens of the vocabulary are special: there is none to draw")
    generator = np.random.default_rng(request.seed)
    return ordinary[generator.integers(len(ordinary), size=shape)]


def _in_frame(drawn: np.ndarray, token_zero: str, request: Request, notices: Sequence[str] = ()) -> Selection:
    sequences = [request.framed(row) for row in drawn.tolist()]
    return Selection(sequences, request.token_zero(token_zero), list(notices))
