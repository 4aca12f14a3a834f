"""Tiny random encoders, a tokenizer for them, and what their tables must hold by plain transformers.

Every sequence goes through the model alone and unpadded, with eager attention in float64 and `output_attentions=True`;
statistics are loops over the dense weights. Nothing of sinkscope's is used.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tiny import VOCAB, spread_weights
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
WORDS = (*SPECIAL, ".", ",", *(f"w{number}" for number in range(VOCAB - len(SPECIAL) - 2)))

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "roberta": {**_COMMON, "pad_token_id": 1},  # counts positions from behind its padding token
    "modernbert": {**_COMMON, "local_attention": 8, "global_attn_every_n_layers": 3},
    "electra": {**_COMMON, "embedding_size": 16},
    "big_bird": {**_COMMON, "attention_type": "original_full"},
}


def encoder(name: str, dtype: torch.dtype = torch.float64, spread: float = 8.0, **changes: Any) -> PreTrainedModel:
    """A random encoder in eval mode, its matrices wide enough for attention far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **ENCODERS[name] | changes)
    model = AutoModelForMaskedLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    spread_weights(model, spread)
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One word one token, and [CLS] … [SEP] around a text."""
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def weights_of(model: PreTrainedModel, ids: np.ndarray) -> list[np.ndarray]:
    """Of every layer, (H,T,T)."""
    kind, softmax = type(model), F.softmax
    eager = kind._from_config(
        model.config.__class__(**model.config.to_dict()), attn_implementation="eager", dtype=model.dtype
    )
    eager.load_state_dict(model.state_dict())

    def in_float64(x: torch.Tensor, dim: int, dtype: Any = None, **_: Any) -> torch.Tensor:
        return softmax(x, dim=dim)

    with patch.object(F, "softmax", in_float64), torch.no_grad():
        attentions = eager.eval()(torch.as_tensor(ids)[None], output_attentions=True).attentions
    return [weights[0].numpy() for weights in attentions]


Weights = Sequence[Sequence[np.ndarray]]  # of every sequence and layer, (H,T,T)


def attention_table(sequences: Weights, positions: int, window: int, epsilon: float) -> pd.DataFrame:
    rows = []
    for layer, head, position in np.ndindex(len(sequences[0]), len(sequences[0][0]), positions):
        seen = []
        for column in (weights[layer][head, :, position] for weights in sequences if _has(weights, position)):
            mass = _near(column, position, window).mean()
            seen.append((mass, mass > epsilon, column.mean(), (column**2).mean()))
        rows.append((layer, head, position, *np.mean(seen, axis=0)))
    columns = ["window_mass", "sink_rate", "sink_mass", "sink_second_moment"]
    return pd.DataFrame(rows, columns=["layer", "head", "position", *columns])


def sink_table(sequences: Weights, window: int, epsilon: float) -> pd.DataFrame:
    rows = []
    for sequence, layers in enumerate(sequences):
        for layer, weights in enumerate(layers):
            for head, position in np.ndindex(weights.shape[:2]):
                mass = _near(weights[head, :, position], position, window).mean()
                if mass > epsilon:
                    rows.append((layer, head, sequence, position, weights.shape[1], mass))
    table = pd.DataFrame(rows, columns=["layer", "head", "sequence", "position", "queries", "window_mass"])
    return table.sort_values(["layer", "head", "sequence", "position"], ignore_index=True)


def entropy_table(sequences: Weights) -> pd.DataFrame:
    rows = []
    for layer, head in np.ndindex(len(sequences[0]), len(sequences[0][0])):
        of_each = [weights[layer][head] for weights in sequences]
        entropies = [-np.where(a > 0, a * np.log(np.where(a > 0, a, 1)), 0).sum(1).mean() for a in of_each]
        rows.append((layer, head, np.mean(entropies)))
    return pd.DataFrame(rows, columns=["layer", "head", "attention_entropy"])


def _has(weights: Sequence[np.ndarray], position: int) -> bool:
    return position < weights[0].shape[1]


def _near(column: np.ndarray, position: int, window: int) -> np.ndarray:
    return column[max(0, position - window + 1) : position + window]


def largest_error(found: pd.DataFrame, expected: pd.DataFrame) -> float:
    """Over the columns of `expected`, which the rows of `found` must have in the same order."""
    assert len(found) == len(expected)
    return max(float(np.abs(found[name].to_numpy(float) - expected[name].to_numpy(float)).max()) for name in expected)
