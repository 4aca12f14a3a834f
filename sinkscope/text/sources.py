"""The registers of inputs: which names, file endings and datasets can be read, and how. A new one is one line here."""

import inspect
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from sinkscope.errors import InputError, closest
from sinkscope.options.files import check_readable, kind_of, names_in, plain_path
from sinkscope.text.readers import Document, dataset_name, read_array, read_dataset, read_json_lines, read_text
from sinkscope.text.request import Request, Selection
from sinkscope.text.sequences import heads, long_heads, random_tokens, repeated_tokens, rows, sampled_tokens, windows

Reader = Callable[[Path], Iterator[Document]]
# (documents, what error messages call the source, what was asked for) → sequences
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


def _shipped() -> str:
    return files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8")


def _code() -> str:
    return "\n".join(inspect.getsource(import_module(name)) for name in ("argparse", "inspect", "tarfile", "zipfile"))


def _documentation() -> str:
    return "\n".join(import_module("pydoc_data.topics").topics.values())


# Texts that are always there; the last two are of this Python's standard library, and change with its version.
TEXTS: dict[str, Callable[[], str]] = {"natural": _shipped, "code": _code, "documentation": _documentation}
KINDS = (*TEXTS, *DRAWN)


class Source(NamedTuple):
    """A text that was found, and how it becomes sequences."""

    name: str  # the condition in tables
    label: str  # in error messages
    documents: Iterator[Document]
    cut: Cut


def open_source(source: str, dataset: str | None, option: str = "--input") -> Source:
    """Find a text that is always there, a file or a dataset; `option` is what named it on the command line.

    Raises:
        InputError: there is no such source, or both are given. Errors of its content come with its documents.
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
    # a file named like an input kind keeps its ending, so that tables do not take one for the other
    return Source(path.name if path.stem in KINDS else path.stem, path.name, read(path), cut)


def documents(source: str, dataset: str | None = None) -> tuple[str, Iterator[str]]:
    """The name of a text and its documents, to train on.

    Raises:
        InputError: it cannot be read; some errors come only when a document is asked for.
    """
    found = open_source(source, dataset, "--text")
    return found.name, map(_text_to_train_on, found.documents)


def _text_to_train_on(document: Document) -> str:
    if not document.text and (document.ids is not None or document.messages is not None):
        what = "`input_ids`" if document.ids is not None else "`messages`"
        raise InputError(f"{document.where}: a record needs `text` to train on; this one has only {what}")
    return document.text


def check_source(source: str) -> None:
    """Raise InputError where there is no such input; cheap, so that it can be asked before a model is loaded."""
    if source not in KINDS:
        _existing_file(source)


def _existing_file(source: str) -> Path:
    path = plain_path(source)
    known = path.suffix.lower() in FORMATS
    endings = ", ".join(FORMATS)
    kind = kind_of(path) if source else None  # no name would be the working directory
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
