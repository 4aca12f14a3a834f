"""Tokenizes text, and checks and displays single token ids."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError, explained
from sinkscope.text.batch import REGISTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Return the token ids of a text, with the special tokens that the tokenizer adds if `special` is true."""
    # verbose=False: a text longer than the model's context is cut into windows, so a warning would mislead
    with explained("the model's tokenizer fails on text: repair its files"):  # wrong settings only show in use
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def first_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """Return the first `count` tokens of a text (all if it has fewer), without special tokens.

    Only the beginning of a long text is tokenized. Its length is doubled until it gives more tokens than needed,
    because the last tokens before a cut may differ from those of the complete text.
    """
    spare = 64
    size = 8 * (count + spare)
    while len(ids := encode(tokenizer, text[:size], special=False)) < count + spare and size < len(text):
        size *= 2
    return ids[:count]


def own_frame(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer adds before a text (usually one BOS or none) and after it (in encoders)."""
    if tokenizer is None:
        return (), ()
    plain, full = (encode(tokenizer, "x", special=special) for special in (False, True))
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    # "x" is unknown to the tokenizer, for example to one of nucleotides
    first, last = tokenizer.bos_token_id, getattr(tokenizer, "sep_token_id", None)
    return (
        tuple(full[:1]) if full and full[0] in (first, getattr(tokenizer, "cls_token_id", None)) else (),
        tuple(full[-1:]) if full and last is not None and full[-1] == last else (),
    )


def special_token_ids(tokenizer: "PreTrainedTokenizerBase | None") -> frozenset[int]:
    """Return all ids that a tokenizer marks special, including ids that only its list of added tokens names."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    known = [] if tokenizer is None else tokenizer.all_special_ids
    return frozenset(known) | {token_id for token_id, token in added.items() if token.special}


def token_texts(tokenizer: "PreTrainedTokenizerBase | None", token_ids: Iterable[int]) -> dict[int, str]:
    """Return tokens for a table: the text, the raw form of a part of a character, or "<id 123>"."""
    size = 0 if tokenizer is None else len(tokenizer)  # takes a millisecond
    texts = {}
    for token_id in token_ids:
        text = "<register>" if token_id == REGISTER else f"<id {token_id}>"
        if tokenizer is not None and 0 <= token_id < size:
            decoded = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            is_whole = decoded and "\ufffd" not in decoded  # the replacement character marks parts of characters
            text = decoded if is_whole else str(tokenizer.convert_ids_to_tokens(token_id) or text)
        texts[token_id] = text
    return texts


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Raise InputError for the first id outside the vocabulary; `where` begins the message."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{where}: token id {token} at position {position} is outside the model's vocabulary "
                f"of {vocab_size} (0 … {vocab_size - 1})"
            )
