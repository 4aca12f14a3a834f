"""A tiny random model of every type in transformers' mappings: sizes that any configuration may have, made small.

A type whose configuration needs more than that has a line in `OVERRIDES`; one that cannot be built here has a line in
`NOT_BUILT`, with the reason.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tiny import spread_weights
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sinkscope import analyze
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.family import RESIDUAL_SITES, Family
from sinkscope.models.in_memory import undisturbed
from sinkscope.text.batch import Batch
from sinkscope.text.masking import masked
from support import encoders, multimodal
from support.multimodal import SENSES, SKIPPED, TOLD
from support.plain import Plain, only_float64, run_plainly

VOCAB = 96
LAYERS = 4
WIDTH = {"hidden_size": 32, "n_embd": 32, "d_model": 32, "embedding_size": 32}
INNER = {"intermediate_size": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "n_inner": 48}
DEPTH = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS)
HEADS = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "state_size": 8,
    "ssm_state_size": 8,
}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
}
REST = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 6,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
}
SMALL: dict[str, Any] = WIDTH | INNER | DEPTH | HEADS | EXPERTS | MAMBA | LINEAR | LATENT | REST
_LATENT = {"head_dim": SKIPPED, "num_key_value_heads": 4}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_BLT = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "vocab_size": 260}
_BLT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": SKIPPED}
# What a type needs instead of, or besides, what SMALL says
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"),
            "minicpm3",
        ),
        _LATENT,
    ),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "residual_multiplier": 0.22,
        "shared_intermediate_size": 24,
    },
    "granite": {"residual_multiplier": 0.22},
    "granitemoe": {"residual_multiplier": 0.22},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "head_dim": SKIPPED,
        "kv_channels": 8,
        "num_query_groups": 4,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "head_dim": SKIPPED,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 2,
    },
    "longcat_flash": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "zero_expert_num": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
    },
    "deepseek_v2": {"head_dim": SKIPPED, "num_key_value_heads": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "gemma4_text": {
        "per_layer_config": {},
        "head_dim": 8,
        "layer_types": _WINDOWS,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
    },
    "gemma4_unified_text": {"per_layer_config": {}, "head_dim": 8, "layer_types": _WINDOWS, "num_kv_shared_layers": 0},
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"],
            "num_hidden_layers": 1,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"num_hidden_layers": 1, "adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "shared_experts_intermediate_size": 24,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "hc_lowrank": 4,
        "head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 6],
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 2,
        "attention_head_size": 8,
        "feed_forward_size": 48,
    },
    "bailing_hybrid": {"head_dim": 16, "partial_rotary_factor": 0.5, "layer_group_size": 2, "num_key_value_heads": 4},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 97,
        "encoder_hash_byte_group_size": [3],
        "encoder_config": _BLT | {"hidden_size_global": 64},
        "decoder_config": _BLT | {"hidden_size_global": 64},
        "global_config": _BLT | {"hidden_size": 64},
        "patcher_config": _BLT,
    },
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "dbrx": {
        "num_key_value_heads": SKIPPED,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"head_dim": SKIPPED},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": _WINDOWS,
        "num_kv_shared_layers": 0,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "laurel_rank": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6, "max_position_embeddings": 256},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "prophetnet": {
        "num_hidden_layers": SKIPPED,
        "num_encoder_layers": 2,
        "num_decoder_layers": 4,
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "is_decoder": True,
    },
    "xlnet": {"max_position_embeddings": SKIPPED},
    "xlstm": {"v_head_dim": SKIPPED},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
OVERRIDES |= {  # encoders
    "albert": {"inner_group_num": 1},
    "esm": {
        "vocab_size": VOCAB,
        "pad_token_id": 0,
        "token_dropout": False,
        "mask_token_id": 3,
        "position_embedding_type": "rotary",
    },
    "esmc": {"num_key_value_heads": SKIPPED},
    "funnel": {"num_hidden_layers": SKIPPED, "block_sizes": [2, 2], "d_head": 8, "n_head": 4, "d_inner": 48},
    "modernbert": {"local_attention": 8},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": LAYERS},
}
OVERRIDES |= multimodal.NEEDED
# Types without a tiny model here, with the reason
NOT_BUILT: dict[str, str] = {
    "glm5_next": "a pass of 11 tokens takes seconds without the package flash-linear-attention",
    "musicgen": "AutoModelForCausalLM cannot build it from its configuration",
    "musicgen_melody": "AutoModelForCausalLM cannot build it from its configuration",
    "neomme": "the bare model does not build in this size",
    "ultravbert": "its picture tower does not become small; its text model is ultrabert",
}


NOT_BUILT |= multimodal.NOT_BUILT


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Small in all its parts; of a part with a type of its own that type's line counts."""
    return CONFIG_MAPPING[model_type](**_wanted(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {})))


def _wanted(kind: Any, own: dict[str, Any]) -> dict[str, Any]:
    """What a configuration is made from. What `own` has for a part comes in addition to what is small there."""
    found = _small(kind, SMALL if kind.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else SMALL | SENSES) | own
    for name, part in _parts(kind).items():
        needed = own.get(name, {})
        if isinstance(needed, dict):
            part = CONFIG_MAPPING[needed["model_type"]] if "model_type" in needed else part
            line = OVERRIDES.get(part.model_type, {})
            found[name] = _wanted(part, line | needed) | {"model_type": part.model_type}
    return {name: value for name, value in found.items() if value is not SKIPPED}


def _parts(kind: Any) -> dict[str, Any]:
    """The classes of a configuration's parts, by default."""
    specs = kind.sub_configs_defaults.items()
    return {
        name: CONFIG_MAPPING[spec.model_type] if spec.config_class is AutoConfig else spec.config_class
        for name, spec in specs
    }


def _small(kind: Any, small: dict[str, Any]) -> dict[str, Any]:
    """The entries that a default configuration has as numbers."""
    try:
        default = kind()
    except Exception:
        return {}
    found = {}
    for name, value in small.items():
        try:
            now = getattr(default, name)
        except Exception:
            continue
        if isinstance(now, int | float) and not isinstance(now, bool):
            found[name] = value
    return found


# file in reports/models/ → the class of transformers whose models it lists
LISTS: dict[str, Any] = {
    "models": AutoModelForCausalLM,
    "encoders": AutoModelForMaskedLM,
    "image_text": AutoModelForMultimodalLM,
}


def every_type(auto: Any = AutoModelForCausalLM) -> list[str]:
    return sorted(auto._model_mapping._model_mapping)


def tiny_of(
    model_type: str, dtype: torch.dtype = torch.float32, spread: float = 6.0, auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """A random model in eval mode, its matrices `spread` times as wide as at initialization."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config._experts_implementation = "eager"  # others know no float64
    if type(config) in AutoModelForMaskedLM._model_mapping:  # BERT and its kin are encoders, or decoders if told so
        config.is_decoder = auto is AutoModelForCausalLM
    model = auto.from_config(config).eval().requires_grad_(False).to(dtype)
    spread_weights(model, spread)
    return model


@dataclass(frozen=True)
class Row:
    """What sinkscope makes of a type.

    outcome: row (of the table of families), wiring (found numerically), refused, or not built.
    layers: how many of which kind.
    padded: of a causal one, whether what is measured of a padded batch is what plain transformers compute of it, on
        either side; "yes, but" where transformers itself gives other numbers then than for a sequence alone.
    """

    model_type: str
    outcome: str
    layers: str = ""
    wiring: str = ""
    positions: str = ""
    padded: str = ""
    reason: str = ""


class AllSites(Observable):
    sites = RESIDUAL_SITES


def row_of(model_type: str, auto: Any = AutoModelForCausalLM) -> Row:
    """Build the model, look for its family, and read every site of the residual stream and all attention."""
    if model_type in NOT_BUILT:
        return Row(model_type, "not built", reason=NOT_BUILT[model_type])
    model = tiny_of(model_type, auto=auto)
    try:
        with undisturbed(model):
            family, notices = family_of(model)
            with open_tracer(model, family) as tracer:
                ids = torch.arange(3, 15)[None]
                observables = [kind(Settings()) for kind in (OBSERVABLES["attention"], AllSites)]
                tracer.forward(Batch(ids, torch.ones_like(ids)), observables)
    except SinkscopeError as error:
        return Row(model_type, "refused", reason=str(error).splitlines()[-1])
    kinds = Counter(family.block(layer).kind for layer in range(len(family.layer_modules(model))))
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    padded = padding(model_type, padded_differences(model.double(), family, backward=False)) if family.causal else ""
    return Row(model_type, "wiring" if notices else "row", layers, family.wiring, family.positions, padded)


def padding(model_type: str, by_side: Mapping[str, Mapping[str, float]]) -> str:
    """In words, what differences of a padded batch amount to."""
    if not all(is_equal(model_type, found) for found in by_side.values()):
        return "NO"
    changed = [side for side, found in by_side.items() if found[ALONE] > ROUND_OFF]
    return f"yes, but transformers itself changes with padding on the {' and '.join(changed)}" if changed else "yes"


LENGTH = 20
SHORTER = 13  # the second sequence of a padded batch
SIDES = ("right", "left")
ALONE = "bare model, alone and padded"
ROUND_OFF = 1e-10  # relative, in float64
# Where more is lost: a sum that it keeps in float32 whatever its weights are; code for float32 alone; keys whose
# gradients are 1e-4 of other layers', of attention that is nearly one-hot for want of norms
LESS_EXACT = {"recurrent_gemma": 1e-6, "inkling2_text": 1e-3, "mobilebert": 1e-6}

Pairs = dict[str, list[tuple[np.ndarray, torch.Tensor]]]  # what is compared → found and expected, by layer


def differences(model_type: str, file: Path, auto: Any = AutoModelForCausalLM) -> dict[str, float]:
    """Of one sequence in float64: the largest relative difference of each column from plain transformers and autograd.

    Args:
        model_type: of any model that works; where it attends in code of its own, without gradients.
        file: to write the ids to.
        auto: the class of transformers that makes it.
    """
    model, ids = tiny_of(model_type, torch.float64, auto=auto), _sequence(LENGTH)
    np.save(file, ids.numpy()[None])
    with only_float64():
        with undisturbed(model):
            family, _ = family_of(model)
        tokenizer = None if family.causal else encoders.word_tokenizer()
        options = {"seq_len": LENGTH, "positions": LENGTH, "window": LENGTH, "batch_size": 1, "bos": "never"}
        tables = analyze(model, tokenizer=tokenizer, input=str(file), **options).tables
        run = _run_causally if family.causal else _run_masked
        plain = run(model, family.layers, ids[None], torch.ones_like(ids)[None])
    return _worst(_compared(tables, plain, family))


def padded_differences(model: PreTrainedModel, family: Family, backward: bool) -> dict[str, dict[str, float]]:
    """As `differences`, of a batch of two sequences that is padded, for each side on which it may be.

    ALONE is how far the bare model's logits are from those of the shorter sequence alone.
    """
    with undisturbed(model), only_float64():
        run = partial(_run_causally, model, family.layers, backward=backward, first_position=family.first_position)
        alone = run(_sequence(SHORTER)[None], torch.ones(1, SHORTER))
        found = {}
        with open_tracer(model, family) as tracer:
            tables = {side: _traced(tracer, _padded(side), backward) for side in SIDES}
        for side in SIDES:
            batch = _padded(side)
            plain = run(batch.token_ids, batch.attention_mask)
            pairs = _compared(tables[side], plain, family)
            pairs[ALONE] = [(plain.logits[1][batch.attention_mask[1].bool()].numpy(), alone.logits[0])]
            found[side] = _worst(pairs)
    return found


def _run_causally(model: PreTrainedModel, layers: str, *batch: torch.Tensor, **options: Any) -> Plain:
    return run_plainly(model, layers, *batch, **options, **TOLD.get(model.config.model_type, {}))


def _run_masked(model: PreTrainedModel, layers: str, ids: torch.Tensor, mask: torch.Tensor) -> Plain:
    """Of an encoder: the text as it is, and the gradients of the masked text."""
    (hidden,) = masked([ids[0].numpy()], encoders.word_tokenizer(), VOCAB, seed=0)
    forward = run_plainly(model, layers, ids, mask, labels=ids)
    backward = run_plainly(
        model, layers, torch.tensor(hidden.ids)[None], mask, labels=torch.tensor(hidden.labels)[None]
    )
    return replace(forward, query=backward.query, key=backward.key, value=backward.value)


def _traced(tracer: Tracer, batch: Batch, backward: bool) -> dict[str, pd.DataFrame]:
    settings = Settings(positions=LENGTH, window=LENGTH)
    wanted = ("attention", "activation", "gradient") if backward else ("attention", "activation")
    kinds = [OBSERVABLES[name] for name in wanted]
    observables = [kind(settings) for kind in kinds if kind.inapplicable(tracer.model, tracer.family) is None]
    for observable in observables:
        observable.prepare(tracer.model, tracer.family, int(batch.predicting.sum()))
    (tracer.forward_backward if backward else tracer.forward)(batch, observables)
    return {name: table for observable in observables for name, table in observable.tables().items()}


def is_equal(model_type: str, found: Mapping[str, float]) -> bool:
    """Whether what is measured differs from what plain transformers compute by no more than round-off."""
    largest = max(value for name, value in found.items() if name != ALONE)
    return largest < LESS_EXACT.get(model_type, ROUND_OFF)


def _sequence(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def _padded(side: str) -> Batch:
    """A longer and a shorter sequence."""
    empty = (LENGTH - SHORTER, 0) if side == "left" else (0, LENGTH - SHORTER)
    longer, shorter = _sequence(LENGTH), _sequence(SHORTER)
    mask = torch.stack([torch.ones_like(longer), F.pad(torch.ones_like(shorter), empty)])
    return Batch(torch.stack([longer, F.pad(shorter, empty)]), mask)


def _compared(tables: Mapping[str, pd.DataFrame], plain: Plain, family: Family) -> Pairs:
    pairs: Pairs = defaultdict(list)
    inputs = tables["activation"].query("site == 'layer_in'").assign(head=0)
    ran = sorted(inputs["layer"].unique())
    attending = [layer for layer in ran if family.block(layer).attention]
    if attending and plain.weights:
        for layer, masses in zip(attending, plain.sink_masses(), strict=True):
            pairs["sink_mass"].append((by_position(tables["attention"], layer, "sink_mass"), masses))
    for pathway in ("query", "key", "value") if plain.query and plain.query[0].grad is not None else ():
        chosen = tables["gradient"].query(f"pathway == '{pathway}' and head == -1")
        first = 1 if pathway == "query" and family.causal else 0  # query 0 sees one key: its gradient is round-off
        for layer, norms in zip(attending, plain.grad_norms(pathway), strict=True):
            found = by_position(chosen, layer, "grad_norm")
            pairs[f"gradient of {pathway}"].append((found[:, first:], norms[:, first:]))
    for layer, norms in zip(ran, plain.norms(), strict=True):
        pairs["layer_in"].append((by_position(inputs, layer, "norm_mean"), norms))
    return pairs


def _worst(pairs: Pairs) -> dict[str, float]:
    return {name: max(_difference(*pair) for pair in found) for name, found in pairs.items()}


def by_position(table: pd.DataFrame, layer: int, column: str) -> np.ndarray:
    """(heads, positions)."""
    return table[table["layer"] == layer].pivot(index="head", columns="position", values=column).to_numpy()


def _difference(found: np.ndarray, expected: torch.Tensor) -> float:
    return float(np.abs(found - expected.numpy()).max() / expected.abs().max())
