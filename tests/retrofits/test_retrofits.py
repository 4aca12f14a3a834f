"""Retrofits against the papers' formulae in float64, and against the plain model changed by hand at its taps."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import gradient_reference
import pandas as pd
import pytest
import reference
import torch
from support.naming import naming
from support.retrofitted import (
    AT_TAPS,
    IDS,
    METHODS,
    OWN_SINKS,
    SETTINGS,
    assert_close,
    each_pair,
    gradient_tables,
    in_double,
    plain_model,
    retrofitted,
    shared,
    shared_plain,
    train,
)
from tiny import TINY, VOCAB, batched, measured, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import sinkscope
from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import streaming
from sinkscope.attention.taps import NAME, Seam
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.list import listing
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.intervening import intervening
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.projections import projections
from sinkscope.retrofits import RETROFITS, gate_displacement, new_parameters, retrofit_model
from sinkscope.retrofits.biases import bias_logits
from sinkscope.retrofits.gates import gate
from sinkscope.retrofits.retrofit import gated, layers_of, registers_before
from sinkscope.retrofits.vscale import ValueScale, shrink, squared_norm
from sinkscope.text.batch import REGISTER, Batch


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor = IDS, **inputs: Any) -> torch.Tensor:
    with in_double(model):
        return model(ids, use_cache=False, **inputs).logits


# ------------------------------------------------------------------------------------------ the mathematics


def v_scale(value: torch.Tensor, c: float) -> torch.Tensor:
    return gated(value, shrink(squared_norm(value), c))


def test_v_scale_has_the_papers_jacobian_and_eigenvalues() -> None:
    """GS §5.1: φ(r) I + 2C/(r+C)² v vᵀ; r/(r+C) across v, (r²+3Cr)/(r+C)² along it."""
    torch.manual_seed(0)
    for size, c in ((0.01, 2.0), (1.0, 0.7), (20.0, 1.6384)):
        v = size * torch.randn(6, dtype=torch.float64)
        r = v.square().sum()
        jacobian = torch.autograd.functional.jacobian(lambda x, c=c: v_scale(x, c), v)
        formula = r / (r + c) * torch.eye(6, dtype=torch.float64) + 2 * c / (r + c) ** 2 * torch.outer(v, v)
        torch.testing.assert_close(jacobian, formula, rtol=1e-12, atol=1e-14)
        across, along = r / (r + c), (r**2 + 3 * c * r) / (r + c) ** 2
        expected = torch.sort(torch.stack([*[across] * 5, along])).values
        torch.testing.assert_close(torch.linalg.eigvalsh(jacobian), expected, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(jacobian @ v, along * v, rtol=1e-12, atol=1e-14)


def test_v_scale_at_its_ends() -> None:
    value = torch.randn(2, 3, 4)
    assert torch.equal(v_scale(value, 0.0), value)
    assert torch.equal(v_scale(value.bfloat16(), 0.0), value.bfloat16())
    nothing = torch.zeros(4, requires_grad=True)
    v_scale(nothing, 0.0).sum().backward()
    assert nothing.grad is not None
    assert nothing.grad.isfinite().all()
    assert shrink(torch.tensor(1e-6, dtype=torch.float64), 2.0).item() == pytest.approx(5e-7, rel=1e-5)
    rounded = (value * 0.01).bfloat16()
    assert torch.equal(v_scale(rounded, 1.0), v_scale(rounded.double(), 1.0).bfloat16())  # rounded once


def test_c_is_as_defined_for_each_layer_and_key_value_head() -> None:
    """C = (dσ)² λ, λ = exp(θ)."""
    model = retrofit_model(tiny_model("llama"), None, "vscale", sigma=0.1)
    scales = [module for module in model.modules() if isinstance(module, ValueScale)]
    assert [tuple(scale.theta.shape) for scale in scales] == [(2,)] * 3
    assert all(torch.equal(scale.theta, torch.zeros(2)) for scale in scales)
    with torch.no_grad():
        scales[1].theta.copy_(torch.tensor([1.0, -2.0]))
    expected = (8 * 0.1) ** 2 * torch.tensor([1.0, -2.0]).exp()
    torch.testing.assert_close(scales[1].c(), expected)
    fixed = retrofit_model(tiny_model("llama"), None, "vscale", learned=False)
    assert [module.c() for module in fixed.modules() if isinstance(module, ValueScale)] == [(8 * 0.02) ** 2] * 3
    assert not new_parameters(fixed)
    started = retrofit_model(tiny_model("llama"), None, "vscale", strength=0.5)
    assert all(torch.allclose(p.exp(), torch.tensor(0.5)) for p in new_parameters(started).values())


def test_vga_has_the_papers_gradient() -> None:
    """Appendix A, eq. 15: ∂L/∂V_j = Σ_i α_ij [g_j I + g_j (1 − g_j) W_g V_j] ∂L/∂z_i."""
    torch.manual_seed(0)
    n, d = 7, 5
    value = torch.randn(n, d, dtype=torch.float64, requires_grad=True)
    weight, upstream = (torch.randn(shape, dtype=torch.float64) for shape in ((d, 1), (n, d)))
    alpha = torch.randn(n, n, dtype=torch.float64).softmax(-1)
    g = gate(value, weight)
    z = alpha @ (g * value)
    z.backward(upstream)
    g, v = g.detach(), value.detach()
    expected = torch.stack(
        [
            sum(
                alpha[i, j]
                * (g[j] * torch.eye(d, dtype=torch.float64) + g[j] * (1 - g[j]) * weight @ v[j : j + 1])
                @ upstream[i]
                for i in range(n)
            )
            for j in range(n)
        ]
    )
    torch.testing.assert_close(value.grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "falcon-new"])
def test_vga_in_a_model_has_the_papers_gradient_at_every_layer(name: str) -> None:
    """As above, from ∇v̂ = Σ_i α_ij ∂L/∂z_i at the value tap, with many heads: every gate reads all of V."""
    model = retrofitted(name, "vga").requires_grad_(True)
    family = find_family(model)
    at_tap, raw = [], []
    with open_seam(model, family) as seams, in_double(model):
        for index, seam in seams.items():
            seam.value.register_forward_hook(lambda m, a, out: at_tap.append(_kept(out)))
            module = projections(model, family, index)["value"].module
            module.register_forward_hook(lambda m, a, out: raw.append(_kept(out.clone())) or raw[-1], prepend=True)
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    for index, (seen, whole) in enumerate(zip(at_tap, raw, strict=True)):
        places = projections(model, family, index)["value"].places
        part = layers_of(model, family)[index].attention.retrofit
        value, gradient = whole.detach()[..., places], seen.grad.transpose(1, 2)
        sigmoid = torch.sigmoid(value.flatten(-2) @ part.weight)
        content = 2 * sigmoid[..., None] * gradient
        regulation = (2 * sigmoid * (1 - sigmoid) * (value * gradient).sum(-1)) @ part.weight.T
        expected = content + regulation.unflatten(-1, value.shape[-2:])
        assert_close(whole.grad[..., places], expected.detach())
        assert regulation.abs().max() > 1e-3 * content.abs().max()  # there is something to compare


def _kept(x: torch.Tensor) -> torch.Tensor:
    x.retain_grad()
    return x


# -------------------------------------------------------------------- in a model: the definition, at the taps


@contextmanager
def changed_by_hand(model: PreTrainedModel, label: str, trained: PreTrainedModel) -> Iterator[None]:
    """The plain model, its taps changed as the method says, with the parameters of `trained`."""
    family = find_family(model)
    read: list[torch.Tensor] = []  # what the attention under way reads

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        read[:] = [args[0] if args else kwargs["hidden_states"]]

    with open_seam(model, family) as seams, ExitStack() as stack:
        for index, (seam, layer) in enumerate(
            zip(seams.values(), layers_of(trained, find_family(trained)), strict=True)
        ):
            parameters = dict(layer.attention.retrofit.named_parameters())
            attention = family.layer_modules(model)[index].get_submodule(family.attention)
            stack.callback(attention.register_forward_pre_hook(note, with_kwargs=True).remove)
            BY_HAND[label](seam, parameters, read, model)
        yield


def _vscale(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
    def edit(module: nn.Module, args: tuple, value: torch.Tensor) -> torch.Tensor:
        strength = parameters["theta"].exp()[None, :, None, None] if parameters else 3.0
        r = value.square().sum(-1, keepdim=True)
        return value * r / (r + (value.shape[-1] * 0.02) ** 2 * strength)

    seam.value.register_forward_hook(edit)


def _features(read: list, value: torch.Tensor, from_input: bool) -> torch.Tensor:
    return read[0] if from_input else value.transpose(1, 2).flatten(-2)


def _value_gate(from_input: bool) -> Callable:
    def change(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
        def edit(module: nn.Module, args: tuple, value: torch.Tensor) -> torch.Tensor:
            gates = 2 * torch.sigmoid(_features(read, value, from_input) @ parameters["weight"])
            return value * gates.transpose(1, 2)[..., None]

        seam.value.register_forward_hook(edit)

    return change


def _output_gate(from_input: bool) -> Callable:
    def change(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
        seen: list[torch.Tensor] = []
        seam.value.register_forward_hook(lambda module, args, value: seen.append(value))

        def edit(module: nn.Module, args: tuple, mix: torch.Tensor) -> torch.Tensor:
            return mix * 2 * torch.sigmoid(_features(read, seen.pop(), from_input) @ parameters["weight"])[..., None]

        seam.mix.register_forward_hook(edit)

    return change


def _denominator(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
    """a · Z / (Z + exp(b)): a share of the row that nothing gets."""
    seen: dict[str, torch.Tensor] = {}
    seam.query.register_forward_hook(lambda module, args, query: seen.update(query=query))
    seam.lse.register_forward_hook(lambda module, args, lse: seen.update(lse=lse))

    def edit(module: nn.Module, args: tuple, mix: torch.Tensor) -> torch.Tensor:
        sink = own_bias(model, mix.shape[1]) + term(seen["query"])
        kept = torch.sigmoid(seen["lse"] - sink)
        return mix * kept.transpose(1, 2)[..., None]

    def term(query: torch.Tensor) -> torch.Tensor:
        if "logit" in parameters:
            return parameters["logit"][None, :, None]
        unscaled = model.config.model_type in ("gpt_neo", "opt")  # OPT scales its queries before
        scaling = 1.0 if unscaled else query.shape[-1] ** -0.5
        if model.config.model_type.startswith("gemma"):
            scaling = model.config.query_pre_attn_scalar**-0.5
        dots = scaling * (query * parameters["key"][None, :, None]).sum(-1)
        cap = getattr(model.config, "attn_logit_softcapping", None)
        return dots if cap is None else cap * (dots / cap).tanh()

    seam.mix.register_forward_hook(edit)


def own_bias(model: PreTrainedModel, length: int) -> torch.Tensor:
    """What ALiBi adds at (t,t), by transformers' own functions: (1,H,T)."""
    config, mask = model.config, torch.ones(1, length)
    if config.model_type == "bloom":
        return bloom_alibi(mask, 4, torch.float64).view(1, 4, length)
    if config.model_type == "falcon" and config.alibi:
        return falcon_alibi(mask, 4, torch.float64).view(1, 4, length) * 8**-0.5
    if config.model_type == "mpt":
        return build_mpt_alibi_tensor(4, length).view(1, 4, length).double()
    return torch.zeros(1, 4, length)


BY_HAND: dict[str, Callable] = {
    "vscale": _vscale,
    "vscale-fixed": _vscale,
    "vga": _value_gate(False),
    "iga": _value_gate(True),
    "vga-output": _output_gate(False),
    "iga-output": _output_gate(True),
    "learnable-sink": _denominator,
    "key-bias": _denominator,
}


@each_pair(list(TINY), AT_TAPS)
def test_logits_are_those_of_the_definition(name: str, label: str) -> None:
    """At its start, and with every parameter moved."""
    for trained in (False, True):
        model = shared(name, label) if trained else retrofitted(name, label, trained=False)
        plain = plain_model(name)
        with changed_by_hand(plain, label, model), torch.no_grad(), in_double(plain):
            expected = plain(IDS, use_cache=False).logits
        # BLOOM's, Falcon's and MPT's ALiBi is made in float32
        tolerance = 1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-10
        assert_close(logits(model), expected, tolerance)
        if trained:
            assert (expected - logits(shared_plain(name))).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj"])
def test_key_biases_of_a_long_text(name: str) -> None:
    """More rows than are in memory at once."""
    ids = tiny_tokens(2, 70)
    model, plain = retrofitted(name, "key-bias"), plain_model(name)
    with changed_by_hand(plain, "key-bias", model):
        expected = logits(plain, ids)
    assert_close(logits(model, ids), expected)


def test_register_tokens_are_embeddings_before_the_text() -> None:
    for name in TINY:
        with naming(name):
            model, plain = retrofitted(name, "register-tokens"), plain_model(name)
            embedded = plain.get_input_embeddings()(IDS)
            whole = torch.cat([model.retrofit.embeddings.detach().expand(2, -1, -1), embedded], dim=1)
            with torch.no_grad(), in_double(plain):
                expected = plain(inputs_embeds=whole, use_cache=False).logits[:, 3:]
            assert_close(logits(model), expected)
            start = retrofit_model(tiny_model(name), None, "register-tokens", count=2).retrofit.embeddings
            every = tiny_model(name).get_input_embeddings()(torch.arange(VOCAB)).mean(0)
            torch.testing.assert_close(start.detach(), every.expand(2, -1))


def test_register_tokens_start_where_they_are_asked_to() -> None:
    """As WSE's do, of the seed's random state."""

    def start(seed: int) -> torch.Tensor:
        model = tiny_model("llama")
        torch.manual_seed(seed)
        return retrofit_model(model, None, "register-tokens", count=200, deviation=0.02).retrofit.embeddings.detach()

    assert float(start(0).std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(start(0), start(0))
    assert not torch.equal(start(0), start(1))


# label → method and parameters that change nothing
UNCHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "vscale": ("vscale", {"strength": 0, "learned": False}),
    **{label: METHODS[label] for label in ("vga", "vga-output", "iga", "iga-output")},
}


@each_pair(list(TINY), list(UNCHANGED))
def test_starts_as_the_pretrained_model_bit_for_bit(name: str, label: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with naming(dtype):
            method, parameters = UNCHANGED[label]
            plain, model = tiny_model(name, dtype=dtype), tiny_model(name, dtype=dtype)
            assert retrofit_model(model, None, method, **parameters) is model
            with torch.no_grad():
                assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_other_starts_come_as_near_as_their_parameters_say() -> None:
    def distance(name: str, method: str, **parameters: Any) -> float:
        before = logits(shared_plain(name))
        model = retrofit_model(plain_model(name), None, method, **parameters)
        return float((logits(model) - before).abs().max() / before.abs().max())

    for name in TINY:
        with naming(name):
            assert distance(name, "vscale", strength=1e-9) < 1e-6 < distance(name, "vscale")
            if name != OWN_SINKS:
                assert distance(name, "learnable-sink", first=-60) < 1e-6 < distance(name, "learnable-sink", first=0)


def test_the_papers_own_gate_starts_at_one_half() -> None:
    model = retrofit_model(plain_model("llama"), None, "vga", scale=1)
    plain = plain_model("llama")
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.v_proj.weight.mul_(0.5)
    assert_close(logits(model), logits(plain))
    assert model.config.retrofit["parameters"] == {"placement": "value", "scale": 1.0}  # recorded


@each_pair(list(TINY), list(METHODS))
def test_gradients_reach_every_new_parameter(name: str, label: str) -> None:
    model = retrofitted(name, label, torch.float32, trained=False)
    added = new_parameters(model)
    assert not any(p.requires_grad for n, p in model.named_parameters() if n not in added)
    if label == "vscale-fixed":
        assert not added
        return
    model(IDS, labels=IDS).loss.backward()
    for parameter in added.values():
        by_head = parameter.grad if parameter.dim() == 1 else parameter.grad.abs().sum(0 if label[1:3] == "ga" else 1)
        assert (by_head != 0).all()


def test_so_many_parameters_are_added() -> None:
    """H query heads, K key/value heads of width d, D the width of what attention reads."""
    for name in TINY:
        with naming(name):
            plain = tiny_model(name)
            before = sum(parameter.numel() for parameter in plain.parameters())
            found = projections(plain, find_family(plain), 0)
            value, query = (found[role].places for role in ("value", "query"))
            heads, (key_heads, d), width = query.shape[0], value.shape, 32
            expected = {
                "vscale": key_heads,
                "vscale-fixed": 0,
                "vga": key_heads * d * key_heads,
                "vga-output": key_heads * d * heads,
                "iga": width * key_heads,
                "iga-output": width * heads,
                "learnable-sink": heads,
                "key-bias": heads * d,
            }
            for label, count in expected.items():
                if (name, label) == (OWN_SINKS, "learnable-sink"):
                    continue
                model = retrofitted(name, label, torch.float32)
                assert sum(parameter.numel() for parameter in new_parameters(model).values()) == 3 * count
                assert sum(parameter.numel() for parameter in model.parameters()) == before + 3 * count
            registers = new_parameters(retrofitted(name, "register-tokens", torch.float32))
            assert {key: tuple(value.shape) for key, value in registers.items()} == {"retrofit.embeddings": (3, 32)}


def test_the_new_parameters_are_the_models_own() -> None:
    """Under ordinary names, where an optimiser, `.to` and `state_dict` find them."""
    model = retrofitted("llama", "vga", torch.float32)
    names = {f"model.layers.{layer}.self_attn.retrofit.weight" for layer in range(3)}
    assert set(new_parameters(model)) == names <= set(model.state_dict())
    model.to(torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in new_parameters(model).values())


# ------------------------------------------------------------------------------------- generating and padding


@each_pair(list(TINY), list(METHODS))
def test_generates_the_same_with_the_cache_and_without(name: str, label: str) -> None:
    model = shared(name, label)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    cached, whole = (model.generate(IDS, use_cache=use, **options, **wanted) for use in (True, False))
    assert cached.sequences.shape == (2, 13)
    assert torch.equal(cached.sequences, whole.sequences)
    tolerance = 1e-4 if name in ("gpt_oss", "qwen3_moe", "mixtral") else 1e-5
    for ours, expected in zip(cached.logits, whole.logits, strict=True):
        assert_close(ours, expected, tolerance)


@each_pair(list(TINY), list(METHODS))
def test_padding_changes_nothing(name: str, label: str) -> None:
    """But by a sliding window, which counts places and not positions when the padding is inside it."""
    for side in ("left", "right"):
        with naming(side):
            model = shared(name, label)
            batch = padded(ragged_tokens([9, 5, 7]), side)
            inputs: dict[str, Any] = {"attention_mask": batch.attention_mask}
            if name not in ("bloom", "mpt", "falcon-alibi"):
                inputs["position_ids"] = batch.position_ids
            together = logits(model, batch.token_ids, **inputs)
            for row, alone in enumerate(logits_of_each_alone(name, label)):
                tolerance = 1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-9
                assert_close(together[row][batch.attention_mask[row].bool()], alone[0], tolerance)


@cache
def logits_of_each_alone(name: str, label: str) -> list[torch.Tensor]:
    return [logits(shared(name, label), torch.as_tensor(ids)[None]) for ids in ragged_tokens([9, 5, 7])]


@each_pair(["llama", "mistral", "gpt2", "gpt_neox"], list(METHODS))
def test_generates_from_a_batch_padded_on_the_left(name: str, label: str) -> None:
    model = shared(name, label)
    batch = padded(ragged_tokens([9, 5]), "left")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    together = model.generate(batch.token_ids, attention_mask=batch.attention_mask, **options)
    beams = model.generate(batch.token_ids, attention_mask=batch.attention_mask, num_beams=2, **options)
    for row, ids in enumerate(ragged_tokens([9, 5])):
        alone = torch.as_tensor(ids)[None]
        assert torch.equal(together[row, 9:], model.generate(alone, **options)[0, len(ids) :])
        assert torch.equal(beams[row, 9:], model.generate(alone, num_beams=2, **options)[0, len(ids) :])


@pytest.mark.parametrize("label", AT_TAPS)
def test_a_static_cache_serves_too(label: str) -> None:
    model = retrofitted("llama", label, torch.float32)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    static = model.generate(IDS, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, model.generate(IDS, **options))


def test_registers_go_on_from_a_cache() -> None:
    """A second turn, and a prompt read in chunks: they are in the cache once."""
    model = retrofitted("llama", "register-tokens")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first = model.generate(IDS, return_dict_in_generate=True, **options)
    prompt = torch.cat([first.sequences, IDS], dim=1)
    again = model.generate(prompt, past_key_values=first.past_key_values, **options)
    assert torch.equal(again, model.generate(prompt, **options))
    assert torch.equal(model.generate(IDS, prefill_chunk_size=4, **options), first.sequences)


def test_registers_keep_the_texts_length() -> None:
    model = retrofitted("llama", "register-tokens", torch.float32)
    with torch.no_grad():
        whole = model(IDS)
        assert whole.logits.shape == (2, 9, VOCAB)
        assert torch.equal(model(IDS, logits_to_keep=4).logits, whole.logits[:, -4:])
        assert torch.equal(model(IDS, logits_to_keep=11).logits, whole.logits)
        assert torch.equal(model(IDS, return_dict=False)[0], whole.logits)
        embedded = model.get_input_embeddings()(IDS)
        assert torch.equal(model(inputs_embeds=embedded).logits, whole.logits)
        loss = model(IDS, labels=IDS).loss
    expected = nn.functional.cross_entropy(whole.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    batch = padded(ragged_tokens([9, 5]), "left")
    labels = batch.token_ids.masked_fill(batch.attention_mask == 0, -100)
    with torch.no_grad():
        found = model(batch.token_ids, attention_mask=batch.attention_mask, labels=labels)
    targets = labels.clone()
    targets[torch.arange(2), batch.start] = -100
    expected = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    torch.testing.assert_close(found.loss, expected)


def test_registers_say_what_they_cannot_do() -> None:
    model = retrofitted("gpt2", "register-tokens", torch.float32)
    with pytest.raises(InputError, match="254 tokens and 3 registers are beyond the model's 256 positions"):
        model(torch.ones(1, 254, dtype=torch.long))
    with pytest.raises(InputError, match="static"):
        model.generate(IDS, cache_implementation="static", max_new_tokens=2, disable_compile=True)
    with pytest.raises(InputError, match="two dimensions"):
        model(IDS, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(InputError, match="logits_to_keep"):
        model(IDS, logits_to_keep=torch.tensor([3]))


# ------------------------------------------------------------------------------------------ being trained


def without_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


@each_pair(["llama", "gpt2", "bloom", "gptj"], list(METHODS))
def test_gradient_checkpointing_gives_the_same_gradients(name: str, label: str) -> None:
    if label == "vscale-fixed":
        pytest.skip("nothing to train")
    gradients = []
    for checkpointing in (False, True):
        model = retrofitted(name, label, torch.float32).requires_grad_(True)
        without_dropout(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in new_parameters(model).values()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("label", ["learnable-sink", "key-bias"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_dropout_of_the_weights_is_kept_in_training(name: str, label: str) -> None:
    """The attention function of sinkscope has it too: the plain fine-tune is compared with."""
    model = retrofitted(name, label, torch.float32).train()
    without_dropout(model)
    with torch.no_grad():
        torch.manual_seed(0)
        assert torch.equal(model(IDS).logits, model(IDS).logits)
        for module in model.modules():
            if name == "gpt2" and hasattr(module, "attn_dropout"):
                module.attn_dropout.p = 0.5
            elif name == "opt" and hasattr(module, "num_heads"):
                module.dropout = 0.5
        assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_displacement_is_measured_from_the_start() -> None:
    for label in METHODS:
        if label == "vscale-fixed":
            continue
        model = retrofitted("llama", label, torch.float32, trained=False)
        still = gate_displacement(model)
        assert (still["displacement"] == 0).all()
        before = {name: parameter.detach().clone() for name, parameter in new_parameters(model).items()}
        train(model)
        moved = gate_displacement(model)
        assert list(moved.columns) == ["layer", "head", "parameter", "displacement"]
        assert (moved["displacement"] > 0).all()
        name, parameter = list(new_parameters(model).items())[-1]
        change = (parameter.detach() - before[name]).double()
        by_head = change.norm(dim=0 if label[1:3] == "ga" else 1) if change.dim() > 1 else change.abs()
        last = moved[moved["layer"] == (-1 if label == "register-tokens" else 2)]
        assert last["displacement"].tolist() == pytest.approx(by_head.tolist())
    assert gate_displacement(tiny_model("llama")).empty


# ---------------------------------------------------------------------------------- measuring: against eager


def as_the_plain_family(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """For the references, which go by the model type and know nothing of sinkscope."""
    model.__class__, model.config.__class__ = type(tiny_model(name)), type(tiny_model(name).config)
    return model


@each_pair(list(TINY), ["vscale", "vga", "vga-output", "iga"])
def test_tables_of_a_retrofitted_model_are_those_of_eager_attention(name: str, label: str) -> None:
    model = shared(name, label)
    sequences = ragged_tokens([10, 10, 7])
    with in_double(model):
        ours = measured(model, batched(sequences, 2), SETTINGS)
        kernel = "sdpa" if name.startswith("falcon") else "eager"  # reference.py says why
        config = copy.deepcopy(model.config)
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=kernel)
        twin.load_state_dict(model.state_dict())
        twin = as_the_plain_family(twin.eval().requires_grad_(False), name)
        with in_double(twin):
            found = [reference.record(twin, ids) for ids in sequences]
    expected = reference.tables(found, 8, 8, 0.3)
    reference.assert_same(ours, expected, 1e-4 if name in ("bloom", "falcon-alibi", "mpt") else 1e-6)


@each_pair(
    [name for name in TINY if TINY[name][0] not in ("bloom", "mpt", "gptj", "gpt_neo")],
    ["vscale", "vga", "vga-output", "iga-output"],
)
def test_gradient_tables_of_a_retrofitted_model_are_autograds(name: str, label: str) -> None:
    model, sequences = shared(name, label), ragged_tokens(LENGTHS)
    ours = backward_tables(name, label)
    twin = copy.deepcopy(model).requires_grad_(True)
    if gradient_reference.on_interface(as_the_plain_family(copy.deepcopy(model), name)):
        twin.set_attn_implementation(gradient_reference.NAME)
    twin = as_the_plain_family(twin, name)
    with in_double(twin):
        found = gradient_reference.record(twin, sequences)
        expected = gradient_reference.tables(twin, found, 8)
    gradient_reference.assert_same(ours, expected, 1e-5 if name == "falcon-alibi" else 1e-8)


LENGTHS = (10, 10, 7)


@cache
def backward_tables(name: str, label: str) -> dict[str, pd.DataFrame]:
    """Not to be changed."""
    return gradient_tables(shared(name, label), ragged_tokens(LENGTHS))


@each_pair(list(TINY), list(METHODS))
def test_the_value_gradient_is_what_attention_routes_to_it(name: str, label: str) -> None:
    """∇v_s = Σ_t a[t,s] g_t at the value tap, whatever was done to the value before and to the mix after."""
    check = backward_tables(name, label)["gradient_check"]
    assert check["identity_residual"].max() < (1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-9)


class Rows(Observable):
    """Each layer's weights, missing mass and values, whole."""

    name = "rows"
    about = "a test's own"
    sites = ("attention",)

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.weights: list[torch.Tensor] = []
        self.missing: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        whole = slice(0, read.length)
        self.weights.append(read.weights(whole, whole)[0])
        self.missing.append(read.missing_mass)
        self.values.append(read.value.transpose(1, 2))

    def tables(self) -> dict:
        return {}


def rows_of(model: PreTrainedModel, batch: Batch | None = None, kernel: str = "sdpa") -> Rows:
    rows = Rows()
    with in_double(model), open_tracer(model, find_family(model), kernel) as tracer:
        tracer.forward(batch or Batch(IDS, torch.ones_like(IDS)), [rows])
    return rows


@each_pair(list(TINY), ["learnable-sink", "key-bias"])
def test_missing_mass_is_what_the_new_denominator_takes(name: str, label: str) -> None:
    """Of the first layer, where nothing else differs yet: the plain weights, less by one factor a row."""
    rows, plain = rows_of(shared(name, label)), rows_of(shared_plain(name))
    tolerance = 1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-10
    for weights, missing in zip(rows.weights, rows.missing, strict=True):
        assert_close(weights.sum(-1) + missing, torch.ones_like(missing), tolerance)
        assert (missing > 1e-6).any()
    expected = plain.weights[0] / plain.weights[0].sum(-1, keepdim=True) * (1 - rows.missing[0])[..., None]
    assert_close(rows.weights[0], expected, tolerance)


def test_the_value_tap_shows_what_is_attended_to() -> None:
    model = retrofitted("llama", "vga")
    family = find_family(model)
    raw = []
    handle = projections(model, family, 0)["value"].module.register_forward_hook(
        lambda module, args, out: raw.append(out), prepend=True
    )
    rows = rows_of(model)
    handle.remove()
    part = model.model.layers[0].self_attn.retrofit
    gates = 2 * torch.sigmoid(raw[0] @ part.weight)
    assert_close(rows.values[0], (raw[0].unflatten(-1, (2, 8)) * gates[..., None]).detach())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "opt", "falcon", "bloom", "phi"])
def test_registers_are_measured_as_the_first_positions(name: str) -> None:
    """Tables are those of a plain model that has three tokens more in its vocabulary, written before every text."""
    model = retrofitted(name, "register-tokens")
    sequences = ragged_tokens([10, 10, 7])
    with in_double(model):
        ours = measured(model, batched(sequences, 2, "left"), SETTINGS)
    plain = plain_model(name)
    twin = reference.eager_twin(plain)
    embedding: Any = twin.get_input_embeddings()
    scale = float(getattr(embedding, "embed_scale", 1.0))
    more = model.retrofit.embeddings.detach() / scale
    embedding.weight = nn.Parameter(torch.cat([embedding.weight.detach(), more]), requires_grad=False)
    extended = [torch.cat([torch.arange(VOCAB, VOCAB + 3), torch.as_tensor(ids)]).numpy() for ids in sequences]
    with in_double(twin):
        found = [reference.record(twin, ids) for ids in extended]
    expected = reference.tables(found, 8, 8, 0.3)
    for table in expected.values():
        if "token_id" in table:
            table["token_id"] = table["token_id"].where(table["token_id"] < VOCAB, REGISTER)
    reference.assert_same(ours, expected, 1e-4 if name == "bloom" else 1e-7)


@each_pair(["llama", "gpt2", "bloom"], list(METHODS))
def test_analyze_takes_a_retrofitted_model_and_leaves_it_as_it_was(name: str, label: str) -> None:
    model = retrofitted(name, label, torch.float32)
    with torch.no_grad():
        before = model(IDS).logits
    parts = dict(model.named_modules())
    run = sinkscope.analyze(model, input="random", num_seqs=4, seq_len=16)
    assert {"attention", "geometry", "activation", "massive", "outlier", "gradient"} <= set(run.tables)
    assert dict(model.named_modules()) == parts
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
        assert torch.equal(model.generate(IDS, max_new_tokens=1, pad_token_id=0)[:, :9], IDS)
    for kernel in ("sdpa", "eager"):
        with open_tracer(model, find_family(model), kernel) as tracer:
            assert_close(tracer.logits(Batch(IDS, torch.ones_like(IDS))), before, 1e-4)


@each_pair(["llama", "gpt2", "gptj"], list(METHODS))
def test_the_doctor_finds_nothing_wrong(name: str, label: str) -> None:
    report = sinkscope.doctor(retrofitted(name, label, torch.float32))
    assert report.ok, str(report)


@pytest.mark.parametrize("label", ["vga", "learnable-sink", "register-tokens"])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_interventions_act_on_a_retrofitted_model(name: str, label: str) -> None:
    """No later token sees position 0: with registers the first of them."""
    model = retrofitted(name, label, torch.float32)
    with torch.no_grad():
        before = model(IDS).logits
        with intervening(model, "mask-sink"):
            masked = model(IDS).logits
            generated = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
            whole = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
        assert torch.equal(model(IDS).logits, before)
        assert torch.equal(generated, whole)
        if label == "register-tokens":  # the same as that register changed: nobody sees it
            model.retrofit.embeddings[0] += 1.0
            with intervening(model, "mask-sink"):
                assert_close(model(IDS).logits, masked, 1e-5)
    assert (masked - before).abs().max() > 1e-3 * before.abs().max()


# ------------------------------------------------------------------------------------------------- refusals


def test_unknown_methods_and_parameters_are_refused() -> None:
    model = tiny_model("llama")
    for method, parameters, words in (
        ("vgaa", {}, "retrofit 'vgaa' is unknown; did you mean 'vga'"),
        ("vga", {"placment": "value"}, "vga: parameter 'placment' is unknown; did you mean 'placement'"),
        ("vga", {"placement": "key"}, "vga: placement: input should be 'value' or 'output'"),
        ("vga", {"scale": 0}, "vga: scale: input should be greater than 0"),
        ("vscale", {"strength": 0}, "λ = exp.θ. is never 0"),
        ("vscale", {"sigma": "much"}, "vscale: sigma: "),
        ("register-tokens", {"count": 0}, "register-tokens: count: "),
        ("key-bias", {"heads": 1}, "key-bias: parameter .heads. is unknown"),
        ("learnable-sink", {"first": "nan"}, "learnable-sink: first: "),
    ):
        with pytest.raises(InputError, match=words):
            retrofit_model(model, None, method, **parameters)
    assert model.config.model_type == "llama"
    assert not new_parameters(model)


def test_a_model_is_retrofitted_once() -> None:
    model = retrofitted("llama", "vga")
    for method in ("vga", "vscale"):
        with pytest.raises(InputError, match=f"retrofitted with vga already: apply {method} to the model it was made"):
            retrofit_model(model, None, method)


def test_models_that_cannot_be_retrofitted_are_refused_and_stay_as_they_were() -> None:
    with pytest.raises(InputError, match="learnable sinks of its own"):
        retrofit_model(tiny_model("gpt_oss"), None, "learnable-sink")
    config = AutoConfig.for_model("llama", **TINY["llama"][1])
    with pytest.raises(InputError, match="LlamaForSequenceClassification cannot be retrofitted"):
        retrofit_model(AutoModelForSequenceClassification.from_config(config), None, "vga")
    unknown = AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", d_model=32, ffn_dim=32, num_layers=1))
    with pytest.raises(InputError, match="'xglm' has no row"):
        retrofit_model(unknown, None, "vga")
    model = tiny_model("llama")
    with open_seam(model, find_family(model)), pytest.raises(InputError, match="close the tracer"):
        retrofit_model(model, None, "vga")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.model_type == "llama"


@pytest.mark.parametrize("label", ["learnable-sink", "key-bias"])
def test_an_attention_that_would_leave_a_denominator_out_is_refused(label: str) -> None:
    model = retrofitted("llama", label)
    for kernel in ("eager", "sdpa", {"": "sdpa"}):
        with pytest.raises(InputError, match=f"does not support this model's {label}"):
            model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == NAME
    gated = retrofitted("llama", "vga")
    gated.set_attn_implementation("eager")
    assert gated.config._attn_implementation == "eager"


def test_a_gate_that_would_have_no_effect_is_no_secret() -> None:
    """BLOOM with `slow_but_exact` never calls its output projection."""
    model = retrofit_model(tiny_model("bloom"), None, "vga", placement="output")
    for layer in model.transformer.h:
        layer.self_attention.slow_but_exact, layer.self_attention.pretraining_tp = True, 2
    with pytest.raises(SinkscopeError, match="output projection was not called"):
        model(IDS)


@pytest.mark.parametrize("label", METHODS)
def test_a_window_of_the_whole_text_changes_nothing(label: str) -> None:
    model = retrofitted("llama", label)
    family, length = find_family(model), IDS.shape[1] + registers_before(model)
    with (
        torch.no_grad(),
        in_double(model),
        open_seam(model, family) as seams,
        streaming(model, family, seams, 0, length),
    ):
        streamed = model(IDS, use_cache=False).logits
    assert_close(streamed, logits(model), 1e-9)


def test_analysis_leaves_room_for_the_registers() -> None:
    model = retrofitted("gpt2", "register-tokens", torch.float32)
    with pytest.raises(InputError, match="beyond the model's 253 positions"):
        sinkscope.analyze(model, input="random", num_seqs=2, seq_len=254)


def test_every_method_is_listed() -> None:
    table = listing("retrofits")["retrofits"]
    assert set(table["retrofit"]) == set(RETROFITS)
    assert {"none", "vscale", "vga", "iga", "register-tokens", "learnable-sink", "key-bias"} < set(RETROFITS)
    assert {"operation", "value-bias"} < set(RETROFITS)


def test_key_bias_logits_follow_the_query() -> None:
    query, key = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    for b, h, t in ((0, 0, 0), (1, 2, 4)):
        expected = 0.3 * query[b, h, t] @ key[h]
        assert bias_logits(query, key, 0.3)[b, h, t].item() == pytest.approx(expected.item())
        capped = 2.0 * torch.tanh(expected / 2.0)
        assert bias_logits(query, key, 0.3, softcap=2.0)[b, h, t].item() == pytest.approx(capped.item())
