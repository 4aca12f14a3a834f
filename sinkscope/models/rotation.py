"""A random rotation of the residual stream, folded into the weights: the function of the model stays the same.

Every token's state h becomes h Q, in which the outliers of few coordinates are spread over all of them (QuaRot,
Ashkboos et al. 2024, without its rotations inside the branches). RMSNorm commutes with Q once its gain is part of the
layers that read it. Q is a Hadamard matrix of the largest power of two that divides the width, times a random
rotation of the rest, with random signs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.edits import Edit, first_argument, replaced
from sinkscope.models.family import NOT_RUN, Family, embedding_weight, first_tensor, input_device
from sinkscope.models.projections import LINEAR_LAYERS, by_output

MOST_CHANGED = 1e-3  # largest difference of logits by rounding, relative to the largest logit


def random_rotation(width: int, seed: int) -> torch.Tensor:
    """Return a random orthogonal matrix (width, width) in float64, all of whose entries are small."""
    power = width & -width  # the largest power of two that divides the width
    drawn = np.random.default_rng(seed)
    rest, upper = np.linalg.qr(drawn.standard_normal((width // power, width // power)))
    rest *= np.sign(np.diag(upper))  # now uniformly distributed
    rotation = np.kron(hadamard(power) / np.sqrt(power), rest)
    return torch.from_numpy(drawn.choice([-1.0, 1.0], (width, 1)) * rotation)


@contextmanager
def rotated(model: PreTrainedModel, family: Family, seed: int) -> Iterator[None]:
    """Rotate the residual stream until the end of the block, and then restore the weights bit for bit.

    Raises:
        InputError: The model is not built so that a rotation can be folded into it, or it would change the function.
    """
    ids = torch.arange(3, 14, device=input_device(model))[None] % len(embedding_weight(model))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with replaced(_rotated_weights(model, family, ids, seed)):
            error = float((model(ids, use_cache=False).logits - before).abs().max() / before.abs().max())
            if not error < MOST_CHANGED:
                raise InputError(f"a rotation would change the model's logits, by {error:.1g} of the largest")
            yield


def _rotated_weights(model: PreTrainedModel, family: Family, ids: torch.Tensor, seed: int) -> list[Edit]:
    """Return the rotated weights; `rotated` compares the logits, because these checks may miss an unusual layer."""
    # the input and output of each module in its last run; they are kept, so that equal storage means one tensor
    inputs: dict[nn.Module, torch.Tensor] = {}
    outputs: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        for ends, end in ((inputs, first_argument(args, kwargs) if args or kwargs else None), (outputs, output)):
            if isinstance(tensor := first_tensor(end), torch.Tensor):
                ends[module] = tensor

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        model(ids, use_cache=False)
    linear: list[Any] = [module for module in outputs if isinstance(module, LINEAR_LAYERS)]
    embedding: Any = model.get_input_embeddings()
    width = embedding.weight.shape[1]
    rotation = random_rotation(width, seed).to(embedding.weight.device)
    gains: dict[Any, torch.Tensor] = {}  # linear layer → the gain of the norm whose output it reads
    edits: list[Edit] = [(embedding, "weight", _product(embedding.weight, rotation))]
    for norm in outputs:
        if getattr(getattr(norm, "weight", None), "shape", None) != (width,):
            continue
        readers = [module for module in linear if _storage(inputs[module]) == _storage(outputs[norm])]
        if readers:
            gain, neutral = _gain(norm, width)
            gains |= dict.fromkeys(readers, gain)
            edits.append((norm, "weight", neutral))
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
            added = _storage((inputs if end == "input" else outputs)[layer.get_submodule(path)])
            writer: Any = next((module for module in linear if _storage(outputs[module]) == added), None)
            if writer is None:
                raise InputError(f"layer {number} adds the {end} of {path}, which is not a linear layer's")
            weight = by_output(writer, writer.weight)
            edits.append((writer, "weight", by_output(writer, _product(rotation.T, weight, writer.weight))))
            if writer.bias is not None:
                edits.append((writer, "bias", _product(writer.bias, rotation)))
    return edits


def _product(a: torch.Tensor, b: torch.Tensor, like: Any = None) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype if like is None else like.dtype).contiguous()


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _gain(norm: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gain (D,) of a norm, and the weight that makes its gain 1; InputError unless it is an RMSNorm."""
    ones = 1e3 * torch.ones(1, 1, width, dtype=norm.weight.dtype, device=norm.weight.device)
    output = norm(ones)[0, 0].double()
    for neutral in (1.0, 0.0):  # Gemma's gain is 1 + weight
        gain = norm.weight.double() + 1.0 - neutral
        if torch.allclose(output, gain, rtol=1e-3, atol=1e-5):
            return gain, torch.full_like(norm.weight, neutral)
    raise InputError(f"{type(norm).__name__} is not an RMSNorm")
