"""What the tables must hold, worked out the long way round: plain transformers with eager attention, forward hooks,
and float64 loops over sequences, layers, heads and positions.

Nothing of sinkscope is imported, and nothing is clever. Every sequence goes through the model alone and unpadded,
so that padding and position ids are the tested side's own business. Three caveats of transformers 5.23:

- Falcon switched to eager after it was made, with `output_attentions`, goes wrong: the twin is made eager from the
  start (`eager_twin`).
- Falcon with ALiBi adds its bias twice when eager, once in the mask that the model makes and once in the attention
  module; its SDPA path adds it once and is right. Falcon is therefore recorded on the SDPA path, with a dense
  stand-in for `scaled_dot_product_attention`.
- The softmax is in float32 for most families even where the model is float64. Here it is in float64, so that
  float64 models can be compared to float64's round-off.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from support.dense_attention import dense_attention
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

FORBIDDEN = -1e30  # a logit below this is one that a mask forbids


@dataclass
class Layer:
    """One layer on one sequence, all in float64. One that does not attend has no more than sites."""

    weights: np.ndarray  # (H,T,T)
    logits: np.ndarray  # (H,T,T), after softcap, bias and mask
    query: np.ndarray  # (H,T,d), after rotary; so is the key
    key: np.ndarray  # (K,T,d)
    value: np.ndarray  # (K,T,d)
    sites: dict[str, np.ndarray]  # site → (T,D)

    @classmethod
    def of_weights(cls, weights: np.ndarray) -> "Layer":
        """A layer of which no more is known than its weights; each head has keys of its own."""
        nothing = np.zeros((len(weights), 0))
        return cls(weights, nothing, nothing, nothing, nothing, {})

    @property
    def allowed(self) -> np.ndarray:
        return self.logits > FORBIDDEN


@dataclass
class Sequence:
    """What the model did with one sequence."""

    ids: np.ndarray
    logits: torch.Tensor  # (T,V), as the model gave them
    layers: list[Layer]


# ------------------------------------------------------------------------------- where things are, by hand


@dataclass(frozen=True)
class Place:
    """Where one architecture's layers are, and which modules' outputs are added to the residual stream."""

    layers: str = "model.layers"
    attention: str = "self_attn"
    attn_out: str = "self_attn"
    mlp_out: str = "mlp"
    parallel: bool = False


_SANDWICH = Place(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")
_GPT2 = Place("transformer.h", "attn", "attn", "mlp")
PLACES = {
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "olmo2": _SANDWICH,
    "phi": Place(parallel=True),
    "cohere": Place(parallel=True),
    "gpt2": _GPT2,
    "gpt_neo": Place("transformer.h", "attn.attention", "attn", "mlp"),
    "gptj": Place("transformer.h", "attn", "attn", "mlp", parallel=True),
    "gpt_neox": Place("gpt_neox.layers", "attention", "attention", "mlp"),
    "opt": Place("model.decoder.layers", "self_attn", "self_attn", "fc2"),
    "bloom": Place("transformer.h", "self_attention", "self_attention.dense", "mlp.dense_4h_to_h"),
    "falcon": Place("transformer.h", "self_attention", "self_attention", "mlp"),
    "mpt": Place("transformer.blocks", "attn", "attn.out_proj", "ffn.down_proj"),
}


def place_of(config: Any) -> Place:
    place = PLACES.get(config.model_type, Place())
    parallel = getattr(config, "use_parallel_residual", False)
    if config.model_type == "falcon":
        parallel = config.parallel_attn or config.new_decoder_architecture
    return replace(place, parallel=place.parallel or parallel)


def repeats(config: Any) -> int:
    """How often a model's code repeats each key and value head before attention: Falcon's newer one does."""
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return config.num_attention_heads // config.num_kv_heads
    return 1


# ------------------------------------------------------------------------------------------- recording


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that was made eager (Falcon: SDPA, see the head of this file)."""
    config = copy.deepcopy(model.config)
    kernel = "sdpa" if config.model_type == "falcon" else "eager"
    twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=kernel)
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


@dataclass
class _Calls:
    """What the patched functions saw, in order: one entry a layer each."""

    qkv: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # (1,heads,T,d) each
    logits: list[torch.Tensor] = field(default_factory=list)  # (1,H,T,T)
    weights: list[torch.Tensor] = field(default_factory=list)  # (1,H,T,T)


@torch.no_grad()
def record(twin: PreTrainedModel, ids: np.ndarray) -> Sequence:
    """One sequence through an eager twin."""
    config = twin.config
    place = place_of(config)
    sites: list[dict[str, torch.Tensor]] = []
    calls = _Calls()
    dense = config.model_type == "falcon"
    with ExitStack() as stack:
        for layer in twin.get_submodule(place.layers):
            sites.append({})
            stack.enter_context(_hooks(layer, place, sites[-1]))
        stack.enter_context(_dense_sdpa(calls) if dense else _eager_softmax(calls))
        if not dense:
            stack.enter_context(_queries(twin, place, calls))
        output = twin(torch.tensor(ids)[None], use_cache=False, output_attentions=not dense)
    weights = calls.weights if dense else output.attentions
    assert len(weights) == len(calls.qkv) == len(calls.logits) == len(sites)
    groups = repeats(config)
    layers = []
    for site, (query, key, value), logits, attention in zip(sites, calls.qkv, calls.logits, weights, strict=True):
        if not place.parallel:
            site["mid"] = site["layer_in"] + site["attn_out"]
        assert torch.equal(key, key[:, ::groups].repeat_interleave(groups, 1))
        layers.append(
            Layer(
                weights=_numpy(attention),
                logits=_numpy(logits[..., : len(ids)]),  # without gpt-oss's sink
                query=_numpy(query),
                key=_numpy(key[:, ::groups]),
                value=_numpy(value[:, ::groups]),
                sites={name: _numpy(x) for name, x in site.items()},
            )
        )
    return Sequence(np.asarray(ids), output.logits[0], layers)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x[0].double().numpy()


@contextmanager
def _hooks(layer: nn.Module, place: Place, record: dict[str, torch.Tensor]) -> Iterator[None]:
    """Copies of what enters and leaves a layer and of what its two branches add."""

    def first(x: Any) -> torch.Tensor:
        return (x[0] if isinstance(x, tuple) else x).clone()

    def shaped(x: torch.Tensor) -> torch.Tensor:  # OPT flattens its tokens
        return x.view(1, -1, x.shape[-1])

    def keep(name: str) -> Any:
        return lambda module, args, output: record.__setitem__(name, shaped(first(output)))

    def entering(module: nn.Module, args: tuple, kwargs: dict) -> None:
        record["layer_in"] = first(args or kwargs["hidden_states"])

    handles = [
        layer.register_forward_pre_hook(entering, with_kwargs=True),
        layer.register_forward_hook(keep("layer_out")),
        layer.get_submodule(place.attn_out).register_forward_hook(keep("attn_out")),
        layer.get_submodule(place.mlp_out).register_forward_hook(keep("mlp_out")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _eager_softmax(calls: _Calls) -> Iterator[None]:
    """F.softmax in float64, its 4-dimensional inputs (attention's logits, no router's) kept."""
    softmax = F.softmax

    def recording(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        if x.dim() != 4:
            return softmax(x, dim=dim, dtype=dtype, **kwargs)
        calls.logits.append(x)
        return softmax(x, dim=dim, dtype=torch.float64).to(x.dtype)

    with patch.object(F, "softmax", recording):
        yield


@contextmanager
def _queries(twin: PreTrainedModel, place: Place, calls: _Calls) -> Iterator[None]:
    """Query, key and value where each architecture's own code has them ready."""
    attention = twin.get_submodule(place.layers)[0].get_submodule(place.attention)
    kind, code = type(attention), sys.modules[type(attention).__module__]

    def seen_by(function: Any, owner: Any, name: str) -> Any:
        """Watch a function that is called with (module, query, key, value, …)."""

        def recording(module: nn.Module, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
            calls.qkv.append((query, key, value))
            return function(module, query, key, value, *rest, **kwargs)

        return patch.object(owner, name, recording)

    if hasattr(code, "eager_attention_forward"):
        with seen_by(code.eager_attention_forward, code, "eager_attention_forward"):
            yield
    elif twin.config.model_type in ("gptj", "gpt_neo"):
        with seen_by(kind._attn, kind, "_attn"):
            yield
    elif twin.config.model_type == "bloom":
        split = kind._reshape

        def recording(module: nn.Module, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
            calls.qkv.append(split(module, fused))
            return calls.qkv[-1]

        with patch.object(kind, "_reshape", recording):
            yield
    elif twin.config.model_type == "mpt":
        heads = twin.config.n_heads

        def split_output(module: nn.Module, args: tuple, fused: torch.Tensor) -> None:
            calls.qkv.append(tuple(x.unflatten(2, (heads, -1)).transpose(1, 2) for x in fused.chunk(3, dim=2)))

        handles = [layer.attn.Wqkv.register_forward_hook(split_output) for layer in twin.get_submodule(place.layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
    else:
        raise NotImplementedError(twin.config.model_type)


@contextmanager
def _dense_sdpa(calls: _Calls) -> Iterator[None]:
    """F.scaled_dot_product_attention made dense, everything kept."""

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.qkv.append((query, key, value))
        attended = dense_attention(query.double(), key.double(), value.double(), *args, **kwargs)
        calls.logits.append(attended.logits)
        calls.weights.append(attended.weights)
        return attended.mix.to(query.dtype)

    with patch.object(F, "scaled_dot_product_attention", dense):
        yield


# --------------------------------------------------------------------------------------------- tables


def attention(
    sequences: list[Sequence], positions: int, window: int, epsilon: float, causal: bool = True
) -> pd.DataFrame:
    rows = []
    for layer, head, groups in _heads(sequences):
        for position in range(positions):
            seen = []
            for sequence in _long_enough(sequences, position):
                weights = sequence.layers[layer].weights[head]
                column = weights[position if causal else 0 :, position]
                mass = _near(weights, position, window, causal).mean()
                seen.append((mass, mass > epsilon, column.mean(), (column**2).mean()))
            rows.append((layer, head, head // groups, position, *np.mean(seen, axis=0)))
    columns = ["window_mass", "sink_rate", "sink_mass", "sink_second_moment"]
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head", "position", *columns])


def _near(weights: np.ndarray, position: int, window: int, causal: bool) -> np.ndarray:
    """Of the queries within the window of a key: behind it, and of an encoder on both sides."""
    first = position if causal else max(0, position - window + 1)
    return weights[first : position + window, position]


def attention_heads(sequences: list[Sequence]) -> pd.DataFrame:
    rows = []
    for layer, head, groups in _heads(sequences):
        seen = []
        for sequence in sequences:
            weights = sequence.layers[layer].weights[head]
            entropies = [-(row[row > 0] * np.log(row[row > 0])).sum() for row in weights]
            seen.append((np.mean(entropies), np.mean(1 - weights.sum(1))))
        rows.append((layer, head, head // groups, *np.mean(seen, axis=0)))
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head", "attention_entropy", "missing_mass"])


def sink_positions(sequences: list[Sequence], window: int, epsilon: float, causal: bool = True) -> pd.DataFrame:
    rows = []
    for index, sequence in enumerate(sequences):
        for number, head, _ in _heads([sequence]):
            weights = sequence.layers[number].weights[head]
            for position in range(len(sequence.ids)):
                mass = _near(weights, position, window, causal).mean()
                if mass > epsilon:
                    queries = len(sequence.ids) - (position if causal else 0)
                    rows.append((number, head, index, position, sequence.ids[position], queries, mass))
    return pd.DataFrame(rows, columns=["layer", "head", "sequence", "position", "token_id", "queries", "window_mass"])


def geometry(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    norm = np.linalg.norm
    rows = []
    for number, head, groups in _heads(sequences):
        for position in range(positions):
            seen = []
            for sequence in _long_enough(sequences, position):
                layer = sequence.layers[number]
                query, key = layer.query[head], layer.key[head // groups, position]
                allowed, logits = layer.allowed[head], layer.logits[head]
                rows_seen = [t for t in range(position, len(sequence.ids)) if allowed[t, position]]
                products = norm(query[rows_seen], axis=1) * norm(key)
                cosines = query[rows_seen] @ key / products
                others = allowed[rows_seen] & (np.arange(len(sequence.ids)) != position)
                count = others.sum(1)
                sums = np.where(others, logits[rows_seen], 0.0).sum(1)
                gaps = (logits[rows_seen, position][count > 0] - sums[count > 0] / count[count > 0]).tolist()
                seen.append((
                    norm(query[position]), norm(key), norm(layer.value[head // groups, position]),
                    np.mean(cosines), np.mean(products), np.mean(gaps),
                ))  # fmt: skip
            rows.append((number, head, head // groups, position, *np.mean(seen, axis=0)))
    norms = ["query_norm", "key_norm", "value_norm"]
    pairs = ["qk_cosine", "qk_norm_product", "sink_logit_gap"]
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head", "position", *norms, *pairs])


def activation(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for site in (*layer.sites, *(("value",) if layer.value is not None else ())):
            for position in range(positions):
                norms = []
                for sequence in _long_enough(sequences, position):
                    if site == "value":
                        vector = sequence.layers[number].value[:, position]
                    else:
                        vector = sequence.layers[number].sites[site][position]
                    norms.append(np.sqrt((vector**2).sum()))
                rows.append((number, site, position, np.mean(norms), np.max(norms)))
    return pd.DataFrame(rows, columns=["layer", "site", "position", "norm_mean", "norm_max"])


def massive(sequences: list[Sequence]) -> pd.DataFrame:
    rows = []
    for index, sequence in enumerate(sequences):
        for number, layer in enumerate(sequence.layers):
            if not layer.sites:
                continue
            hidden = layer.sites["layer_out"]
            magnitudes = np.sort(np.abs(hidden).ravel())
            median = magnitudes[(len(magnitudes) - 1) // 2]  # the lower one where there are two
            is_massive = (np.abs(hidden) > 100) & (np.abs(hidden) >= 1000 * median)
            largest = np.abs(hidden) >= magnitudes[-3]
            for position, coordinate in zip(*np.nonzero(is_massive | largest), strict=True):
                value = hidden[position, coordinate]
                found = (value, median, abs(value) / median, is_massive[position, coordinate])
                rows.append((number, index, position, sequence.ids[position], coordinate, *found))
    keys = ["layer", "sequence", "position", "token_id", "coordinate"]
    return pd.DataFrame(rows, columns=[*keys, "value", "median", "ratio", "is_massive"])


def outlier(sequences: list[Sequence]) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for site in layer.sites:
            seen = []
            for sequence in sequences:
                entries = sequence.layers[number].sites[site].ravel()
                centered = entries - entries.mean()
                seen.append((np.abs(entries).max(), (centered**4).mean() / (centered**2).mean() ** 2))
            rows.append((number, site, *np.mean(seen, axis=0)))
    return pd.DataFrame(rows, columns=["layer", "site", "max_inf_norm", "kurtosis"])


def tables(sequences: list[Sequence], positions: int, window: int, epsilon: float) -> dict[str, pd.DataFrame]:
    """Every table of a forward run, without the columns that only name things (model, condition, token)."""
    return {
        "attention": attention(sequences, positions, window, epsilon),
        "attention_heads": attention_heads(sequences),
        "sink_positions": sink_positions(sequences, window, epsilon),
        "geometry": geometry(sequences, positions),
        "activation": activation(sequences, positions),
        "massive": massive(sequences),
        "outlier": outlier(sequences),
    }


def _heads(sequences: list[Sequence]) -> Iterator[tuple[int, int, int]]:
    """(layer, query head, query heads to a key/value head) of every head."""
    for number, layer in enumerate(sequences[0].layers):
        heads = 0 if layer.weights is None else len(layer.weights)
        for head in range(heads):
            yield number, head, heads // len(layer.key)


def _long_enough(sequences: list[Sequence], position: int) -> list[Sequence]:
    return [sequence for sequence in sequences if len(sequence.ids) > position]


# ------------------------------------------------------------------------------------------- comparison

KEYS = ("layer", "head", "kv_head", "site", "sequence", "position", "token_id", "coordinate", "is_massive")
# What an entry's error is measured against. Sums of positive terms (masses, norms, …) against the entry itself: each
# term is right to round-off, so the sum is. Where terms cancel, round-off is of the terms' size: cosines are means of
# numbers up to 1, the missing mass is 1 minus a sum, and logit gaps are measured against the column's largest.
SCALES: dict[str, float | None] = {"qk_cosine": 1.0, "missing_mass": 1.0, "sink_logit_gap": None}
SMALLEST = 1e-6  # of the column's largest: below that an entry (a weight e⁻⁵⁰, say) may have lost relative accuracy
FACTORS = {"sink_second_moment": 2.0}  # a square's relative error is twice its root's


def errors(ours: pd.DataFrame, expected: pd.DataFrame) -> dict[str, float]:
    """Column → worst relative error. AssertionError where the rows themselves, or the places of NaN, differ."""
    keys = [name for name in KEYS if name in expected]
    mine, truth = (table.sort_values(keys, ignore_index=True) for table in (ours, expected))
    assert len(mine) == len(truth), f"{len(mine)} rows, not {len(truth)}"
    for name in keys:
        assert list(mine[name]) == list(truth[name]), f"other values of {name}"
    found = {}
    for name in (name for name in truth if name not in keys):
        column, right = mine[name].to_numpy(float), truth[name].to_numpy(float)
        assert (np.isnan(column) == np.isnan(right)).all(), f"NaN elsewhere in {name}"
        largest = np.nanmax(np.abs(right), initial=0.0)
        scale = SCALES.get(name, SMALLEST * largest)
        scale = largest if scale is None else scale
        error = np.abs(column - right) / np.maximum(np.maximum(np.abs(right), scale), 1e-300)
        found[name] = float(np.nanmax(error, initial=0.0)) / FACTORS.get(name, 1.0)
    return found


def assert_same(ours: dict[str, pd.DataFrame], expected: dict[str, pd.DataFrame], tolerance: float) -> dict[str, float]:
    """Every column of every expected table agrees. → the worst error of each table."""
    worst = {}
    for name, table in expected.items():
        found = errors(ours[name], table)
        wrong = {column: error for column, error in found.items() if not error <= tolerance}
        assert not wrong, f"table {name}: {wrong}"
        worst[name] = max(found.values())
    return worst


def window_masses(sequences: list[Sequence], window: int) -> np.ndarray:
    """α of every sequence, layer, head and position."""
    return np.array([
        weights[position : position + window, position].mean()
        for sequence in sequences
        for layer in sequence.layers
        for weights in layer.weights
        for position in range(len(sequence.ids))
    ])  # fmt: skip


def clear_threshold(sequences: list[Sequence], window: int, around: float = 0.25) -> float:
    """An ε near `around` as far as can be from every window mass, so that round-off flips no indicator."""
    masses = window_masses(sequences, window)
    ends = [around - 0.05, around + 0.05]
    near = np.sort([*masses[np.abs(masses - around) < 0.05], *ends])
    widest = np.argmax(np.diff(near))
    return float((near[widest] + near[widest + 1]) / 2)
