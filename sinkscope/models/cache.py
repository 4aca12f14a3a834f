"""The cache in which the hub's files stand: whether there is room for more, and how a model leaves it."""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import constants, get_cached_repo_tree, scan_cache_dir
from huggingface_hub.errors import CachedRepoTreeNotFoundError, CacheNotFound

from sinkscope.errors import SinkscopeError

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # of the first kind that a repository has, all are read
SPARE = 1 << 28  # bytes that a download leaves free
TWIN = "-hf"  # behind the name of a repository in the original Llama layout


def free_room() -> int:
    """Bytes that are free on the disk of the cache."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    return shutil.disk_usage(there).free


def missing(repo: str, folder: Path, names: Iterable[str]) -> int:
    """Bytes of these files of a snapshot that are not in it yet; 0 where the hub has not said how large they are."""
    wanted = {name for name in names if not (folder / name).exists()}
    return sum(size for name, size in _sizes(repo, folder).items() if name in wanted)


def missing_weights(repo: str, folder: Path) -> int:
    """Bytes of the weights of a repository that are not here yet."""
    sizes = _sizes(repo, folder)
    kinds = ([name for name in sizes if fnmatch(name, kind)] for kind in WEIGHTS)
    return missing(repo, folder, next((names for names in kinds if names), ()))


def _sizes(repo: str, folder: Path) -> dict[str, int]:
    try:
        return {file.path: file.size for file in get_cached_repo_tree(repo, revision=folder.name)}
    except CachedRepoTreeNotFoundError:  # offline, and other software filled the cache
        return {}


def check_room(repo: str, folder: Path, names: Iterable[str]) -> None:
    """Raise SinkscopeError, before a download begins, where the disk cannot hold it."""
    needed, free = missing(repo, folder, names), free_room()
    if needed and needed + SPARE > free:
        raise SinkscopeError(
            f"downloading {repo} takes {gigabytes(needed)}, and the disk of {constants.HF_HUB_CACHE} has "
            f"{gigabytes(free)} left: make room, or set HF_HOME to a folder on another disk"
        )


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GB"


def evict(repo: str, revision: str | None) -> int:
    """Remove a model at one revision from the cache, but for files that another revision shares.

    Returns:
        The bytes that are free again.
    """
    try:
        cached = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return 0
    name, freed = revision or "main", 0
    for each in cached.repos:
        commits = [at.commit_hash for at in each.revisions if name in at.refs or at.commit_hash == name]
        if commits and each.repo_type == "model" and each.repo_id in (repo, f"{repo}{TWIN}"):
            leaving = replace(cached, repos=frozenset([each])).delete_revisions(*commits)
            leaving.execute()
            freed += leaving.expected_freed_size
    return freed
