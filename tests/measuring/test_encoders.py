"""Encoders attend in both directions: their tables agree with transformers, and causal-only commands are refused."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import torch.nn.functional as F
from reference import assert_same, errors
from support.encoders import ENCODERS, SPECIAL, encoder, recorded, word_tokenizer
from support.plain import only_float64, run_plainly
from support.retrofitted import each_pair
from tiny import VOCAB, batched, ragged_tokens
from transformers import PreTrainedModel

import sinkscope
from sinkscope.errors import InputError
from sinkscope.interventions import parse
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import family_of, inputs_for
from sinkscope.measuring.tracer import model_inputs, open_tracer
from sinkscope.models.family import Family
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config
from sinkscope.text.batch import IGNORED, Batch
from sinkscope.text.inputs import masked

LENGTHS = (20, 13, 17)
SETTINGS = Settings(positions=20, window=6, epsilon=0.17)
ROUND_OFF = 1e-10


@cache
def known(name: str) -> tuple[PreTrainedModel, Family, list[reference.Sequence]]:
    """Return an encoder, its family, and the record of each sequence by plain transformers."""
    model = encoder(name)
    family, _ = family_of(model)
    return model, family, [recorded(model, ids) for ids in ragged_tokens(LENGTHS)]


def tables_of(model: PreTrainedModel, family: Family, batches: Sequence[Batch], *names: str) -> dict[str, pd.DataFrame]:
    with open_tracer(model, family) as tracer:
        observables = [OBSERVABLES[name](SETTINGS) for name in names]
        for batch in batches:
            tracer.forward(batch, observables)
    return {name: table for observable in observables for name, table in observable.tables().items()}


def attention(sequences: list[reference.Sequence]) -> pd.DataFrame:
    return reference.attention(sequences, SETTINGS.positions, SETTINGS.window, SETTINGS.epsilon, causal=False)


def sink_positions(sequences: list[reference.Sequence]) -> pd.DataFrame:
    return reference.sink_positions(sequences, SETTINGS.window, SETTINGS.epsilon, causal=False)


# ------------------------------------------------------------------------------------------- forward


@each_pair(list(ENCODERS), ["left", "right"], ("name", "side"))
def test_attention_is_that_of_plain_transformers(name: str, side: str) -> None:
    """The window is shorter than the sequences; ModernBERT's own windows extend to both sides."""
    model, family, sequences = known(name)
    tables = tables_of(model, family, batched(ragged_tokens(LENGTHS), 2, side), "attention")
    expected = {
        "attention": attention(sequences),
        "attention_heads": reference.attention_heads(sequences),
        "sink_positions": sink_positions(sequences),
    }
    assert len(expected["sink_positions"])
    assert_same(tables, expected, ROUND_OFF)


def test_geometry_is_over_the_queries_of_both_sides() -> None:
    model, family, _ = known("bert")
    sequences = ragged_tokens(LENGTHS)
    table = tables_of(model, family, batched(sequences, 3, "left"), "geometry")["geometry"].query("layer == 0")
    attention = model.bert.encoder.layer[0].attention.self
    seen: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for ids in sequences:
        hidden = model.bert.embeddings(input_ids=torch.as_tensor(ids)[None])[0]
        query, key = (part(hidden).unflatten(1, (4, -1)).transpose(0, 1) for part in (attention.query, attention.key))
        logits = query @ key.transpose(1, 2) * attention.scaling
        cosine = F.cosine_similarity(query[:, :, None], key[:, None], dim=-1)
        others = (logits.sum(2, keepdim=True) - logits) / (len(ids) - 1)
        for head, position in np.ndindex(4, len(ids)):
            column = (cosine.mean(1)[head, position], (logits - others).mean(1)[head, position])
            seen.setdefault((head, position), []).append(tuple(map(float, column)))
    rows = [(*at, *np.mean(seen[at], axis=0)) for at in sorted(seen)]
    expected = pd.DataFrame(rows, columns=["head", "position", "qk_cosine", "sink_logit_gap"])
    assert max(errors(table, expected).values()) < ROUND_OFF


@each_pair(list(ENCODERS), ["left", "right"], ("name", "side"))
def test_logits_are_the_bare_models_of_each_sequence_alone(name: str, side: str) -> None:
    """The batch is padded; RoBERTa's positions begin after the id of its padding token."""
    model, family, _ = known(name)
    assert family.first_position == (2 if name == "roberta" else 0)
    sequences = ragged_tokens(LENGTHS)
    (batch,) = batched(sequences, 3, side)
    with torch.no_grad():
        logits = model(**model_inputs(model, batch, first_position=family.first_position)).logits
        for row, ids in enumerate(sequences):
            alone = model(input_ids=torch.as_tensor(ids)[None]).logits[0]
            assert float((logits[row][batch.attention_mask[row].bool()] - alone).abs().max()) < ROUND_OFF


def test_mask_sink_hides_a_key_from_the_tokens_before_it_too() -> None:
    model, family, _ = known("bert")
    hidden = 5
    (batch,) = batched(ragged_tokens((12,)), 1)
    allowed = torch.ones(12, 12, dtype=torch.bool)
    allowed[:, hidden] = False
    allowed[hidden, hidden] = True
    with torch.no_grad():
        bare = model(input_ids=batch.token_ids, attention_mask=allowed[None, None]).logits
    with open_tracer(model, family, interventions=[parse(f"mask-sink:positions={hidden}")]) as tracer:
        torch.testing.assert_close(tracer.logits(batch), bare, rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------ backward


def loaded_encoder(name: str = "bert", dtype: torch.dtype = torch.float64) -> LoadedModel:
    """Return an encoder with the padding token of the tokenizer."""
    return LoadedModel(encoder(name, dtype, pad_token_id=0), word_tokenizer(), name, name, None, None, ())


def write_lines(path: Path, lengths: Sequence[int] = LENGTHS) -> str:
    """Write sequences [CLS] … [SEP] as JSON lines of token ids."""
    words = [[1, *(int(word) % (VOCAB - 5) + 5 for word in ids), 2] for ids in ragged_tokens(lengths)]
    path.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in words))
    return str(path)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "electra"])
def test_gradients_are_those_of_the_masked_tokens_loss(name: str, tmp_path: Path) -> None:
    """Ragged sequences in one batch are compared with autograd on each alone."""
    loaded = loaded_encoder(name)
    options = {"input": write_lines(tmp_path / "ids.jsonl"), "seq_len": 24, "num_seqs": 3, "positions": 22}
    tables = sinkscope.analyze(loaded, **options, observables="gradient,attention").tables
    family, _ = family_of(loaded.model)
    inputs = inputs_for(loaded, make_config(**options), family)
    sums: dict[tuple[int, str], torch.Tensor] = {}
    for ids, labels in inputs.masked or ():
        batch, wanted = torch.tensor(ids)[None], torch.tensor(labels)[None]
        with only_float64():
            plain = run_plainly(loaded.model, family.layers, batch, torch.ones_like(batch), labels=wanted)
        share = float((wanted != IGNORED).sum()) / inputs.num_predicted  # of the run's loss, a mean over all sequences
        for layer, attended in enumerate(plain.attended):
            for pathway, x in zip(("query", "key", "value"), attended.gradients, strict=True):
                gradient = share * x[0].transpose(0, 1).flatten(1)
                gradient = F.pad(gradient, (0, 0, 0, 22 - len(gradient)))
                sums[layer, pathway] = sums.get((layer, pathway), torch.zeros(())) + gradient
    table = tables["gradient"].query("head == -1")
    for (layer, pathway), total in sums.items():
        found = table.query(f"layer == {layer} and pathway == '{pathway}'")["grad_norm"].to_numpy()
        assert np.abs(found - total.norm(dim=-1).numpy()).max() < 1e-9  # rotary angles are of float32
        assert total[0].norm() > 0 or layer == 2  # also for query 0, which sees all keys
    assert tables["gradient_check"]["identity_residual"].max() < 1e-9


def test_what_is_measured_forward_is_of_the_text_as_it_is(tmp_path: Path) -> None:
    """Gradients use the masked text; all other tables are the same with and without them."""
    loaded, options = loaded_encoder(), {"input": write_lines(tmp_path / "ids.jsonl"), "seq_len": 24, "num_seqs": 3}
    names = ("attention", "activation", "massive")
    alone = sinkscope.analyze(loaded, **options, observables=names).tables
    together = sinkscope.analyze(loaded, **options, observables=(*names, "gradient")).tables
    for name in names:
        pd.testing.assert_frame_equal(alone[name], together[name])


def test_neither_batch_size_nor_order_nor_padding_changes_the_loss(tmp_path: Path) -> None:
    loaded = loaded_encoder()
    family, _ = family_of(loaded.model)
    config = make_config(input=write_lines(tmp_path / "ids.jsonl"), seq_len=24, num_seqs=3)
    inputs = inputs_for(loaded, config, family)
    backwards = masked(inputs.sequences[::-1], word_tokenizer(), VOCAB, 0)
    assert all(
        np.array_equal(mine.ids, theirs.ids) and np.array_equal(mine.labels, theirs.labels)
        for mine, theirs in zip(inputs.masked or (), backwards[::-1], strict=True)
    )
    losses = []
    with open_tracer(loaded.model, family) as tracer:
        for size, side in ((1, "right"), (2, "left"), (3, "right")):
            losses.append(torch.cat([tracer.forward_with_loss(batch, []) for batch in inputs.batches(size, side)]))
    assert all(torch.allclose(loss, losses[0], rtol=0, atol=1e-9) for loss in losses)
    expected = []
    for ids, labels in inputs.masked or ():
        logits = loaded.model(input_ids=torch.tensor(ids)[None]).logits[0]
        expected.append(float(F.cross_entropy(logits, torch.tensor(labels), reduction="sum")))
    assert losses[0].tolist() == pytest.approx(expected, rel=0, abs=1e-9)


def test_tokens_are_masked_as_the_librarys_collator_does() -> None:
    """15 % of the ordinary tokens are selected: 80 % of them become [MASK] and 10 % become another token."""
    rows = [np.array([1, *row, 2]) for row in np.random.default_rng(0).integers(5, VOCAB, (200, 62))]
    found = masked(rows, word_tokenizer(), VOCAB, 0)
    ids, labels, own = (np.stack(parts) for parts in ([one.ids for one in found], [one.labels for one in found], rows))
    chosen = labels != IGNORED
    assert not chosen[:, [0, -1]].any()
    assert (labels[chosen] == own[chosen]).all()
    assert (ids[~chosen] == own[~chosen]).all()
    assert abs(chosen[:, 1:-1].mean() - 0.15) < 0.01
    assert abs((ids[chosen] == SPECIAL.index("[MASK]")).mean() - 0.8) < 0.03
    assert 0.05 < ((ids != own) & (ids != SPECIAL.index("[MASK]"))).sum() / chosen.sum() < 0.13
    assert not np.array_equal(np.stack([one.ids for one in masked(rows, word_tokenizer(), VOCAB, 1)]), ids)


# -------------------------------------------------------------------------------------------- inputs


TEXT = " ".join(f"w{number % 80} ." for number in range(400))


@pytest.mark.parametrize(("bos", "ends"), [("auto", (1, 2)), ("never", (5, 6))])
def test_a_text_stands_between_cls_and_sep(tmp_path: Path, bos: str, ends: tuple[int, int]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    loaded = loaded_encoder()
    family, _ = family_of(loaded.model)
    inputs = inputs_for(loaded, make_config(input=str(tmp_path / "text.txt"), seq_len=16, num_seqs=4, bos=bos), family)
    assert [len(ids) for ids in inputs.sequences] == [16] * 4
    if bos == "auto":
        assert all((ids[0], ids[-1]) == ends and not np.isin(ids[1:-1], ends).any() for ids in inputs.sequences)
    else:
        assert not any(np.isin(ids, (1, 2)).any() for ids in inputs.sequences)


# ------------------------------------------------------------------------------------------ commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    encoder("bert", torch.float32).save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    (path / "text").with_suffix(".txt").write_text(TEXT)
    return path


def test_a_folder_gives_every_table(folder: Path) -> None:
    options = {"input": str(folder / "text.txt"), "seq_len": 20, "num_seqs": 6, "epsilon": 0.06}
    run = sinkscope.analyze(folder, **options)
    assert set(run.tables) >= {"attention", "sink_positions", "gradient", "geometry", "attention_maps", "massive_map"}
    assert not run.manifest["family"]["causal"]
    assert 0 < run.manifest["input"]["masked"] < run.manifest["input"]["tokens"] / 3
    (left, right) = run.figure("sink-positions").axes
    assert left.get_xlabel() == "position of the sink"
    assert "[SEP]" in [label.get_text() for label in right.get_yticklabels()]
    maps = run.tables["attention_maps"]
    assert (maps["key"] > maps["query"]).any()
    assert np.allclose(maps.groupby(["layer", "head", "query"])["weight"].sum(), 1, atol=1e-5)
    assert set(run.tables["sink_positions"]["token"]) & {"[CLS]", "[SEP]", "."}
    assert "attends in both directions" in str(run.verdict)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "streaming": (lambda path: sinkscope.intervene(path, "streaming-window"), "it attends both ways"),
    "its own text": (lambda path: sinkscope.analyze(path, input="sampled"), "writes no text"),
    "retrofit": (lambda path: sinkscope.retrofit(path, "vga", out=path / "out", quiet=True), "attends both ways"),
    "train": (
        lambda path: sinkscope.train(path / "config.json", "none", out=path / "out", text=str(path / "text.txt")),
        "attends both ways",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_causal_only_is_refused_with_the_reason(folder: Path, what: str) -> None:
    call, reason = REFUSED[what]
    with pytest.raises(InputError, match=reason) as caught:
        call(folder)
    assert len(str(caught.value).splitlines()) == 1
