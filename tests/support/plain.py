"""Everything that a model computes, by plain transformers and torch's autograd: a padded batch, or one sequence.

Nothing of sinkscope is imported.

Attention is dense: transformers' attention functions are replaced by the eager function of the model's own file, and
its inputs are kept with their graph. The weights are those of the mix: if the values are a basis, the mix is the
weights, times any factor of the model's. If attention is in the model's own code, it is matmul (q, kᵀ) → softmax →
matmul (weights, v), or F.scaled_dot_product_attention, made dense here; heads of keys and values that this code has
copied are counted once. Most families take the softmax in float32 even if the model is float64; here it is in float64,
so that float64 models can be compared to float64's round-off.

The terms of the residual stream are read from the sums that the model's own code makes. While a layer runs, every sum
of two tensors as large as the residual stream is kept. The sums, and norms after a sum, that lead from the layer's
input to its output are the stream; the added tensors are the branches:

    mid = layer_in + attn_out       if the code of a later branch reads the sum
    layer_out = mid + mlp_out       or a norm of that sum, out_sum

Among branches that read the same state, attention's (or that of a module in its place) is the one that depends on other
tokens. A norm belongs to a branch if it is the only one that reads the branch's input. No module is identified by its
name, and no constant is fitted.
"""

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# --- the residual stream

ADDED_TO = (torch.Tensor.add_, torch.Tensor.__iadd__)  # these write the sum into their first argument
ADDITIONS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, *ADDED_TO}


class Kept:
    """A tensor with its graph, and a copy of its values, because the model may change it in place."""

    def __init__(self, live: torch.Tensor, x: torch.Tensor) -> None:
        self.live = live
        self.with_gradient = live  # has the same gradient
        self.x = x  # (B,T,D)
        self.key = (x + 0.0).numpy().tobytes()  # + 0.0 makes -0.0 and 0.0 equal

    @property
    def gradient(self) -> torch.Tensor:
        """Return (B,T,D); zeros without a gradient."""
        gradient = self.with_gradient.grad
        return torch.zeros_like(self.x) if gradient is None else gradient.reshape(self.x.shape).double()


@dataclass
class Sums:
    """The sums of one layer. A value is found again bit for bit, whichever tensor holds it."""

    taken: Kept
    terms: dict[bytes, tuple[Kept, Kept]] = field(default_factory=dict)  # sum → its terms
    totals: dict[bytes, Kept] = field(default_factory=dict)
    normed: dict[bytes, Kept] = field(default_factory=dict)  # output of a norm → its input
    norms: list[tuple[nn.Module, bytes, Kept]] = field(default_factory=list)  # each norm, its input and its output
    out: Kept | None = None  # the layer's output, before hooks of a user

    def sites(self) -> dict[str, list[Kept]]:
        """Return site → its terms (B,T,D); without branches if no sums lead from the layer's input to its output."""
        assert self.out is not None
        steps = self._steps(self.out.key) or []
        added = [branch for branch, _ in steps]
        later = next((at for at in range(1, len(steps)) if self._reads(added[at], steps[:at])), None)
        if later is None:
            alone = [part for branch in added for part in self._parts(branch)]
            mixing = [self._mixes_tokens(part) for part in alone]
            parts = {
                "attn_out": [part for part, mixes in zip(alone, mixing, strict=True) if mixes],
                "mlp_out": [part for part, mixes in zip(alone, mixing, strict=True) if not mixes],
            }
        else:
            last_sum = [steps[-1][1]] if self.out.key in self.normed else []
            parts = {
                "attn_out": added[:later], "mid": [steps[later - 1][1]], "mlp_out": added[later:], "out_sum": last_sum
            }  # fmt: skip
        return {"layer_in": [self.taken], **parts}

    def norms_of_branches(self, mid: Kept | None) -> dict[str, tuple[nn.Module, Kept]]:
        """Return the norms that only one branch reads, as `attn_norm` and `mlp_norm`."""
        first = [(norm, out) for norm, source, out in self.norms if source == self.taken.key]
        second = [(norm, out) for norm, source, out in self.norms if mid is not None and source == mid.key]
        if mid is None:  # the branches are parallel
            return dict(zip(("attn_norm", "mlp_norm"), first, strict=True)) if len(first) == 2 else {}
        return {name: norms[0] for name, norms in (("attn_norm", first), ("mlp_norm", second)) if norms}

    def kept(self, x: torch.Tensor, scale: float = 1) -> Kept:
        return Kept(x, scale * x.detach().double().clone().reshape(self.taken.x.shape))

    def _steps(self, target: bytes, above: frozenset[bytes] = frozenset()) -> list[tuple[Kept, Kept]] | None:
        """Return the branches added between the layer's input and the target, with the sums; None if no path exists."""
        if target == self.taken.key:
            return []
        if target in above:
            return None
        if target in self.normed:
            return self._steps(self.normed[target].key, above | {target})
        terms = self.terms.get(target, ())
        for stream, branch in zip(terms, reversed(terms), strict=True):
            before = self._steps(stream.key, above | {target})
            if before is not None:
                return [*before, (branch, self.totals[target])]
        return None

    def _parts(self, branch: Kept) -> list[Kept]:
        terms = self.terms.get(branch.key)
        return [branch] if terms is None else [part for term in terms for part in self._parts(term)]

    def _reads(self, branch: Kept, before: Sequence[tuple[Kept, Kept]]) -> bool:
        """Return whether a branch is computed from earlier branches, or from the sums."""
        sources = [each.live for step in before for each in step]
        return any(gradient is not None for gradient in _gradients(branch.live.sum(), sources))

    def _mixes_tokens(self, branch: Kept) -> bool:
        """Return whether a branch at the last token depends on the layer's input at earlier tokens."""
        last = branch.live.reshape(self.taken.x.shape)[0, -1]
        (gradient,) = _gradients(last @ torch.linspace(1, 2, len(last), dtype=last.dtype), [self.taken.live])
        return gradient is not None and bool(gradient.reshape(self.taken.x.shape)[0, :-1].any())


def _gradients(of: torch.Tensor, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return torch.autograd.grad(of, sources, retain_graph=True, allow_unused=True)


class Additions:
    """Keeps the sums of the current layer."""

    def __init__(self) -> None:
        self.layer: Sums | None = None

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        layer = self.layer
        if layer is None or not all(_is_like(layer.taken.x, x) for x in args[:2]):
            return func(*args, **kwargs)
        first = args[0].clone() if func in ADDED_TO else args[0]
        terms = layer.kept(first), layer.kept(args[1], kwargs.get("alpha", 1))
        output = func(*args, **kwargs)
        total = layer.kept(output)
        if func in ADDED_TO:  # a term that is read nowhere else has the gradient of the sum
            terms[0].with_gradient = output
        layer.terms[total.key], layer.totals[total.key] = terms, total
        return output

    def see_norm(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Record the input and the output of a norm; a forward hook."""
        layer = self.layer
        if layer is None or not args or not all(_is_like(layer.taken.x, x) for x in (args[0], output)):
            return
        source, out = layer.kept(args[0]), layer.kept(output)
        layer.normed[out.key] = source
        layer.norms.append((module, source.key, out))


def _is_like(stream: torch.Tensor, x: Any) -> bool:
    is_real = isinstance(x, torch.Tensor) and x.is_floating_point()
    return is_real and x.numel() == stream.numel() and x.shape[-1] == stream.shape[-1]


def norms_in(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules with gains of channels and no matrix."""
    every = dict.fromkeys(part for module in modules for part in module.modules() if not any(part.children()))
    return [part for part in every if {parameter.dim() for parameter in part.parameters()} == {1}]


# --- attention in a model's own code

PRODUCTS = {
    *(torch.matmul, torch.bmm, torch.baddbmm),
    *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm),
}
SOFTMAXES = {F.softmax, torch.softmax, torch.Tensor.softmax}
READ = {*PRODUCTS, *SOFTMAXES, torch.einsum, F.scaled_dot_product_attention}


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


@dataclass
class Attended:
    """The attention of one layer on a batch of B sequences."""

    query: torch.Tensor  # (B,H,T,d), with gradients if the model was differentiated; likewise key and value
    key: torch.Tensor  # (B,K,T,d)
    value: torch.Tensor  # (B,K,T,d)
    weights: torch.Tensor  # (B,H,T,T)
    logits: torch.Tensor  # (B,H,T,S), after softcap, bias and mask; S = T+1 with a learned sink
    mix: torch.Tensor  # (B,H,T,d)

    gradients_of: "Attended | None" = None  # for other tokens, an encoder's masked ones

    @property
    def qkv(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    def retain_gradients(self) -> None:
        for x in (*self.qkv, self.mix):
            if x.requires_grad:
                x.retain_grad()

    @property
    def gradients(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key, value and mix; zeros without gradients."""
        of = self.gradients_of or self
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in (*of.qkv, of.mix))


class OwnAttention:
    """Keeps the attention that the current layer computes, by its own code if `reads_products`; (B,T) is the shape."""

    def __init__(self, shape: torch.Size, reads_products: bool) -> None:
        self.shape = shape
        self.reads_products = reads_products
        self.begin()

    def begin(self, is_read: bool = True) -> None:
        self.is_read = is_read
        self.attended: Attended | None = None
        self.query: torch.Tensor | None = None
        self.key: torch.Tensor | None = None
        self.logits = torch.empty(0)
        self.is_softmax = False
        self.is_known = False  # whether an attention function of transformers has given it

    def see(self, attended: Attended) -> None:
        """Keep the input of an attention function of transformers, which takes precedence over the layer's products."""
        assert not (self.is_known and self.is_read), "a layer attends twice"
        self.attended, self.is_known = attended, True

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in SOFTMAXES:
            is_square = args[0].shape[-2:] == (self.shape[1],) * 2
            self.is_softmax = is_square and self.query is not None
            if is_square or args[0].dim() == 4:
                self.logits = args[0]
                return func(*args, **kwargs | {"dtype": torch.float64}).to(args[0].dtype)
        if not self.reads_products or self.attended is not None or not self.is_read:
            return func(*args, **kwargs)
        if func is torch.einsum and isinstance(args[1], torch.Tensor) and "." not in args[0] and len(args) == 3:
            return self._einsum(*args)
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def _einsum(self, equation: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Compute an einsum as a batched product (…,R,C) @ (…,C,S), if it is one with R before S in its result."""
        terms, _, result = equation.replace(" ", "").partition("->")
        first, second = terms.split(",")
        batch = [axis for axis in result if axis in first and axis in second]
        alone = [axis for axis in result if axis not in batch]
        summed = [axis for axis in first if axis not in result]
        if not batch or len(alone) != 2 or len(summed) != 1 or alone[0] not in first or alone[1] not in second:
            return torch.einsum(equation, left, right)
        orders = ([*batch, alone[0], *summed], [*batch, *summed, alone[1]])
        factors = [x.permute([term.index(axis) for axis in order])
                   for x, term, order in zip((left, right), (first, second), orders, strict=True)]  # fmt: skip
        return self._product(torch.matmul, tuple(factors), {}).permute(
            [[*batch, *alone].index(axis) for axis in result]
        )

    def _product(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        square = (self.shape[1],) * 2
        factors = args[-2:] if len(args) > 1 else (kwargs["batch1"], kwargs["batch2"])
        left, right = factors
        if left.dim() < 3 or right.dim() < 3:
            return func(*args, **kwargs)

        def multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            if len(args) > 1:
                return func(*args[:-2], left, right, **kwargs)
            return func(*args, **kwargs | {"batch1": left, "batch2": right})

        if self.query is None and (left.shape[-2], right.shape[-1]) == square:
            self.query, self.key = self._heads(left), self._one_of_each(self._heads(right.transpose(-1, -2)))
            left = self.query.reshape(left.shape)
            right = self._repeated(self.key, right.transpose(-1, -2)).transpose(-1, -2)
        elif self.is_softmax and left.shape[-2:] == square:
            value = self._one_of_each(self._heads(right))
            product = multiplied(left, self._repeated(value, right))
            weights, logits, mix = map(self._heads, (left.detach(), self.logits.detach(), product))
            self.attended = Attended(self.query, self.key, value, weights, logits, mix)
            return mix.reshape(product.shape)
        return multiplied(left, right)

    def _fused(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        key, value = self._one_of_each(key), self._one_of_each(value)
        logits, weights, mix = dense_attention(query.double(), key.double(), value.double(), *args, **kwargs)
        mix = mix.to(query.dtype)
        self.attended = Attended(query, key, value, weights.detach(), logits.detach(), mix)
        return mix

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (B·H,T,d) or (B,H,T,d) to (B,H,T,d)."""
        return x.reshape(self.shape[0], -1, *x.shape[-2:])

    def _one_of_each(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B,K,T,d) for (B,H,T,d): remove the copies that follow each head."""
        heads = x.shape[1]
        copies = (n for n in range(heads, 0, -1) if heads % n == 0)
        copied = next(n for n in copies if torch.equal(x[:, ::n].repeat_interleave(n, 1), x))
        return x[:, ::copied]

    def _repeated(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Repeat heads (B,K,T,d) into the shape in the model's own code."""
        heads = like.numel() // x[:, :1].numel()
        return x.repeat_interleave(heads // x.shape[1], 1).reshape(like.shape)


# --- the model


@contextmanager
def only_float64() -> Iterator[None]:
    """Replace float32 by float64 in modeling code that requests it, in a norm or a softmax."""
    names = dict.fromkeys(("float32", "float"), torch.float64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.multiple(torch, **names), patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass
class BatchLayer:
    """One layer on a batch of B sequences; a layer that does not run has no sites."""

    sites: dict[str, torch.Tensor] = field(default_factory=dict)  # (B,T,D)
    lives: dict[str, Kept] = field(default_factory=dict)  # sites and norms of branches, with their gradients
    norms: dict[str, nn.Module] = field(default_factory=dict)  # `attn_norm` and `mlp_norm`, if a branch alone reads it
    is_post_norm: bool = False  # whether the layer's output is that of a norm
    attended: Attended | None = None
    is_read: bool = True  # whether it attends by one softmax


@dataclass
class Layer:
    """One layer on one sequence, in float64. A layer without attention has only sites."""

    weights: np.ndarray  # (H,T,T)
    logits: np.ndarray  # (H,T,T), after softcap, bias and mask
    query: np.ndarray  # (H,T,d), after rotary; so is the key
    key: np.ndarray  # (K,T,d)
    value: np.ndarray  # (K,T,d)
    sites: dict[str, np.ndarray]  # site → (T,D)
    gradients: dict[str, np.ndarray]  # of query, key, value, mix (H,T,d), sites and norms of branches
    norms: dict[str, nn.Module]
    is_post_norm: bool

    @property
    def allowed(self) -> np.ndarray:
        return self.logits > FORBIDDEN


@dataclass
class Sequence:
    ids: np.ndarray
    logits: torch.Tensor  # (T,V), as the model gave them
    layers: list[Layer]

    @property
    def loss(self) -> float:
        """Return the cross-entropy summed over the predicted tokens."""
        return F.cross_entropy(self.logits[:-1].double(), torch.tensor(self.ids[1:]), reduction="sum").item()


FORBIDDEN = -1e30  # a logit below this is masked


@dataclass
class Plain:
    """A model on a batch of B sequences."""

    ids: torch.Tensor  # (B,T)
    start: torch.Tensor  # (B,): the column of each sequence's first token
    lengths: torch.Tensor  # (B,)
    layers: list[BatchLayer]
    causal: bool = True  # whether a query sees no later keys
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (B,T,V)

    @property
    def attended(self) -> list[Attended]:
        return [layer.attended for layer in self.layers if layer.attended is not None]

    def grad_norms(self, pathway: str) -> list[torch.Tensor]:
        """Return by layer the norm over all heads of each position's gradient, summed over sequences, (1,P)."""
        at = ("query", "key", "value").index(pathway)
        return [self._sum_of_gradients(each.gradients[at]) for each in self.attended]

    def sequences(self) -> list[Sequence]:
        return [self._sequence(row) for row in range(len(self.lengths))]

    def _sequence(self, row: int) -> Sequence:
        def own(x: torch.Tensor) -> np.ndarray:
            return self._own(row, x.detach()[row]).double().numpy()

        def square(x: torch.Tensor) -> np.ndarray:
            return self._own(row, self._own(row, x.detach()[row]).transpose(1, 2)).transpose(1, 2).double().numpy()

        layers = []
        for layer in self.layers:
            attention, sites = [None] * 5, {site: own(x) for site, x in layer.sites.items()}
            gradients = {site: own(kept.gradient) for site, kept in layer.lives.items()}
            if (attended := layer.attended) is not None:
                attention = [square(attended.weights), square(attended.logits), *map(own, attended.qkv)]
                gradients |= dict(zip(("query", "key", "value", "mix"), map(own, attended.gradients), strict=True))
            layers.append(Layer(*attention, sites, gradients, layer.norms, layer.is_post_norm))
        ids = self._own(row, self.ids[row, :, None])[:, 0]
        return Sequence(ids.numpy(), self._own(row, self.logits[row]), layers)

    def _own(self, row: int, x: torch.Tensor) -> torch.Tensor:
        """Return (…,T,D) of one sequence without its padding."""
        first = int(self.start[row])
        return x[..., first : first + int(self.lengths[row]), :]

    def _sum_of_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        longest = int(self.lengths.max())
        own = [self._own(row, gradient[row]) for row in range(len(self.lengths))]
        total = torch.stack([F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in own]).sum(0)
        return total.transpose(0, 1).flatten(1).norm(dim=-1)[None]


def record(model: PreTrainedModel, ids: Any, predicted: int | None = None) -> Sequence:
    """Run one sequence alone, with the gradients of its summed loss ÷ `predicted` if that is given."""
    ids = torch.tensor(np.asarray(ids))[None]
    layers = next(path for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    options = {"backward": predicted is not None, "branches": True, "predicted": predicted}
    return run_plainly(model, layers, ids, torch.ones_like(ids), **options).sequences()[0]


def record_each(model: PreTrainedModel, sequences: Iterable[Any]) -> list[Sequence]:
    return [record(model, ids) for ids in sequences]


def run_plainly(
    model: PreTrainedModel,
    layers: str,
    ids: torch.Tensor,
    mask: torch.Tensor,
    labels: torch.Tensor | None = None,
    backward: bool = True,
    branches: bool | None = None,
    predicted: int | None = None,
    first_position: int | None = 0,
    unread: Collection[int] = (),
    **arguments: int,
) -> Plain:
    """Run a model forward on ids (B,T), and differentiate its mean cross-entropy.

    Args:
        layers: The path of its list of layers.
        mask: (B,T), 0 for padding.
        labels: (B,T) for an encoder, -100 where nothing is predicted; None: each token predicts the next.
        backward: Whether to differentiate.
        branches: Whether to find the branches; None: if it is differentiated.
        predicted: The number of tokens by which the summed loss is divided; None: those that are predicted.
        first_position: The number that the model gives to a sequence's first position; None: it takes none.
        unread: Layers that do not attend by one softmax.
        arguments: Arguments of the model that have one value for every token.
    """
    inputs = {"input_ids": ids, "use_cache": False}
    if not mask.all():
        inputs["attention_mask"] = mask
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters and first_position is not None
    if takes_positions and not mask[:, 0].all():
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + first_position
    inputs |= {name: torch.full_like(ids, value) for name, value in arguments.items()}
    modules = list(model.get_submodule(layers))
    branches = backward if branches is None else branches
    for own_attention in (False, True) if len(_attention_functions(model)) > 1 else (True,):
        parts = [BatchLayer(is_read=at not in unread) for at in range(len(modules))]
        plain = Plain(ids, mask.int().argmax(1), mask.sum(1), parts, causal=labels is None)
        watch = _Watch(ids.shape, getattr(model.config.get_text_config(), "hidden_size", None), branches, own_attention)
        with watch.watching(modules, plain.layers), _dense(model, watch), torch.set_grad_enabled(branches):
            embeddings = model.get_input_embeddings()(ids)
            embedded = (
                (embeddings[0] if isinstance(embeddings, tuple) else embeddings).detach().requires_grad_(branches)
            )
            with _embeddings_replaced(model, embedded):
                logits = model(**inputs).logits
            if plain.attended or own_attention:
                break
    if backward:
        _loss(logits.double(), ids, mask.bool(), labels, predicted).backward()
    plain.logits = logits.detach()
    return plain


def _loss(
    logits: torch.Tensor, ids: torch.Tensor, real: torch.Tensor, labels: torch.Tensor | None, predicted: int | None
) -> torch.Tensor:
    if labels is None:
        labels = F.pad(ids.masked_fill(~real, -100)[:, 1:], (0, 1), value=-100).masked_fill(~real, -100)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (int((labels != -100).sum()) if predicted is None else predicted)


@dataclass
class _Watch(TorchFunctionMode):
    """Records the input, the sums, the attention and the output of the current layer."""

    shape: torch.Size  # (B,T)
    width: int | None  # D
    with_branches: bool
    with_own_attention: bool

    def __post_init__(self) -> None:
        super().__init__()
        self.additions = Additions()
        self.attention = OwnAttention(self.shape, self.with_own_attention)

    @contextmanager
    def watching(self, modules: list[nn.Module], layers: list[BatchLayer]) -> Iterator[None]:
        with ExitStack() as stack:
            for norm in norms_in(modules) if self.with_branches else ():
                stack.enter_context(norm.register_forward_hook(self.additions.see_norm))
            stack.enter_context(self)
            for module, layer in zip(modules, layers, strict=True):
                begin, end = partial(self._begin, layer), partial(self._end, layer)
                stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(self._leave, prepend=True))
                stack.enter_context(module.register_forward_hook(end))
            yield

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in ADDITIONS:
            return self.additions.call(func, args, kwargs or {})
        return self.attention.call(func, args, kwargs or {}) if func in READ else func(*args, **kwargs or {})

    def _begin(self, layer: BatchLayer, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        taken = _first_floats((*args, *kwargs.values()))
        layer.sites["layer_in"] = self._stream(taken)
        self.attention.begin(layer.is_read)
        if self.with_branches and taken.numel() == layer.sites["layer_in"].numel():  # of copies only the mean is read
            self.additions.layer = Sums(Kept(taken, layer.sites["layer_in"]))

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Keep the layer's output before hooks of a user change it."""
        self.sums, self.additions.layer = self.additions.layer, None
        if self.sums is not None:
            self.sums.out = self.sums.kept(_first_floats(output if isinstance(output, tuple | list) else (output,)))

    def _end(self, layer: BatchLayer, module: nn.Module, args: tuple, output: Any) -> None:
        out = _first_floats(output if isinstance(output, tuple | list) else (output,))
        if self.sums is None:
            layer.sites["layer_out"] = self._stream(out)
        else:
            terms = self.sums.sites() | {"layer_out": [self.sums.kept(out)]}
            layer.sites = {site: torch.stack([term.x for term in each]).sum(0) for site, each in terms.items() if each}
            norms = self.sums.norms_of_branches(terms["mid"][0] if "mid" in terms else None)
            layer.lives = {site: each[0] for site, each in terms.items() if each}
            layer.lives |= {name: kept for name, (_, kept) in norms.items()}
            layer.norms = {name: norm for name, (norm, _) in norms.items()}
            layer.is_post_norm = self.sums.out.key in self.sums.normed
            for kept in layer.lives.values():
                kept.with_gradient.retain_grad()
        layer.attended = self.attention.attended if layer.is_read else None
        if layer.attended is not None:
            layer.attended.retain_gradients()
        self.attention.begin()

    def _stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B,T,D), the mean if there are several copies: (B,T,S,D), (B,T,S·D) or (S,B,T,D)."""
        x = x.detach().double().clone()
        if x.shape[:2] == self.shape:
            return x.reshape(*self.shape, -1, self.width or x.shape[-1]).mean(2)
        if x.dim() == 4:
            return x.mean(0)
        return x.view(*self.shape, -1)  # tokens of all sequences, one after the other


def _first_floats(values: Iterable[Any]) -> torch.Tensor:
    return next(value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())


@contextmanager
def _embeddings_replaced(model: PreTrainedModel, embedded: torch.Tensor) -> Iterator[None]:
    def instead(module: nn.Module, args: tuple, output: Any) -> Any:
        return (embedded.clone(), *output[1:]) if isinstance(output, tuple) else embedded.clone()

    with model.get_input_embeddings().register_forward_hook(instead):
        yield


def _attention_functions(model: PreTrainedModel) -> list[Any]:
    """Return transformers' table of attention functions, and those of the files of the model that use one."""
    files = {type(module).__module__ for module in model.modules()}
    tables = (vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in files)
    return [ALL_ATTENTION_FUNCTIONS, *(table for table in tables if table is not None)]


@contextmanager
def _dense(model: PreTrainedModel, watch: _Watch) -> Iterator[None]:
    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        mask, sees = attention_mask, torch.ones(1, 1, 1, 1)
        if mask is None or mask.dtype == torch.bool:
            every = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
            bare = every.tril() if getattr(module, "is_causal", True) else every  # as transformers' sdpa function does
            allowed = bare if mask is None else mask
            sees = allowed.any(-1, keepdim=True).transpose(-3, -2)  # sdpa returns zeros for a row of padding
            mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        own = vars(sys.modules[type(module).forward.__module__])["eager_attention_forward"]
        basis = torch.eye(key.shape[2], dtype=value.dtype).expand(*value.shape[:2], -1, -1)
        with torch.no_grad():
            basis_mix = own(module, query, key, basis, mask, *args, **kwargs)[0].transpose(1, 2)
        mix, weights = own(module, query, key, value, mask, *args, **kwargs)
        by_head = mix.transpose(1, 2)
        watch.attention.see(Attended(query, key, value, basis_mix, watch.attention.logits, by_head))
        return by_head.transpose(1, 2) * sees, weights

    tables = list({id(table): table for table in _attention_functions(model)}.values())
    for table, name in product(tables, ("sdpa", "eager")):
        table[name] = attend
    try:
        yield
    finally:
        for table, name in product(tables, ("sdpa", "eager")):
            del table[name]
