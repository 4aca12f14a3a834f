"""`train`: arms start from the same random weights and keep checkpoints; tokenizers; input that is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.encoders import word_tokenizer
from support.figures import skip_figures
from support.naming import naming
from support.retrofit_command import command_line, typed
from support.training import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from typer.testing import Result

import sinkscope.commands.train.arms
from sinkscope import Run, retrofit, train
from sinkscope.commands.train.architectures import ARCHITECTURES, architecture, fresh_model, tokenizer_of
from sinkscope.commands.train.arms import TrainingArms
from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.tasks.backcopy import NAME, BackcopyTask, Opening
from sinkscope.errors import InputError
from sinkscope.measuring.processes import Team
from sinkscope.measuring.subject import family_of
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.results.manifest import foreign_files
from sinkscope.text.inputs import masked
from sinkscope.text.tokens import own_frame

pytestmark = pytest.mark.usefixtures("here", "no_figures")

SMALL: dict[str, Any] = {"steps": 4, "block_length": 16, "batch_size": 2, "log_every": 1, "save_every": 2}
METHODS_OF_BERT = ("none", "vga", "register-tokens")
FEW: dict[str, Any] = {"observables": "attention", "num_seqs": 2}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A training with two methods and two seeds from the command line. Tests must not change it."""
    out = tmp_path_factory.mktemp("trained") / "out"
    shape = out.with_name("small.json")
    shape.write_text(json.dumps(SHAPE))
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched, of_runs_only=True)
        return command_line(
            "train", "--config", shape, "--method", "none,vga", "--seeds", "2", *typed(SMALL), "--num-seqs", "4",
            "--observables", "attention,gradient", "--out", out,
        ), out  # fmt: skip


def test_its_folder(finished: tuple[Result, Path]) -> None:
    result, out = finished
    assert result.exit_code == 0, result.output
    arms = ["none-seed0", "vga-seed0", "none-seed1", "vga-seed1"]
    assert {path.name for path in out.iterdir()} == {
        "run.json", "retrofit.md", "held-out.npy", "comparison", "figures", "tables", "index.html", *arms,
    }  # fmt: skip
    for arm in arms:
        assert {path.name for path in (out / arm).iterdir()} == {"model", "run", "tables", "checkpoints"}
        assert {path.name for path in (out / arm / "checkpoints").iterdir()} == {
            "checkpoint-0", "checkpoint-2", "checkpoint-4",
        }  # fmt: skip
        run = Run.open(out / arm / "run")
        assert (run.model, run.condition) == ("small", arm)
        table = pd.read_parquet(out / arm / "tables" / "training.parquet")
        assert (set(table["condition"]), set(table["seed"])) == ({arm[:-6]}, {int(arm[-1])})
    assert AutoTokenizer.from_pretrained(out / "vga-seed1" / "checkpoints" / "checkpoint-2").bos_token == "<s>"
    assert not list(foreign_files(out))
    assert "note: vga-seed0" not in result.stderr  # notes are by method, over all seeds
    assert "note: vga: new parameters moved by" in result.stderr
    assert json.loads((out / "run.json").read_text())["architecture"]["hidden_size"] == 32


def test_methods_start_from_the_same_weights_and_seeds_from_others(finished: tuple[Result, Path]) -> None:
    weights: dict[str, Any] = {
        arm: AutoModelForCausalLM.from_pretrained(finished[1] / arm / "checkpoints" / "checkpoint-0").state_dict()
        for arm in ("none-seed0", "vga-seed0", "none-seed1")
    }
    plain, gated, reseeded = weights.values()
    assert all(torch.equal(gated[name], value) for name, value in plain.items())
    assert len(gated) == len(plain) + 2  # a gate per layer
    assert not torch.equal(plain["lm_head.weight"], reseeded["lm_head.weight"])
    config = AutoConfig.from_pretrained(finished[1] / "none-seed0" / "model")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)  # the tokenizer's
    torch.manual_seed(0)  # the weights are those of transformers
    assert torch.equal(plain["lm_head.weight"], AutoModelForCausalLM.from_config(config).lm_head.weight)


@pytest.mark.slow
def test_more_seeds_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    """The arms that are there stay, and the new ones are those of a call that begins with their seed."""
    few: dict[str, Any] = SMALL | FEW | {"config": "tiny-llama:hidden_size=32,num_hidden_layers=1,vocab_size=300"}
    train(method="none", seeds=2, out="out", **few)
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("none-seed[01]/model/*")}
    with pytest.raises(InputError, match=r"seeds was 2, now 1"):
        train(method="none", seeds=1, out="out", **few)
    done = train(method="none", seeds=3, out="out", **few)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert list(done.runs) == ["none-seed0", "none-seed1", "none-seed2"]
    assert set(done.tables["training"]["seed"]) == {0, 1, 2}
    alone = train(method="none", seed=2, out="alone", **few)
    weights, expected = (AutoModelForCausalLM.from_pretrained(run.model(arm)).state_dict()
                         for run, arm in ((done, "none-seed2"), (alone, "none")))  # fmt: skip
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    with pytest.raises(InputError, match=r"seeds was 1, now 2"):  # its arm has no seed in its name
        train(method="none", seed=2, seeds=2, out="alone", **few)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_tokenizer_of_the_text(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an encoder frames every text, and has a mask. It reads no more than the beginning of a corpus."""
    text = "the sink drains, the sink attends; " * 50
    tokenizer = tokenizer_of([text], 280, is_causal)
    ids = tokenizer(text)["input_ids"]
    assert own_frame(tokenizer) == ((1,), () if is_causal else (2,))
    assert tokenizer.decode(ids[1:] if is_causal else ids[1:-1]) == text
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id)
    assert special == (0, 1, 2, None if is_causal else 3)
    assert len(tokenizer) <= 280
    assert len(ids) < len(text) / 3  # it has learned words
    assert tokenizer("Ἐν ἀρχῇ")["input_ids"][1:]  # byte-level: no text is unknown
    monkeypatch.setattr("sinkscope.commands.train.architectures.MOST_CHARACTERS", len(text))
    assert tokenizer_of([text, "gradients" * 99], 280, is_causal).get_vocab() == tokenizer.get_vocab()


@pytest.mark.slow
def test_a_task(tmp_path: Path) -> None:
    methods = {"plain": "none", "VGA": "vga:placement=output,scale=1"}
    small = SMALL | {"block_length": 24, "batch_size": 4, "log_every": 2}
    done = train("bigram-backcopy", methods, text="bigram-backcopy", seeds=2, out="out", **small, num_seqs=4)
    assert list(done.runs) == ["plain-seed0", "VGA-seed0", "plain-seed1", "VGA-seed1"]
    training = done.tables["training"]
    probed = training[training["metric"] == "attention_to_start"]
    assert set(probed["step"]) == {0, 2, 4}
    assert set(zip(probed["condition"], probed["seed"], strict=True)) == {(m, s) for m in methods for s in (0, 1)}
    assert set(done.tables["value_norms"]["condition"]) == set(methods)
    assert len(done.tables["value_norms"]) == 2 * 20  # only of the first seed
    assert set(done.figures()) == {
        "backcopy-maps", "backcopy-training", "retrofit-training", "retrofit-values", "retrofit-bars",
    }  # fmt: skip
    last = probed[(probed["condition"] == "VGA") & (probed["step"] == 4)]["value"]
    row = next(line for line in done.verdict.split("Non-trigger queries at step 4")[1].splitlines() if "| VGA" in line)
    assert f"{last.mean():.3f} ± {last.std():.3f}" in row
    assert AutoTokenizer.from_pretrained(done.model("VGA-seed1")).decode([0]) == "<s>"


def test_named_architectures_can_be_measured() -> None:
    for name in ARCHITECTURES:
        with naming(name):
            config = architecture(name)
            if config.model_type in FAMILIES:
                with torch.device("meta"):
                    family = find_family(AutoModelForCausalLM.from_config(config))
            else:  # found numerically
                family, _ = family_of(fresh_model(config, seed=0))
            assert family.name == ARCHITECTURES[name][0]
            dropout = {field: value for field, value in config.to_dict().items() if "drop" in field}
            dropout.pop("summary_first_dropout", None)  # of another head
            assert not any(dropout.values()), dropout  # trainings are repeated bit by bit


@pytest.mark.slow
def test_an_encoder_predicts_masked_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The perplexity of every arm and seed is that of the same masked tokens of the held-out text."""
    monkeypatch.setattr("sinkscope.figures.applicable", lambda run: ["sink-map"])
    shape = "tiny-bert:hidden_size=32,intermediate_size=48,num_hidden_layers=2,vocab_size=300"
    done = train(shape, METHODS_OF_BERT, out="out", seeds=2, eval_share=0.4, figures=(), **SMALL, **FEW)
    assert all("figures/" not in run.folder.joinpath("verdict.md").read_text("utf-8") for run in done.runs.values())
    held_out = np.load("out/held-out.npy")
    assert (done.manifest["text_blocks"], len(held_out), done.manifest["sequences"]) == (8, 6, 2)
    assert (held_out[:, [0, -1]] == (1, 2)).all()
    table = done.tables["retrofit"]
    assert np.isfinite(table["value"]).all()
    assert set(table["metric"]) >= {"perplexity", "max_inf_norm", "kurtosis", "perplexity_quantized"}
    assert set(done.runs) == {f"{method}-seed{seed}" for method in METHODS_OF_BERT for seed in (0, 1)}
    predicted = set()
    for label, run in done.runs.items():
        model: Any = AutoModelForMaskedLM.from_pretrained(done.model(label))
        hidden = masked(held_out[:2], AutoTokenizer.from_pretrained(done.model(label)), model.config.vocab_size, 0)
        ids, labels = (torch.tensor(np.stack(parts)) for parts in zip(*hidden, strict=True))
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=labels).loss)
        method, seed = label.split("-seed")
        of_arm = table.query(f"condition == '{method}' and seed == {seed}").set_index("metric")["value"]
        assert of_arm["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert of_arm["perplexity_quantized"] != of_arm["perplexity"]
        predicted.add(run.manifest["input"]["masked"])
    assert len(predicted) == 1


def begun(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the blocks and the probe with which the first training of a command begins."""
    began = []

    def begins(model: Any, blocks: Blocks, *_: Any, probe: Any, **__: Any) -> None:
        began.append(SimpleNamespace(blocks=blocks, probe=probe))
        raise InputError("begun")

    monkeypatch.setattr(sinkscope.commands.train.arms, "train_model", begins)
    monkeypatch.setattr(TrainingArms, "_measure", lambda *_: None)  # of the untouched model
    with pytest.raises(InputError, match="begun"):
        command(*arguments, out="out", overwrite=True, **SMALL, **FEW, **options)
    return began[0]


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_training_is_measured_as_its_options_say(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("words.txt").write_text(" ".join(f"w{n % 80}" for n in range(300)))
    tokenizer, asked = word_tokenizer(), {"epsilon": 0.2, "probe": "attention,massive", "fixed_position": 3}
    shape = "tiny-llama" if is_causal else "tiny-bert"
    shape += ":hidden_size=32,intermediate_size=48,num_hidden_layers=2"
    training = begun(monkeypatch, train, shape, "none", text="words.txt", tokenizer=tokenizer, **asked)
    keywords = training.probe.keywords
    assert (keywords["position"], keywords["epsilon"], keywords["observables"]) == (3, 0.2, ("attention", "massive"))
    assert keywords["masked_by"] is (None if is_causal else tokenizer)
    assert (keywords["held_out"][:, 3] == tokenizer.pad_token_id).all()


def test_a_fine_tuning_is_measured_if_a_probe_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("ids.npy", np.random.default_rng(0).integers(3, 60, (12, 16)))
    for name in ("", "attention"):
        training = begun(monkeypatch, retrofit, tiny, "none", text="ids.npy", probe=name)
        assert (training.probe is not None) == bool(name)


def test_a_task_draws_what_its_options_say_and_enough_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(num_processes=3, process_index=0, is_main_process=True, wait_for_everyone=lambda: None)
    monkeypatch.setattr(sinkscope.commands.train.arms, "launched", lambda **_: state)
    monkeypatch.setattr(sinkscope.commands.train.arms, "Team", lambda *_: Team())
    opening = {"bos": "never", "fixed_position": 2}
    blocks = begun(monkeypatch, train, NAME, "none", text=NAME, seed=5, **opening).blocks
    expected = BackcopyTask(Opening(bos=False, fixed_position=2)).blocks(16, 3 * 4 * 2, held_out=2, seed=5)
    assert blocks.sha256 == expected.sha256
