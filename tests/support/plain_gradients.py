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
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return by layer the gradients of the projected values for the run's mean loss, (K,P,d).

    Further results are for the last sequence: the gradients of the values in attention, and the projected values,
    (T,K,d). `mask` (1,1,T,T) is added to all logits.
    """
    twin = copy.deepcopy(model).requires_grad_(True)
    twin.set_attn_implementation("eager")
    family = find_family(model)
    projected = [projections(twin, family, layer)["value"] for layer in range(twin.config.num_hidden_layers)]
    indices = [projection.places for projection in projected]  # by head
    predicted = sum(len(ids) - 1 for ids in sequences)
    total: list[torch.Tensor] = []
    for ids in sequences:
        raw: list[torch.Tensor] = []
        attended: list[torch.Tensor] = []
        handles = [
            projection.module.register_forward_hook(lambda m, a, out, kept=kept: kept.append(out), prepend=prepend)
            for projection in projected
            for kept, prepend in ((raw, True), (attended, False))  # before and after a retrofit's hook
        ]
        tokens = torch.tensor(ids)[None]
        with in_double(twin.base_model):
            loss = twin(tokens, labels=tokens, attention_mask=mask, use_cache=False).loss * (len(ids) - 1) / predicted
        for handle in handles:
            handle.remove()
        gradients = torch.autograd.grad(loss, raw + attended)
        shaped = [x[0, :, heads] for x, heads in zip(gradients, indices * 2, strict=True)]  # (T,K,d)
        if not total:
            total = [x.new_zeros(x.shape[1], positions, x.shape[2]) for x in shaped[: len(indices)]]
        for sum_, x in zip(total, shaped, strict=False):
            sum_[:, : len(ids)] += x[:positions].transpose(0, 1)
    values = [x.detach()[0, :, heads] for x, heads in zip(raw, indices, strict=True)]
    return total, shaped[len(indices) :], values
