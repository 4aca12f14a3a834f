"""Gradients of values by autograd, from transformers' own eager model."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from gradient_reference import in_double
from transformers import PreTrainedModel

from sinkscope.models.families import find_family
from sinkscope.models.projections import projections


def value_gradients(
    model: PreTrainedModel, sequences: Sequence[np.ndarray], positions: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradients of the projected values for the run's mean loss, (layers,K,P,d).

    `mask` (1,1,T,T) is added to all logits.
    """
    twin = copy.deepcopy(model).requires_grad_(True)
    twin.set_attn_implementation("eager")
    family = find_family(model)
    projected = [projections(twin, family, layer)["value"] for layer in range(twin.config.num_hidden_layers)]
    predicted = sum(len(ids) - 1 for ids in sequences)
    heads, width = projected[0].places.shape
    total = torch.zeros(len(projected), heads, positions, width, dtype=torch.float64)
    for ids in sequences:
        raw: list[torch.Tensor] = []  # before a retrofit's hook
        handles = [
            projection.module.register_forward_hook(lambda m, a, out, kept=raw: kept.append(out), prepend=True)
            for projection in projected
        ]
        tokens = torch.tensor(ids)[None]
        with in_double(twin.base_model):
            loss = twin(tokens, labels=tokens, attention_mask=mask, use_cache=False).loss * (len(ids) - 1) / predicted
        for handle in handles:
            handle.remove()
        for sums, x, projection in zip(total, torch.autograd.grad(loss, raw), projected, strict=True):
            sums[:, : len(ids)] += x[0, :positions, projection.places].transpose(0, 1)
    return total
