"""The values that the gradient tables must have, by float64 loops over autograd's gradients (support/plain.py).

Every sequence goes through plain transformers alone and unpadded, and `backward` runs as in training.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from reference import assert_same as assert_same
from reference import long_enough
from support.plain import Layer, Sequence
from support.plain import record as record_one
from torch import nn
from transformers import PreTrainedModel

GRAM_QUERIES = 64  # theorem 1's μ, σ² and ρ are measured on at most so many evenly spaced queries
ROUND_OFF = 1e-5  # relative tolerance of the bounds


def gain_of(norm: nn.Module) -> np.ndarray:
    """Return γ, which Gemma stores as 1 + weight."""
    weight = norm.weight.detach().double().numpy()
    return 1 + weight if type(norm).__name__.startswith("Gemma") else weight


def record(model: PreTrainedModel, sequences: list[np.ndarray]) -> list[Sequence]:
    """Run forward and backward for one sequence at a time; the loss is the summed cross-entropy ÷ predicted tokens."""
    predicted = sum(len(ids) - 1 for ids in sequences)
    return [record_one(model, ids, predicted) for ids in sequences]


class DoubleTorch:
    """The module torch, with float64 in place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(model: PreTrainedModel) -> Iterator[None]:
    """Run a model's own code without its conversions to float32 (norms, softmax)."""
    single = torch.Tensor.float
    with (
        patch.object(sys.modules[type(model).__module__], "torch", DoubleTorch()),
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x)),
    ):
        yield


def gradient(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for pathway in () if layer.query is None else ("query", "key", "value"):
            gradients = [sequence.layers[number].gradients[pathway] for sequence in sequences]  # (heads,T,d)
            for position in range(positions):
                reached = [of_sequence[:, position] for of_sequence in gradients if of_sequence.shape[1] > position]
                squares = np.square(sum(reached, np.zeros((len(gradients[0]), 1)))).sum(1)
                rows.append((number, pathway, -1, position, np.sqrt(squares.sum())))
                rows += [(number, pathway, head, position, np.sqrt(square)) for head, square in enumerate(squares)]
    return pd.DataFrame(rows, columns=["layer", "pathway", "head", "position", "grad_norm"])


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(x * x)))


def _ratio(above: float, below: float) -> float:
    """Return the ratio; NaN if the gradient that it is compared with is 0."""
    return above / below if below > 0 else np.nan


def _mean(values: list[float]) -> float:
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


def roles_of(layer: Layer) -> dict[str, tuple[str, str | None, str, str | None]]:
    """Return each branch's input x, its own norm's output y, its output r, and the stream z = x + r after it."""
    attn_norm, mlp_norm = (name if name in layer.norms else None for name in ("attn_norm", "mlp_norm"))
    if "mid" not in layer.sites:
        return {"attn": ("layer_in", attn_norm, "attn_out", None), "mlp": ("layer_in", mlp_norm, "mlp_out", None)}
    roles = {"attn": ("layer_in", attn_norm, "attn_out", "mid"), "mlp": ("mid", mlp_norm, "mlp_out", "layer_out")}
    return {"attn": roles["attn"]} if layer.is_post_norm else roles  # the MLP's sum is at no site


def gradient_ratio(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, first in enumerate(sequences[0].layers):
        for branch, (x, y, r, z) in roles_of(first).items():
            for position in range(positions):
                ratios: dict[str, list[float]] = {"input_norm": [], "bloat": [], "compress": [], "change": []}
                for sequence in long_enough(sequences, position):
                    layer = sequence.layers[number]
                    at = {site: layer.gradients[site][position] for site in (x, y, r, z) if site is not None}
                    ratios["input_norm"].append(_norm(layer.sites[x][position]))
                    if y is not None:
                        ratios["bloat"].append(_ratio(_norm(at[y]), _norm(at[r])))
                    if y is not None and z is not None:
                        ratios["compress"].append(_ratio(_norm(at[x] - at[z]), _norm(at[y])))
                    if z is not None:
                        ratios["change"].append(_ratio(_norm(at[x]), _norm(at[z])))
                means = {name: _mean(values) for name, values in ratios.items()}
                rows.append({"layer": number, "branch": branch, "position": position} | means)
    return pd.DataFrame(rows)


def gradient_check(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    """Check theorem 1 on the longest sequences, for the summed loss, whose gradients do not depend on the run's size.

    `identity_residual` is the residual of the identity in these gradients.
    """
    predicted = sum(len(sequence.ids) - 1 for sequence in sequences)
    longest = max(len(sequence.ids) for sequence in sequences)
    full = [sequence for sequence in sequences if len(sequence.ids) == longest]
    queries = np.round(np.linspace(0, longest - 1, min(GRAM_QUERIES, longest))).astype(int)
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        heads, groups = len(layer.query), len(layer.query) // len(layer.value)
        for head in range(heads):
            mixes = [predicted * sequence.layers[number].gradients["mix"][head] for sequence in full]
            upstream = [mix[queries] for mix in mixes]  # (queries, d)
            mu = np.mean([g for of_sequence in upstream for g in of_sequence], axis=0)
            apart = np.array(upstream) - mu
            products = np.abs(np.mean(apart @ apart.transpose(0, 2, 1), axis=0))  # (queries, queries)
            variance = products.diagonal().max()
            covariance = (products - np.diag(products.diagonal())).max()
            for position in range(positions):
                columns = np.array([sequence.layers[number].weights[head, position:, position] for sequence in full])
                g = np.array(mixes)[:, position:]
                mass, second = columns.sum(1), (columns**2).sum(1)
                low = np.mean(mass**2) * (mu @ mu)
                high = low + np.mean(variance * second + covariance * (mass**2 - second))
                measured = np.mean((np.einsum("nt,ntd->nd", columns, g) ** 2).sum(1))
                error = size = 0.0
                for sequence in long_enough(sequences, position):
                    weights, of = sequence.layers[number].weights, sequence.layers[number].gradients
                    group = range(head // groups * groups, head // groups * groups + groups)
                    routed = sum(weights[h, position:, position] @ of["mix"][h, position:] for h in group)
                    error += np.sum((of["value"][head // groups, position] - routed) ** 2)
                    size += np.sum(of["value"][head // groups, position] ** 2)
                residual = np.sqrt(error / size) if size > 0 else np.nan
                inside = (1 - ROUND_OFF) * low <= measured <= (1 + ROUND_OFF) * high
                rows.append((number, head, position, residual, low, measured, high, inside))
    columns = ["identity_residual", "lower_bound", "measured", "upper_bound", "holds"]
    return pd.DataFrame(rows, columns=["layer", "head", "position", *columns])


def norm_bound(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    """Check theorem 2 for every norm before a branch, with γ and ε of the module."""
    rows = []
    for number, first in enumerate(sequences[0].layers):
        for branch, (x, y, _, z) in roles_of(first).items():
            if y is None or z is None:
                continue
            norm = first.norms[y]
            largest = np.abs(gain_of(norm)).max()
            epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
            for position in range(positions):
                ratios, bounds, inside, tightness = [], [], [], []
                for sequence in long_enough(sequences, position):
                    layer = sequence.layers[number]
                    entries = layer.sites[x][position]
                    entries = entries - entries.mean() if isinstance(norm, nn.LayerNorm) else entries
                    bounds.append(largest / np.sqrt(np.mean(entries**2) + epsilon))
                    through = _norm(layer.gradients[x][position] - layer.gradients[z][position])
                    ratios.append(_ratio(through, _norm(layer.gradients[y][position])))
                    if not np.isnan(ratios[-1]):
                        inside.append(float(ratios[-1] <= 1.005 * bounds[-1]))
                        tightness.append(ratios[-1] / bounds[-1])
                rows.append((number, branch, position, *map(_mean, (ratios, bounds, inside, tightness))))
    return pd.DataFrame(rows, columns=["layer", "branch", "position", "measured", "bound", "holds", "tightness"])


def tables(sequences: list[Sequence], positions: int) -> dict[str, pd.DataFrame]:
    of_each = (gradient, gradient_ratio, gradient_check, norm_bound)
    return {table.__name__: table(sequences, positions) for table in of_each}
