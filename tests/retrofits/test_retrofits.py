"""Retrofits against the papers' formulae in float64, and against the plain model changed by hand at its taps."""

from functools import cache
from typing import Any

import gradient_reference
import pandas as pd
import pytest
import reference
import torch
from support.attention_rows import rows_of
from support.changed_by_hand import changed_by_hand
from support.naming import naming
from support.retrofitted import (
    AT_TAPS,
    EVERYWHERE,
    IDS,
    METHODS,
    NAMES,
    SETTINGS,
    assert_close,
    each_pair,
    gradient_tables,
    in_double,
    plain_model,
    retrofitted,
    shared,
    shared_plain,
)
from tiny import TINY, VOCAB, batched, measured, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from sinkscope import InputError, SinkscopeError, gate_displacement, intervening, new_parameters, retrofit_model
from sinkscope.attention.seam import open_seam
from sinkscope.models.families import find_family
from sinkscope.retrofits.gates import ValueScale, shrink
from sinkscope.retrofits.retrofit import gated, parts_of
from sinkscope.text.batch import REGISTER


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor = IDS, **inputs: Any) -> torch.Tensor:
    with in_double(model):
        return model(ids, use_cache=False, **inputs).logits


def v_scale(value: torch.Tensor, c: float) -> torch.Tensor:
    return gated(value, shrink(value, c))


def test_v_scale_at_its_ends() -> None:
    value = torch.randn(2, 3, 4)
    assert torch.equal(v_scale(value, 0.0), value)
    nothing = torch.zeros(4, requires_grad=True)
    v_scale(nothing, 0.0).sum().backward()
    assert nothing.grad is not None
    assert nothing.grad.isfinite().all()
    rounded = (value * 0.01).bfloat16()
    assert torch.equal(v_scale(rounded, 1.0), v_scale(rounded.double(), 1.0).bfloat16())  # rounded once


def test_c_is_as_defined_for_each_layer_and_key_value_head() -> None:
    """C = (dσ)² λ, λ = exp(θ)."""
    model = retrofit_model(tiny_model("llama"), None, "vscale", sigma=0.1, strength=0.5)
    scales = [module for module in model.modules() if isinstance(module, ValueScale)]
    for scale in scales:
        torch.testing.assert_close(scale.c(), torch.full((2,), (8 * 0.1) ** 2 * 0.5))
    with torch.no_grad():
        scales[1].theta.copy_(torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(scales[1].c(), (8 * 0.1) ** 2 * torch.tensor([1.0, -2.0]).exp())


@each_pair(NAMES, AT_TAPS)
def test_logits_are_those_of_the_definition(name: str, label: str) -> None:
    """The parameters are at their start, or all moved; key biases also read a text with more rows than one chunk."""
    # the ALiBi of BLOOM, Falcon and MPT is computed in float32
    tolerance = 1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-10
    is_long = label == "key-bias" and name in ("llama", "gemma2", "gptj")
    for trained in (False, True):
        model = shared(name, label) if trained else retrofitted(name, label, trained=False)
        plain = plain_model(name)
        for ids in (IDS, tiny_tokens(2, 70)) if is_long else (IDS,):
            with changed_by_hand(plain, label, model):
                expected = logits(plain, ids)
            assert_close(logits(model, ids), expected, tolerance)
    assert (logits(shared(name, label)) - logits(shared_plain(name))).abs().max() > 1e-4


def test_register_tokens_are_embeddings_before_the_text() -> None:
    for name in NAMES:
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
    starts = []
    for seed in (0, 0, 1):  # WSE's start is N(0, .02²)
        model = tiny_model("llama")
        torch.manual_seed(seed)
        starts.append(retrofit_model(model, None, "register-tokens", count=200, deviation=0.02).retrofit.embeddings)
    assert float(starts[0].std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


# label → method and parameters that change nothing
UNCHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "vscale": ("vscale", {"strength": 0, "learned": False}),
    **{label: METHODS[label] for label in ("vga", "vga-output", "iga", "iga-output")},
}


@each_pair(NAMES, list(UNCHANGED))
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

    for name in ("llama", "bloom"):
        assert distance(name, "vscale", strength=1e-9) < 1e-6 < distance(name, "vscale")
        assert distance(name, "learnable-sink", first=-60) < 1e-6 < distance(name, "learnable-sink", first=0)
    model, plain = retrofit_model(plain_model("llama"), None, "vga", scale=1), plain_model("llama")
    for layer in plain.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(0.5)
    assert_close(logits(model), logits(plain))  # the paper's own gate starts at ½


@each_pair(NAMES, list(METHODS))
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


def generate(model: PreTrainedModel, ids: torch.Tensor = IDS, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


@EVERYWHERE
def test_generates_the_same_with_the_cache_and_without(name: str, label: str) -> None:
    model = shared(name, label)
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    cached, whole = (generate(model, use_cache=use, **wanted) for use in (True, False))
    assert cached.sequences.shape == (2, 13)
    assert torch.equal(cached.sequences, whole.sequences)
    tolerance = 1e-4 if name in ("gpt_oss", "qwen3_moe", "mixtral") else 1e-5
    for ours, expected in zip(cached.logits, whole.logits, strict=True):
        assert_close(ours, expected, tolerance)
    if name == "llama":
        if label != "register-tokens":
            model = retrofitted(name, label, torch.float32)
            static = generate(model, cache_implementation="static", disable_compile=True)
            assert torch.equal(static, generate(model))
        batch = padded(ragged_tokens([9, 5]), "left")
        for beams in (1, 2):
            together = generate(model, batch.token_ids, attention_mask=batch.attention_mask, num_beams=beams)
            for row, ids in enumerate(ragged_tokens([9, 5])):
                alone = generate(model, torch.as_tensor(ids)[None], num_beams=beams)
                assert torch.equal(together[row, 9:], alone[0, len(ids) :])


@EVERYWHERE
def test_padding_changes_nothing(name: str, label: str) -> None:
    """An exception is a sliding window, which counts tokens instead of positions when the padding is inside it."""
    model, sequences = shared(name, label), ragged_tokens([9, 5, 7])
    alone = [logits(model, torch.as_tensor(ids)[None])[0] for ids in sequences]
    has_alibi = name in ("bloom", "mpt", "falcon-alibi")
    for side in ("left", "right"):
        with naming(side):
            batch = padded(sequences, side)
            inputs = {"attention_mask": batch.attention_mask}
            if not has_alibi:
                inputs["position_ids"] = batch.position_ids
            together = logits(model, batch.token_ids, **inputs)
            for row, expected in enumerate(alone):
                unpadded = together[row][batch.attention_mask[row].bool()]
                assert_close(unpadded, expected, 1e-5 if has_alibi else 1e-9)


def test_registers_keep_the_texts_length() -> None:
    model = retrofitted("llama", "register-tokens", torch.float32)
    with torch.no_grad():
        whole = model(IDS)
        assert whole.logits.shape == (2, 9, VOCAB)
        assert torch.equal(model(IDS, logits_to_keep=4).logits, whole.logits[:, -4:])
        assert torch.equal(model(IDS, logits_to_keep=11).logits, whole.logits)
        assert torch.equal(model(IDS, logits_to_keep=torch.tensor([-2, 3])).logits, whole.logits[:, [-2, 3]])
        assert torch.equal(model(IDS, return_dict=False)[0], whole.logits)
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(IDS)).logits, whole.logits)
        batch = padded(ragged_tokens([9, 5]), "left")
        for ids, mask, start in ((IDS, None, [0, 0]), (batch.token_ids, batch.attention_mask, batch.start)):
            labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
            output = model(ids, attention_mask=mask, labels=labels)
            targets = labels.clone()
            targets[torch.arange(2), start] = -100
            expected = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
            torch.testing.assert_close(output.loss, expected)


def without_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


@each_pair(["llama", "gpt2", "bloom", "gptj"], [label for label in METHODS if label != "vscale-fixed"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, label: str) -> None:
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


@pytest.mark.parametrize(("name", "label"), [("gpt2", "learnable-sink"), ("opt", "key-bias")])
def test_dropout_of_the_weights_is_kept_in_training(name: str, label: str) -> None:
    """The plain fine-tune, with which a retrofit is compared, has this dropout."""
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


@each_pair(NAMES, ["vscale", "vga", "vga-output", "iga"])
def test_tables_of_a_retrofitted_model_are_those_of_eager_attention(name: str, label: str) -> None:
    model = shared(name, label)
    sequences = ragged_tokens([10, 10, 7])
    with in_double(model):
        ours = measured(model, batched(sequences, 2), SETTINGS)
        recorded = reference.record_each(model, sequences)
    expected = reference.tables(recorded, 8, 8, 0.3)
    reference.assert_same(ours, expected, 1e-4 if name in ("bloom", "falcon-alibi", "mpt") else 1e-6)


@each_pair(
    [name for name in NAMES if TINY[name][0] not in ("bloom", "mpt", "gptj", "gpt_neo")],
    ["vscale", "vga", "vga-output", "iga-output"],
)
def test_gradient_tables_of_a_retrofitted_model_are_autograds(name: str, label: str) -> None:
    model, sequences = shared(name, label), ragged_tokens(LENGTHS)
    with in_double(model):
        expected = gradient_reference.tables(gradient_reference.record(model, sequences), 8)
    gradient_reference.assert_same(backward_tables(name, label), expected, 1e-5 if name == "falcon-alibi" else 1e-8)


LENGTHS = (10, 10, 7)


@cache
def backward_tables(name: str, label: str) -> dict[str, pd.DataFrame]:
    return gradient_tables(shared(name, label), ragged_tokens(LENGTHS))


@EVERYWHERE
def test_the_value_gradient_is_what_attention_routes_to_it(name: str, label: str) -> None:
    """∇v_s = Σ_t a[t,s] g_t at the value tap, for any change of the value before it and of the mix after it.

    The gradient before a gate or scale on values is that of its paper's equation.
    """
    tables = backward_tables(name, label)
    tolerance = 1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-9
    assert tables["gradient_check"]["identity_residual"].max() < tolerance
    identity = tables.get("gradient_identity", pd.DataFrame(columns=["pathway", "residual"]))
    raw = identity[identity["pathway"] == "raw_value"]["residual"]
    assert (len(raw) > 0) == (label in ("vga", "iga", "vscale", "vscale-fixed"))
    assert not raw.max() >= max(tolerance, 1e-7)  # the sum of two terms that nearly cancel


@each_pair(NAMES, ["learnable-sink", "key-bias"])
def test_missing_mass_is_what_the_new_denominator_takes(name: str, label: str) -> None:
    """In the first layer, where nothing else differs, the weights are the plain ones times one factor per row."""
    model, bare = shared(name, label), shared_plain(name)
    with in_double(model):
        rows, plain = rows_of(model, IDS), rows_of(bare, IDS)
    tolerance = 1e-5 if name in ("bloom", "falcon-alibi", "mpt") else 1e-10
    for weights, missing in zip(rows.weights, rows.missing, strict=True):
        assert_close(weights.sum(-1) + missing, torch.ones_like(missing), tolerance)
        assert (missing > 1e-6).any()
    expected = plain.weights[0] / plain.weights[0].sum(-1, keepdim=True) * (1 - rows.missing[0])[..., None]
    assert_close(rows.weights[0], expected, tolerance)


@pytest.mark.parametrize("name", ["gemma2", "opt", "falcon", "bloom"])
def test_registers_are_measured_as_the_first_positions(name: str) -> None:
    """The tables equal those of a plain model with three more tokens in its vocabulary, written before every text."""
    model = retrofitted(name, "register-tokens")
    sequences = ragged_tokens([10, 10, 7])
    with in_double(model):
        ours = measured(model, batched(sequences, 2, "left"), SETTINGS)
    twin = plain_model(name)
    embedding: Any = twin.get_input_embeddings()
    scale = float(getattr(embedding, "embed_scale", 1.0))
    more = model.retrofit.embeddings.detach() / scale
    embedding.weight = nn.Parameter(torch.cat([embedding.weight.detach(), more]), requires_grad=False)
    extended = [torch.cat([torch.arange(VOCAB, VOCAB + 3), torch.as_tensor(ids)]).numpy() for ids in sequences]
    with in_double(twin):
        recorded = reference.record_each(twin, extended)
    expected = reference.tables(recorded, 8, 8, 0.3)
    for table in expected.values():
        if "token_id" in table:
            table["token_id"] = table["token_id"].where(table["token_id"] < VOCAB, REGISTER)
    reference.assert_same(ours, expected, 1e-4 if name == "bloom" else 1e-7)


@pytest.mark.parametrize(
    ("name", "label"), [("llama", "vga"), ("bloom", "learnable-sink"), ("llama", "register-tokens")]
)
def test_interventions_act_on_a_retrofitted_model(name: str, label: str) -> None:
    """No later token sees position 0, which is the first register if there are registers."""
    model = retrofitted(name, label, torch.float32)
    before = logits(model)
    with intervening(model, "mask-sink"):
        masked = logits(model)
        assert torch.equal(generate(model), generate(model, use_cache=False))
    assert torch.equal(logits(model), before)
    assert (masked - before).abs().max() > 1e-3 * before.abs().max()
    if label == "register-tokens":  # a change of that register has no effect, because no token sees it
        model.retrofit.embeddings.data[0] += 1.0
        with intervening(model, "mask-sink"):
            assert_close(logits(model), masked, 1e-5)


def test_unknown_methods_and_parameters_are_refused() -> None:
    model = tiny_model("llama")
    for method, parameters, words in (
        ("vgaa", {}, "retrofit 'vgaa' is unknown; did you mean 'vga'"),
        ("vga", {"placment": "value"}, "vga: parameter 'placment' is unknown; did you mean 'placement'"),
        ("vga", {"placement": "key"}, "vga: placement: input should be 'value' or 'output'"),
        ("vscale", {"strength": 0}, "λ = exp.θ. is never 0"),
        ("register-tokens", {"count": 0}, "register-tokens: count: "),
        ("operation", {"kind": "sigmiod"}, "operation: kind: 'sigmiod' is unknown; did you mean 'sigmoid'"),
        ("operation", {"kind": "sigmoid", "power": 2}, "power belongs to kind=softmax"),
        ("key-bias", {"norm": 2.0}, "norm applies only to value=axis"),
        ("gradient-valve", {"acts": "values", "position": 0}, "acts=values acts at all positions"),
        ("gradient-valve", {"control": True}, "control=true changes .*: give position"),
    ):
        with pytest.raises(InputError, match=words):
            retrofit_model(model, None, method, **parameters)
    assert model.config.model_type == "llama"
    assert not new_parameters(model)


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
    for method in ("vga", "vscale"):
        with pytest.raises(InputError, match=f"retrofitted with vga already: apply {method} to the model it was made"):
            retrofit_model(shared("llama", "vga"), None, method)
    bloom = retrofit_model(tiny_model("bloom"), None, "vga", placement="output")
    for layer in bloom.transformer.h:  # the output projection is not called
        layer.self_attention.slow_but_exact, layer.self_attention.pretraining_tp = True, 2
    with pytest.raises(SinkscopeError, match="output projection was not called"):
        bloom(IDS)


def test_the_displacement_of_a_gate_is_by_head() -> None:
    model = retrofit_model(tiny_model("llama"), None, "vga")
    gate: Any = model.get_submodule(next(iter(parts_of(model))))
    gate.weight.data[:, 1] += 3.0
    moved = gate_displacement(model).query("displacement > 0")
    assert moved[["layer", "head"]].to_numpy().tolist() == [[0, 1]]
    assert moved["displacement"].item() == pytest.approx(3.0 * len(gate.weight) ** 0.5)
