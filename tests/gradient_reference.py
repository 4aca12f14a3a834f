"""The values that the gradient tables must have, from plain transformers, autograd's own gradients, and float64 loops.

Nothing of sinkscope is imported. Every sequence goes through the model alone and unpadded, every tensor retains its
gradient, attention is eager, and `backward` runs as in training. reference.py names the modules of each architecture
and records attention.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from reference import Place, by_head, long_enough, place_of, repeats, run_watched
from reference import assert_same as assert_same
from torch import nn
from transformers import PreTrainedModel

NAME = "eager"  # the attention implementation
GRAM_QUERIES = 64  # theorem 1's μ, σ² and ρ are measured on at most so many evenly spaced queries
ROUND_OFF = 1e-5  # relative tolerance of the bounds


def gain_of(norm: nn.Module) -> np.ndarray:
    """Return γ, which Gemma stores as 1 + weight."""
    weight = norm.weight.detach().double().numpy()
    return 1 + weight if type(norm).__name__.startswith("Gemma") else weight


@dataclass
class Layer:
    """One layer on one sequence, with gradients of the mean loss of the whole run."""

    weights: np.ndarray  # (H,T,T)
    query: np.ndarray  # gradients (H,T,d); key, value (K,T,d)
    key: np.ndarray
    value: np.ndarray
    mix: np.ndarray  # (H,T,d)
    sites: dict[str, np.ndarray]  # gradient by site, (T,D)
    inputs: dict[str, np.ndarray]  # value by site, (T,D)


@dataclass
class Sequence:
    ids: np.ndarray
    loss: float  # cross-entropy summed over the predicted tokens
    layers: list[Layer]


def trainable_twin(model: PreTrainedModel) -> PreTrainedModel:
    twin = copy.deepcopy(model).requires_grad_(True)
    if on_interface(twin):
        twin.set_attn_implementation(NAME)
    return twin


OWN_CODE = ("falcon", "bloom", "mpt", "gptj", "gpt_neo")


def on_interface(model: PreTrainedModel) -> bool:
    return model.config.model_type not in OWN_CODE


def record(model: PreTrainedModel, sequences: list[np.ndarray]) -> list[Sequence]:
    """Run forward and backward for one sequence at a time; the loss is the summed cross-entropy ÷ predicted tokens."""
    model.zero_grad()
    predicted = sum(len(ids) - 1 for ids in sequences)
    return [_record(model, ids, predicted) for ids in sequences]


def _record(model: PreTrainedModel, ids: np.ndarray, predicted: int) -> Sequence:
    embedding = model.get_input_embeddings()
    with embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True)):
        logits, sites, calls = run_watched(model, ids)
    surprise = -logits.double().log_softmax(-1)
    loss = sum(surprise[t, ids[t + 1]] for t in range(len(ids) - 1))
    assert isinstance(loss, torch.Tensor)
    (loss / predicted).backward()
    assert len(sites) == len(calls.qkv) == len(calls.weights) == len(calls.mixes)
    layers = []
    for site, qkv, weights, mix in zip(sites, calls.qkv, calls.weights, calls.mixes, strict=True):
        query, key, value = by_head(model.config, [_gradient(x)[0] for x in qkv])
        # newer Falcons repeat each key and value head: a head's gradient is the sum of the gradients of its copies
        key, value = (x.reshape(-1, repeats(model.config), *x.shape[1:]).sum(1) for x in (key, value))
        mix_gradient = _gradient(mix)[0]
        layers.append(
            Layer(
                _numpy(weights[0, ..., : len(ids)]), query, key, value,
                mix_gradient.transpose(1, 0, 2) if on_interface(model) else mix_gradient,
                {name: _gradient(x).reshape(len(ids), -1) for name, x in site.items()},
                {name: _numpy(x).reshape(len(ids), -1) for name, x in site.items()},
            )
        )  # fmt: skip
    return Sequence(np.asarray(ids), loss.item(), layers)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _gradient(x: torch.Tensor) -> np.ndarray:
    return _numpy(torch.zeros_like(x) if x.grad is None else x.grad)


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
            gradients = [getattr(sequence.layers[number], pathway) for sequence in sequences]  # (heads,T,d)
            for position in range(positions):
                reached = [found[:, position] for found in gradients if found.shape[1] > position]
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


def roles_of(place: Place) -> dict[str, tuple[str, str | None, str, str | None]]:
    """Return each branch's input x, its own norm's output y, its output r, and the stream z = x + r after it."""
    attn_norm = None if place.attn_norm is None else "attn_norm"
    mlp_norm = None if place.mlp_norm is None else "mlp_norm"
    if place.post_norm:
        return {"attn": ("layer_in", None, "attn_out", "mid")}  # the MLP's sum is at no site
    if place.mid is None:
        shared = place.mlp_norm is None  # the norm's gradient is the sum over both branches
        attn_norm = None if shared else attn_norm
        return {"attn": ("layer_in", attn_norm, "attn_out", None), "mlp": ("layer_in", mlp_norm, "mlp_out", None)}
    return {"attn": ("layer_in", attn_norm, "attn_out", "mid"), "mlp": ("mid", mlp_norm, "mlp_out", "layer_out")}


def gradient_ratio(model: PreTrainedModel, sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, _ in enumerate(sequences[0].layers):
        for branch, (x, y, r, z) in roles_of(place_of(model.config)).items():
            for position in range(positions):
                found: dict[str, list[float]] = {"input_norm": [], "bloat": [], "compress": [], "change": []}
                for sequence in long_enough(sequences, position):
                    layer = sequence.layers[number]
                    at = {site: gradients[position] for site, gradients in layer.sites.items()}
                    found["input_norm"].append(_norm(layer.inputs[x][position]))
                    if y is not None:
                        found["bloat"].append(_ratio(_norm(at[y]), _norm(at[r])))
                    if y is not None and z is not None:
                        found["compress"].append(_ratio(_norm(at[x] - at[z]), _norm(at[y])))
                    if z is not None:
                        found["change"].append(_ratio(_norm(at[x]), _norm(at[z])))
                means = {name: _mean(values) for name, values in found.items()}
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
            upstream = [predicted * sequence.layers[number].mix[head][queries] for sequence in full]  # (queries, d)
            mu = np.mean([g for found in upstream for g in found], axis=0)
            apart = np.array(upstream) - mu
            products = np.abs(np.mean(apart @ apart.transpose(0, 2, 1), axis=0))  # (queries, queries)
            variance = products.diagonal().max()
            covariance = (products - np.diag(products.diagonal())).max()
            for position in range(positions):
                columns = np.array([sequence.layers[number].weights[head, position:, position] for sequence in full])
                g = predicted * np.array([sequence.layers[number].mix[head, position:] for sequence in full])
                mass, second = columns.sum(1), (columns**2).sum(1)
                low = np.mean(mass**2) * (mu @ mu)
                high = low + np.mean(variance * second + covariance * (mass**2 - second))
                measured = np.mean((np.einsum("nt,ntd->nd", columns, g) ** 2).sum(1))
                error = size = 0.0
                for sequence in long_enough(sequences, position):
                    this = sequence.layers[number]
                    group = range(head // groups * groups, head // groups * groups + groups)
                    routed = sum(this.weights[h, position:, position] @ this.mix[h, position:] for h in group)
                    error += np.sum((this.value[head // groups, position] - routed) ** 2)
                    size += np.sum(this.value[head // groups, position] ** 2)
                residual = np.sqrt(error / size) if size > 0 else np.nan
                inside = (1 - ROUND_OFF) * low <= measured <= (1 + ROUND_OFF) * high
                rows.append((number, head, position, residual, low, measured, high, inside))
    columns = ["identity_residual", "lower_bound", "measured", "upper_bound", "holds"]
    return pd.DataFrame(rows, columns=["layer", "head", "position", *columns])


def norm_bound(model: PreTrainedModel, sequences: list[Sequence], positions: int) -> pd.DataFrame:
    """Check theorem 2 for every norm before a branch, with γ and ε of the module."""
    place = place_of(model.config)
    rows = []
    for number, module in enumerate(model.get_submodule(place.layers)):
        for branch, (x, y, _, z) in roles_of(place).items():
            if y is None or z is None:
                continue
            norm = module.get_submodule({"attn": place.attn_norm, "mlp": place.mlp_norm}[branch])
            largest = np.abs(gain_of(norm)).max()
            epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
            for position in range(positions):
                ratios, bounds, inside, tightness = [], [], [], []
                for sequence in long_enough(sequences, position):
                    layer = sequence.layers[number]
                    entries = layer.inputs[x][position]
                    entries = entries - entries.mean() if isinstance(norm, nn.LayerNorm) else entries
                    bounds.append(largest / np.sqrt(np.mean(entries**2) + epsilon))
                    through = _norm(layer.sites[x][position] - layer.sites[z][position])
                    ratios.append(_ratio(through, _norm(layer.sites[y][position])))
                    if not np.isnan(ratios[-1]):
                        inside.append(float(ratios[-1] <= 1.005 * bounds[-1]))
                        tightness.append(ratios[-1] / bounds[-1])
                rows.append((number, branch, position, *map(_mean, (ratios, bounds, inside, tightness))))
    return pd.DataFrame(rows, columns=["layer", "branch", "position", "measured", "bound", "holds", "tightness"])


def tables(model: PreTrainedModel, sequences: list[Sequence], positions: int) -> dict[str, pd.DataFrame]:
    return {
        "gradient": gradient(sequences, positions),
        "gradient_ratio": gradient_ratio(model, sequences, positions),
        "gradient_check": gradient_check(sequences, positions),
        "norm_bound": norm_bound(model, sequences, positions),
    }
