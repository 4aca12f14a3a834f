"""What `build_inputs` was asked for, the same for every source, and what it means for position 0."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sinkscope.errors import InputError
from sinkscope.text.tokens import check_ids, own_prefix, own_suffix, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (first token, sequences, tokens in each, seed) → ids (sequences, tokens), the first token included
Sampler = Callable[[int, int, int, int], np.ndarray]


class Selection(NamedTuple):
    """The sequences chosen from one source, what is at their position 0, and notices for the user."""

    sequences: list[list[int]]
    token_zero: str
    notices: list[str]
    per_passage: int = 1  # consecutive sequences that are of one passage of a text


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
        """Raise InputError where a BOS is to be put in front of token ids that a file gives."""
        if self.bos == "always":
            raise InputError(
                f"{label} gives token ids, which are taken as they are: "
                "--bos always does not apply; write the BOS into the file"
            )

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the BOS policy puts before every sequence. Text and drawn tokens get the same, so that runs
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
            raise InputError(f"--seq-len {self.seq_len}: {around} tokens stand {where} every sequence")
        check_ids(prefix, self.vocab_size, "what stands in front of every sequence")
        return prefix

    @cached_property
    def suffix(self) -> tuple[int, ...]:
        """The tokens that the policy puts after every sequence."""
        if self.bos == "never" or not self.closed:
            return ()
        suffix = own_suffix(self.tokenizer)
        check_ids(suffix, self.vocab_size, "what stands behind every sequence")
        return suffix

    @property
    def room(self) -> int:
        """Tokens that fit into a sequence between what the policy puts around them."""
        return self.seq_len - len(self.prefix) - len(self.suffix)

    def framed(self, ids: list[int]) -> list[int]:
        """Tokens with what the policy puts around them."""
        return [*self.prefix, *ids, *self.suffix]

    @property
    def keeps_bos(self) -> bool:
        """Whether text that the model writes after its BOS keeps it. Without a tokenizer nothing says how a text
        begins, and `auto` keeps the sequence as the model wrote it.
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
        """Describe the token that the policy puts at position 0; `otherwise` if it puts none there."""
        return self.described(self.prefix[0]) if self.prefix else otherwise

    def common_first(self, sequences: list[list[int]]) -> str:
        """What stands at position 0 of sequences that a file gives."""
        first = {ids[0] for ids in sequences}
        return self.described(first.pop()) if len(first) == 1 else "varies"

    def described(self, token_id: int) -> str:
        """For example "bos <|im_start|> (id 1)"."""
        special = "special token" if token_id in self.special_ids else "token"
        kind = "bos" if token_id in self._bos_ids else special
        text = f" {token_text(self.tokenizer, token_id)}" if self.tokenizer is not None else ""
        return f"{kind}{text} (id {token_id})"
