"""Finds the checkpoints of a training: revisions of a hub repository, or subfolders of a folder."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from sinkscope.errors import InputError, unknown


@dataclass(frozen=True)
class Checkpoint:
    """One step of a training."""

    step: int
    name: str  # name of the revision or the subfolder
    model: str
    revision: str | None

    @property
    def folder(self) -> str:
        return f"step{self.step}"


def find_checkpoints(model: str, revisions: str | Iterable[str] | None = None) -> list[Checkpoint]:
    """Return the checkpoints ordered by step; raise InputError for fewer than two, or for names without a step."""
    if isinstance(revisions, str):
        revisions = revisions.split(",")
    names = [name.strip() for name in revisions or () if name.strip()]
    folder = Path(model).expanduser()
    if folder.is_file():
        raise InputError(f"{model} is one file, so it has no steps: name a folder of checkpoints, or a hub id")
    is_folder = folder.is_dir()
    if is_folder:
        present = sorted(path.name for path in folder.iterdir() if path.is_dir())
        for name in names:
            if not (folder / name).is_dir():
                raise InputError(f"{model} has no such folder: {unknown(name, present)}")
        names = names or [name for name in present if name.startswith("checkpoint-")]
        if not names:
            raise InputError(f"{model} holds no steps: no folder in it is called checkpoint-…")
        if len(names) == 1:
            (name,) = names
            raise InputError(f"{model}: only {name} was found or named; to analyze it alone, name {folder / name}")
        for name in names:
            if not (folder / name / "config.json").is_file():
                raise InputError(
                    f"{folder / name} is not a model in HuggingFace format: it has no config.json. "
                    "Save it completely, or name the other steps with --revision"
                )
    elif len(names) < 2:
        single = f" (for {names[0]} only, leave out the comma)" if names else ""
        raise InputError(f"name two or more steps of {model}, as --revision step0,step512,step1000{single}")
    steps = {name: step_of(name, names) for name in names}
    for first, second in combinations(names, 2):
        if first == second:
            raise InputError(f"'{first}' is named twice: name each step once")
        if steps[first] == steps[second]:
            raise InputError(f"'{first}' and '{second}' are both step {steps[first]}: name each step once")
    return [
        Checkpoint(steps[name], name, *((str(Path(model) / name), None) if is_folder else (model, name)))
        for name in sorted(names, key=steps.__getitem__)
    ]


def step_of(name: str, among: Iterable[str] = ()) -> int:
    """Return the number after `step`, or else at the end of the name; the error lists those in `among` with one."""
    step = _step_in(name)
    if step is None:
        others = [other for other in among if _step_in(other) is not None]
        hint = f": leave it out, as in --revision {','.join(others)}" if len(others) > 1 else ""
        raise InputError(f"'{name}' does not end in the number of a step, as step512 or checkpoint-512 do{hint}")
    return step


def _step_in(name: str) -> int | None:
    if re.fullmatch(r"[0-9a-f]{40}", name):  # a commit
        return None
    match = re.search(r"step[-_]?(\d{1,15})(?!\d)", name, re.IGNORECASE) or re.search(r"(?<![\d.])(\d{1,15})$", name)
    return int(match[1]) if match else None
