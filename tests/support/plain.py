"""What a model computes, by plain transformers, torch's autograd and nothing of sinkscope: in float64, a padded batch.

Attention is dense: in place of transformers' attention functions stands the eager function of the model's own file, and
what it takes is kept with its graph. Its weights are those that it mixes values by: of values that are a basis, the mix
is the weights, with what a model may multiply the mix by afterwards. Of a model that attends in code of its own they
are what this code takes and makes (own_attention.py). What is added to the residual stream is read off the sums that
the model makes (residual.py).
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import gradient_reference
import numpy as np
import pandas as pd
import reference
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support.own_attention import Attended, OwnAttention
from support.residual import Additions, Kept, Sums, additions


@contextmanager
def only_float64() -> Iterator[None]:
    """Modeling code that asks for float32, in a norm or a softmax, gets float64."""
    names = dict.fromkeys(("float32", "float"), torch.float64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.multiple(torch, **names), patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass
class Layer:
    """Of a batch of B sequences; one that does not run has no sites."""

    sites: dict[str, torch.Tensor] = field(default_factory=dict)  # (B,T,D)
    attended: Attended | None = None


@dataclass
class Plain:
    """Of a batch of B sequences."""

    ids: torch.Tensor  # (B,T)
    start: torch.Tensor  # (B,): the column of each sequence's first token
    lengths: torch.Tensor  # (B,)
    layers: list[Layer]
    causal: bool = True  # whether a query sees no later keys
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (B,T,V)

    @property
    def attended(self) -> list[Attended]:
        """Of the layers that attend by a softmax."""
        return [layer.attended for layer in self.layers if layer.attended is not None]

    def masses_and_norms(self) -> dict[str, pd.DataFrame]:
        """Of the tables of a forward pass two columns, quickly: sink masses, and the norms of what layers take."""
        masses, norms = {}, {}
        for at, layer in enumerate(self.layers):
            if layer.attended is not None:
                masses[at] = self.sink_mass(layer.attended.weights)
            if layer.sites:
                x = layer.sites["layer_in"]
                norms[at] = self._mean(self._own(row, x[row]).norm(dim=-1)[None] for row in self._rows())
        tables = {"activation": _long(norms, "norm_mean").drop(columns="head").assign(site="layer_in")}
        return tables | ({"attention": _long(masses, "sink_mass")} if masses else {})

    def sink_mass(self, weights: torch.Tensor) -> torch.Tensor:
        """(B,H,T,T) → (H,P), the mean weight on each position of the queries that see it, averaged over sequences."""
        return self._mean(self._sink_mass(row, weights[row]) for row in self._rows())

    def grad_norms(self, pathway: str) -> list[torch.Tensor]:
        """By layer the norm over all heads of each position's gradient, summed over sequences, (1,P)."""
        at = ("query", "key", "value").index(pathway)
        return [self._sum_of_gradients(each.gradients[at]) for each in self.attended]

    def tables(self, positions: int, window: int, epsilon: float) -> dict[str, pd.DataFrame]:
        """Every column of the tables of a forward pass and, where there are gradients, of theirs."""
        sequences = [self._sequence(row) for row in self._rows()]
        found = {
            "activation": reference.activation(sequences, positions),
            "massive": reference.massive(sequences),
        }
        if not self.attended:
            return found
        gradients = [self._gradients(row) for row in self._rows()]
        return found | {
            "attention": reference.attention(sequences, positions, window, epsilon, self.causal),
            "attention_heads": reference.attention_heads(sequences),
            "sink_positions": reference.sink_positions(sequences, window, epsilon, self.causal),
            "gradient": gradient_reference.gradient(gradients, positions),
        }

    def _sequence(self, row: int) -> reference.Sequence:
        layers = []
        for layer in self.layers:
            sites = {site: self._own(row, x[row]).numpy() for site, x in layer.sites.items()}
            parts = layer.attended and [self._own(row, x.detach()[row]).numpy() for x in layer.attended.qkv]
            weights = layer.attended and self._square(row, layer.attended.weights[row]).numpy()
            layers.append(reference.Layer(weights, None, *(parts or (None, None, None)), sites))
        ids = self._own(row, self.ids[row, :, None])[:, 0]
        return reference.Sequence(ids.numpy(), self._own(row, self.logits[row]), layers)

    def _gradients(self, row: int) -> gradient_reference.Sequence:
        layers = []
        for layer in self.layers:
            parts = layer.attended and [self._own(row, x[row]).numpy() for x in layer.attended.gradients]
            layers.append(gradient_reference.Layer(None, *(parts or (None, None, None)), None, {}, {}))
        return gradient_reference.Sequence(self._own(row, self.ids[row, :, None])[:, 0].numpy(), 0.0, layers)

    def _rows(self) -> range:
        return range(len(self.lengths))

    def _own(self, row: int, x: torch.Tensor) -> torch.Tensor:
        """(…,T,D) of one sequence without its padding."""
        first = int(self.start[row])
        return x[..., first : first + int(self.lengths[row]), :]

    def _square(self, row: int, weights: torch.Tensor) -> torch.Tensor:
        """(H,T,T) of one sequence without its padding."""
        return self._own(row, self._own(row, weights).transpose(1, 2)).transpose(1, 2)

    def _sink_mass(self, row: int, weights: torch.Tensor) -> torch.Tensor:
        own = self._square(row, weights).transpose(1, 2)  # (H,keys,queries)
        return own.sum(-1) / (torch.arange(own.shape[1], 0, -1) if self.causal else own.shape[1])

    def _mean(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Of (H,P) by sequence, over those that have the position."""
        longest = int(self.lengths.max())
        padded = [F.pad(part, (0, longest - part.shape[-1])) for part in parts]
        return torch.stack(padded).sum(0) / (self.lengths[:, None] > torch.arange(longest)).sum(0)

    def _sum_of_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        longest = int(self.lengths.max())
        own = [self._own(row, gradient[row]) for row in self._rows()]
        total = torch.stack([F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in own]).sum(0)
        return total.transpose(0, 1).flatten(1).norm(dim=-1)[None]


def _long(by_layer: dict[int, torch.Tensor], name: str) -> pd.DataFrame:
    """(H,P) of each layer → one row an entry."""
    frames = [
        pd.DataFrame({
            "layer": at,
            "head": np.arange(len(x)).repeat(x.shape[1]),
            "position": np.tile(np.arange(x.shape[1]), len(x)),
            name: x.numpy().ravel(),
        })
        for at, x in by_layer.items()
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def padded_inputs(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, first_position: int | None
) -> dict[str, Any]:
    """As one calls a model of transformers: with a mask, and behind padding with positions where it takes them."""
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters and first_position is not None
    if takes_positions and not mask[:, 0].all():
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + first_position
    return inputs


def run_plainly(
    model: PreTrainedModel,
    layers: str,
    ids: torch.Tensor,
    mask: torch.Tensor,
    labels: torch.Tensor | None = None,
    backward: bool = True,
    first_position: int | None = 0,
    **told: int,
) -> Plain:
    """A batch of ids (B,T) forward, and its mean cross-entropy backward, of a float64 model.

    Args:
        model: to run.
        layers: path of its list of layers.
        ids: (B,T).
        mask: (B,T), 0 where there is padding.
        labels: (B,T) of an encoder, -100 where nothing is predicted; None: each token predicts the next.
        backward: whether to differentiate, without which there are no branches.
        first_position: the number that the model gives to a sequence's first position; None: it is not told any.
        told: arguments of the model that have one value for every token.
    """
    inputs = {"input_ids": ids, "use_cache": False}
    if not mask.all():
        inputs = padded_inputs(model, ids, mask, first_position)
    inputs |= {name: torch.full_like(ids, value) for name, value in told.items()}
    modules = list(model.get_submodule(layers))
    for with_own_attention in (False, True):
        found = Plain(ids, mask.int().argmax(1), mask.sum(1), [Layer() for _ in modules], causal=labels is None)
        watch = _Watch(model, ids.shape, with_branches=backward, with_own_attention=with_own_attention)
        with watch.watching(modules, found.layers), _dense(model, watch), torch.set_grad_enabled(backward):
            given = model.get_input_embeddings()(ids)
            embedded = (given[0] if isinstance(given, tuple) else given).detach().requires_grad_(backward)
            with _in_place_of_the_embeddings(model, embedded):
                logits = model(**inputs).logits
            if found.attended or with_own_attention:
                break
    if backward:
        _loss(logits, ids, mask.bool(), labels).backward()
    found.logits = logits.detach()
    return found


def _loss(logits: torch.Tensor, ids: torch.Tensor, real: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    if labels is not None:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    predicted = real[:, :-1] & real[:, 1:]
    return F.cross_entropy(logits[:, :-1][predicted], ids[:, 1:][predicted])


class _Watch:
    """What the layer under way takes, adds, attends to and gives."""

    def __init__(
        self, model: PreTrainedModel, shape: torch.Size, with_branches: bool, with_own_attention: bool
    ) -> None:
        self.shape = shape  # (B,T)
        self.width = getattr(model.config.get_text_config(), "hidden_size", None)  # D
        self.with_branches = with_branches
        self.with_own_attention = with_own_attention
        self.additions = Additions()
        self.attention = OwnAttention(shape)

    @contextmanager
    def watching(self, modules: list[nn.Module], layers: list[Layer]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.with_branches:
                self.additions = stack.enter_context(additions())
            if self.with_own_attention:
                stack.enter_context(self.attention)
            for module, layer in zip(modules, layers, strict=True):
                begin, end = partial(self._begin, layer), partial(self._end, layer)
                stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(end))
            yield

    def _begin(self, layer: Layer, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        taken = _first_floats((*args, *kwargs.values()))
        layer.sites["layer_in"] = self._stream(taken)
        self.attention.begin()
        if self.with_branches and taken.numel() == layer.sites["layer_in"].numel():  # of copies only the mean is read
            self.additions.layer = Sums(Kept(taken, layer.sites["layer_in"]))

    def _end(self, layer: Layer, module: nn.Module, args: tuple, given: Any) -> None:
        sums, self.additions.layer = self.additions.layer, None
        out = _first_floats(given if isinstance(given, tuple | list) else (given,))
        layer.sites["layer_out"] = self._stream(out)
        if sums is not None:
            layer.sites = sums.sites(out)
        layer.attended = self.attention.attended
        if layer.attended is not None:
            layer.attended.retain_gradients()
        self.attention.begin()

    def _stream(self, x: torch.Tensor) -> torch.Tensor:
        """(B,T,D): the mean of its copies where there are several, (B,T,S,D), (B,T,S·D) or (S,B,T,D)."""
        x = x.detach().clone()
        if x.shape[:2] == self.shape:
            return x.reshape(*self.shape, -1, self.width or x.shape[-1]).mean(2)
        if x.dim() == 4:
            return x.mean(0)
        return x.view(*self.shape, -1)  # tokens of all sequences, one behind the other


def _first_floats(values: Iterable[Any]) -> torch.Tensor:
    return next(value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())


@contextmanager
def _in_place_of_the_embeddings(model: PreTrainedModel, embedded: torch.Tensor) -> Iterator[None]:
    def instead(module: nn.Module, args: tuple, given: Any) -> Any:
        return (embedded.clone(), *given[1:]) if isinstance(given, tuple) else embedded.clone()

    with model.get_input_embeddings().register_forward_hook(instead):
        yield


@contextmanager
def _dense(model: PreTrainedModel, watch: _Watch) -> Iterator[None]:
    files = {type(module).__module__ for module in model.modules()}
    tables = [ALL_ATTENTION_FUNCTIONS, *(vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in files)]

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        mask, sees = attention_mask, torch.ones(1, 1, 1, 1)
        if mask is None or mask.dtype == torch.bool:
            every = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
            bare = every.tril() if getattr(module, "is_causal", True) else every  # as transformers' sdpa function does
            allowed = bare if mask is None else mask
            sees = allowed.any(-1, keepdim=True).transpose(-3, -2)  # of a row of padding sdpa makes zeros
            mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        attended = Attended(query, key, value, torch.empty(0))
        watch.attention.see(attended)
        basis = torch.eye(key.shape[2], dtype=value.dtype).expand(*value.shape[:2], -1, -1)
        with torch.no_grad():
            attended.weights = own(module, query, key, basis, mask, *args, **kwargs)[0].transpose(1, 2)
        mix, weights = own(module, query, key, value, mask, *args, **kwargs)
        return mix * sees, weights

    tables = list({id(table): table for table in tables if table is not None}.values())
    for table, name in product(tables, ("sdpa", "eager")):
        table[name] = attend
    try:
        yield
    finally:
        for table, name in product(tables, ("sdpa", "eager")):
            del table[name]
