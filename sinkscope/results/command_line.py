"""The command line that repeats the run in a folder, reconstructed from its run.json."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sinkscope.models.files import is_demo
from sinkscope.options.given import OBJECTS
from sinkscope.options.measuring import PERMISSIONS
from sinkscope.options.option import Options, as_folder_name, flag
from sinkscope.options.register import options_by_command, records

NAMES = {"analyze_steps": "analyze"}  # function → the command that calls it


def command_lines(manifest: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Return command lines that repeat a run, shortest first; none if it read objects in Python: model or input."""
    recipe, command = manifest.get("recipe"), str(manifest["command"])
    name = NAMES.get(command, command)
    if recipe:
        return [shlex.join(["sinkscope", "run", str(recipe["name"]), *_in_place_of(recipe, name, manifest["config"])])]
    record, model = records().get(name), manifest.get("model")
    named = manifest["config"].get("model")
    is_named = named is not None or not isinstance(model, dict) or is_demo(str(model.get("source")))
    is_named = is_named and manifest["config"].get("input") not in OBJECTS
    kind = record.options if record and not record.recipes else None  # run.json then holds the content of a file
    if kind is None or not is_named:
        return []
    config = manifest["config"] | _methods(manifest.get("arms") or {})
    lines = [shlex.join(["sinkscope", name, *words])] if (words := _words(kind, config)) is not None else []
    if kind.repeatable and folder is not None and command == name:
        permissions = [flag(name) for name in PERMISSIONS if config.get(name)]
        lines.insert(0, shlex.join(["sinkscope", name, "--from", folder.name, *permissions]))
    return lines


def _in_place_of(recipe: Mapping[str, Any], command: str, config: Mapping[str, Any]) -> list[str]:
    """Return the options that replaced those of the recipe, as typed."""
    content = recipe.get("content", {})
    own = {name.replace("-", "_"): value for name, value in content.get("options", {}).items()}
    own["model"] = content.get("model")
    kinds = options_by_command()
    fields = kinds[command].model_fields if command in kinds else {}
    # each of several runs has its own options
    names = ["model"] if content.get("runs") else kinds["run"].model_fields
    words: list[str] = []
    for name in names:
        value = config.get(name)
        if name in fields and value is not None and value != own.get(name, fields[name].default):
            words += _typed(name, value, is_argument=False)
    return words


def _methods(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option `method` of a training: run.json lists the arms one by one, since arms may be added."""
    methods: dict[str, str] = {}
    for arm in arms.values():
        if "method" not in arm:  # an arm of an intervention
            return {}
        parameters = [f"{name}={value}" for name, value in arm["parameters"].items()]
        if arm["label"] != as_folder_name(arm["method"], *parameters):  # it was given in Python and cannot be typed
            return {"method": dict.fromkeys([arm["label"]])}
        methods[arm["label"]] = ":".join([arm["method"], *filter(None, [",".join(parameters)])])
    return {"method": ",".join(methods.values())} if methods else {}


def _words(kind: type[Options], config: Mapping[str, Any]) -> list[str] | None:
    """Return the options that differ from the defaults, as typed; None if one cannot be typed."""
    words: list[str] = []
    for name, field in kind.model_fields.items():
        value = config.get(name)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if value is None or value == default or name in kind.hidden:
            continue
        if isinstance(value, dict):
            return None
        typed = list(_typed(name, value, name in kind.arguments))
        words = [*typed, *words] if name in kind.arguments else [*words, *typed]
    return words


def _typed(name: str, value: Any, is_argument: bool) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        if is_argument:
            yield str(one)
        elif one is True:
            yield flag(name)
        elif one is not False:
            yield from (flag(name), str(one))
