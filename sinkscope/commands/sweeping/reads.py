"""Digests of the files that a cell reads, computed without loading a model. A cell is done while they are unchanged."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, dataset_info

from sinkscope.errors import SinkscopeError
from sinkscope.models.adapters import ADAPTER_CONFIG, find_adapter
from sinkscope.models.files import SMALL_FILES, fetch, find_settings, is_on_hub, quiet
from sinkscope.options.files import kind_of, names_in, user_path
from sinkscope.options.measuring import DEMO_NAME
from sinkscope.results.manifest import MANIFEST
from sinkscope.text.sources import DRAWN, TEXTS


class Reads:
    """Compute digests; each file is read only once, so that all cells are compared with the same state of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str | None] = {}

    def of(self, options: Any) -> dict[str, str]:
        """Map each input of a command with these options to its digest, or to its commit on the hub.

        Inputs that cannot be found now are omitted: nothing could be measured with them either. Tokens drawn from a
        seed have no digest, since the options hold the seed.
        """
        asked: dict[str, tuple[Any, ...]] = {}
        if hasattr(options, "model"):
            asked[f"model {options.model or DEMO_NAME}"] = (
                _of_model, options.model, getattr(options, "revision", None), getattr(options, "gguf_file", None),
            )  # fmt: skip
        for name, find in _DIGEST_OF.items():
            given = getattr(options, name, None)
            is_read = find is not _of_text or getattr(options, "dataset", None) is None
            if given is not None and is_read:
                asked[f"{name} {given}"] = (find, given)
        for folder in getattr(options, "from_", None) or ():
            asked[f"run {folder}"] = (_of_files, (Path(folder) / MANIFEST,))
        return {what: digest for what, source in asked.items() if (digest := self._digest(*source)) is not None}

    def _digest(self, find: Callable[..., str | None], *source: Any) -> str | None:
        key = (find, *source)
        if key not in self._known:
            try:
                with quiet():
                    self._known[key] = find(*source)
            except (SinkscopeError, OSError):  # the error is reported when the cell is measured
                self._known[key] = None
        return self._known[key]


def changes(before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """Return why a cell must be measured again; "" if its inputs are unchanged."""
    if before is None:
        return "it was made by an older sinkscope, which did not record what it read"
    changed = [what for what, digest in now.items() if before.get(what) != digest]
    return f"{', '.join(changed)} changed since" if changed else ""


def _of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _of_model(model: str | None, revision: str | None, gguf_file: str | None) -> str:
    if is_on_hub(model):
        return fetch(str(model), revision, ["config.json"])[0].name
    files = find_settings(model, revision, gguf_file)
    if files.commit is not None:
        return files.commit
    is_folder = model is not None and kind_of(user_path(model)) == "folder"
    return _of_files([*_small(files.folder if is_folder else None), *(files.folder / name for name in files.weights)])


def _small(folder: Path | None) -> list[Path]:
    """Return the files of a model with settings, tokenizer and code."""
    return [] if folder is None else [folder / name for name in names_in(folder) if name.endswith(SMALL_FILES)]


def _of_adapter(adapter: str) -> str:
    files = find_adapter(adapter, allow_pickle=True)
    return files.commit or _of_files([files.folder / ADAPTER_CONFIG, files.folder / files.weights])


def _of_tokenizer(source: str) -> str:
    if kind_of(user_path(source)) == "folder":
        return _of_files(_small(user_path(source)))
    return fetch(source, None, [f"*{ending}" for ending in SMALL_FILES])[0].name


def _of_text(source: str) -> str | None:
    """Return None for tokens drawn from a seed and for tasks."""
    if source in TEXTS:
        return hashlib.sha256(TEXTS[source]().encode()).hexdigest()
    return None if source in DRAWN else _of_path(source)


def _of_path(source: str) -> str | None:
    """Return the digest of a file or of all files of a folder; None if it does not exist."""
    path = user_path(source)
    kind = kind_of(path)
    if kind is None:
        return None
    return _of_files([path] if kind == "file" else [each for each in path.rglob("*") if each.is_file()])


def _of_dataset(spec: str) -> str | None:
    name = spec.partition(":")[0]
    if kind_of(user_path(name)) is not None:
        return _of_path(name)
    try:
        return None if constants.is_offline_mode() else dataset_info(name).sha
    except Exception:  # an error of the hub or the network
        return None


def _of_config(source: str) -> str | None:
    """Return None for the name of an architecture."""
    path = user_path(source)
    return _of_path(str(path / "config.json" if kind_of(path) == "folder" else path))


# option → the function that computes the digest of its value; a dataset replaces the text
_DIGEST_OF: dict[str, Callable[[str], str | None]] = {
    "dataset": _of_dataset,
    "input": _of_text,
    "text": _of_text,
    "adapter": _of_adapter,
    "tokenizer": _of_tokenizer,
    "config": _of_config,
    "task_path": _of_path,
}
