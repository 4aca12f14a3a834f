"""The expected gradient tables: plain transformers, autograd's own gradients, float64 loops.

Nothing of sinkscope is imported. Every sequence goes through the model alone and unpadded, all recorded tensors keep
their gradients, attention is dense, and `backward` runs as in training.

Attention is recorded in the three ways that transformers has: a function registered with `AttentionInterface`,
`F.scaled_dot_product_attention` made dense (Falcon, whose eager path adds ALiBi twice), and the own code of BLOOM,
MPT, GPT-J and GPT-Neo.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from reference import (
    Calls,
    Place,
    dense_sdpa,
    has_own_code,
    kept,
    long_enough,
    own_attention,
    place_of,
    recorded_softmax,
    site_hooks,
)
from reference import assert_same as assert_same
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

SITES = ("layer_in", "mid", "attn_norm", "attn_out", "mlp_norm", "mlp_out", "layer_out")
NAME = "gradient_reference"  # of the attention implementation
GRAM_QUERIES = 64  # theorem 1's μ, σ² and ρ are measured on at most so many evenly spaced queries
ROUND_OFF = 1e-5  # relative to the upper bound: a bound may be missed by this


def gain_of(norm: nn.Module) -> np.ndarray:
    """γ, which Gemma stores as 1 + weight."""
    weight = norm.weight.detach().double().numpy()
    return 1 + weight if type(norm).__name__.startswith("Gemma") else weight


# ------------------------------------------------------------------------------------------- recording


@dataclass
class Layer:
    """One layer on one sequence: tensors, and gradients of the mean loss of the complete run."""

    weights: np.ndarray  # (H,T,T)
    query: np.ndarray  # gradients (H,T,d); key, value (K,T,d)
    key: np.ndarray
    value: np.ndarray
    mix: np.ndarray  # (H,T,d)
    sites: dict[str, np.ndarray]  # gradient by site, (T,D)
    inputs: dict[str, np.ndarray]  # values by site, (T,D)


@dataclass
class Sequence:
    ids: np.ndarray
    loss: float  # cross-entropy summed over what it predicts
    layers: list[Layer]


def trainable_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose weights are trainable."""
    twin = copy.deepcopy(model).requires_grad_(True)
    if on_interface(twin):
        twin.set_attn_implementation(NAME)
    return twin


def on_interface(model: PreTrainedModel) -> bool:
    return not has_own_code(model)


def record(model: PreTrainedModel, sequences: list[np.ndarray]) -> list[Sequence]:
    """Run forward and backward on each sequence. The loss is the summed cross-entropy ÷ predicted tokens."""
    model.zero_grad()
    predicted = sum(len(ids) - 1 for ids in sequences)
    return [_record(model, ids, predicted) for ids in sequences]


def _record(model: PreTrainedModel, ids: np.ndarray, predicted: int) -> Sequence:
    place = place_of(model.config)
    sites: list[dict[str, torch.Tensor]] = []
    calls = Calls()
    tokens = torch.as_tensor(ids)
    with ExitStack() as stack:
        embedding = model.get_input_embeddings().register_forward_hook(_require_grad)
        stack.callback(embedding.remove)
        for layer in model.get_submodule(place.layers):
            sites.append({})
            stack.enter_context(site_hooks(layer, place, sites[-1], SITES))
        stack.enter_context(_attention_hooks(model, place, calls))
        logits = model(tokens[None], use_cache=False).logits[0]
    surprise = -logits.double().log_softmax(-1)
    loss = sum(surprise[t, tokens[t + 1]] for t in range(len(ids) - 1))
    assert isinstance(loss, torch.Tensor)
    (loss / predicted).backward()
    assert len(sites) == len(calls.qkv) == len(calls.weights) == len(calls.mixes)
    layers = []
    for site, qkv, weights, mix in zip(sites, calls.qkv, calls.weights, calls.mixes, strict=True):
        query, key, value = _head_gradients(model.config, qkv)
        layers.append(
            Layer(
                _numpy(weights[0]), query, key, value, _gradient(mix)[0],
                {name: _gradient(x).reshape(len(ids), -1) for name, x in site.items()},
                {name: _numpy(x).reshape(len(ids), -1) for name, x in site.items()},
            )
        )  # fmt: skip
    check_wiring(place, layers)
    return Sequence(np.asarray(ids), loss.item(), layers)


def check_wiring(place: Place, layers: list[Layer]) -> None:
    """Check the modules of a place by sums of values and of gradients."""
    for layer in layers:
        x, gradient = layer.inputs, layer.sites
        if place.mid is None:
            pairs = [
                (x["layer_in"] + x["attn_out"] + x["mlp_out"], x["layer_out"]),
                (gradient["attn_out"], gradient["layer_out"]),
                (gradient["mlp_out"], gradient["layer_out"]),
            ]
        else:
            pairs = [(x["layer_in"] + x["attn_out"], x["mid"]), (gradient["attn_out"], gradient["mid"])]
            if not place.post_norm:
                pairs += [(x["mid"] + x["mlp_out"], x["layer_out"]), (gradient["mlp_out"], gradient["layer_out"])]
        for mine, other in pairs:
            assert np.abs(mine - other).max() <= 1e-5 * np.abs(other).max()


def _require_grad(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.requires_grad_(True)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _gradient(x: torch.Tensor) -> np.ndarray:
    """Return the gradient, or zeros without one."""
    return _numpy(torch.zeros_like(x) if x.grad is None else x.grad)


def _head_gradients(config: Any, qkv: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    if config.model_type == "mpt":
        parts = np.split(_gradient(qkv[0])[0], 3, axis=-1)
        return [part.reshape(len(part), config.n_heads, -1).transpose(1, 0, 2) for part in parts]
    query, key, value = (_gradient(x)[0] for x in qkv)
    if config.model_type == "falcon" and config.new_decoder_architecture:
        # this code repeats each key and value head by itself: a head's gradient is the sum of its copies'
        groups = config.num_attention_heads // config.num_kv_heads
        key, value = (x.reshape(-1, groups, *x.shape[1:]).sum(1) for x in (key, value))
    return [query, key, value]


# ------------------------------------------------------------------------- attention, in its three ways


@contextmanager
def _attention_hooks(model: PreTrainedModel, place: Place, calls: Calls) -> Iterator[None]:
    if on_interface(model):
        _CALLS.append(calls)
        try:
            yield
        finally:
            _CALLS.pop()
    elif model.config.model_type == "falcon":
        with dense_sdpa(calls):
            yield
    else:
        with recorded_softmax(calls), own_attention(model, place, calls):
            yield


_CALLS: list[Calls] = []


def _interface_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    calls = _CALLS[-1]
    calls.add(query, key, value)
    heads, length, width = query.shape[1:]
    copies = heads // key.shape[1]
    all_keys = key.repeat_interleave(copies, dim=1)
    logits = query @ all_keys.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + attention_mask[..., :length]
    if s_aux is not None:  # one more column in the softmax, which no value answers to
        logits = torch.cat([logits, s_aux.view(1, heads, 1, 1).expand(1, heads, length, 1)], dim=-1)
    weights = logits.softmax(-1)[..., :length]
    mix = kept(weights @ value.repeat_interleave(copies, dim=1))
    calls.weights.append(weights)
    calls.mixes.append(mix)
    return mix.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, _interface_attention)
AttentionMaskInterface.register(NAME, eager_mask)


class _DoubleTorch:
    """`torch`, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(model: PreTrainedModel) -> Iterator[None]:
    """A model's own code without its excursions to float32 (norms, softmax), where round-off of float64 would be
    rounded to float32 one way or the other.
    """
    single = torch.Tensor.float
    with (
        patch.object(sys.modules[type(model).__module__], "torch", _DoubleTorch()),
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x)),
    ):
        yield


# --------------------------------------------------------------------------------------------- tables


def gradient(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for pathway in () if layer.query is None else ("query", "key", "value"):
            heads = len(getattr(layer, pathway))
            for position in range(positions):
                sums = [0.0] * heads
                for sequence in sequences:
                    if len(sequence.ids) > position:
                        found = getattr(sequence.layers[number], pathway)
                        sums = [total + found[head, position] for head, total in enumerate(sums)]
                squares = [float(np.sum(np.square(total))) for total in sums]
                rows.append((number, pathway, -1, position, np.sqrt(sum(squares))))
                rows += [(number, pathway, head, position, np.sqrt(square)) for head, square in enumerate(squares)]
    return pd.DataFrame(rows, columns=["layer", "pathway", "head", "position", "grad_norm"])


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(x * x)))


def _ratio(above: float, below: float) -> float:
    """Return a ratio of norms; NaN if the denominator is 0."""
    return above / below if below > 0 else np.nan


def _mean(values: list[float]) -> float:
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


def roles_of(place: Place) -> dict[str, tuple[str, str | None, str, str | None]]:
    """Each branch's input x, its own norm's output y, its output r, and the stream z = x + r after it."""
    attn_norm = None if place.attn_norm is None else "attn_norm"
    mlp_norm = None if place.mlp_norm is None else "mlp_norm"
    if place.post_norm:
        return {"attn": ("layer_in", None, "attn_out", "mid")}  # no site holds what the MLP's branch adds to
    if place.mid is None:
        shared = place.mlp_norm is None  # the norm's gradient is of both branches
        attn_norm = None if shared else attn_norm
        return {"attn": ("layer_in", attn_norm, "attn_out", None), "mlp": ("layer_in", mlp_norm, "mlp_out", None)}
    return {"attn": ("layer_in", attn_norm, "attn_out", "mid"), "mlp": ("mid", mlp_norm, "mlp_out", "layer_out")}


def gradient_ratio(model: PreTrainedModel, sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, branch, (x, y, r, z) in _branches(model, sequences):
        for position in range(positions):
            norms, bloats, compressions, changes = [], [], [], []
            for sequence in long_enough(sequences, position):
                layer = sequence.layers[number]
                at = {site: found[position] for site, found in layer.sites.items()}
                norms.append(_norm(layer.inputs[x][position]))
                if y is not None:
                    bloats.append(_ratio(_norm(at[y]), _norm(at[r])))
                if y is not None and z is not None:
                    compressions.append(_ratio(_norm(at[x] - at[z]), _norm(at[y])))
                if z is not None:
                    changes.append(_ratio(_norm(at[x]), _norm(at[z])))
            rows.append((number, branch, position, *map(_mean, (norms, bloats, compressions, changes))))
    columns = ["input_norm", "bloat", "compress", "change"]
    return pd.DataFrame(rows, columns=["layer", "branch", "position", *columns])


def gradient_check(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    """Theorem 1, on the run's longest sequences. The loss is the summed one: its gradients do not shrink with the run.

    `identity_residual` is not that of sinkscope, but that of the identity itself in these gradients.
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
            variances, covariances = [], []
            for t in range(len(queries)):
                for other in range(t, len(queries)):
                    products = [(found[t] - mu) @ (found[other] - mu) for found in upstream]
                    if t == other:
                        variances.append(np.mean(products))
                    else:
                        covariances.append(abs(np.mean(products)))
            variance, covariance = max(variances), max(covariances)
            for position in range(positions):
                lower, upper, measured = [], [], []
                for sequence in full:
                    column = sequence.layers[number].weights[head, position:, position]
                    mass, second = column.sum(), (column**2).sum()
                    lower.append(mass**2 * mu @ mu)
                    upper.append(lower[-1] + variance * second + covariance * (mass**2 - second))
                    g = predicted * sequence.layers[number].mix[head, position:]
                    measured.append(np.sum((column @ g) ** 2))
                error = size = 0.0
                for sequence in long_enough(sequences, position):
                    this = sequence.layers[number]
                    group = range(head // groups * groups, head // groups * groups + groups)
                    routed = sum(this.weights[h, position:, position] @ this.mix[h, position:] for h in group)
                    error += np.sum((this.value[head // groups, position] - routed) ** 2)
                    size += np.sum(this.value[head // groups, position] ** 2)
                low, high, found = np.mean(lower), np.mean(upper), np.mean(measured)
                residual = np.sqrt(error / size) if size > 0 else np.nan
                inside = low - ROUND_OFF * high <= found <= high + ROUND_OFF * high
                rows.append((number, head, position, residual, low, found, high, inside))
    columns = ["identity_residual", "lower_bound", "measured", "upper_bound", "holds"]
    return pd.DataFrame(rows, columns=["layer", "head", "position", *columns])


def norm_bound(model: PreTrainedModel, sequences: list[Sequence], positions: int) -> pd.DataFrame:
    """Theorem 2 for every norm before a branch, with γ and ε of the module."""
    place = place_of(model.config)
    modules = list(model.get_submodule(place.layers))
    paths = {"attn": place.attn_norm, "mlp": place.mlp_norm}
    rows = []
    for number, branch, (x, y, _, z) in _branches(model, sequences):
        if y is None or z is None:
            continue
        norm = modules[number].get_submodule(paths[branch])
        largest = np.abs(gain_of(norm)).max()
        epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        for position in range(positions):
            ratios, bounds, inside, tightness = [], [], [], []
            for sequence in long_enough(sequences, position):
                layer = sequence.layers[number]
                entries = layer.inputs[x][position]
                if isinstance(norm, nn.LayerNorm):
                    entries = entries - entries.mean()
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


def _branches(
    model: PreTrainedModel, sequences: list[Sequence]
) -> Iterator[tuple[int, str, tuple[str, str | None, str, str | None]]]:
    for number in range(len(sequences[0].layers)):
        for branch, roles in roles_of(place_of(model.config)).items():
            yield number, branch, roles
