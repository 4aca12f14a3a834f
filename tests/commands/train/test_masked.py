"""Encoders are trained to predict masked tokens: their loss, masks and gates, and a training that is resumed."""

import io
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from support.changed_by_hand import changed_by_hand
from support.encoders import encoder, word_tokenizer
from support.retrofitted import METHODS
from support.training import config, random_blocks, same
from tiny import VOCAB
from torch import nn
from transformers import AutoModelForMaskedLM, PreTrainedModel, Trainer

from sinkscope import InputError, new_parameters, retrofit_model
from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.trainer import masked_loss, train_model
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.tracer import open_tracer
from sinkscope.text.batch import IGNORED, Batch

IDS = torch.randint(5, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def bert(method: str, dtype: torch.dtype = torch.float64, moved: bool = True, **parameters: Any) -> Any:
    """Return a tiny BERT with a method, whose parameters are moved away from their start."""
    model = retrofit_model(encoder("bert", dtype), None, method, **parameters)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new_parameters(model).values() if moved else ():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def blocks() -> Blocks:
    unnamed = random_blocks(10)
    return Blocks(unnamed.train, unnamed.held_out, unnamed.name, word_tokenizer())


def seen(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train, and return the inputs of every batch."""
    batches: list[dict[str, Any]] = []
    compute = Trainer.compute_loss

    def keep(self: Trainer, network: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        batches.append({name: x.clone() for name, x in inputs.items()})
        return compute(self, network, inputs, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "compute_loss", keep)
        train_model(model, blocks(), config(**options), folder)
    return batches


def test_the_loss_is_that_of_the_library() -> None:
    model, labels = encoder("bert"), IDS.clone()
    labels[:, ::3] = IGNORED
    output = model(input_ids=IDS, labels=labels)
    ours = masked_loss(output, labels, (labels != IGNORED).sum())
    assert ours.dtype == torch.float64
    assert float(ours) == pytest.approx(float(output.loss), rel=1e-12)
    assert float(masked_loss(output, torch.full_like(labels, IGNORED), torch.tensor(0))) == 0


def test_a_step_of_several_batches_is_one_of_a_large_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches have different numbers of masked tokens. The recorded loss is the mean over all of them."""
    whole, parts, start = (encoder("bert", **dict.fromkeys(DROPOUT, 0.0)) for _ in range(3))
    once = {"steps": 1, "log_every": 1, "save_every": 1, "clip": 0.0}
    batches = seen(monkeypatch, parts, tmp_path / "parts", batch_size=1, accumulation=4, **once)
    history = train_model(whole, blocks(), config(batch_size=4, **once), tmp_path / "whole")
    assert len({int((batch["labels"] != IGNORED).sum()) for batch in batches}) > 1
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter, parts.get_parameter(name), rtol=0, atol=1e-9)
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    expected = float(start(input_ids=ids, labels=labels).loss)
    assert history.query("metric == 'loss'")["value"].tolist() == pytest.approx([expected], rel=1e-6)


def test_all_methods_see_equal_masks_and_every_reading_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, gated, reread = (
        seen(monkeypatch, bert(method, torch.float32, moved=False), tmp_path / f"{method}{seed}", seed=seed)
        for method, seed in (("none", 0), ("vga", 0), ("none", 1))
    )
    assert len(plain) == len(gated) == 12
    for mine, theirs in zip(plain, gated, strict=True):
        assert torch.equal(mine["input_ids"], theirs["input_ids"])
        assert torch.equal(mine["labels"], theirs["labels"])
    assert not all(torch.equal(mine["labels"], theirs["labels"]) for mine, theirs in zip(plain, reread, strict=True))
    rows, labels = (torch.cat([batch[name] for batch in plain]) for name in ("input_ids", "labels"))
    texts = torch.where(labels == IGNORED, rows, labels)
    readings = (texts == texts[0]).all(1).nonzero().flatten()
    assert len(readings) > 1
    assert len({tuple(labels[at].tolist()) for at in readings}) == len(readings)


@pytest.mark.parametrize("method", ["vga", "register-tokens"])
def test_a_resumed_training_ends_with_the_weights_of_an_unbroken_one(method: str, tmp_path: Path) -> None:
    """With dropout, and several epochs: the masks of the middle do not depend on those before."""

    def fresh() -> Any:
        return retrofit_model(encoder("bert", torch.float32, spread=2.0, **DROPOUT), None, method)

    resumed, unbroken = fresh(), fresh()
    expected = train_model(unbroken, blocks(), config(), tmp_path / "unbroken")
    train_model(fresh(), blocks(), config(), tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-12")
    console = Console(record=True, file=io.StringIO())
    history = train_model(resumed, blocks(), config(), tmp_path / "resumed", console=console)
    assert console.export_text() == "resumed at step 8\n"
    pd.testing.assert_frame_equal(history, expected, check_exact=True)
    assert same(unbroken, resumed)
    assert not same(unbroken, fresh())
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "resumed" / "checkpoint-12")
    assert torch.equal(again(input_ids=IDS).logits, resumed(input_ids=IDS).logits)


@pytest.mark.parametrize("label", ["none", "vga", "vga-output", "iga", "iga-output", "vscale", "learnable-sink"])
def test_logits_are_the_formulas(label: str) -> None:
    """Alone, padded, and in the tracer. Without a mask, attention must still be to both sides."""
    method, parameters = METHODS.get(label, ("none", {}))
    model, plain = bert(method, **parameters), encoder("bert")
    with torch.no_grad(), changed_by_hand(plain, label, model) if method != "none" else nullcontext():
        expected = plain(input_ids=IDS).logits
    with torch.no_grad():
        alone = model(input_ids=IDS).logits
        longer, mask = F.pad(IDS, (0, 3)), F.pad(torch.ones_like(IDS), (0, 3))
        padded = model(input_ids=longer, attention_mask=mask).logits[:, :-3]
    with open_tracer(model, family_of(model)[0]) as tracer:
        traced = tracer.logits(Batch(IDS, torch.ones_like(IDS)))
    for logits in (alone, padded, traced):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    if method != "none":
        assert (alone - encoder("bert")(input_ids=IDS).logits).abs().max() > 1e-4
        start = bert(method, moved=False, **parameters)(input_ids=IDS).logits
        assert method in ("vscale", "learnable-sink") or torch.equal(start, encoder("bert")(input_ids=IDS).logits)


def test_registers_stand_before_the_text_and_the_first_token_may_be_masked() -> None:
    model, plain = bert("register-tokens", count=3), encoder("bert")
    embedded = plain.bert.embeddings.word_embeddings(IDS)
    whole = torch.cat([model.retrofit.embeddings.expand(2, -1, -1), embedded], dim=1)
    expected = plain(inputs_embeds=whole).logits[:, 3:]
    labels = IDS.clone()
    labels[:, 1:] = IGNORED
    output = model(input_ids=IDS, labels=labels)
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-9)
    assert float(output.loss) == pytest.approx(float(F.cross_entropy(expected[:, 0], IDS[:, 0])), rel=1e-9)
    with pytest.raises(InputError, match="126 tokens and 3 registers are beyond the model's 128 positions"):
        model(input_ids=torch.zeros(1, 126, dtype=torch.long))


def test_value_biases_are_added_before_the_output_projection() -> None:
    """With shares that sum to 1, a bias of a head's mix is one of its values (WSE §7.3)."""
    model, plain = bert("value-bias"), encoder("bert")
    with torch.no_grad():
        for index, layer in enumerate(plain.bert.encoder.layer):
            own = model.bert.encoder.layer[index].attention.self
            layer.attention.self.value.bias += own.retrofit.bias.flatten()
    torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=1e-10)


def test_batches_of_a_step_share_its_number_of_masked_tokens() -> None:
    logits, labels = torch.randn(4, 6, VOCAB, dtype=torch.float64), torch.randint(VOCAB, (4, 6))
    labels[0, :5] = IGNORED  # so that the first batch has fewer than its share
    whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    count = (labels != IGNORED).sum()
    batches = ((logits[:1], labels[:1]), (logits[1:], labels[1:]))
    losses = [masked_loss(SimpleNamespace(logits=x), targets, count) for x, targets in batches]
    torch.testing.assert_close(sum(losses), whole)
