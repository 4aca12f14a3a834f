"""`varied_llama`: Llama's block with exchangeable parts, to train from scratch (WSE §6 and §7).

    positions      none, absolute, learned, relative (T5), ALiBi, rotary (WSE §7.1, table 3)
    norms          before each branch, or after its sum with the residual stream (post-norm); a scale per channel or one
    feed-forward   gated by SiLU, GELU or ReLU, or a plain network of these
    heads          concatenated before the output projection, or summed
    attention      to all earlier tokens, to a window of them, or also among the tokens of a prefix

With all fields at their defaults it is Llama, except for the initialization, which is that of WSE's released code.

A position scheme does one of three things: it adds vectors to the token embeddings, rotates queries and keys, or adds a
bias to the logits. Rotations and added vectors depend on the position, biases only on the distance t - s. A bias is
made once for all layers, and is the only tensor that grows with T × T: (1,H,T,T).
"""

import math
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from sinkscope.errors import InputError, unknown

BASE = 10_000.0  # base of the wavelengths of sinusoidal positions (Vaswani et al. 2017)
BUCKETS, MAX_DISTANCE = 32, 128  # from T5 (Raffel et al. 2020), as in WSE's code


class PositionScheme(nn.Module):
    """No positions at all (NoPE), and the base class of the other schemes."""

    kind: ClassVar[str] = "none"  # the kind that attention/position_kinds.py finds

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def added(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the vectors (B|1,T,D) to add to token embeddings x (B,T,D) at positions (B|1,T)."""
        return None

    def rotation(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines (B|1,T,d) that rotate queries and keys, here by 0, for the same arguments."""
        shape = (*position_ids.shape, self.config.head_dim)
        return x.new_ones(shape), x.new_zeros(shape)

    def bias(self, distance: torch.Tensor) -> torch.Tensor | None:
        """Return the bias on the logits for distances t - s (T,S): (1,H,T,S); undefined where s > t."""
        return None


class Absolute(PositionScheme):
    """p[t] = (sin(t ω_0), …, sin(t ω_(D/2-1)), cos(t ω_0), …), ω_i = BASE^(-2i/D), added to the token embeddings."""

    kind: ClassVar[str] = "sinusoidal"

    def added(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        steps = torch.arange(0, width, 2, device=x.device, dtype=torch.float64)
        angles = position_ids[..., None] * BASE ** (-steps / width)
        return torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)


class Learned(PositionScheme):
    """A learned vector for each position, added to the token embeddings."""

    kind: ClassVar[str] = "learned"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def added(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(position_ids)


class Rotary(PositionScheme):
    """Queries and keys rotated by their positions (Su et al. 2021)."""

    kind: ClassVar[str] = "rotary"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def rotation(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotary_emb(x, position_ids)


class Relative(PositionScheme):
    """A learned bias for each head and bucket of distances, the same in all layers (T5)."""

    kind: ClassVar[str] = "relative"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.by_bucket = nn.Embedding(BUCKETS, config.num_attention_heads)

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        return self.by_bucket(bucket(distance)).permute(2, 0, 1)[None]


class BucketNumber(PositionScheme):
    """The number of the distance's bucket as bias, which favors distant keys.

    WSE's released code computes this for its "relative" model, whose loss is the worst of table 3.
    """

    kind: ClassVar[str] = "relative"

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        return bucket(distance)[None, None].expand(1, self.config.num_attention_heads, -1, -1)


class Alibi(PositionScheme):
    """m_h (s - t), with a slope for each head (Press et al. 2022)."""

    kind: ClassVar[str] = "alibi"

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        slopes = distance.new_tensor(alibi_slopes(self.config.num_attention_heads), dtype=torch.float64)
        return -slopes[:, None, None] * distance[None]


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """Return T5's bucket of a distance to an earlier key; 0 for later keys.

    Distances below BUCKETS/2 have their own bucket, larger ones share buckets of logarithmic width up to MAX_DISTANCE.
    """
    distance, exact = distance.clamp(min=0), BUCKETS // 2
    further = (distance.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact) * (BUCKETS - exact)
    return torch.where(distance < exact, distance, (exact + further.long()).clamp(max=BUCKETS - 1))


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes 2^(-8h/H) for h = 1 … H."""
    # if H is not a power of two: the slopes of the next smaller power, then every second one of the next larger power
    smaller = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * head / smaller) for head in range(1, smaller + 1)]
    further = [2 ** (-8 * head / (2 * smaller)) for head in range(1, 2 * (heads - smaller), 2)]
    return slopes + further


POSITION_SCHEMES: dict[str, type[PositionScheme]] = {
    "none": PositionScheme,
    "absolute": Absolute,
    "learned": Learned,
    "relative": Relative,
    "bucket-number": BucketNumber,
    "alibi": Alibi,
    "rotary": Rotary,
}


MODEL_TYPE = "varied_llama"

# name → (whether a second projection multiplies the activation, activation)
FEED_FORWARDS: dict[str, tuple[bool, str]] = {
    "swiglu": (True, "silu"),
    "geglu": (True, "gelu"),
    "reglu": (True, "relu"),
    "swish": (False, "silu"),
    "gelu": (False, "gelu"),
    "relu": (False, "relu"),
}
CHOICES: dict[str, Collection[str]] = {
    "position_scheme": POSITION_SCHEMES,
    "norm_placement": ("pre", "post"),
    "norm_scale": ("channel", "single"),
    "feed_forward": FEED_FORWARDS,
    "head_mix": ("concatenated", "summed"),
}


class SummedHeads(nn.Module):
    """One projection (d → D) of the sum of all heads; the input is their concatenation (…,H·d)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.projection = nn.Linear(config.head_dim, config.hidden_size, bias=False)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return self.projection(heads.unflatten(-1, (-1, self.head_dim)).sum(-2))


@strict
class VariedLlamaConfig(LlamaConfig):
    """Llama's configuration with a name for each exchangeable part."""

    model_type = MODEL_TYPE

    position_scheme: str = "rotary"
    # "pre": norms before the branches; "post": after their sum with the residual stream, and none after the last layer
    norm_placement: str = "pre"
    norm_scale: str = "channel"  # a learned scale for each channel, or one for all (SSNorm, Park et al. 2025)
    feed_forward: str = "swiglu"  # also decides `hidden_act`; the width is always `intermediate_size`
    head_mix: str = "concatenated"  # whether the output projection reads all heads, or their sum ("summed")
    sliding_window: int | None = None  # the number of tokens that a query sees, itself included; None: all
    prefix_length: int = 0  # the number of first tokens that are visible to all others (prefix LM)
    # the standard deviation of all weights before training; None: as in WSE's released code
    initializer_range: float | None = None  # type: ignore[assignment]
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for field, known in CHOICES.items():
            if getattr(self, field) not in known:
                raise ValueError(f"{field} {unknown(getattr(self, field), known)}")
        if self.prefix_length < 0 or (self.prefix_length and self.sliding_window is not None):
            raise ValueError("prefix_length is a number of tokens, and cannot be combined with sliding_window")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError("sliding_window is at least 1: a query sees itself")
        self.hidden_act = FEED_FORWARDS[self.feed_forward][1]
        self.attention_bias = self.mlp_bias = False
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        self.layer_types = [kind] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @property
    def kind_of_positions(self) -> str:
        """The scheme's name in the table of families."""
        return POSITION_SCHEMES[self.position_scheme].kind


class VariedLlamaAttention(LlamaAttention):
    """Llama's attention, whose output projection reads the concatenated heads or their sum."""

    def __init__(self, config: VariedLlamaConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)  # Llama's would draw random weights for an output projection that may be replaced
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim: int = config.head_dim  # type: ignore[assignment]  # `__post_init__` has set it
        key_heads: int = config.num_key_value_heads  # type: ignore[assignment]
        self.num_key_value_groups = config.num_attention_heads // key_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        inputs = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inputs, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_heads * self.head_dim, bias=False)
        is_summed = config.head_mix == "summed"
        self.o_proj: Any = SummedHeads(config) if is_summed else nn.Linear(inputs, config.hidden_size, bias=False)


class VariedLlamaFeedForward(nn.Module):
    """down(act(gate x) ∘ up x), or down(act(up x)) without a gate."""

    def __init__(self, config: VariedLlamaConfig) -> None:
        super().__init__()
        gated, activation = FEED_FORWARDS[config.feed_forward]
        inner, outer = config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Linear(outer, inner, bias=False) if gated else None
        self.up_proj = nn.Linear(outer, inner, bias=False)
        self.down_proj = nn.Linear(inner, outer, bias=False)
        self.down_proj.deviation = inner**-0.5 / config.num_hidden_layers  # standard deviation of its initial weights
        self.act_fn = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(x)) * up)


def norm_of(config: VariedLlamaConfig) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    if config.norm_scale == "single":
        norm.weight = nn.Parameter(torch.ones(1))
    return norm


class VariedLlamaLayer(GradientCheckpointingLayer):
    """Two branches, attention and feed-forward, with norms before or after them."""

    def __init__(self, config: VariedLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_post_norm = config.norm_placement == "post"
        self.self_attn = VariedLlamaAttention(config, layer_idx)
        self.mlp = VariedLlamaFeedForward(config)
        self.attention_norm, self.mlp_norm = norm_of(config), norm_of(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.is_post_norm:
            mid = self.attention_norm(hidden_states + self.self_attn(hidden_states, **kwargs)[0])
            return self.mlp_norm(mid + self.mlp(mid))
        mid = hidden_states + self.self_attn(self.attention_norm(hidden_states), **kwargs)[0]
        return mid + self.mlp(self.mlp_norm(mid))


class VariedLlamaPreTrainedModel(LlamaPreTrainedModel):
    config: VariedLlamaConfig
    config_class = VariedLlamaConfig
    _no_split_modules = ["VariedLlamaLayer"]  # noqa: RUF012
    _supports_flash_attn = False  # biases are in the mask
    _supports_flex_attn = False
    _can_compile_fullgraph = False
    _can_record_outputs = {"hidden_states": VariedLlamaLayer, "attentions": VariedLlamaAttention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as WSE's released code, N(0, 2/(5n)) for n inputs or with a module's `deviation`, or as Llama."""
        super()._init_weights(module)
        if self.config.initializer_range is None and isinstance(module, nn.Linear | nn.Embedding):
            usual = (2 / (5 * module.weight.shape[1])) ** 0.5
            init.normal_(module.weight, std=getattr(module, "deviation", usual))


class VariedLlamaModel(VariedLlamaPreTrainedModel):
    def __init__(self, config: VariedLlamaConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.positions = POSITION_SCHEMES[config.position_scheme](config)
        self.layers = nn.ModuleList([VariedLlamaLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.Identity() if config.norm_placement == "post" else norm_of(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions = past + torch.arange(x.shape[1], device=x.device)
        position_ids = positions[None] if position_ids is None else position_ids
        inputs = {"config": self.config, "inputs_embeds": x, "position_ids": position_ids}
        mask = self._mask(positions, attention_mask=attention_mask, past_key_values=past_key_values, **inputs)
        rotation, added = self.positions.rotation(x, position_ids), self.positions.added(x, position_ids)
        x = x if added is None else x + added
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=rotation, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)

    def _mask(self, positions: torch.Tensor, **inputs: Any) -> torch.Tensor | None:
        """Return the mask of queries at positions (T,), with the scheme's bias on the logits."""
        x, cache, attention_mask = (inputs[name] for name in ("inputs_embeds", "past_key_values", "attention_mask"))
        keys, first = cache.get_mask_sizes(len(positions), 0) if cache is not None else (len(positions), 0)
        bias = self.positions.bias(positions[:, None] - first - torch.arange(keys, device=x.device))
        if prefix := self.config.prefix_length:
            start = None if attention_mask is None or attention_mask.dim() != 2 else attention_mask.int().argmax(1)
            past = int(positions[0]) - (0 if start is None else int(start.max()))
            if 0 < past < prefix:
                raise InputError(
                    f"a prefix LM reads its {prefix} first tokens at once, and the cache holds {past}: "
                    "give a longer text, or generate without a cache"
                )

            def is_of_prefix(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
                return key < prefix + (0 if start is None else start[batch])

            inputs["or_mask_function"] = is_of_prefix
        make: Any = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
        mask = make(**inputs, allow_is_causal_skip=bias is None)
        if bias is None:
            return mask
        bias = bias.to(x.dtype)
        return bias.masked_fill(~mask, torch.finfo(x.dtype).min) if mask.dtype == torch.bool else bias + mask


class VariedLlamaForCausalLM(VariedLlamaPreTrainedModel, LlamaForCausalLM):
    def __init__(self, config: VariedLlamaConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = VariedLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def create_masks_for_generate(
        self, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor | None:
        """Return the padding mask unchanged, because the model makes its own mask, with prefix and bias."""
        return attention_mask


AutoConfig.register(MODEL_TYPE, VariedLlamaConfig)
AutoModel.register(VariedLlamaConfig, VariedLlamaModel)
AutoModelForCausalLM.register(VariedLlamaConfig, VariedLlamaForCausalLM)
