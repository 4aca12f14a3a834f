"""Interventions on trained weights: results of plain transformers, and known facts about these models."""

import numpy as np
import pytest
import torch

import sinkscope
from sinkscope import Run
from sinkscope.models.loading import LoadedModel
from sinkscope.options import recipe as recipes
from sinkscope.results.findings import Outcome
from sinkscope.verdict.effects import effect_of

pytestmark = pytest.mark.real_model

OPTIONS = {"input": "sampled", "num_seqs": 8}

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def mgm_run(mgm: LoadedModel) -> Run:
    """Return a run of NU's five interventions, as in its recipe."""
    recipe = recipes.read_recipe(recipes.find_recipe("not-universal-interventions"))
    return sinkscope.intervene(mgm, arms=recipe.content.options["arms"], draws=3, **OPTIONS)


def test_mgm_without_its_query_bias_loses_the_sink_most_in_layers_1_to_3(mgm_run: Run) -> None:
    effects = [effect_of(mgm_run, "nullify-query-bias", "sink_rate", 0, layer) for layer in range(8)]
    assert set(np.argsort([effect.after - effect.before for effect in effects])[:3]) == {1, 2, 3}
    assert effect_of(mgm_run, "nullify-query-bias", "sink_rate", 0).outcome == Outcome.FALLS


def test_mgm_needs_what_its_keys_read_of_the_massive_coordinate_and_of_no_random_one(mgm_run: Run) -> None:
    assert mgm_run.manifest["arms"]["zero-key-columns"]["do"] == ["zero-key-columns:coordinates=165"]
    rate = effect_of(mgm_run, "zero-key-columns", "sink_rate", 0)
    assert rate.outcome == Outcome.FALLS
    assert rate.after - rate.before < -0.05
    assert max(abs(control - rate.before) for control in rate.controls) < 0.02


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
