"""Recipes: an experiment or a paper's figure as one YAML file, repeated by one command on any model.

    title: Gradient norms of query, key and value states by position
    reproduces: GS figure 2
    options:                  # of `analyze`, as on its command line
      num-seqs: 100
      observables: [gradient]
    figures: [gradient-norms]

It may also name a `model`, a folder `out`, and several `runs`, each with options on top of those above:

    runs:
      natural: {input: natural}
      random: {input: random}

An experiment of `intervene` has `arms`, each one intervention or a stack of them as behind --do, and may say how many
random controls to draw; `arms: all` tries every intervention that applies:

    arms:
      nullify-query-bias: nullify-query-bias
      one-coordinate: [zero-massive:coordinates=507]
    draws: 5

One of `retrofit` has `methods`, and those of `train` also an `architecture`; their options are those of these commands:

    architecture: tiny-llama
    methods: [none, vscale]
    options: {steps: 2000, seeds: 3}

`methods` may say what they are to be called, as in {VGA: "vga:placement=output"}.

OUT/ is a run folder, whose run.json has the recipe, too. With several `runs` it holds a run folder each, their
comparison, and recipe.json; with `methods` it is what `retrofit` or `train` leave, and recipe.json.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from rich.console import Console

from sinkscope.errors import InputError, unknown
from sinkscope.options.measuring import DRAWS, RunConfig, as_folder_name, make_config
from sinkscope.report.run import Run, write_run
from sinkscope.results.folders import check_output, new_folder
from sinkscope.results.manifest import MANIFEST as RUN_MANIFEST

if TYPE_CHECKING:
    from sinkscope.report.comparison import Comparison
    from sinkscope.report.trained import Trained

MANIFEST = "recipe.json"  # of a recipe with several runs
ENDINGS = (".yaml", ".yml")
COMPARISON = "comparison"

BESIDE_TRAINING = ("text", "dataset", "tokenizer", "seeds")  # options of `retrofit` and `train` only

# what a recipe, which may come from anywhere, cannot decide, and why
NOT_OPTIONS = {
    "model": "belongs beside `options`, not among them",
    "trust_remote_code": "is for you to give, on the command line: --trust-remote-code",
    "allow_pickle": "is for you to give, on the command line: --allow-pickle",
}


class Content(BaseModel):
    """What is in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    reproduces: str | None = None  # the paper's figure or table
    model: str | None = None
    options: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]] = {}
    arms: dict[str, tuple[str, ...]] | Literal["all"] | None = None
    draws: int = Field(default=DRAWS, ge=0)
    methods: tuple[str, ...] | dict[str, str] = ()
    architecture: str | None = None
    figures: tuple[str, ...] = ()
    out: str | None = None

    @field_validator("options", mode="before")
    @classmethod
    def _left_empty(cls, options: Any) -> Any:
        """`options:` with nothing, or only comments, behind it."""
        return {} if options is None else options

    @field_validator("runs", mode="before")
    @classmethod
    def _left_as_they_are(cls, runs: Any) -> Any:
        """A run with nothing behind its name is as `options` says."""
        if isinstance(runs, dict):
            return {name: {} if options is None else options for name, options in runs.items()}
        return {} if runs is None else runs

    @field_validator("arms", mode="before")
    @classmethod
    def _lone_interventions(cls, arms: Any) -> Any:
        """An arm of one intervention needs no list."""
        if not isinstance(arms, dict):
            return arms
        return {name: [do] if isinstance(do, str) else do for name, do in arms.items()}

    @field_validator("figures", "methods", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        """As on the command line: `a,b`."""
        if isinstance(names, str):
            return [name.strip() for name in names.split(",") if name.strip()]
        return [] if names is None else names

    @field_validator("runs")
    @classmethod
    def _check_runs(cls, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if len(runs) == 1:
            raise ValueError("there is only one: write its options under `options`, and leave `runs` out")
        for name in runs:
            if not re.fullmatch(r"[\w+=@-][\w.+=@-]*", name) or name == COMPARISON:
                raise ValueError(f"'{name}' cannot be the name of a run, which is also its folder's: choose another")
        return runs

    @model_validator(mode="after")
    def _check_kind(self) -> "Content":
        if self.runs and self.arms:
            raise ValueError("it has `runs` and `arms`: an experiment is one run")
        if self.arms is None and "draws" in self.model_fields_set:
            raise ValueError("`draws` is of an experiment, which has `arms`")
        if self.methods and (self.runs or self.arms or self.figures):
            raise ValueError("`methods` train a model: it has no `runs` or `arms`, and all its figures are drawn")
        if self.architecture and not self.methods:
            raise ValueError("`architecture` is trained with `methods`, and it has none: `methods: [none]` is plain")
        if self.architecture and self.model:
            raise ValueError("it has a `model` and an `architecture`, which begins with random weights")
        return self


@dataclass(frozen=True)
class Recipe:
    name: str
    path: Path
    content: Content

    @property
    def record(self) -> dict[str, Any]:
        """For the manifests: the file as it was."""
        return {"name": self.name, "content": self.content.model_dump(mode="json", exclude_unset=True)}

    def configs(self, **given: Any) -> dict[str, RunConfig]:
        """Name of the run → its configuration; the name of an only one is "". `given` overrides what the recipe says.

        Errors: InputError for options that do not exist or are out of range, and for figures that do not exist or
        cannot be drawn from what is measured.
        """
        from sinkscope.commands.intervene import wanted_arms
        from sinkscope.commands.series import is_series
        from sinkscope.text.sources import check_source

        content = self.content
        if content.methods:
            return {"": self._training_config(given)}
        try:
            if content.arms is not None:
                wanted_arms(None, content.arms)  # for its complaints
            shared = {"model": content.model} | _options(content.options)
            runs = {name: shared | _options(options) for name, options in (content.runs or {"": {}}).items()}
            if given.get("model") is not None:  # these are of the recipe's own model
                runs = {name: options | {"revision": None, "gguf_file": None} for name, options in runs.items()}
            configs = {name: make_config(**options | given) for name, options in runs.items()}
            for config in configs.values():
                if is_series(config):
                    raise InputError("a recipe measures one model: of several steps, name one revision or checkpoint")
                check_source(config.input)
                _check_figures(content.figures, config, bool(content.arms))
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        return configs

    def training_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """For `retrofit` or `train`, where it has `methods`. Errors: InputError."""
        try:
            options = _options(self.content.options) | {name: given[name] for name in given if name != "model"}
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        if "input" in options:  # as `run` calls it
            options["text"] = options.pop("input")
        return options

    def _training_config(self, given: Mapping[str, Any]) -> RunConfig:
        from sinkscope.commands.retrofit import split_options
        from sinkscope.commands.train import check_source
        from sinkscope.training.architectures import architecture
        from sinkscope.training.arms import parse_methods
        from sinkscope.training.blocks import check_text

        content, options = self.content, self.training_options(given)
        try:
            parse_methods(content.methods)
            check = check_source if content.architecture else check_text
            check(os.fspath(options.get("text", "natural")))
            if content.architecture:
                architecture(content.architecture)
            ours = {name: value for name, value in options.items() if name not in BESIDE_TRAINING}
            return split_options("run", given.get("model", content.model), ours)[1]
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None


@dataclass(frozen=True)
class RecipeRun:
    """What came out of a recipe: its runs by name (an only one is called ""), and the comparison of several."""

    recipe: Recipe
    runs: Mapping[str, Run]
    comparison: "Comparison | None"
    folder: Path
    trained: "Trained | None" = None  # where it has `methods`


def run_recipe(
    recipe: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    **options: Any,
) -> RecipeRun:
    """Run a recipe: a YAML file, or the name of one in recipes/. Writes to `out`, by default runs/RECIPE-MODEL.

    `model`, and other options of `analyze`, take the place of the recipe's.

    Errors: as for `analyze`; also InputError for a recipe that does not exist or is faulty.
    """
    from sinkscope.commands.analyze import analyze
    from sinkscope.commands.intervene import intervene

    found = read_recipe(find_recipe(recipe))
    given = options if model is None else options | {"model": os.fspath(model)}
    if found.content.methods:
        return _trained(found, given, out, overwrite, quiet)
    configs = found.configs(**given)
    several = bool(found.content.runs)
    model_name = next(iter(configs.values())).folder_name
    target = out or found.content.out or Path("runs", as_folder_name(found.name, model_name))
    folder = check_output(target, overwrite, MANIFEST if several else RUN_MANIFEST)
    console = Console(stderr=True, quiet=quiet)
    console.print(f"{found.name}: {found.content.title}", markup=False, highlight=False, soft_wrap=True)
    measure = analyze
    if found.content.arms is not None:
        measure = partial(intervene, arms=found.content.arms, draws=found.content.draws)
    runs = {}
    for place, (name, config) in enumerate(configs.items(), 1):
        if several:
            console.print(f"run {name} ({place} of {len(configs)})", highlight=False)
        run = measure(config.model, config=config, quiet=quiet)
        runs[name] = Run(run.manifest | {"recipe": found.record}, run.tables, folder / name)
    with new_folder(folder) as fresh:
        comparison = _write_several(found, runs, fresh) if several else None
        if not several:
            write_run(runs[""], fresh, found.content.figures)
    return RecipeRun(found, runs, comparison and replace(comparison, folder=folder / COMPARISON), folder)


def _trained(
    recipe: Recipe, given: Mapping[str, Any], out: str | os.PathLike[str] | None, overwrite: bool, quiet: bool
) -> RecipeRun:
    """By `retrofit` or `train`. What was broken off goes on, as with these."""
    from sinkscope.commands.retrofit import retrofit
    from sinkscope.commands.train import train

    content, options = recipe.content, recipe.training_options(given)
    config = recipe.configs(**given)[""]
    model = given.get("model", content.model)
    if content.architecture and model is not None:
        raise InputError(
            f"{recipe.path} trains {content.architecture} from random weights: --model does not go with it"
        )
    name = content.architecture or config.folder_name
    folder = Path(out or content.out or Path("runs", as_folder_name(recipe.name, name)))
    verb = partial(train, content.architecture) if content.architecture else partial(retrofit, model)
    done = verb(content.methods, out=folder, overwrite=overwrite, quiet=quiet, **options)
    (folder / MANIFEST).write_text(json.dumps({"command": "run", "recipe": recipe.record}, indent=2) + "\n", "utf-8")
    return RecipeRun(recipe, done.runs, done.comparison, folder, done)


def _write_several(recipe: Recipe, runs: Mapping[str, Run], folder: Path) -> "Comparison":
    """A folder a run, their comparison, and the manifest last."""
    from sinkscope.report.comparison import compare

    for name, run in runs.items():
        (folder / name).mkdir()
        write_run(run, folder / name, recipe.content.figures)
    comparison = compare(*runs.values(), out=folder / COMPARISON)
    manifest = {"sinkscope": version("sinkscope"), "command": "run", "recipe": recipe.record, "runs": list(runs)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return comparison


# --- which recipe


def known_recipes() -> dict[str, Path]:
    """Name → file, of recipes/ in the working directory and beside the package, where that is a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    folders = [Path("recipes")] + [checkout / "recipes"] * (checkout / "pyproject.toml").is_file()
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*")):
            if path.suffix in ENDINGS and path.is_file():
                found.setdefault(path.stem, path)
    return found


def find_recipe(recipe: str | os.PathLike[str]) -> Path:
    """A file, or the file of a name. Errors: InputError where there is neither."""
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    known = known_recipes()
    name = path.stem if path.suffix in ENDINGS else path.name
    if path.name == str(recipe):  # no folder before it
        if name in known:
            return known[name]
        if path.suffix not in ENDINGS:
            nothing = f"'{name}' is unknown, and there is no folder recipes/ here: name a YAML file"
            raise InputError(f"recipe {unknown(name, known) if known else nothing}")
    raise InputError(f"{recipe}: {'this is a folder' if path.is_dir() else 'no such file'}{_hint(name, known)}")


def _hint(name: str, known: Mapping[str, Path]) -> str:
    if name in known:
        return f"; `sinkscope run {name}` finds {known[name]}"
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"; did you mean the recipe '{close[0]}'?" if close else ""


def read_recipe(path: Path) -> Recipe:
    """Errors: InputError for a file that cannot be read, is no YAML, or is no recipe. Its options are checked later."""
    name = path.stem if path.suffix in ENDINGS else path.name
    try:
        return Recipe(name, path, Content.model_validate(_parse(path)))
    except ValidationError as error:
        # an unknown key first: it may be the one that another misses
        worst = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise InputError(f"{path}: {_complaint(worst)}") from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = _with_text_for_keys(yaml.safe_load(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not YAML: {_yaml_complaint(error)}") from None
    if content is None:
        raise InputError(f"{path} is empty: a recipe has at least a title")
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a recipe: it holds {_some(content)}, and not keys and values, as `title: …`")
    return content


def _with_text_for_keys(content: Any) -> Any:
    """YAML reads the keys `1` and `on` as a number and a truth value."""
    if not isinstance(content, dict):
        return content
    return {str(key): _with_text_for_keys(value) for key, value in content.items()}


def _some(content: Any) -> str:
    return "text" if isinstance(content, str) else "a list" if isinstance(content, list) else f"only {content!r}"


def _yaml_complaint(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if problem.startswith("but "):  # half of a sentence
        problem = f"{getattr(error, 'context', None) or ''} {problem}"
    hint = " (text with a colon in it needs quotes)" if "mapping values" in problem else ""
    return where + " ".join(problem.split()) + hint


_NEEDED = {  # pydantic's kind of error → what to say of the value
    "string_type": "it must be text",
    "dict_type": "it must hold keys and values, as `seq-len: 64`",
    "tuple_type": "it must be a list, as [sink-map, sinks-by-layer]",
}


def _complaint(error: Any) -> str:
    """One of pydantic's errors, for someone who wrote the file."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:  # of keys that do not go together
        return message
    where, key = ".".join(str(part) for part in error["loc"]), str(error["loc"][0])
    if error["type"] == "missing":
        return f"it has no `{key}`"
    if error["type"] == "extra_forbidden":
        is_option = key.replace("-", "_") in RunConfig.model_fields
        return f"`{key}` belongs under `options`" if is_option else f"key {unknown(key, Content.model_fields)}"
    if error["type"] in _NEEDED:
        return f"`{where}`: {_NEEDED[error['type']]}, not {error['input']!r}"
    return f"`{where}`: {message}"


# --- what it asks for


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """As RunConfig names them, which has underscores where the command line has dashes."""
    named = {name.replace("-", "_"): value for name, value in options.items()}
    for name, why in NOT_OPTIONS.items():
        if name in named:
            raise InputError(f"option '{name}' {why}")
    return named


def _check_figures(names: tuple[str, ...], config: RunConfig, is_experiment: bool) -> None:
    """Before minutes of measuring: do the figures exist, and do the observables give their tables?"""
    from sinkscope.measuring.observables import OBSERVABLES
    from sinkscope.report.figures import COMMAND, FIGURES, OBSERVABLE

    for name in names:
        if name not in FIGURES:
            raise InputError(f"figure {unknown(name, FIGURES)}")
        commands = {COMMAND[table] for table in FIGURES[name].TABLES if table in COMMAND}
        if "quantize" in commands:
            raise InputError(f"figure '{name}' is of `sinkscope quantize`, which recipes do not run")
        if bool(commands) != is_experiment:
            kind = "has" if is_experiment else "has no"
            raise InputError(f"figure '{name}' cannot be drawn: this recipe {kind} `arms`")
        needed = [OBSERVABLE.get(table, table) for table in FIGURES[name].TABLES]
        measured = config.observables or OBSERVABLES
        missing = [observable for observable in needed if observable in OBSERVABLES and observable not in measured]
        if missing:
            raise InputError(f"figure '{name}' needs the observable '{missing[0]}', which `observables` leaves out")
