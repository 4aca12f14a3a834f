"""Plugins: other packages that add to the registers. Each has an entry point of the group `sinkscope.plugins`.

An entry point names a function, which is called once, when a register is first read by a command:

    def register(plugin: Plugin) -> None:
        plugin.add(OBSERVABLES, Dominance)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from traceback import walk_tb
from typing import Any

from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory, one_line, was_interrupted

GROUP = "sinkscope.plugins"
CHOSEN = "SINKSCOPE_PLUGINS"  # environment variable: the names of the plugins to load, with commas; unset: all

_loaded: list[EntryPoint] = []
_packages: dict[tuple[int, str], str] = {}  # register (by id) and name of an entry → the package that added it


class Plugin:
    """What one package adds to the registers. It is added when the package's function has returned."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._entries: list[tuple[dict[str, Any], str, Any]] = []

    def add(self, register: dict[str, Any], entry: Any, name: str = "") -> None:
        """Add an entry to a register, under `name` or else the entry's own name. Raises InputError if it is taken."""
        name = name or (entry.id if hasattr(entry, "id") else entry.name)
        if name in register:
            raise InputError(f"the name '{name}' is taken by {package_of(register, name) or 'sinkscope'}")
        self._entries.append((register, name, entry))

    def commit(self) -> None:
        """Add the entries to their registers, in order: the last one of a name counts."""
        for register, name, entry in self._entries:
            register[name] = entry
            _packages[id(register), name] = self._package


WITHOUT = f"uninstall it, or set {CHOSEN} to the names of the plugins to load (`{CHOSEN}=` loads none)"


def load_plugins() -> None:
    """Load the plugins that are installed, each once.

    Raises InputError, which names the package, if one cannot be loaded; the registers are then without it.
    """
    for point in installed():
        if point in _loaded:
            continue
        plugin = Plugin(_package(point))
        try:
            point.load()(plugin)
        except Exception as error:
            failed = f"plugin '{point.name}' of {_package(point)} failed [{described(error)}]"
            raise InputError(f"{failed}: {WITHOUT}") from error
        plugin.commit()
        _loaded.append(point)


@cache
def installed(group: str = GROUP) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group that are to be loaded, by name."""
    names, points = os.environ.get(CHOSEN), sorted(entry_points(group=group), key=lambda point: point.name)
    return tuple(point for point in points if names is None or point.name in names.split(","))


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def plugin_versions() -> dict[str, str]:
    """Return the packages of the plugins that are loaded, with their versions."""
    return {point.dist.name: point.dist.version for point in _loaded if point.dist}


def package_with(module: str) -> str:
    """Return the package and version of the loaded plugin that a Python module belongs to; "" if it belongs to none."""
    root = module.partition(".")[0]
    return next((_package(point) for point in _loaded if point.module.partition(".")[0] == root), "")


def package_of(register: dict[str, Any], name: str) -> str:
    """Return the package and version of the plugin that added an entry to a register; "" for one of sinkscope."""
    return _packages.get((id(register), name), "")


def plugin_of(error: BaseException) -> str:
    """Return the package of the plugin whose code was running when an error was raised; "" if none was."""
    ran = [package_with(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    return next(filter(None, reversed(ran)), "")


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return what made a command fail, and what is to be added on a command line ("": nothing)."""
    if isinstance(error, SinkscopeError):
        return str(error), ""
    if is_out_of_memory(error):
        return "memory ran out: take a shorter --seq-len, --dtype bfloat16 or --device-map auto", ""
    gist, kind = one_line(error, 300), type(error).__name__
    if package := plugin_of(error):
        return f"the plugin {package} failed [{kind}: {gist}]", f"--debug shows where; {WITHOUT}"
    if isinstance(error, OSError):
        return gist, "--debug shows where"
    return f"unexpected {kind}: {gist}", "--debug shows where; please report it"


@contextmanager
def naming_plugin(register: dict[str, Any], name: str) -> Iterator[None]:
    """Name the plugin that added an entry of a register in every error that the entry causes."""
    try:
        yield
    except Exception as error:
        package = package_of(register, name)
        is_named = isinstance(error, SinkscopeError) or is_out_of_memory(error) or was_interrupted(error)
        if not package or is_named:
            raise
        raise SinkscopeError(f"'{name}' of the plugin {package} failed [{described(error)}]: {WITHOUT}") from error
