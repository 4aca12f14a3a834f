"""Calibration of layers that are broken, add nothing, have no attention, or add an unknown sum."""

import copy
from collections.abc import Callable
from types import MethodType

import pytest
import torch
from support.every_model import tiny_of
from tiny import tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel

import sinkscope
from sinkscope import InputError, retrofit_model
from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import streaming
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.subject import family_of
from sinkscope.models.calibrate import calibrate
from sinkscope.models.family import Copies, Family, Term, find_copies
from sinkscope.models.wiring import check_wiring, read_sites


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def calibrated(change: Callable[[nn.ModuleList], object]) -> Family:
    model = tiny_model("llama")
    change(layers_of(model))
    return calibrate(model, tiny_tokens(2, 9))


def test_broken_layers_are_named() -> None:
    with pytest.raises(InputError, match="layer 1 gives NaN or infinite numbers"):
        calibrated(lambda layers: layers[1].mlp.down_proj.weight.data.fill_(torch.nan))
    with pytest.raises(InputError, match="layer 2 gives only zeros"):
        calibrated(lambda layers: layers[2].register_forward_hook(lambda module, args, output: output * 0))


def rebuilt(forward: Callable[..., torch.Tensor]) -> Callable[[nn.ModuleList], None]:
    """Return a change that gives every layer another forward, which calls forward(layer, stream, attend)."""

    def run(layer: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return forward(layer, hidden_states, lambda x: layer.self_attn(hidden_states=x, **kwargs)[0])

    def rebuild(layers: nn.ModuleList) -> None:
        for layer in layers:
            layer.shared = copy.deepcopy(layer.mlp)
            layer.forward = MethodType(run, layer)

    return rebuild


def scaled_stream(layer, x, attend):
    middle = 0.9 * x + attend(layer.input_layernorm(x))
    return middle + layer.mlp(layer.post_attention_layernorm(middle))


def scaled_branches(layer, x, attend):
    middle = x + 0.25 * attend(layer.input_layernorm(x))
    return middle - 1.5 * layer.mlp(layer.post_attention_layernorm(middle))


def two_networks(layer, x, attend):
    middle = x + attend(layer.input_layernorm(x))
    normed = layer.post_attention_layernorm(middle)
    return middle + 0.5 * (layer.mlp(normed) + layer.shared(normed.flip(-1)))


def half_a_sum(layer, x, attend):
    """Return a layer's output if the MLP reads half of the sum, which is not a site of the residual stream."""
    attended = attend(layer.input_layernorm(x))
    return x + attended + layer.mlp(layer.post_attention_layernorm((x + attended) / 2))


def attends_twice(layer, x, attend):
    return x + attend(attend(layer.input_layernorm(x)))


def test_unknown_sums() -> None:
    family = calibrated(rebuilt(scaled_stream))
    assert (family.wiring, family.attention) == ("unknown", "self_attn")
    assert dict(family.sites) == {"layer_in": "input", "layer_out": "output"}
    assert all("it is not known which sum" in reason for reason in family.absent_sites().values())
    family = calibrated(rebuilt(half_a_sum))
    assert family.wiring == "unknown"
    assert (family.sites["attn_out"], family.sites["mlp_out"]) == ("self_attn.output", "mlp.output")
    assert "mid" not in family.sites


@pytest.mark.parametrize(
    ("forward", "attention", "mlp"),
    [
        (scaled_branches, [Term("self_attn.output", 0.25)], [Term("mlp.output", -1.5)]),
        (two_networks, [Term("self_attn.output", 1.0)], [Term("mlp.output", 0.5), Term("shared.output", 0.5)]),
    ],
)
def test_scaled_and_added_branches(forward: Callable, attention: list[Term], mlp: list[Term]) -> None:
    model = tiny_model("llama")
    rebuilt(forward)(layers_of(model))
    family = calibrate(model, tiny_tokens(2, 9))
    for block, sites in zip(family.blocks, read_sites(model, family, tiny_tokens(2, 9)), strict=True):
        assert block.wiring == "sequential"
        assert list(block.terms("attn_out")) == attention
        assert list(block.terms("mlp_out")) == mlp
        assert check_wiring(block, sites) < 1e-6


def test_the_stack_is_the_chain_with_most_weights() -> None:
    """A longer parallel chain and a larger list that is not a chain are not chosen."""

    class Around(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head
            self.chain = nn.ModuleList(nn.Linear(head.in_features, head.in_features) for _ in range(5))
            self.experts = nn.ModuleList(nn.Linear(head.in_features, 4096) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.chain:
                x = part(x)
            return self.head(x) + torch.stack([expert(x) for expert in self.experts]).sum()

    model = tiny_model("llama")
    model.lm_head = Around(model.lm_head)
    assert calibrate(model, tiny_tokens(2, 9)).layers == "model.layers"
    model = tiny_model("llama")
    layers_of(model)[1].forward = lambda x, **kwargs: layers_of(model)[0](x, **kwargs)
    with pytest.raises(InputError, match="'llama': no list of layers"):
        calibrate(model, tiny_tokens(2, 9))


def test_attention_in_other_places_is_not_read() -> None:
    twice = calibrated(rebuilt(attends_twice))
    assert twice.without_attention == "layer 0: its LlamaAttention attends 2 times and combines the results"
    shared = calibrated(lambda layers: [setattr(layer, "self_attn", layers[0].self_attn) for layer in layers])
    assert shared.without_attention == "layer 0: layers 0, 1, 2 share one LlamaAttention"
    assert {block.kind for block in (*twice.blocks, *shared.blocks)} == {"unread attention"}


def test_a_model_without_attention_has_the_other_tables() -> None:
    run = sinkscope.analyze(tiny_of("mamba"), input="random", num_seqs=2, seq_len=12)
    assert {"activation", "gradient_ratio", "massive", "outlier", "summary"} <= set(run.tables)
    assert not {"attention", "sink_positions", "geometry", "gradient", "gradient_check"} & set(run.tables)
    assert "attention (no layer attends by a softmax)" in str(run.verdict)


def test_copies() -> None:
    """The copies are found by their shape, and the stream is their mean."""
    copies = torch.randn(2, 9, 4, 16)
    for x, expected in (
        (copies, Copies(4, "third")),
        (copies.movedim(2, 0), Copies(4, "first")),
        (copies.flatten(2), Copies(4, "flat")),
    ):
        assert find_copies(x, torch.Size((2, 9)), 16) == expected
        torch.testing.assert_close(expected.stream(x), copies.mean(2))
    for width in (16, 40):
        assert find_copies(torch.zeros(2, 9, width), torch.Size((2, 9)), 16) is None


def test_changes_that_do_not_apply_are_refused() -> None:
    model = tiny_of("hy_v4")
    family, notices = family_of(model)
    assert any("mean of the 4 copies" in notice for notice in notices)
    assert "several copies" in (INTERVENTIONS["zero-massive"].inapplicable(Target(model, family, {})) or "")
    model = tiny_of("granite")
    with pytest.raises(InputError, match="could not be loaded again"):
        retrofit_model(model, family_of(model)[0], "vga")
    assert model.config.model_type == "granite"


def test_a_bias_of_the_models_own_is_not_dropped_by_streaming() -> None:
    """Doge adds a bias to its logits that it computes from the values."""
    model = tiny_of("doge")
    family, _ = family_of(model)
    with (
        open_seam(model, family) as seams,
        streaming(model, family, seams, 1, 4),
        pytest.raises(InputError, match="a bias of its own"),
    ):
        model(tiny_tokens(1, 9), use_cache=False)
