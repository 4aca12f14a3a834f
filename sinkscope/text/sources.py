"""The registers of inputs: which names, file endings and datasets can be read, and how. A new one is one line here.

The library `datasets` reads datasets, but not single files: its JSON reader turns dates into `datetime` and integers
next to 6.0 into floats and names no line in its errors; its text reader rewrites line ends and keeps a byte order mark.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from sinkscope.errors import InputError, closest, one_line
from sinkscope.options.files import check_readable, kind_of, names_in, plain_path
from sinkscope.text.sequences import (
    Document,
    Request,
    Selection,
    heads,
    long_heads,
    random_tokens,
    repeated_tokens,
    rows,
    sampled_tokens,
    windows,
)


def _of_characters(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can spell but no tokenizer accepts."""
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


def dataset_name(spec: str) -> str:
    """Return the name of a dataset NAME[:CONFIG[:SPLIT]] in tables: its NAME, or the last part of a folder's path."""
    name = _dataset_parts(spec)[0]
    path = plain_path(name)
    return name if kind_of(path) is None else path.resolve().name


def read_dataset(spec: str) -> Iterator[Document]:
    """Read the documents of a dataset NAME[:CONFIG[:SPLIT]], downloading it as documents are taken."""
    label = f"--dataset {spec}"
    name, config, split = _dataset_parts(spec)
    column: str | None = None
    for record in _dataset_records(name, config, split, label):
        if column is None:  # from the first record: the `features` of a streamed dataset are not always known before
            strings = [name for name, value in record.items() if isinstance(value, str)]
            if "text" not in strings and len(strings) != 1:
                found = f"{len(strings)} columns of strings" if strings else "no column of strings"
                among = f"and {found}, among {_keys(record)}"
                raise InputError(f"{label}: no column `text`, {among}; take another dataset")
            column = "text" if "text" in strings else strings[0]
        if isinstance(record.get(column), str):  # a missing document is None
            try:
                text = _of_characters(record[column])
            except ValueError as error:
                raise InputError(f"{label}: {error}") from None
            yield Document(label, text)


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


def _dataset_parts(spec: str) -> tuple[str, str | None, str]:
    name, *rest = spec.split(":")
    if not name or len(rest) > 2:
        raise InputError(f"--dataset {spec}: it is written NAME, NAME:CONFIG or NAME:CONFIG:SPLIT")
    config, split = (*rest, "", "")[:2]
    return name, config or None, split or "train"


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


# Texts that are always available; the last two are of this Python's standard library, and change with its version.
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

    Raises:
        InputError: there is no such source, or both are given. Errors in its content are raised with its documents.
    """
    if dataset is not None:
        if source != "natural":
            raise InputError(f"{option} {source} and --dataset {dataset}: give one of the two")
        return Source(dataset_name(dataset), f"--dataset {dataset}", read_dataset(dataset), long_heads)
    if source in TEXTS:
        label = f"{source} text"
        return Source(source, label, iter([Document(label, TEXTS[source]())]), windows)
    path = _existing_file(source)
    read, cut = FORMATS[path.suffix.lower()]
    # a file named like an input kind keeps its ending, so that tables distinguish the two
    return Source(path.name if path.stem in KINDS else path.stem, path.name, read(path), cut)


def documents(source: str, dataset: str | None = None) -> tuple[str, Iterator[str]]:
    """Return the name of a text and its documents, to train on.

    Raises:
        InputError: it cannot be read; some errors are raised only when a document is read.
    """

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
    path = plain_path(source)
    known = path.suffix.lower() in FORMATS
    endings = ", ".join(FORMATS)
    kind = kind_of(path) if source else None  # an empty name would be the working directory
    if kind == "folder":
        raise InputError(f"--input {source} is a folder: give a file ({endings})")
    if kind == "file":
        if not known:
            raise InputError(f"--input {source}: the ending says what a file holds, one of {endings}")
        check_readable(path)
        return path
    if known:
        siblings = names_in(path.parent) if kind_of(path.parent) == "folder" else []
        raise InputError(f"--input {source}: no such file{_did_you_mean(path.name, siblings)}")
    raise InputError(
        f"--input {source or repr(source)}: neither an input ({', '.join(KINDS)}) nor a file"
        + _did_you_mean(source, KINDS)
    )


def _did_you_mean(word: str, known: Collection[str]) -> str:
    close = closest(word, known)
    return "" if close is None else f"; did you mean {close}?"
