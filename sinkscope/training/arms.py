"""The arms of a training: a method each, as it is typed, and for trainings from scratch also a seed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sinkscope.errors import InputError
from sinkscope.options.option import as_folder_name
from sinkscope.retrofits import make_retrofit

Methods = str | Iterable[str] | Mapping[str, str]
RESERVED = ("untouched", "comparison", "figures", "tables")  # other folders of a workshop


@dataclass(frozen=True)
class Method:
    """A retrofit as it was asked for: `vga:placement=output`."""

    name: str
    parameters: Mapping[str, Any]
    called: str | None = None  # in a recipe

    @property
    def label(self) -> str:
        """Its condition in the tables."""
        if self.called is not None:
            return self.called
        return as_folder_name(self.name, *(f"{key}={value}" for key, value in self.parameters.items()))


@dataclass(frozen=True)
class Arm:
    """A method, trained once. `label` is its folder's name: the method's, and the seed where there are several."""

    method: Method
    seed: int
    label: str


def one_each(methods: Iterable[Method], seed: int) -> list[Arm]:
    """An arm a method, as a retrofit has them."""
    return [Arm(method, seed, method.label) for method in methods]


def with_seeds(methods: Iterable[Method], seeds: Iterable[int]) -> list[Arm]:
    """Every method with every seed, seed after seed: what is broken off has whole comparisons."""
    methods = list(methods)
    return [Arm(method, seed, f"{method.label}-seed{seed}") for seed in seeds for method in methods]


def parse_methods(methods: Methods) -> list[Method]:
    """NAME[:key=value,…], several behind commas, or several such texts; or one each by what it is to be called.

    Errors: InputError.
    """
    if isinstance(methods, Mapping):
        wanted = [_called(name, _parse(text)) for name, text in methods.items()]
    else:
        wanted = _parse(methods)
    if not wanted:
        raise InputError("name a method: --method NAME[:key=value,…]; `sinkscope list retrofits` shows the names")
    for method in wanted:
        make_retrofit(method.name, method.parameters)
    labels = [method.label for method in wanted]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"--method {label} is given twice")
    return wanted


def _called(name: str, methods: list[Method]) -> Method:
    if len(methods) != 1:
        raise InputError(f"method '{name}': it must be one, as vga:placement=output")
    if not name or as_folder_name(name) != name or name in RESERVED:
        raise InputError(f"'{name}' cannot be what a method is called, which is also its folder's name: choose another")
    return replace(methods[0], called=name)


def _parse(methods: str | Iterable[str]) -> list[Method]:
    found: list[tuple[str, dict[str, str]]] = []
    for text in [methods] if isinstance(methods, str) else methods:
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, colon, assigned = part.partition(":")
            if colon or "=" not in part:
                found.append((name.strip(), {}))
            else:  # the method's parameters go on
                assigned = part
            if not assigned:
                continue
            key, equals, value = assigned.partition("=")
            if not equals or not found:
                raise InputError(f"--method {text}: '{assigned}' is no key=value of a method")
            found[-1][1][key.strip().replace("-", "_")] = value.strip()
    return [Method(name, parameters) for name, parameters in found]
