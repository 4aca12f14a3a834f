"""Training on several processes equals training on one process: the same blocks per step, losses and weights."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.figures import skip_figures
from support.ranks import on_two_ranks, sharded_retrofit, sharding_environment
from support.retrofit_command import typed, words_tokenizer
from support.training import config, model, random_blocks
from tiny import TINY, tiny_model
from transformers import AutoModelForCausalLM

import sinkscope.commands.train.sharding
import sinkscope.figures
from sinkscope import InputError, retrofit
from sinkscope.commands.train.sharding import NEEDED, check_sharding, launched
from sinkscope.commands.train.trainer import shuffled, train_model
from sinkscope.results.tables import read_table

# Two ways of training on two processes. 11 blocks are not a multiple of the batch size 4: the third step continues in
# the next epoch.
CASES = {
    "a batch a step": {"batch_size": 2, "accumulation": 1},
    "three batches a step": {"batch_size": 1, "accumulation": 3},
}
# round-off of float32 sums in another order
ROUND_OFF: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-6}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every case on each of two processes."""
    folder = tmp_path_factory.mktemp("two")

    def train_all() -> None:
        for name, options in CASES.items():
            changed = model()
            history = train_model(changed, random_blocks(11), config(steps=8, log_every=1, **options), folder / name)
            rank = launched().process_index
            history.to_parquet(folder / f"{name}-{rank}.parquet")
            torch.save(changed.state_dict(), folder / f"{name}-{rank}.pt")

    assert on_two_ranks(train_all, folder / "log") == [0, 0], (folder / "log").read_text()[-4000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_with_the_same_global_batch(case: str, two: Path, tmp_path: Path) -> None:
    """Losses, gradient norms, learning rates and gates are compared at every step, and the weights at the end."""
    options = CASES[case] | {"batch_size": 2 * CASES[case]["batch_size"]}
    alone = model()
    expected = train_model(alone, random_blocks(11), config(steps=8, log_every=1, **options), tmp_path)
    history = pd.read_parquet(two / f"{case}-0.parquet")
    names = ["layer", "step", "metric"]
    assert set(expected["metric"]) >= {"loss", "gradient_norm", "learning_rate", "gate_displacement_max"}
    assert history[names].equals(expected[names])
    np.testing.assert_allclose(history["value"], expected["value"], **ROUND_OFF)
    first, second = (torch.load(two / f"{case}-{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(first, dict(alone.state_dict()), **ROUND_OFF)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_block_is_read_once_before_any_is_read_again() -> None:
    order = shuffled(5, 13, seed=3)
    assert [sorted(order[at : at + 5]) for at in (0, 5)] == [[0, 1, 2, 3, 4]] * 2
    assert len(order) == 13
    assert len(set(order[10:])) == 3
    assert order[:5].tolist() != order[5:10].tolist()
    assert order.tolist() == shuffled(5, 13, seed=3).tolist() != shuffled(5, 13, seed=4).tolist()
    assert shuffled(5, 3, seed=3).tolist() == order[:3].tolist()


OPTIONS: dict[str, Any] = {
    "steps": 8, "block_length": 16, "accumulation": 2, "learning_rate": 1e-3, "log_every": 1, "save_every": 4,
    "eval_share": 0.2, "observables": "attention",
}  # fmt: skip


@pytest.mark.slow
def test_retrofit_with_shards_is_retrofit_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training is killed in its second half and resumed; models, losses and gates agree up to round-off.

    The model is a Llama with tied embeddings, like SmolLM2.
    """
    tied, text, out = tmp_path / "tied", tmp_path / "ids.npy", tmp_path / "sharded"
    monkeypatch.setitem(TINY, "tied", ("llama", TINY["llama"][1] | {"tie_word_embeddings": True}))
    tiny_model("tied", spread=2.0).save_pretrained(tied)
    words_tokenizer().save_pretrained(tied)
    np.save(text, random_blocks(11).train)
    command = ("retrofit", tied, "--method", "vga,vscale", "--text", text, "--out", out, "--batch-size", 1)
    arguments = [*map(str, command), *typed(OPTIONS)]
    log = tmp_path / "log"
    killed = on_two_ranks(lambda: sharded_retrofit(tmp_path, arguments, kills=True), log, **sharding_environment())
    assert killed[1] == -signal.SIGKILL, log.read_text()[-4000:]
    assert killed[0] != 0
    assert (out / "vga" / "training" / "checkpoint-4").is_dir(), log.read_text()[-4000:]
    assert not (out / "vga" / "model").exists()
    log.unlink()
    done = on_two_ranks(lambda: sharded_retrofit(tmp_path, arguments), log, **sharding_environment())
    assert done == [0, 0], log.read_text()[-4000:]
    assert log.read_text().count(f"written to {out}") == 1
    steps = [int(step) for step in (tmp_path / "steps-1.txt").read_text().split()]
    assert steps[::2] == [0, 1, 2, 3, 4, *range(4, 8), *range(8)]  # killed in step 5, before it was noted

    wrapped, parts = json.loads((tmp_path / "wrapped.json").read_text())
    assert {f"model.layers.{layer}" for layer in range(3)} < wrapped.keys()
    assert {wrapped[f"model.layers.{layer}"] for layer in range(3)} == {"FSDPLlamaDecoderLayer"}
    assert parts == {f"model.layers.{layer}.self_attn.retrofit.theta": [1] for layer in range(3)}  # of 2 heads

    skip_figures(monkeypatch)
    retrofit(str(tied), "vga,vscale", text=text, out=tmp_path / "whole", batch_size=2, **OPTIONS)
    folders = (out, tmp_path / "whole")
    for arm in ("vga", "vscale"):
        ours, expected = (AutoModelForCausalLM.from_pretrained(folder / arm / "model") for folder in folders)
        assert type(ours).__name__ == "SinkscopeLlamaForCausalLM"
        assert ours.lm_head.weight is ours.model.embed_tokens.weight
        torch.testing.assert_close(dict(ours.state_dict()), dict(expected.state_dict()), **ROUND_OFF)
        for name in ("training", "gates"):
            ours, expected = (read_table(folder / arm / "tables" / f"{name}.parquet") for folder in folders)
            pd.testing.assert_frame_equal(ours, expected, rtol=1e-4, atol=2e-6)


def test_shards_need_every_entry_of_the_configuration_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCELERATE_USE_FSDP": "true", **NEEDED}.items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(sinkscope.commands.train.sharding, "PartialState", lambda: state)
    with pytest.raises(InputError, match="on GPUs only"):
        check_sharding()
    for name in NEEDED:
        with monkeypatch.context() as patched:
            patched.delenv(name)
            with pytest.raises(InputError, match=f"{name.lower()} is not given"):
                check_sharding()


def test_a_probe_is_refused_with_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run only on the first process, and wait forever for the shards of the other processes."""
    for name, value in {"ACCELERATE_USE_FSDP": "true", **NEEDED}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sinkscope.commands.train.sharding, "check_sharding", lambda: None)
    with pytest.raises(InputError, match="a probe needs the whole model"):
        train_model(model(), random_blocks(4), config(), tmp_path / "out", probe=lambda model: pd.DataFrame())
    with pytest.raises(InputError, match="probe=… needs the whole model"):
        retrofit("no/such-model", "vga", out=tmp_path / "out", probe="attention")
    assert not (tmp_path / "out").exists()
