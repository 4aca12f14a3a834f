"""The expected tables, computed by plain transformers with eager attention, forward hooks, and float64 loops over
sequences, layers, heads and positions.

Nothing of sinkscope is imported. Every sequence goes through the model alone and unpadded, so that padding and position
ids are tested, too. Three caveats of transformers 5.23:

- Falcon that is switched to eager after it was made, with `output_attentions`, fails: the twin is made eager from the
  start (`eager_twin`).
- Falcon with ALiBi adds its bias twice when eager, once in the mask that the model makes and once in the attention
  module; its SDPA path adds it once and is right. Falcon is therefore recorded on the SDPA path, with a dense
  replacement of `scaled_dot_product_attention`.
- The softmax is in float32 for most families even if the model is float64. Here it is in float64, so that float64
  models can be compared to float64's round-off.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from support.dense_attention import dense_attention
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

SITES = ("layer_in", "attn_out", "mlp_out", "layer_out")
FORBIDDEN = -1e30  # a logit below this is one that a mask forbids


@dataclass
class Layer:
    """One layer on one sequence, all in float64. A layer without attention has only sites."""

    weights: np.ndarray  # (H,T,T)
    logits: np.ndarray  # (H,T,T), after softcap, bias and mask
    query: np.ndarray  # (H,T,d), after rotary; so is the key
    key: np.ndarray  # (K,T,d)
    value: np.ndarray  # (K,T,d)
    sites: dict[str, np.ndarray]  # site → (T,D)

    @classmethod
    def of_weights(cls, weights: np.ndarray) -> "Layer":
        """Return a layer with nothing but its weights; each head has keys of its own."""
        nothing = np.zeros((len(weights), 0))
        return cls(weights, nothing, nothing, nothing, nothing, {})

    @property
    def allowed(self) -> np.ndarray:
        return self.logits > FORBIDDEN


@dataclass
class Sequence:
    """One sequence with its logits and layers."""

    ids: np.ndarray
    logits: torch.Tensor  # (T,V), as the model gave them
    layers: list[Layer]


# --------------------------------------------------------------------------- modules of each architecture


@dataclass(frozen=True)
class Place:
    """Modules of one architecture: its layers, their norms and branches, and the module that reads h+½."""

    layers: str = "model.layers"
    attention: str = "self_attn"
    attn_norm: str | None = "input_layernorm"
    attn_out: str = "self_attn"
    mid: str | None = "post_attention_layernorm"  # h+½ enters here
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out: str = "mlp"
    post_norm: bool = False  # h+½ is normalized before the MLP reads it and before the MLP is added

    @property
    def parallel(self) -> bool:
        """Whether both branches read the layer's input: there is no h+½."""
        return self.mid is None


def _parallel(
    layers: str = "model.layers", attn: str = "self_attn", norm: str = "input_layernorm", mlp_norm: str | None = None
) -> Place:
    return Place(layers, attn, norm, attn, None, mlp_norm, "mlp")


_GEMMA = Place(
    attn_out="post_attention_layernorm",
    mid="pre_feedforward_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_FALCON = ("transformer.h", "self_attention")
_NEOX = ("gpt_neox.layers", "attention", "input_layernorm")


def place_of(config: Any) -> Place:
    kind = config.model_type
    if kind == "falcon":
        if config.new_decoder_architecture:
            return _parallel(*_FALCON, "ln_attn", "ln_mlp")
        return _parallel(*_FALCON) if config.parallel_attn else Place(*_FALCON, attn_out="self_attention")
    if kind == "gpt_neox":
        if config.use_parallel_residual:
            return _parallel(*_NEOX, "post_attention_layernorm")
        return Place(*_NEOX, attn_out="attention")
    if kind == "stablelm" and config.use_parallel_residual:
        return _parallel()
    if kind == "opt":
        before = config.do_layer_norm_before
        return Place(
            layers="model.decoder.layers",
            attn_norm="self_attn_layer_norm" if before else None,
            mid="final_layer_norm" if before else "self_attn_layer_norm",
            mlp_norm="final_layer_norm" if before else None,
            mlp_out="fc2",
            post_norm=not before,
        )
    places = {
        "gemma2": _GEMMA,
        "gemma3_text": _GEMMA,
        "olmo2": Place(
            attn_norm=None,
            attn_out="post_attention_layernorm",
            mid="mlp",
            mlp_norm=None,
            mlp_out="post_feedforward_layernorm",
        ),
        "phi": _parallel(),
        "cohere": _parallel(),
        "gptj": _parallel("transformer.h", "attn", "ln_1"),
        "gpt2": Place("transformer.h", "attn", "ln_1", "attn", "ln_2", "ln_2"),
        "gpt_neo": Place("transformer.h", "attn.attention", "ln_1", "attn", "ln_2", "ln_2"),
        "bloom": Place("transformer.h", "self_attention", attn_out="self_attention.dense", mlp_out="mlp.dense_4h_to_h"),
        "mpt": Place("transformer.blocks", "attn", "norm_1", "attn.out_proj", "norm_2", "norm_2", "ffn.down_proj"),
    }
    return places.get(kind, Place())


def repeats(config: Any) -> int:
    """Return how often a model's code repeats each key and value head before attention, as Falcon's newer one does."""
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
class Calls:
    """Tensors that the patched functions saw, in order: one entry for each layer."""

    qkv: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # (1,heads,T,d) each, or MPT's one (1,T,3D)
    logits: list[torch.Tensor] = field(default_factory=list)  # (1,H,T,T)
    weights: list[torch.Tensor] = field(default_factory=list)  # (1,H,T,T)
    mixes: list[torch.Tensor] = field(default_factory=list)  # (1,H,T,d)

    def add(self, *qkv: torch.Tensor) -> None:
        self.qkv.append(tuple(kept(x) for x in qkv))


def kept(x: torch.Tensor) -> torch.Tensor:
    """The tensor, which keeps its gradient if it gets one."""
    if x.requires_grad:
        x.retain_grad()
    return x


@torch.no_grad()
def record(twin: PreTrainedModel, ids: np.ndarray) -> Sequence:
    """One sequence through an eager twin."""
    config = twin.config
    place = place_of(config)
    sites: list[dict[str, torch.Tensor]] = []
    calls = Calls()
    dense = config.model_type == "falcon"
    with ExitStack() as stack:
        for layer in twin.get_submodule(place.layers):
            sites.append({})
            stack.enter_context(site_hooks(layer, place, sites[-1], SITES, torch.clone))
        if dense:
            stack.enter_context(dense_sdpa(calls, torch.float64))
        else:
            stack.enter_context(recorded_softmax(calls, torch.float64))
            watched = own_attention if has_own_code(twin) else _eager_function
            stack.enter_context(watched(twin, place, calls))
        output = twin(torch.tensor(ids)[None], use_cache=False, output_attentions=not dense)
    weights = calls.weights if dense else output.attentions
    assert len(weights) == len(calls.qkv) == len(calls.logits) == len(sites)
    groups = repeats(config)
    layers = []
    for site, qkv, logits, attention in zip(sites, calls.qkv, calls.logits, weights, strict=True):
        if config.model_type == "mpt":
            qkv = tuple(x.unflatten(2, (config.n_heads, -1)).transpose(1, 2) for x in qkv[0].chunk(3, dim=2))
        query, key, value = qkv
        found = {name: _numpy(x.reshape(1, len(ids), -1)) for name, x in site.items()}  # OPT flattens its tokens
        if not place.parallel:
            found["mid"] = found["layer_in"] + found["attn_out"]
        assert torch.equal(key, key[:, ::groups].repeat_interleave(groups, 1))
        layers.append(
            Layer(
                weights=_numpy(attention),
                logits=_numpy(logits[..., : len(ids)]),  # without gpt-oss's sink
                query=_numpy(query),
                key=_numpy(key[:, ::groups]),
                value=_numpy(value[:, ::groups]),
                sites=found,
            )
        )
    return Sequence(np.asarray(ids), output.logits[0], layers)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x[0].double().numpy()


@contextmanager
def site_hooks(
    layer: nn.Module,
    place: Place,
    found: dict[str, torch.Tensor],
    names: tuple[str, ...],
    keep: Callable[[torch.Tensor], torch.Tensor] = kept,
) -> Iterator[None]:
    """Record tensors of a layer: its input and output, h+½, and the outputs of its norms and branches."""

    def first(x: Any) -> torch.Tensor:
        return x[0] if isinstance(x, tuple) else x

    def leaving(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            found[name] = keep(first(output))
            # Falcon adds into this very tensor
            return output.clone() if name == "mlp_out" and isinstance(output, torch.Tensor) else None

        return hook

    def entering(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            found[name] = keep(first(args) if args else kwargs["hidden_states"])

        return hook

    paths = {"layer_in": "", "mid": place.mid, "attn_norm": place.attn_norm, "attn_out": place.attn_out}
    paths |= {"mlp_norm": place.mlp_norm, "mlp_out": place.mlp_out, "layer_out": ""}
    with ExitStack() as stack:
        for name in names:
            path = paths[name]
            if path is not None and name in ("layer_in", "mid"):
                hook = layer.get_submodule(path).register_forward_pre_hook(entering(name), with_kwargs=True)
                stack.callback(hook.remove)
            elif path is not None:
                stack.callback(layer.get_submodule(path).register_forward_hook(leaving(name)).remove)
        yield


@contextmanager
def recorded_softmax(calls: Calls, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Record the logits and weights of the model's own softmax: its 4-dimensional inputs, which no router has.

    With a `dtype` the softmax is computed in that.
    """
    softmax = F.softmax

    def recording(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dim() != 4:
            return softmax(x, *args, **kwargs)
        weights = softmax(x, *args, **kwargs) if dtype is None else softmax(x, dim=-1, dtype=dtype).to(x.dtype)
        calls.logits.append(x)
        calls.weights.append(weights)
        return weights

    with patch.object(F, "softmax", recording):
        yield


@contextmanager
def _eager_function(twin: PreTrainedModel, place: Place, calls: Calls) -> Iterator[None]:
    """Record the query, key and value of families that have transformers' `eager_attention_forward`."""
    attention = twin.get_submodule(place.layers)[0].get_submodule(place.attention)
    code = sys.modules[type(attention).__module__]
    plain = code.eager_attention_forward

    def recording(module: nn.Module, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
        calls.add(query, key, value)
        return plain(module, query, key, value, *rest, **kwargs)

    with patch.object(code, "eager_attention_forward", recording):
        yield


def has_own_code(model: PreTrainedModel) -> bool:
    """Whether the attention of a family is not one of transformers' attention functions."""
    return model.config.model_type in ("falcon", "bloom", "mpt", "gptj", "gpt_neo")


@contextmanager
def own_attention(model: PreTrainedModel, place: Place, calls: Calls) -> Iterator[None]:
    """Record query, key, value and mix where the own code of BLOOM, MPT, GPT-J and GPT-Neo has them ready."""
    with ExitStack() as stack:
        for layer in model.get_submodule(place.layers):
            stack.enter_context(_own_code(model.config.model_type, layer.get_submodule(place.attention), calls))
        yield


@contextmanager
def _own_code(kind: str, attention: Any, calls: Calls) -> Iterator[None]:
    """Query, key, value and mix where each architecture's own code has them ready."""
    with ExitStack() as stack:
        if kind in ("gptj", "gpt_neo"):
            own = attention._attn

            def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any) -> tuple:
                calls.add(query, key, value)
                mix, weights = own(query, key, value, *rest, **kwargs)
                calls.mixes.append(kept(mix))
                return mix, weights

            stack.enter_context(patch.object(attention, "_attn", attend))
        elif kind == "bloom":
            split, merge = attention._reshape, attention._merge_heads

            def reshape(fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
                calls.add(*split(fused))
                return calls.qkv[-1]

            def merge_heads(mix: torch.Tensor) -> torch.Tensor:
                calls.mixes.append(kept(mix.view(1, *mix.shape)))  # (1,H,T,d)
                return merge(calls.mixes[-1][0])

            stack.enter_context(patch.object(attention, "_reshape", reshape))
            stack.enter_context(patch.object(attention, "_merge_heads", merge_heads))
        elif kind == "mpt":
            heads, width = attention.n_heads, attention.head_dim

            def fused(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
                calls.add(output)

            def mixed(module: nn.Module, args: tuple) -> tuple:
                split = args[0].view(1, -1, heads, width).transpose(1, 2)
                calls.mixes.append(kept(split))
                return (split.transpose(1, 2).reshape(args[0].shape),)

            stack.callback(attention.Wqkv.register_forward_hook(fused).remove)
            stack.callback(attention.out_proj.register_forward_pre_hook(mixed).remove)
        else:
            raise NotImplementedError(kind)
        yield


@contextmanager
def dense_sdpa(calls: Calls, dtype: torch.dtype | None = None) -> Iterator[None]:
    """F.scaled_dot_product_attention made dense, and computed in a `dtype` if that is given; everything is kept."""

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.add(query, key, value)
        given = (x if dtype is None else x.to(dtype) for x in (query, key, value))
        attended = dense_attention(*given, *args, **kwargs)
        calls.logits.append(attended.logits)
        calls.weights.append(attended.weights)
        calls.mixes.append(kept(attended.mix))
        return attended.mix.to(query.dtype)

    with patch.object(F, "scaled_dot_product_attention", dense):
        yield


@torch.no_grad()
def sdpa_weights(model: PreTrainedModel, ids: np.ndarray) -> list[np.ndarray]:
    """A second route to the attention weights (H,T,T) of every layer: the model's SDPA path, made dense."""
    calls = Calls()
    with dense_sdpa(calls, torch.float64):
        model(torch.tensor(ids)[None], use_cache=False)
    return [_numpy(weights) for weights in calls.weights]


# --------------------------------------------------------------------------------------------- tables


def attention(
    sequences: list[Sequence], positions: int, window: int, epsilon: float, causal: bool = True
) -> pd.DataFrame:
    rows = []
    for layer, head, groups in _heads(sequences):
        for position in range(positions):
            seen = []
            for sequence in long_enough(sequences, position):
                weights = sequence.layers[layer].weights[head]
                column = weights[position if causal else 0 :, position]
                mass = _near(weights, position, window, causal).mean()
                seen.append((mass, mass > epsilon, column.mean(), (column**2).mean()))
            rows.append((layer, head, head // groups, position, *np.mean(seen, axis=0)))
    columns = ["window_mass", "sink_rate", "sink_mass", "sink_second_moment"]
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head", "position", *columns])


def _near(weights: np.ndarray, position: int, window: int, causal: bool) -> np.ndarray:
    """Return the weights of the queries within the window of a key: after it, and in an encoder on both sides."""
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
            for sequence in long_enough(sequences, position):
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


def long_enough(sequences: list[Sequence], position: int) -> list[Sequence]:
    return [sequence for sequence in sequences if len(sequence.ids) > position]


# ------------------------------------------------------------------------------------------- comparison

KEYS = (
    "layer", "pathway", "branch", "head", "kv_head", "site", "sequence", "position", "token_id", "coordinate",
    "is_massive",
)  # fmt: skip
# The scale of an entry's error. Sums of positive terms (masses, norms, …) are relative to the entry: each term is
# right to round-off, so the sum is. If terms cancel, round-off has the size of the terms: cosines are means of numbers
# up to 1, the missing mass is 1 minus a sum, and logit gaps are relative to the column's largest.
SCALES: dict[str, float | None] = {"qk_cosine": 1.0, "missing_mass": 1.0, "sink_logit_gap": None}
SMALLEST = (
    1e-6  # relative to the column's largest: smaller entries, such as a weight e⁻⁵⁰, may have lost relative accuracy
)
FACTORS = {"sink_second_moment": 2.0}  # a square's relative error is twice its root's


def errors(ours: pd.DataFrame, expected: pd.DataFrame) -> dict[str, float]:
    """Column → worst relative error. AssertionError if the rows themselves, or the positions of NaN, differ.

    Pathways of gradients that the expected table does not have are left out.
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
        if name == "identity_residual":  # round-off on both sides: only its size matters
            found[name] = float(np.nanmax(column, initial=0.0))
            continue
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
        worst[name] = max(found.values(), default=0.0)
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
