"""A tiny random model of every family, built from its config: no download, a few milliseconds each.

Weights are drawn much wider than at initialization (`spread`), so that attention is far from uniform and a wrong
column or head shows up; everything is seeded, so that a failure can be repeated.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.family import Family
from sinkscope.text.batch import Batch

torch.set_num_threads(1)  # nothing here is large enough to share; threads waiting for each other take seconds

VOCAB = 96
FORWARD = ("attention", "geometry", "activation", "massive", "outlier")

_COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA_LIKE = _COMMON | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT_NEO_LIKE = _COMMON | {
    "hidden_size": 32, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 256, "window_size": 6,
    "attention_types": [[["global", "local"], 1], [["global"], 1]],
}  # fmt: skip
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT2_LIKE = {**_COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}

# name → (model type, config overrides). Several rows of one model type are wired differently.
TINY: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": 6}),
    "mixtral": ("mixtral", {**_LLAMA_LIKE, **_MOE}),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA_LIKE, **_MOE, "head_dim": 12}),
    "gemma2": ("gemma2", {**_LLAMA_LIKE, "head_dim": 12, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**_LLAMA_LIKE, "head_dim": 12, "sliding_window": 6, "layer_types": _SLIDING}),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "phi": ("phi", _LLAMA_LIKE),
    "phi3": ("phi3", _LLAMA_LIKE),
    "stablelm": ("stablelm", _LLAMA_LIKE),
    "stablelm-parallel": ("stablelm", {**_LLAMA_LIKE, "use_parallel_residual": True}),
    "cohere": ("cohere", _LLAMA_LIKE),
    "gpt_oss": ("gpt_oss", {**_LLAMA_LIKE, **_MOE, "head_dim": 12, "sliding_window": 6}),
    "gpt2": ("gpt2", _GPT2_LIKE),
    "gpt_neox": ("gpt_neox", {**_LLAMA_LIKE, "use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {**_LLAMA_LIKE, "use_parallel_residual": False}),
    "opt": ("opt", {**_LLAMA_LIKE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-post-norm": ("opt", {**_LLAMA_LIKE, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "bloom": ("bloom", {**_COMMON, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": ("falcon", {**_LLAMA_LIKE, "alibi": False, "new_decoder_architecture": False}),
    "falcon-alibi": ("falcon", {**_LLAMA_LIKE, "alibi": True, "parallel_attn": False, "multi_query": False}),
    "falcon-new": ("falcon", {**_LLAMA_LIKE, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("mpt", {**_COMMON, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}),
    "gptj": ("gptj", {**_GPT2_LIKE, "rotary_dim": 4}),
    "gpt_neo": ("gpt_neo", _GPT_NEO_LIKE),
}

# One for each kind of wiring, of projections of query, key and value, and of positions. Code that acts on a layer by
# the row of its family works in the same way in the others, whose rows test_families.py checks.
REPRESENTATIVE = (
    "llama", "gemma2", "olmo2", "phi3", "cohere", "gpt_oss", "gpt2", "gpt_neox", "opt", "opt-post-norm", "bloom",
    "falcon", "falcon-new", "mpt", "gptj", "gpt_neo",
)  # fmt: skip


def tiny_model(
    name: str, *, dtype: torch.dtype = torch.float32, spread: float = 12.0, **changes: Any
) -> PreTrainedModel:
    """Return a tiny random model in eval mode, with frozen parameters.

    `name` is a key of `TINY`, and `changes` are entries of its configuration.
    """
    model_type, overrides = TINY[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **overrides | changes), dtype=dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product does not support float64
    spread_weights(model, spread)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def spread_weights(model: PreTrainedModel, spread: float) -> None:
    """Multiply a random model's matrices by `spread`, and add noise to other parameters, whose entries are equal."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.any():
            parameter.mul_(spread)
        else:  # norms' gains, biases and sink logits, and matrices that begin as zeros
            parameter.add_(0.1 * torch.randn_like(parameter))


def tiny_tokens(batch: int = 3, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Return token ids (batch, length) without the special ids 0, 1, 2."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def ragged_tokens(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    return [
        ids[:length].numpy() for ids, length in zip(tiny_tokens(len(lengths), max(lengths), seed), lengths, strict=True)
    ]


def written(path: Path, sequences: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": np.asarray(ids).tolist()}) + "\n" for ids in sequences))
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


def padded(sequences: Sequence[np.ndarray], side: str = "right", first: int = 0) -> Batch:
    """Return sequences as one batch, in which shorter sequences are padded with id 0."""
    width = max(len(ids) for ids in sequences)
    token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for row, ids in enumerate(sequences):
        places = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        token_ids[row, places] = torch.as_tensor(ids)
        mask[row, places] = 1
    return Batch(token_ids, mask, first)


def batched(sequences: Sequence[np.ndarray], size: int, side: str = "right") -> list[Batch]:
    return [padded(sequences[at : at + size], side, at) for at in range(0, len(sequences), size)]


def measured(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    settings: Settings,
    names: Sequence[str] = FORWARD,
    kernel: str = "sdpa",
    family: Family | None = None,
    backward: bool = False,
) -> dict[str, pd.DataFrame]:
    """Return the observables' tables of one pass of sinkscope, forward or also backward."""
    with open_tracer(model, family or find_family(model), kernel) as tracer:
        observables = [OBSERVABLES[name](settings) for name in names]
        for observable in observables:
            observable.prepare(model, tracer.family, sum(int(batch.predicting.sum()) for batch in batches))
        for batch in batches:
            (tracer.forward_backward if backward else tracer.forward)(batch, observables)
    return {name: table for observable in observables for name, table in observable.tables().items()}
