"""What the configurations of models that also read pictures or sound need to be small."""

from typing import Any

# Sizes of towers for pictures and sound, of projectors and resamplers
SENSES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "out_hidden_size": 32,
    "encoder_hidden_size": 32,
    "output_channels": 16,
    "mlp_dim": 48,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# of a type, besides what is small in every model; a dict for a part goes to that part
NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _SECTIONS} for name in ("qwen2_vl_text", "qwen2_5_vl_text")},
}
# What a model has to be told of each token of text alone: that it follows PaliGemma's prompt, and sees those before it
TOLD: dict[str, dict[str, int]] = {"paligemma": {"token_type_ids": 1}}
