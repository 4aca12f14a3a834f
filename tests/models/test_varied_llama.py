"""Llama's block with exchanged parts, compared with a second implementation of its formulas in float64."""

from functools import cache
from pathlib import Path
from typing import Any

import gradient_reference
import pytest
import torch
import torch.nn.functional as F
from support.attention_rows import rows_of
from support.retrofitted import assert_close, each_pair
from support.written_llama import bucket_by_hand, llama
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


def formula(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, and the attention weights (B,H,T,T) of each layer, by the written Llama."""
    weights: list[torch.Tensor] = []

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        if name.endswith("softmax"):
            weights.append(x)
        return x

    return llama(model, ids, keep), weights


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
    model, twin = (made(label).requires_grad_(True) for _ in range(2))
    logits, expected = model(IDS).logits, formula(twin, IDS)[0]
    assert_close(logits, expected.detach())
    loss(logits, IDS).backward()
    loss(expected, IDS).backward()
    for parameter, written in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(parameter.grad, torch.zeros_like(parameter) if written.grad is None else written.grad, 1e-8)


@pytest.mark.parametrize(
    ("label", "kernel"), [*((label, "sdpa") for label in VARIANTS), ("several", "eager"), ("prefix", "eager")]
)
def test_what_is_measured_is_the_formulas_weights(label: str, kernel: str) -> None:
    model = shared(label)
    for weights, expected in zip(rows_of(model, IDS, kernel).weights, formula(model, IDS)[1], strict=True):
        assert_close(weights, expected)


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
    model, plain = made("rotary"), LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    state = model.state_dict()
    for ours, theirs in names.items():
        state = {name.replace(ours, theirs): x for name, x in state.items()}
    plain.load_state_dict(state)
    assert_close(model(IDS).logits, plain(IDS).logits)


@EACH
def test_its_row_holds(label: str) -> None:
    """The kinds of positions equal those of the row, and so does the wiring, by its equation and by calibration."""
    model = shared(label)
    family = find_family(model)
    assert with_positions(model, family).positions == family.positions
    for sites in read_sites(model, family, IDS):
        assert check_wiring(family.block(0), sites) < 1e-12
    if label in ("none", "post-norm", "relative"):
        calibrated = calibrate(model, IDS)
        for field in ("layers", "attention", "wiring", "door", "sites"):
            assert getattr(calibrated, field) == getattr(family, field)


def test_a_key_of_the_prefix_has_all_queries() -> None:
    """The means are over the queries that see a key: all T for a prefix's key, T - s for other keys."""
    model = shared("prefix")
    settings = Settings(positions=LENGTH, window=LENGTH, epsilon=0.3)
    table = measured(model, [Batch(IDS, torch.ones_like(IDS))], settings, ("attention",))["attention"]
    queries = torch.tensor([LENGTH] * 4 + list(range(LENGTH - 4, 0, -1)))
    for layer, weights in enumerate(formula(model, IDS)[1]):
        mass = (weights.sum(2) / queries).mean(0)
        for column in ("window_mass", "sink_mass"):
            own = table[table["layer"] == layer].pivot(index="head", columns="position", values=column)
            assert_close(torch.tensor(own.to_numpy()), mass, 1e-6)


@each_pair(
    ["alibi", "learned", "several"],
    ["none", "operation:kind=sigmoid", "key-bias:value=learned", "value-bias"],
    ("label", "method"),
)
def test_saved_with_a_retrofit_or_without_it_is_the_same(label: str, method: str, tmp_path: Path) -> None:
    name, _, settings = method.partition(":")
    parameters = dict(part.split("=") for part in filter(None, settings.split(",")))
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
    edges = tables["window_edge_by_sequence"].set_index(["layer", "sequence"])
    assert sorted(edges.index) == [(layer, sequence) for layer in (0, 1) for sequence in (0, 1)]
    for sequence, ids in enumerate(ragged_tokens(lengths)[:2]):
        for layer, weights in enumerate(formula(model, torch.as_tensor(ids)[None])[1]):
            edge = torch.stack([weights[0, :, t, t - 2] for t in range(3, lengths[sequence])])
            assert edges.loc[(layer, sequence), "edge_mass"] == pytest.approx(float(edge.mean()), rel=1e-5)
            assert edges.loc[(layer, sequence), "edge_queries"] == lengths[sequence] - 3
    assert OBSERVABLES["window-edge"].inapplicable(shared("rotary"), find_family(shared("rotary")))
