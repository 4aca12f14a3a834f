"""Inputs that are passed as objects in Python: prompts, token ids, chats, or a dataset."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BeforeValidator

DATASET = "dataset"
KINDS = {"text": "prompts", "messages": "chats", "input_ids": "token-ids"}  # entry of a record → what such records are
OBJECTS = (*KINDS.values(), DATASET)


class Given:
    """Documents that were passed as objects: each is a record with the entries of a line of a JSON lines file.

    Its text is what they are, one of OBJECTS: their name in run.json, which does not contain them.
    """

    def __init__(self, thing: Any) -> None:
        """Take texts, token ids (also tensors, arrays or the output of a tokenizer), chats, records or a dataset.

        Raises ValueError for anything else.
        """
        self.documents: Iterable[Any] = thing
        self.kind, self.count = DATASET, 0  # the number of documents; 0 for a dataset, which is not read to its end
        if hasattr(thing, "column_names") and not isinstance(thing, Mapping):  # of the library `datasets`
            return
        try:
            records = [_record(item) for item in _items(thing)]
        except TypeError:
            raise ValueError(f"a {type(thing).__name__} is neither texts, token ids, chats nor a dataset") from None
        if not records:
            raise ValueError("it is empty")
        self.documents, self.count = records, len(records)
        self.kind = next((kind for entry, kind in KINDS.items() if entry in records[0]), "records")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_record, self.documents)

    def __str__(self) -> str:
        return self.kind


def _items(thing: Any) -> list[Any]:
    """Return the documents of a list; a single list of ids, a single chat or record is one."""
    if isinstance(thing, Mapping):
        ids, mask = _plain(thing.get("input_ids")), _plain(thing.get("attention_mask"))
        if not ids or not isinstance(ids[0], Sequence):
            return [thing]
        masks = [{}] * len(ids) if mask is None else [{"attention_mask": row} for row in mask]
        return [{"input_ids": row, **own} for row, own in zip(ids, masks, strict=True)]
    items = [_plain(item) for item in _plain(thing)]
    is_one = items and (isinstance(items[0], int) or (isinstance(items[0], Mapping) and "role" in items[0]))
    return [items] if is_one else items


def _record(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    if not isinstance(item, Mapping):
        items = list(item)
        return {"messages" if items and isinstance(items[0], Mapping) else "input_ids": items}
    record = {name: _plain(value) for name, value in item.items()}
    mask = record.pop("attention_mask", None)
    if mask is not None and "input_ids" in record:  # without padding
        record["input_ids"] = [token for token, seen in zip(record["input_ids"], mask, strict=True) if seen]
    return record


def _plain(thing: Any) -> Any:
    """Return a tensor, an array or a column as a list, and anything else as it is."""
    return thing.tolist() if hasattr(thing, "tolist") else thing


def _as_input(source: Any) -> Any:
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    return source if isinstance(source, str | Given) else Given(source)


as_input = BeforeValidator(_as_input, json_schema_input_type=os.PathLike[str] | Iterable[Any])
