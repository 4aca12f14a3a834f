"""`retrofit` that is killed between its stages, or whose disk is full, loses nothing: the same command goes on."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from support.figures import skip_figures
from support.forked import forked
from support.retrofit_command import SMALL, TYPED, command_line, words_tokenizer
from tiny import tiny_model
from transformers import PreTrainedModel, Trainer

import sinkscope.commands.training_arms
import sinkscope.figures
import sinkscope.output.outputs
import sinkscope.output.result
from sinkscope.cli.app import app
from sinkscope.commands.retrofit import retrofit
from sinkscope.errors import InputError
from sinkscope.output.run import Run
from sinkscope.retrofits import retrofit_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer. GPT-2, which has learned positions: 256. Not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("gpt2").save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "drains.txt"
    path.write_text("the drain of the drain and the of of\n" * 100, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)


@pytest.fixture(scope="module")
def unbroken(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        retrofit(str(tiny), "vga", text=text, out=out, **SMALL)
    return out


def same_arm(out: Path, other: Path, arm: str = "vga") -> bool:
    weights = [(folder / arm / "model" / "model.safetensors").read_bytes() for folder in (out, other)]
    losses = [Run.open(folder / arm / "run").metric("loss") for folder in (out, other)]
    return weights[0] == weights[1] and losses[0] == losses[1]


# --- killed ---


def killed_after(write: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`write`, which kills its process where it wrote into the folder."""

    def kills(what: Any, path: Any, *args: Any, **rest: Any) -> None:
        write(what, path, *args, **rest)
        if Path(path).resolve().is_relative_to(folder) and "training" not in Path(path).parts:
            os.kill(os.getpid(), signal.SIGKILL)

    return kills


STAGES: dict[str, tuple[Any, str]] = {
    "saving the model": (PreTrainedModel, "save_pretrained"),
    "writing the run": (sinkscope.output.outputs, "write_tables"),
}


def killed_in(stage: str, vga: Path, arguments: list[str]) -> None:
    place, name = STAGES[stage]
    setattr(place, name, killed_after(getattr(place, name), vga))
    app(arguments, prog_name="sinkscope")


@pytest.mark.parametrize("stage", STAGES)
def test_killed_between_stages_it_goes_on_without_training_again(
    stage: str, tiny: Path, text: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["retrofit", str(tiny), "--method", "vga", "--text", str(text), *TYPED, "--out", str(out)]
    with forked(lambda: killed_in(stage, (out / "vga").resolve(), arguments)) as process:
        assert process.wait() == -signal.SIGKILL
    assert (out / "vga" / "training" / "checkpoint-3" / "trainer_state.json").is_file()
    assert (out / "vga" / "model").exists() == (stage == "writing the run")
    assert list((out / "vga").glob(".sinkscope-*"))

    monkeypatch.setattr(Trainer, "training_step", None)
    result = command_line(*arguments)
    assert result.exit_code == 0, result.output
    assert same_arm(out, unbroken)
    assert not list(out.rglob(".sinkscope-*"))
    assert {path.name for path in (out / "vga").iterdir()} == {"model", "run", "tables"}
    assert json.loads((out / "run.json").read_text())["arms"]["vga"]["moved"] > 0


# --- no room ---


def full(*args: Any, **rest: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_in_rust(*args: Any, **rest: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_full_disk_at_any_stage_says_so_and_loses_nothing(
    tiny: Path, text: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command after another, each broken off a stage later than the one before."""
    steps: list[int] = []
    step = Trainer.training_step
    monkeypatch.setattr(
        Trainer, "training_step", lambda self, *rest: (steps.append(self.state.global_step), step(self, *rest))[1]
    )
    arguments = ("retrofit", tiny, "--method", "vga", "--text", text, *TYPED, "--out", tmp_path / "out")
    stages: list[tuple[Any, str, Any, str]] = [
        (sinkscope.commands.training_arms.np, "save", full, "nothing of it is left"),  # the held-out blocks
        (sinkscope.output.outputs, "write_tables", full, "untouched/run failed"),
        (Trainer, "_save_rng_state", full, "what was reached is kept"),  # a checkpoint
        (sinkscope.commands.training_arms, "write_tables", full, "the training up to step 3 is kept"),
        (PreTrainedModel, "save_pretrained", full_in_rust, "the training up to step 3 is kept"),
        (sinkscope.commands.training_arms, "write_run", full, "vga/run failed"),
        (sinkscope.output.result, "save_figures", full, "figures failed, and nothing of it is left"),
    ]
    for place, name, fails, told in stages:
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fails)
            result = command_line(*arguments)
        assert result.exit_code == 1, result.output
        assert result.stderr.splitlines()[-1].startswith("sinkscope: "), result.stderr
        assert "No space left on device" in result.stderr
        assert told in result.stderr, (told, result.stderr)
        assert not list((tmp_path / "out").rglob(".sinkscope-*"))
    result = command_line(*arguments)
    assert result.exit_code == 0, result.output
    assert steps == [0, 1, 2] * 2  # anew only where there was no checkpoint yet
    assert same_arm(tmp_path / "out", unbroken)


# --- folders of others ---


def edited(manifest: Path, part: str, **options: Any) -> None:
    content = json.loads(manifest.read_text())
    for name, value in options.items():
        content[part].pop(name)
        content[part] |= {} if value is None else {name: value}
    manifest.write_text(json.dumps(content))


def test_an_option_that_an_older_folder_does_not_know_is_as_by_default(
    tiny: Path, text: Path, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    edited(out / "run.json", "config", weight_decay=None)
    edited(out / "run.json", "config", epsilon=None)
    with pytest.raises(InputError, match=r"made with other options .weight_decay was 0.01"):
        retrofit(str(tiny), "none", text=text, out=out, weight_decay=0.1, **SMALL)
    with pytest.raises(InputError, match=r"made with other options .epsilon was"):
        retrofit(str(tiny), "none", text=text, out=out, epsilon=0.4, **SMALL)
    done = retrofit(str(tiny), "none", text=text, out=out, **SMALL)
    assert list(done.runs) == ["untouched", "vga", "none"]
    assert json.loads((out / "run.json").read_text())["config"]["weight_decay"] == 0.01


def test_files_of_an_arm_that_were_changed_are_refused(tiny: Path, text: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    table, another = out / "vga" / "tables" / "gates.parquet", out / "vga" / "run" / "tables" / "summary.parquet"
    table.write_bytes(another.read_bytes())
    with pytest.raises(InputError, match=r"gates.parquet is not the table 'gates': it has no column seed"):
        retrofit(str(tiny), "vga", text=text, out=out, **SMALL)
    shutil.copy(unbroken / "vga" / "tables" / "gates.parquet", table)
    manifest = out / "vga" / "run" / "run.json"
    manifest.write_text(
        json.dumps({key: part for key, part in json.loads(manifest.read_text()).items() if key != "w8a8"})
    )
    with pytest.raises(InputError, match=r"vga/run/run.json has no `w8a8`"):
        retrofit(str(tiny), "vga", text=text, out=out, **SMALL)


def test_other_options_and_damaged_folders_are_refused(tiny: Path, text: Path, unbroken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(unbroken, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = command_line("retrofit", tiny, "--text", text, *TYPED, "--learning-rate", "0.1", "--out", out)
    assert result.exit_code == 2
    assert "made with other options (learning_rate was 5e-05, now 0.1): repeat them to go on with it" in result.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    for content in ('{"command": "retrofit"', '{"command": "retrofit", "config": 3}', '{"command": "train"}'):
        (out / "run.json").write_text(content)
        result = command_line("retrofit", tiny, "--text", text, *TYPED, "--out", out)
        assert result.exit_code == 2, result.output
        assert f"{out / 'run.json'} " in result.stderr


def test_arms_of_other_weights_are_not_added(tiny: Path, text: Path, unbroken: Path, tmp_path: Path) -> None:
    """The model's folder has the same name, and other weights."""
    own, out = Path(shutil.copytree(tiny, tmp_path / "own")), Path(shutil.copytree(unbroken, tmp_path / "out"))
    for path in (out / "run.json", *out.glob("*/run/run.json")):
        path.write_text(path.read_text().replace(str(tiny), str(own)))
    retrofit(str(own), "vga", text=text, out=out, **SMALL)
    model = tiny_model("gpt2")
    model.transformer.h[0].mlp.c_fc.weight.data[1, 1] += 1
    model.save_pretrained(own)
    with pytest.raises(InputError, match=r"made with other options \(weights_sha256 was \w+…, now \w+…\)"):
        retrofit(str(own), "vga,none", text=text, out=out, **SMALL)


def test_what_retrofit_made_is_no_model_to_be_retrofitted(
    tiny: Path, text: Path, unbroken: Path, tmp_path: Path
) -> None:
    retrofit_model(tiny_model("llama"), None, "iga").save_pretrained(tmp_path / "iga")
    words_tokenizer().save_pretrained(tmp_path / "iga")
    for folder, told in (
        (tmp_path / "iga", "has been retrofitted with iga already: apply vga to the model it was made from"),
        (unbroken / "vga" / "model", "has been retrofitted with vga already: apply vga to"),
        (unbroken, "is not a model in HuggingFace format: it has no config.json"),
    ):
        result = command_line("retrofit", folder, "--text", text, *TYPED, "--out", tmp_path / "out")
        assert result.exit_code == 2, result.output
        assert told in result.stderr, result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "vga,vgaa"), "retrofit 'vgaa' is unknown; did you mean 'vga'?"),
        (("--steps", "-3"), "--steps -3: it must be at least 1"),
        (("--learning-rate", "-1e-4"), "--learning-rate -0.0001: it must be more than 0"),
        (("--new-learning-rate", "0"), "--new-learning-rate 0.0: it must be more than 0"),
        (("--batch-size", "0"), "--batch-size 0: it must be at least 1"),
        (
            ("--method", "none,register-tokens:count=8", "--block-length", "250"),
            "--method register-tokens-count=8: blocks of 250 tokens and 8 registers are beyond the model's 256 "
            "positions: take a --block-length of at most 248",
        ),
    ],
)
def test_refused_before_anything_is_trained(
    options: tuple[str, ...], message: str, tiny: Path, text: Path, tmp_path: Path
) -> None:
    result = command_line("retrofit", tiny, "--text", text, "--out", tmp_path / "out", *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith(f"sinkscope: {message}"), result.stderr
    assert not (tmp_path / "out").exists()
