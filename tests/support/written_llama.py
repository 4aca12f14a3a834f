"""A Llama written out in torch, also with the parts of `varied_llama`, and with points at which numbers can change."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

Change = Callable[[str, torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {  # whether it is gated, and by what
    "swiglu": (True, silu := lambda x: x / (1 + torch.exp(-x))),
    "geglu": (True, gelu := lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2),
    "reglu": (True, relu := lambda x: x * (x > 0)),
    "swish": (False, silu),
    "gelu": (False, gelu),
    "relu": (False, relu),
}


def as_it_is(name: str, x: torch.Tensor) -> torch.Tensor:
    return x


def llama(
    model: PreTrainedModel, ids: torch.Tensor, at: Change, weight: Change = as_it_is, cached: Change = as_it_is
) -> torch.Tensor:
    """Return logits (B,T,V) as a function of the model's parameters.

    `at` is called with every activation that may be quantized, among them each layer's attention weights (B,H,T,T),
    `weight` with weights, `cached` with keys and values (B,Hkv,T,D).
    """
    config, length = model.config, ids.shape[1]
    scheme, window = getattr(config, "position_scheme", "rotary"), getattr(config, "sliding_window", None) or length
    is_post_norm = getattr(config, "norm_placement", "pre") == "post"
    is_gated, activation = ACTIVATIONS[getattr(config, "feed_forward", "swiglu")]
    is_varied = config.model_type == "varied_llama"
    norms = ("attention_norm", "mlp_norm") if is_varied else ("input_layernorm", "post_attention_layernorm")
    width = config.hidden_size // config.num_attention_heads
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < window) | (torch.arange(length) < getattr(config, "prefix_length", 0))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(at(f"{name} input", x), weight(name, model.get_parameter(f"{name}.weight")))
        return at(f"{name} output", x)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        root = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return model.get_parameter(f"{name}.weight") * x / root

    def attend(number: int, x: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{number}.self_attn"
        parts = (linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, width)).transpose(1, 2) for part in "qkv")
        query, key, value = parts
        if scheme == "rotary":
            query, key = rotated(query), rotated(key)
        key, value = cached(f"layer {number} keys", key), cached(f"layer {number} values", value)
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        scores = at(f"layer {number} scores", query @ key.mT / width**0.5) + bias_of(model, distance)
        weights = at(f"layer {number} softmax", scores.masked_fill(~seen, -torch.inf).softmax(-1))
        mixes = weights @ value
        if getattr(config, "head_mix", "concatenated") == "summed":
            return linear(f"{name}.o_proj.projection", mixes.sum(1))
        return linear(f"{name}.o_proj", mixes.transpose(1, 2).flatten(2))

    def feed_forward(number: int, x: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{number}.mlp"
        up = linear(f"{name}.up_proj", x)
        inner = activation(linear(f"{name}.gate_proj", x)) * up if is_gated else activation(up)
        return linear(f"{name}.down_proj", inner)

    hidden = at("model.embed_tokens output", weight("model.embed_tokens", model.get_input_embeddings().weight)[ids])
    if scheme == "learned":
        hidden = hidden + model.get_parameter("model.positions.embedding.weight")[:length]
    if scheme == "absolute":
        half = hidden.shape[-1] // 2
        angles = [[t / 10_000 ** (i / half) for i in range(half)] for t in range(length)]
        waves = torch.tensor(angles, dtype=torch.float64)
        hidden = hidden + torch.cat([waves.sin(), waves.cos()], dim=-1)
    hidden = at("layer 0 layer_in", hidden)
    for number in range(config.num_hidden_layers):
        for branch, name, end in zip((attend, feed_forward), norms, ("mid", "layer_out"), strict=True):
            of_norm = f"model.layers.{number}.{name}"
            hidden = hidden + branch(number, hidden if is_post_norm else norm(of_norm, hidden))
            hidden = at(f"layer {number} {end}", norm(of_norm, hidden) if is_post_norm else hidden)
    return F.linear(hidden if is_post_norm else norm("model.norm", hidden), model.lm_head.weight)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate the plane of coordinates i and i + d/2 by t · 10000^(-2i/d), with these frequencies in float32."""
    half = x.shape[-1] // 2
    frequencies = torch.from_numpy(1 / np.float32(10_000) ** (np.arange(half, dtype=np.float32) / half))
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequencies  # in float64 under `only_float64`
    cos, sin, first, second = angles.cos().double(), angles.sin().double(), x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def bias_of(model: PreTrainedModel, distance: torch.Tensor) -> torch.Tensor | float:
    """Return the bias on the logits for distances t − s (T,T): (H,T,T), or 0."""
    heads = torch.arange(model.config.num_attention_heads)[:, None, None]
    buckets = torch.tensor([[bucket_by_hand(max(0, one)) for one in row] for row in distance.tolist()])
    biases: dict[str, Callable[[], torch.Tensor]] = {
        "alibi": lambda: -(2.0 ** (-8 * (heads.double() + 1) / len(heads))) * distance,
        "bucket-number": lambda: buckets.double(),
        "relative": lambda: model.get_parameter("model.positions.by_bucket.weight")[buckets, heads],
    }
    return biases.get(getattr(model.config, "position_scheme", "rotary"), float)()


def bucket_by_hand(distance: int) -> int:
    """Return T5's bucket: 16 for distances 0 … 15, and 16 logarithmic ones up to 128."""
    return distance if distance < 16 else min(31, 16 + int(math.log(distance / 16) / math.log(8) * 16))
