"""The models and files of the attacks, and how a command may end: well, or with a message of one or two lines."""

import argparse
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # support, tiny

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.figures import skip_figures
from support.retrofit_command import command_line, words_tokenizer
from tiny import tiny_model

from sinkscope.errors import SinkscopeError

SECONDS = 60  # a command that takes longer hangs
TEXT = "the of and drain " * 300
SMALL = ("--num-seqs", "2", "--seq-len", "8", "--quiet")
TRAINED = ("--steps", "1", "--num-seqs", "2", "--block-length", "8", "--batch-size", "1", "--quiet")

FIFO, FOLDER, LOOP, UNREADABLE = "a pipe", "a folder", "a circle of links", "no permission"
Content = bytes | str  # the content of a file, or one of the kinds above


class HungError(BaseException):
    """The error of a command that hangs. No command may catch it."""


@contextmanager
def limited() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome_of_command(args: tuple[str, ...]) -> str:
    """ "right", "refused", "failed", or what is wrong with how a command ended."""
    try:
        with limited():
            result = command_line(*args)
    except HungError:
        return "HUNG"
    if isinstance(result.exception, HungError):
        return "HUNG"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"RAW {result.exception!r}"
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if result.exit_code == 0:
        return "right"
    if result.exit_code not in (1, 2):
        return f"RAW status {result.exit_code}"
    if any("--debug shows where" in line for line in lines):
        return f"RAW {lines}"
    return ("refused" if result.exit_code == 2 else "failed") if len(lines) in (1, 2) else f"LONG {lines}"


def outcome_of_call(work: Callable[[], Any]) -> str:
    """Return the outcome of a function of the Python API."""
    try:
        with limited():
            work()
        return "right"
    except HungError:
        return "HUNG"
    except SinkscopeError as error:
        return "refused" if len(str(error).splitlines()) in (1, 2) else f"LONG {error}"
    except BaseException as error:
        return f"RAW {error!r}"


@dataclass
class Counts:
    """Counts of outcomes by reader or command; wrong outcomes are printed at once."""

    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, what: str, outcome: str, how: object) -> None:
        kind = outcome.split()[0]
        self.found[what, kind] += 1
        if kind not in ("right", "refused", "failed"):
            self.wrong += 1
            print(f"{what}: {outcome[:600]!a}\n    {ascii(how)[:600]}", flush=True)

    def show(self) -> None:
        kinds = ["right", "refused", "failed", "RAW", "LONG", "HUNG"]
        print(f"\n{'':24}" + "".join(f"{kind:>9}" for kind in kinds))
        for what in dict.fromkeys(what for what, _ in self.found):
            print(f"{what:24}" + "".join(f"{self.found[what, kind]:9}" for kind in kinds))
        total = [sum(count for (_, of), count in self.found.items() if of == kind) for kind in kinds]
        print(f"{'all':24}" + "".join(f"{count:9}" for count in total), flush=True)


def save_models(folder: Path) -> None:
    """Save `tiny`, with a tokenizer and a text, and `bare`, which reads token ids."""
    for name in ("tiny", "bare"):
        tiny_model("llama").save_pretrained(folder / name)
    words_tokenizer().save_pretrained(folder / "tiny")
    (folder / "tiny" / "x.txt").write_text(TEXT)


def put(path: Path, content: Content | None) -> None:
    """Write a file, or make another kind of file at its path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if content is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == FIFO:
        os.mkfifo(path)
    elif content == FOLDER:
        path.mkdir()
    elif content == LOOP:
        path.symlink_to(path.name)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:  # root can read it anyway
        path.touch(mode=0)


def examples(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Return `count` values of a strategy, determined by the number."""
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def attack(attacks: Callable[[int, int, Counts], None], about: str) -> int:
    """Parse the command line, attack, print the counts, and return the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    counts, start = Counts(), time.time()
    with pytest.MonkeyPatch.context() as patch:
        from huggingface_hub import constants

        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # so that odd names are not looked up on the hub
        skip_figures(patch)
        attacks(asked.count, asked.seed, counts)
    counts.show()
    print(f"{sum(counts.found.values())} outcomes in {time.time() - start:.0f} s, {counts.wrong} of them wrong")
    return 1 if counts.wrong else 0
