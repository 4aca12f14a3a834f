"""Finds what a folder of the package holds: adding a file is all that adding an observable or a figure takes."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def modules_of(package: ModuleType) -> list[ModuleType]:
    """Every module of a package, imported, in the order of their names."""
    names = sorted(module.name for module in iter_modules(package.__path__))
    return [import_module(f"{package.__name__}.{name}") for name in names]


def named_subclasses(package: ModuleType, base: type) -> dict[str, Any]:
    """Name → every subclass of `base` that a module of the package defines and gives a name."""
    return {
        item.name: item
        for module in modules_of(package)
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, base) and item.__module__ == module.__name__
        if hasattr(item, "name")
    }
