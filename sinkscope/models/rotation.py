"""A random rotation of the residual stream, folded into the weights: the function of the model stays the same.

Every token's state h becomes h Q, in which the outliers of few coordinates are spread over all of them (QuaRot,
Ashkboos et al. 2024, without its rotations inside the branches). RMSNorm commutes with Q once its gain is part of the
layers that read it. Q is a Hadamard matrix of the largest power of two that divides the width, times a random
rotation of the rest, with random signs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.edits import Edit
from sinkscope.models.family import NOT_RUN, Family
from sinkscope.models.norms import ModuleEnds, gain_of, reparametrized, source
from sinkscope.models.projections import by_output


def random_rotation(width: int, seed: int) -> torch.Tensor:
    """Return a random orthogonal matrix (width, width) in float64, all of whose entries are small."""
    power = width & -width  # the largest power of two that divides the width
    drawn = np.random.default_rng(seed)
    rest, upper = np.linalg.qr(drawn.standard_normal((width // power, width // power)))
    rest *= np.sign(np.diag(upper))  # now uniformly distributed
    rotation = np.kron(hadamard(power) / np.sqrt(power), rest)
    return torch.from_numpy(drawn.choice([-1.0, 1.0], (width, 1)) * rotation)


@contextmanager
def rotated(model: PreTrainedModel, family: Family, rotation: torch.Tensor) -> Iterator[None]:
    """Rotate the residual stream until the end of the block, and then restore the weights bit for bit.

    Args:
        rotation: An orthogonal matrix (D,D), such as `random_rotation`.

    Raises:
        InputError: The model is not built so that a rotation can be folded into it, or it would change the function.
    """
    with reparametrized(model, lambda: _rotated_weights(model, family, rotation), "a rotation"):
        yield


def _rotated_weights(model: PreTrainedModel, family: Family, rotation: torch.Tensor) -> list[Edit]:
    """Return the rotated weights; `rotated` compares the logits, because these checks may miss an unusual layer."""
    ends = ModuleEnds(model)
    embedding: Any = model.get_input_embeddings()
    rotation = rotation.to(embedding.weight.device)
    gains: dict[Any, torch.Tensor] = {}  # linear layer → the gain of the norm whose output it reads
    edits: list[Edit] = [(embedding, "weight", _product(embedding.weight, rotation))]
    for norm, readers in ends.readers_of_norms().items():
        if len(norm.weight) != len(rotation):
            continue
        gain, neutral = gain_of(norm)
        gains |= dict.fromkeys(readers, gain)
        edits.append((norm, "weight", torch.full_like(norm.weight, neutral)))
    for module, gain in gains.items():
        folded = by_output(module, module.weight).double() * gain
        edits.append((module, "weight", by_output(module, _product(folded, rotation, module.weight))))
    for number, layer in enumerate(family.layer_modules(model)):
        block = family.block(number)
        if block.kind == NOT_RUN:
            continue
        branches = [site for site in ("attn_out", "mlp_out") if site in block.sites]
        if len(branches) < 2 or family.copies is not None:
            raise InputError(f"what layer {number} adds to the residual stream is not known")
        for address in (term.address for site in branches for term in block.terms(site)):
            path, _, end = address.rpartition(".")
            added = source((ends.inputs if end == "input" else ends.outputs)[layer.get_submodule(path)])
            writer: Any = next((module for module in ends.linear if source(ends.outputs[module]) is added), None)
            if writer is None:
                raise InputError(f"layer {number} adds the {end} of {path}, which is not a linear layer's")
            weight = by_output(writer, writer.weight)
            edits.append((writer, "weight", by_output(writer, _product(rotation.T, weight, writer.weight))))
            if writer.bias is not None:
                edits.append((writer, "bias", _product(writer.bias, rotation)))
    return edits


def _product(a: torch.Tensor, b: torch.Tensor, like: Any = None) -> torch.Tensor:
    """Return a product in the dtype and on the device of `like`, or of a."""
    target = a if like is None else like
    return (a.to(target.device, torch.float64) @ b.to(target.device, torch.float64)).to(target.dtype).contiguous()
