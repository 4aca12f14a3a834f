"""Whether two models compute the same: a digest of their configuration and weights."""

import hashlib
import json

import torch
from torch import nn

OF_THE_PLACE = {"_name_or_path", "transformers_version"}  # entries of a configuration that decide no number


def fingerprint(model: nn.Module) -> str:
    """A digest of a model's configuration and of its parameters and buffers: all their values, or of offloaded ones
    names and shapes.

    Args:
        model: with a `config` as transformers' models have it.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    settings = model.config.to_dict()  # type: ignore[union-attr,operator]
    decisive = {name: value for name, value in settings.items() if name not in OF_THE_PLACE}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            digest.update(tensor.detach().flatten().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
