"""Trained weights, which fail their tests if they are missing: the numbers of plain transformers, and known facts."""

import copy
from dataclasses import replace
from pathlib import Path

import gradient_reference
import numpy as np
import pytest
import reference
import torch

import sinkscope
from sinkscope import Run
from sinkscope.commands.intervene.findings import effect_of
from sinkscope.measuring.subject import inputs_for
from sinkscope.models.loading import LoadedModel
from sinkscope.options import recipe as recipes
from sinkscope.options.measuring import make_config
from sinkscope.results.findings import Outcome

pytestmark = pytest.mark.real_model

TABLES = ("attention", "activation", "massive")
POSITIONS, WINDOW = 16, 32


torch.set_num_threads(1)  # more threads hardly help models this small, and slow them down on a busy machine


def check_against_reference(loaded: LoadedModel, run: Run, sequences: list[np.ndarray]) -> None:
    recorded = reference.record_each(loaded.model, sequences)
    settings = run.manifest["config"]
    positions, window = settings["positions"], settings["window"]
    masses = reference.window_masses(recorded, window)
    assert np.abs(masses - settings["epsilon"]).min() > 1e-6  # round-off cannot flip an indicator
    expected = {
        "attention": reference.attention(recorded, positions, window, settings["epsilon"]),
        "activation": reference.activation(recorded, positions),
        "massive": reference.massive(recorded),
    }
    reference.assert_same(dict(run.tables), expected, 1e-4)


# 30 layers, 9 query heads on 3 key/value heads


def test_smollm_is_measured_as_plain_transformers_measure_it(smollm: LoadedModel) -> None:
    options = {"num_seqs": 2, "seq_len": 40, "positions": POSITIONS, "window": WINDOW}
    run = sinkscope.analyze(smollm, input="natural", observables=TABLES, **options)
    sequences = list(inputs_for(smollm, make_config(input="natural", **options)).sequences)
    check_against_reference(smollm, run, sequences)


@pytest.mark.slow
def test_smollm_sinks_stay_on_random_tokens_and_vanish_on_repeated_ones(smollm: LoadedModel) -> None:
    """With sinks, the massive activation is at coordinate 507 from layer 11 on."""
    natural, random, repeated = (
        sinkscope.analyze(smollm, input=source, num_seqs=2, observables=TABLES)
        for source in ("natural", "random", "repeated")
    )
    assert 0.65 <= natural.metric("sink_rate") <= 0.80
    assert 0.70 <= random.metric("sink_rate") <= 0.82
    assert [repeated.metric(name) for name in ("sink_rate", "sink_rate_later", "massive_count")] == [0.0] * 3
    norms = repeated.tables["activation"].query("site == 'layer_out'").groupby("layer")["norm_mean"]
    assert (norms.max() / norms.min()).max() < 1.01  # equal tokens stay equal
    norms = natural.tables["activation"].query("site == 'layer_out' and layer == 11")
    norms = norms.set_index("position")["norm_mean"]
    assert norms[0] == pytest.approx(23_000, rel=0.2)
    assert norms[1:].max() < 1000
    for run in (natural, random):
        massive = run.tables["massive"].query("is_massive")
        assert massive["layer"].min() == 11
        first = massive[massive["layer"] == 11]
        largest = first.loc[first.groupby("sequence")["ratio"].idxmax()]
        assert set(largest["coordinate"]) == {507}
        assert len(first.query("position == 0 and coordinate == 507")) == 2  # in every sequence


def test_mgm_is_measured_as_plain_transformers_measure_it(mgm: LoadedModel, tmp_path: Path) -> None:
    """It has 8 layers × 8 heads of GPT-2's class; the text is what it generates, since it has no tokenizer."""
    assert mgm.model.config.bos_token_id == 2
    torch.manual_seed(0)
    start = torch.full((8, 1), 2)
    ids = mgm.model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, min_new_tokens=63, max_new_tokens=63,
        pad_token_id=mgm.model.config.eos_token_id,
    )  # fmt: skip
    assert ids.shape == (8, 64)
    np.save(tmp_path / "sampled.npy", ids.numpy())
    run = sinkscope.analyze(mgm, input=tmp_path / "sampled.npy", num_seqs=8)
    check_against_reference(mgm, run, list(ids.numpy()))


def test_known_facts_hold(smollm_on_cpu: LoadedModel) -> None:
    """Norms are averaged over layers first, as in GS figure 2; the slope of figure 3 is -1; change is near 1."""
    run = sinkscope.analyze(smollm_on_cpu, num_seqs=4, seq_len=64, observables=("gradient",))
    gradient = run.tables["gradient"]
    assert (gradient.query("pathway == 'query' and position == 0")["grad_norm"] == 0.0).all()
    norms = gradient.query("head == -1").groupby(["pathway", "position"])["grad_norm"].mean().unstack()
    ratio = norms[0] / norms.loc[:, 5:15].mean(axis=1)
    assert ratio["value"] > max(10, ratio["key"])
    assert run.metric("value_gradient_ratio") == pytest.approx(ratio["value"])
    rows = run.tables["gradient_ratio"].query("branch == 'attn'")
    x, y = np.log10(rows["input_norm"]), np.log10(rows["compress"])
    assert run.metric("compress_slope") == pytest.approx(np.cov(x, y)[0, 1] / x.var())
    assert np.corrcoef(x, y)[0, 1] < -0.95
    rows = rows.query("layer >= 1")  # of layer 0 it is near -0.4
    slope, _ = np.polyfit(np.log10(rows["input_norm"]), np.log10(rows["compress"]), 1)
    assert -1.1 <= slope <= -0.8
    assert rows["change"].median() == pytest.approx(1.0, abs=0.2)
    assert run.tables["gradient_check"]["identity_residual"].max() < 1e-5
    assert (run.tables["norm_bound"]["holds"] == 1.0).all()
    assert run.tables["norm_bound"]["tightness"].max() > 0.5


SHORT = {"num_seqs": 2, "seq_len": 20, "positions": 16}


@pytest.mark.slow
def test_gradients_are_plain_autograds_to_round_off(smollm_on_cpu: LoadedModel) -> None:
    """All tables are compared in float64, with trained weights, massive activations and gradient sinks."""
    model = copy.deepcopy(smollm_on_cpu.model)
    for tensor in (*model.parameters(), *model.buffers()):  # a model from GGUF rejects `.double()`
        tensor.data = tensor.data.double() if tensor.is_floating_point() else tensor.data
    with gradient_reference.in_double(model):
        run = sinkscope.analyze(replace(smollm_on_cpu, model=model), observables=("gradient",), **SHORT)
        sequences = [np.array(ids) for ids in inputs_for(smollm_on_cpu, make_config(**SHORT)).sequences]
        recorded = gradient_reference.record(model, sequences)
        expected = gradient_reference.tables(recorded, 16)
        assert all(parameter.grad is None for parameter in model.parameters())
    print(gradient_reference.assert_same(run.tables, expected, 1e-9))
    truth = gradient_reference.gradient(recorded, 16).query("pathway == 'query' and position == 0")
    assert truth["grad_norm"].max() < 1e-15


@pytest.mark.slow
def test_mgm_needs_its_query_bias_and_what_its_keys_read_of_the_massive_coordinate(mgm: LoadedModel) -> None:
    """Without the bias it loses the sink most in layers 1 to 3; random coordinates are not needed."""
    recipe = recipes.read_recipe(recipes.find_recipe("not-universal-interventions"))
    run = sinkscope.intervene(mgm, arms=recipe.content.options["arms"], draws=3, input="sampled", num_seqs=8)
    effects = [effect_of(run, "nullify-query-bias", "sink_rate", 0, layer) for layer in range(8)]
    assert set(np.argsort([effect.after - effect.before for effect in effects])[:3]) == {1, 2, 3}
    assert effect_of(run, "nullify-query-bias", "sink_rate", 0).outcome == Outcome.FALLS
    assert run.manifest["arms"]["zero-key-columns"]["do"] == ["zero-key-columns:coordinates=165"]
    rate = effect_of(run, "zero-key-columns", "sink_rate", 0)
    assert rate.outcome == Outcome.FALLS
    assert rate.after - rate.before < -0.05
    assert max(abs(control - rate.before) for control in rate.controls) < 0.02


@pytest.mark.slow
def test_smollm_dies_of_one_coordinate_and_not_of_its_mean(smollm: LoadedModel) -> None:
    """Coordinate 507 of token 0 after layer 11 (Sun et al. 2024 for Llama 2)."""
    where = "layers=11,coordinates=507"
    arms = {"zero": f"zero-massive:{where}", "mean": f"mean-massive:{where}"}
    before = {name: tensor.clone() for name, tensor in smollm.model.state_dict().items()}
    run = sinkscope.intervene(smollm, arms=arms, draws=1, num_seqs=2, seq_len=32)
    zero, mean = (effect_of(run, arm, "perplexity") for arm in arms)
    assert zero.after > 1000 * zero.before
    assert mean.after == pytest.approx(mean.before, rel=0.05)
    assert zero.controls[0] == pytest.approx(zero.before, rel=0.05)
    assert all(torch.equal(tensor, before[name]) for name, tensor in smollm.model.state_dict().items())


@pytest.mark.slow
def test_smollm_streams_with_its_first_token_kept(smollm: LoadedModel) -> None:
    run = sinkscope.intervene(smollm, "streaming-window:window=64,keep=0,1", num_seqs=1, seq_len=384)
    perplexity = run.tables["streaming"].query("bucket == -1").set_index("method")["perplexity"]
    assert perplexity["window"] > 1.5 * perplexity["dense"]
    assert perplexity["sinks kept"] < 1.15 * perplexity["dense"]


def test_compress_is_inverse_to_the_norm_of_the_sink(smollm_on_cpu: LoadedModel) -> None:
    """GS §4: from the onset of the massive activation to the layers that remove it, without a cost in loss."""
    arms = {"half": "rescale-norm", "double": "rescale-norm:factor=2"}
    run = sinkscope.intervene(smollm_on_cpu, arms=arms, observables=("gradient",), draws=0, num_seqs=3, seq_len=32)
    assert run.manifest["arms"]["double"]["do"] == ["rescale-norm:layers=12,factor=2.0"]
    rows = run.tables["gradient_ratio"].query("branch == 'attn' and position == 0 and layer < 29")
    compress = rows.pivot(index="layer", columns="condition", values="compress")
    for arm, expected in (("half", 2.0), ("double", 0.5)):
        ratio = compress[arm] / compress["before"]
        np.testing.assert_allclose(ratio[12:], expected, rtol=0.03)
        np.testing.assert_allclose(ratio[1:12], 1.0, rtol=0.03)
        loss = effect_of(run, arm, "loss")
        assert abs(loss.after - loss.before) < 0.1
