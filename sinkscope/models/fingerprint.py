"""Whether two models have the same weights, told from a few entries of each tensor."""

import hashlib

import torch
from torch import nn

ENTRIES = 64  # of each tensor, evenly spaced


def fingerprint(model: nn.Module) -> str:
    """A digest of all parameters' names, shapes, and ENTRIES entries each; of offloaded ones, names and shapes."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.numel() and not parameter.is_meta:
            places = torch.linspace(0, parameter.numel() - 1, ENTRIES, dtype=torch.float64).long()
            digest.update(str(parameter.detach().flatten()[places.to(parameter.device)].tolist()).encode())
    return digest.hexdigest()
