"""Measurements on the Bigram-Backcopy task, compared with those computed from a model's weights in float64."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import layer_norm
from transformers import AutoConfig, AutoModelForCausalLM

from sinkscope.commands.train.architectures import architecture, fresh_model
from sinkscope.commands.train.tasks.backcopy import BackcopyTask, Opening, chain_of, example, measure_chain, risks
from sinkscope.models.families import find_family
from sinkscope.results.metrics import BACKCOPY
from sinkscope.retrofits import new_parameters, retrofit_model
from sinkscope.text.batch import Batch

TASK = chain_of()
HELD_OUT = TASK.sample(70, 12, seed=7)  # more than are measured at once
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("none", {}),
    "vga-value": ("vga", {"placement": "value"}),
    "vga-output": ("vga", {"placement": "output", "scale": 1.0}),
    "iga-value": ("iga", {"placement": "value", "scale": 1.0}),
    "iga-output": ("iga", {"placement": "output"}),
    "vscale": ("vscale", {}),
}
REGISTERS: dict[str, tuple[str, dict[str, Any]]] = {"registers": ("register-tokens", {"count": 2})}
GPT2 = {"n_positions": 12, "n_embd": 16, "n_head": 2, "n_layer": 1}
LLAMA = {
    "max_position_embeddings": 12, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "intermediate_size": 24,
}  # fmt: skip


def built(kind: str, sizes: dict, arm: str) -> Any:
    """Return a model in float64, with weights and gates wide enough to distinguish heads and tokens."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=len(TASK.tokens), bos_token_id=0, eos_token_id=None, initializer_range=0.5, **sizes
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    model.requires_grad_(False)
    method, parameters = (ARMS | REGISTERS)[arm]
    retrofit_model(model, None, method, **parameters)
    for parameter in new_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def as_series(table: pd.DataFrame) -> pd.Series:
    return table.set_index(["layer", "metric"])["value"]


def by_hand(model: Any, arm: str, opening: int) -> dict[str, float]:
    """Compute the metrics of one layer of GPT-2 from its weights and its output; an opening is not measured."""
    block, ids = model.transformer.h[0], torch.from_numpy(HELD_OUT)
    output = model(ids, output_attentions=True)
    weights, out = output.attentions[0], output.logits.log_softmax(-1)
    h = model.transformer.wte.weight[ids] + model.transformer.wpe.weight[: ids.shape[1]]
    x = layer_norm(h, (16,), block.ln_1.weight, block.ln_1.bias, 1e-5)
    projected = x @ block.attn.c_attn.weight + block.attn.c_attn.bias  # without the retrofit's hook
    query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in projected.split(16, dim=-1))
    logits = query @ key.transpose(-1, -2) / np.sqrt(8)

    gates = torch.ones(*ids.shape, 2, dtype=torch.float64)
    if arm.startswith(("vga", "iga")):
        read = value.transpose(1, 2).flatten(2) if arm.startswith("vga") else x
        gates = ARMS[arm][1].get("scale", 2.0) * torch.sigmoid(read @ block.attn.retrofit.weight)
    if arm == "vscale":
        r = value.square().sum(-1)
        gates = (r / (r + (8 * 0.02) ** 2 * block.attn.retrofit.theta.exp()[:, None])).transpose(1, 2)
    attended = value
    if not arm.endswith("output"):
        attended, gates = value * gates.transpose(1, 2)[..., None], torch.ones_like(gates)

    entries: dict[str, list[float]] = {metric: [] for metric in BACKCOPY}
    to_start: list[list[float]] = [[], []]
    for n in range(len(ids)):
        for t in (0, *range(max(1, opening), ids.shape[1])):
            token = int(ids[n, t])
            trigger = token in TASK.triggers
            norms = (value[n, :, t].norm().item(), attended[n, :, t].norm().item())
            for name, norm in zip(("value", "attended"), norms, strict=True):
                kind = "start" if t == 0 else "trigger" if trigger else "other"
                entries[f"{kind}_{name}_norm"].append(norm)
            if t == 0:
                continue
            for head in (0, 1):
                weight = weights[n, head, t, 0].item()
                entries[f"{'trigger_' if trigger else ''}attention_to_start"].append(weight)
                entries[f"{'trigger' if trigger else 'plain'}_output_gate"].append(gates[n, t, head].item())
                if not trigger:
                    to_start[head].append(weight)
                    seen = [s for s in range(opening, t) if int(ids[n, s]) in TASK.triggers]
                    entries["attention_to_triggers"].append(weights[n, head, t, seen].sum().item())
                    if not seen:
                        entries["early_attention_to_start"].append(weight)
                    row = logits[n, head, t]
                    entries["delta_logit"].append((row[0] - row[1 : t + 1].mean()).item())
            if trigger:
                entries["backcopy_risk"].append(-out[n, t, ids[n, t - 1]].item())
            else:
                p = TASK.transitions[token]
                entries["bigram_risk"].append(
                    sum(p[v] * (np.log(p[v]) - out[n, t, v].item()) for v in np.nonzero(p)[0])
                )
    means = {metric: float(np.mean(values)) for metric, values in entries.items() if values}
    return means | {"attention_to_start_max": max(float(np.mean(head)) for head in to_start)}


@pytest.mark.parametrize(("arm", "opening"), [*((arm, 0) for arm in ARMS), ("vanilla", 4)])
def test_every_metric_is_what_the_weights_give(arm: str, opening: int) -> None:
    model = built("gpt2", GPT2, arm)
    with torch.no_grad():
        expected = by_hand(model, arm, opening)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    measured = measure_chain(TASK, model, find_family(model), HELD_OUT, opening)
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert set(measured["metric"]) == set(BACKCOPY) == set(expected)
    assert set(measured.loc[measured["metric"].str.endswith("risk"), "layer"]) == {-1}
    assert measured.set_index("metric")["value"].to_dict() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("arm", ["vanilla", "vga-output", "registers"])
def test_several_layers_with_grouped_heads_and_rotary_positions(arm: str) -> None:
    model = built("llama", LLAMA, arm)
    with torch.no_grad():
        output = model(torch.from_numpy(HELD_OUT), output_attentions=True)
    measured = as_series(measure_chain(TASK, model, find_family(model), HELD_OUT))
    plain = torch.from_numpy(~TASK.is_trigger(HELD_OUT))
    plain[:, 0] = False
    text = slice(-HELD_OUT.shape[1], None)  # without registers
    for layer, (weights, cache) in enumerate(zip(output.attentions, output.past_key_values.layers, strict=True)):
        norms = cache.values[:, :, text].norm(dim=(1, 3))
        assert measured[layer, "start_value_norm"] == pytest.approx(norms[:, 0].mean().item())
        a = weights[:, :, text, text]
        # the softmax's denominator falls out of a difference of logarithms
        logs = a.log()
        lead = torch.stack([logs[:, :, t, 0] - logs[:, :, t, 1 : t + 1].mean(-1) for t in range(a.shape[2])], dim=-1)
        assert measured[layer, "attention_to_start"] == pytest.approx(a[..., 0].movedim(1, -1)[plain].mean().item())
        expected = lead.movedim(1, -1)[plain].mean().item()
        assert measured[layer, "delta_logit"] == pytest.approx(expected, abs=1e-6)  # Llama's softmax is in float32


def test_a_prefix_and_an_opening_are_not_measured_in_the_first_sequences() -> None:
    prefix_lm = fresh_model(architecture(f"bigram-backcopy-llama:prefix_length=4,vocab_size={len(TASK.tokens)}"), 0)
    without, explicit = (measure_chain(TASK, prefix_lm, find_family(prefix_lm), HELD_OUT, n) for n in (1, 4))
    pd.testing.assert_frame_equal(without, explicit)
    model = built("gpt2", GPT2, "vanilla")
    probed = BackcopyTask(Opening(fixed_position=3), TASK).probe(model, find_family(model), HELD_OUT)
    pd.testing.assert_frame_equal(probed, measure_chain(TASK, model, find_family(model), HELD_OUT[:64], 4))


def test_the_tasks_own_probabilities_risk_nothing() -> None:
    ids = torch.from_numpy(HELD_OUT)
    copied = torch.nn.functional.one_hot(ids.roll(1, dims=1), len(TASK.tokens)).double()
    trigger = torch.from_numpy(TASK.is_trigger(HELD_OUT))
    p = torch.where(trigger[..., None], copied, torch.from_numpy(TASK.transitions)[ids])
    batch = Batch(ids, torch.ones_like(ids))
    for values in risks(TASK, p.clamp(min=1e-300).log(), batch).values():
        assert values.abs().max() < 1e-12
    # a model that gives every token the same chance
    even = risks(TASK, torch.zeros(*ids.shape, len(TASK.tokens)), batch)
    plain = ~trigger.numpy()
    plain[:, 0] = False
    p = TASK.transitions[HELD_OUT[plain]]
    excess = np.log(len(TASK.tokens)) + (p * np.log(p.clip(min=1e-300))).sum(1)
    assert even["bigram_risk"].numpy() == pytest.approx(excess, rel=1e-6)
    assert even["backcopy_risk"].numpy() == pytest.approx(np.log(len(TASK.tokens)), rel=1e-6)


@pytest.mark.parametrize("arm", ["vga-value", "iga-output"])
def test_one_sequence_seen_closely(arm: str) -> None:
    model = built("gpt2", GPT2, arm)
    tables = example(TASK, model, find_family(model), HELD_OUT[0])
    with torch.no_grad():
        weights = model(torch.from_numpy(HELD_OUT[:1]), output_attentions=True).attentions[0][0]
    maps = tables["attention_maps"]
    assert len(maps) == 2 * 12 * 13 / 2
    index = (maps["head"].to_numpy(), maps["query"].to_numpy(), maps["key"].to_numpy())
    assert np.allclose(maps["weight"], weights.numpy()[index], atol=1e-12)
    assert (maps["token_id"].to_numpy() == HELD_OUT[0][maps["key"]]).all()
    norms, all_norms = tables["value_norms"], as_series(measure_chain(TASK, model, find_family(model), HELD_OUT[:1]))
    assert norms["position"].tolist() == list(range(12))
    for column, name in (("norm", "value"), ("attended_norm", "attended")):
        assert norms[column][0] == pytest.approx(all_norms[0, f"start_{name}_norm"])
        triggers = norms["is_trigger"]
        assert norms[column][triggers].mean() == pytest.approx(all_norms[0, f"trigger_{name}_norm"])
        assert norms[column][~triggers][1:].mean() == pytest.approx(all_norms[0, f"other_{name}_norm"])
    assert np.allclose(norms["norm"], norms["attended_norm"]) == (arm != "vga-value")
