"""The values that the tables must have, from plain transformers with eager attention, forward hooks, and float64 loops.

Nothing of sinkscope is imported. Every sequence goes through the model alone and unpadded, so that padding and position
ids are tested, too. Three caveats of transformers 5.23:

- Falcon gives wrong results if it is switched to eager after it was made, with `output_attentions`: the twin is made
  eager from the start (`eager_twin`).
- Falcon with ALiBi adds its bias twice when eager, once in the mask that the model makes and once in the attention
  module; its SDPA path adds it once and is right. Falcon is therefore recorded on the SDPA path, with a dense
  replacement of `scaled_dot_product_attention`.
- The softmax is in float32 for most families even if the model is float64. Here it is in float64, so that float64
  models can be compared to float64's round-off.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

FORBIDDEN = -1e30  # a logit below this is masked


@dataclass
class Layer:
    """One layer on one sequence, in float64. A layer without attention has only sites."""

    weights: np.ndarray  # (H,T,T)
    logits: np.ndarray  # (H,T,T), after softcap, bias and mask
    query: np.ndarray  # (H,T,d), after rotary; so is the key
    key: np.ndarray  # (K,T,d)
    value: np.ndarray  # (K,T,d)
    sites: dict[str, np.ndarray]  # site → (T,D)

    @property
    def allowed(self) -> np.ndarray:
        return self.logits > FORBIDDEN


@dataclass
class Sequence:
    ids: np.ndarray
    logits: torch.Tensor  # (T,V), as the model gave them
    layers: list[Layer]


@dataclass(frozen=True)
class Place:
    """The modules of one architecture: the layers, and within a layer its attention, norms and branches."""

    layers: str = "model.layers"
    attention: str = "self_attn"
    attn_norm: str | None = "input_layernorm"
    attn_out: str = "self_attn"  # its output is added to the residual stream
    mid: str | None = "post_attention_layernorm"  # its input is h+½; None: attention and MLP are parallel
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out: str = "mlp"
    post_norm: bool = False  # h+½ is normalized before the MLP reads it and before the MLP is added


def _parallel(
    layers: str = "model.layers", attn: str = "self_attn", norm: str = "input_layernorm", mlp_norm: str | None = None
) -> Place:
    return Place(layers, attn, norm, attn, None, mlp_norm, "mlp")


_MLP_NORM = ("pre_feedforward_layernorm",) * 2
_GEMMA = Place("model.layers", "self_attn", "input_layernorm", "post_attention_layernorm", *_MLP_NORM,
               "post_feedforward_layernorm")  # fmt: skip
_FALCON = ("transformer.h", "self_attention")
_NEOX = ("gpt_neox.layers", "attention", "input_layernorm")
PLACES = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": replace(_GEMMA, attn_norm=None, mid="mlp", mlp_norm=None),
    "phi": _parallel(),
    "cohere": _parallel(),
    "gptj": _parallel("transformer.h", "attn", "ln_1"),
    "gpt2": Place("transformer.h", "attn", "ln_1", "attn", "ln_2", "ln_2"),
    "gpt_neo": Place("transformer.h", "attn.attention", "ln_1", "attn", "ln_2", "ln_2"),
    "bloom": Place("transformer.h", "self_attention", attn_out="self_attention.dense", mlp_out="mlp.dense_4h_to_h"),
    "mpt": Place("transformer.blocks", "attn", "norm_1", "attn.out_proj", "norm_2", "norm_2", "ffn.down_proj"),
}


def place_of(config: Any) -> Place:
    kind = config.model_type
    if kind == "falcon" and config.new_decoder_architecture:
        return _parallel(*_FALCON, "ln_attn", "ln_mlp")
    if kind == "falcon":
        return _parallel(*_FALCON) if config.parallel_attn else Place(*_FALCON, attn_out="self_attention")
    if kind == "gpt_neox":
        parallel = config.use_parallel_residual
        return _parallel(*_NEOX, "post_attention_layernorm") if parallel else Place(*_NEOX, attn_out="attention")
    if kind == "stablelm" and config.use_parallel_residual:
        return _parallel()
    if kind == "opt" and config.do_layer_norm_before:
        norms = ("final_layer_norm",) * 2
        return Place("model.decoder.layers", "self_attn", "self_attn_layer_norm", "self_attn", *norms, "fc2")
    if kind == "opt":
        return Place("model.decoder.layers", "self_attn", None, "self_attn", "self_attn_layer_norm", None, "fc2", True)
    return PLACES.get(kind, Place())


def repeats(config: Any) -> int:
    """Return how often the model's own code repeats each key and value head before attention, as newer Falcons do."""
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return config.num_attention_heads // config.num_kv_heads
    return 1


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in a model that was made eager (Falcon: SDPA, see the head of this file)."""
    config = copy.deepcopy(model.config)
    kernel = "sdpa" if config.model_type == "falcon" else "eager"
    twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=kernel)
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


@dataclass
class Calls:
    """Tensors of attention, which retain their gradients, one entry per layer in order."""

    qkv: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # (1,heads,T,d) each, or MPT's one (1,T,3D)
    logits: list[torch.Tensor] = field(default_factory=list)  # (1,H,T,T), with a column for gpt-oss's sink
    weights: list[torch.Tensor] = field(default_factory=list)  # likewise
    mixes: list[torch.Tensor] = field(default_factory=list)  # (1,T,H,d) of AttentionInterface, else (1,H,T,d)

    def add(self, *qkv: torch.Tensor) -> None:
        self.qkv.append(tuple(kept(x) for x in qkv))


def kept(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.retain_grad()
    return x


def by_head(config: Any, qkv: list[np.ndarray]) -> list[np.ndarray]:
    """Return query, key and value, or their gradients, by head: MPT's (T,3D) is split."""
    if config.model_type != "mpt":
        return qkv
    return [part.reshape(len(part), config.n_heads, -1).transpose(1, 0, 2) for part in np.split(qkv[0], 3, axis=-1)]


def run_watched(model: PreTrainedModel, ids: np.ndarray) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]], Calls]:
    """Run one sequence. Returns the logits (T,V), the tensors at the sites of each layer, and those of attention."""
    place = place_of(model.config)
    sites: list[dict[str, torch.Tensor]] = []
    calls = Calls()
    with ExitStack() as stack:
        for layer in model.get_submodule(place.layers):
            sites.append({})
            stack.enter_context(site_hooks(layer, place, sites[-1]))
        stack.enter_context(attention_calls(model, place, calls))
        logits = model(torch.as_tensor(ids)[None], use_cache=False).logits[0]
    return logits, sites, calls


def record_each(model: PreTrainedModel, sequences: Iterable[np.ndarray]) -> list[Sequence]:
    """Run sequences through an eager twin of the model, one at a time."""
    twin = eager_twin(model)
    return [record(twin, ids) for ids in sequences]


@torch.no_grad()
def record(twin: PreTrainedModel, ids: np.ndarray) -> Sequence:
    """Run one sequence through an eager twin."""
    groups = repeats(twin.config)
    logits, sites, calls = run_watched(twin, ids)
    layers = []
    for site, qkv, scores, weights in zip(sites, calls.qkv, calls.logits, calls.weights, strict=True):
        query, key, value = by_head(twin.config, [_numpy(x) for x in qkv])
        assert np.array_equal(key, key[::groups].repeat(groups, 0))
        layers.append(
            Layer(
                weights=_numpy(weights[..., : len(ids)]),
                logits=_numpy(scores[..., : len(ids)]),
                query=query,
                key=key[::groups],
                value=value[::groups],
                sites={name: x.view(len(ids), -1).double().numpy() for name, x in site.items() if "norm" not in name},
            )
        )
    return Sequence(np.asarray(ids), logits, layers)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x[0].double().numpy()


@contextmanager
def site_hooks(layer: nn.Module, place: Place, found: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep a layer's input and output, the input of `mid`, and the outputs of its norms and branches."""

    def first(x: Any) -> torch.Tensor:
        return x[0] if isinstance(x, tuple) else x

    def leaving(name: str, module: nn.Module, args: tuple, output: Any) -> Any:
        found[name] = kept(first(output))
        # Falcon adds to this tensor in place
        return output.clone() if name == "mlp_out" and isinstance(output, torch.Tensor) else None

    def entering(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        found[name] = kept(first(args) if args else kwargs["hidden_states"])

    paths = {name: getattr(place, name) for name in ("attn_norm", "attn_out", "mlp_norm", "mlp_out")}
    with ExitStack() as stack:
        for name, path in {"layer_in": "", "mid": place.mid}.items():
            if path is not None:
                module = layer.get_submodule(path)
                hook = module.register_forward_pre_hook(partial(entering, name), with_kwargs=True)
                stack.callback(hook.remove)
        for name, path in (paths | {"layer_out": ""}).items():
            if path is not None:
                stack.callback(layer.get_submodule(path).register_forward_hook(partial(leaving, name)).remove)
        yield


@contextmanager
def attention_calls(model: PreTrainedModel, place: Place, calls: Calls) -> Iterator[None]:
    """Record attention: a softmax in float64, and query, key, value and mix where each architecture's code has them."""
    layers = model.get_submodule(place.layers)
    kind = type(layers[0].get_submodule(place.attention))
    code, name = sys.modules[kind.forward.__module__], model.config.model_type

    def recorded(attend: Callable) -> Callable:
        def recording(module: nn.Module, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
            calls.add(query, key, value)
            mix, weights = attend(module, query, key, value, *rest, **kwargs)
            calls.mixes.append(kept(mix))
            return mix, weights

        return recording

    with ExitStack() as stack:
        if name == "falcon":
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", partial(_dense_sdpa, calls)))
        else:
            stack.enter_context(patch.object(F, "softmax", partial(_softmax, F.softmax, calls)))
        if hasattr(code, "eager_attention_forward"):
            stack.enter_context(patch.object(code, "eager_attention_forward", recorded(code.eager_attention_forward)))
        elif name in ("gptj", "gpt_neo"):
            stack.enter_context(patch.object(kind, "_attn", recorded(kind._attn)))
        elif name == "bloom":
            split, merge = kind._reshape, kind._merge_heads

            def reshape(module: nn.Module, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
                calls.add(*split(module, fused))
                return calls.qkv[-1]

            def merge_heads(module: nn.Module, mix: torch.Tensor) -> torch.Tensor:
                calls.mixes.append(kept(mix.view(1, *mix.shape)))  # (1,H,T,d)
                return merge(module, calls.mixes[-1][0])

            stack.enter_context(patch.multiple(kind, _reshape=reshape, _merge_heads=merge_heads))
        elif name == "mpt":
            heads = model.config.n_heads

            def fused(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
                calls.add(output)

            def mixed(module: nn.Module, args: tuple) -> tuple:
                calls.mixes.append(kept(args[0].unflatten(2, (heads, -1)).transpose(1, 2)))
                return (calls.mixes[-1].transpose(1, 2).flatten(2),)

            for layer in layers:
                stack.callback(layer.attn.Wqkv.register_forward_hook(fused).remove)
                stack.callback(layer.attn.out_proj.register_forward_pre_hook(mixed).remove)
        elif name != "falcon":
            raise NotImplementedError(name)
        yield


def _softmax(
    softmax: Callable, calls: Calls, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any
) -> torch.Tensor:
    """Compute F.softmax, in float64 for 4-dimensional inputs, which are attention's logits."""
    if x.dim() != 4:
        return softmax(x, dim=dim, dtype=dtype, **kwargs)
    calls.logits.append(x)
    calls.weights.append(softmax(x, dim=dim, dtype=torch.float64).to(x.dtype))
    return calls.weights[-1]


class DenseAttention(NamedTuple):
    """The tensors of attention, including tensors that a fused kernel does not return."""

    logits: torch.Tensor  # (B,H,T,S), masked
    weights: torch.Tensor  # (B,H,T,S)
    mix: torch.Tensor  # (B,H,T,d)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DenseAttention:
    """Compute attention of queries (B,H,T,d) to keys and values (B,K,S,d); H ÷ K query heads share each key head."""
    heads, width = query.shape[1], query.shape[-1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (width**-0.5 if scale is None else scale)
    if is_causal:
        assert attn_mask is None
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, torch.finfo(logits.dtype).min)  # a row of padding has no key
    elif attn_mask is not None:
        logits = logits + attn_mask
    weights = logits.softmax(-1)
    return DenseAttention(logits, weights, weights @ value)


def _dense_sdpa(
    calls: Calls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    calls.add(query, key, value)
    attended = dense_attention(query.double(), key.double(), value.double(), *args, **kwargs)
    calls.logits.append(attended.logits)
    calls.weights.append(attended.weights)
    calls.mixes.append(kept(attended.mix.to(query.dtype)))
    return calls.mixes[-1]


def attention(
    sequences: list[Sequence], positions: int, window: int, epsilon: float, causal: bool = True
) -> pd.DataFrame:
    def measured(layer: Layer, head: int, position: int) -> tuple[float, ...]:
        weights = layer.weights[head]
        column = weights[position if causal else 0 :, position]
        mass, uniform = _masses(weights, position, window, causal)
        is_sink = np.nan if uniform > epsilon else float(mass > epsilon)
        return mass, column.mean(), (column**2).mean(), uniform, is_sink

    def mean(found: list) -> tuple[float, ...]:
        *masses, is_sink = np.transpose(found)
        known = is_sink[~np.isnan(is_sink)]
        return *np.mean(masses, axis=1), known.mean() if len(known) else np.nan

    columns = ["window_mass", "sink_mass", "sink_second_moment", "uniform_mass", "sink_rate"]
    return _by_head_and_position(sequences, positions, measured, columns, mean)


def attention_heads(sequences: list[Sequence]) -> pd.DataFrame:
    def measured(layer: Layer, head: int, position: int) -> tuple[float, float]:
        weights = layer.weights[head]
        return np.mean([-(row[row > 0] * np.log(row[row > 0])).sum() for row in weights]), np.mean(1 - weights.sum(1))

    table = _by_head_and_position(sequences, 1, measured, ["attention_entropy", "missing_mass"])
    return table.drop(columns="position")


def _by_head_and_position(
    sequences: list[Sequence],
    positions: int,
    measured: Callable[[Layer, int, int], tuple],
    columns: list[str],
    mean: Callable[[list], Any] = lambda found: np.mean(found, axis=0),
) -> pd.DataFrame:
    """Return means over sequences of what is measured of a layer, a head and a position."""
    rows = []
    for number, head, groups in _heads(sequences):
        for position in range(positions):
            found = [measured(one.layers[number], head, position) for one in long_enough(sequences, position)]
            rows.append((number, head, head // groups, position, *mean(found)))
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head", "position", *columns])


def _near(weights: np.ndarray, position: int, window: int, causal: bool) -> np.ndarray:
    """Return a key's weights from the queries in its window: later queries, in an encoder queries on both sides."""
    first = position if causal else max(0, position - window + 1)
    return weights[first : position + window, position]


def _masses(weights: np.ndarray, position: int, window: int, causal: bool) -> tuple[float, float]:
    """Return a key's window mass, and what it would be if each query gave all keys that it sees the same weight."""
    alike = _near(_uniform(len(weights), causal), position, window, causal)
    return _near(weights, position, window, causal).mean(), alike.mean()


@cache
def _uniform(length: int, causal: bool) -> np.ndarray:
    """Return the weights of queries that give all keys that they see the same."""
    seen = np.tril(np.ones((length, length))) if causal else np.ones((length, length))
    return seen / seen.sum(1, keepdims=True)


def sink_positions(sequences: list[Sequence], window: int, epsilon: float, causal: bool = True) -> pd.DataFrame:
    rows = []
    for index, sequence in enumerate(sequences):
        for number, head, _ in _heads([sequence]):
            weights = sequence.layers[number].weights[head]
            for position in range(len(sequence.ids)):
                mass, uniform = _masses(weights, position, window, causal)
                if mass > epsilon and uniform <= epsilon:
                    queries = len(sequence.ids) - (position if causal else 0)
                    rows.append((number, head, index, position, sequence.ids[position], queries, mass, uniform))
    columns = ["layer", "head", "sequence", "position", "token_id", "queries", "window_mass", "uniform_mass"]
    return pd.DataFrame(rows, columns=columns)


def geometry(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    norm = np.linalg.norm

    def measured(layer: Layer, head: int, position: int) -> tuple[float, ...]:
        kv_head = head * len(layer.key) // len(layer.query)
        query, key, value = layer.query[head], layer.key[kv_head, position], layer.value[kv_head, position]
        allowed, logits = layer.allowed[head], layer.logits[head]
        seen = [t for t in range(position, len(query)) if allowed[t, position]]
        products = norm(query[seen], axis=1) * norm(key)
        cosines = query[seen] @ key / products
        others = allowed[seen] & (np.arange(len(query)) != position)
        count = others.sum(1)
        sums = np.where(others, logits[seen], 0.0).sum(1)
        gaps = logits[seen, position][count > 0] - sums[count > 0] / count[count > 0]
        found = cosines, products, gaps
        return norm(query[position]), norm(key), norm(value), *(np.mean(x) if len(x) else np.nan for x in found)

    norms, pairs = ["query_norm", "key_norm", "value_norm"], ["qk_cosine", "qk_norm_product", "sink_logit_gap"]
    return _by_head_and_position(sequences, positions, measured, [*norms, *pairs])


def activation(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for site in (*layer.sites, *(("value",) if layer.value is not None else ())):
            for position in range(positions):
                norms = []
                for sequence in long_enough(sequences, position):
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
    """Yield layer, query head, and query heads per key/value head."""
    for number, layer in enumerate(sequences[0].layers):
        heads = 0 if layer.weights is None else len(layer.weights)
        for head in range(heads):
            yield number, head, heads // len(layer.key)


def long_enough(sequences: list[Sequence], position: int) -> list[Sequence]:
    return [sequence for sequence in sequences if len(sequence.ids) > position]


KEYS = (
    "layer", "pathway", "branch", "head", "kv_head", "site", "sequence", "position", "token_id", "coordinate",
    "is_massive",
)  # fmt: skip
# The scale of an entry's error. For sums of positive terms (masses, norms, …) it is the entry itself, because each term
# is right to round-off. If terms cancel, round-off has the size of the terms: cosines are means of numbers up to
# 1, the missing mass is 1 minus a sum, and logit gaps are compared with the column's largest.
SCALES: dict[str, float | None] = {"qk_cosine": 1.0, "missing_mass": 1.0, "sink_logit_gap": None}
SMALLEST = 1e-6  # relative to the column's largest: a smaller entry (such as e⁻⁵⁰) may have lost relative accuracy
FACTORS = {"sink_second_moment": 2.0}  # a square's relative error is twice its root's


def errors(ours: pd.DataFrame, expected: pd.DataFrame) -> dict[str, float]:
    """Return the worst relative error by column, and assert that the rows and the positions of NaN are the same.

    Pathways that the expected table does not have are left out. The identity's residual is round-off in both tables:
    its largest value takes the place of an error.
    """
    keys = [name for name in KEYS if name in expected]
    if "pathway" in keys:
        ours = ours[ours["pathway"].isin(expected["pathway"])]
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
        error = column if name == "identity_residual" else error
        found[name] = float(np.nanmax(error, initial=0.0)) / FACTORS.get(name, 1.0)
    return found


def assert_same(ours: dict[str, pd.DataFrame], expected: dict[str, pd.DataFrame], tolerance: float) -> dict[str, float]:
    """Assert that every column of every expected table agrees; return the worst error of each table."""
    worst = {}
    for name, table in expected.items():
        found = errors(ours[name], table)
        wrong = {column: error for column, error in found.items() if not error <= tolerance}
        assert not wrong, f"table {name}: {wrong}"
        worst[name] = max(found.values(), default=0.0)
    return worst


def window_masses(sequences: list[Sequence], window: int) -> np.ndarray:
    return np.array([
        weights[position : position + window, position].mean()
        for sequence in sequences
        for layer in sequence.layers
        for weights in layer.weights
        for position in range(len(sequence.ids))
    ])  # fmt: skip


def clear_threshold(sequences: list[Sequence], window: int, around: float = 0.25) -> float:
    """Return an ε near `around` as far as possible from every window mass, so that round-off changes no indicator."""
    masses = window_masses(sequences, window)
    ends = [around - 0.05, around + 0.05]
    near = np.sort([*masses[np.abs(masses - around) < 0.05], *ends])
    widest = np.argmax(np.diff(near))
    return float((near[widest] + near[widest + 1]) / 2)
