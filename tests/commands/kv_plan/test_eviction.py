"""Attention over evicting heads equals transformers' own attention under a mask that hides the evicted tokens."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokens

from sinkscope.attention.kernels import AttentionCall
from sinkscope.attention.seam import open_seam
from sinkscope.commands.kv_plan.caches import attending_with_plans
from sinkscope.commands.kv_plan.eviction import evicting_attention, of_sequences
from sinkscope.commands.kv_plan.plan import NO_SINKS, Plan, snap_rotated
from sinkscope.models.families import find_family

WINDOWS = {"llama": [3, 24], "mistral": [2, 6], "gemma2": [2, 24], "gpt_oss": [1, 5], "gpt2": [9, 9, 1, 24]}
SINKS = [0, 11]


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWS)
def test_equals_a_masked_model(name: str) -> None:
    model, ids, windows = tiny_model(name, dtype=torch.float64, spread=6.0), tiny_tokens(1), WINDOWS[name]
    if name != "mistral":
        model.config.sliding_window = 64  # one mask for all layers
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    plan = Plan("", torch.tensor(windows).expand(layers, -1).numpy(), torch.full((layers, 2), 16).numpy())
    with open_seam(model, find_family(model)) as seams, attending_with_plans(seams, [plan], [SINKS]):
        mine = model(ids, use_cache=False).logits
    query, key = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    is_near = query - key < torch.tensor(windows)[:, None, None]
    seen = (key <= query) & (is_near | torch.isin(key, torch.tensor(SINKS)))
    if name == "mistral":  # looks back 6 tokens in all layers, also for sinks
        seen = seen & (query - key < 6)
    seen = seen.repeat_interleave(heads // len(windows), dim=0)[None]
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=hidden, use_cache=False).logits
    assert float((mine - expected).abs().max() / expected.abs().max()) < 1e-5


@torch.no_grad()
def test_values_have_bits_of_their_own_and_each_layer_its_center() -> None:
    model, ids = tiny_model("llama", dtype=torch.float64, spread=6.0), tiny_tokens(1)
    plan = Plan("", torch.full((3, 2), 24).numpy(), torch.tensor([[16, 4]]).expand(3, -1).numpy())
    shifts = torch.randn(3, 2, 8, dtype=torch.float64)
    centers = {layer: [torch.zeros(2, 1, 8), shift[:, None]] for layer, shift in enumerate(shifts)}
    with open_seam(model, find_family(model)) as seams, attending_with_plans(seams, [plan], [()], centers):
        mine = model(ids, use_cache=False).logits

    def rounded(shift: torch.Tensor, module: Any, args: tuple, values: torch.Tensor) -> torch.Tensor:
        return (snap_rotated(4, values.unflatten(-1, (2, -1)) - shift) + shift).flatten(-2)

    for layer, shift in zip(model.model.layers, shifts, strict=True):
        layer.self_attn.v_proj.register_forward_hook(partial(rounded, shift))
    torch.testing.assert_close(mine, model(ids, use_cache=False).logits)


def test_the_call_of_one_sequence() -> None:
    masks, sinks, shared = torch.rand(3, 1, 5, 5), torch.rand(3, 2, 5), torch.rand(2)
    call = of_sequences(AttentionCall(masks, 1.0, sink_logits=sinks), slice(1, 2))
    assert torch.equal(call.mask, masks[1:2])
    assert torch.equal(call.sink_logits, sinks[1:2])
    call = of_sequences(AttentionCall(masks[:1], 1.0, sink_logits=shared), slice(1, 2))
    assert torch.equal(call.mask, masks[:1])
    assert call.sink_logits is shared


def test_nothing_is_evicted_from_whole_heads() -> None:
    model, ids = tiny_model("llama"), tiny_tokens(1)
    plan = Plan("", torch.full((3, 2), 24).numpy(), torch.full((3, 2), 16).numpy(), NO_SINKS)
    with open_seam(model, find_family(model)) as seams, torch.no_grad():
        dense = model(ids, use_cache=False).logits
        with attending_with_plans(seams, [plan], [()]):
            assert torch.equal(model(ids, use_cache=False).logits, dense)


def test_blocks_of_queries_agree() -> None:
    query, key, value = (torch.randn(1, heads, 900, 8, dtype=torch.float64) for heads in (4, 2, 2))
    call, sinks = AttentionCall(None, 0.3), (0, 5, 700)
    mix, lse = evicting_attention(query, key, value, call, [[40, 900]], [sinks])
    tokens = torch.arange(900)
    apart = tokens[:, None] - tokens
    seen = (apart >= 0) & ((apart < 40) | torch.isin(tokens, torch.tensor(sinks)))
    logits = (0.3 * query[:, :2] @ key[:, :1].mT).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse[:, :2], logits.logsumexp(-1))
    torch.testing.assert_close(mix[:, :2], logits.softmax(-1) @ value[:, :1])


@pytest.mark.parametrize("has_bias", [False, True], ids=["no mask", "a bias of each head"])
@pytest.mark.parametrize("sinks", [None, torch.randn(4), torch.randn(2, 4, 12)], ids=["none", "of heads", "of rows"])
def test_rows_and_heads_keep_what_is_theirs(has_bias: bool, sinks: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 12, 8, dtype=torch.float64) for heads in (4, 2, 2))
    tokens, windows, kept = torch.arange(12), [[3, 12], [5, 3]], [(0, 4), (1,)]
    bias = torch.randn(1, 4, 12, 12, dtype=torch.float64).masked_fill(tokens[:, None] < tokens, -1e30)
    call = AttentionCall(bias if has_bias else None, 0.3, sink_logits=None if sinks is None else sinks.double())
    mix, lse = evicting_attention(query, key, value, call, windows, kept)
    logits = 0.3 * query @ key.repeat_interleave(2, 1).mT + (bias if has_bias else 0)
    for row, head in itertools.product(range(2), range(4)):
        is_near = tokens[:, None] - tokens < windows[row][head // 2]
        seen = (tokens[:, None] >= tokens) & (is_near | torch.isin(tokens, torch.tensor(kept[row])))
        expected = logits[row, head].masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[head].expand(12) if sinks.dim() == 1 else sinks.double()[row, head]
            expected = torch.cat([expected, sink[:, None]], dim=1)
        torch.testing.assert_close(lse[row, head], expected.logsumexp(-1))
        torch.testing.assert_close(mix[row, head], expected.softmax(-1)[:, :12] @ value[row, head // 2])
