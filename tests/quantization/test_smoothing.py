"""SmoothQuant's and AWQ's factors: their formulas, and that the model's function stays as it is."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokens
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.edits import Edit
from sinkscope.models.norms import ModuleEnds, reparametrized, scaled_inputs
from sinkscope.quantization.formats import PRESETS
from sinkscope.quantization.rounding import snap
from sinkscope.quantization.smoothing import NormOutputs, awq_factors, shuffled, smoothing_factors


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


def test_smoothquants_factors_are_those_of_its_equation_4() -> None:
    readers = [linear(torch.tensor([[1.0, -4.0], [2.0, 1.0]])), linear(torch.tensor([[-9.0, 0.5]]))]
    factors = smoothing_factors(torch.tensor([16.0, 100.0]), readers, 0.25)
    torch.testing.assert_close(factors, torch.tensor([16**0.25 / 9**0.75, 100**0.25 / 4**0.75]))


def test_awqs_exponent_is_the_one_that_changes_outputs_least() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 128, generator=generator) for size in (40, 6))
    rows[:, 5] *= 30
    encoding, mean = PRESETS["W4A16"].weights, rows.abs().mean(0)

    def error(factors: torch.Tensor) -> float:
        return float((rows / factors @ snap(encoding, weight * factors).T - rows @ weight.T).square().sum())

    def scaled(exponent: float) -> torch.Tensor:
        factors = mean**exponent
        return factors / (factors.max() * factors.min()).sqrt()

    errors = [error(scaled(step / 20)) for step in range(20)]
    best = awq_factors(mean, rows, [linear(weight)], encoding)
    halves = awq_factors(mean, rows, [linear(weight[:1]), linear(weight[1:])], encoding)
    assert torch.equal(halves, best)  # all readers count
    assert not torch.equal(awq_factors(mean, rows, [linear(weight[:1])], encoding), best)
    assert error(best) == pytest.approx(min(errors), rel=1e-4)
    assert min(errors) < 0.9 * errors[0]
    exact = linear(torch.tensor([[6.0, -4.0, 1.5, 0.5]]).repeat(1, 32))  # numbers of the format
    assert torch.equal(awq_factors(mean, rows, [exact], PRESETS["MXFP4A16"].weights), torch.ones(128))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_neox", "opt"])
def test_scaled_norms_leave_the_function_as_it_is(name: str) -> None:
    model: Any = tiny_model(name).double()
    readers, ids = ModuleEnds(model).readers_of_norms(), tiny_tokens(2)
    readers = {norm: layers for norm, layers in readers.items() if model.get_output_embeddings() not in layers}
    assert len(readers) >= 2 * model.config.num_hidden_layers - (name == "gpt_neox")
    generator = torch.Generator().manual_seed(1)
    factors = {norm: torch.rand(norm.weight.shape, generator=generator, dtype=torch.float64) + 0.5 for norm in readers}
    plain, before = model(ids).logits, {path: each.clone() for path, each in model.named_parameters()}
    norm = next(iter(readers))
    outputs: list[torch.Tensor] = []
    with norm.register_forward_hook(lambda module, args, output: outputs.append(output)):
        model(ids)
        with reparametrized(model, lambda: scaled_inputs(readers, factors), "scaling"):
            torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)  # Gemma's norm is in float32
    torch.testing.assert_close(outputs[-1] * factors[norm], outputs[0], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(each, before[path]) for path, each in model.named_parameters())


def test_a_norm_that_something_else_reads_is_not_scaled() -> None:
    model: Any = tiny_model("mixtral")
    readers = ModuleEnds(model).readers_of_norms()
    factors = {norm: torch.full(norm.weight.shape, 3.0) for norm in readers}
    factors |= {model.model.layers[0].post_attention_layernorm: torch.full((32,), 3.0)}
    readers |= {model.model.layers[0].post_attention_layernorm: []}
    before = model.model.layers[0].post_attention_layernorm.weight.clone()
    with (
        pytest.raises(InputError, match="scaling would change the model's logits"),
        reparametrized(model, lambda: scaled_inputs(readers, factors), "scaling"),
    ):
        pass
    assert torch.equal(model.model.layers[0].post_attention_layernorm.weight, before)


def test_the_change_of_logits_is_relative_to_the_largest() -> None:
    model: Any = tiny_model("llama").double()
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(1e4 * head.weight.detach())

    def scaled(factor: float) -> list[Edit]:
        return [(head, "weight", head.weight * factor)]

    with reparametrized(model, partial(scaled, 1.0005), "scaling"):
        pass
    with (
        pytest.raises(InputError, match=r"the model's logits, by 0\.002 of the largest"),
        reparametrized(model, partial(scaled, 1.002), "scaling"),
    ):
        pass


def test_outputs_of_norms_are_recorded_over_the_text() -> None:
    norm = nn.LayerNorm(3)
    texts = [torch.randn(1, length, 3, generator=torch.Generator().manual_seed(length)) for length in (5, 700)]
    recorder = NormOutputs([norm], 2)
    with recorder.recorded():
        every = torch.cat([norm(text)[0] for text in texts]).detach()
    torch.testing.assert_close(recorder.largest[norm], every.abs().amax(0))
    torch.testing.assert_close(recorder.mean(norm), every.abs().mean(0))
    torch.testing.assert_close(torch.cat(recorder.rows[norm]), torch.cat([every[:5], every[5::3]]))
    norm(texts[0])
    assert recorder.tokens[norm] == 705


def test_the_control_has_the_same_factors_at_other_channels() -> None:
    factors = torch.arange(40.0)
    drawn = [shuffled({"norm": factors}, seed)["norm"] for seed in (0, 1)]
    for each in drawn:
        assert torch.equal(each.sort().values, factors)
    assert not torch.equal(*drawn)
