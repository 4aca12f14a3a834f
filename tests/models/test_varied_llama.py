"""Llama's block with exchanged parts, compared with a second implementation of its formulas in float64."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gradient_reference
import pytest
import torch
import torch.nn.functional as F
from support.attention_rows import rows_of
from support.retrofitted import assert_close, each_pair
from tiny import VOCAB, measured, padded, ragged_tokens, spread_weights, tiny_tokens
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from sinkscope.attention.position_kinds import with_positions
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.models.calibrate import calibrate
from sinkscope.models.families import find_family
from sinkscope.models.varied_llama import POSITION_SCHEMES, VariedLlamaConfig, alibi_slopes, bucket
from sinkscope.models.wiring import check_wiring, read_sites
from sinkscope.retrofits import retrofit_model
from sinkscope.text.batch import Batch

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# label → differences from Llama
VARIANTS: dict[str, dict[str, Any]] = {
    **{scheme: {"position_scheme": scheme} for scheme in POSITION_SCHEMES},
    "post-norm": {"norm_placement": "post"},
    **{name: {"feed_forward": name} for name in ("geglu", "reglu", "swish", "gelu", "relu")},
    "summed heads": {"head_mix": "summed"},
    "window": {"sliding_window": 3},
    "prefix": {"prefix_length": 4},
    "several": {"position_scheme": "relative", "norm_placement": "post", "head_mix": "summed", "sliding_window": 5},
    "biased prefix": {"position_scheme": "alibi", "prefix_length": 4, "num_key_value_heads": 2},
}
EACH = pytest.mark.parametrize("label", VARIANTS)
LENGTH = 9
IDS = tiny_tokens(2, LENGTH)


def made(label: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(VariedLlamaConfig(**SHAPE, **VARIANTS[label]), dtype=dtype)
    spread_weights(model, 2.0)
    return model.eval().requires_grad_(False)


@cache
def shared(label: str) -> PreTrainedModel:
    return made(label)


ACTIVATIONS: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {  # whether it is gated, and by what
    "swiglu": (True, silu := lambda x: x / (1 + torch.exp(-x))),
    "geglu": (True, gelu := lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2),
    "reglu": (True, relu := lambda x: x * (x > 0)),
    "swish": (False, silu),
    "gelu": (False, gelu),
    "relu": (False, relu),
}


class Formula:
    """The complete model as a function of its parameters; keeps the attention weights of each layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config
        self.parameters = {name: p.detach().clone().requires_grad_(True) for name, p in model.named_parameters()}
        self.weights: list[torch.Tensor] = []  # (B,H,T,T) each

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        p, scheme, positions = self.parameters, self.config.position_scheme, range(ids.shape[1])
        x = p["model.embed_tokens.weight"][ids]
        if scheme == "learned":
            x = x + p["model.positions.embedding.weight"][: ids.shape[1]]
        if scheme == "absolute":
            angles = [[t / 10_000 ** (2 * i / x.shape[-1]) for i in range(x.shape[-1] // 2)] for t in positions]
            waves = torch.tensor(angles, dtype=torch.float64)
            x = x + torch.cat([waves.sin(), waves.cos()], dim=-1)
        for layer in range(self.config.num_hidden_layers):
            x = self.layer(x, f"model.layers.{layer}")
        if self.config.norm_placement == "pre":
            x = self.rms(x, "model.norm")
        return x @ p["lm_head.weight"].T

    def layer(self, x: torch.Tensor, name: str) -> torch.Tensor:
        attention, mlp = f"{name}.attention_norm", f"{name}.mlp_norm"
        if self.config.norm_placement == "pre":
            x = x + self.attend(self.rms(x, attention), f"{name}.self_attn")
            return x + self.feed_forward(self.rms(x, mlp), f"{name}.mlp")
        x = self.rms(x + self.attend(x, f"{name}.self_attn"), attention)
        return self.rms(x + self.feed_forward(x, f"{name}.mlp"), mlp)

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.parameters[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def feed_forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gated, activation = ACTIVATIONS[self.config.feed_forward]
        up = x @ self.parameters[f"{name}.up_proj.weight"].T
        inner = activation(x @ self.parameters[f"{name}.gate_proj.weight"].T) * up if gated else activation(up)
        return inner @ self.parameters[f"{name}.down_proj.weight"].T

    def attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        config, length = self.config, x.shape[1]
        width = 32 // config.num_attention_heads
        q, k, v = (
            (x @ self.parameters[f"{name}.{part}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2)
            for part in "qkv"
        )
        if config.position_scheme == "rotary":
            q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        logits = q @ k.transpose(-1, -2) / width**0.5 + self.bias(distance)
        window = config.sliding_window or length
        seen = (distance >= 0) & (distance < window) | (torch.arange(length) < config.prefix_length)
        self.weights.append(logits.masked_fill(~seen, -torch.inf).softmax(-1))
        mixes = self.weights[-1] @ v
        if config.head_mix == "summed":
            return mixes.sum(1) @ self.parameters[f"{name}.o_proj.projection.weight"].T
        return mixes.transpose(1, 2).flatten(2) @ self.parameters[f"{name}.o_proj.weight"].T

    def bias(self, distance: torch.Tensor) -> torch.Tensor | float:
        heads = torch.arange(self.config.num_attention_heads)[:, None, None]
        buckets = torch.tensor([[bucket_by_hand(max(0, one)) for one in row] for row in distance.tolist()])
        biases: dict[str, Callable[[], torch.Tensor]] = {
            "alibi": lambda: -(2.0 ** (-8 * (heads.double() + 1) / len(heads))) * distance,
            "bucket-number": lambda: buckets.double(),
            "relative": lambda: self.parameters["model.positions.by_bucket.weight"][buckets, heads],
        }
        return biases.get(self.config.position_scheme, float)()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate the plane of coordinates i and i + d/2 by t · 10000^(-2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * (1 / 10_000 ** (torch.arange(half) / half))  # float32, as Llama's
    cos, sin, first, second = angles.cos().double(), angles.sin().double(), x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def bucket_by_hand(distance: int) -> int:
    """Return T5's bucket: 16 for distances 0 … 15, and 16 logarithmic ones up to 128."""
    return distance if distance < 16 else min(31, 16 + int(math.log(distance / 16) / math.log(8) * 16))


def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Llama's norms compute in float64, like the rest, except rotary tables."""
    of_norms = gradient_reference.DoubleTorch()
    of_norms.float = torch.float32
    monkeypatch.setattr(modeling_llama, "torch", of_norms)


@EACH
def test_logits_and_gradients_are_the_formulas(label: str) -> None:
    model = made(label).requires_grad_(True)
    expected = Formula(model)
    logits = model(IDS).logits
    assert_close(logits, expected(IDS))
    loss(logits, IDS).backward()
    loss(expected(IDS), IDS).backward()
    for name, parameter in model.named_parameters():
        twin = expected.parameters[name].grad
        assert_close(parameter.grad, torch.zeros_like(parameter) if twin is None else twin, 1e-8)


@pytest.mark.parametrize(
    ("label", "kernel"), [*((label, "sdpa") for label in VARIANTS), ("several", "eager"), ("prefix", "eager")]
)
def test_what_is_measured_is_the_formulas_weights(label: str, kernel: str) -> None:
    model = shared(label)
    expected = Formula(model)
    expected(IDS)
    for weights, formula in zip(rows_of(model, IDS, kernel).weights, expected.weights, strict=True):
        assert_close(weights, formula.detach())


GENERATION = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
GENERATION |= {"output_logits": True, "return_dict_in_generate": True}
STATIC = ("learned", "rotary", "window", "prefix", "several", "biased prefix")


@pytest.mark.parametrize(
    ("label", "cache"), [*((label, "dynamic") for label in VARIANTS), *((label, "static") for label in STATIC)]
)
def test_generates_the_same_with_a_cache_and_without(label: str, cache: str) -> None:
    model, batch = made(label, torch.float32), padded(ragged_tokens((LENGTH, LENGTH - 3)), "left")
    options = GENERATION | {"attention_mask": batch.attention_mask}
    cached = model.generate(batch.token_ids, cache_implementation=cache, **options)
    whole = model.generate(batch.token_ids, use_cache=False, **options)
    for ours, expected in zip(cached.logits, whole.logits, strict=True):
        assert_close(ours, expected, 1e-5)


def test_at_its_defaults_it_is_llama() -> None:
    model, llama = made("rotary"), LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    state = model.state_dict()
    for ours, theirs in names.items():
        state = {name.replace(ours, theirs): x for name, x in state.items()}
    llama.load_state_dict(state)
    assert_close(model(IDS).logits, llama(IDS).logits)


@EACH
def test_its_row_holds(label: str) -> None:
    """The kinds of positions equal those of the row, and so does the wiring, by its equation and by calibration."""
    model = shared(label)
    family = find_family(model)
    assert with_positions(model, family).positions == family.positions
    for sites in read_sites(model, family, IDS):
        assert check_wiring(family.block(0), sites) < 1e-12
    if label in ("none", "post-norm", "relative"):
        found = calibrate(model, IDS)
        for field in ("layers", "attention", "wiring", "door", "sites"):
            assert getattr(found, field) == getattr(family, field)


def test_a_key_of_the_prefix_has_all_queries() -> None:
    """The means are over the queries that see a key: all T for a prefix's key, T - s for other keys."""
    model = shared("prefix")
    settings = Settings(positions=LENGTH, window=LENGTH, epsilon=0.3)
    found = measured(model, [Batch(IDS, torch.ones_like(IDS))], settings, ("attention",))["attention"]
    expected = Formula(model)
    expected(IDS)
    queries = torch.tensor([LENGTH] * 4 + list(range(LENGTH - 4, 0, -1)))
    for layer, weights in enumerate(expected.weights):
        mass = (weights.detach().sum(2) / queries).mean(0)
        for column in ("window_mass", "sink_mass"):
            own = found[found["layer"] == layer].pivot(index="head", columns="position", values=column)
            assert_close(torch.tensor(own.to_numpy()), mass, 1e-6)


@each_pair(
    ["alibi", "learned", "several"],
    ["none", "operation:kind=sigmoid", "key-bias:value=learned", "value-bias"],
    ("label", "method"),
)
def test_saved_with_a_retrofit_or_without_it_is_the_same(label: str, method: str, tmp_path: Path) -> None:
    name, _, given = method.partition(":")
    parameters = dict(part.split("=") for part in filter(None, given.split(",")))
    model = made(label, torch.float32)
    model = model if method == "none" else retrofit_model(model, None, name, **parameters)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)  # with a gradient another kernel runs
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_slopes_and_buckets() -> None:
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]  # the slopes of 2 heads, and the first of 4
    distances = torch.arange(200)
    assert bucket(distances).tolist() == [bucket_by_hand(int(d)) for d in distances]
    assert bucket(torch.tensor([-5])).tolist() == [0]


def test_the_weight_on_a_windows_first_token() -> None:
    """The mean is over queries t ≥ 3, because earlier ones see position 0; padded sequences of 9, 5 and 2 tokens."""
    model, lengths = shared("window"), [9, 5, 2]
    tables = measured(model, [padded(ragged_tokens(lengths), "left")], Settings(), ("window-edge",))
    found = tables["window_edge_by_sequence"].set_index(["layer", "sequence"])
    assert sorted(found.index) == [(layer, sequence) for layer in (0, 1) for sequence in (0, 1)]
    for sequence, ids in enumerate(ragged_tokens(lengths)[:2]):
        expected = Formula(model)
        expected(torch.as_tensor(ids)[None])
        for layer, weights in enumerate(expected.weights):
            edge = torch.stack([weights[0, :, t, t - 2] for t in range(3, lengths[sequence])])
            assert found.loc[(layer, sequence), "edge_mass"] == pytest.approx(float(edge.detach().mean()), rel=1e-5)
            assert found.loc[(layer, sequence), "edge_queries"] == lengths[sequence] - 3
    assert OBSERVABLES["window-edge"].inapplicable(shared("rotary"), find_family(shared("rotary")))
