"""Claims on models with a known truth: random weights, and a planted sink."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from tiny import VOCAB, tiny_model
from transformers import PreTrainedModel

import sinkscope
from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.output.run import Run
from sinkscope.paper_claims.claim import judge
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.table import evidence_of, judged
from sinkscope.results.judgment import Outcome

BOS = 1
# claims that there is a sink, a drain or a gradient sink, except V-2, because the largest norm ratio of many layers is
# above 1 also on random weights
ASSERTING = (
    "GS-1", "GS-2", "GS-5", "GS-6", "GS-7", "GS-14", "GS-20", "GS-28", "W-1", "W-2", "W-4", "W-13", "W-14", "W-15",
    "W-16", "W-17", "W-18", "S-5", "S-6", "S-9", "S-10", "S-13", "V-1", "V-3", "V-24", "W-21", "N-12",
)  # fmt: skip


def analyzed(model: PreTrainedModel, tmp_path, **given) -> Run:
    ids = np.random.default_rng(0).integers(3, VOCAB, size=(12, 64))
    ids[:, 0] = BOS
    np.save(tmp_path / "text.npy", ids)
    return sinkscope.analyze(model, input=tmp_path / "text.npy", bos="never", **given)


def as_null(run: Run) -> Run:
    described = run.manifest["model"] | {"weights": WEIGHTS_AT_RANDOM}
    return Run(run.manifest | {"model": described}, run.tables)


def outcomes(runs: Iterable[Run], names: Iterable[str]) -> dict[str, Outcome]:
    evidence = evidence_of(runs, "MODEL")
    return {name: judge(CLAIMS[name], evidence).outcome for name in names}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_no_claim_of_a_sink_holds_on_random_weights(family: str, tmp_path) -> None:
    run = analyzed(tiny_model(family, spread=1.0), tmp_path)
    torch.manual_seed(1)
    other = tiny_model(family, spread=1.0)
    for weight in other.parameters():
        weight.data = weight[torch.randperm(len(weight))]
    found = outcomes([run, as_null(analyzed(other, tmp_path))], ASSERTING)
    assert not {name: outcome for name, outcome in found.items() if outcome == Outcome.HOLDS}
    assert found["GS-2"] == found["W-1"] == found["GS-20"] == Outcome.FAILS


def planted(entry: float = 30_000.0, bias: float = 12.0, read_by_values: float = 0.0) -> PreTrainedModel:
    """Make a model whose BOS has one massive coordinate, which all keys and queries read, and values do not read."""
    model = tiny_model("qwen2", spread=1.0)
    coordinate, width = 7, model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        model.get_input_embeddings().weight[BOS, coordinate] = entry
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.bias.view(-1, width)[:, -1] = bias  # the slowest rotation, so that positions hardly matter
            attention.k_proj.weight[:, coordinate] = 0.0
            attention.k_proj.weight.view(-1, width, model.config.hidden_size)[:, -1, coordinate] = 1.0
            attention.v_proj.weight[:, coordinate] = read_by_values
            attention.v_proj.bias.zero_()
            layer.mlp.up_proj.weight[:, coordinate] = 0.0
    return model


def test_claims_of_a_planted_sink_hold(tmp_path) -> None:
    run = analyzed(planted(), tmp_path)
    null = as_null(analyzed(tiny_model("qwen2", spread=1.0), tmp_path))
    wanted = ("GS-1", "GS-2", "GS-3", "GS-20", "W-1", "W-13", "W-15", "S-5", "S-6", "S-9", "S-10", "S-13", "V-2")
    found = outcomes([run, null], wanted)
    assert not {name: outcome for name, outcome in found.items() if outcome != Outcome.HOLDS}
    table = judged(evidence_of([run, null], "MODEL"))
    assert table[table["claim"] == "S-9"]["note"].iloc[0] == "coordinate 7"
    without = table[table["outcome"] == Outcome.NOT_MEASURED]
    assert "sinkscope analyze MODEL --input random --bos always" in set(without["note"])


@pytest.mark.parametrize(
    ("without", "fail", "hold"),
    [
        ({"bias": 0.0}, ("GS-2", "GS-20", "W-1", "W-16", "V-1"), ("S-5", "S-6", "S-9", "V-2", "W-13")),
        ({"entry": 50.0}, ("S-5", "S-6"), ("GS-2", "GS-20", "W-1", "W-15", "V-2")),
        ({"read_by_values": 1.0}, ("GS-20", "W-15", "V-1"), ("GS-2", "W-1", "S-5", "V-2")),
    ],
    ids=["no sink", "nothing massive", "no drain"],
)
def test_each_planted_property_decides_its_own_claims(without, fail, hold, tmp_path) -> None:
    run = analyzed(planted(**without), tmp_path, observables=("attention", "geometry", "activation", "massive"))
    found = outcomes([run], (*fail, *hold))
    assert found == dict.fromkeys(fail, Outcome.FAILS) | dict.fromkeys(hold, Outcome.HOLDS)
    if "entry" in without:
        assert outcomes([run], ("W-13",))["W-13"] == Outcome.DOES_NOT_APPLY  # no layer has massive activations
