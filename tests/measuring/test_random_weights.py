"""Models with random weights of the same scale, which leave the original model and the user's state unchanged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.every_model import tiny_of
from support.retrofitted import retrofitted
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

from sinkscope import InputError, gate_displacement
from sinkscope.measuring.measure import measure
from sinkscope.measuring.random_weights import random_weights, randomized
from sinkscope.measuring.subject import Subject, open_subject
from sinkscope.measuring.summary import gradient_summary
from sinkscope.options.measuring import make_config

QUIET = Console(quiet=True)
OPTIONS = {"input": "random", "num_seqs": 4, "seq_len": 16, "bos": "never"}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2", "bloom"])
def test_each_tensor_keeps_its_scale_and_nothing_else(name: str) -> None:
    model = tiny_model(name)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    torch.manual_seed(5)
    expected_next = torch.rand(1)
    torch.manual_seed(5)
    network = randomized(model, seed=3)
    assert torch.equal(torch.rand(1), expected_next)  # the user's random state is unchanged
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    own, reseeded = dict(model.named_parameters()), dict(randomized(model, seed=4).named_parameters())
    assert network.state_dict().keys() == model.state_dict().keys()
    for key, x in network.named_parameters():
        std, error = own[key].std(correction=0), own[key].std(correction=0) / x.numel() ** 0.5
        assert (x.mean() - own[key].mean()).abs() <= 5 * error + 1e-7, key
        assert (x.std(correction=0) - std).abs() <= 5 * error + 1e-7, key
        if x.numel() > 1 and std:
            assert not torch.equal(x, own[key]), key
            assert not torch.equal(x, reseeded[key]), key
            assert np.corrcoef(x.flatten(), own[key].flatten())[0, 1] < 5 / x.numel() ** 0.5


def test_the_initialization_does_not_matter_and_what_is_not_learned_stays() -> None:
    """Sines of positions and tensors with a single entry are copied."""
    model = tiny_model("llama")
    before = dict(randomized(model, seed=0).named_parameters())
    model.config.initializer_range = 1.0
    assert all(torch.equal(x, before[key]) for key, x in randomized(model, seed=0).named_parameters())
    model = tiny_model("gpt2")
    model.transformer.wpe.weight.fill_(0.5)
    assert (randomized(model, seed=0).transformer.wpe.weight == 0.5).all()
    encoder = tiny_of("roformer")
    (sines,) = [name for name, _ in encoder.named_parameters() if "embed_positions" in name]
    assert torch.equal(randomized(encoder, seed=0).get_parameter(sines), encoder.get_parameter(sines))


def test_it_is_measured_on_the_same_input_and_the_model_stays_as_it_was() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    config = make_config(**OPTIONS)
    with open_subject(model, None, config, QUIET) as subject:
        before, _ = measure(subject, config)
        with random_weights(subject) as null:
            assert (null.inputs is subject.inputs, null.loaded.model.dtype) == (True, torch.bfloat16)
            assert null.loaded.name == f"{subject.loaded.name} (random weights)"
            tables, _ = measure(null, config)
        again, _ = measure(subject, config)
    assert all(again[name].equals(table) for name, table in before.items())
    assert set(tables) == set(before)
    assert not tables["gradient"].equals(before["gradient"])


def test_a_retrofit_is_built_in_at_its_start_and_a_quantized_models_null_has_ordinary_weights() -> None:
    model = retrofitted("llama", "vga", torch.float32)
    network = randomized(model, seed=0)
    assert network.state_dict().keys() == model.state_dict().keys()
    assert (gate_displacement(network)["displacement"] == 0).all()
    assert (gate_displacement(model)["displacement"] > 0).any()
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    packed = model.model.layers[0].self_attn.q_proj
    packed.weight = nn.Parameter(torch.zeros(32, 4, dtype=torch.int32), requires_grad=False)
    network = randomized(model, seed=0)
    assert not hasattr(network.config, "quantization_config")
    assert network.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
    assert model.config.quantization_config["bits"] == 4


REFUSED: dict[str, Callable[[PreTrainedModel], Any]] = {
    r"describes another model: model\.layers\.2": lambda model: model.model.layers.__delitem__(2),
    "cannot be built from its configuration alone": lambda model: setattr(
        model.config, "hidden_act", "no such function"
    ),
    "several devices": lambda model: model.model.layers[1].to("meta"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_redrawn_is_refused(message: str) -> None:
    model = tiny_model("llama")
    REFUSED[message](model)
    with pytest.raises(InputError, match=message):
        randomized(model, seed=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_causal_mask_alone_makes_a_gradient_at_position_0(name: str) -> None:
    """It is about 3.5 to 5.4 times the later value gradient at T = 64, because fewer queries see later tokens."""
    config = make_config(input="random", num_seqs=16, seq_len=64, bos="never", observables=("gradient",))
    with open_subject(tiny_model(name, spread=1.0), None, config, QUIET) as subject, random_weights(subject) as null:
        assert isinstance(null, Subject)
        _, totals = gradient_summary(measure(null, config)[0])
    assert 2.5 < totals["value_gradient_ratio"] < 7
