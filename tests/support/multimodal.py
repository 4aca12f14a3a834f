"""Settings that make the configurations of models that also read pictures or sound small."""

from typing import Any

# Sizes of towers for pictures and sound, of projectors and resamplers
SENSES: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "out_hidden_size": 32, "encoder_hidden_size": 32,
    "output_channels": 16, "mlp_dim": 48,
}  # fmt: skip


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}}


SKIPPED = object()  # the default is kept
_CODES = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 64}

# model type → settings in addition to those of every model; a dict is for the part with this name
NEEDED: dict[str, dict[str, Any]] = {
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
    "evolla": "transformers' auto classes do not find it: two model types have its configuration",
    "gemma3n": "its picture tower needs the package timm; its text model is gemma3n_text",
    "gemma4_assistant": "no model of its own: all its layers read keys and values of the model that it drafts for",
    "gemma4_unified_assistant": "no model of its own: all its layers read keys and values of the model it drafts for",
    "inkling_mm_model": "its sound tower needs the package scipy",
    "qwen3_omni_moe": "the configuration of its talker lacks entries that its model reads",
    "perception_lm": "its picture tower needs the package timm",
}
