"""What a training takes, counted by hand for a small Llama with embeddings of its own and with tied ones."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from sinkscope import train
from sinkscope.commands.train.architectures import architecture, fresh_model
from sinkscope.commands.train.arms import TrainingArms
from sinkscope.commands.train.cost import Cost, Device
from sinkscope.commands.train.options import RetrofitOptions, TrainOptions
from sinkscope.options.option import checked

SHAPE = "llama-1m:hidden_size=32,intermediate_size=48,num_hidden_layers=3,num_attention_heads=2,vocab_size=100"
LAYER = 4 * 32 * 32 + 3 * 32 * 48  # q, k, v and o; gate, up and down
TRAINING = {"block_length": 16, "batch_size": 4, "accumulation": 2, "steps": 1000, "save_every": 300}


def cost_of(shape: str, **options: object) -> Cost:
    return Cost(fresh_model(architecture(shape), 0), checked(TrainOptions, {"config": shape, **TRAINING, **options}))


@pytest.mark.parametrize("tied", ["true", "false"])
def test_operations_are_those_of_linear_layers_the_head_and_causal_attention(tied: str) -> None:
    cost = cost_of(f"{SHAPE},tie_word_embeddings={tied}")
    matrices, norms = 3 * LAYER, 7 * 32
    assert cost.parameters == matrices + norms + 100 * 32 * (1 if tied == "true" else 2)
    assert cost.operations_of_token == 6 * (matrices + norms + 100 * 32 + 3 * 16 * 32)
    assert (cost.tokens_of_step, cost.tokens) == (128, 128_000)


def test_seconds_are_operations_and_traffic_on_a_device() -> None:
    cost = cost_of(SHAPE)
    widths = sum(module.in_features + module.out_features for module in cost.model.model.modules()
                 if isinstance(module, nn.Linear))  # fmt: skip
    kept = 1.5 * widths + 2 * 100  # numbers of a token: of the layers, and logits with their gradient
    device = Device(half=8e6, single=1e6, bandwidth=1e5)
    computing, moving = 128 * cost.operations_of_token, 128 * 4 * kept
    expected = computing / (0.4 * 1e6) + (4 * moving + 28 * cost.parameters) / 1e5
    assert cost.seconds_of_step(device) == pytest.approx(expected, rel=1e-12)
    assert cost.hours(device) == pytest.approx(1000 * expected / 3600, rel=1e-12)
    half = cost_of(SHAPE, bf16=True)
    expected = computing / (0.4 * 8e6) + (2 * moving + 28 * cost.parameters) / 1e5
    assert half.seconds_of_step(device) == pytest.approx(expected, rel=1e-12)
    assert cost.memory == pytest.approx(20 * cost.parameters + 4 * 16 * 4 * kept)


def test_the_disk_holds_checkpoints_with_moments_and_models_that_are_kept() -> None:
    cost = cost_of(SHAPE)
    # steps 300, 600, 900 and 1,000, step 0, and the trained model
    assert cost.disk(arms=1) == (4 * 12 + 4 + 4) * cost.parameters
    assert cost.disk(arms=3) == cost.disk(arms=1) + 2 * 6 * 4 * cost.parameters
    none = cost_of(SHAPE, save_models="none")
    assert none.disk(arms=1) == none.disk(arms=3) == (3 * 12 + 4) * cost.parameters
    assert cost_of(SHAPE, save_models="none", save_every=1000).disk(arms=1) == (12 + 4) * cost.parameters
    pretrained = Cost(cost.model, checked(RetrofitOptions, {"model": "m", **TRAINING}))
    assert pretrained.disk(arms=3) == (3 * 12 + 3 * 4) * cost.parameters


@pytest.mark.slow
@pytest.mark.usefixtures("here", "no_figures")
@pytest.mark.parametrize(("save_models", "most"), [("all", 1.1), ("none", 1.5)])  # none: a third one is written briefly
def test_a_training_takes_the_disk_that_is_said(save_models: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    save = TrainingArms._save

    def watched(self: TrainingArms, model: PreTrainedModel, folder: Path) -> None:
        save(self, model, folder)
        taken.append(sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()))

    monkeypatch.setattr(TrainingArms, "_save", watched)
    wide = SHAPE.replace("hidden_size=32", "hidden_size=128")
    options: dict[str, Any] = {"block_length": 16, "batch_size": 2, "steps": 10, "save_every": 2}
    options |= {"num_seqs": 2, "observables": "attention", "save_models": save_models}
    train(wide, method="none", text="bigram-backcopy", out="out", page=False, **options)
    assert 0.95 < cost_of(wide, **options).disk(arms=1) / max(taken) < most
