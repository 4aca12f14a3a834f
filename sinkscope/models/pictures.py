"""What models of pictures need besides weights: a processor, and for encoders of pictures a way to load them."""

from typing import Any

import torch
import transformers

from sinkscope.errors import InputError, explained
from sinkscope.models import files as model_files
from sinkscope.models.loading import AUTO_CLASSES, DTYPES, LoadedModel, read_config
from sinkscope.options.measuring import RunConfig


def load_processor(source: str, revision: str | None = None, *, text: bool = True) -> Any:
    """Load the processor of pictures, with `text` also of text, from a folder or the hub, without code of its own."""
    kind = transformers.AutoProcessor if text else transformers.AutoImageProcessor
    with model_files.quiet(), explained(f"{source} has no processor that reads pictures"):
        return kind.from_pretrained(source, revision=revision, trust_remote_code=False)


def load_encoder(config: RunConfig) -> LoadedModel | None:
    """Load a vision transformer (ViT, DINOv2, the vision half of CLIP or SigLIP); None for a model of another kind."""
    if config.model is None or config.gguf_file is not None:
        return None
    with model_files.quiet():
        settings = model_files.find_settings(config.model, config.revision, None)
        about = read_config(settings, config.trust_remote_code)
        vision = getattr(about, "vision_config", about)
        if any(type(about) in auto._model_mapping for auto in AUTO_CLASSES) or not hasattr(vision, "patch_size"):
            return None
        files = model_files.find_files(config.model, config.revision, None, config.allow_pickle)
        model_files.check_weights(files)
        dtype = DTYPES[config.dtype or "float32"]
        with explained(f"transformers could not load {files.source}"):
            model = transformers.AutoModel.from_pretrained(files.folder, dtype=dtype, device_map=config.device_map)
    model = getattr(model, "vision_model", model)
    if not hasattr(model, "set_attn_implementation"):
        raise InputError(f"{files.source}: its encoder of pictures is no vision transformer of transformers")
    model = model.eval().requires_grad_(False).to(torch.float32 if config.dtype is None else dtype)
    return LoadedModel(model, None, files.name, files.source, files.revision, files.commit, files.notices, files.stored)
