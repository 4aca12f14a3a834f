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
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.edits import Edit, first_argument, replaced
from sinkscope.models.family import NOT_RUN, Family, embedding_weight, first_tensor, input_device
from sinkscope.quantization.sites import LINEAR, by_output

MOST_CHANGED = 1e-3  # of the largest logit: the rotated model may differ so much by rounding


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
        edits = _edits(model, family, ids, seed)
        with replaced(edits):
            error = float((model(ids, use_cache=False).logits - before).abs().max() / before.abs().max())
            if not error < MOST_CHANGED:
                raise InputError(f"a rotation would change the model's logits, by {error:.1g} of the largest")
            yield


def _edits(model: PreTrainedModel, family: Family, ids: torch.Tensor, seed: int) -> list[Edit]:
    """Return the rotated weights; the checks are of what can be seen, and the logits decide."""
    embedding: Any = model.get_input_embeddings()
    width = embedding.weight.shape[1]
    rotation = random_rotation(width, seed).to(embedding.weight.device)
    seen = _Seen(model, ids)
    gains: dict[Any, torch.Tensor] = {}  # of the norm that each layer reads
    edits: list[Edit] = [(embedding, "weight", _product(embedding.weight, rotation))]
    for norm in seen.norms(width):
        readers = seen.readers(norm)
        if readers:
            gain, neutral = _gain(norm, width)
            gains |= dict.fromkeys(readers, gain)
            edits.append((norm, "weight", neutral))
    for module, gain in gains.items():
        folded = by_output(module, module.weight).double() * gain
        edits.append((module, "weight", by_output(module, _product(folded, rotation, module.weight))))
    for module in _writers(model, family, seen):
        weight = by_output(module, module.weight)
        edits.append((module, "weight", by_output(module, _product(rotation.T, weight, module.weight))))
        if module.bias is not None:
            edits.append((module, "bias", _product(module.bias, rotation)))
    return edits


def _product(a: torch.Tensor, b: torch.Tensor, like: Any = None) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype if like is None else like.dtype).contiguous()


def _writers(model: PreTrainedModel, family: Family, seen: "_Seen") -> list[Any]:
    """Return the linear layers whose outputs are added to the residual stream; InputError if something else is."""
    found = []
    for at, layer in enumerate(family.layer_modules(model)):
        block = family.block(at)
        if block.kind == NOT_RUN:
            continue
        branches = [site for site in ("attn_out", "mlp_out") if site in block.sites]
        if len(branches) < 2 or family.copies is not None:
            raise InputError(f"what layer {at} adds to the residual stream is not known")
        for address in (term.address for site in branches for term in block.terms(site)):
            path, _, end = address.rpartition(".")
            writer = seen.writer(layer.get_submodule(path), end)
            if writer is None:
                raise InputError(f"layer {at} adds the {end} of {path}, which is not a linear layer's")
            found.append(writer)
    return found


def _gain(norm: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gain (D,) of a norm, and the weight with which it has none; InputError unless it is an RMSNorm."""
    ones = 1e3 * torch.ones(1, 1, width, dtype=norm.weight.dtype, device=norm.weight.device)
    output = norm(ones)[0, 0].double()
    for neutral in (1.0, 0.0):  # Gemma's gain is 1 + weight
        gain = norm.weight.double() + 1.0 - neutral
        if torch.allclose(output, gain, rtol=1e-3, atol=1e-5):
            return gain, torch.full_like(norm.weight, neutral)
    raise InputError(f"{type(norm).__name__} is not an RMSNorm")


class _Seen:
    """The inputs and outputs of all modules in one pass. They are kept, so that equal storage means one tensor."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.inputs: dict[nn.Module, torch.Tensor] = {}
        self.outputs: dict[nn.Module, torch.Tensor] = {}

        def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            ends = ((self.inputs, first_argument(args, kwargs) if args or kwargs else None), (self.outputs, output))
            for kept, value in ends:
                if isinstance(value := first_tensor(value), torch.Tensor):
                    kept[module] = value

        hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in model.modules()]
        try:
            model(ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def norms(self, width: int) -> list[Any]:
        """Return the modules with one weight for each coordinate."""
        return [
            module for module in self.outputs if getattr(getattr(module, "weight", None), "shape", None) == (width,)
        ]

    def readers(self, norm: nn.Module) -> list[Any]:
        made = _storage(self.outputs[norm])
        return [module for module, x in self.inputs.items() if isinstance(module, LINEAR) and _storage(x) == made]

    def writer(self, module: nn.Module, end: str) -> nn.Module | None:
        """Return the linear layer whose output is this module's input or output."""
        wanted = _storage((self.inputs if end == "input" else self.outputs)[module])
        return next((at for at, x in self.outputs.items() if isinstance(at, LINEAR) and _storage(x) == wanted), None)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
