"""Inputs that are passed as objects in Python: prompts, token ids, chats, a dataset or a DataFrame."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BeforeValidator

from sinkscope.errors import InputError
from sinkscope.options.records import LAYOUT, OTHER_LAYOUTS, Document, documents_of

DATASET = "dataset"
# entry of a record → what such records are
RECORD_KINDS = {"text": "prompts", "messages": "chats", "input_ids": "token-ids"}
OBJECTS = (*RECORD_KINDS.values(), DATASET)


class Given:
    """Documents that were passed as objects: each is a record with the entries of a line of a JSON lines file.

    `str(given)` is the kind of the documents, one of OBJECTS. run.json has this name, and not the documents.
    """

    def __init__(self, thing: Any) -> None:
        """Take texts, token ids (also tensors, arrays or the output of a tokenizer), chats, records or a dataset.

        Raises ValueError for an object of any other type, and InputError for a wrong record.
        """
        self.documents: list[Document] = []  # empty for a dataset, which is not read to its end
        self.kind, self._rows = DATASET, _dataset_rows(thing)
        if self._rows is not None:
            return
        if isinstance(thing, Mapping):
            if _is_of(thing, "datasets"):
                raise ValueError(f"it has the splits {', '.join(map(str, thing))}: give one of them")
            items: Any = _of_batch(thing)
        else:
            items = _as_list(thing)
            # an iterator that Python itself makes: others, such as an open file, may yield anything
            if isinstance(items, Iterator) and type(items).__module__ in ("builtins", "itertools"):
                items = [_as_list(item) for item in items]
            if not isinstance(items, list):
                what = "neither texts, token ids, chats nor a dataset"
                raise ValueError(f"a {type(thing).__name__} is {what}: give a list of them, a dataset or a DataFrame")
            if items and (isinstance(items[0], int) or (isinstance(items[0], Mapping) and "role" in items[0])):
                items = [items]  # a single list of ids, or a single chat
        if not items:
            raise ValueError("it is empty")
        for number, item in enumerate(items):
            self.documents += documents_of(_as_record(item, f"input[{number}]: "), f"input[{number}]")
        self.kind = RECORD_KINDS[self.documents[0].entry]

    @property
    def count(self) -> int:
        """The number of documents; 0 for a dataset."""
        return len(self.documents)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the records of a dataset; a batch, as a DataLoader gives it, is one for each of its rows."""
        for number, row in enumerate(self._rows() if self._rows is not None else ()):
            where = f"input, row {number}: "
            yield from (_as_record(item, where) for item in (_of_batch(row) if isinstance(row, Mapping) else [row]))

    def __str__(self) -> str:
        return self.kind


def _dataset_rows(thing: Any) -> Callable[[], Iterable[Any]] | None:
    """Return a function that reads the rows of a dataset (of `datasets` or of torch) or a DataFrame; None if it is
    something else.
    """
    if isinstance(thing, Mapping):
        return None
    if _is_of(thing, "datasets") and hasattr(thing, "__iter__") and not isinstance(thing, Sequence):
        return lambda: thing
    if _is_of(thing, "torch.utils.data"):
        # the `__getitem__` of an IterableDataset fails, though it may have a length
        is_indexed = hasattr(thing, "__len__") and not hasattr(thing, "__iter__")
        return (lambda: (thing[row] for row in range(len(thing)))) if is_indexed else lambda: thing
    if _is_of(thing, "pandas") and hasattr(thing, "columns"):
        if not len(thing):
            raise ValueError("it is empty")
        # a missing text is NaN there
        return lambda: thing.astype(object).where(thing.notna(), None).to_dict("records")
    return None


def _is_of(thing: Any, library: str) -> bool:
    """Return whether a class of the library, or one that is derived from it, made an object."""
    return any(f"{base.__module__}.".startswith(f"{library}.") for base in type(thing).__mro__)


def _of_batch(thing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of a batch, such as the output of a tokenizer; anything else is one record."""
    ids = _as_list(thing.get("input_ids"))
    if not ids or not isinstance(ids, list) or not isinstance(ids[0], list):
        return [thing]
    of_rows = {name: rows for name in LAYOUT if (rows := _as_list(thing.get(name))) is not None}
    for name, rows in of_rows.items():
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise InputError(f"input: `{name}` is not one row for each of the {len(ids)} rows of `input_ids`")
    of_all = {name: thing[name] for name in OTHER_LAYOUTS if name in thing}
    return [
        {"input_ids": row} | of_all | {name: rows[index] for name, rows in of_rows.items()}
        for index, row in enumerate(ids)
    ]


def _as_record(item: Any, where: str) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Mapping):
        return {str(name): _as_list(value) for name, value in item.items()}
    items = _as_list(item)
    if not isinstance(items, list):
        raise InputError(f"{where}a {type(item).__name__} is neither a text, token ids, a chat nor a record")
    return {"messages" if items and isinstance(items[0], Mapping) else "input_ids": items}


def _as_list(thing: Any) -> Any:
    """Return a tensor, an array, a column or a sequence as a list, and anything else as it is."""
    if isinstance(thing, str | int | Mapping | bytes | bytearray | memoryview):
        return thing
    thing = thing.tolist() if hasattr(thing, "tolist") else thing
    return [_as_list(part) for part in thing] if isinstance(thing, Sequence) else thing


def _as_input(source: Any) -> Any:
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    return source if isinstance(source, str | Given) else Given(source)


as_input = BeforeValidator(_as_input, json_schema_input_type=os.PathLike[str] | Iterable[Any])
