"""How a model that is trained from scratch knows where a token stands (WSE §7.1, table 3), one scheme a class.

A scheme does one of three things: it adds vectors to the token embeddings, rotates queries and keys, or adds a bias to
the logits. Queries and keys are told apart by their places in the sequence; of biases only the distance t - s counts.
A bias is made once for all layers, and is the one thing that grows with T × T: (1,H,T,T).
"""

import math
from typing import ClassVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BASE = 10_000.0  # of the wavelengths of sinusoidal positions (Vaswani et al. 2017)
BUCKETS, MAX_DISTANCE = 32, 128  # T5 (Raffel et al. 2020), which WSE's code has too

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (B,T,d) each


class PositionScheme(nn.Module):
    """No positions at all (NoPE); what other schemes do differently they override.

    Attributes:
        kind: As attention/position_kinds.py names what it finds.
    """

    kind: ClassVar[str] = "none"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def added(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
        """Token embeddings (B,T,D), positions (B|1,T) → what is added to the embeddings, (B|1,T,D)."""
        return None

    def rotation(self, x: torch.Tensor, position_ids: torch.Tensor) -> Rotation | None:
        """The same → what queries and keys are rotated by."""
        return None

    def bias(self, distance: torch.Tensor) -> torch.Tensor | None:
        """t - s of queries and keys (T,S) → what is added to the logits, (1,H,T,S); undefined where s > t."""
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

    def rotation(self, x: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
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
    """The number of the distance's bucket itself as bias, so that keys far away are preferred.

    This is what WSE's released code computes for its "relative" model, whose loss is the worst of table 3.
    """

    kind: ClassVar[str] = "relative"

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        return bucket(distance)[None, None].expand(1, self.config.num_attention_heads, -1, -1)


class Alibi(PositionScheme):
    """m_h (s - t), with a slope for each head (Press et al. 2022)."""

    kind: ClassVar[str] = "alibi"

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        slopes = torch.tensor(
            alibi_slopes(self.config.num_attention_heads), device=distance.device, dtype=torch.float64
        )
        return -slopes[:, None, None] * distance[None]


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """T5's bucket of a distance to an earlier key: distances below BUCKETS/2 one by one, then logarithmically up to
    MAX_DISTANCE; 0 of later keys.
    """
    distance, exact = distance.clamp(min=0), BUCKETS // 2
    further = (distance.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact) * (BUCKETS - exact)
    return torch.where(distance < exact, distance, (exact + further.long()).clamp(max=BUCKETS - 1))


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8h/H) for h = 1 … H; where H is no power of two those of the next smaller one, and then every second of those
    of the next larger one.
    """
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
