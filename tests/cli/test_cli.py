"""The command line: its output and files, and its errors for wrong input, which write nothing."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from support.figures import rough_figures
from support.forked import forked
from tiny import VOCAB, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import sinkscope.figures
import sinkscope.results.tables
from sinkscope.cli.app import app, main
from sinkscope.figures import FIGURES, applicable
from sinkscope.measuring.tracer import Tracer
from sinkscope.output.run import Run
from sinkscope.results.folders import alone_in
from sinkscope.results.tables import LEADING, names_of, write_table

SMALL = ("--num-seqs", "4", "--seq-len", "24")
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "the", "of", "and", "drain")


# --- fixtures and helpers ---


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer. Tests must not change it."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(bare: Path) -> Path:
    """The same model with a tokenizer. Tests must not change it."""
    folder = Path(shutil.copytree(bare, bare.with_name("tiny")))
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A complete analysis from the command line, and its folder. Tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patched:
        rough_figures(patched)
        return command_line("analyze", tiny, *SMALL, "--out", out), out


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of every test: an empty folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def command_line(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(status: int, *args: object) -> str:
    """Return the one or two lines of a command that ends with this status and changes no file."""
    before = tree(Path.cwd().parent)
    result = command_line(*args)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert tree(Path.cwd().parent) == before
    message = result.stderr.strip()
    assert message.startswith("sinkscope: "), message
    assert message.count("\n") <= 1
    assert "Traceback" not in message
    return message


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return every path in a folder, including temporary ones, with the content of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


# --- analyze ---


def test_a_finished_run(finished: tuple[Result, Path], tiny: Path) -> None:
    result, out = finished
    assert result.exit_code == 0, result.output
    assert result.stdout == (out / "verdict.md").read_text(encoding="utf-8")
    assert f"written to {out}" in result.stderr
    assert "\x1b" not in result.output

    run, manifest = Run.open(out), json.loads((out / "run.json").read_text(encoding="utf-8"))
    tables = {f"tables/{name}.parquet" for name in manifest["tables"]}
    figures = {f"figures/{name}.{kind}" for name in applicable(run) for kind in ("png", "pdf")}
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {"run.json", "verdict.md", "index.html"} | tables | figures
    assert {"attention", "sink_positions", "geometry", "activation", "massive", "outlier", "summary"} <= set(run.tables)
    assert figures
    for name, table in run.tables.items():
        assert tuple(table.columns) == (*LEADING, *names_of(Run.columns[name]))
    assert list(out.parent.iterdir()) == [out]

    config, model = manifest["config"], manifest["model"]
    assert (manifest["command"], config["model"], config["seq_len"], config["window"]) == ("analyze", str(tiny), 24, 24)
    assert (model["name"], manifest["family"]["name"]) == ("tiny", "llama")
    assert {"revision", "commit"} <= model.keys()
    assert (manifest["dtype"], manifest["kernel"], manifest["seed"]) == ("float32", "sdpa", 0)
    assert manifest["input"]["token_zero"] == "first text token"
    assert len(manifest["input"]["sha256"]) == 64
    assert {"torch", "transformers", "nnsight"} <= manifest["versions"].keys()
    assert {"git_commit", "started", "wall_seconds", "peak_memory_mb", "sinkscope"} <= manifest.keys()


@pytest.mark.usefixtures("no_figures")
def test_from_repeats_a_run(finished: tuple[Result, Path]) -> None:
    result = command_line("analyze", "--from", finished[1] / "run.json", "--out", "again")
    assert result.exit_code == 0, result.output
    assert "unlike" not in result.stderr
    first, second = Run.open(finished[1]), Run.open("again")
    assert first.manifest["config"] == second.manifest["config"]
    assert set(first.tables) == set(second.tables)
    for name, table in first.tables.items():
        pd.testing.assert_frame_equal(second.tables[name], table, check_exact=True)


@pytest.mark.usefixtures("no_figures")
def test_from_says_what_has_changed_since(tiny: Path) -> None:
    Path("words.txt").write_text("the of and drain " * 100)
    assert command_line("analyze", tiny, *SMALL, "--input", "words.txt", "--out", "first").exit_code == 0
    Path("words.txt").write_text("and drain the of " * 100)
    result = command_line("analyze", "--from", "first")
    assert result.exit_code == 0, result.output
    assert "note: unlike in the original run, input tokens was" in result.stderr
    assert Run.open("runs/tiny-words-repeated").condition == "words"


@pytest.mark.usefixtures("no_figures")
def test_overwrite_and_quiet(bare: Path) -> None:
    for seed in (1, 2):
        options = ("--input", "random", *SMALL, "--seed", seed, "--overwrite", "--quiet")
        result = command_line("analyze", bare, *options)
        assert (result.exit_code, result.output) == (0, "")
    assert Run.open("runs/bare-random").manifest["seed"] == 2
    assert [path.name for path in Path("runs").iterdir()] == ["bare-random"]
    message = refused(2, "analyze", bare, "--input", "random", *SMALL)
    assert "runs/bare-random already holds a run: --overwrite replaces it" in message


@pytest.mark.usefixtures("no_figures")
def test_a_model_without_tokenizer(bare: Path) -> None:
    np.save("ids.npy", np.random.default_rng(0).integers(3, VOCAB, (4, 24)))
    result = command_line("analyze", bare, *SMALL, "--input", "ids.npy", "--observables", "massive,outlier")
    assert result.exit_code == 0, result.output
    run = Run.open("runs/bare-ids")
    of_massive = {"massive", "massive_elsewhere", "massive_map"}
    assert set(run.tables) == {"finding", *of_massive, "outlier", "outlier_norms", "summary"}
    assert run.tables["massive"]["token"].str.fullmatch(r"<id \d+>").all()


# --- wrong options: refused before the model is even loaded ---


def test_wrong_options(tiny: Path) -> None:
    """Refused before the model is loaded."""
    Path("loop").symlink_to("loop")
    for options, message in (
        (("--window", "65"), "--window 65 is beyond the sequence of 64 tokens: take at most 64"),
        (("--epsilon", "much"), "--epsilon"),
        (("--epsilon", "inf"), "--epsilon inf: it must be a number"),
        (("--num-seqs", "1" + "0" * 22), "--num-seqs 10000000000000000000000: it must be at most 1000000000"),
        (("--seed", str(2**64)), "--seed 18446744073709551616: it must be at most 9223372036854775807"),
        (("--batch-size", "9" * 30), "at most 1000000000"),
        (("--batch-size", "few"), "--batch-size few: it must be a whole number or auto"),
        (("--observables", "attention,masive"), "'masive' is unknown; did you mean 'massive'?"),
        (("--widow", "3"), "--widow"),
        (("--out",), "--out"),
        (("another",), "another"),
        (("--revision", "r"), "revision 'r' does not apply"),
        (("--input", ""), "--input '': neither an input"),
        (("--input", "natrual"), "did you mean natural?"),
        (("--input", "words.txt"), "no such file"),
        (("--input", "x" * 300), "cannot be used: File name too long"),
        ((*SMALL, "--input", "a\nb\nc\nd"), ""),
        (("--seq-len", "257"), "--seq-len 257 is beyond the model's 256 positions: take at most 256"),
        (("--out", "loop"), "loop cannot be used: Too many levels of symbolic links"),
        (("--out", "a\0b"), "characters that no path has"),
        (("--out", "x" * 300), "cannot be used: File name too long"),
        (("--from", ".", "--seed", "0"), "so --seed cannot be given with it"),
        (("--from", "."), f"so MODEL {tiny} cannot be given with it"),
    ):
        given = () if "--seed" in options and "--from" in options else (tiny,)
        assert message in refused(2, "analyze", *given, *options)


def test_wrong_commands(tiny: Path, bare: Path) -> None:
    Path("empty").mkdir()
    for args, message in (
        (("anlyze",), "analyze"),
        (("--nope",), "--nope"),
        (("list", "figurs"), "'figurs' is unknown; did you mean 'figures'?"),
        (("run",), "Missing argument 'RECIPE'"),
        (("run", "gradient-sink-figure-1"), "is unknown; did you mean 'gradient-sinks-figure-1'?"),
        (("run", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("run", "gradient-sinks-figure-1", "--dtype", "int8"), "'int8' is unknown"),
        (("run", "gradient-sinks-figure-1", "--draws", "1"), "--draws"),
        (("compare",), "a comparison needs at least two runs; none was given"),
        (("compare", "one"), "one is not a run folder: it does not exist"),
        (("doctor", "nowhere/at/all"), "no such file or folder"),
        (("analyze", "empty"), "not a model in HuggingFace format: it is empty"),
        (("analyze", bare, *SMALL), "needs a tokenizer, and this model has none"),
        (("analyze", "a/b", "--revision", "main,step5"), "'main' does not end in the number of a step"),
        (("intervene", tiny, *SMALL, "--do", "zero-massive:layers=0-99999999999999"), ""),
        (("intervene", tiny, *SMALL, "--do", "zero-massive:layers=" + "9" * 30), ""),
        (("intervene", tiny, *SMALL, "--do", "mask-sink:positions=" + "9" * 5000), ""),
        (("retrofit", tiny, "--method", "register-tokens:count=" + "9" * 30, "--steps", "1"), ""),
    ):
        assert message in refused(2, *args)


@pytest.mark.usefixtures("no_figures")
def test_a_prompt(tiny: Path, tmp_path: Path) -> None:
    result = command_line("analyze", tiny, "--prompt", "the of and drain", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 0, result.output
    run = Run.open(tmp_path / "run")
    assert (run.condition, run.manifest["input"]["sequences"]) == ("prompt", 1)
    assert run.manifest["config"]["prompt"] == "the of and drain"
    assert "--input random and --prompt: give one of the two" in refused(
        2, "analyze", tiny, "--input", "random", "--prompt", "the of"
    )


def test_observables_are_looked_up_before_anything_is_trained(tiny: Path) -> None:
    Path("text.txt").write_text("a text")
    for command in (("retrofit", tiny), ("train", "--config", tiny / "config.json")):
        message = refused(2, *command, "--method", "none", "--text", "text.txt", "--observables", "masive")
        assert "'masive' is unknown; did you mean 'massive'?" in message


# --- steps of training, and recipes ---


@pytest.fixture
def steps(bare: Path) -> Path:
    for step in (5, 40):
        shutil.copytree(bare, f"trained/checkpoint-{step}")
    return Path("trained")


SERIES = ("--input", "random", *SMALL, "--observables", "attention,geometry")


@pytest.mark.usefixtures("no_figures")
def test_analyze_a_folder_of_checkpoints(steps: Path) -> None:
    result = command_line("analyze", steps, *SERIES)
    assert result.exit_code == 0, result.output
    assert [line.split("│")[1].strip() for line in result.stdout.splitlines() if "│" in line] == ["5", "40"]
    assert "value_drain" in result.stdout
    assert result.stderr == "step 5 (1 of 2)\nstep 40 (2 of 2)\nwritten to runs/trained-steps-random\n"
    assert Run.open("runs/trained-steps-random/step40").model == "checkpoint-40"
    assert "already holds a run: --overwrite replaces it" in refused(2, "analyze", steps, *SERIES)
    again = command_line("analyze", steps, *SERIES, "--overwrite", "--quiet")
    assert (again.exit_code, again.output) == (0, "")
    message = refused(2, "analyze", "--from", "runs/trained-steps-random")
    assert "holds runs: name one of them, such as runs/trained-steps-random/step40" in message


@pytest.mark.usefixtures("no_figures")
def test_steps_interrupted(steps: Path, failing: Any) -> None:
    failing("tables", KeyboardInterrupt())
    assert refused(1, "analyze", steps, *SERIES, "--batch-size", "1", "--quiet").endswith("nothing was written")


RECIPE = """
title: A small one
options: {input: random, num-seqs: 4, seq-len: 24, batch-size: 1, observables: [attention]}
figures: []
"""


def test_run(bare: Path) -> None:
    Path("recipes").mkdir()
    Path("recipes/small.yaml").write_text(RECIPE)
    result = command_line("run", "small", "--model", bare)
    assert result.exit_code == 0, result.output
    assert result.stdout == Path("runs/small-bare/verdict.md").read_text(encoding="utf-8")
    assert result.stderr == "small: A small one\nwritten to runs/small-bare\n"
    assert "runs/small-bare already holds a run" in refused(2, "run", "small", "--model", bare)
    Path("recipes/two.yaml").write_text(RECIPE + "runs: {first: {}, second: {input: repeated}}")
    result = command_line("run", "recipes/two.yaml", "--model", bare, "--out", "both")
    assert result.exit_code == 0, result.output
    assert "sink_rate" in result.stdout
    assert "repeated" in result.stdout
    assert result.stderr.endswith("run first (1 of 2)\nrun second (2 of 2)\nwritten to both\n")
    listed = command_line("list", "recipes")
    assert (listed.exit_code, listed.stderr) == (0, "")
    for name in ("small", "two", "gradient-sinks-figure-2", "A small one"):
        assert name in listed.stdout


def test_a_recipe_interrupted(bare: Path, failing: Any) -> None:
    Path("small.yaml").write_text(RECIPE)
    failing("measuring", KeyboardInterrupt())
    message = refused(1, "run", "small.yaml", "--model", bare, "--quiet", "--out", "deep/down")
    assert message == "sinkscope: interrupted: nothing was written"


# --- models that cannot be had ---


def test_a_corrupt_gguf() -> None:
    for content in (b"GGUF" + bytes(range(200)), b"nothing of the kind", b""):
        Path("broken.gguf").write_bytes(content)
        message = refused(2, "analyze", "broken.gguf")
        assert "broken.gguf is damaged" in message or "is not a GGUF file" in message


def test_nan_weights(tiny: Path) -> None:
    shutil.copytree(tiny, "broken")
    weights = load_file("broken/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, "broken/model.safetensors", metadata={"format": "pt"})
    for command in ("analyze", "doctor"):
        message = refused(2, command, "broken")
        assert "NaN or infinite weights, the first in model.layers.1.mlp.up_proj.weight" in message


# --- inputs that cannot be read ---


def test_inputs_that_cannot_be_read(tiny: Path, bare: Path) -> None:
    """tests/text has more invalid inputs."""
    Path("words.txt").write_bytes("the café of".encode("latin-1"))
    assert "words.txt is not UTF-8" in refused(2, "analyze", tiny, *SMALL, "--input", "words.txt")
    Path("words.txt").write_bytes(b"the of and")
    message = refused(2, "analyze", tiny, *SMALL, "--input", "words.txt")
    assert "words.txt has 3 tokens, fewer than one sequence of 24" in message
    np.save("ids.npy", np.full((4, 24), VOCAB))
    message = refused(2, "analyze", bare, *SMALL, "--input", "ids.npy")
    assert f"token id {VOCAB} at position 0 is outside the model's vocabulary" in message
    Path("lines.jsonl").write_text('{"ids": [3, 4]}\n')
    message = refused(2, "analyze", bare, *SMALL, "--input", "lines.jsonl")
    assert "a record needs `text`, `messages` or `input_ids`" in message


@pytest.mark.parametrize("name", ["~nosuchuser", "x" * 300, "loop", "pipe"])
def test_odd_names_under_every_command(name: str, bare: Path) -> None:
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    refused(2, "analyze", name)
    refused(2, "doctor", name)
    refused(2, "compare", name, name)
    refused(2, "analyze", "--from", name)
    refused(2, "run", name)
    refused(2, "train", "--config", name)
    refused(2, "train", "--tokenizer", name)
    refused(2, "train", "--text", name)
    refused(2, "analyze", bare, "--input", name)


@pytest.mark.usefixtures("no_figures")
def test_a_vocabulary_of_one(bare: Path) -> None:
    config = tiny_model("llama").config
    config.update({"vocab_size": 1, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained("one")
    for given in ("random", "repeated"):
        result = command_line("analyze", "one", *SMALL, "--input", given)
        assert result.exit_code == 2
        assert "all 1 tokens of the vocabulary are special: there is none to draw" in result.stderr
    result = command_line("analyze", "one", *SMALL, "--input", "sampled", "--out", "run")
    assert result.exit_code == 0, result.output
    assert Run.open("run").metric("loss") == 0
    Run.open("run").verdict.encode()


@pytest.mark.usefixtures("no_figures")
def test_a_vocabulary_of_one_in_an_unknown_family() -> None:
    """The wiring is found with a few tokens, which must be in the vocabulary."""
    config = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo", **config, **sizes))
    model.save_pretrained("one")
    result = command_line("analyze", "one", *SMALL, "--input", "repeated")
    assert result.exit_code == 0, result.output
    assert "wired numerically" in result.stderr


@pytest.mark.usefixtures("no_figures")
def test_a_model_that_computes_zeros_alone(bare: Path) -> None:
    shutil.copytree(bare, "zeros")
    weights = load_file("zeros/model.safetensors")
    weights["model.embed_tokens.weight"].zero_()
    save_file(weights, "zeros/model.safetensors", metadata={"format": "pt"})
    result = command_line("analyze", "zeros", *SMALL, "--input", "random", "--out", "run")
    assert result.exit_code == 0, result.output
    assert (Run.open("run").tables["massive"]["ratio"] == 0).all()


@pytest.mark.usefixtures("no_figures")
def test_samples_do_not_follow_the_checkpoints_settings(bare: Path) -> None:
    shutil.copytree(bare, "cold")
    settings = {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.01, "num_beams": 3, "repetition_penalty": 9.0}
    Path("cold/generation_config.json").write_text(json.dumps(settings))
    for model in (bare, "cold"):
        result = command_line("analyze", model, *SMALL, "--input", "sampled", "--out", f"{Path(model).name}-run")
        assert result.exit_code == 0, result.output
    first, second = (Run.open(name).manifest["input"]["sha256"] for name in ("bare-run", "cold-run"))
    assert first == second


def test_compare_with_a_damaged_table(finished: tuple[Result, Path]) -> None:
    run = Path(shutil.copytree(finished[1], "run"))
    path = run / "tables" / "summary.parquet"
    content = path.read_bytes()
    for damaged in (content[:-40], b""):
        path.write_bytes(damaged)
        assert "summary.parquet is damaged" in refused(2, "compare", run, finished[1])
    shutil.copy(run / "tables" / "attention.parquet", path)
    assert "summary.parquet is not the table 'summary'" in refused(2, "compare", run, finished[1])


# --- streams and folders that cannot be written ---


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("command", [["list", "metrics"], ["analyze", "--help"], ["analyze"]])
def test_standard_output_that_is_full(
    command: list[str], bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = command == ["analyze"]
    given = [str(bare), *SMALL, "--input", "random", "--observables", "massive", "--out", "run"] if measured else []
    with Path("/dev/full").open("w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            app(command + given)
    assert ended.value.code == 1
    left = ", but the result is complete in run" if measured else ""
    *_, message = capsys.readouterr().err.splitlines()
    assert message == f"sinkscope: standard output cannot be written (No space left on device){left}"
    assert Path("run/run.json").exists() == measured


def test_show_on_a_disk_that_cannot_be_written(finished: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what can be done, and names no option that `show` lacks."""
    shutil.copytree(finished[1], "run")
    Path("run/index.html").unlink()

    def refuse(self: FileLock) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    message = refused(2, "show", "run")
    assert "sinkscope: run cannot be written: writing in" in message
    assert message.endswith("fails (Read-only file system): copy it to where that can be done")
    assert "--" not in message


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, which takes no folders even from root")
def test_out_where_no_folder_can_be_made(tiny: Path) -> None:
    assert "cannot be written: writing in /proc fails" in refused(2, "analyze", tiny, "--out", "/proc/run")


def test_out_that_is_taken(
    tiny: Path, finished: tuple[Result, Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/results has the other cases."""
    assert "already holds a run: --overwrite replaces it" in refused(2, "analyze", tiny, "--out", finished[1])
    shutil.copytree(finished[1], "run")
    for name in ("mine/thesis.tex", "run/notes.txt", "file"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("years of work")
    for out, message in (
        ("mine", "--out mine is not empty and holds no run: name another folder"),
        ("run", "--out run is not replaced: it holds notes.txt, which no run wrote"),
        ("file", "file is in the way"),
        ("file/deep/run", "file is in the way"),
    ):
        assert message in refused(2, "analyze", tiny, *SMALL, "--out", out, "--overwrite")
    Path("texts").mkdir()
    Path("texts/words.txt").write_text("the of and " * 99)
    Path("texts/run.json").write_text("{}")
    message = refused(2, "analyze", tiny, *SMALL, "--input", "texts/words.txt", "--out", "texts", "--overwrite")
    assert "is not replaced" in message
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    assert "--out . cannot be replaced" in refused(2, "analyze", tiny, "--out", ".")


# --- --from ---


def test_from_something_else() -> None:
    Path("old").mkdir()
    assert "is not a run folder: it has no run.json" in refused(2, "analyze", "--from", "old")
    for content, message in (
        (b"{", "it is not the manifest of a run, or damaged"),
        (b"\xff\xfe", "it is not the manifest of a run, or damaged"),
        (b"[1]", "is another JSON file"),
        (b'{"config": {}}', "is another JSON file"),
    ):
        Path("old/run.json").write_bytes(content)
        assert message in refused(2, "analyze", "--from", "old/run.json")
        assert message in refused(2, "analyze", "--from", "old")


def manifest_in_old(finished: tuple[Result, Path], config: dict[str, Any], **changes: Any) -> None:
    """Write old/run.json with these changes."""
    manifest = json.loads((finished[1] / "run.json").read_text(encoding="utf-8"))
    manifest["config"] |= config
    Path("old").mkdir(exist_ok=True)
    Path("old/run.json").write_text(json.dumps(manifest | changes))


def test_from_a_run_that_cannot_be_repeated(finished: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.commands.measured.open_subject", lambda *args: pytest.fail("loaded"))
    for config, message in (
        ({"flavour": 1}, "of sinkscope 0.0) cannot be repeated here: option 'flavour' is unknown"),
        ({"window": 999}, "--window 999 is beyond the sequence"),
        ({"model": None}, "its model was passed as an object in Python"),
    ):
        manifest_in_old(finished, config, sinkscope="0.0")
        assert message in refused(2, "analyze", "--from", "old")
    manifest = json.loads((finished[1] / "run.json").read_text(encoding="utf-8"))
    for damaged in ([1], None, manifest["input"] | {"sha256": None}):
        manifest_in_old(finished, {}, input=damaged)
        message = "old/run.json is not the manifest of a run: it is damaged (`input"
        assert message in refused(2, "analyze", "--from", "old")


@pytest.mark.usefixtures("no_figures")
def test_from_takes_no_permission_out_of_a_file(finished: tuple[Result, Path]) -> None:
    """Code that comes with a model runs only if the user permits it, never because run.json says so."""
    manifest_in_old(finished, {"trust_remote_code": True, "allow_pickle": True, "observables": ["massive"]})
    flags = ["--trust-remote-code", "--allow-pickle"]
    assert refused(2, "analyze", "--from", "old").endswith(f"add {' and '.join(flags)}")
    assert refused(2, "analyze", "--from", "old", flags[1]).endswith(f"add {flags[0]}")
    result = command_line("analyze", "--from", "old", *flags, "--out", "again")
    assert result.exit_code == 0, result.output
    config = Run.open("again").manifest["config"]
    assert config["trust_remote_code"]
    assert config["allow_pickle"]


def test_from_runs_no_code_that_a_file_allows(
    finished: tuple[Result, Path], tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    shutil.copytree(tiny, "model")
    settings = json.loads(Path("model/config.json").read_text())
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    Path("model/config.json").write_text(json.dumps(settings | {"model_type": "own", "auto_map": auto_map}))
    Path("model/own.py").write_text("open('ran', 'w')")
    manifest_in_old(finished, {"model": "model", "trust_remote_code": True})
    assert "if you trust the maker of model, add --trust-remote-code" in refused(2, "analyze", "--from", "old")


# --- two processes ---


def test_two_processes_on_one_folder(bare: Path, failing: Any) -> None:
    """The second process is refused before it computes anything, and the first one is not disturbed."""
    failing("measuring", ZeroDivisionError())
    with alone_in("run"):
        message = refused(2, "analyze", bare, *RANDOM[:-1], "run")
    assert message == "sinkscope: --out run is being written by another process: wait for it, or name another folder"
    assert not list(Path().glob(".sinkscope-*"))


# --- runs that fail, or are ended ---


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """failing(where, error) raises the error there, after half of the work."""

    def fail(where: str, error: BaseException) -> None:
        if where == "measuring":
            for name in ("forward", "forward_backward"):
                monkeypatch.setattr(Tracer, name, _raising(error, after=2, plain=getattr(Tracer, name)))
        elif where == "tables":
            monkeypatch.setattr(sinkscope.results.tables, "write_table", _raising(error, after=3, plain=write_table))
        else:
            monkeypatch.setattr(sinkscope.figures, "applicable", _raising(error))

    return fail


def _raising(error: BaseException, after: int = 0, plain: Any = None) -> Any:
    calls = iter(range(after))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return plain(*args, **kwargs)

    return call


RANDOM = ("--input", "random", *SMALL, "--batch-size", "1", "--out", "deep/down/run")


@pytest.mark.parametrize(("where", "error"), [("measuring", None), ("figures", None), ("measuring", TypeError("own"))])
def test_interrupted(bare: Path, failing: Any, where: str, error: Exception | None) -> None:
    """An interrupted library may raise an error of its own."""
    if error is not None:
        error.__context__ = KeyboardInterrupt()
    failing(where, error or KeyboardInterrupt())
    assert refused(1, "analyze", bare, *RANDOM) == "sinkscope: interrupted: nothing was written"


@pytest.mark.parametrize(("where", "number"), [("tables", errno.ENOSPC), ("figures", errno.EACCES)])
def test_a_disk_that_refuses(bare: Path, failing: Any, where: str, number: int) -> None:
    failing(where, OSError(number, "the disk says no"))
    message = refused(1, "analyze", bare, *RANDOM)
    assert "writing deep/down/run failed, and nothing of it is left" in message
    assert "the disk says no" in message


def test_an_unexpected_error(bare: Path, failing: Any) -> None:
    failing("figures", ZeroDivisionError("by\nnothing"))
    message = refused(1, "analyze", bare, *RANDOM)
    assert message.startswith("sinkscope: unexpected ZeroDivisionError: by nothing\n--debug shows where")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "sinkscope: memory ran out: take a shorter --seq-len, --dtype bfloat16"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "sinkscope: memory ran out"),
        (FileNotFoundError(2, "No such file", "x"), "sinkscope: [Errno 2] No such file: 'x'\n--debug shows"),
    ],
)
def test_errors_of_the_machine(bare: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr("sinkscope.commands.analyze.measure", _raising(error))
    assert refused(1, "analyze", bare, *RANDOM).startswith(message)


def test_debug_shows_the_traceback(bare: Path, failing: Any) -> None:
    failing("tables", ZeroDivisionError("by nothing"))
    result = command_line("analyze", bare, *RANDOM, "--debug")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "sinkscope: unexpected ZeroDivisionError: by nothing" in result.stderr
    result = command_line("analyze", "./nowhere", "--debug")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr


@pytest.mark.usefixtures("no_figures")
def test_a_rename_that_fails_leaves_the_old_one(
    bare: Path, finished: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished[1], "run")
    plain = os.replace

    def replace(source: Path, target: Path) -> None:
        if target.name == "run" and not source.name.endswith("-old"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        plain(source, target)

    monkeypatch.setattr("os.replace", replace)
    refused(1, "analyze", bare, *RANDOM[:-1], "run", "--overwrite")


def test_ended_from_outside(bare: Path, here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The process waits in the third batch, so that no library can turn the interrupt into another error."""
    plain, calls, printed = Tracer.forward_backward, count(1), tmp_path_factory.mktemp("printed") / "stderr"
    reading, writing = os.pipe()

    def forward_backward(self: Tracer, *args: Any) -> Any:
        os.write(writing, b"measuring\n")
        if next(calls) == 3:
            time.sleep(60)
        return plain(self, *args)

    def analyze() -> None:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
        Tracer.forward_backward = forward_backward  # type: ignore[method-assign]
        sys.argv = ["sinkscope", "analyze", str(bare), "--input", "random", "--num-seqs", "40"]
        sys.argv += ["--batch-size", "8", "--out", "run"]
        main()

    with open(reading) as said, forked(analyze) as process:
        os.close(writing)
        for _ in range(3):
            assert said.readline() == "measuring\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 1
    assert printed.read_text().strip() == "sinkscope: interrupted: nothing was written"
    assert not list(here.iterdir())


SLEEPING = """
import time
import sinkscope.commands.list
sinkscope.commands.list.listing = lambda kind: print("asleep", flush=True) or time.sleep(60)
from sinkscope.cli.app import main
main()
"""


def test_a_cluster_ends_a_job_as_a_person_does() -> None:
    command = [sys.executable, "-c", SLEEPING, "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, "sinkscope: interrupted\n")


# --- doctor, list, compare, help ---


def test_doctor(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = command_line("doctor", tiny)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "family 'llama'" in result.stdout
    assert "FAIL" not in result.stdout
    monkeypatch.setattr("sinkscope.commands.doctor.Report.ok", False)
    assert "a check failed" in refused(1, "doctor", tiny, "--quiet")


def test_list() -> None:
    result = command_line("list")
    assert (result.exit_code, result.stderr) == (0, "")
    for name in ("attention", "massive", "qwen3_moe", "post-norm", "interceptor", *FIGURES):
        assert name in result.stdout
    assert "…" not in result.stdout
    assert "\x1b" not in result.stdout
    assert "qwen3" not in command_line("list", "observables").stdout


def test_compare(finished: tuple[Result, Path]) -> None:
    result = command_line("compare", finished[1], finished[1] / "run.json", "--out", "both")
    assert result.exit_code == 0, result.output
    assert "sink_rate" in result.stdout
    assert "ratio" in result.stdout
    assert result.stderr == "written to both\n"
    assert Path("both/tables/comparison.parquet").is_file()
    assert "both already holds a run" in refused(2, "compare", finished[1], finished[1], "--out", "both")
    assert "nowhere is not a run folder: it does not exist" in refused(2, "compare", finished[1], "nowhere")


def test_help() -> None:
    for command in ((), ("analyze",), ("compare",)):
        result = command_line(*command, "--help")
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Usage: sinkscope" in result.stdout
        assert result.stdout == command_line(*command, "-h").stdout
    result = command_line()
    assert result.exit_code == 2
    assert "analyze" in result.stdout
    assert command_line("--version").stdout.startswith("sinkscope ")
    assert "'sinkscope[lm-eval]'" in " ".join(command_line("benchmark", "--help").output.split())
    assert all(f"╭─ {panel} ─" in command_line("analyze", "--help").stdout for panel in ("Model", "Input", "Output"))


def test_help_needs_no_torch() -> None:
    program = "import sys; sys.argv[1:] = ['analyze', '--help']\n"
    program += "from sinkscope.cli.app import main\ntry: main()\n"
    program += "finally: print({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    assert output.endswith("set()\n")


def test_a_closed_pipe() -> None:
    """`sinkscope --help | true`"""
    command = [sys.executable, "-m", "sinkscope.cli", "analyze", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_narrow_ascii_terminal() -> None:
    environment = {"PYTHONIOENCODING": "ascii", "COLUMNS": "30"}
    command = [sys.executable, "-m", "sinkscope.cli", "--help"]
    output = subprocess.run(command, capture_output=True, env=environment)
    assert (output.returncode, output.stderr) == (0, b"")
    assert max(map(len, output.stdout.splitlines())) <= 30
