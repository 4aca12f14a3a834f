"""Sweeps: models × revisions × inputs × settings × commands as one YAML file (recipes/sweeps/README.md has its format).

Each combination is a cell: an ordinary command with its options. More specific options override others, in this order:
those of the file, the command, the model, the input, the setting, and the command line. Options under `quick` replace
all others with --quick, and equal cells are merged; fields of a `config` are added to those that a cell has.

A file that `extends` another has its options, quick form and figures, as far as it does not name others.

`retrofit`, `train` and `benchmark` do not read the inputs, use only their own settings, and ignore shared options that
they do not have. `train` begins without a model: its cells are not repeated for each model.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sinkscope.errors import InputError, one_line, unknown
from sinkscope.options.files import kind_of, named_file, read_yaml, user_path
from sinkscope.options.measuring import DEMO_NAME, PERMISSIONS
from sinkscope.options.option import Options, as_folder_name, checked
from sinkscope.options.recipe import find_recipe, known_recipes, named
from sinkscope.options.register import options_by_command, records

TRAINING = ("retrofit", "train")
TOGETHER = "together"  # the key of settings whose values are several options each
LONGEST_CELL_NAME = 120  # characters in front of its checksum
CHECKSUM = 10  # characters of the checksum
MOST_CELLS = 100_000


class FilePart(BaseModel):
    """A part of the file. A key with an empty value is ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return {} if content is None else content
        return {key: value for key, value in content.items() if value is not None}


class ModelEntry(FilePart):
    """One model; the demo model if `model` is missing."""

    model: str | None = None
    name: str = ""  # its name in tables and figures
    revisions: tuple[str, ...] = ()  # branches or tags of the hub, or subfolders of a folder
    instead: dict[str, str | None] = {}  # another input for this model; None leaves it out
    options: dict[str, Any] = {}
    family: str | None = None  # its models are compared by size
    base: str | None = None  # the name of the model that this was tuned from
    paper: str | None = None  # its name in WSE table 1

    @field_validator("revisions", mode="before")
    @classmethod
    def _as_texts(cls, revisions: Any) -> Any:
        return [str(one) for one in revisions] if isinstance(revisions, list) else revisions

    @property
    def label(self) -> str:
        path = Path(self.model or DEMO_NAME)
        return self.name or (path.stem if path.suffix == ".gguf" else path.name)


class CommandEntry(FilePart):
    """The options of a command; `inputs` and `settings` replace those of the file."""

    inputs: tuple[str, ...] | None = None
    settings: dict[str, list[Any]] | None = None
    options: dict[str, Any] = {}


class SweepContent(FilePart):
    """The content of the file."""

    title: str
    reproduces: str | None = None
    extends: str | None = None  # another sweep
    models: tuple[ModelEntry, ...] = ()
    inputs: dict[str, dict[str, Any]] = {"natural": {}}  # names of --input, or a name with options each
    settings: dict[str, list[Any]] = {}  # option → its values; all combinations
    commands: dict[str, CommandEntry] = Field({"analyze": CommandEntry()}, validate_default=True)
    options: dict[str, Any] = {}  # for all cells
    quick: dict[str, Any] = {}
    figures: tuple[str, ...] = ()  # for every cell; without it, no figure is drawn

    @field_validator("models", mode="before")
    @classmethod
    def _names_alone(cls, models: Any) -> Any:
        """Accept a model that is given by its name only."""
        listed = [{"model": one} if isinstance(one, str) else one for one in models] if models else models
        if listed == []:
            raise ValueError("name at least one model")
        return listed

    @field_validator("inputs", "commands", mode="before")
    @classmethod
    def _listed(cls, entries: Any) -> Any:
        """Accept a list, such as `[natural, random]`, and names without a value."""
        if isinstance(entries, str):
            entries = [entries]
        if isinstance(entries, list):
            entries = dict.fromkeys(map(str, entries))
        if entries == {}:
            raise ValueError("name at least one")
        if not isinstance(entries, dict):
            return entries
        return {name: {} if value is None else value for name, value in entries.items()}

    @field_validator("commands")
    @classmethod
    def _known_commands(cls, commands: dict[str, CommandEntry]) -> dict[str, CommandEntry]:
        for name, entry in commands.items():
            if name not in cell_kinds():
                raise ValueError(unknown(name, cell_kinds()))
            if entry.inputs is not None and "input" not in cell_kinds()[name].model_fields:
                instead = "`tasks`" if name == "benchmark" else "`text`"
                raise ValueError(f"{name} reads no inputs: name its {instead} under `options`")
        return commands

    @model_validator(mode="after")
    def _check_references(self) -> "SweepContent":
        labels = [entry.label for entry in self.models]
        if bool(self.models) == (self.commands.keys() == {"train"}):
            raise ValueError("`train` begins without `models`" if self.models else "it has no `models`")
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two models are called {label}: give one of them another `name`")
        for entry in self.models:
            if entry.base is not None and entry.base not in labels:
                raise ValueError(f"the `base` of {entry.label} {unknown(entry.base, labels)}")
        named_inputs = [("instead", entry.label, tuple(entry.instead)) for entry in self.models]
        named_inputs += [("inputs", command, entry.inputs or ()) for command, entry in self.commands.items()]
        for key, owner, names in named_inputs:
            for name in names:
                if name not in self.inputs:
                    raise ValueError(f"`{key}` of {owner}: {unknown(name, self.inputs)}")
        return self


def cell_kinds() -> dict[str, type[Options]]:
    """Return the commands that a cell can be, with their options."""
    return {name: kind for name, kind in options_by_command().items() if records()[name].of_cells}


@dataclass(frozen=True)
class Cell:
    """One combination: a command with its options."""

    name: str  # the name of its folder, which is the same for the same options and differs for others
    entry: ModelEntry  # its model in the file
    revision: str | None  # this and the next three are its coordinates in the grid, for tables and messages
    input: str
    setting: str
    command: str
    options: Any  # the options of the command

    @property
    def model(self) -> str:
        return self.entry.label

    @property
    def description(self) -> str:
        """The cell in words, for example "pythia-70m step0 × random × seq-len=16 (claims)"."""
        model = f"{self.model} {self.revision}" if self.revision else self.model
        rest = " × ".join(part for part in (model, self.input, self.setting) if part)
        return one_line(f"{rest} ({self.command})")

    @property
    def source(self) -> tuple[str | None, str | None]:
        """The model and its revision; cells with the same source read the same files."""
        return getattr(self.options, "model", None), getattr(self.options, "revision", None)


@dataclass(frozen=True)
class Sweep:
    """A sweep that was read from a file."""

    path: Path
    content: SweepContent
    overrides: Mapping[str, Any]  # options of the command line, which replace those of the file
    cells: tuple[Cell, ...]  # all combinations


def read_sweep(file: str, overrides: Mapping[str, Any], quick: bool = False) -> Sweep:
    """Read a sweep (a YAML file, or a name), and make the options of all its cells.

    The `overrides` replace options of the file, and with `quick` so do the options under `quick` in the file. Cells
    are in the order of the models; those of `train`, which need no model, come last.
    """
    path = find_recipe(file, "sweep")
    options = {name for kind in cell_kinds().values() for name in kind.model_fields}
    content = read_yaml(path, SweepContent, "sweep", options)
    cells: dict[str, Cell] = {}  # by their checksums
    with named_file(path):
        if content.extends is not None:
            base = read_yaml(find_recipe(content.extends, "sweep"), SweepContent, "sweep", options)
            commands = {
                name: entry.model_copy(
                    update={"options": base.commands.get(name, CommandEntry()).options | entry.options}
                )
                for name, entry in content.commands.items()
            }
            shared: dict[str, Any] = {"options": base.options | content.options, "quick": base.quick | content.quick}
            shared["figures"] = content.figures or base.figures
            content = content.model_copy(update={"commands": commands, **shared})
        if quick and not content.quick:
            raise InputError("it has no small form for --quick")
        overrides = (named(content.quick) if quick else {}) | dict(overrides)
        models = [(entry, revision) for entry in content.models for revision in entry.revisions or (None,)]
        for (entry, revision), (command, asked) in product([*models, (None, None)], content.commands.items()):
            if (command == "train") != (entry is None):
                continue
            inputs: Iterable[str | None] = ("",)
            settings = asked.settings or {}
            if entry is not None and "input" in cell_kinds()[command].model_fields:
                inputs = dict.fromkeys(entry.instead.get(name, name) for name in asked.inputs or content.inputs)
                settings = content.settings if asked.settings is None else asked.settings
            for option, values in settings.items():
                if not values:
                    raise InputError(f"`settings.{option}`: it has no values")
                if option == TOGETHER and not all(isinstance(value, dict) for value in values):
                    raise InputError(f"`settings.{option}`: a value is several options, as {{seed: 1, steps: 10}}")
            for reads, values in product(inputs, product(*settings.values())):
                if reads is None:  # left out for this model
                    continue
                setting: dict[str, Any] = {}
                for option, value in zip(settings, values, strict=True):
                    setting |= value if option == TOGETHER else {option: value}
                cell = _cell(content, entry, revision, command, reads, setting, overrides)
                first = cells.setdefault(cell.name[-CHECKSUM:], cell)
                if first is not cell and not quick:  # with `quick`, cells may have differed only in a replaced option
                    raise InputError(f"{cell.description} occurs twice, also as {first.description}")
                if len(cells) > MOST_CELLS:
                    raise InputError(f"more than {MOST_CELLS} combinations")
        if not cells:
            raise InputError("it has no combinations: every input is left out")
    return Sweep(path, content, overrides, tuple(cells.values()))


def _cell(
    content: SweepContent,
    entry: ModelEntry | None,
    revision: str | None,
    command: str,
    name: str,
    setting: dict[str, Any],
    overrides: Mapping[str, Any],
) -> Cell:
    """Return one cell; for `train`, whose options make its model, `entry` is None."""
    kind, model = cell_kinds()[command], entry or ModelEntry()
    reads_inputs, offered = "input" in kind.model_fields, kind.model_fields.keys() - kind.refused.keys()
    reads = content.inputs.get(name, {}) if reads_inputs else {}
    if reads_inputs and not {"input", "dataset", "prompt"} & named(reads).keys():
        reads = {"input": name, **reads}

    def applicable(shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return shared options without those that a command with options of its own does not have."""
        return {key: value for key, value in shared.items() if key in offered or reads_inputs}

    options: dict[str, Any] = {}
    if entry is not None:
        options = {"model": entry.model, "revision": revision}
        if revision is not None and entry.model is not None and kind_of(user_path(entry.model)) == "folder":
            options = {"model": str(Path(entry.model) / revision)}  # the revision is a subfolder
    options |= applicable(named(content.options)) | named(content.commands[command].options)
    options |= applicable(named(model.options)) | named(reads) | named(setting)
    if reads_inputs and "seq_len" in named(setting):
        options.setdefault("window", options["seq_len"])  # WSE figure 3
    replaced = dict(overrides)
    if isinstance(replaced.get("config"), dict):
        fields = ",".join(f"{field}={value}" for field, value in replaced.pop("config").items())
        if "config" in kind.model_fields:
            config = options.get("config", kind.model_fields["config"].default)
            options["config"] = f"{config}{',' if ':' in config else ':'}{fields}"
    options |= applicable(replaced)

    called = {option: "+".join(value) if isinstance(value, dict) else value for option, value in setting.items()}
    label = ",".join(f"{option}={value}" for option, value in called.items())
    draft = Cell("", model, revision, name, label, command, None)
    try:
        resolved: Any = checked(kind, options)
        resolved.check_of_a_file()
    except InputError as error:
        raise InputError(f"{draft.description}: {error}") from None
    if entry is None:
        draft = replace(draft, entry=ModelEntry(name=resolved.shape_name))
    significant = resolved.model_dump(mode="json", exclude_defaults=True, exclude=set(PERMISSIONS))
    checksum = sha256(json.dumps([command, significant], sort_keys=True).encode()).hexdigest()[:CHECKSUM]
    readable = as_folder_name(draft.model, revision, name, label, None if command == "analyze" else command)
    return replace(draft, name=f"{readable[:LONGEST_CELL_NAME]}-{checksum}", options=resolved)


def known_sweeps() -> dict[str, Path]:
    return known_recipes("sweeps")


def listed() -> list[tuple[str, str, str, str]]:
    """Return the rows of `sinkscope list sweeps`, with the errors of invalid files."""
    rows = []
    for name, path in known_sweeps().items():
        try:
            sweep = read_sweep(str(path), {})
            rows.append((name, sweep.content.title, sweep.content.reproduces or "", str(len(sweep.cells))))
        except InputError as error:
            rows.append((name, f"not a sweep: {error}", "", ""))
    return rows
