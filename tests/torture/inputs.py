"""Bad inputs in thousands: how every command ends that is given them, and that none ends with another library's error.

    python tests/torture/inputs.py --count 1000 --seed 0

Each outcome is a right result (status 0) or a message of one or two lines (status 1 or 2); anything else is printed,
with its arguments, and ends this with status 1. Commands run in this process, on a tiny model, without figures.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # support, torture

from hypothesis import strategies as st
from support import bad_inputs as bad
from torture.outcomes import (
    FIFO,
    FOLDER,
    LOOP,
    SMALL,
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


@dataclass(frozen=True)
class Attack:
    """Files to write in the working directory (none of None: removed), and the arguments of the command."""

    args: tuple[str, ...]
    files: dict[str, Content | None] = field(default_factory=dict)


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
        "recipes": given_file("x.yaml", bad.recipes, "run", "x.yaml", "--model", "tiny", *SMALL),
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


def attack_inputs(count: int, number: int, counts: Counts) -> None:
    home = Path(tempfile.mkdtemp(prefix="torture-"))
    save_models(home)
    strategies = attacks(home)
    each = -(-count // len(strategies))
    for what, strategy in strategies.items():
        for one in examples(strategy, each, number):
            counts.add(what, _in_a_copy(home, one), (one.args, one.files))
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


if __name__ == "__main__":
    sys.exit(attack(attack_inputs, __doc__))
