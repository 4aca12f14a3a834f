"""A tiny random model of every causal type in transformers' mapping: sizes that any configuration may have, made small.

A type whose configuration needs more than that has a line in `OVERRIDES`; one that cannot be built here has a line in
`NOT_BUILT`, with the reason.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from tiny import spread_weights
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sinkscope.commands.analyze import analyze
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.families import Family
from sinkscope.text.batch import Batch
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
PICTURES = {"image_size": 16, "patch_size": 8}
SMALL: dict[str, Any] = WIDTH | INNER | DEPTH | HEADS | EXPERTS | MAMBA | LINEAR | LATENT | REST
SKIPPED = object()  # in OVERRIDES: the default stays
_LATENT = {"head_dim": SKIPPED, "num_key_value_heads": 4}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
# What a type needs instead of, or besides, what SMALL says
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"),
            *("minicpm3", "longcat_flash"),
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
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "head_dim": SKIPPED,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 2,
    },
    "longcat_flash": {
        "head_dim": SKIPPED,
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
    "dots3_note_text": {
        "per_layer_config": {},
        "head_dim": SKIPPED,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
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
    "bailing_hybrid": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "dbrx": {"num_key_value_heads": SKIPPED},
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
# Types without a tiny model here, with the reason
NOT_BUILT: dict[str, str] = {
    "blt": "its smallest configuration has a hash embedding of 96 million entries",
    "fuyu": "its text model is persimmon's, which is here; its own configuration does not hand sizes on",
    "gemma3": "its picture tower does not become small; its text model is gemma3_text",
    "gemma3n": "its picture tower needs timm; its text model is gemma3n_text",
    "gemma4_assistant": "transformers' default configuration of it is refused by transformers",
    "gemma4_unified_assistant": "transformers' default configuration of it is refused by transformers",
    "got_ocr2": "its picture tower does not become small; its text model is qwen2",
    "longcat_flash": "the bare model does not run in this size",
    "moss_transcribe_diarize": "its audio tower does not become small; its text model is qwen3",
    "musicgen": "AutoModelForCausalLM cannot build it from its configuration",
    "musicgen_melody": "AutoModelForCausalLM cannot build it from its configuration",
    "qwen4_exp": "the bare model does not build in this size",
    "qwen4_exp_text": "the bare model does not build in this size",
    "dots3_note": "the bare model does not build in this size",
    "dots3_note_text": "the bare model does not build in this size",
    "dbrx": "the bare model does not build from a configuration of this transformers",
    "zamba": "the bare model does not build in this size",
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Small in all its parts; of a part with a type of its own that type's line counts."""
    kind = CONFIG_MAPPING[model_type]
    own = OVERRIDES.get(model_type, {})
    parts = {name: _tiny_part(part) for name, part in kind.sub_configs.items() if name not in own}
    wanted = parts | _small(kind) | own
    return kind(**{name: value for name, value in wanted.items() if value is not SKIPPED})


def _tiny_part(kind: Any) -> dict[str, Any]:
    model_type = getattr(kind, "model_type", "")
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return tiny_config(model_type).to_dict()
    return _small(kind) | PICTURES if model_type else {}


def _small(kind: Any) -> dict[str, Any]:
    """The entries of SMALL that a default configuration has as numbers."""
    try:
        default = kind()
    except Exception:
        return {}
    found = {}
    for name, value in SMALL.items():
        try:
            now = getattr(default, name)
        except Exception:
            continue
        if isinstance(now, int | float) and not isinstance(now, bool):
            found[name] = value
    return found


def every_type() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_of(model_type: str, dtype: torch.dtype = torch.float32, spread: float = 6.0) -> PreTrainedModel:
    """A random model in eval mode, its matrices `spread` times as wide as at initialization."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config._experts_implementation = "eager"  # others know no float64
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).to(dtype)
    spread_weights(model, spread)
    return model


@dataclass(frozen=True)
class Row:
    """What sinkscope makes of a type.

    outcome: row (of the table of families), wiring (found numerically), refused, or not built.
    layers: how many of which kind.
    padded: whether what is measured of a padded batch is what plain transformers compute of it, on either side; "yes,
        but" where transformers itself gives other numbers then than for a sequence alone.
    """

    model_type: str
    outcome: str
    layers: str = ""
    wiring: str = ""
    positions: str = ""
    padded: str = ""
    reason: str = ""


def row_of(model_type: str) -> Row:
    """Build the model, look for its family, and read attention in every layer that has it."""
    if model_type in NOT_BUILT:
        return Row(model_type, "not built", reason=NOT_BUILT[model_type])
    model = tiny_of(model_type)
    try:
        family, notices = family_of(model)
        with open_tracer(model, family) as tracer:
            ids = torch.arange(3, 15)[None]
            tracer.forward(Batch(ids, torch.ones_like(ids)), [OBSERVABLES["attention"](Settings())])
    except SinkscopeError as error:
        return Row(model_type, "refused", reason=str(error).splitlines()[-1])
    kinds = Counter(family.block(layer).kind for layer in range(len(family.layer_modules(model))))
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return Row(
        model_type,
        "wiring" if notices else "row",
        layers,
        family.wiring,
        family.positions,
        padding(model_type, padded_differences(model.double(), family, backward=False)),
    )


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
IN_FLOAT32 = {"recurrent_gemma": 1e-6}  # a sum that it keeps in float32, whatever its weights are

Pairs = dict[str, list[tuple[np.ndarray, torch.Tensor]]]  # what is compared → found and expected, by layer


def differences(model_type: str, file: Path) -> dict[str, float]:
    """Of one sequence in float64: the largest relative difference of each column from plain transformers and autograd.

    Args:
        model_type: of a model on transformers' attention interface.
        file: to write the ids to.
    """
    model, ids = tiny_of(model_type, torch.float64), _sequence(LENGTH)
    np.save(file, ids.numpy()[None])
    with only_float64():
        family, _ = family_of(model)
        tables = analyze(
            model, input=str(file), seq_len=LENGTH, positions=LENGTH, window=LENGTH, batch_size=1, bos="never"
        ).tables
        plain = run_plainly(model, family.layers, ids[None], torch.ones_like(ids)[None])
    return _worst(_compared(tables, plain, family))


def padded_differences(model: PreTrainedModel, family: Family, backward: bool) -> dict[str, dict[str, float]]:
    """As `differences`, of a batch of two sequences that is padded, for each side on which it may be.

    ALONE is how far the bare model's logits are from those of the shorter sequence alone.
    """
    with only_float64():
        with torch.no_grad():
            alone = model(_sequence(SHORTER)[None], use_cache=False).logits[0]
        found = {}
        with open_tracer(model, family) as tracer:
            tables = {side: _traced(tracer, _padded(side), backward) for side in SIDES}
        for side in SIDES:
            batch = _padded(side)
            plain = run_plainly(model, family.layers, batch.token_ids, batch.attention_mask, backward)
            pairs = _compared(tables[side], plain, family)
            pairs[ALONE] = [(plain.logits[1][batch.attention_mask[1].bool()].numpy(), alone)]
            found[side] = _worst(pairs)
    return found


def _traced(tracer: Tracer, batch: Batch, backward: bool) -> dict[str, pd.DataFrame]:
    settings = Settings(positions=LENGTH, window=LENGTH)
    wanted = ("attention", "activation", "gradient") if backward else ("attention", "activation")
    observables = [OBSERVABLES[name](settings) for name in wanted]
    for observable in observables:
        observable.prepare(tracer.model, tracer.family, int(batch.predicting.sum()))
    (tracer.forward_backward if backward else tracer.forward)(batch, observables)
    return {name: table for observable in observables for name, table in observable.tables().items()}


def is_equal(model_type: str, found: Mapping[str, float]) -> bool:
    """Whether what is measured differs from what plain transformers compute by no more than round-off."""
    largest = max(value for name, value in found.items() if name != ALONE)
    return largest < IN_FLOAT32.get(model_type, ROUND_OFF)


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
    attending = [at for at in range(len(plain.hidden)) if family.block(at).attention]
    if family.door == "interface":
        for layer, masses in zip(attending, plain.sink_masses(), strict=True):
            pairs["sink_mass"].append((_by_position(tables["attention"], layer, "sink_mass"), masses))
    for pathway in ("query", "key", "value") if plain.query and plain.query[0].grad is not None else ():
        chosen = tables["gradient"].query(f"pathway == '{pathway}' and head == -1")
        first = 1 if pathway == "query" else 0  # query 0 sees one key: its gradient is round-off
        for layer, norms in zip(attending, plain.grad_norms(pathway), strict=True):
            found = _by_position(chosen, layer, "grad_norm")
            pairs[f"gradient of {pathway}"].append((found[:, first:], norms[:, first:]))
    inputs = tables["activation"].query("site == 'layer_in'").assign(head=0)
    for layer, norms in enumerate(plain.norms()):
        pairs["layer_in"].append((_by_position(inputs, layer, "norm_mean"), norms))
    return pairs


def _worst(pairs: Pairs) -> dict[str, float]:
    return {name: max(_difference(*pair) for pair in found) for name, found in pairs.items()}


def _by_position(table: pd.DataFrame, layer: int, column: str) -> np.ndarray:
    """(heads, positions)."""
    return table[table["layer"] == layer].pivot(index="head", columns="position", values=column).to_numpy()


def _difference(found: np.ndarray, expected: torch.Tensor) -> float:
    return float(np.abs(found - expected.numpy()).max() / expected.abs().max())
