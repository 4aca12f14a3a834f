"""Tiny random encoders, and a tokenizer for them."""

from typing import Any

import torch
from tiny import VOCAB, spread_weights
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from support.retrofit_command import tokenizer_of

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
WORDS = (*SPECIAL, ".", ",", *(f"w{number}" for number in range(VOCAB - len(SPECIAL) - 2)))

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "roberta": {**_COMMON, "pad_token_id": 1},  # counts positions from the one after its padding token
    "modernbert": {**_COMMON, "local_attention": 8, "global_attn_every_n_layers": 3},
    "electra": {**_COMMON, "embedding_size": 16},
    "big_bird": {**_COMMON, "attention_type": "original_full"},
}


def encoder(name: str, dtype: torch.dtype = torch.float64, spread: float = 8.0, **changes: Any) -> PreTrainedModel:
    """Return a random encoder in eval mode, with matrices wide enough for attention far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **ENCODERS[name] | changes)
    model = AutoModelForMaskedLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    spread_weights(model, spread)
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), SPECIAL, strict=True))
    return tokenizer_of(WORDS, "[CLS] $A [SEP]", **names)
