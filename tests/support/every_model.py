"""A tiny random model of every type in transformers' mappings, with small values for all sizes of its configuration.

A type that needs further settings has a line in `OVERRIDES`; one that cannot be built here has a line in `NOT_BUILT`,
with the reason.
"""

from typing import Any

import torch
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

# Sizes of towers for pictures and sound, of projectors and resamplers
SENSES: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "out_hidden_size": 32, "encoder_hidden_size": 32,
    "output_channels": 16, "mlp_dim": 48,
}  # fmt: skip


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}}


SKIPPED = object()  # the default is kept
_CODES = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 64}

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
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16, "mamba_dt_rank": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "state_size": 8,
    "ssm_state_size": 8,
}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
}  # fmt: skip
REST = {
    "vocab_size": VOCAB, "max_position_embeddings": 256, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "sliding_window": 6, "encoder_layers": 2, "encoder_attention_heads": 4,
}  # fmt: skip
SMALL: dict[str, Any] = WIDTH | INNER | DEPTH | HEADS | EXPERTS | MAMBA | LINEAR | LATENT | REST
_LATENT = {"head_dim": SKIPPED, "num_key_value_heads": 4}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_BLT = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "vocab_size": 260}
_BLT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": SKIPPED}
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 32}
# Settings of a type that replace or extend the entries of SMALL
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (*("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu"), "minicpm3"), _LATENT
    ),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "residual_multiplier": 0.22, "shared_intermediate_size": 24,
    },
    "granite": {"residual_multiplier": 0.22}, "granitemoe": {"residual_multiplier": 0.22},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8, "n_mamba_heads": 8,
        "num_mem_blocks": 1, "head_dim": SKIPPED, "kv_channels": 8, "num_query_groups": 4, "num_key_value_heads": 4,
        "adapter_rank": 4,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16,
        "head_dim": SKIPPED, "num_key_value_heads": 4, "mamba_dt_rank": 2,
    },
    "longcat_flash": {
        "head_dim": 8, "num_key_value_heads": 4, "zero_expert_num": 2, "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
    },
    "deepseek_v2": {"head_dim": SKIPPED, "num_key_value_heads": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "gemma4_text": {
        "per_layer_config": {}, "head_dim": 8, "layer_types": _WINDOWS, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
    },
    "gemma4_unified_text": {"per_layer_config": {}, "head_dim": 8, "layer_types": _WINDOWS, "num_kv_shared_layers": 0},
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"], "num_hidden_layers": 1, "adapter_in_dim": 32, "adapter_out_dim": 32,
        },
        "audio_config": {"num_hidden_layers": 1, "adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {
        "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "shared_experts_intermediate_size": 24,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_lowrank": 4, "head_dim": 16,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
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
        "is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 6],
        "attn_layers": ["local", "lsh"] * 2, "num_buckets": 2, "attention_head_size": 8, "feed_forward_size": 48,
    },
    "bailing_hybrid": {"head_dim": 16, "partial_rotary_factor": 0.5, "layer_group_size": 2, "num_key_value_heads": 4},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 4,
        "num_key_value_heads": 4,
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 97, "encoder_hash_byte_group_size": [3],
        "encoder_config": _BLT | {"hidden_size_global": 64}, "decoder_config": _BLT | {"hidden_size_global": 64},
        "global_config": _BLT | {"hidden_size": 64}, "patcher_config": _BLT,
    },
    "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4},
    "dbrx": {
        "num_key_value_heads": SKIPPED, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}, "falcon": {"head_dim": SKIPPED},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": _WINDOWS, "num_kv_shared_layers": 0, "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        "laurel_rank": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6, "max_position_embeddings": 256},
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8}, "inkling_text": _INKLING,
    "inkling2_text": _INKLING, "ministral": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "prophetnet": {
        "num_hidden_layers": SKIPPED, "num_encoder_layers": 2, "num_decoder_layers": 4,
        "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48, "is_decoder": True,
    },
    "xlnet": {"max_position_embeddings": SKIPPED}, "xlstm": {"v_head_dim": SKIPPED},
    "xmod": {"default_language": "en_XX"}, "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
OVERRIDES |= {
    "albert": {"inner_group_num": 1},
    "esm": {
        "vocab_size": VOCAB, "pad_token_id": 0, "token_dropout": False, "mask_token_id": 3,
        "position_embedding_type": "rotary",
    },
    "esmc": {"num_key_value_heads": SKIPPED},
    "funnel": {"num_hidden_layers": SKIPPED, "block_sizes": [2, 2], "d_head": 8, "n_head": 4, "d_inner": 48},
    "luke": {"entity_vocab_size": VOCAB, "entity_emb_size": 32}, "modernbert": {"local_attention": 8},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": LAYERS},
}  # fmt: skip
# models that also read pictures or sound; a dict is for the part with this name
OVERRIDES |= {
    **{
        name: _sections(2, 1, 1)
        for name in (
            *("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text"),
            *("qwen2_5_omni_text", "cosmos3_edge_text"),
        )
    },
    "glm4v_moe_text": _sections(1, 1, 0),
    **{name: {"vision_start_token_id": 90} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "ernie4_5_vl_moe_text": {**_sections(1, 1, 2), "moe_intermediate_size": [24, 24]},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "chameleon_vqgan": {"embed_dim": 16, "latent_channels": 16, "num_embeddings": 64, "resolution": 16, **_CODES},
    "emu3": {"vocabulary_map": {"<image>": 90}}, "emu3_vqgan": {"embed_dim": 4, "hidden_size": 32, **_CODES},
    "janus_vqgan": {"embed_dim": 8, "latent_channels": 16, "num_embeddings": 64, "projection_dim": 32, **_CODES},
    "mllama_text_model": {"cross_attention_layers": [2]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm5_next_text": {"num_key_value_heads": 4, "head_dim": SKIPPED, "qk_rope_head_dim": 0, "index_kpool": 4},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2", "vision_config": {"hidden_size": 64},
    },
    "hunyuan_vl_text": {"head_dim": 8, **_sections(1, 1, 1, 1)},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "kyutai_speech_to_text": {"audio_pad_token_id": 3, "codebook_vocab_size": 40, "num_codebooks": 4},
    "mistral4": {"head_dim": 16, "num_key_value_heads": 4}, "mistral_large4_text": {"num_key_value_heads": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "muse_spark": {"out_hidden_size": 32, "projector_hidden_size": 32},
    "muse_spark_audio": {"hidden_sizes": [16] * 4, "depths": [1] * 4},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "audio_config": {"projection_hidden_size": 32, "projection_bias": False},
    },
    "nemotron3_5_transcribe_audio": {"hidden_size": SKIPPED},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 32}},
    "mimi": {
        "hidden_size": SKIPPED, "num_filters": 8, "codebook_dim": 8, "codebook_size": 32, "num_quantizers": 8,
        "num_hidden_layers": 1,
    },
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 95},
    "fast_vlm": {"vision_config": {"model_type": "siglip_vision_model"}},
    "vibevoice_acoustic_tokenizer_encoder": {
        "hidden_size": 8, "num_filters": 4, "n_filters": 4, "depths": [1, 1], "downsampling_ratios": [2],
    },
    "step3p5": {"sliding_window": 6}, "unlimited_ocr_text": {"num_key_value_heads": 4},
}  # fmt: skip
# model type → arguments for each token of text: after PaliGemma's prompt a token sees only earlier tokens
TOLD: dict[str, dict[str, int]] = {"paligemma": {"token_type_ids": 1}}
# Types without a tiny model here, with the reason
NOT_BUILT: dict[str, str] = {
    "glm5_next": "a pass of 11 tokens takes seconds without the package flash-linear-attention",
    "musicgen": "AutoModelForCausalLM cannot build it from its configuration",
    "musicgen_melody": "AutoModelForCausalLM cannot build it from its configuration",
    "neomme": "the bare model does not build in this size",
    "ultravbert": "its picture tower does not become small; its text model is ultrabert",
    "evolla": "transformers' auto classes do not find it: two model types have its configuration",
    "gemma3n": "its picture tower needs the package timm; its text model is gemma3n_text",
    "gemma4_assistant": "no model of its own: all its layers read keys and values of the model that it drafts for",
    "gemma4_unified_assistant": "no model of its own: all its layers read keys and values of the model it drafts for",
    "inkling_mm_model": "its sound tower needs the package scipy",
    "qwen3_omni_moe": "the configuration of its talker lacks entries that its model reads",
    "perception_lm": "its picture tower needs the package timm",
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration that is small in all its parts; a part with its own model type uses that type's entry."""
    return CONFIG_MAPPING[model_type](**_wanted(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {})))


def _wanted(kind: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a small configuration; entries of `own` for a part are added to the small ones there."""
    wanted = _small(kind, SMALL if kind.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else SMALL | SENSES) | own
    for name, part in _parts(kind).items():
        needed = own.get(name, {})
        if isinstance(needed, dict):
            part = CONFIG_MAPPING[needed["model_type"]] if "model_type" in needed else part
            line = OVERRIDES.get(part.model_type, {})
            wanted[name] = _wanted(part, line | needed) | {"model_type": part.model_type}
    return {name: value for name, value in wanted.items() if value is not SKIPPED}


def _parts(kind: Any) -> dict[str, Any]:
    specs = kind.sub_configs_defaults.items()
    return {
        name: CONFIG_MAPPING[spec.model_type] if spec.config_class is AutoConfig else spec.config_class
        for name, spec in specs
    }


def _small(kind: Any, small: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are numbers in a default configuration."""
    try:
        default = kind()
    except Exception:
        return {}
    settings = {}
    for name, value in small.items():
        try:
            now = getattr(default, name)
        except Exception:
            continue
        if isinstance(now, int | float) and not isinstance(now, bool):
            settings[name] = value
    return settings


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
    """Return a random model in eval mode, with matrices `spread` times as wide as at initialization."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config._experts_implementation = "eager"  # other implementations do not support float64
    if type(config) in AutoModelForMaskedLM._model_mapping:  # like BERT: an encoder, or a decoder on request
        config.is_decoder = auto is AutoModelForCausalLM
    model = auto.from_config(config).eval().requires_grad_(False).to(dtype)
    spread_weights(model, spread)
    return model
