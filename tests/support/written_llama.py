"""A Llama written out in torch, with points at which numbers can be changed."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Change = Callable[[str, torch.Tensor], torch.Tensor]


def as_it_is(name: str, x: torch.Tensor) -> torch.Tensor:
    return x


def llama(
    model: PreTrainedModel, ids: torch.Tensor, at: Change, weight: Change, cached: Change = as_it_is
) -> torch.Tensor:
    """Return logits (B,T,V) of a Llama.

    `at` is called with every activation that may be quantized, `weight` with weights, `cached` with keys and values
    (B,Hkv,T,D).
    """
    config, inner = model.config, model.model
    width, groups = config.hidden_size // config.num_attention_heads, config.num_key_value_heads
    length = ids.shape[1]
    forbidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return at(
            f"{name} output", F.linear(at(f"{name} input", x), weight(name, model.get_parameter(f"{name}.weight")))
        )

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    table = weight("model.embed_tokens", inner.embed_tokens.weight)
    hidden = at("layer 0 layer_in", at("model.embed_tokens output", table[ids]))
    turns = inner.rotary_emb(hidden, torch.arange(length)[None])
    for number, layer in enumerate(inner.layers):
        name = f"model.layers.{number}"
        x = norm(hidden, layer.input_layernorm.weight)
        query, key, value = (heads(linear(f"{name}.self_attn.{part}_proj", x)) for part in "qkv")
        query, key = apply_rotary_pos_emb(query, key, *turns)
        key, value = cached(f"layer {number} keys", key), cached(f"layer {number} values", value)
        key, value = (part.repeat_interleave(query.shape[1] // groups, dim=1) for part in (key, value))
        scores = at(f"layer {number} scores", query @ key.transpose(-1, -2) / width**0.5)
        weights = at(f"layer {number} softmax", scores.masked_fill(forbidden, -torch.inf).softmax(-1))
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        hidden = at(f"layer {number} mid", hidden + linear(f"{name}.self_attn.o_proj", mixed))
        x = norm(hidden, layer.post_attention_layernorm.weight)
        gated = F.silu(linear(f"{name}.mlp.gate_proj", x)) * linear(f"{name}.mlp.up_proj", x)
        hidden = at(f"layer {number} layer_out", hidden + linear(f"{name}.mlp.down_proj", gated))
    return F.linear(norm(hidden, inner.norm.weight), model.lm_head.weight)
