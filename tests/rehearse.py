"""Runs the sweeps that need a GPU or weights from the hub to the end, at about a thousandth of their size.

    make rehearse    # or tests/rehearse.py FOLDER NAME…

Each sweep is killed once it has begun to measure or train, and resumed. Then all its cells have to be done, the figures
of its comparison drawn, its tables to have a row for each level, and the claims named here to be judged. Trainings have
a tiny configuration (`quick`). Models of the hub are tiny ones of the same repositories on a loopback hub.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import yaml
from hub import Hub, Repo
from tiny import tiny_model

from sinkscope.commands.sweep.factor_study import STUDY, at_a_glance
from sinkscope.commands.sweep.file import Sweep, known_sweeps, read_sweep
from sinkscope.commands.train.architectures import tokenizer_of
from sinkscope.commands.train.arms import parse_methods
from sinkscope.text.sources import documents

# sweep → claims that its folder decides, as far as a training without a sink does; not W-32 and W-34, because all cells
# have the same number of steps and of tokens here
TRAININGS = {
    "when-sinks-emerge-60m": ("W-30",),
    "when-sinks-emerge-60m-weight-decay": ("W-38",),
    "when-sinks-emerge-60m-positions": ("W-42",),
    "when-sinks-emerge-60m-biases": ("W-47", "W-48", "W-49", "W-50", "W-51", "W-52"),
    "when-sinks-emerge-60m-operations": ("W-54", "W-55", "W-56", "W-57"),
    "when-sinks-emerge-60m-learning-rate": ("W-31",),
    "when-sinks-emerge-60m-batches": ("W-33",),
    "when-sinks-emerge-60m-fixed-token": ("W-37",),
    "when-sinks-emerge-60m-random-tokens": ("W-35", "W-36"),
    "when-sinks-emerge-60m-blocks": ("W-45", "W-46"),
    "when-sinks-emerge-60m-windows": ("W-40",),
    "when-sinks-emerge-60m-data": ("W-30",),
    "when-sinks-emerge-60m-sigmoid": ("W-58",),
    "when-sinks-emerge-1b": ("W-56",),
}
OF_THE_HUB = {"when-sinks-emerge-table-1": (), "pythia-training": (), "atlas": ()}
SMALL = {"num-seqs": 4, "seq-len": 16, "window": 16}  # of sweeps of the hub, which have no small form
BEGUN = ("cells/*/*/training/checkpoint-*/trainer_state.json", "cells/*/run.json")


def sinkscope(*arguments: str | Path, hub: str = "") -> subprocess.Popen:
    """Start the command line in a process group of its own."""
    command = [sys.executable, "-m", "sinkscope.cli", *map(str, arguments)]
    places = {"HF_ENDPOINT": hub, "HF_HUB_CACHE": "build/rehearse/hub", "HF_HUB_DISABLE_XET": "1"} if hub else {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | places, start_new_session=True, **pipes)  # type: ignore[call-overload]


def killed_and_resumed(folder: Path, *arguments: str | Path, hub: str = "") -> str:
    """Run a command, kill it once something in its folder is begun, and run it again; return what is wrong."""
    process = sinkscope(*arguments, hub=hub)
    while process.poll() is None and not any(any(folder.glob(pattern)) for pattern in BEGUN):
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    elif process.returncode:
        return f"status {process.returncode}: {process.communicate()[1].strip().splitlines()[-1:]}"
    process.communicate()
    process = sinkscope(*arguments, hub=hub)
    _, errors = process.communicate()
    return f"status {process.returncode}: {errors.strip().splitlines()[-1:]}" if process.returncode else ""


def wrong_with(folder: Path, sweep: Sweep, claims: tuple[str, ...]) -> list[str]:
    """Return what a finished sweep lacks: cells, figures, rows of its tables, or claims."""
    tables = folder / "comparison" / "tables"
    done = {path.parent.name for path in folder.glob("cells/*/run.json")}
    lacking = [f"cell {cell.name}" for cell in sweep.cells if cell.name not in done]
    if not any((folder / "comparison" / "figures").glob("*.png")):
        lacking.append("figures")
    if sweep.content.commands.keys() == {"train"}:
        levels = len(at_a_glance(pd.read_parquet(tables / f"{STUDY}.parquet")))
        wanted = sum(len(parse_methods(cell.options.method)) for cell in sweep.cells)
        if levels != wanted:
            lacking.append(f"{wanted} levels: there are {levels}")
    if claims:
        process = sinkscope(
            "claims", "--from", folder, "--out", folder.with_name(f"{folder.name}-claims"), "--overwrite"
        )
        _, errors = process.communicate()
        if process.returncode:
            return [*lacking, f"claims: status {process.returncode}: {errors.strip().splitlines()[-1:]}"]
        judged = pd.read_parquet(folder.with_name(f"{folder.name}-claims") / "tables" / "claim.parquet")
        measured = set(judged.loc[judged["outcome"] != "not measured", "claim"])
        lacking += [f"claim {claim}" for claim in claims if claim not in measured]
    return lacking


def rehearse(name: str, folder: Path, hub: Hub) -> list[str]:
    """Run one sweep, and return what is wrong with it."""
    if name in TRAININGS:
        file, claims, small = name, TRAININGS[name], ("--quick",)
    else:
        file, claims, small = f"{folder}.yaml", OF_THE_HUB[name], ()
        content = yaml.safe_load(known_sweeps()[name].read_text(encoding="utf-8"))
        Path(file).write_text(yaml.safe_dump(content | {"options": content["options"] | SMALL}), encoding="utf-8")
    sweep = read_sweep(file, {}, quick=bool(small))
    for model, revision in {cell.source for cell in sweep.cells if cell.command != "train"}:
        before = hub.repos.get(model, Repo({})).revisions
        hub.repos[model] = Repo({**before, revision or "main": folder.parent / "tiny"})
    shutil.rmtree(folder, ignore_errors=True)
    wrong = killed_and_resumed(folder, "sweep", file, *small, "--out", folder, hub=hub.url)
    return [wrong] if wrong else wrong_with(folder, sweep, claims)


def main(place: Path, names: list[str]) -> int:
    place.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(documents("natural", None)[1], 512)
    tokenizer.save_pretrained(place / "tiny")
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(place / "tiny")
    failures = 0
    with Hub() as hub:
        for name in names or [*TRAININGS, *OF_THE_HUB]:
            start = time.perf_counter()
            wrong = rehearse(name, place / name, hub)
            failures += bool(wrong)
            print(f"{name}: {'; '.join(wrong) or 'done'} ({time.perf_counter() - start:.0f} s)", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
