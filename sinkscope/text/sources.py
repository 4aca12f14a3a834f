"""The sources of token sequences: texts, files, datasets and drawn tokens, and how they are cut into sequences.

A new one is one line in the registers TEXTS, FORMATS and DRAWN. The library `datasets` reads datasets, but not single
files: its JSON reader turns dates into `datetime` and integers next to 6.0 into floats and names no line in its errors;
its text reader rewrites line ends and keeps a byte order mark.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from sinkscope.errors import InputError, SinkscopeError, closest, counted, one_line
from sinkscope.options.files import check_readable, kind_of, names_in, plain_path
from sinkscope.text.chats import ChatTemplate
from sinkscope.text.tokens import check_ids, encode, first_tokens, own_prefix, own_suffix, token_texts

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

    def check_tokenizer(self, label: str) -> None:
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
        """The tokens that the BOS policy puts before every sequence, the same for text and drawn tokens."""
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

    @cached_property
    def bos_ids(self) -> list[int]:
        """The beginning-of-sequence tokens that the tokenizer and the model's config name."""
        named = getattr(self.tokenizer, "bos_token_id", None), self.bos_token_id
        return [int(token) for token in named if token is not None]

    @property
    def known_bos(self) -> int:
        if self.bos_ids:
            return self.bos_ids[0]
        raise InputError(
            "--bos always: neither the tokenizer nor the model's config names a beginning-of-sequence token; "
            "use --bos auto or never"
        )

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
        kind = "bos" if token_id in self.bos_ids else special
        text = f" {token_texts(self.tokenizer, [token_id])[token_id]}" if self.tokenizer is not None else ""
        return f"{kind}{text} (id {token_id})"


# --- readers: a file or a dataset becomes documents


def _of_characters(text: str) -> str:
    """Return the text; raise ValueError for half of a surrogate pair, which JSON can spell but no tokenizer accepts."""
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise ValueError(f"text holds \\u{ord(half[0]):04x}, which is not a character")
    return text


Text = Annotated[str, AfterValidator(_of_characters)]


class _Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(strict=True)

    role: Text
    content: Text


class _Record(BaseModel):
    """One line of a JSON lines file; it may have other entries."""

    model_config = ConfigDict(strict=True)  # 6.0 and true are not token ids

    input_ids: list[int] = []
    messages: list[_Message] = []
    text: Text = ""


def read_text(path: Path) -> Iterator[Document]:
    """Read a file of UTF-8 text as one document."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}") from error
    text = _decoded(content, path.name)
    if not text.strip():
        raise InputError(f"{path.name} is empty")
    yield Document(path.name, text)


def read_json_lines(path: Path) -> Iterator[Document]:
    """Read one JSON object per line: `text`, `messages` or `input_ids`. Lines are read as documents are taken."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path.name}, line {number}"
                content = _decoded(line, where).strip()
                if content:
                    yield _json_document(content, where)
            if lines.tell() == 0:
                raise InputError(f"{path.name} is empty")
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}") from error


def read_array(path: Path) -> Iterator[Document]:
    """Read the rows of an .npy file of integers (N, T), or one sequence (T,)."""
    try:
        # memory-mapped, so that only the rows asked for are read; never unpickled, since a pickle can run code
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror or error}") from error
    # not an .npy file, truncated, an array of Python objects, or a malformed header: numpy evaluates the header, which
    # can raise almost anything, for example for a shape beyond 64 bits
    except Exception as error:
        raise InputError(
            f"{path.name} is not an .npy file of integers ({one_line(error)}): write it with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):  # an .npz archive under another name
        raise InputError(f"{path.name} is an archive of arrays, not one array: write it with numpy.save")
    if array.dtype.kind not in "iu":
        raise InputError(f"{path.name} holds {array.dtype}, not integers: token ids are integers")
    if array.ndim not in (1, 2) or array.size == 0:
        raise InputError(f"{path.name} has shape {array.shape}: token ids are an array (N, T) or (T,), not empty")
    notice = f"{path.name} has one dimension, so it is one sequence; more are an array (N, T)"
    for index, row in enumerate(np.atleast_2d(array)):
        yield Document(f"{path.name}, row {index}", ids=row.tolist(), notice=notice if array.ndim == 1 else "")


def read_dataset(spec: str) -> tuple[str, Iterator[Document]]:
    """Return the name in tables of a dataset NAME[:CONFIG[:SPLIT]], and its documents, downloaded as they are taken.

    The name is its NAME, or the last part of a folder's path.
    """
    label, (name, *options) = f"--dataset {spec}", spec.split(":")
    if not name or len(options) > 2:
        raise InputError(f"{label}: it is written NAME, NAME:CONFIG or NAME:CONFIG:SPLIT")
    config, split = (*options, "", "")[:2]
    path = plain_path(name)
    known = name if kind_of(path) is None else path.resolve().name
    return known, _dataset_documents(_dataset_records(name, config or None, split or "train", label), label)


def _dataset_documents(records: Iterator[dict[str, Any]], label: str) -> Iterator[Document]:
    column: str | None = None
    for record in records:
        if column is None:  # from the first record: the `features` of a streamed dataset are not always known before
            strings = [name for name, value in record.items() if isinstance(value, str)]
            if "text" not in strings and len(strings) != 1:
                found = f"{len(strings)} columns of strings" if strings else "no column of strings"
                among = f"and {found}, among {_keys(record)}"
                raise InputError(f"{label}: no column `text`, {among}; take another dataset")
            column = "text" if "text" in strings else strings[0]
        if isinstance(record.get(column), str):  # a missing document is None
            try:
                yield Document(label, _of_characters(record[column]))
            except ValueError as error:
                raise InputError(f"{label}: {error}") from None


def _decoded(content: bytes, label: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{label} is not UTF-8 (byte 0x{content[error.start]:02x} at {error.start}): save it as UTF-8"
        ) from error


def _json_document(content: str, where: str) -> Document:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({one_line(error)}): give one JSON object a line") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is a JSON {_json_type(record)}: give one JSON object a line")
    if not record.keys() & _Record.model_fields.keys():
        raise InputError(f"{where}: a record needs `text`, `messages` or `input_ids`; this one has {_keys(record)}")
    if "input_ids" in record:  # nothing else is needed
        record = {name: value for name, value in record.items() if name == "input_ids" or isinstance(value, str)}
    try:
        checked = _Record.model_validate(record)
    except ValidationError as error:
        raise InputError(f"{where}: {_complaint(error.errors()[0])}") from None
    messages = [message.model_dump() for message in checked.messages] or None
    return Document(where, checked.text, checked.input_ids if "input_ids" in record else None, messages)


def _complaint(error: Any) -> str:
    """Say what is wrong with an entry of a record, from an error of pydantic."""
    name, *places = error["loc"]
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    found = _json_type(error["input"])
    if name == "messages":
        where = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places)
        return f"messages{where}: each message has a `role` and a `content`, which are strings"
    if places:
        return f"{name}[{places[0]}] is a JSON {found}: token ids are integers"
    return f"{name} is a JSON {found}, not a {'string' if name == 'text' else 'list of integers'}"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _keys(record: dict[str, Any]) -> str:
    """List the first keys of a record, for an error message."""
    shown = ", ".join(islice(record, 6)) + (", …" if len(record) > 6 else "")
    return shown or "nothing"


def _dataset_records(name: str, config: str | None, split: str, label: str) -> Iterator[dict[str, Any]]:
    import datasets  # here, not above: it takes a second to import, and few runs need it

    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    # reading a dataset can raise almost anything: network, hub, compression, parsing, a format's library
    except Exception as error:
        advice = ""
        if "gated" in str(error) or "private" in str(error):
            advice = "; ask for access on its page, then log in with `hf auth login`"
        elif isinstance(error, datasets.exceptions.DatasetNotFoundError):
            advice = "; if it is private, log in with `hf auth login`"
        elif isinstance(error, (ConnectionError, TimeoutError)):
            advice = "; without a network, give a local folder, or a file with --input"
        raise InputError(f"{label} cannot be read: {one_line(error)}{advice}") from error


# --- documents become sequences

# At most this many documents of a dataset are read for every sequence asked for: without a limit, a dataset of short
# documents would be streamed to its end.
DOCUMENTS_PER_SEQUENCE = 200
TEXT = "first text token"  # describes position 0 of a text without a prefix
# Consecutive windows of a text have the same topic, and are about equally easy to predict: this many tokens count as
# one passage. The shipped text changes its source about as often.
PASSAGE = 512


def windows(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Cut one text into consecutive windows, each with the tokens that the BOS policy adds."""
    request.check_tokenizer(label)
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
    request.check_tokenizer(label)
    own = encode(request.tokenizer, text, special=False)
    ids = request.framed(own)
    check_ids(ids, request.vocab_size, f"{label} through this tokenizer")
    if len(ids) < 2:
        raise InputError(f"{label} has {counted(len(ids), 'token')}; attention needs at least 2")
    cut = f"{label}: the first {request.seq_len} of its {len(ids)} tokens; --seq-len {len(ids)} reads all"
    notices = [cut] if len(ids) > request.seq_len else []
    return Selection([request.framed(own[: request.room])], request.token_zero(TEXT), notices)


def heads(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Take the first seq_len tokens of every document; shorter ones of at least 2 tokens are kept."""
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
    request.check_tokenizer(label)
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
            where, text, ids, is_chat = document.where, document.text, document.ids, document.messages is not None
            if ids is None:
                request.check_tokenizer(where)
                if document.messages is not None:  # the template adds its own BOS
                    text = _chat_text(template, document.messages, where)
                ids = first_tokens(request.tokenizer, text, request.seq_len if is_chat else request.room)
                check_ids(ids, request.vocab_size, f"{where}, through this tokenizer")
                ids = ids if is_chat else request.framed(ids)
            else:
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


def _chat_text(template: ChatTemplate, messages: list[dict[str, str]], where: str) -> str:
    try:
        return template.text(messages)
    except SinkscopeError:
        raise
    except Exception as error:  # a template is a program
        raise InputError(f"{where}: the tokenizer's chat template does not write it: {one_line(error)}") from error


def rows(documents: Iterator[Document], label: str, request: Request) -> Selection:
    """Take the first seq_len ids of every row of an array."""
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


def random_tokens(request: Request) -> Selection:
    """Draw independent tokens, uniform over the vocabulary without special tokens (WSE §3.3), after the prefix."""
    drawn = _draw((request.num_seqs, request.room), request)
    return Selection([request.framed(row) for row in drawn.tolist()], request.token_zero("random token"), [])


def repeated_tokens(request: Request) -> Selection:
    """Draw one ordinary token per sequence, repeated to its end (WSE §3.3), after the prefix."""
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
    # without a tokenizer it is unknown how a text begins, and `auto` keeps the sequence as it was generated
    keeps_bos = request.bos != "never" if request.tokenizer is None else bool(request.prefix)
    left_out = int(not keeps_bos)
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


# --- the registers

Reader = Callable[[Path], Iterator[Document]]
# (documents, name of the source in error messages, request) → sequences
Cut = Callable[[Iterator[Document], str, Request], Selection]

FORMATS: dict[str, tuple[Reader, Cut]] = {
    ".txt": (read_text, windows),
    ".jsonl": (read_json_lines, heads),
    ".json": (read_json_lines, heads),
    ".npy": (read_array, rows),
}
DRAWN: dict[str, Callable[[Request], Selection]] = {
    "random": random_tokens,
    "repeated": repeated_tokens,
    "sampled": sampled_tokens,
}


# Texts that are always available; the last two are from this Python's standard library, and change with its version.
TEXTS: dict[str, Callable[[], str]] = {
    "natural": lambda: files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8"),
    "code": lambda: "\n".join(
        inspect.getsource(import_module(name)) for name in ("argparse", "inspect", "tarfile", "zipfile")
    ),
    "documentation": lambda: "\n".join(import_module("pydoc_data.topics").topics.values()),
}
KINDS = (*TEXTS, *DRAWN)


class Source(NamedTuple):
    """A source that was found, and how it is cut into sequences."""

    name: str  # the condition in tables
    label: str  # the name in error messages
    documents: Iterator[Document]
    cut: Cut


def open_source(source: str, dataset: str | None, option: str = "--input") -> Source:
    """Find a text that is always available, a file or a dataset; `option` named it on the command line.

    Errors in its content are raised with its documents.
    """
    if dataset is not None:
        if source != "natural":
            raise InputError(f"{option} {source} and --dataset {dataset}: give one of the two")
        name, documents = read_dataset(dataset)
        return Source(name, f"--dataset {dataset}", documents, long_heads)
    if source in TEXTS:
        label = f"{source} text"
        return Source(source, label, iter([Document(label, TEXTS[source]())]), windows)
    path = _existing_file(source)
    read, cut = FORMATS[path.suffix.lower()]
    # a file named like an input kind keeps its ending, so that tables distinguish the two
    return Source(path.name if path.stem in KINDS else path.stem, path.name, read(path), cut)


def documents(source: str, dataset: str | None = None) -> tuple[str, Iterator[str]]:
    """Return the name of a text and its documents, to train on. Some errors are raised with a document."""

    def text_of(document: Document) -> str:
        if not document.text and (document.ids is not None or document.messages is not None):
            what = "`input_ids`" if document.ids is not None else "`messages`"
            raise InputError(f"{document.where}: a record needs `text` to train on; this one has only {what}")
        return document.text

    found = open_source(source, dataset, "--text")
    return found.name, map(text_of, found.documents)


def check_source(source: str) -> None:
    """Raise InputError if there is no such input; cheap, so that it can be called before a model is loaded."""
    if source not in KINDS:
        _existing_file(source)


def _existing_file(source: str) -> Path:
    path, endings = plain_path(source), ", ".join(FORMATS)
    is_known = path.suffix.lower() in FORMATS
    kind = kind_of(path) if source else None  # an empty name would be the working directory
    if kind == "folder":
        raise InputError(f"--input {source} is a folder: give a file ({endings})")
    if kind == "file" and not is_known:
        raise InputError(f"--input {source}: the ending says what a file holds, one of {endings}")
    if kind == "file":
        check_readable(path)
        return path
    word, known, problem = source, KINDS, f"neither an input ({', '.join(KINDS)}) nor a file"
    if is_known:
        word, known = path.name, tuple(names_in(path.parent)) if kind_of(path.parent) == "folder" else ()
        problem = "no such file"
    close = closest(word, known)
    hint = "" if close is None else f"; did you mean {close}?"
    raise InputError(f"--input {source or repr(source)}: {problem}{hint}")
