"""Training: architectures, rates, blocks of text, and equal weights after a training that was killed and resumed."""

import math
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.forked import forked
from support.naming import naming
from support.training import config, model, random_blocks, repetitive, same
from tiny import VOCAB, tiny_model
from transformers import AutoModelForCausalLM, Trainer

from sinkscope import InputError, SinkscopeError, gate_displacement, new_parameters
from sinkscope.commands.train.architectures import architecture, fresh_model
from sinkscope.commands.train.blocks import check_options, limited, read_blocks, with_first_tokens
from sinkscope.commands.train.history import Recorder
from sinkscope.commands.train.options import TrainingConfig, TrainOptions
from sinkscope.commands.train.trainer import (
    _TrainingBlocks,
    keep_models,
    parameter_groups,
    train_model,
    training_arguments,
)
from sinkscope.commands.train.trainer import checkpoints as complete_checkpoints
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.loading import LoadedModel, count_parameters
from sinkscope.options.option import checked
from sinkscope.text.batch import Batch
from sinkscope.text.sources import TEXTS


def checkpoints(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.glob("checkpoint-*")), key=lambda name: int(name[11:]))


@pytest.mark.parametrize("method", ["vga", "register-tokens"])
def test_the_loss_falls_on_a_text_that_repeats_itself(method: str, tmp_path: Path) -> None:
    changed = model(method=method)
    history = train_model(changed, repetitive(), config(steps=30), tmp_path)
    loss = history[(history["layer"] == -1) & (history["metric"] == "loss")].set_index("step")["value"]
    assert loss.index.tolist() == list(range(2, 31, 2))
    assert loss.iloc[-1] < 0.75 * loss.iloc[0]
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-30")  # a checkpoint is a model
    ids = torch.from_numpy(repetitive().held_out)
    assert torch.equal(again(ids).logits, changed(ids).logits)
    assert not changed.training
    assert not any(p.requires_grad or p.grad is not None for p in changed.parameters())
    last = history[history["step"] == 30].set_index(["metric", "layer"])["value"]
    moved = gate_displacement(changed).groupby("layer")["displacement"]
    assert [*moved.groups] == ([-1] if method == "register-tokens" else [0, 1, 2])  # registers belong to no layer
    assert last["gate_displacement_mean"].tolist() == pytest.approx(moved.mean().tolist())
    assert last["gate_displacement_max"].tolist() == pytest.approx(moved.max().tolist())


def test_new_parameters_have_a_learning_rate_of_their_own_and_are_decayed_with_all_or_not() -> None:
    changed = model("gpt2").requires_grad_(True)

    def groups(**options: Any) -> list[tuple[set[int], float | None, float]]:
        of_the_optimizer = parameter_groups(changed, config(weight_decay=0.1, new_learning_rate=1e-2, **options))
        return [
            ({id(p) for p in group["params"]}, group.get("lr"), group["weight_decay"]) for group in of_the_optimizer
        ]

    new = {id(p) for p in new_parameters(changed).values()}
    vectors = {id(p) for p in changed.parameters() if p.dim() == 1}
    old = {id(p) for p in changed.parameters()} - new
    assert groups() == [(old - vectors, None, 0.1), (vectors, None, 0.0), (new, 1e-2, 0.0)]
    assert groups(decay="all") == [(old, None, 0.1), (new, 1e-2, 0.1)]


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [("linear", [0, 1, 2 / 3, 1 / 3]), ("cosine", [0, 1, 0.75, 0.25]), ("constant", [0, 1, 1, 1])],
)
def test_the_rates_follow_their_schedule(schedule: str, shares: list[float], tmp_path: Path) -> None:
    """The rates of four steps, the first of them warmup, are compared as shares of the highest rate."""
    options = {"steps": 4, "log_every": 1, "warmup": 0.25, "schedule": schedule}
    history = train_model(model(), repetitive(), config(**options), tmp_path)
    rates = history[history["metric"] == "learning_rate"]["value"] / 1e-3
    assert rates.tolist() == pytest.approx(shares)
    fields = {"steps": 3, "warmup": 0.1, "beta1": 0.8, "beta2": 0.95, "clip": 0.5, "seed": 7}
    args = training_arguments(config(**fields), tmp_path, limit=1, cpu=True)
    assert (args.warmup_steps, args.max_grad_norm, args.seed) == (1, 0.5, 7)  # the warmup is rounded up
    assert Trainer.get_optimizer_cls_and_kwargs(args)[1]["betas"] == (0.8, 0.95)


def test_a_prefix_is_not_predicted(tmp_path: Path) -> None:
    rows = repetitive().train
    full, prefixed = (_TrainingBlocks(rows, 3, 0, ignored)[0] for ignored in (1, 4))
    assert torch.equal(full["input_ids"], prefixed["input_ids"])
    assert (full["labels"][:1] == -100).all()
    assert (prefixed["labels"][:4] == -100).all()
    assert torch.equal(prefixed["labels"][4:], prefixed["input_ids"][4:])
    prefix_lm = fresh_model(architecture(f"bigram-backcopy-llama:prefix_length=4,vocab_size={VOCAB}"), 0)
    predicted = _TrainingBlocks(rows, 1, 0, ignored=4)[0]
    expected = prefix_lm(**{name: ids[None] for name, ids in predicted.items()}).loss
    history = train_model(prefix_lm, repetitive(), config(steps=1, batch_size=1, log_every=1), tmp_path)
    assert history.query("metric == 'loss'")["value"].tolist() == pytest.approx([float(expected)])


def test_only_new_leaves_every_old_parameter_as_it_was(tmp_path: Path) -> None:
    before, after = model(), model()
    train_model(after, repetitive(), config(only_new=True), tmp_path)
    new = new_parameters(after)
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, after.get_parameter(name)) != (name in new), name


def test_bf16_computes_in_it_and_keeps_the_weights(tmp_path: Path) -> None:
    fine, coarse = model(), model()
    forward = type(fine).forward
    train_model(fine, repetitive(), config(), tmp_path / "fine")
    train_model(coarse, repetitive(), config(bf16=True), tmp_path / "coarse")
    assert {p.dtype for p in coarse.parameters()} == {torch.float32}
    assert not same(fine, coarse)
    assert coarse.forward.__func__ is forward  # nothing of accelerate's stays on it
    assert coarse.config.use_cache == tiny_model("llama").config.use_cache


def probe(seen: Any) -> pd.DataFrame:
    """Measure with the tracer and draw random numbers. Returns a row for the whole model and one for a layer."""
    assert not seen.training
    assert not torch.is_grad_enabled()
    torch.rand(7)
    ids = torch.from_numpy(repetitive().held_out)
    with open_tracer(seen, find_family(seen)) as tracer:
        logits = tracer.logits(Batch(ids, torch.ones_like(ids)))
    rows = [(-1, "mean", logits.double().mean().item()), (1, "largest", logits.max().item())]
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])


@pytest.mark.parametrize("options", [{}, {"bf16": True, "accumulation": 2}], ids=["plain", "bf16"])
def test_a_training_does_not_see_that_it_is_measured(options: dict[str, Any], tmp_path: Path) -> None:
    """GPT-2 has dropout: a probe that draws random numbers must not take them from the training."""
    alone, measured = model("gpt2"), model("gpt2")
    expected = train_model(alone, repetitive(), config(**options), tmp_path / "alone")
    history = train_model(measured, repetitive(), config(**options), tmp_path / "measured", probe=probe)
    assert same(alone, measured)
    of_probe = history["metric"].isin(["mean", "largest"])
    assert history[~of_probe].reset_index(drop=True).equals(expected)
    probed = history[of_probe]
    assert probed[probed["metric"] == "mean"]["step"].tolist() == list(range(0, 13, 2))
    assert set(probed[probed["metric"] == "largest"]["layer"]) == {1}
    with torch.no_grad():
        first, last = probe(model("gpt2").eval()), probe(measured)
    if "bf16" not in options:
        assert probed[probed["step"] == 0]["value"].tolist() == first["value"].tolist()
        assert probed[probed["step"] == 12]["value"].tolist() == last["value"].tolist()


def train_slowly(folder: Path) -> None:
    """Train slowly enough to be killed on the way."""
    step = Trainer.training_step
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "training_step", lambda *args, **named: (time.sleep(0.05), step(*args, **named))[1])
        train_model(model("gpt2"), repetitive(), config(steps=40, save_every=10), folder)


def test_killed_and_resumed_it_ends_with_the_weights_of_an_unbroken_run(tmp_path: Path) -> None:
    """GPT-2 has dropout, and 40 steps are several epochs: data order and random numbers must continue, too."""
    folder = tmp_path / "killed"
    with forked(lambda: train_slowly(folder)) as process:
        deadline = time.time() + 60
        while not (folder / "checkpoint-20" / "trainer_state.json").exists() and time.time() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert checkpoints(folder)[-1] in ("checkpoint-20", "checkpoint-30")

    resumed, unbroken = model("gpt2"), model("gpt2")
    history = train_model(resumed, repetitive(), config(steps=40, save_every=10), folder)
    expected = train_model(unbroken, repetitive(), config(steps=40, save_every=10), tmp_path / "unbroken")
    assert same(resumed, unbroken)
    assert history.equals(expected)
    assert not same(resumed, model("gpt2"))


def test_logs_do_not_depend_on_where_it_was_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log's loss is the mean over the steps since the log before it, and checkpoints come between logs here."""
    apart = config(steps=12, log_every=5, save_every=4)
    step, steps = Trainer.training_step, list[int]()
    monkeypatch.setattr(
        Trainer, "training_step", lambda self, *inputs: (steps.append(self.state.global_step), step(self, *inputs))[1]
    )
    expected = train_model(model(), repetitive(), apart, tmp_path, probe=probe, keep_all=True)
    assert expected[expected["metric"] == "mean"]["step"].tolist() == [0, 4, 5, 8, 10, 12]
    assert expected[expected["metric"] == "loss"]["step"].tolist() == [4, 5, 8, 10, 12]
    shutil.rmtree(tmp_path / "checkpoint-12")
    for first in (8, 12):  # a finished training takes no step
        steps.clear()
        resumed = train_model(model(), repetitive(), apart, tmp_path, probe=probe, keep_all=True)
        assert steps == list(range(first, 12))
        pd.testing.assert_frame_equal(resumed, expected, check_exact=True)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--learning-rate nan: it must be a number"):
        checked(TrainingConfig, {"learning_rate": float("nan")})
    for method, parameters in (("none", {}), ("vscale", {"learned": False})):
        with pytest.raises(InputError, match=f"--only-new leaves nothing to train: {method} adds no parameters"):
            train_model(model(method=method, **parameters), repetitive(), config(only_new=True), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_not_finite_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match=r"the loss is nan at step .*: take smaller learning rates"):
        train_model(model(), repetitive(), config(learning_rate=1e30), tmp_path)
    state: Any = SimpleNamespace(global_step=3, log_history=[{}], is_world_process_zero=True)
    for loss in (math.nan, math.inf, -math.inf):
        with pytest.raises(SinkscopeError, match=f"the loss is {loss} at step 3: take smaller learning rates"):
            Recorder(model(), None).on_log(None, state, None, {"loss": loss})


def test_complete_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    """A kill leaves the state, which the Trainer writes last, cut off or missing."""
    for step, state in ((8, '{"global_step": 8}'), (12, "{}"), (4, "{}"), (16, '{"log_hist'), (20, "")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]


BLOCKS = random_blocks(200)
LENGTH = BLOCKS.train.shape[1]


def options(**fields: Any) -> TrainOptions:
    return checked(TrainOptions, {"block_length": LENGTH} | fields)


def test_new_parameters_have_the_learning_rate_of_all_unless_theirs_is_named() -> None:
    assert options(learning_rate=0.1).new_learning_rate == 0.1
    assert options(learning_rate=0.1, new_learning_rate=0.2).new_learning_rate == 0.2


def test_no_block_is_read_twice_by_accumulated_batches_of_processes() -> None:
    assert options(steps=5, batch_size=3, accumulation=2).blocks_wanted(4) == 5 * 3 * 2 * 4


TOKENIZER: Any = SimpleNamespace(all_special_ids=[0, 1, 2], bos_token_id=1, pad_token_id=0)
LOADED = LoadedModel(tiny_model("llama"), TOKENIZER, "tiny", "tiny", None, None, ())


def changed(**fields: Any) -> Any:
    return limited(with_first_tokens(BLOCKS, LOADED, options(**fields)), options(**fields))


def test_every_checkpoint_is_kept_or_the_last_two(tmp_path: Path) -> None:
    for keep_all, kept in ((True, ["checkpoint-2", "checkpoint-4", "checkpoint-5"]), (False, None)):
        folder = tmp_path / str(keep_all)
        train_model(model(), repetitive(), config(steps=5, save_every=2), folder, keep_all=keep_all)
        assert checkpoints(folder) == (kept or ["checkpoint-4", "checkpoint-5"])


def test_more_than_four_passes_over_the_text_are_warned_of() -> None:
    once = len(BLOCKS.train)
    assert BLOCKS.notices(once) == BLOCKS.notices(4 * once) == []
    (notice,) = BLOCKS.notices(5 * once)
    assert f"these steps are 5 passes over the {once * LENGTH:,} tokens" in notice
    assert len(BLOCKS.notices(4 * once + 1)) == 1


def test_shipped_texts_and_text_files_are_text_for_a_tokenizer() -> None:
    for text in (*TEXTS, "BOOK.TXT"):
        with naming(text), pytest.raises(InputError, match="training on text needs a tokenizer"):
            read_blocks(replace(LOADED, tokenizer=None), options(text=text), 4)


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_the_hash_is_of_all_tokens(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.commands.train.blocks.ROWS", 1)
    rows = getattr(BLOCKS, part).copy()
    rows[-1, -1] += 1
    assert replace(BLOCKS, **{part: rows}).sha256 != BLOCKS.sha256


@pytest.mark.parametrize(("bos", "pad", "expected"), [(None, 2, 2), (0, 2, 0), (None, None, 0)])
def test_the_fixed_token_is_the_bos_or_else_the_padding_token(bos: int | None, pad: int | None, expected: int) -> None:
    tokenizer: Any = SimpleNamespace(all_special_ids=[], bos_token_id=bos, pad_token_id=pad)
    blocks = with_first_tokens(BLOCKS, replace(LOADED, tokenizer=tokenizer), options(fixed_position=0))
    assert (blocks.train[:, 0] == expected).all()


def test_tokens_limit_what_is_trained_on_and_not_what_is_measured() -> None:
    assert changed().sha256 == BLOCKS.sha256
    few = changed(tokens=5 * LENGTH + 3)
    assert np.array_equal(few.train, BLOCKS.train[:5])
    assert np.array_equal(few.held_out, BLOCKS.held_out)
    drawn = options(random_tokens=2)
    few_read = with_first_tokens(replace(BLOCKS, train=BLOCKS.train[:5]), LOADED, drawn)  # of a dataset
    assert np.array_equal(few_read.held_out, changed(random_tokens=2).held_out)


def test_random_tokens_are_ordinary_ones_and_the_seeds_and_one_token_stands_at_a_fixed_position() -> None:
    two = changed(random_tokens=2)
    for part, before in ((two.train, BLOCKS.train), (two.held_out, BLOCKS.held_out)):
        assert np.array_equal(part[:, 2:], before[:, 2:])
        assert (part[:, :2] != before[:, :2]).any()
    drawn = two.train[:, :2]
    assert (drawn.min(), drawn.max()) == (3, VOCAB - 1)
    assert len(np.unique(drawn)) > 0.9 * (VOCAB - 3)  # from 400 draws
    assert (drawn[:, 0] != drawn[:, 1]).any()
    assert changed(random_tokens=2).sha256 == two.sha256 != changed(random_tokens=2, seed=1).sha256
    fixed = changed(fixed_position=3)
    for part, before in ((fixed.train, BLOCKS.train), (fixed.held_out, BLOCKS.held_out)):
        assert (part[:, 3] == 1).all()  # the BOS
        assert np.array_equal(np.delete(part, 3, axis=1), np.delete(before, 3, axis=1))


def test_what_cannot_be_is_refused() -> None:
    for fields, task, message in (
        ({"random_tokens": LENGTH}, None, "within the --block-length"),
        ({"fixed_position": LENGTH}, None, "within the --block-length"),
        ({"tokens": LENGTH - 1}, None, "less than one block"),
        ({"text": "random"}, None, "nothing can be learned from it"),
        ({"fixed_position": 0, "random_tokens": 1}, "bigram-backcopy", "give one of --random-tokens and"),
    ):
        with pytest.raises(InputError, match=message):
            check_options(options(**fields), task)
    check_options(options(tokens=LENGTH, random_tokens=LENGTH - 1, fixed_position=LENGTH - 1), None)


def test_architectures_and_the_fields_behind_their_names() -> None:
    config = architecture("llama-60m")
    assert count_parameters(config) - 2 * 768 * config.vocab_size == pytest.approx(60e6, rel=0.02)
    config = architecture("llama-1m:position_scheme=alibi,num_attention_heads=4,tie_word_embeddings=true")
    assert (config.position_scheme, config.num_attention_heads, config.tie_word_embeddings) == ("alibi", 4, True)
    assert (config.num_key_value_heads, config.head_dim, config.hidden_size) == (4, 64, 256)
    assert architecture("tiny-llama:num_attention_heads=8").num_key_value_heads == 8
    assert architecture("tiny-llama:num_attention_heads=8,num_key_value_heads=2").num_key_value_heads == 2
    assert fresh_model(architecture("llama-1m:dtype=bfloat16,vocab_size=64"), 0).dtype == torch.float32
    folders = {str(checked(TrainOptions, {"config": f"llama-1m:rms_norm_eps={eps}"}).folder()) for eps in (0.5, 0.25)}
    assert len(folders) == 2
    assert all(folder.startswith("runs/llama-1m-rms_norm_eps=0.") for folder in folders)
    for text, message in (
        ("llama-1m:position_shceme=alibi", "field 'position_shceme' is unknown; did you mean 'position_scheme'"),
        ("llama-1m:position_scheme", "write fields as key=value"),
        ("llama-1m:position_scheme=albi", "position_scheme 'albi' is unknown; did you mean 'alibi'"),
        ("llama-1m:num_attention_heads=7", "not a multiple"),
        ("llama-2m:num_hidden_layers=2", "'llama-2m:num_hidden_layers=2' is unknown"),
    ):
        with pytest.raises(InputError, match=message):
            architecture(text)


def test_a_checkpoint_whose_move_was_broken_off_is_moved(tmp_path: Path) -> None:
    """The files for resuming are deleted first, so that it is no complete checkpoint any more."""
    checkpoint, target = tmp_path / "training" / "checkpoint-2", tmp_path / "checkpoints"
    for folder in (checkpoint, target):
        folder.mkdir(parents=True)
    (checkpoint / "model.safetensors").touch()
    (checkpoint / "optimizer.pt").touch()
    keep_models(tmp_path / "training", target)
    assert [path.name for path in (target / "checkpoint-2").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("only_new", [True, False])
@pytest.mark.parametrize("keep_all", [True, False])
def test_a_training_begins_only_if_its_checkpoints_fit_on_the_disk(
    only_new: bool, keep_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = model()
    weights = 4 * sum(p.numel() for p in changed.parameters())
    moments = 2 * (4 * sum(p.numel() for p in new_parameters(changed).values()) if only_new else weights)
    needed = (7 if keep_all else 3) * (weights + moments) + weights  # one more than are kept, and the trained model
    options = config(steps=11, save_every=2, only_new=only_new)
    for free in (needed - 1, needed):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with pytest.raises(InputError, match="make room") if free < needed else nullcontext():
            train_model(changed, random_blocks(11), options, tmp_path, keep_all=keep_all)
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())  # is replaced
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - held))
    train_model(changed, random_blocks(11), options, tmp_path, keep_all=keep_all)
