"""Bad inputs in thousands: how every command ends that is given them, and that none ends with another library's error.

python tests/torture/inputs.py --count 1000 --seed 0      generated inputs over all commands
python tests/torture/inputs.py --folders 100 --seed 0     a damaged run folder under every command that opens one

Each outcome is a right result (status 0) or a message of one or two lines (status 1 or 2); anything else is printed,
with its arguments, and ends this with status 1. Commands run in this process, on a tiny model, without figures.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support import bad_inputs as bad
from support.figures import skip_figures
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from sinkscope.cli.app import app
from sinkscope.errors import SinkscopeError
from sinkscope.report.figures import FIGURES
from sinkscope.report.run import Run

SECONDS = 60  # a command that takes longer hangs
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "the", "of", "and", "drain")
SMALL = ("--num-seqs", "2", "--seq-len", "8", "--quiet")
CHEAP = (*SMALL, "--observables", "activation")
TRAINED = ("--steps", "1", "--num-seqs", "2", "--block-length", "8", "--batch-size", "1", "--quiet")

FIFO, FOLDER, LOOP, UNREADABLE = "a pipe", "a folder", "a circle of links", "no permission"
Content = bytes | str  # of a file; or one of those above


@dataclass(frozen=True)
class Attack:
    """Files to write in the working directory (none of None: removed), and the arguments of the command."""

    args: tuple[str, ...]
    files: dict[str, Content | None] = field(default_factory=dict)


class HungError(BaseException):
    """No command may catch it."""


# ------------------------------------------------------------------------------------------------ outcomes


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
            result = CliRunner().invoke(app, list(args))
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
    """The same of a function of the Python interface."""
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
    """Outcomes by reader or command; what is wrong is printed at once."""

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


# ------------------------------------------------------------------------------------------------ the models


def save_models(folder: Path) -> None:
    """`tiny` with a tokenizer, and `bare`, which reads ids."""
    for name in ("tiny", "bare"):
        tiny_model("llama").save_pretrained(folder / name)
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>").save_pretrained(folder / "tiny")


def put(path: Path, content: Content | None) -> None:
    """Write a file, or put something else in its place."""
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
    else:  # root reads it all the same
        path.touch(mode=0)


# ------------------------------------------------------------------------------------------------ the attacks


def attacks(home: Path) -> dict[str, st.SearchStrategy[Attack]]:
    """What is attacked → how."""
    special = st.sampled_from([FIFO, FOLDER, LOOP, UNREADABLE])

    def given_file(name: str, contents: st.SearchStrategy[bytes], *args: str) -> st.SearchStrategy[Attack]:
        return st.one_of(contents, contents, contents, special).map(lambda content: Attack(args, {name: content}))

    def whole(name: str) -> bytes:
        return (home / "tiny" / name).read_bytes()

    def of_json(name: str) -> st.SearchStrategy[bytes]:
        return bad.edited(json.loads(whole(name))).map(bad.written) | bad.some_json | bad.damaged(whole(name))

    def of_model(name: str, contents: st.SearchStrategy[bytes], *more: str) -> st.SearchStrategy[Attack]:
        return given_file(f"tiny/{name}", contents, "analyze", "tiny", *CHEAP, *more)

    index = st.dictionaries(
        bad.odd_texts, bad.odd_texts | st.sampled_from(["model.safetensors", "../bare/model.safetensors"])
    )
    indices = index.map(lambda weights: bad.written({"metadata": {}, "weight_map": weights})) | bad.some_json
    shards = indices.map(
        lambda content: Attack(
            ("analyze", "tiny", *CHEAP), {"tiny/model.safetensors": None, "tiny/model.safetensors.index.json": content}
        )
    )
    ids = ("analyze", "bare", *CHEAP, "--input")
    return {
        "text": given_file("x.txt", bad.text_files, "analyze", "tiny", *CHEAP, "--input", "x.txt"),
        "JSON lines": given_file("x.jsonl", bad.json_lines, "analyze", "tiny", *CHEAP, "--input", "x.jsonl"),
        "lists of ids": given_file("x.jsonl", bad.json_lines, *ids, "x.jsonl"),
        "arrays": given_file("x.npy", bad.npy_files, *ids, "x.npy"),
        "recipes": given_file("x.yaml", bad.recipes, "run", "x.yaml", "tiny", *SMALL),
        "config.json": of_model("config.json", of_json("config.json")),
        "generation_config.json": of_model(
            "generation_config.json", of_json("generation_config.json"), "--input", "sampled"
        ),
        "tokenizer.json": of_model("tokenizer.json", of_json("tokenizer.json")),
        "tokenizer_config.json": of_model("tokenizer_config.json", of_json("tokenizer_config.json")),
        "weights": of_model("model.safetensors", bad.damaged(whole("model.safetensors"))),
        "index of weights": shards,
        "interventions": bad.interventions.map(
            lambda text: Attack(("intervene", "tiny", "--do", text, *SMALL, "--draws", "1"))
        ),
        "retrofits": bad.retrofits.map(
            lambda text: Attack(
                ("retrofit", "tiny", f"--method={text}", "--text", "x.txt", *TRAINED),
                {"x.txt": b"the of and drain " * 300},
            )
        ),
        "texts to train on": given_file(
            *("x.jsonl", bad.json_lines, "train", "--method", "none", "--text", "x.jsonl", "--tokenizer", "tiny"),
            *("--config", "bare/config.json", *TRAINED),
        ),
        "architectures": given_file("x.json", of_json("config.json"), "train", "--config", "x.json", *TRAINED),
        "options": _options(),
        "names": _names(),
    }


def _options() -> st.SearchStrategy[Attack]:
    """One option with an odd value."""
    flags = [
        *(
            "--num-seqs",
            "--seq-len",
            "--seed",
            "--batch-size",
            "--positions",
            "--window",
            "--epsilon",
            "--bos",
            "--dtype",
        ),
        *("--attn", "--observables", "--device-map", "--dataset", "--revision", "--gguf-file"),
    ]
    named = st.tuples(st.sampled_from(flags), bad.odd_numbers.map(str) | bad.odd_texts)
    plain = named.filter(lambda pair: pair[0] != "--dataset" or "/" not in pair[1])
    return plain.map(lambda pair: Attack(("analyze", "bare", *CHEAP, "--input", "random", f"{pair[0]}={pair[1]}")))


def _names() -> st.SearchStrategy[Attack]:
    """A name of a file, folder or model that is odd."""
    ways: list[Callable[[str], tuple[str, ...]]] = [
        lambda name: ("analyze", *CHEAP, "--", name),
        lambda name: ("doctor", "--quiet", "--", name),
        lambda name: ("analyze", "bare", *CHEAP, f"--input={name}"),
        lambda name: ("analyze", "bare", *CHEAP, "--input=random", f"--out={name}"),
        lambda name: ("analyze", "--quiet", f"--from={name}"),
        lambda name: ("compare", "--quiet", "--", name, name),
        lambda name: ("run", "--quiet", "--", name),
        lambda name: ("train", f"--config={name}", *TRAINED),
        lambda name: ("train", f"--tokenizer={name}", *TRAINED),
        lambda name: ("train", f"--text={name}x", *TRAINED),
        lambda name: ("list", "--quiet", "--", name),
    ]
    return st.builds(lambda way, name: Attack(way(name)), st.sampled_from(ways), bad.odd_texts)


def examples(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """So many values of a strategy, the same for the same number."""
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def attack_inputs(count: int, number: int, counts: Counts) -> None:
    home = Path(tempfile.mkdtemp(prefix="torture-"))
    save_models(home)
    strategies = attacks(home)
    each = -(-count // len(strategies))
    for what, strategy in strategies.items():
        for attack in examples(strategy, each, number):
            counts.add(what, _in_a_copy(home, attack), (attack.args, attack.files))
        print(f"{what}: {sum(found for (of, _), found in counts.found.items() if of == what)}", flush=True)
    shutil.rmtree(home)


def _in_a_copy(home: Path, attack: Attack) -> str:
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


# ------------------------------------------------------------------------------------------------ run folders


def attack_folders(count: int, number: int, counts: Counts) -> None:
    """Damage a run folder, then do everything that opens one."""
    home = Path(tempfile.mkdtemp(prefix="torture-"))
    save_models(home)
    os.chdir(home)
    (home / "x.yaml").write_text("title: x\noptions: {num-seqs: 2, seq-len: 8, observables: [activation]}\n")
    for name in ("whole", "other"):
        done = CliRunner().invoke(app, ["analyze", "tiny", *SMALL, "--seed", str(len(name)), "--out", name])
        assert done.exit_code == 0, done.output
    random, odd = np.random.default_rng(number), examples(bad.json_values, count, number)
    for place in range(count):
        shutil.copytree(home / "whole", home / "run")
        how = _damage(home / "run", random, odd[place % len(odd)])
        for what, outcome in _openings(home):
            counts.add(what, outcome, how)
        shutil.rmtree(home / "run", ignore_errors=True)
    os.chdir("/")
    shutil.rmtree(home)


def _damage(run: Path, random: np.random.Generator, value: Any) -> str:
    """One change of a run folder; what it was."""
    tables = sorted((run / "tables").iterdir())
    table, other = (tables[int(at)] for at in random.choice(len(tables), 2, replace=False))
    way = str(
        random.choice(["value", "value", "value", "delete", "cut", "change", "swap", "missing", "folder", "json"])
    )
    if way in ("value", "delete"):
        manifest = json.loads((run / "run.json").read_text())
        place, path = manifest, []
        while True:
            path.append(str(random.choice(sorted(place))))
            if not (isinstance(place[path[-1]], dict) and place[path[-1]] and random.random() < 0.7):
                break
            place = place[path[-1]]
        if way == "delete":
            del place[path[-1]]
        else:
            place[path[-1]] = value
        (run / "run.json").write_bytes(bad.written(manifest))
        return f"{way} {path}"
    if way == "cut":
        content = table.read_bytes()
        table.write_bytes(content[: int(random.integers(len(content)))])
    if way == "change":
        content = bytearray(table.read_bytes())
        for at in random.integers(len(content), size=5):
            content[at] = int(random.integers(256))
        table.write_bytes(bytes(content))
    if way == "swap":
        shutil.copy(other, table)
    if way == "missing":
        table.unlink()
    if way == "folder":
        target = run / "run.json" if random.random() < 0.3 else table
        put(target, str(random.choice([FOLDER, FIFO, LOOP])))
        return f"{target.name} is no file"
    if way == "json":
        content = (run / "run.json").read_bytes()
        (run / "run.json").write_bytes(content[: int(random.integers(len(content)))])
    return f"{way} {table.name} ({other.name})"


def _openings(home: Path) -> Iterator[tuple[str, str]]:
    """Everything that opens a run folder, each with how it ends."""
    yield "compare", outcome_of_command(("compare", "run", "other", "--out", "compared", "--quiet"))
    shutil.rmtree(home / "compared", ignore_errors=True)
    yield "analyze --from", outcome_of_command(("analyze", "--from", "run", "--out", "again", "--quiet"))
    shutil.rmtree(home / "again", ignore_errors=True)
    opened: list[Run] = []
    yield "Run.open", outcome_of_call(lambda: opened.append(Run.open("run")))
    for run in opened:
        yield "verdict", outcome_of_call(lambda run=run: run.verdict)  # type: ignore[misc]
        yield "_repr_", outcome_of_call(lambda run=run: (repr(run), run.model, run.condition, run.metric("sink_rate")))  # type: ignore[misc]
        for name in FIGURES:
            yield "figures", outcome_of_call(lambda run=run, name=name: run.figure(name))  # type: ignore[misc]
    yield "run --overwrite", outcome_of_command(("run", "x.yaml", "tiny", "--out", "run", "--overwrite", "--quiet"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="generated inputs")
    parser.add_argument("--folders", type=int, default=0, help="damaged run folders")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    counts, start = Counts(), time.time()
    with pytest.MonkeyPatch.context() as patch:
        from huggingface_hub import constants

        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # an odd name is looked for nowhere
        skip_figures(patch)
        if asked.count:
            attack_inputs(asked.count, asked.seed, counts)
        if asked.folders:
            attack_folders(asked.folders, asked.seed, counts)
    counts.show()
    print(f"{sum(counts.found.values())} outcomes in {time.time() - start:.0f} s, {counts.wrong} of them wrong")
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
