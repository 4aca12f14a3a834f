"""Kill commands at random, repeat them, and compare the result with that of an uninterrupted run.

    python tests/torture/kills.py --kills 200 --seed 0

Each trial kills a command once or several times in a row, at a random moment or before a random change that it makes
on the disk, and then runs it to its end: alone, or with a second process for the same folder. It prints the
outcomes of each command, and ends with status 1 if anything was wrong, lost or left over.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # support, tiny
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import pandas as pd
import pytest
from support.faults import assert_same_folder, before_change, kill
from support.figures import skip_figures
from support.forked import Process, forked
from tiny import tiny_model, tiny_tokens

import sinkscope
from sinkscope.cli.app import app
from sinkscope.commands.sweep import pools

MEASURED = ("--input", "random", "--num-seqs", "4", "--seq-len", "24", "--batch-size", "2")
NAMES = ("analyze", "intervene", "quantize", "retrofit", "train", "sweep")
TWICE = 0.3  # share of the trials that end with two processes at once
MOST_WRONG = 5  # errors of a command before it is given up
pools.METHOD = "fork"  # workers that need not import everything again
TRAINED = ("--steps", "6", "--save-every", "2", "--block-length", "16", "--batch-size", "1", "--num-seqs", "4")


@dataclass(frozen=True)
class Command:
    """A command line. A command that resumes is run without --overwrite."""

    name: str
    arguments: tuple[str, ...]
    goes_on: bool = False
    change: tuple[str, ...] = ("--seed", "1")  # options with which its numbers differ

    def run(self, out: Path, overwrite: bool = True) -> None:
        """Run the command and exit the process."""
        both = (*self.arguments, "--out", str(out), "--quiet", *(["--overwrite"] if overwrite else []))
        app([self.name, *both], prog_name="sinkscope")


def commands(model: Path, text: Path) -> dict[str, Command]:
    training = ("--text", str(text), *TRAINED)
    every = [
        Command("analyze", (str(model), *MEASURED)),
        Command("intervene", (str(model), "--do", "mask-sink", "--draws", "1", *MEASURED)),
        Command("quantize", (str(model), "--calibration", "2", *MEASURED[:2], "--num-seqs", "2", "--seq-len", "12")),
        Command("retrofit", (str(model), "--method", "vga", *training), goes_on=True),
        Command("sweep", (str(sweep_of(model)), "--workers", "1", "--retry"), goes_on=True, change=("--attn", "eager")),
        Command("train", ("--config", str(model / "config.json"), "--method", "vscale", *training), goes_on=True),
    ]
    return {command.name: command for command in every}


def sweep_of(model: Path) -> Path:
    path = model.with_name("sweep.yaml")
    options = "{num-seqs: 2, seq-len: 12, observables: [attention]}"
    path.write_text(f"title: Tiny\nmodels: [{model}]\ninputs: [random, repeated]\noptions: {options}\n")
    return path


def ended(process: Process, errors: Path) -> int:
    """Return the exit status. An error must be one or two lines, with status 1 or 2."""
    status, told = process.wait(), errors.read_text()
    is_clean = status <= 0 or (status <= 2 and len(told.splitlines()) in (1, 2) and "unexpected" not in told)
    assert is_clean, f"status {status}: {told}"
    return status


def started(
    command: Command, out: Path, errors: Path, overwrite: bool, before: Callable[[], Any] = lambda: None
) -> Any:
    """Return a context with the process of the command, whose stderr is written to a file."""

    def work() -> None:
        handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 2)
        before()
        command.run(out, overwrite)

    errors.write_text("")
    return forked(work)


def killed(command: Command, out: Path, errors: Path, overwrite: bool, unbroken: tuple[float, int]) -> bool:
    """Kill the command at a random moment or before a random change. Return whether it was killed before its end."""
    seconds, changes = unbroken
    if random.random() < 0.5:
        fault = partial(before_change, random.randint(1, changes), out.parent, kill)
        with started(command, out, errors, overwrite, fault) as process:
            return ended(process, errors) < 0
    with started(command, out, errors, overwrite) as process:
        time.sleep(random.uniform(0, seconds))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        return ended(process, errors) < 0


def finished(command: Command, out: Path, errors: Path, overwrite: bool) -> int:
    """Run the command to its end, sometimes in two processes. Return how many failed; one must succeed."""
    rival = errors.with_name("rival")
    with started(command, out, errors, overwrite) as process:
        if random.random() < TWICE:
            with started(command, out, rival, overwrite) as second:
                statuses = [ended(process, errors), ended(second, rival)]
        else:
            statuses = [ended(process, errors)]
    told = "".join(path.read_text() for path in (errors, rival) if path.exists())
    was_done = not overwrite and not command.goes_on and "already holds a run" in told
    assert 0 in statuses or was_done, f"statuses {statuses}: {told}"
    return sum(status != 0 for status in statuses)


def trial(command: Command, old: Path, new: Path, folder: Path, unbroken: tuple[float, int]) -> Counter[str]:
    out, errors = folder / "parent" / "run", folder / "errors"
    out.parent.mkdir(parents=True)
    counts: Counter[str] = Counter()
    overwrite = random.random() < 0.5
    if overwrite:
        shutil.copytree(old, out)
    for _ in range(random.choice((1, 1, 2, 3))):
        counts["kills"] += killed(command, out, errors, overwrite, unbroken)
        if overwrite and not command.goes_on:
            sinkscope.Run.open(out)  # the old run or the new one, at any time
    counts["clean errors"] += finished(command, out, errors, overwrite)
    if not command.goes_on:
        sinkscope.show(out)  # draws what a kill after the tables has left undrawn
    assert_same_folder(out, new)
    counts["right"] += 1
    return counts


def run_unbroken(command: Command, out: Path, *more: str) -> tuple[float, int]:
    """Return how many seconds the command takes, and how often it changes something on the disk."""
    errors, log = out.parent / "errors", out.parent / "changes"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    start = time.monotonic()
    changed = Command(command.name, (*command.arguments, *more))
    count = partial(before_change, 1, out.parent, partial(os.write, handle, b"."))
    with started(changed, out, errors, False, count) as process:
        if ended(process, errors):
            raise SystemExit(errors.read_text())
    os.close(handle)
    return time.monotonic() - start, log.stat().st_size


def torture(kills: int, folder: Path, names: Collection[str] = NAMES) -> tuple[dict[str, Counter[str]], list[str]]:
    model, text = folder / "tiny", folder / "ids.npy"
    tiny_model("llama").save_pretrained(model)
    np.save(text, tiny_tokens(24, 16).numpy())
    by_command: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for place, name in enumerate(names):
        command = commands(model, text)[name]
        old, new = folder / name / "old" / "run", folder / name / "new" / "run"
        for path in (old, new):
            path.parent.mkdir(parents=True)
        run_unbroken(command, old, *command.change)
        unbroken = run_unbroken(command, new)
        counts = by_command[name] = Counter()
        wanted = kills // len(names) + (place < kills % len(names))
        while counts["kills"] < wanted and counts["wrong"] <= MOST_WRONG:
            counts["trials"] += 1
            at = folder / name / str(counts["trials"])
            try:
                counts += trial(command, old, new, at, unbroken)
                shutil.rmtree(at)
            except Exception as error:  # also unexpected errors
                counts["wrong"] += 1
                wrong.append(f"{name}, {at}: {type(error).__name__}: {error}")
        print(f"{name}: {dict(counts)}", file=sys.stderr)
    return by_command, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    random.seed(asked.seed)
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        counted, wrong = torture(asked.kills, folder)
    columns = ["trials", "kills", "right", "clean errors", "wrong"]
    table = pd.DataFrame([[counts[name] for name in columns] for counts in counted.values()], list(counted), columns)
    table.loc["all"] = table.sum()
    print(table.to_string())
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        sys.exit(f"the folders of failed trials are left in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
