"""Encoders attend in both directions: their tables agree with transformers, and causal-only commands are refused."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import torch.nn.functional as F
from support.agreement import is_equal, padded_differences
from support.encoders import ENCODERS, SPECIAL, encoder, word_tokenizer
from tiny import VOCAB, batched, measured, ragged_tokens, written
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, BartForConditionalGeneration

import sinkscope
from sinkscope.errors import InputError
from sinkscope.interventions import parse
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import family_of, inputs_for
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.calibrate import calibrate
from sinkscope.models.families import find_family
from sinkscope.models.family import Family
from sinkscope.models.loading import LoadedModel
from sinkscope.models.wiring import check_wiring, read_sites
from sinkscope.options.measuring import make_config
from sinkscope.text.batch import IGNORED
from sinkscope.text.inputs import masked

LENGTHS = (20, 13, 17)
ROUND_OFF = 1e-10


@pytest.mark.parametrize("headless", [False, True])
def test_the_row_of_bert_is_what_is_found_numerically(headless: bool) -> None:
    model = encoder("bert").base_model if headless else encoder("bert")
    row, calibrated = find_family(model), calibrate(model, torch.arange(3, 14)[None])
    for field in fields(Family):
        if field.name not in ("when", "projections", "positions", "position_embedding"):
            assert getattr(row, field.name) == getattr(calibrated, field.name), field.name
    assert model.get_submodule(row.position_embedding) is model.base_model.embeddings.position_embeddings
    for sites in read_sites(model, row, torch.arange(3, 14)[None]):
        assert check_wiring(row.block(0), sites) < ROUND_OFF
    wrong = replace(row, sites={**row.sites, "mid": "attention.output.LayerNorm.output"})
    assert check_wiring(wrong.block(0), read_sites(model, wrong, torch.arange(3, 14)[None])[0]) > 1e-2


@pytest.mark.parametrize("name", ENCODERS)
def test_every_table_is_that_of_plain_transformers_and_autograd(name: str) -> None:
    """Ragged, on either side; the window is shorter than the sequences, as are ModernBERT's own on both sides."""
    model = encoder(name)
    for side, columns in padded_differences(model, family_of(model)[0], whole=True).items():
        assert "attention.window_mass" in columns
        assert "gradient.grad_norm" in columns
        assert is_equal(name, columns), (side, columns)


def test_geometry_is_over_the_queries_of_both_sides() -> None:
    model, sequences = encoder("bert"), ragged_tokens(LENGTHS)
    tables = measured(model, batched(sequences, 3, "left"), Settings(positions=20), ("geometry",))
    expected = reference.geometry(reference.record_each(model, sequences), 20)
    reference.assert_same(tables, {"geometry": expected}, ROUND_OFF)


def test_an_encoder_that_is_a_decoder_is_causal_and_an_encoder_decoder_is_refused() -> None:
    decoder = AutoConfig.for_model("bert", **ENCODERS["bert"] | {"is_decoder": True})
    assert family_of(AutoModelForCausalLM.from_config(decoder).eval())[0].causal
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=VOCAB)
    with pytest.raises(InputError, match="encoder–decoder"):
        family_of(BartForConditionalGeneration(config).eval())


def test_mask_sink_hides_a_key_from_the_tokens_before_it_too() -> None:
    model, hidden = encoder("bert"), 5
    (batch,) = batched(ragged_tokens((12,)), 1)
    allowed = torch.ones(12, 12, dtype=torch.bool)
    allowed[:, hidden] = False
    allowed[hidden, hidden] = True
    with torch.no_grad():
        bare = model(input_ids=batch.token_ids, attention_mask=allowed[None, None]).logits
    with open_tracer(model, find_family(model), interventions=[parse(f"mask-sink:positions={hidden}")]) as tracer:
        torch.testing.assert_close(tracer.logits(batch), bare, rtol=0, atol=1e-9)


def loaded_encoder(name: str = "bert", dtype: torch.dtype = torch.float64) -> LoadedModel:
    """Return an encoder with the padding token of the tokenizer."""
    return LoadedModel(encoder(name, dtype, pad_token_id=0), word_tokenizer(), name, name, None, None, ())


def write_lines(path: Path, lengths: Sequence[int] = LENGTHS) -> str:
    """Write sequences [CLS] … [SEP] as JSON lines of token ids."""
    words = [[1, *(int(word) % (VOCAB - 5) + 5 for word in ids), 2] for ids in ragged_tokens(lengths)]
    return str(written(path, words))


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
    sequences = masked(rows, word_tokenizer(), VOCAB, 0)
    ids, labels, own = (
        np.stack(parts) for parts in ([one.ids for one in sequences], [one.labels for one in sequences], rows)
    )
    chosen = labels != IGNORED
    assert not chosen[:, [0, -1]].any()
    assert (labels[chosen] == own[chosen]).all()
    assert (ids[~chosen] == own[~chosen]).all()
    assert abs(chosen[:, 1:-1].mean() - 0.15) < 0.01
    assert abs((ids[chosen] == SPECIAL.index("[MASK]")).mean() - 0.8) < 0.03
    assert 0.05 < ((ids != own) & (ids != SPECIAL.index("[MASK]"))).sum() / chosen.sum() < 0.13
    assert not np.array_equal(np.stack([one.ids for one in masked(rows, word_tokenizer(), VOCAB, 1)]), ids)


TEXT = " ".join(f"w{number % 80} ." for number in range(400))


def test_a_text_or_prompt_stands_between_cls_and_sep(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    loaded = loaded_encoder()
    family, _ = family_of(loaded.model)
    options = {"input": str(tmp_path / "text.txt"), "seq_len": 16, "num_seqs": 4}
    bare = inputs_for(loaded, make_config(**options, bos="never"), family).sequences
    assert [len(ids) for ids in bare] == [16] * 4
    assert not any(np.isin(ids, (1, 2)).any() for ids in bare)
    for input_options, lengths in (
        (options, [16] * 4),
        ({"prompt": "w1 w2", "seq_len": 16}, [4]),
        ({"prompt": TEXT, "seq_len": 16}, [16]),
    ):
        sequences = inputs_for(loaded, make_config(**input_options), family).sequences
        assert [len(ids) for ids in sequences] == lengths
        assert all((ids[0], ids[-1]) == (1, 2) and not np.isin(ids[1:-1], (1, 2)).any() for ids in sequences)


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
    maps = run.tables["attention_maps"]
    assert (maps["key"] > maps["query"]).any()
    assert np.allclose(maps.groupby(["layer", "head", "query"])["weight"].sum(), 1, atol=1e-5)
    assert set(run.tables["sink_positions"]["token"]) & {"[CLS]", "[SEP]", "."}
    assert "attends in both directions" in str(run.verdict)


def test_quantizing_and_interventions_cost_masked_tokens_loss(folder: Path) -> None:
    options = {"input": str(folder / "text.txt"), "seq_len": 20, "num_seqs": 4}
    one_layer = encoder("bert", torch.float32, num_hidden_layers=1)
    run = sinkscope.quantize(one_layer, scheme="static", tokenizer=word_tokenizer(), calibration=2, **options)
    table = run.tables["quantization"]
    assert np.isfinite(table["loss"]).all()
    assert table.loc[table["setting"] == "all", "quantized"].iloc[0] == 3 * (6 + 1)  # one is in the LM head
    effects = sinkscope.intervene(folder, "mask-sink", **options, draws=1).tables["effect"]
    assert np.isfinite(effects.query("metric == 'loss'")["value"]).all()


def test_a_retrofit_is_trained_on_masked_tokens(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "block_length": 16, "batch_size": 2, "num_seqs": 4, "figures": False}
    options |= {"text": str(folder / "text.txt"), "observables": "attention", "page": False}
    done = sinkscope.retrofit(folder, "vga,none", out=tmp_path / "out", **options)
    losses = {label: run.manifest["w8a8"]["loss"] for label, run in done.runs.items()}
    assert set(losses) == {"untouched", "vga", "none"}
    assert np.isfinite(list(losses.values())).all()
    assert len(set(losses.values())) == 3
    assert len({run.manifest["input"]["masked"] for run in done.runs.values()}) == 1


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "streaming": (lambda path: sinkscope.intervene(path, "streaming-window"), "it attends both ways"),
    "its own text": (lambda path: sinkscope.analyze(path, input="sampled"), "writes no text"),
    "training without a mask token": (
        lambda path: sinkscope.retrofit(encoder("bert"), "vga", out=path / "out"),
        "cannot be trained: an encoder's loss is of masked tokens, and it has no tokenizer that names a mask token",
    ),
    "training without a head": (
        lambda path: sinkscope.retrofit(encoder("bert").base_model, "none", tokenizer=word_tokenizer(), out=path / "o"),
        "cannot be trained: it is an encoder without a head",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_encoder_cannot_do_is_refused_with_the_reason(folder: Path, what: str) -> None:
    call, reason = REFUSED[what]
    with pytest.raises(InputError, match=reason) as caught:
        call(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_without_a_mask_token_or_a_head_there_is_no_loss() -> None:
    run = sinkscope.analyze(encoder("bert"), input="random", seq_len=12, num_seqs=2)
    assert "no tokenizer that names a mask token" in run.manifest["not_measured"]["gradient"]
    with pytest.raises(InputError, match="no tokenizer that names a mask token"):
        sinkscope.quantize(encoder("bert"), input="random", seq_len=12, num_seqs=2, calibration=1)
    run = sinkscope.analyze(encoder("bert").base_model, tokenizer=word_tokenizer(), input="random", seq_len=12)
    assert "without a head" in run.manifest["not_measured"]["gradient"]
    assert sinkscope.doctor(encoder("bert").base_model).ok
