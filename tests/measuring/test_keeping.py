"""Kept tensors, in memory and in a folder, and the weights of any head are those of plain transformers."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from safetensors.torch import load_file
from support.retrofit_command import words_tokenizer
from tiny import ragged_tokens, tiny_model, written
from transformers import PreTrainedModel

import sinkscope
from sinkscope import InputError, Run
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.measuring import keeping
from sinkscope.options.option import checked
from sinkscope.results.activations import FILE
from sinkscope.retrofits import retrofit_model

LENGTHS = (20, 7, 13)
SITES = ("layer_in", "mid", "layer_out", "query", "key", "value")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def run(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("kept")
    lines = written(folder / "ragged.jsonl", ragged_tokens(LENGTHS))
    options = {"observables": "attention", "batch_size": 3, "seq_len": 20, "keep": SITES, "keep_seqs": 2}
    return sinkscope.analyze(model, input=lines, out=folder / "run", heads="1.2,0.3", page=False, figures=(), **options)


def test_kept_tensors_are_those_of_plain_transformers(model: PreTrainedModel, run: Run) -> None:
    tensors = load_file(run.folder / FILE)
    assert set(tensors) == {
        "token_ids",
        "attention_mask",
        *(f"{site}.{at}" for site in ("attention", *SITES) for at in range(3)),
    }
    assert run.manifest["activations"] == sorted(["attention", *SITES])
    assert FILE in Run.open(run.folder).manifest["files"]
    for row, ids in enumerate(ragged_tokens(LENGTHS)[:2]):
        assert run.activations.token_ids[row].tolist() == [*ids, *[0] * (20 - len(ids))]
        assert run.activations.attention_mask[row].sum() == len(ids)
        hidden = model(torch.tensor(ids)[None], output_hidden_states=True).hidden_states
        for layer, of in enumerate(reference.record(model, ids).layers):
            kept = {site: run.activations[site][layer][row] for site in SITES}
            assert torch.equal(kept["layer_in"][: len(ids)], hidden[layer][0])  # bit for bit
            for site in ("query", "key", "value"):
                np.testing.assert_allclose(
                    kept[site][: len(ids)], getattr(of, site).swapaxes(0, 1), rtol=1e-4, atol=1e-5
                )
            for site in ("mid", "layer_out"):
                np.testing.assert_allclose(kept[site][: len(ids)], of.sites[site], rtol=1e-4, atol=1e-5)
            assert all(torch.equal(tensor, tensors[f"{site}.{layer}"][row]) for site, tensor in kept.items())
            assert not any(tensor[len(ids) :].any() for tensor in kept.values())


def test_any_head_has_its_weights_kept_or_computed_again(model: PreTrainedModel, run: Run) -> None:
    ids = ragged_tokens(LENGTHS)
    first, second = (sequence.layers for sequence in reference.record_each(model, ids[:2]))
    maps = run.tables["attention_maps"]
    assert set(zip(maps["layer"], maps["head"], strict=True)) == {(1, 2), (0, 3)}
    for opened in (run, Run.open(run.folder)):
        kept = opened.attention(2, 1)
        assert list(kept.index) == list(kept.columns) == [f"<id {token}>" for token in ids[0]]
        np.testing.assert_allclose(kept, first[2].weights[1], atol=3e-4)  # float16
    np.testing.assert_allclose(run.attention(2), first[2].weights, atol=3e-4)
    recomputed = Run.open(run.folder).attention(0, text=torch.tensor(ids[1])[None], model=model)
    np.testing.assert_allclose(recomputed, second[0].weights, rtol=1e-4, atol=1e-6)

    long = sinkscope.analyze(model, input="random", num_seqs=1, seq_len=100, observables="attention")
    weights = reference.record_each(model, long.activations.token_ids.numpy())[0].layers[1].weights
    assert long.activations["attention"][1].shape == (1, 4, 64, 64)  # the first tokens
    np.testing.assert_allclose(long.attention(1, 3), weights[3], rtol=1e-4, atol=1e-6)


def test_all_weights_of_as_many_sequences_as_asked_are_kept(model: PreTrainedModel, tmp_path: Path) -> None:
    texts = ragged_tokens((7, 70, 13))
    options = {"observables": "attention", "keep": "attention", "keep_seqs": 2, "seq_len": 70}
    lines = written(tmp_path / "ragged.jsonl", texts)
    run = sinkscope.analyze(model, input=lines, out=tmp_path / "run", figures=(), **options)
    weights = Run.open(tmp_path / "run").activations["attention"]
    assert weights[0].shape[:1] + weights[0].shape[2:] == (2, 70, 70)
    for row, ids in enumerate(texts[:2]):
        for layer, of in enumerate(reference.record(model, ids).layers):
            expected = torch.zeros(weights[layer].shape[1:])
            expected[:, : len(ids), : len(ids)] = torch.tensor(of.weights)
            torch.testing.assert_close(weights[layer][row].float(), expected, rtol=1e-3, atol=1e-3)
    third = run.attention(1, 0, sequence=2, model=model)
    np.testing.assert_allclose(third, reference.record(model, texts[2]).layers[1].weights[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="there is no sequence 3: this run has 0 to 2"):
        run.attention(1, 0, sequence=3, model=model)
    of_objects = sinkscope.analyze(model, input=texts, observables="attention")
    with pytest.raises(InputError, match="this run's sequences were passed as objects: pass the text as text=…"):
        of_objects.attention(1, 0, sequence=1)


def test_a_text_is_read_by_the_model_that_the_run_names(tiny: Path) -> None:
    run = sinkscope.analyze(tiny, input="random", num_seqs=1, seq_len=8, observables="massive")
    weights = run.attention(1, 0, text=words_tokenizer().decode([3, 4, 5, 4]))
    expected = run.attention(1, 0, text=[1, 3, 4, 5, 4])  # with the tokenizer's BOS
    assert weights.equals(expected)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)


def test_texts_longer_than_those_of_the_run_and_than_the_weights_that_it_keeps_are_read_whole(
    model: PreTrainedModel, run: Run, tmp_path: Path
) -> None:
    long, short = ragged_tokens((70, 13))
    weights = reference.record(model, long).layers[1].weights
    np.testing.assert_allclose(run.attention(1, 3, text=long), weights[3], rtol=1e-4, atol=1e-6)
    lines = written(tmp_path / "two.jsonl", [long, short])
    both = sinkscope.analyze(model, input=lines, seq_len=70, observables="attention")
    np.testing.assert_allclose(both.attention(1, 3), weights[3], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(both.attention(1), weights, rtol=1e-4, atol=1e-6)


def test_the_weights_of_registers_and_without_maps_are_complete(tmp_path: Path) -> None:
    model = retrofit_model(tiny_model("llama"), None, "register-tokens", count=2).requires_grad_(False)
    for length in (62, 63):  # with the registers, as many as the run keeps, and more
        lines = written(tmp_path / "one.jsonl", ragged_tokens((length,)))
        run = sinkscope.analyze(model, input=lines, observables="attention")
        weights = run.attention(1, 0)
        assert weights.shape == (length + 2, length + 2)
        assert weights.index[:2].tolist() == ["<register>"] * 2
        np.testing.assert_allclose(weights.sum(1), 1, atol=2e-3)
    kept = sinkscope.analyze(
        model, input=[ragged_tokens((12,))[0].tolist()], seq_len=12, observables="massive", keep="attention"
    )
    np.testing.assert_allclose(kept.attention(1), kept.activations["attention"][1][0], atol=1e-3)


def test_an_input_that_has_changed_is_not_taken_for_that_of_the_run(tiny: Path, tmp_path: Path) -> None:
    lines = written(tmp_path / "two.jsonl", ragged_tokens((9, 12)))
    run = sinkscope.analyze(tiny, input=lines, seq_len=12, observables="attention", out=tmp_path / "run", figures=())
    opened = Run.open(run.folder)
    assert opened.attention(1, 0, sequence=1).shape == (12, 12)
    written(tmp_path / "two.jsonl", ragged_tokens((9, 11)))
    with pytest.raises(InputError, match=r"two\.jsonl is not what this run has read: pass the text as text="):
        opened.attention(1, 0, sequence=1)


def test_another_model_takes_the_place_of_the_weights_that_a_run_keeps(run: Run) -> None:
    other, ids = tiny_model("gpt2"), ragged_tokens(LENGTHS)[0]
    weights = reference.record(other, ids).layers[2].weights
    np.testing.assert_allclose(run.attention(2, 1, model=other), weights[1], rtol=1e-4, atol=1e-6)


def test_a_run_forgets_a_model_that_its_user_drops(run: Run) -> None:
    own = tiny_model("gpt2")
    of_own = sinkscope.analyze(own, input="random", num_seqs=1, seq_len=8, observables="massive")
    assert of_own.attention(0, 0).shape == (8, 8)
    del own
    for gone in (of_own, Run.open(run.folder), pickle.loads(pickle.dumps(run))):
        with pytest.raises(InputError, match=r"pass it again as model=…"):
            gone.attention(0, 0, text=[3, 4, 5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "there is no layer 3: the last layer with heads is 2"),
        ({"layer": 1, "head": 4}, "layer 1 has no head 4: it has 0 to 3"),
        ({"layer": 1, "head": -1}, "layer 1 has no head -1"),
        ({"layer": 1, "head": 0, "text": "words"}, "needs a tokenizer"),
        ({"layer": 1, "head": 0, "text": [96, 1]}, "token id 96 at position 0 is outside"),
        ({"layer": 1, "head": 0, "text": [5]}, "at least 2"),
    ],
)
def test_a_head_or_a_text_that_cannot_be_read_is_one_line(options: dict, message: str, run: Run, model) -> None:
    with pytest.raises(InputError, match=message) as raised:
        run.attention(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "layerout"}, "did you mean 'layer_out'"),
        ({"keep": "mlp_norm", "model": "falcon"}, "keep=mlp_norm does not apply to .*: the MLP has no norm"),
        ({"heads": "3-1"}, "a head is LAYER.HEAD"),
        ({"heads": (3.1,)}, "write heads as text"),
        ({"heads": "1.4"}, "layer 1 has no head 4"),
        ({"heads": [(0, 1)], "observables": "massive"}, "heads=… needs the observable attention"),
        ({"keep": "query"}, "keep=query takes more than .* GB: name fewer sites"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST_BYTES", 1000)
    with pytest.raises(InputError, match=message):
        sinkscope.analyze(tiny_model(options.pop("model", "llama")), input="random", num_seqs=1, seq_len=8, **options)


def test_run_json_spells_heads_and_sites_as_they_are_typed() -> None:
    options = AnalyzeOptions(heads=[(3, 0), (7, 10)], keep="query,layer_out")
    assert options.model_dump(mode="json")["heads"] == ["3.0", "7.10"]
    assert checked(AnalyzeOptions, options.model_dump(mode="json")) == options


def test_a_damaged_file_is_one_line_and_a_missing_one_is_no_error(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sinkscope.analyze(
        tiny_model("llama"), input="random", num_seqs=1, seq_len=8, observables="attention", figures=(), out=folder
    )
    page = (folder / "index.html").read_text()
    (folder / FILE).write_bytes(b"\x08" * 20)
    with pytest.raises(InputError, match=f"{FILE} is damaged"):
        Run.open(folder).attention(0, 0)
    (folder / FILE).unlink()
    assert dict(Run.open(folder).activations) == {}
    assert "activations.safetensors" in sinkscope.show(folder, again=True).read_text()
    assert len((folder / "index.html").read_text()) < len(page)
