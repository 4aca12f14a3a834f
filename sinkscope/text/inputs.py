"""What the model reads: natural text, random or repeated tokens, a file or a dataset → token sequences.

`build_inputs` is a pure function of its source, the tokenizer and a few numbers; it never sees the model.
Ids are checked against the vocabulary here, so that nothing later can index outside the embedding. Every
error is an `InputError` that says what was wrong and what to do.

Defaults (100 sequences of 64 tokens) and the three input kinds are those of "When Attention Sink Emerges in
Language Models" (WSE), §3.3. What stands at position 0 decides much about sinks, so it is always recorded.
"""

import difflib
import hashlib
import json
import os
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sinkscope.errors import InputError, one_line
from sinkscope.text.batch import REGISTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("natural", "random", "repeated", "sampled")
FILE_TYPES = (".txt", ".jsonl", ".json", ".npy")
BOS_POLICIES = ("auto", "always", "never")

# Of a dataset, at most this many documents are looked at for every sequence asked for: without a limit, a
# dataset of short documents would be streamed to its end.
DOCUMENTS_PER_SEQUENCE = 200


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Token sequences, ready for the model.

    condition: "natural", "random", "repeated", a file's stem or a dataset's name: the tables' `condition`.
    sequences: read-only 1-D int64 arrays of 2 … seq_len ids; all of one length, but for JSON lines. The
        tables' `sequence` is the index in here, so that the order never changes.
    token_zero: what stands at position 0, for example "bos <|im_start|> (id 1)".
    sha256: of all lengths and ids: equal hashes mean that two runs read the same tokens.
    notices: what the user should know, one line each.
    """

    condition: str
    sequences: tuple[np.ndarray, ...]
    token_zero: str
    sha256: str
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.sequences)

    @property
    def num_predicted(self) -> int:
        """Tokens that have one before them: all but each sequence's first."""
        return self.num_tokens - len(self)

    @property
    def longest(self) -> int:
        return max(len(ids) for ids in self.sequences)

    def part(self, first: int, last: int) -> "TokenInputs":
        """Sequences first … last − 1 as inputs by themselves."""
        sequences = self.sequences[first:last]
        return replace(self, sequences=sequences, sha256=_sha256(sequences), notices=())

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
            yield _pad(self.sequences[first : first + batch_size], pad_id, padding_side)


def _pad(sequences: Sequence[np.ndarray], pad_id: int, padding_side: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids in sequences)
    padded = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, ids in enumerate(sequences):
        columns = slice(0, len(ids)) if padding_side == "right" else slice(width - len(ids), width)
        padded[row, columns] = torch.tensor(ids)  # a copy: the sequences stay read-only
        mask[row, columns] = 1
    return padded, mask


# --------------------------------------------------------------------------------------------------- building


# (first token, sequences, tokens in each, seed) → ids (sequences, tokens), the first token included
Sampler = Callable[[int, int, int, int], np.ndarray]


@dataclass(frozen=True)
class _Plan:
    """What `build_inputs` was asked for, the same for every source."""

    tokenizer: "PreTrainedTokenizerBase | None"
    vocab_size: int
    num_seqs: int
    seq_len: int
    bos: str
    bos_token_id: int | None
    special_ids: frozenset[int]
    seed: int
    sampler: "Sampler | None" = None

    @cached_property
    def text_prefix(self) -> tuple[int, ...]:
        """What the BOS policy puts in front of text."""
        if self.bos == "never":
            return ()
        prefix = own_prefix(self.tokenizer)
        if not prefix and self.bos == "always":
            prefix = (_known_bos(self),)
        if len(prefix) >= self.seq_len:
            raise InputError(f"--seq-len {self.seq_len}: {len(prefix)} tokens stand in front of every text")
        check_ids(prefix, self.vocab_size, "what stands in front of every sequence")
        return prefix

    @property
    def drawn_prefix(self) -> tuple[int, ...]:
        """What the BOS policy puts in front of random and repeated tokens: only `always` puts anything."""
        return self.text_prefix if self.bos == "always" else ()


@dataclass(frozen=True)
class _Cut:
    """What one source gave."""

    sequences: list[np.ndarray]
    token_zero: str
    notices: list[str]


def build_inputs(
    source: str | os.PathLike[str] = "natural",
    *,
    vocab_size: int,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dataset: str | None = None,
    max_positions: int | None = None,
    num_seqs: int = 100,
    seq_len: int = 64,
    bos: str = "auto",
    bos_token_id: int | None = None,
    special_ids: Iterable[int | None] = (),
    seed: int = 0,
    sampler: Sampler | None = None,
) -> TokenInputs:
    """The first `num_seqs` sequences of `seq_len` tokens of a source; fewer, with a notice, if it has fewer.

    source:
        "natural"     the text shipped with sinkscope, in consecutive windows
        "random"      independent tokens, uniform over the vocabulary without special tokens (WSE §3.3)
        "repeated"    one such token per sequence, seq_len times (WSE §3.3)
        "sampled"     what the model itself says after its BOS (`sampler`): natural to a model without tokenizer
        FILE.txt      UTF-8 text, in consecutive windows
        FILE.jsonl    (or .json) one JSON object a line: `input_ids`, taken as they are, or else `text`, one
                      document a sequence; cut to seq_len, and kept when shorter
        FILE.npy      integer token ids (N, T) or (T,), T ≥ seq_len, cut to seq_len
    dataset: instead of a source, a HuggingFace dataset "NAME", "NAME:CONFIG" or "NAME:CONFIG:SPLIT" (an
        empty CONFIG is the default one; SPLIT is train unless given): its documents of at least seq_len
        tokens, cut. NAME may be a local folder.
    vocab_size: the model's; ids must be below it. Random tokens are below the tokenizer's length too, since
        many models pad their vocabulary with ids that no text can give.
    max_positions: the longest sequence that the model takes; None: no limit.
    bos: what stands in front of every sequence and counts in seq_len.
        "auto"    text: what the tokenizer puts there by itself; random and repeated tokens: nothing, since
                  WSE's propositions 1–4 are about sequences whose tokens are all equal
        "always"  the same for all: what the tokenizer puts there by itself, else the beginning-of-sequence
                  token (the tokenizer's or `bos_token_id`, the model config's)
        "never"   nothing
        Token ids from a file are the user's: nothing is put in front of them.
    special_ids: ids that are never drawn at random, beside the tokenizer's special tokens and
        `bos_token_id`: the way to name them for a model without tokenizer. None among them is ignored, so
        that a config's ids can be given as they are.
    """
    source = os.fspath(source)
    plan = _Plan(
        tokenizer,
        vocab_size,
        num_seqs,
        seq_len,
        bos,
        bos_token_id,
        special_token_ids(tokenizer) | {at for at in (*special_ids, bos_token_id) if at is not None},
        seed,
        sampler,
    )
    _check_plan(plan, max_positions)
    condition, cut = _read(source, dataset, plan)
    notices = cut.notices
    if len(cut.sequences) < num_seqs:
        what = f"--dataset {dataset}" if dataset else f"--input {source}"
        held = _count(len(cut.sequences), "sequence")
        of = "of" if all(len(ids) == seq_len for ids in cut.sequences) else "of at most"
        notices = [*notices, f"{what} holds {held} {of} {seq_len} tokens; {num_seqs} were asked for"]
    for ids in cut.sequences:
        ids.setflags(write=False)
    return TokenInputs(condition, tuple(cut.sequences), cut.token_zero, _sha256(cut.sequences), tuple(notices))


def _check_plan(plan: _Plan, max_positions: int | None) -> None:
    if plan.num_seqs < 1:
        raise InputError(f"--num-seqs {plan.num_seqs}: at least 1 sequence is needed")
    if plan.seq_len < 2:
        raise InputError(f"--seq-len {plan.seq_len}: attention needs at least 2 tokens")
    if max_positions is not None and plan.seq_len > max_positions:
        raise InputError(
            f"--seq-len {plan.seq_len} is beyond the model's {max_positions} positions: take at most {max_positions}"
        )
    if plan.seed < 0:
        raise InputError(f"--seed {plan.seed}: a seed is 0 or more")
    if plan.bos not in BOS_POLICIES:
        raise InputError(f"--bos {plan.bos}: it is {', '.join(BOS_POLICIES[:-1])} or {BOS_POLICIES[-1]}")


def _read(source: str, dataset: str | None, plan: _Plan) -> tuple[str, _Cut]:
    """The condition's name and what its source gave."""
    if dataset is not None:
        if source != "natural":
            raise InputError(f"--input {source} and --dataset {dataset}: give one of the two")
        return _from_dataset(dataset, plan)
    if source == "natural":
        corpus = files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8")
        return source, _from_text(corpus, "natural text", plan)
    if source == "random":
        return source, _random(plan)
    if source == "repeated":
        return source, _repeated(plan)
    if source == "sampled":
        return source, _sampled(plan)
    path = _existing_file(source)
    readers = {
        ".txt": _from_text_file,
        ".jsonl": _from_json_lines,
        ".json": _from_json_lines,
        ".npy": _from_npy,
    }
    # A file named like an input kind keeps its ending, so that tables do not take one for the other.
    condition = path.name if path.stem in KINDS else path.stem
    return condition, readers[path.suffix.lower()](path, plan)


def check_source(source: str) -> None:
    """Is there such an input at all? Cheap, so that it can be asked before a model is loaded. Errors: InputError."""
    if source not in KINDS:
        _existing_file(source)


def _existing_file(source: str) -> Path:
    path = Path(source)
    known = path.suffix.lower() in FILE_TYPES
    if path.is_dir():
        raise InputError(f"--input {source} is a folder: give a file ({', '.join(FILE_TYPES)})")
    if path.is_file():
        if not known:
            raise InputError(f"--input {source}: the ending says what a file holds, one of {', '.join(FILE_TYPES)}")
        return path
    if known:
        siblings = os.listdir(path.parent) if path.parent.is_dir() else []
        raise InputError(f"--input {source}: no such file{_did_you_mean(path.name, siblings)}")
    raise InputError(
        f"--input {source}: neither an input ({', '.join(KINDS)}) nor a file{_did_you_mean(source, KINDS)}"
    )


def _did_you_mean(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# ------------------------------------------------------------------------------------------------------- text


def _from_text_file(path: Path, plan: _Plan) -> _Cut:
    return _from_text(_decode(_file_bytes(path), path.name), path.name, plan)


def _from_text(text: str, what: str, plan: _Plan) -> _Cut:
    """Consecutive windows of the text's tokens, each with the BOS in front that the policy asks for."""
    _need_tokenizer(plan, what)
    if not text.strip():
        raise InputError(f"{what} is empty")
    prefix = plan.text_prefix
    step = plan.seq_len - len(prefix)
    ids = _first_tokens(text, plan.num_seqs * step, plan)
    count = min(len(ids) // step, plan.num_seqs)
    if count == 0:
        raise InputError(
            f"{what} has {len(prefix) + len(ids)} tokens, fewer than one sequence of {plan.seq_len}: "
            "give a longer text or a smaller --seq-len"
        )
    check_ids(ids, plan.vocab_size, f"{what} through this tokenizer")
    windows = [_sequence([*prefix, *ids[at * step : (at + 1) * step]]) for at in range(count)]
    return _Cut(windows, _text_token_zero(prefix, plan), [])


def _need_tokenizer(plan: _Plan, what: str) -> None:
    if plan.tokenizer is None:
        raise InputError(
            f"{what} needs a tokenizer, and this model has none: "
            "give token ids (.npy, or JSON lines with input_ids), or --input random or repeated"
        )


def _first_tokens(text: str, count: int, plan: _Plan) -> list[int]:
    """The first `count` tokens of the text (all, if it has fewer), without special tokens.

    A long text is not tokenised to its end: its first characters are, and more of them until there are enough
    tokens with some to spare, since the tokens at a cut may differ from those of the whole text.
    """
    spare = 64
    size = 8 * (count + spare)
    while True:
        ids = encode(plan.tokenizer, text[:size], special=False)
        if len(ids) >= count + spare or size >= len(text):
            return ids[:count]
        size *= 2


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # verbose=False: a text longer than the model's context is cut in windows here, which needs no warning
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _file_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}") from error
    if not content:
        raise InputError(f"{path.name} is empty")
    return content


def _decode(content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} is not UTF-8 (byte 0x{content[error.start]:02x} at {error.start}): save it as UTF-8"
        ) from error


# ---------------------------------------------------------------------------------------------------- token 0


def own_prefix(tokenizer: Any) -> tuple[int, ...]:
    """What a tokenizer puts in front of a text by itself: mostly one BOS or nothing; never its EOS."""
    if tokenizer is None:
        return ()
    plain = encode(tokenizer, "x", special=False)
    full = encode(tokenizer, "x", special=True)
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    # A tokenizer that does not know "x" at all, say one of nucleotides.
    return tuple(full[:1]) if full and full[0] == tokenizer.bos_token_id else ()


def _known_bos(plan: _Plan) -> int:
    for bos in (getattr(plan.tokenizer, "bos_token_id", None), plan.bos_token_id):
        if bos is not None:
            return int(bos)
    raise InputError(
        "--bos always: neither the tokenizer nor the model's config names a beginning-of-sequence token; "
        "use --bos auto or never"
    )


def _text_token_zero(prefix: Sequence[int], plan: _Plan) -> str:
    return _name(prefix[0], plan) if prefix else "first text token"


def _name(token_id: int, plan: _Plan) -> str:
    kind = "token"
    if token_id in (getattr(plan.tokenizer, "bos_token_id", None), plan.bos_token_id):
        kind = "bos"
    elif token_id in plan.special_ids:
        kind = "special token"
    if plan.tokenizer is None:
        return f"{kind} (id {token_id})"
    return f"{kind} {token_text(plan.tokenizer, token_id)} (id {token_id})"


# ------------------------------------------------------------------------------------------- random, repeated


def _random(plan: _Plan) -> _Cut:
    prefix = plan.drawn_prefix
    drawn = _draw((plan.num_seqs, plan.seq_len - len(prefix)), plan)
    return _drawn_cut(prefix, drawn, "random token", plan)


def _repeated(plan: _Plan) -> _Cut:
    prefix = plan.drawn_prefix
    drawn = np.repeat(_draw((plan.num_seqs, 1), plan), plan.seq_len - len(prefix), axis=1)
    return _drawn_cut(prefix, drawn, "repeated token", plan)


def _sampled(plan: _Plan) -> _Cut:
    """The BOS begins every text that the model makes; --bos never leaves it out afterwards."""
    if plan.sampler is None:
        raise InputError("--input sampled needs a model to sample from")
    bos = _known_bos(plan)
    kept = plan.bos != "never"
    drawn = plan.sampler(bos, plan.num_seqs, plan.seq_len + (not kept), plan.seed)
    sequences = [_sequence(row if kept else row[1:]) for row in drawn.tolist()]
    return _Cut(sequences, _name(bos, plan) if kept else "the model's own token", [])


def _drawn_cut(prefix: tuple[int, ...], drawn: np.ndarray, token_zero: str, plan: _Plan) -> _Cut:
    sequences = [_sequence([*prefix, *row]) for row in drawn]
    return _Cut(sequences, _name(prefix[0], plan) if prefix else token_zero, [])


def _draw(shape: tuple[int, ...], plan: _Plan) -> np.ndarray:
    """Independent ids, uniform over the ordinary tokens of the vocabulary."""
    size = plan.vocab_size if plan.tokenizer is None else min(plan.vocab_size, len(plan.tokenizer))
    ordinary = np.setdiff1d(np.arange(size), list(plan.special_ids))
    if len(ordinary) == 0:
        raise InputError(f"all {size} tokens of the vocabulary are special: there is none to draw")
    generator = np.random.default_rng(plan.seed)
    return ordinary[generator.integers(len(ordinary), size=shape)]


def special_token_ids(tokenizer: "PreTrainedTokenizerBase | None") -> frozenset[int]:
    """All ids that a tokenizer marks special: BOS, EOS, … and those only its list of added tokens names."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {at for at, token in added.items() if token.special}


# -------------------------------------------------------------------------------------------------- token ids


def _from_npy(path: Path, plan: _Plan) -> _Cut:
    array = _load_npy(path)
    rows = array.reshape(1, -1) if array.ndim == 1 else array
    width = rows.shape[1]
    if width < plan.seq_len:
        raise InputError(
            f"{path.name} holds sequences of {width} ids, fewer than --seq-len {plan.seq_len}: "
            + (f"give --seq-len {width}" if width >= 2 else "give at least 2 a sequence")
        )
    rows = rows[: plan.num_seqs, : plan.seq_len]
    _refuse_bos(plan, path.name)
    for index, row in enumerate(rows):
        check_ids(row.tolist(), plan.vocab_size, f"{path.name}, row {index}")
    notices = [f"{path.name}: its sequences of {width} ids are cut to {plan.seq_len}"] * (width > plan.seq_len)
    if array.ndim == 1 and plan.num_seqs > 1:
        notices.append(f"{path.name} has one dimension, so it is one sequence; more are an array (N, T)")
    sequences = [_sequence(row) for row in rows]
    return _Cut(sequences, _given_token_zero(sequences, plan), notices)


def _load_npy(path: Path) -> np.ndarray:
    try:
        # mapped, so that only the rows asked for are read; never pickled, since a pickle can run code
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror or error}") from error
    # Not an .npy file, cut short, an array of Python objects, or a header that numpy cannot parse.
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        raise InputError(
            f"{path.name} is not an .npy file of integers ({one_line(error)}): write it with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):  # an .npz archive under another name
        raise InputError(f"{path.name} is an archive of arrays, not one array: write it with numpy.save")
    if array.dtype.kind not in "iu":
        raise InputError(f"{path.name} holds {array.dtype}, not integers: token ids are integers")
    if array.ndim not in (1, 2) or array.size == 0:
        raise InputError(f"{path.name} has shape {array.shape}: token ids are an array (N, T) or (T,), not empty")
    return array


def _from_json_lines(path: Path, plan: _Plan) -> _Cut:
    sequences: list[np.ndarray] = []
    kinds: set[str] = set()
    skipped = cut = 0
    for where, record in _json_records(path):
        if "input_ids" in record:
            _refuse_bos(plan, where)
            ids = _given_ids(record["input_ids"], where, plan)
            cut += len(ids) > plan.seq_len
            kinds.add("input_ids")
        elif "text" in record:
            ids = _document_ids(record["text"], where, plan)
            if len(ids) < 2:
                skipped += 1
                continue
            kinds.add("text")
        else:
            raise InputError(f"{where}: a record needs `text` or `input_ids`; this one has {_keys(record)}")
        sequences.append(_sequence(ids[: plan.seq_len]))
        if len(sequences) == plan.num_seqs:
            break
    if not sequences:
        raise InputError(f"{path.name} holds no document of at least 2 tokens")
    notices = []
    if skipped:
        notices.append(f"{path.name}: {_count(skipped, 'document')} of fewer than 2 tokens left out")
    if cut:
        notices.append(f"{path.name}: {_count(cut, 'list')} of input_ids cut to {plan.seq_len}")
    lengths = {len(ids) for ids in sequences}
    if len(lengths) > 1:
        notices.append(f"{path.name}: sequences have {min(lengths)} to {max(lengths)} tokens; shorter ones are padded")
    if kinds == {"text"}:
        return _Cut(sequences, _text_token_zero(plan.text_prefix, plan), notices)
    return _Cut(sequences, _given_token_zero(sequences, plan), notices)


def _json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record stands, for messages, and the record. Read line by line: only what is needed."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path.name}, line {number}"
                text = _decode(line, where).strip()
                if text:
                    yield where, _json_object(text, where)
            if lines.tell() == 0:
                raise InputError(f"{path.name} is empty")
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}") from error


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({one_line(error)}): give one JSON object a line") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is a JSON {_json_type(record)}: give one JSON object a line")
    return record


def _given_ids(ids: Any, where: str, plan: _Plan) -> list[int]:
    if not isinstance(ids, list):
        raise InputError(f"{where}: input_ids is a JSON {_json_type(ids)}, not a list of integers")
    for at, token in enumerate(ids):
        if type(token) is not int:  # not isinstance: true and false are ints to Python
            raise InputError(f"{where}: input_ids[{at}] is a JSON {_json_type(token)}: token ids are integers")
    check_ids(ids, plan.vocab_size, where)
    if len(ids) < 2:
        raise InputError(f"{where}: input_ids holds {_count(len(ids), 'token')}; attention needs at least 2")
    return ids


def _document_ids(text: Any, where: str, plan: _Plan) -> list[int]:
    """The first tokens of one document, at most seq_len, BOS included."""
    if not isinstance(text, str):
        raise InputError(f"{where}: text is a JSON {_json_type(text)}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer takes it
        raise InputError(f"{where}: text holds \\u{ord(text[error.start]):04x}, which is no character") from error
    _need_tokenizer(plan, where)
    prefix = plan.text_prefix
    ids = _first_tokens(text, plan.seq_len - len(prefix), plan)
    check_ids(ids, plan.vocab_size, f"{where}, through this tokenizer")
    return [*prefix, *ids]


def _refuse_bos(plan: _Plan, where: str) -> None:
    if plan.bos == "always":
        raise InputError(
            f"{where} gives token ids, which are taken as they are: "
            "--bos always does not apply; write the BOS into the file"
        )


def _given_token_zero(sequences: Sequence[np.ndarray], plan: _Plan) -> str:
    first = {int(ids[0]) for ids in sequences}
    return _name(first.pop(), plan) if len(first) == 1 else "varies"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _keys(record: dict[str, Any]) -> str:
    shown = ", ".join(islice(record, 6)) + (", …" if len(record) > 6 else "")
    return shown or "nothing"


# --------------------------------------------------------------------------------------------------- datasets


def _from_dataset(spec: str, plan: _Plan) -> tuple[str, _Cut]:
    """Documents of at least seq_len tokens, each cut to its first seq_len."""
    name, config, split = _dataset_spec(spec)
    what = f"--dataset {spec}"
    _need_tokenizer(plan, what)
    prefix = plan.text_prefix
    limit = DOCUMENTS_PER_SEQUENCE * plan.num_seqs
    sequences: list[np.ndarray] = []
    looked = 0
    for text in islice(_dataset_texts(name, config, split, what), limit):
        looked += 1
        ids = _document_ids(text, what, plan)
        if len(ids) == plan.seq_len:
            sequences.append(_sequence(ids))
        if len(sequences) == plan.num_seqs:
            break
    if not sequences:
        raise InputError(
            f"{what}: none of its first {_count(looked, 'document')} has {plan.seq_len} tokens: "
            "take a smaller --seq-len, or another dataset"
        )
    notices = []
    if len(sequences) < plan.num_seqs and looked == limit:
        notices.append(f"{what}: only its first {looked} documents were looked at")
    condition = Path(name).resolve().name if Path(name).exists() else name
    return condition, _Cut(sequences, _text_token_zero(prefix, plan), notices)


def _dataset_spec(spec: str) -> tuple[str, str | None, str]:
    """NAME[:CONFIG[:SPLIT]]."""
    name, *rest = spec.split(":")
    if not name or len(rest) > 2:
        raise InputError(f"--dataset {spec}: it is written NAME, NAME:CONFIG or NAME:CONFIG:SPLIT")
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"


def _dataset_texts(name: str, config: str | None, split: str, what: str) -> Iterator[str]:
    """The documents of a dataset, one after another; nothing but these is downloaded."""
    column: str | None = None
    for record in _dataset_records(name, config, split, what):
        column = column or _text_column(record, what)
        if isinstance(record.get(column), str):  # a missing document is None
            yield record[column]


def _dataset_records(name: str, config: str | None, split: str, what: str) -> Iterator[dict[str, Any]]:
    import datasets  # here, not above: it takes a second to import, and few runs need it

    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    # Reading a dataset can fail in about any way: network, hub, compression, parsing, a format's library.
    except Exception as error:
        raise InputError(f"{what} cannot be read: {one_line(error)}{_dataset_advice(error)}") from error


def _dataset_advice(error: Exception) -> str:
    import datasets

    if "gated" in str(error) or "private" in str(error):
        return "; ask for access on its page, then log in with `hf auth login`"
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return "; if it is private, log in with `hf auth login`"
    if isinstance(error, (ConnectionError, TimeoutError)):
        return "; without a network, give a local folder, or a file with --input"
    return ""


def _text_column(record: dict[str, Any], what: str) -> str:
    """`text`, or the only column that holds strings."""
    strings = [column for column, value in record.items() if isinstance(value, str)]
    if "text" in strings:
        return "text"
    if len(strings) == 1:
        return strings[0]
    found = f"{len(strings)} columns of strings" if strings else "no column of strings"
    raise InputError(f"{what}: no column `text`, and {found}, among {_keys(record)}; take another dataset")


def documents(source: str, dataset: str | None = None) -> tuple[str, Iterator[str]]:
    """The name of a text and its documents, to train on: "natural" and FILE.txt are one each.

    Errors: InputError, some of them only when a document is asked for.
    """
    if dataset is not None:
        if source != "natural":
            raise InputError(f"--text {source} and --dataset {dataset}: give one of the two")
        name, config, split = _dataset_spec(dataset)
        return name, _dataset_texts(name, config, split, f"--dataset {dataset}")
    if source == "natural":
        return source, iter([files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8")])
    path = _existing_file(source)
    if path.suffix.lower() == ".txt":
        return path.stem, iter([_decode(_file_bytes(path), path.name)])
    return path.stem, _json_texts(path)


def _json_texts(path: Path) -> Iterator[str]:
    for where, record in _json_records(path):
        if not isinstance(record.get("text"), str):
            raise InputError(f"{where}: a record needs `text` to train on; this one has {_keys(record)}")
        yield record["text"]


# ----------------------------------------------------------------------------------------------- small things


def token_text(tokenizer: "PreTrainedTokenizerBase | None", token_id: int) -> str:
    """How a token looks in a table: its text, the raw form of a piece of a character, or "<id 123>"."""
    if token_id == REGISTER:
        return "<register>"
    unknown = f"<id {token_id}>"
    if tokenizer is None or not 0 <= token_id < len(tokenizer):
        return unknown
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    if text and "\ufffd" not in text:  # the sign that stands for bytes that are no whole character
        return text
    return str(tokenizer.convert_ids_to_tokens(token_id) or unknown)


def _sequence(ids: Iterable[int]) -> np.ndarray:
    return np.array(list(ids), dtype=np.int64)


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    for at, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{where}: token id {token} at position {at} is outside the model's vocabulary "
                f"of {vocab_size} (0 … {vocab_size - 1})"
            )


def _sha256(sequences: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.array([len(ids)], dtype="<i8").tobytes())
        digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
