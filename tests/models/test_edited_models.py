"""Models without a head, edited by hand, broken or quantized: measured, or refused in two lines that name the place."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import MethodType

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from tiny import TINY, spread_weights, tiny_model
from torch import nn
from transformers import (
    AttentionInterface,
    EsmConfig,
    EsmForMaskedLM,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import sinkscope
from sinkscope import InputError, Run, SinkscopeError, plugins
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Reading
from sinkscope.text.batch import Batch

IDS = [list(range(3, 19)), list(range(40, 56))]
FEW = ("attention", "activation", "massive")


def analyzed(model: nn.Module, **options: object) -> Run:
    return sinkscope.analyze(model, input=IDS, bos="never", **options)


def llama(kind: type[PreTrainedModel], **options: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**TINY["llama"][1], **options)).eval().requires_grad_(False)
    spread_weights(model, 12.0)
    return model


# --- without a head


@pytest.mark.parametrize(
    "kind", [LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification, LlamaForQuestionAnswering]
)
def test_without_a_head_there_is_no_loss(kind: type[PreTrainedModel]) -> None:
    """A classifier has more classes than the vocabulary has tokens, so that its logits could be taken for these."""
    model = llama(kind, **({} if kind in (LlamaModel, LlamaForQuestionAnswering) else {"num_labels": 300}))
    run = analyzed(model)
    assert "without a head that predicts tokens" in run.manifest["not_measured"]["gradient"]
    assert {"attention", "massive"} <= set(run.tables)
    assert not {"gradient", "loss_by_sequence"} & set(run.tables)
    with torch.no_grad():
        out = model(torch.tensor(IDS), output_hidden_states=True).hidden_states[1]
    largest = run.tables["massive"].query("layer == 0")["value"].abs().max()
    assert largest == pytest.approx(float(out.abs().max()), rel=1e-5)
    with pytest.raises(InputError, match="has no loss: it is a decoder without a head"):
        sinkscope.intervene(model, do=["nullify-first-embedding"], input=IDS, bos="never")
    with pytest.raises(InputError, match="has no head that predicts tokens, and writes no text"):
        sinkscope.analyze(model, input="sampled", num_seqs=1, seq_len=8)


def test_the_doctor_says_that_there_is_no_loss() -> None:
    report = sinkscope.doctor(llama(LlamaModel))
    assert report.ok
    assert "no loss and no gradients: it is a decoder without a head that predicts tokens" in report.notes


# --- edited by hand


class Without(nn.Module):
    """Takes the place of attention or of an MLP, and adds nothing."""

    def __init__(self, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple = is_tuple

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> object:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.is_tuple else zeros


class Through(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return hidden_states


def only_mlp(layer: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))


def only_attention(layer: nn.Module, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]


def with_forward(forward: Callable[..., torch.Tensor], dropped: str) -> Callable[[nn.ModuleList], None]:
    def change(layers: nn.ModuleList) -> None:
        delattr(layers[1], dropped)
        layers[1].forward = MethodType(forward, layers[1])

    return change


def same(name: str) -> Callable[[nn.ModuleList], None]:
    return lambda layers: setattr(layers[2], name, getattr(layers[1], name))


# change → the kinds of the layers, and the branches that layer 1 still has
ATTENDING, ALONE = ["attention"] * 3, ["attention", "mlp", "attention"]
EDITED: dict[str, tuple[Callable[[nn.ModuleList], object], list[str] | None, set[str]]] = {
    "attention that adds nothing": (lambda layers: setattr(layers[1], "self_attn", Without(True)), ALONE, {"mlp_out"}),
    "no attention": (with_forward(only_mlp, "self_attn"), ALONE, {"mlp_out"}),
    "an MLP that adds nothing": (
        lambda layers: setattr(layers[1], "mlp", Without(False)), None, {"attn_out", "mlp_out"},
    ),
    "no MLP": (with_forward(only_attention, "mlp"), ATTENDING, {"attn_out"}),
    "a shared MLP": (same("mlp"), ATTENDING, set()),
    "a shared norm": (same("input_layernorm"), ATTENDING, {"attn_out", "mlp_out"}),
    "shared attention": (same("self_attn"), ["attention", "unread attention", "unread attention"], set()),
    "a layer that does nothing": (
        lambda layers: layers.__setitem__(1, Through()), ["attention", "pass-through", "attention"], set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_models_edited_by_hand_are_measured(name: str) -> None:
    """Every layer's output is plain transformers', and branches are those that the layer has."""
    change, kinds, branches = EDITED[name]
    model = tiny_model("llama")
    change(model.get_submodule("model.layers"))
    recorded = reference.record_each(model, IDS)
    run = analyzed(model, observables=None if "nothing" in name else FEW)
    assert run.manifest["family"]["kinds"] == kinds
    norms = run.tables["activation"].query("site == 'layer_out'").groupby("layer")["norm_max"].max()
    for layer, norm in norms.items():
        states = [sequence.layers[layer].sites["layer_out"] for sequence in recorded]
        assert norm == pytest.approx(np.linalg.norm(states, axis=-1).max(), rel=1e-4)
    sites = set(run.tables["activation"].query("layer == 1")["site"])
    assert sites & {"attn_out", "mlp_out"} == branches


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise IndexError("too far")


def on_meta(model: PreTrainedModel) -> None:
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    model.get_submodule("model.layers.1.mlp.down_proj").weight = nn.Parameter(weight.to("meta"), requires_grad=False)


def attending(name: str) -> Callable[[PreTrainedModel], None]:
    return lambda model: setattr(model.config, "_attn_implementation", name)


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], object], str]] = {
    "a module raises": (
        lambda model: setattr(model.get_submodule("model.layers.1"), "mlp", Broken()),
        r"^model.layers.1.mlp \(Broken\) raised an error: does the model run .* \[IndexError: too far\]$",
    ),
    "no attention": (
        lambda model: setattr(model.get_submodule("model.layers.1"), "self_attn", None),
        r"layer 1 at 'self_attn' has no module\n'llama' fails on 11 tokens, in model.layers.1 \(LlamaDecoderLayer\)",
    ),
    "nn.Identity": (
        lambda model: model.get_submodule("model.layers").__setitem__(1, nn.Identity()),
        r"layer 1 .* has no module\n'llama' fails on 11 tokens, in model.layers.1 \(Identity\)",
    ),
    "no layers": (
        lambda model: setattr(model.get_submodule("model"), "layers", nn.ModuleList()),
        "it has no layers at 'model.layers'\n'llama': no list of layers",
    ),
    "one layer twice": (
        lambda model: model.get_submodule("model.layers").__setitem__(2, model.get_submodule("model.layers.1")),
        "layer 2 is the same module as layer 1\n'llama': no list of layers",
    ),
    "meta weights": (on_meta, "^model.layers.1.mlp.down_proj.weight of LlamaForCausalLM is on the meta device"),
    "a package is missing": (attending("flash_attention_3"), r"^model.layers.0.self_attn \(LlamaAttention\) raised"),
    "no such attention": (attending("nonsense"), r"^model.layers.0.self_attn \(LlamaAttention\) raised an error"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_run_is_refused_with_the_place(name: str) -> None:
    change, message = REFUSED[name]
    model = tiny_model("llama")
    change(model)
    with pytest.raises(SinkscopeError, match=message) as raised:
        analyzed(model, observables=FEW)
    assert len(str(raised.value).splitlines()) <= 2


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_modules_that_only_look_like_linear_ones(positions: str) -> None:
    """ESM's contact head has `in_features` and no `out_features`, and its MLP's last module reads two tensors."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = EsmConfig(vocab_size=96, mask_token_id=2, pad_token_id=0, position_embedding_type=positions, **small)
    assert "attention" in analyzed(EsmForMaskedLM(config).eval()).tables


def test_dynamically_quantized_weights_have_no_gradients() -> None:
    model = torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {nn.Linear}, dtype=torch.qint8)
    run = analyzed(model)
    assert "gradient of its quantized layers" in run.manifest["not_measured"]["gradient"]
    assert "attention" in run.tables


class Failing(Observable):
    name = about = "failing"
    sites = ("layer_out",)
    by_default = False

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        raise KeyError("lost")


def test_an_error_of_a_plugin_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("failing", f"{__name__}:register", plugins.GROUP)
    monkeypatch.setattr(plugins, "_loaded", [point])
    monkeypatch.setitem(OBSERVABLES, "failing", Failing)
    message = r"^Failing.see of the plugin .* raised an error: repair or uninstall it \[KeyError: 'lost'\]$"
    with pytest.raises(SinkscopeError, match=message):
        analyzed(tiny_model("llama"), observables=("failing",))


# --- attention that is not one softmax


class Attention(nn.Module):
    """A Llama's attention without positions, in code of its own."""

    def __init__(self, of: nn.Module, mixed: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = of.q_proj, of.k_proj, of.v_proj, of.o_proj
        self.mixed = mixed

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        parts = [part(hidden_states).unflatten(-1, (-1, 8)) for part in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (x.repeat_interleave(4 // x.shape[2], 2) for x in parts)  # (B,T,H,d)
        return self.o_proj(self.mixed(query, key, value).flatten(2)), None


def masked(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e30)


def scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return masked(query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / 8**0.5)


def mix(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (weights @ value.transpose(1, 2)).transpose(1, 2)


def softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return mix(scores_of(query, key).softmax(-1), value)


def einsum(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    weights = masked(torch.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def einsum_of_lists(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    weights = masked(torch.einsum("... q d, ... k d -> ... q k", [query, key]) / 8**0.5).softmax(-1)
    return torch.einsum("...kd,...qk->...qd", value, weights).transpose(1, 2)


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    similar = scores_of(query, key).clamp(max=50).exp()
    return mix(similar / similar.sum(-1, keepdim=True), value)


def difference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return mix(scores_of(query, key).softmax(-1) - 0.5 * scores_of(query.flip(-1), key).softmax(-1), value)


def attending_by(mixed: Callable[..., torch.Tensor]) -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.get_submodule("model.layers"):
        layer.self_attn = Attention(layer.self_attn, mixed)
    return model


@pytest.mark.parametrize("mixed", [einsum, einsum_of_lists])
def test_einsum_is_recognized(mixed: Callable[..., torch.Tensor]) -> None:
    """All tables are those of the same attention by matmul."""
    expected, tables = (analyzed(attending_by(each)).tables for each in (softmax, mixed))
    assert set(tables) == set(expected)
    for name in ("attention", "geometry", "gradient", "massive"):
        for column in tables[name].select_dtypes("float"):
            torch.testing.assert_close(
                torch.tensor(tables[name][column].to_numpy()),
                torch.tensor(expected[name][column].to_numpy()),
                rtol=1e-3, atol=1e-4, equal_nan=True,
            )  # fmt: skip


UNREAD = {
    by_hand: "layer 0: its Attention multiplies tokens with tokens, but by no softmax",
    difference: "layer 0: its Attention attends 2 times and combines the results",
}


@pytest.mark.parametrize("mixed", UNREAD)
def test_other_attention_is_measured_without_its_weights(mixed: Callable[..., torch.Tensor]) -> None:
    model = attending_by(mixed)
    run = analyzed(model)
    assert run.manifest["not_measured"]["attention"] == UNREAD[mixed]
    assert {"activation", "gradient_ratio", "massive"} <= set(run.tables)
    assert {"attn_out", "mid"} <= set(run.tables["activation"]["site"])
    assert set(analyzed(model, observables=("massive",)).tables) >= {"massive"}
    with pytest.raises(InputError, match=UNREAD[mixed]):
        analyzed(model, observables=("attention",))
    with sinkscope.watch(model, observables=("massive",)) as seen:
        model(torch.tensor(IDS))
    assert abs(seen.massive.value) == pytest.approx(run.tables["massive"]["value"].abs().max(), rel=1e-6)


@pytest.mark.parametrize("is_softmax", [False, True])
def test_an_attention_function_of_another_kind_is_not_replaced(is_softmax: bool) -> None:
    """Registered with transformers by the user, it is not computed by softmax, and no NaN or parity error appears.

    A softmax whose output is scaled is another kind, too.
    """

    def sigmoids(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask, **kwargs):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if is_softmax:
            weights = 1.5 * (query @ key.mT * kwargs["scaling"] + mask).softmax(-1)
        else:
            weights = (F.softplus(query @ key.mT) + mask).sigmoid()
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("sigmoids", sigmoids)
    AttentionMaskInterface.register("sigmoids", eager_mask)
    try:
        model = tiny_model("llama")
        model.config._attn_implementation = "sigmoids"
        run = analyzed(model)
        assert "sigmoids, which is not one softmax of q·k" in run.manifest["not_measured"]["attention"]
        with torch.no_grad():
            logits = model(torch.tensor(IDS)).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(IDS)[:, 1:].flatten())
        assert run.metric("loss") == pytest.approx(float(loss), rel=1e-5)
    finally:
        AttentionInterface._global_mapping.pop("sigmoids", None)
        AttentionMaskInterface._global_mapping.pop("sigmoids", None)
