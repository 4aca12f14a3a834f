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
WAYS = ("edit", "edit", "edit", "edit", "cut", "change", "swap", "missing", "folder")


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
    random = np.random.default_rng(number)
    for place in range(count):
        kind = list(COMMANDS)[place % len(COMMANDS)]
        shutil.copytree(home / kind, home / "run")
        how = damage(home / "run", random)
        for what, outcome in openings(home, kind):
            counts.add(f"{kind}: {what}", outcome, how)
        shutil.rmtree(home / "run", ignore_errors=True)
    os.chdir("/")
    shutil.rmtree(home)


def damage(run: Path, random: np.random.Generator) -> str:
    """Change a folder in one way, and describe the change."""
    way = str(random.choice(WAYS))
    manifests, tables = sorted(run.rglob("run.json")), sorted(run.rglob("*.parquet"))
    manifest = manifests[int(random.integers(len(manifests)))]
    if way == "edit":
        content = json.loads(manifest.read_text())
        *_, edited = examples(bad.edited(content), 3, int(random.integers(2**31)))
        manifest.write_bytes(bad.written(edited))
        return f"{way} {manifest.relative_to(run)}: {[key for key in content if edited.get(key) != content[key]]}"
    table, other = (tables[int(at)] for at in random.integers(len(tables), size=2))
    if way in ("cut", "folder") and random.random() < 0.3:
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


def openings(home: Path, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the outcome of everything that opens a folder of this kind."""

    def of_command(*args: str) -> str:
        try:
            return outcome_of_command((*args, "--out", "out", "--quiet"))
        finally:
            shutil.rmtree(home / "out", ignore_errors=True)

    yield "compare", of_command("compare", "run", "other")
    for arm in sorted(path.parent.name for path in (home / "run").glob("*/run.json")):
        yield "compare an arm", of_command("compare", f"run/{arm}", "other")
    if kind in RUNS:
        yield "--from", of_command(kind, "--from", "run")
    opened: list[Any] = []
    if kind in (*RUNS, "series"):
        yield "open", outcome_of_call(lambda: opened.append((Run if kind in RUNS else Series).open("run")))
    for found in opened:
        yield "repr", outcome_of_call(partial(repr, found))
        for name in ("verdict",) if kind in RUNS else ("headlines", "warnings"):
            yield name, outcome_of_call(partial(getattr, found, name))
        figures = [partial(found.figure, name) for name in FIGURES] if kind in RUNS else [found.figures]
        for draw in figures:
            yield "figures", outcome_of_call(draw)
    again = (*COMMANDS[kind], "--out", "run")
    if kind in ("retrofit", "train"):
        yield "the same again", outcome_of_command(again)
    subprocess.run(["cp", "-a", "run", "copy"], cwd=home, check=True)
    yield "--overwrite", outcome_of_command((*again, "--overwrite"))
    shutil.rmtree(home / "run", ignore_errors=True)
    (home / "copy").rename(home / "run")
    recipe = ("run", "x.yaml", "--model", "tiny", "--out", "run", "--overwrite", "--quiet")
    yield "run --overwrite", outcome_of_command(recipe)


if __name__ == "__main__":
    sys.exit(attack(attack_folders, __doc__))
