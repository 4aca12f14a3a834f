"""Give every command thousands of bad inputs, and check that none ends with another library's error.

    python tests/torture/inputs.py --count 1000 --seed 0

Each outcome is a right result (status 0) or a message of one or two lines (status 1 or 2); anything else is printed,
with its arguments, and the exit status is 1. Commands run in this process, on a tiny model, without figures.
"""

import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # support, torture

import numpy as np
from hypothesis import strategies as st
from safetensors.torch import load
from support import bad_inputs as bad
from torture.outcomes import (
    FIFO,
    FOLDER,
    LOOP,
    SMALL,
    TEXT,
    TRAINED,
    UNREADABLE,
    Content,
    Counts,
    attack,
    examples,
    outcome_of_command,
    put,
    save_models,
)

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
    """Attack a command that reads one file."""
    drawn = st.one_of(contents, contents, contents, SPECIAL)
    return Way(drawn.map(lambda content: Attack(args, {name: content})), Attack(args, {name: good}))


def words_given(texts: st.SearchStrategy[str], good: str, *args: str) -> Way:
    """Attack a command with texts in place of {}."""

    def attack_with(text: str) -> Attack:
        return Attack(tuple(arg.replace("{}", text) for arg in args))

    return Way(texts.map(attack_with), attack_with(good))


def ways(home: Path) -> dict[str, Way]:
    """Map each kind of input to its attacks."""

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
        "recipes": file_given("x.yaml", bad.recipes, RECIPE, "run", "x.yaml", "--model", "tiny", *SMALL),
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
    """Attack the index of the weight files."""

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
    """Draw an option with an odd value."""
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
        if (found := outcome(way.good)) != "right":
            raise SystemExit(f"{what}: {found} even with valid input: {way.good.args}")
        for one in examples(way.attacks, -(-count // len(kinds)), number):
            counts.add(what, outcome(one), (one.args, one.files))
    shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(attack(attack_inputs, __doc__))
