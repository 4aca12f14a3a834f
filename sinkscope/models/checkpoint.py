"""The tensors of a checkpoint, read a few rows at a time: from safetensors on disk or on the hub, GGUF, or a pickle.

No model is built, so that a checkpoint may be larger than the memory. From the hub, only the headers of the shards and
the rows that are asked for are requested, by their range of bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize as unpacked
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from sinkscope.errors import InputError, SinkscopeError, explained
from sinkscope.models.files import ModelFiles, find_files, hub_error, read_settings

CHUNK = 1 << 24  # entries in memory at a time
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DAMAGED = "is damaged or cut short: download it again"
Read = Callable[[int, int], bytes]  # the bytes of a file from a first one on, up to another


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, as a matrix: all its axes but the last are rows."""

    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]  # a first row and the row after the last → these rows

    def rows(self, first: int, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield `count` rows from `first` on in float32, (n, columns), with their places among these rows."""
        step = max(1, CHUNK // self.shape[-1])
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            yield part, self.read(first + part.start, first + part.stop).float()


def open_checkpoint(
    model: str | None, revision: str | None, gguf_file: str | None, allow_pickle: bool
) -> tuple[ModelFiles, Mapping[str, Any], Mapping[str, Stored]]:
    """Return files, config.json ({} for GGUF) and tensors of a folder, a .gguf file, a hub id or (None) the demo model.

    Raises:
        InputError: there is no such model, it is damaged, or its weights are pickles, which are not allowed.
        SinkscopeError: the hub cannot be reached.
    """
    files = find_files(model, revision, gguf_file, allow_pickle, in_part=True)
    if files.gguf:
        with explained(f"{files.source} {DAMAGED}", (ValueError, OSError, IndexError)):
            return files, {}, {tensor.name: _of_gguf(tensor) for tensor in GGUFReader(files.gguf).tensors}
    tensors: dict[str, Stored] = {}
    for name in files.weights:
        path = files.folder / name
        if path.suffix == ".safetensors":
            is_here = path.exists() or files.commit is None
            read = partial(_read_file, path) if is_here else partial(_read_remote, files, name)
            tensors |= _of_safetensors(f"{files.source}: {name}", read)
        else:  # mapped into memory, and nothing but tensors
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            tensors |= {name: _of_tensor(x.detach()) for name, x in loaded.items()}
    return files, read_settings(files.folder / "config.json"), tensors


def _read_file(path: Path, first: int, last: int) -> bytes:
    with explained(f"{path} cannot be read", OSError), path.open("rb") as file:
        file.seek(first)  # the file is not mapped into memory, where its pages would count as this process's
        return file.read(last - first)


def _read_remote(files: ModelFiles, name: str, first: int, last: int) -> bytes:
    url, headers = hf_hub_url(files.source, name, revision=files.commit), build_hf_headers()
    try:
        response = http_backoff("GET", url, headers=headers | {"Range": f"bytes={first}-{last - 1}"})
        hf_raise_for_status(response)
    except Exception as error:
        raise hub_error(files.source, files.commit, error) from error
    if response.status_code != 206:
        raise SinkscopeError(f"{url} sends no parts of files: download {files.source}, and name its folder")
    return response.content


def _of_safetensors(source: str, read: Read) -> dict[str, Stored]:
    """Return the tensors that a header lists: 8 bytes with its length, then JSON."""

    def stored(dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
        def rows(first: int, last: int) -> torch.Tensor:
            if dtype not in DTYPES:
                raise InputError(f"{source} has packed weights ({dtype}): scan full precision, or a GGUF file")
            size, begin = shape[-1] * DTYPES[dtype].itemsize, start + data_offsets[0]
            content = bytearray(read(begin + first * size, begin + last * size))
            with explained(f"{source} {DAMAGED}", (ValueError, RuntimeError)):
                return torch.frombuffer(content, dtype=DTYPES[dtype]).view(last - first, shape[-1])

        return Stored(tuple(shape), rows)

    with explained(f"{source} {DAMAGED}", (ValueError, TypeError)):
        start = 8 + int.from_bytes(read(0, 8), "little")
        return {name: stored(**entry) for name, entry in json.loads(read(8, start)).items() if name != "__metadata__"}


def _of_gguf(tensor: Any) -> Stored:
    data, kind = tensor.data.reshape(-1, tensor.data.shape[-1]), tensor.tensor_type
    shape = tuple(map(int, reversed(tensor.shape)))  # GGUF names the last axis first
    return Stored(shape, lambda first, last: torch.from_numpy(np.array(unpacked(data[first:last], kind))))


def _of_tensor(x: torch.Tensor) -> Stored:
    return Stored(tuple(x.shape), lambda first, last: x.reshape(-1, x.shape[-1])[first:last])
