"""Give every command bad inputs, or damage folders and open them, and check that none ends with another's error.

    python tests/torture/attacks.py inputs --count 1000 --seed 0
    python tests/torture/attacks.py folders --count 100 --seed 0

Each outcome is a right result (status 0) or a message of one or two lines (status 1 or 2); anything else is printed,
with its arguments or the damage, and the exit status is 1. Commands run in this process, on a tiny model, without
figures.
"""

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # support, tiny

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load
from support import bad_inputs as bad
from support.figures import skip_figures
from support.retrofit_command import command_line, words_tokenizer
from tiny import tiny_model

from sinkscope import Run, Series, SinkscopeError
from sinkscope.figures import FIGURES

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
    lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("read: ")]
    if result.exit_code == 0:
        return "right"
    if result.exit_code not in (1, 2):
        return f"RAW status {result.exit_code}"
    if any("--debug shows where" in line for line in lines):
        return f"RAW {lines}"
    return ("refused" if result.exit_code == 2 else "failed") if len(lines) in (1, 2) else f"LONG {lines}"


def outcome_of_call(work: Callable[[], Any]) -> str:
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

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, what: str, outcome: str, how: object) -> None:
        kind = outcome.split()[0]
        self.outcomes[what, kind] += 1
        if kind not in ("right", "refused", "failed"):
            self.wrong += 1
            print(f"{what}: {outcome[:600]!a}\n    {ascii(how)[:600]}", flush=True)

    def show(self) -> None:
        kinds = ["right", "refused", "failed", "RAW", "LONG", "HUNG"]
        print(f"\n{'':24}" + "".join(f"{kind:>9}" for kind in kinds))
        for what in dict.fromkeys(what for what, _ in self.outcomes):
            print(f"{what:24}" + "".join(f"{self.outcomes[what, kind]:9}" for kind in kinds))
        total = [sum(count for (_, of), count in self.outcomes.items() if of == kind) for kind in kinds]
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
    values: list[Any] = []

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values


# --- bad inputs

CHEAP = (*SMALL, "--observables", "activation")
LINES = b'{"text": "the of and drain the of and drain the of and drain the of and drain"}\n' * 60
IDS = b'{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 4
RECIPE = b"title: x\noptions: {num-seqs: 2, seq-len: 8, observables: [activation]}\n"


@dataclass(frozen=True)
class Attack:
    """The files to write in the working directory (None: removed), and the arguments of the command."""

    args: tuple[str, ...]
    files: dict[str, Content | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """Attacks of one kind, and the same command with valid input, which must succeed."""

    attacks: st.SearchStrategy[Attack]
    good: Attack


SPECIAL = st.sampled_from([FIFO, FOLDER, LOOP, UNREADABLE])


def file_given(name: str, contents: st.SearchStrategy[bytes], good: bytes, *args: str) -> Way:
    drawn = st.one_of(contents, contents, contents, SPECIAL)
    return Way(drawn.map(lambda content: Attack(args, {name: content})), Attack(args, {name: good}))


def words_given(texts: st.SearchStrategy[str], good: str, *args: str) -> Way:

    def attack_with(text: str) -> Attack:
        return Attack(tuple(arg.replace("{}", text) for arg in args))

    return Way(texts.map(attack_with), attack_with(good))


def ways(home: Path) -> dict[str, Way]:

    def whole(name: str) -> bytes:
        return (home / "tiny" / name).read_bytes()

    def of_json(name: str) -> st.SearchStrategy[bytes]:
        return bad.edited(json.loads(whole(name))).map(bad.written) | bad.some_json | bad.damaged(whole(name))

    def of_model(name: str, contents: st.SearchStrategy[bytes], *more: str) -> Way:
        return file_given(f"tiny/{name}", contents, whole(name), "analyze", "tiny", *CHEAP, *more)

    ids = ("analyze", "bare", *CHEAP, "--input")
    texts, trained = ("analyze", "tiny", *CHEAP, "--input"), ("--config", "bare/config.json", *TRAINED)
    generation = "generation_config.json"
    return {
        "text": file_given("x.txt", bad.text_files, TEXT.encode(), *texts, "x.txt"),
        "JSON lines": file_given("x.jsonl", bad.json_lines, LINES, *texts, "x.jsonl"),
        "lists of ids": file_given("x.jsonl", bad.json_lines, IDS, *ids, "x.jsonl"),
        "arrays": file_given("x.npy", bad.npy_files, array(), *ids, "x.npy"),
        "recipes": file_given("x.yaml", bad.recipes, RECIPE, "run", "x.yaml", "tiny", *SMALL),
        "config.json": of_model("config.json", of_json("config.json")),
        generation: of_model(generation, of_json(generation), "--input", "sampled"),
        "tokenizer.json": of_model("tokenizer.json", of_json("tokenizer.json")),
        "tokenizer_config.json": of_model("tokenizer_config.json", of_json("tokenizer_config.json")),
        "weights": of_model("model.safetensors", bad.damaged(whole("model.safetensors"))),
        "index of weights": _index(whole("model.safetensors")),
        "interventions": words_given(
            bad.interventions, "mask-sink", "intervene", "tiny", "--do", "{}", *SMALL, "--draws", "1"
        ),
        "retrofits": words_given(
            bad.retrofits, "vga", "retrofit", "tiny", "--method={}", "--text", "tiny/x.txt", *TRAINED
        ),
        "texts to train on": file_given(
            *("x.jsonl", bad.json_lines, LINES, "train", "--method", "none", "--text", "x.jsonl"),
            *("--tokenizer", "tiny", *trained),
        ),
        "architectures": file_given(
            *("x.json", of_json("config.json"), whole("config.json"), "train", "--config", "x.json"),
            *("--method", "none", "--text", "tiny/x.txt", "--tokenizer", "tiny", *TRAINED),
        ),
        "options": Way(_options(), Attack(("analyze", "bare", *CHEAP, "--input", "random"))),
        "names": Way(_names(), Attack(("list", "metrics", "--quiet"))),
    }


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(32).reshape(4, 8) % 9)
    return file.getvalue()


def _index(weights: bytes) -> Way:

    def written(where: dict[str, str]) -> bytes:
        return bad.written({"metadata": {}, "weight_map": where})

    def with_index(content: bytes) -> Attack:
        index = "tiny/model.safetensors.index.json"
        files = {"tiny/model.safetensors": None, "tiny/a.safetensors": weights, index: content}
        return Attack(("analyze", "tiny", *CHEAP), files)

    names = sorted(load(weights))
    files = st.sampled_from(["a.safetensors", "../bare/model.safetensors"]) | bad.odd_texts
    odd = st.dictionaries(st.sampled_from(names) | bad.odd_texts, files).map(written) | bad.some_json
    return Way(odd.map(with_index), with_index(written(dict.fromkeys(names, "a.safetensors"))))


def _options() -> st.SearchStrategy[Attack]:
    names = "num-seqs seq-len seed batch-size positions window epsilon bos dtype attn observables device-map dataset"
    flags = [f"--{name}" for name in f"{names} revision gguf-file".split()]
    named = st.tuples(st.sampled_from(flags), bad.odd_numbers.map(str) | bad.odd_texts)
    plain = named.filter(lambda pair: pair[0] != "--dataset" or "/" not in pair[1])
    return plain.map(lambda pair: Attack(("analyze", "bare", *CHEAP, "--input", "random", f"{pair[0]}={pair[1]}")))


def _names() -> st.SearchStrategy[Attack]:
    """Draw an odd name of a file, folder or model, in place of {}."""
    ways: list[tuple[str, ...]] = [
        ("analyze", *CHEAP, "--", "{}"),
        ("doctor", "--quiet", "--", "{}"),
        ("analyze", "bare", *CHEAP, "--input={}"),
        ("analyze", "bare", *CHEAP, "--input=random", "--out={}"),
        ("analyze", "--quiet", "--from={}"),
        ("compare", "--quiet", "--", "{}", "{}"),
        ("run", "--quiet", "--", "{}"),
        ("train", "--config={}", *TRAINED),
        ("train", "--tokenizer={}", *TRAINED),
        ("train", "--text={}x", *TRAINED),
        ("list", "--quiet", "--", "{}"),
    ]
    return st.builds(
        lambda way, name: Attack(tuple(arg.replace("{}", name) for arg in way)), st.sampled_from(ways), bad.odd_texts
    )


def attack_inputs(count: int, number: int, counts: Counts) -> None:
    home = Path(tempfile.mkdtemp(prefix="torture-"))
    save_models(home)

    def outcome(attack: Attack) -> str:
        with tempfile.TemporaryDirectory(prefix="torture-") as here:
            for name in ("tiny", "bare"):
                shutil.copytree(home / name, Path(here, name))
            os.chdir(here)
            try:
                for name, content in attack.files.items():
                    put(Path(name), content)
                return outcome_of_command(attack.args)
            finally:
                os.chdir("/")

    kinds = ways(home)
    for what, way in kinds.items():
        if (result := outcome(way.good)) != "right":
            raise SystemExit(f"{what}: {result} even with valid input: {way.good.args}")
        for one in examples(way.attacks, -(-count // len(kinds)), number):
            counts.add(what, outcome(one), (one.args, one.files))
    shutil.rmtree(home)


# --- damaged folders

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
    (home / "x.yaml").write_bytes(RECIPE)
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
    table, source = (tables[int(at)] for at in random.integers(len(tables), size=2))
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
        table.write_bytes(source.read_bytes())
    if way == "missing":
        table.unlink()
    if way == "folder":
        put(table, str(random.choice([FOLDER, FIFO, LOOP])))
    return f"{way} {table.relative_to(run)} ({source.relative_to(run)})"


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
    for result in opened:
        yield "repr", outcome_of_call(partial(repr, result))
        for name in ("verdict",) if kind in RUNS else ("headlines", "warnings"):
            yield name, outcome_of_call(partial(getattr, result, name))
        figures = [partial(result.figure, name) for name in FIGURES] if kind in RUNS else [result.figures]
        for draw in figures:
            yield "figures", outcome_of_call(draw)
    again = (*COMMANDS[kind], "--out", "run")
    if kind in ("retrofit", "train"):
        yield "the same again", outcome_of_command(again)
    subprocess.run(["cp", "-a", "run", "copy"], cwd=home, check=True)
    yield "--overwrite", outcome_of_command((*again, "--overwrite"))
    shutil.rmtree(home / "run", ignore_errors=True)
    (home / "copy").rename(home / "run")
    recipe = ("run", "x.yaml", "tiny", "--out", "run", "--overwrite", "--quiet")
    yield "run --overwrite", outcome_of_command(recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("inputs", "folders"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    counts, start = Counts(), time.time()
    with pytest.MonkeyPatch.context() as patch:
        from huggingface_hub import constants

        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # so that odd names are not looked up on the hub
        skip_figures(patch)
        {"inputs": attack_inputs, "folders": attack_folders}[asked.what](asked.count, asked.seed, counts)
    counts.show()
    print(f"{sum(counts.outcomes.values())} outcomes in {time.time() - start:.0f} s, {counts.wrong} of them wrong")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
