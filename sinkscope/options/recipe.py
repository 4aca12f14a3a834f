"""Recipes: a command with all its options as one YAML file, an experiment or a paper's figure on any model.

    title: Gradient norms of query, key and value states by position
    reproduces: GS figure 2
    command: analyze          # the default; any other of `sinkscope --help`
    options:                  # as on its command line
      num-seqs: 100
      observables: [gradient]
    figures: [gradient-norms]

It may also name a `model`, a folder `out`, and several `runs`, each with options on top of those above:

    runs:
      natural: {input: natural}
      random: {input: random}
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from sinkscope.errors import InputError, closest, one_line, unknown
from sinkscope.options.files import YAML_ENDINGS, kind_of, named_file, names_in, read_yaml, user_path
from sinkscope.options.measuring import PERMISSIONS
from sinkscope.options.option import Options, checked, flag, split_names
from sinkscope.options.register import options_by_command, records

COMPARISON = "comparison"  # the folder next to the folders of several runs
RESERVED_RUNS = (COMPARISON, "run.json")  # names that a run cannot have
LONGEST_RUN_NAME = 200  # bytes: file systems allow 255, and temporary names are longer

# options that a recipe, which may come from anywhere, must not set, and the reasons
NOT_OPTIONS = {
    "model": "belongs next to `options`, not under it",
    **{name: f"is for you to give, on the command line: {flag(name)}" for name in PERMISSIONS},
}


class RecipeFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    reproduces: str | None = None  # the paper's figure or table
    command: str = "analyze"
    model: str | None = None
    options: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]] = {}
    figures: tuple[str, ...] = ()
    out: str | None = None

    @field_validator("options", "runs", "figures", mode="before")
    @classmethod
    def _accept_short_forms(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept a key without a value, a run without options of its own, and figures as `a,b`."""
        if value is None:
            return [] if info.field_name == "figures" else {}
        if info.field_name == "runs" and isinstance(value, dict):
            return {name: {} if options is None else options for name, options in value.items()}
        return split_names(value) if info.field_name == "figures" and isinstance(value, str) else value

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str) -> str:
        if command not in options_by_command():
            raise ValueError(unknown(command, options_by_command()))
        if command == "run":
            raise ValueError("a recipe cannot run another recipe")
        return command

    @field_validator("runs")
    @classmethod
    def _check_runs(cls, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if len(runs) == 1:
            raise ValueError("there is only one: write its options under `options`, and leave `runs` out")
        for name in runs:
            is_folder = re.fullmatch(r"[\w+=@-][\w.+=@-]*", name) and len(os.fsencode(name)) <= LONGEST_RUN_NAME
            if not is_folder or name.casefold() in RESERVED_RUNS:
                shown = one_line(name, 40)
                raise ValueError(f"'{shown}' cannot be the name of a run, which is also its folder's: choose another")
        if len({name.casefold() for name in runs}) < len(runs):
            raise ValueError("two names differ only in upper and lower case: choose another name for one run")
        return runs


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read from a file."""

    name: str
    path: Path
    content: RecipeFile

    @property
    def record(self) -> dict[str, Any]:
        """The content of the file, for manifests."""
        return {"name": self.name, "content": self.content.model_dump(mode="json", exclude_unset=True)}

    def options(self, replacing: Mapping[str, Any]) -> dict[str, Options]:
        """Return the options of each run by name; those of `replacing` are in place of the recipe's.

        The name of a single run is "". Raises InputError, with the file, if an option is unknown or not allowed.
        """
        kind, content = options_by_command()[self.content.command], self.content
        # `run` has the option --input also for commands that train, where the field is called `text`
        renames = {"input": "text"} if "text" in kind.model_fields else {}
        replaced = {renames.get(name, name): value for name, value in replacing.items()}
        runs = {}
        with named_file(self.path):
            if content.runs and not kind.in_memory:
                raise InputError(f"`runs` are for commands that measure one run, and `{content.command}` does not")
            shared = ({} if content.model is None else {"model": content.model}) | named(content.options)
            for name, of_run in (content.runs or {"": {}}).items():
                options = shared | named(of_run)
                if replacing.get("model") is not None:  # these two belong to the recipe's own model
                    options.pop("revision", None)
                    options.pop("gguf_file", None)
                runs[name] = checked(kind, options | replaced)
            for run in runs.values():
                run.check_of_a_file()
        return runs


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the names of their fields, which have underscores instead of hyphens."""
    named = {name.replace("-", "_"): value for name, value in options.items()}
    for name, why in NOT_OPTIONS.items():
        if name in named:
            raise InputError(f"option '{name}' {why}")
    return named


def known_recipes(folder_name: str = "") -> dict[str, Path]:
    """Return name → file of the recipes in ./recipes/ and of sinkscope's own, or of `folder_name` in both."""
    recipes: dict[str, Path] = {}
    for folder in (Path("recipes", folder_name), shipped("recipes") / folder_name):
        for path in [folder / name for name in names_in(folder)] if kind_of(folder) == "folder" else ():
            if path.suffix in YAML_ENDINGS and path.is_file():
                recipes.setdefault(path.stem, path)
    return recipes


def shipped(folder: str) -> Path:
    """Return the folder `recipes` or `reports` in the installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    return (checkout if (checkout / "pyproject.toml").is_file() else package) / folder


def find_recipe(recipe: str | os.PathLike[str], command: str = "run") -> Path:
    """Return the file that a command reads (its record has `recipes`) by its path or name, or InputError."""
    path = user_path(recipe)
    kind = kind_of(path)
    if kind == "file":
        return path
    what, folder_name = records()[command].recipes or ("recipe", "")
    known = known_recipes(folder_name)
    name = path.stem if path.suffix in YAML_ENDINGS else path.name
    if path.name == str(recipe):  # no folder before it
        if name in known:
            return known[name]
        if path.suffix not in YAML_ENDINGS:
            raise InputError(f"{what} {unknown(name, known)}")
    close = closest(name, known, cutoff=0.8)
    hint = "" if close is None else f"; did you mean the {what} '{close}'?"
    if name in known:
        hint = f"; `sinkscope {command} {name}` finds {known[name]}"
    raise InputError(f"{recipe}: {'this is a folder' if kind else 'no such file'}{hint}")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe, whose options are checked later. Raises InputError if the file is not readable or no recipe."""
    name = path.stem if path.suffix in YAML_ENDINGS else path.name
    options = {name for kind in options_by_command().values() for name in kind.model_fields}
    return Recipe(name, path, read_yaml(path, RecipeFile, "recipe", options))
