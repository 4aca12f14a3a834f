"""The arms of a training: each is a method and a seed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.family import Family
from sinkscope.models.in_memory import drawing
from sinkscope.options.option import as_folder_name, split_names
from sinkscope.options.spec import assignments
from sinkscope.retrofits import make_retrofit, retrofit_model

Methods = str | Iterable[str] | Mapping[str, str]
RESERVED = ("untouched", "comparison", "figures", "tables")  # folders next to the folders of the arms


@dataclass(frozen=True)
class Method:
    """A retrofit with its parameters as typed, such as `vga:placement=output`."""

    name: str
    parameters: Mapping[str, Any]
    called: str | None = None  # its label, if one was given

    def built_into(self, model: PreTrainedModel, family: Family, seed: int) -> PreTrainedModel:
        """Build the method into a model in place; the seed determines its random initial values."""
        with drawing(seed):
            return retrofit_model(model, family, self.name, **self.parameters)

    @property
    def label(self) -> str:
        """The method's `condition` in the tables."""
        if self.called is not None:
            return self.called
        return as_folder_name(self.name, *(f"{key}={value}" for key, value in self.parameters.items()))


@dataclass(frozen=True)
class Arm:
    """One training of a method. `label`, also its folder, is the method's label, with the seed if there are several."""

    method: Method
    seed: int
    label: str


def arms_of(methods: Iterable[Method], seed: int, seeds: int = 1) -> list[Arm]:
    """Return an arm for each method and seed, seed by seed, so that an interrupted training can be compared."""
    if seeds == 1:
        return [Arm(method, seed, method.label) for method in methods]
    methods = list(methods)
    return [Arm(method, at, f"{method.label}-seed{at}") for at in range(seed, seed + seeds) for method in methods]


def parse_methods(methods: Methods) -> list[Method]:
    """Parse methods as typed: NAME[:key=value,…], several separated by commas, several texts, or label → method.

    Raises InputError if a method, a parameter or a label is wrong, or a method is given twice.
    """
    wanted = [] if isinstance(methods, Mapping) else _parse(methods)
    for name, text in methods.items() if isinstance(methods, Mapping) else ():
        if len(found := _parse(text)) != 1:
            raise InputError(f"method '{name}': it must be one method, such as vga:placement=output")
        if not name or as_folder_name(name) != name or name in RESERVED:
            raise InputError(f"'{name}' cannot be the label of a method, which is also a folder: choose another")
        wanted.append(replace(found[0], called=name))
    if not wanted:
        raise InputError("name a method: --method NAME[:key=value,…]; `sinkscope list retrofits` shows the names")
    for method in wanted:
        make_retrofit(method.name, method.parameters)
    labels = [method.label for method in wanted]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"--method {label} is given twice")
    return wanted


def _parse(methods: str | Iterable[str]) -> list[Method]:
    found: list[tuple[str, dict[str, str]]] = []
    for text in [methods] if isinstance(methods, str) else methods:
        for part in split_names(text):
            name, colon, assigned = part.partition(":")
            if colon or "=" not in part:
                found.append((name.strip(), {}))
            else:  # one more parameter of the last method
                assigned = part
            for key, value in assignments(assigned):
                if value is None or not found:
                    raise InputError(f"--method {text}: '{assigned}' is no key=value of a method")
                found[-1][1][key] = value
    return [Method(name, parameters) for name, parameters in found]
