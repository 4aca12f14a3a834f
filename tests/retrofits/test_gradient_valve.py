"""The gradient valve, against the plain model, V-scale, and the gradients that both have."""

import pytest
import torch

from sinkscope.models.families import find_family
from sinkscope.retrofits import retrofit_model
from sinkscope.retrofits.gates import shrink
from sinkscope.retrofits.gradient_valve import Valve, at_others, at_position
from tests.tiny import tiny_model

IDS = torch.arange(3, 3 + 24).reshape(2, 12)


def last_layer(method: str, name: str = "llama", **parameters: object) -> tuple[torch.Tensor, ...]:
    """Return the logits, and the last layer's projected values (B,T,K·d) and their gradient.

    The gradient that reaches the last layer's values depends on no other layer's backward pass.
    """
    model = retrofit_model(tiny_model(name, spread=1.0).double(), None, method, **parameters)
    family, read = find_family(model), []
    attention = list(family.attentions(model).values())[-1]
    # after the hook of the retrofit there would be the changed values
    projection = attention.get_submodule("v_proj" if name == "llama" else "c_attn")
    projection.register_forward_hook(lambda module, args, output: read.append(output), prepend=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    output = model(IDS, labels=IDS)
    (gradient,) = torch.autograd.grad(output.loss, read)
    value, gradient = (x.detach()[..., -attention.head_dim * _heads(attention) :] for x in (read[0], gradient))
    return output.logits.detach(), *(x.unflatten(-1, (_heads(attention), -1)) for x in (value, gradient))


def _heads(attention: torch.nn.Module) -> int:
    config = attention.config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_valve_on_the_gradient_changes_nothing_else(name: str) -> None:
    plain, value, gradient = last_layer("none", name)
    c = (value.shape[-1] * 0.05) ** 2  # of the size of the squared norms, so that the factors are far from 0 and 1
    for position in (0, 5, None):
        logits, _, changed = last_layer("gradient-valve", name, position=position, sigma=0.05)
        assert torch.equal(logits, plain)
        factor = torch.ones(value.shape[:-1], dtype=value.dtype)
        at = slice(None) if position is None else position
        factor[:, at] = shrink(value, c)[:, at]
        assert 0.01 < factor[:, at].min() < factor[:, at].max() < 0.99
        torch.testing.assert_close(changed, factor[..., None] * gradient)
    doubled = last_layer("gradient-valve", name, position=0, factor=2.0)[-1]
    torch.testing.assert_close(doubled[:, 0], 2 * gradient[:, 0])
    torch.testing.assert_close(doubled[:, 1:], gradient[:, 1:])


def test_a_valve_on_the_values_has_vscales_forward_pass_without_its_factor_in_the_gradient() -> None:
    logits, value, gradient = last_layer("gradient-valve", acts="values", sigma=0.05)
    both, same, smaller = last_layer("vscale", learned=False, sigma=0.05)
    torch.testing.assert_close(logits, both)
    torch.testing.assert_close(value, same)
    # v̂ = φ(r) v: its Jacobian is φ I + 2C/(r + C)² v vᵀ (GS §5.1), with φ(r) = r/(r + C)
    r, c = value.square().sum(-1, keepdim=True), (value.shape[-1] * 0.05) ** 2
    along = (value * gradient).sum(-1, keepdim=True) * value
    torch.testing.assert_close(smaller, r / (r + c) * gradient + 2 * c / (r + c) ** 2 * along)


def test_the_control_changes_the_others_by_as_much() -> None:
    _, _, gradient = last_layer("none")
    for factor in (0.7, 1.5):
        factors = torch.full(gradient[:, 0, :, 0].shape, factor, dtype=gradient.dtype)
        here, others = at_position(gradient, factors, 0) - gradient, at_others(gradient, factors, 0) - gradient
        assert others[:, 0].abs().max() == 0 == here[:, 1:].abs().max()
        sizes = [x.square().sum((1, 3)).sqrt() for x in (here, others)]
        torch.testing.assert_close(*sizes)
        assert ((others * gradient).sum((1, 3)) * (factor - 1) > 0).all()  # smaller or larger, as at the position
    first = torch.zeros_like(gradient)
    first[:, 0] = 1.0  # more than all others together have: they lose all of theirs
    assert at_others(first + 1e-3 * (first == 0), factors * 0, 0)[:, 1:].abs().max() == 0


def test_a_valve_generates_as_the_plain_model() -> None:
    model = retrofit_model(tiny_model("llama"), None, "gradient-valve", position=3)
    plain = tiny_model("llama")
    kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **kwargs), plain.generate(IDS, **kwargs))
    assert sum(isinstance(module, Valve) for module in model.modules()) == 3
