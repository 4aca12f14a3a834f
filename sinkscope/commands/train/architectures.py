"""Models to train from scratch, by name: configurations of transformers, most of them small enough for a laptop.

A row is a model type and the fields that differ from its defaults. An encoder is trained to predict masked tokens,
every other model to predict the next token. A name may be followed by more fields, as in
`llama-60m:position_scheme=alibi,num_hidden_layers=4`. Any other architecture is given as a config.json. Vocabulary and
special tokens are those of the tokenizer, which `tokenizer_of` can make from the text.
"""

import copy
import json
import os
from collections.abc import Iterable
from itertools import islice
from typing import Any

from tokenizers import ByteLevelBPETokenizer, processors
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from sinkscope.errors import InputError, described, one_line, unknown
from sinkscope.models.files import read_settings
from sinkscope.models.in_memory import drawing
from sinkscope.models.loading import class_for, count_parameters
from sinkscope.models.varied_llama import MODEL_TYPE as VARIED_LLAMA
from sinkscope.options.files import kind_of, user_path
from sinkscope.options.spec import assignments

_SMALL_VOCABULARY = {"vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _size(hidden: int, intermediate: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads), strict=True)) | others


def _gpt2_size(hidden: int, layers: int, heads: int, positions: int, **others: Any) -> dict[str, Any]:
    return {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions, **_NO_DROPOUT, **others}


_HYBRID = _size(64, 128, 4, 4, max_position_embeddings=256, tie_word_embeddings=False, **_SMALL_VOCABULARY)
_QWEN3 = {**_HYBRID, "num_key_value_heads": 2, "head_dim": 16}
_QWEN3_NEXT = {
    **_QWEN3, "mlp_only_layers": [0, 1, 2, 3], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
_JAMBA = {
    **_HYBRID, "num_key_value_heads": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1,
    "mamba_d_state": 4, "mamba_dt_rank": 4, "mamba_expand": 1,
}  # fmt: skip
_TINY_OPT = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "word_embed_proj_dim": 256, "ffn_dim": 1024,
    "max_position_embeddings": 1024, "dropout": 0.0, **_SMALL_VOCABULARY,
}  # fmt: skip
_TINY_BERT = _size(
    256, 1024, 6, 4, max_position_embeddings=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    **_SMALL_VOCABULARY,
)  # fmt: skip
_TINY_LLAMA = _size(256, 688, 6, 4, num_key_value_heads=4, max_position_embeddings=2048, **_SMALL_VOCABULARY)
_GPT2_ROTARY = _size(
    768, 3072, 12, 12, vocab_size=50304, max_position_embeddings=1024, rotary_pct=1.0, layer_norm_eps=1e-5,
    use_parallel_residual=False, tie_word_embeddings=True, classifier_dropout=0.0,
)  # fmt: skip
_WSE = {"rms_norm_eps": 1e-5, **_SMALL_VOCABULARY}

# name → (model type, fields that differ from its defaults)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": ("llama", _TINY_LLAMA),
    "tiny-gpt2": ("gpt2", _gpt2_size(256, 6, 4, 1024, **_SMALL_VOCABULARY)),
    "tiny-opt": ("opt", _TINY_OPT),
    "tiny-bert": ("bert", _TINY_BERT),
    # one head in one layer, as in VGA §4.1 after Guo et al. 2024
    "bigram-backcopy": (
        "gpt2",
        _gpt2_size(64, 1, 1, 64, n_inner=256, activation_function="relu", tie_word_embeddings=False),
    ),
    # Hybrids, with attention in every second layer. Small: without kernels for CUDA their other layers are slow.
    "tiny-qwen3-next": ("qwen3_next", {**_QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "tiny-jamba": ("jamba", _JAMBA),
    # For comparison: attention of the same size in every layer, with Qwen3-Next's gates and without
    "tiny-gated-attention": ("qwen3_next", {**_QWEN3_NEXT, "layer_types": ["full_attention"] * 4}),
    "tiny-qwen3": ("qwen3", _QWEN3),
    # about the two sizes of GS, which gives no more details
    "llama-0.1b": (
        "llama",
        _TINY_LLAMA | _size(768, 2048, 12, 12, num_key_value_heads=12, vocab_size=32000, tie_word_embeddings=True),
    ),
    "llama-0.3b": (
        "llama",
        _TINY_LLAMA | _size(1024, 2816, 20, 16, num_key_value_heads=16, vocab_size=32000, tie_word_embeddings=True),
    ),
    # the models of VGA: BERT-base, OPT-125m as Bondarenko et al. (2023) train it, and GPT-2 with rotary positions
    "bert-base": ("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "opt-125m": ("opt", {"max_position_embeddings": 512, "init_std": 0.006, "dropout": 0.0}),
    "gpt2-rotary": ("gpt_neox", _GPT2_ROTARY),
    # the models of WSE §4 to §7: 60M parameters without the embeddings, and the smallest of its released code
    "llama-60m": (VARIED_LLAMA, _size(768, 1536, 10, 8, **_WSE) | {"vocab_size": 50432}),
    "llama-1m": (VARIED_LLAMA, _size(256, 512, 2, 8, **_WSE)),
    # The same block at the size of `bigram-backcopy`, with equally small initial weights. With those of WSE's released
    # code attention dominates: a token that needs no attention attends to itself, and there is no sink.
    "bigram-backcopy-llama": (VARIED_LLAMA, _size(64, 256, 1, 1, max_position_embeddings=64, initializer_range=0.02)),
}


def architecture(source: str | os.PathLike[str]) -> PreTrainedConfig:
    """Return the configuration of a model to train.

    `source` is a name of ARCHITECTURES, with or without further fields (`NAME:key=value,…`), or a config.json (or its
    folder) in HuggingFace's format.
    """
    text = os.fspath(source)
    name, _, assigned = text.partition(":")
    if name in ARCHITECTURES:
        return _with_fields(name, assigned)
    path = user_path(text)
    path = path / "config.json" if kind_of(path) == "folder" else path
    if kind_of(path) != "file":
        raise InputError(f"--config {unknown(text, ARCHITECTURES)}, or a config.json")
    try:
        fields = read_settings(path)
        model_type = fields.pop("model_type")
        config = CONFIG_MAPPING[model_type].from_dict(fields)
    except KeyError as error:
        what = "it has no model_type" if error.args == ("model_type",) else f"{error} is no model type of transformers"
        raise InputError(f"--config {path}: {what}") from None
    except InputError as error:
        raise InputError(f"--config {path} is not a model's config.json: {error}") from None
    except Exception as error:  # the family's class may raise any error
        raise InputError(f"--config {path} is not a model's config.json: {one_line(error)}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise InputError(f"--config {path}: {model_type} is neither a causal language model nor an encoder")
    try:
        count_parameters(config)
    except Exception as error:
        raise InputError(f"--config {path}: no model can be made from it [{described(error)}]") from None
    return config


def _with_fields(name: str, assigned: str) -> PreTrainedConfig:
    """Return a named configuration with the fields that are assigned after its name."""
    model_type, fields = ARCHITECTURES[name]
    kind = CONFIG_MAPPING[model_type]
    if not assigned:
        return kind(**fields)
    known = sorted(kind().to_dict().keys() - {"model_type", "transformers_version", "_name_or_path"})
    changes: dict[str, Any] = {}
    for field, value in assignments(assigned):
        if value is None or field not in known:
            raise InputError(f"--config {name}: field {unknown(field, known)}; write fields as key=value,…")
        try:
            changes[field] = json.loads(value)
        except ValueError:  # a word
            changes[field] = value
    if "num_attention_heads" in changes and "num_key_value_heads" in fields:
        changes.setdefault("num_key_value_heads", changes["num_attention_heads"])
    try:
        config = kind(**fields | changes)
        count_parameters(config)
    except Exception as error:  # the family's class may raise any error
        raise InputError(f"--config {name}:{assigned}: {one_line(error)}") from None
    return config


def predicts_next(config: PreTrainedConfig) -> bool:
    """Return whether a configuration's model predicts the next token, and not masked tokens."""
    return class_for(config, "the model") is not AutoModelForMaskedLM


def fresh_model(config: PreTrainedConfig, seed: int) -> Any:
    """Return a model with random weights drawn from the seed, in eval mode and frozen like a loaded model."""
    with drawing(seed):
        model = class_for(config, "the model").from_config(
            copy.deepcopy(config),  # a retrofit changes it
            attn_implementation=None,  # the default: a config.json may name code on the hub
        )
    return model.float().eval().requires_grad_(False)


PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2
MASK = "<mask>"  # id 3, for an encoder
MOST_DOCUMENTS = 100_000  # enough to train a tokenizer, which need not read a whole corpus
MOST_CHARACTERS = 1 << 26


def tokenizer_of(documents: Iterable[str], vocab_size: int, causal: bool = True) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's, with a first BOS like Llama's; for an encoder like RoBERTa's.

    It has at most `vocab_size` tokens, including 256 bytes and the special tokens; a short text gives fewer. The same
    text gives the same tokenizer.
    """
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
    framed = f"{BOS} $A"
    if not causal:
        special |= {"mask_token": MASK}
        framed += f" {EOS}"
    beginning, left = [], MOST_CHARACTERS
    for document in islice(documents, MOST_DOCUMENTS):
        beginning.append(document[:left])
        left -= len(document)
        if left <= 0:
            break
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(beginning, vocab_size, 0, show_progress=False, special_tokens=list(special.values()))
    core = trained._tokenizer
    core.post_processor = processors.TemplateProcessing(
        single=framed, special_tokens=[(token, core.token_to_id(token)) for token in (BOS, EOS)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def listed() -> list[tuple[str, str, str]]:
    """Return the rows of `sinkscope list architectures`."""
    rows = []
    for name, (model_type, fields) in ARCHITECTURES.items():
        shape = [f"{field}={value}" for field, value in fields.items() if not field.endswith("_token_id")]
        rows.append((name, model_type, ", ".join(shape)))
    return rows
