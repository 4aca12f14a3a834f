"""Calibration of layers that are broken, add nothing, do not attend, or add an unknown sum."""

from collections.abc import Callable
from types import MethodType

import pytest
import torch
from support.every_model import tiny_of
from tiny import tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel

import sinkscope
from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import streaming
from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.subject import family_of
from sinkscope.models.calibrate import calibrate
from sinkscope.models.family import Copies, Family, find_copies
from sinkscope.retrofits import retrofit_model


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def calibrated(change: Callable[[nn.ModuleList], object]) -> Family:
    """The row found for a tiny Llama whose layers are changed."""
    model = tiny_model("llama")
    change(layers_of(model))
    return calibrate(model, tiny_tokens(2, 9))


# ---------------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_layer_whose_weights_are_no_numbers_is_named(broken: float) -> None:
    with pytest.raises(InputError, match="layer 1 gives NaN or infinite numbers"):
        calibrated(lambda layers: layers[1].mlp.down_proj.weight.data.fill_(broken))


def test_a_layer_that_gives_zeros_is_named() -> None:
    with pytest.raises(InputError, match="layer 2 gives only zeros"):
        calibrated(lambda layers: layers[2].register_forward_hook(lambda module, args, output: output * 0))


def test_a_layer_that_adds_nothing_yet_is_built_as_the_others() -> None:
    """Models are made deeper by layers whose last projections are 0 (LLaMA Pro, Wu et al. 2024)."""

    def grow(layers: nn.ModuleList) -> None:
        layers[1].self_attn.o_proj.weight.data.zero_()
        layers[1].mlp.down_proj.weight.data.zero_()

    family = calibrated(grow)
    assert (family.wiring, family.blocks) == ("sequential", ())


def test_the_stack_is_the_chain_with_most_weights() -> None:
    """Neither a longer parallel chain nor a larger list that is not a chain is chosen."""

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


def test_an_mlp_that_reads_what_attention_adds_is_not_beside_it() -> None:
    """It reads half of the sum, which is no place of the residual stream."""

    def forward(layer: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        added = layer.mlp(layer.post_attention_layernorm((hidden_states + attended) / 2))
        return hidden_states + attended + added

    def rebuild(layers: nn.ModuleList) -> None:
        for layer in layers:
            layer.forward = MethodType(forward, layer)

    family = calibrated(rebuild)
    assert family.wiring == "unknown"
    assert (family.sites["attn_out"], family.sites["mlp_out"]) == ("self_attn.output", "mlp.output")
    assert "mid" not in family.sites


# ------------------------------------------------------------------------------------------- attention


class Running(nn.Module):
    """The mean of the tokens so far, under a name that says attention."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[:, None], None


class SumAttention(Running):
    pass


class EinsumAttention(Running):
    """A causal softmax, by einsum."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        logits = torch.einsum("btd,bsd->bts", hidden_states, hidden_states)
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -1e9)
        return torch.einsum("bts,bsd->btd", logits.softmax(-1), hidden_states), None


def put(layers: nn.ModuleList, at: int, attention: nn.Module) -> None:
    attention.weight = nn.Parameter(torch.ones(()))  # a module of a model has some
    layers[at].self_attn = attention


def test_what_is_called_attention_and_takes_no_softmax_is_none() -> None:
    family = calibrated(lambda layers: put(layers, 1, SumAttention()))
    assert [block.attention for block in family.blocks] == ["self_attn", "", "self_attn"]


def test_a_softmax_in_another_form_is_refused() -> None:
    with pytest.raises(InputError, match="layer 1: its EinsumAttention attends in code of its own"):
        calibrated(lambda layers: put(layers, 1, EinsumAttention()))


def test_a_model_without_attention_has_the_other_tables() -> None:
    run = sinkscope.analyze(tiny_of("mamba"), input="random", num_seqs=2, seq_len=12)
    assert {"activation", "gradient_ratio", "massive", "outlier", "summary"} <= set(run.tables)
    assert not {"attention", "sink_positions", "geometry", "gradient", "gradient_check"} & set(run.tables)
    assert "attention (no layer attends by a softmax)" in str(run.verdict)


# --------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 9, 16), None),
        ((2, 9, 4, 16), Copies(4, "third")),
        ((4, 2, 9, 16), Copies(4, "first")),
        ((2, 9, 64), Copies(4, "flat")),
        ((2, 9, 40), None),
    ],
)
def test_copies_are_found_by_shape(shape: tuple[int, ...], expected: Copies | None) -> None:
    x = torch.zeros(shape)
    assert find_copies(x, torch.Size((2, 9)), 16) == expected
    if expected is not None:
        assert expected.stream(x).shape == (2, 9, 16)


def test_the_stream_is_the_mean_of_its_copies() -> None:
    copies = torch.randn(2, 9, 4, 16, dtype=torch.float64)
    mean = copies.mean(2)
    torch.testing.assert_close(Copies(4, "third").stream(copies), mean)
    torch.testing.assert_close(Copies(4, "flat").stream(copies.flatten(2)), mean)
    torch.testing.assert_close(Copies(4, "first").stream(copies.movedim(2, 0)), mean)


def test_what_would_edit_the_mean_of_copies_is_refused() -> None:
    model = tiny_of("hy_v4")
    family, notices = family_of(model)
    assert any("mean of the 4 copies" in notice for notice in notices)
    assert "several copies" in (INTERVENTIONS["zero-massive"].inapplicable(Target(model, family, {})) or "")


def test_a_retrofit_that_could_not_be_loaded_again_is_refused() -> None:
    model = tiny_of("granite")
    with pytest.raises(InputError, match="could not be loaded again"):
        retrofit_model(model, family_of(model)[0], "vga")
    assert model.config.model_type == "granite"


def test_a_bias_of_the_models_own_is_not_dropped_by_streaming() -> None:
    """Doge adds to its logits what it computes from the values."""
    model = tiny_of("doge")
    family, _ = family_of(model)
    with (
        open_seam(model, family) as seams,
        streaming(model, family, seams, 1, 4),
        pytest.raises(InputError, match="a bias of its own"),
    ):
        model(tiny_tokens(1, 9), use_cache=False)
