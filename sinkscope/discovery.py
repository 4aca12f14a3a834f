"""Finds what a folder of the package holds: adding a file is all that adding an observable or a figure takes."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def modules_of(package: ModuleType) -> list[ModuleType]:
    """Every module of a package, imported, in the order of their names."""
    names = sorted(module.name for module in iter_modules(package.__path__))
    return [import_module(f"{package.__name__}.{name}") for name in names]
