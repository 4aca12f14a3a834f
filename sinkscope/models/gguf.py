"""GGUF files read once for each model: transformers reads one for the configuration, the weights and the tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np


class _Reader(gguf.GGUFReader):
    """gguf's reader over a plain array: most of its time goes into indexing numpy's memmap, string by string."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


@contextmanager
def read_once() -> Iterator[None]:
    """Within it, transformers gets the same reader of a file every time that it asks for one, and the same table of
    names, which takes half of the whole time to make for every module anew.
    """
    readers: dict[Path, _Reader] = {}

    def reader(path: str | Path) -> _Reader:
        place = Path(path)
        if place not in readers:
            readers[place] = _Reader(place)
        return readers[place]

    patched = {"GGUFReader": reader, "get_tensor_name_map": cache(gguf.get_tensor_name_map)}
    before = {name: getattr(gguf, name) for name in patched}
    try:
        _set(patched)
        yield
    finally:
        _set(before)


def _set(attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(gguf, name, value)
