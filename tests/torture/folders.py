"""Damage folders of every command, and check how everything that opens them ends.

    python tests/torture/folders.py --count 100 --seed 0

Each outcome is a right result (status 0) or a message of one or two lines (status 1 or 2); anything else is printed,
with the damage, and the exit status is 1. Commands run in this process, on a tiny model, without figures.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # support, torture

import numpy as np
from support import bad_inputs as bad
from torture.outcomes import (
    FIFO,
    FOLDER,
    LOOP,
    SMALL,
    TRAINED,
    Counts,
    attack,
    examples,
    outcome_of_call,
    outcome_of_command,
    put,
    save_models,
)

from sinkscope.figures import FIGURES
from sinkscope.output.run import Run
from sinkscope.output.series import Series

RECIPE = "title: x\noptions: {num-seqs: 2, seq-len: 8, observables: [activation]}\n"
# Kind of folder → the command that writes it
COMMANDS = {
    "analyze": ("analyze", "tiny", *SMALL),
    "intervene": ("intervene", "tiny", "--do", "mask-sink", "--draws", "1", *SMALL),
    "quantize": ("quantize", "tiny", "--calibration", "2", *SMALL),
    "series": ("analyze", "steps", *SMALL, "--observables", "attention,activation"),
    "retrofit": ("retrofit", "tiny", "--method", "vga", "--text", "tiny/x.txt", *TRAINED),
    "train": ("train", "--config", "bare/config.json", "--method", "vscale", "--tokenizer", "tiny",
              "--text", "tiny/x.txt", *TRAINED),
    "compare": ("compare", "analyze", "other", "--quiet"),
}  # fmt: skip
RUNS = ("analyze", "intervene", "quantize")
WAYS = ("value", "value", "value", "delete", "cut", "change", "swap", "missing", "folder", "json")


def attack_folders(count: int, number: int, counts: Counts) -> None:
    """Damage a folder, and run everything that opens a folder of its kind."""
    home = Path(tempfile.mkdtemp(prefix="torture-"))
    os.chdir(home)
    save_models(home)
    for step in (1, 2):
        shutil.copytree(home / "tiny", home / "steps" / f"checkpoint-{step}")
    (home / "x.yaml").write_text(RECIPE)
    for name, command in ({"other": (*COMMANDS["analyze"], "--seed", "5")} | COMMANDS).items():
        outcome = outcome_of_command((*command, "--out", name))
        if outcome != "right":
            raise SystemExit(f"{name}: {outcome}")
    random, odd = np.random.default_rng(number), examples(bad.json_values, count, number)
    for place in range(count):
        kind = list(COMMANDS)[place % len(COMMANDS)]
        shutil.copytree(home / kind, home / "run")
        how = damage(home / "run", random, odd[place % len(odd)])
        for what, outcome in openings(home, kind):
            counts.add(f"{kind}: {what}", outcome, how)
        shutil.rmtree(home / "run", ignore_errors=True)
    os.chdir("/")
    shutil.rmtree(home)


def damage(run: Path, random: np.random.Generator, value: Any) -> str:
    """Change a folder in one way, and describe the change."""
    way = str(random.choice(WAYS))
    manifests, tables = sorted(run.rglob("run.json")), sorted(run.rglob("*.parquet"))
    manifest = manifests[int(random.integers(len(manifests)))]
    if way in ("value", "delete"):
        return f"{manifest.relative_to(run)}: {_damage_json(manifest, way, random, value)}"
    if way == "json":
        manifest.write_bytes(manifest.read_bytes()[: int(random.integers(manifest.stat().st_size))])
        return f"{manifest.relative_to(run)} cut"
    table, other = (tables[int(at)] for at in random.integers(len(tables), size=2))
    if way == "folder" and random.random() < 0.3:
        table = manifest
    if way == "cut":
        table.write_bytes(table.read_bytes()[: int(random.integers(table.stat().st_size))])
    if way == "change":
        content = bytearray(table.read_bytes())
        for at in random.integers(len(content), size=5):
            content[at] = int(random.integers(256))
        table.write_bytes(bytes(content))
    if way == "swap":
        table.write_bytes(other.read_bytes())
    if way == "missing":
        table.unlink()
    if way == "folder":
        put(table, str(random.choice([FOLDER, FIFO, LOOP])))
    return f"{way} {table.relative_to(run)} ({other.relative_to(run)})"


def _damage_json(path: Path, way: str, random: np.random.Generator, value: Any) -> str:
    """Delete an entry at a random depth, or set it to the value."""
    content = json.loads(path.read_text())
    place, keys = content, []
    while True:
        keys.append(str(random.choice(sorted(place))))
        if not (isinstance(place[keys[-1]], dict) and place[keys[-1]] and random.random() < 0.7):
            break
        place = place[keys[-1]]
    if way == "delete":
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    path.write_bytes(bad.written(content))
    return f"{way} {keys}"


def openings(home: Path, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the outcome of everything that opens a folder of this kind."""
    yield "compare", _afterwards_without(home / "out", ("compare", "run", "other"))
    if kind in RUNS:
        yield "--from", _afterwards_without(home / "out", (kind, "--from", "run"))
        yield from _python_openings(home / "run")
    if kind == "series":
        opened: list[Series] = []
        yield "Series.open", outcome_of_call(lambda: opened.append(Series.open("run")))
        for series in opened:
            yield "figures", outcome_of_call(series.figures)
            yield "headlines", outcome_of_call(partial(getattr, series, "headlines"))
            yield "warnings", outcome_of_call(partial(getattr, series, "warnings"))
    for arm in sorted(path.parent.name for path in (home / "run").glob("*/run.json")):
        yield "compare an arm", _afterwards_without(home / "out", ("compare", f"run/{arm}", "other"))
    again = (*COMMANDS[kind], "--out", "run")
    if kind in ("retrofit", "train"):
        yield "the same again", outcome_of_command(again)
    subprocess.run(["cp", "-a", "run", "copy"], cwd=home, check=True)
    yield "--overwrite", outcome_of_command((*again, "--overwrite"))
    shutil.rmtree(home / "run", ignore_errors=True)
    (home / "copy").rename(home / "run")
    recipe = ("run", "x.yaml", "--model", "tiny", "--out", "run", "--overwrite", "--quiet")
    yield "run --overwrite", outcome_of_command(recipe)


def _afterwards_without(out: Path, args: tuple[str, ...]) -> str:
    try:
        return outcome_of_command((*args, "--out", out.name, "--quiet"))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _python_openings(folder: Path) -> Iterator[tuple[str, str]]:
    opened: list[Run] = []
    yield "Run.open", outcome_of_call(lambda: opened.append(Run.open(folder)))
    for run in opened:
        yield "verdict", outcome_of_call(partial(getattr, run, "verdict"))
        yield "_repr_", outcome_of_call(partial(repr, run))
        yield "metric", outcome_of_call(partial(run.metric, "sink_rate"))
        for figure in FIGURES:
            yield "figures", outcome_of_call(partial(run.figure, figure))


if __name__ == "__main__":
    sys.exit(attack(attack_folders, __doc__))
