"""The command line that repeats the run in a folder, reconstructed from its run.json."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sinkscope.models.files import is_demo
from sinkscope.options.given import OBJECTS
from sinkscope.options.measuring import PERMISSIONS
from sinkscope.options.option import as_folder_name, flag
from sinkscope.options.register import options_by_command, records


def command_lines(manifest: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Return command lines that repeat a run, shortest first; none if it read objects in Python: model or input."""
    recipe, command, config = manifest.get("recipe"), str(manifest["command"]), manifest["config"]
    name = "analyze" if command == "analyze_steps" else command  # the command that calls the function
    if recipe:
        return [shlex.join(["sinkscope", "run", str(recipe["name"]), *_replaced_options(recipe, name, config)])]
    record, model, methods = records().get(name), manifest.get("model"), dict[str, str]()
    is_named = config.get("model") is not None or not isinstance(model, dict) or is_demo(str(model.get("source")))
    is_named = is_named and config.get("input") not in OBJECTS
    kind = record.options if record and not record.recipes else None  # run.json then holds the content of a file
    if kind is None or not is_named:
        return []
    is_typed = True
    for arm in (manifest.get("arms") or {}).values():
        if "method" in arm:  # a training: run.json lists arms one by one, since arms may be added
            parameters = [f"{key}={value}" for key, value in arm["parameters"].items()]
            methods[arm["label"]] = ":".join([arm["method"], *filter(None, [",".join(parameters)])])
            # otherwise it was given in Python and cannot be typed
            is_typed = is_typed and arm["label"] == as_folder_name(arm["method"], *parameters)
    if methods:
        config = config | {"method": ",".join(methods.values())}
    words: list[str] = []
    for option, field in kind.model_fields.items():
        value = config.get(option)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if value is None or value == default or option in kind.hidden:
            continue
        is_typed = is_typed and not isinstance(value, dict)
        typed = list(_as_typed(option, value, option in kind.arguments))
        words = [*typed, *words] if option in kind.arguments else [*words, *typed]
    lines = [shlex.join(["sinkscope", name, *words])] if is_typed else []
    if kind.repeatable and folder is not None and command == name:
        permissions = [flag(option) for option in PERMISSIONS if config.get(option)]
        lines.insert(0, shlex.join(["sinkscope", name, "--from", folder.name, *permissions]))
    return lines


def _replaced_options(recipe: Mapping[str, Any], command: str, config: Mapping[str, Any]) -> list[str]:
    """Return the options that replaced those of the recipe, as typed."""
    content = recipe.get("content", {})
    of_recipe = {name.replace("-", "_"): value for name, value in content.get("options", {}).items()}
    of_recipe["model"] = content.get("model")
    kinds = options_by_command()
    fields = kinds[command].model_fields if command in kinds else {}
    # each of several runs has its own options
    names = ["model"] if content.get("runs") else kinds["run"].model_fields
    words: list[str] = []
    for name in names:
        value = config.get(name)
        if name in fields and value is not None and value != of_recipe.get(name, fields[name].default):
            typed = list(_as_typed(name, value, name in kinds["run"].arguments))
            words = [*typed, *words] if name in kinds["run"].arguments else [*words, *typed]
    return words


def _as_typed(name: str, value: Any, is_argument: bool) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        if is_argument:
            yield str(one)
        elif one is True:
            yield flag(name)
        elif one is not False:
            yield from (flag(name), str(one))
