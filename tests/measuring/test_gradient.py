"""Gradient observables against autograd's own gradients (gradient_reference.py), and in small exact cases.

The reference takes each sequence alone and as in training; so padding, batches and frozen parameters are the tested
side's own business. Everything in float64, the model's own excursions to float32 (norms, softmax) included.
"""

import copy
import gc
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gradient_reference as reference
import numpy as np
import pandas as pd
import pytest
import torch
from gradient_reference import in_double
from support.every_model import tiny_of
from support.retrofitted import each_pair
from tiny import FORWARD, REPRESENTATIVE, TINY, batched, measured, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import sinkscope
from sinkscope.attention.kernels import AttentionCall, chunked_attention
from sinkscope.attention.weights import AttentionRead
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring import tracer as tracer_module
from sinkscope.measuring.losses import loss_and_gradient, loss_in_chunks
from sinkscope.measuring.observables import OBSERVABLES, gradient
from sinkscope.measuring.observables.gradient import (
    Branch,
    Gradient,
    NormGain,
    TheoremOne,
    branches_of,
    norm_gain,
    undefined_ratios,
)
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.summary import gradient_summary
from sinkscope.measuring.tables import column_names
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.models.family import Family
from sinkscope.options.measuring import make_config
from sinkscope.output.run import Run
from sinkscope.results.metrics import TOKEN_GROUPS
from sinkscope.text.batch import Batch

POSITIONS, LENGTH = 12, 24
RAGGED = (LENGTH, 17, 2, LENGTH, 11)  # some shorter than POSITIONS; one predicts a single token
TABLES = ("gradient", "gradient_ratio", "gradient_check", "norm_bound")
SAMPLES = ("gradient_by_group", "gradient_ratio_by_sequence")
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
# one of each wiring, and of each way in which attention is read
ONE_OF_EACH = ("llama", "gemma2", "phi", "gpt_oss", "gpt2", "opt-post-norm", "bloom", "falcon", "gptj")
TOLERANCE = 1e-10


@dataclass
class Backward:
    """What one pass of sinkscope gave."""

    tables: dict[str, pd.DataFrame]
    observables: list[Observable]
    loss: float  # a predicted token

    @property
    def gradient(self) -> Gradient:
        return next(found for found in self.observables if isinstance(found, Gradient))


def backward(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    positions: int = POSITIONS,
    names: Sequence[str] = ("gradient",),
    kernel: str = "sdpa",
    prepared: Callable[[PreTrainedModel], None] = lambda model: None,
    family: Family | None = None,
) -> Backward:
    """Forward and backward over the batches; `prepared` runs between the preparation and the pass."""
    predicted = sum(int(batch.lengths.sum()) - len(batch.lengths) for batch in batches)
    with open_tracer(model, family or find_family(model), kernel) as tracer:
        observables = [OBSERVABLES[name](Settings(positions=positions, window=8)) for name in names]
        for observable in observables:
            observable.prepare(model, tracer.family, predicted)
        prepared(model)
        loss = sum(float(tracer.forward_backward(batch, observables).sum()) for batch in batches)
    tables = {name: table for observable in observables for name, table in observable.tables().items()}
    return Backward(tables, observables, loss / predicted)


@cache
def double_model(name: str) -> PreTrainedModel:
    model = tiny_model(name, dtype=torch.float64)
    if name in EXPERTS:
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    return model


@cache
def recorded(name: str, lengths: tuple[int, ...]) -> tuple[PreTrainedModel, list[reference.Sequence]]:
    """The reference's own model, and what it did."""
    model = double_model(name)
    with in_double(model):
        twin = reference.trainable_twin(model)
        return twin, reference.record(twin, ragged_tokens(lengths))


@cache
def expected(name: str, lengths: tuple[int, ...], positions: int = POSITIONS) -> dict[str, pd.DataFrame]:
    twin, sequences = recorded(name, lengths)
    return reference.tables(twin, sequences, positions)


def measured_anew(
    name: str, lengths: tuple[int, ...] = RAGGED, size: int = 2, side: str = "right", **options: Any
) -> dict[str, pd.DataFrame]:
    model = double_model(name)
    with in_double(model):
        return backward(model, batched(ragged_tokens(lengths), size, side), **options).tables


def ours(
    name: str, lengths: tuple[int, ...] = RAGGED, size: int = 2, side: str = "right", kernel: str = "sdpa"
) -> dict[str, pd.DataFrame]:
    """As `measured_anew`, once for all the tests that read these tables. Not to be changed."""
    return _kept(name, lengths, size, side, kernel)


@cache
def _kept(name: str, lengths: tuple[int, ...], size: int, side: str, kernel: str) -> dict[str, pd.DataFrame]:
    return measured_anew(name, lengths, size, side, kernel=kernel)


# --------------------------------------------------------------------------------- the reference itself


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_references_model_is_the_one_that_transformers_would_train(name: str) -> None:
    """Gradients of every parameter, with the attention that the reference put in, and without."""
    twin, _ = recorded(name, RAGGED)
    plain = copy.deepcopy(double_model(name)).requires_grad_(True)
    if reference.on_interface(plain):
        plain.set_attn_implementation("eager")
    sequences = ragged_tokens(RAGGED)
    predicted = sum(len(ids) - 1 for ids in sequences)
    with in_double(plain):
        for ids in map(torch.as_tensor, sequences):
            logits = plain(ids[None], use_cache=False).logits[0]
            (nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum") / predicted).backward()
    found = dict(twin.named_parameters())
    for path, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert found[path].grad is None
            continue
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[path].grad, parameter.grad, rtol=1e-9, atol=1e-11 * scale + 1e-16)


def test_the_references_loss_is_the_one_that_transformers_computes() -> None:
    _, sequences = recorded("llama", (LENGTH,) * 3)
    ids = torch.as_tensor(np.stack(ragged_tokens((LENGTH,) * 3)))
    with torch.no_grad():
        loss = double_model("llama")(ids, labels=ids).loss
    assert sum(sequence.loss for sequence in sequences) / (3 * (LENGTH - 1)) == pytest.approx(float(loss), rel=1e-6)


# ---------------------------------------------------------------------------------------------- parity


BATCHES = {"1": (1, "right"), "2 right": (2, "right"), "2 left": (2, "left"), "5 left": (5, "left")}
MEET_PADDING = ("gpt2", "gpt_oss", "falcon", "bloom")  # learned positions, sink logits, one key head, ALiBi


@each_pair(list(TINY), list(BATCHES), ("name", "batches"), whole=MEET_PADDING)
def test_every_table_is_the_references(name: str, batches: str) -> None:
    """Ragged sequences in five batches, in three, and in one; so neither batches nor padding change anything.

    With them theorem 1's identity, to round-off, in the reference's tables and in ours.
    """
    size, side = BATCHES[batches]
    tables, truth = ours(name, RAGGED, size, side), expected(name, RAGGED)
    worst = reference.assert_same(tables, truth, TOLERANCE)
    for check, bound in ((truth["gradient_check"], 1e-14), (tables["gradient_check"], 1e-10)):
        assert check["identity_residual"].notna().all()
        assert check["identity_residual"].max() < bound
    check_first_query(name, tables["gradient"])
    print(name, size, side, worst)


def check_first_query(name: str, gradient: pd.DataFrame) -> None:
    """It has no gradient unless a sink logit competes with its only key."""
    queries = gradient.query("pathway == 'query'")
    rows = queries.query("position == 0")
    _, sequences = recorded(name, RAGGED)
    truth = max(np.abs(layer.query[:, 0]).max() for sequence in sequences for layer in sequence.layers)
    if name == "gpt_oss":
        assert truth > 1e-4
        assert (rows["grad_norm"] > 0).all()
    else:
        assert truth < 1e-16  # nothing is hidden by what is written as 0
        assert (rows["grad_norm"] == 0.0).all()
    later = queries.query("position in [1, 2, 3] and head == -1")
    assert (later["grad_norm"] > 1e-6).all()


@pytest.mark.parametrize("name", ["llama", "opt-post-norm", "phi", *MEET_PADDING])
def test_every_table_of_equal_sequences_is_the_references(name: str) -> None:
    tables = ours(name, (LENGTH,) * 3)
    worst = reference.assert_same(tables, expected(name, (LENGTH,) * 3), TOLERANCE)
    print(name, worst)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom", "falcon-alibi"])
def test_more_than_one_chunk_of_rows_is_the_references(name: str) -> None:
    """T = 100: attention in two chunks of rows, theorem 1 on 64 of the queries."""
    lengths = (100, 70, 100)
    assert gradient.GRAM_QUERIES < 100
    reference.assert_same(measured_anew(name, lengths, positions=16), expected(name, lengths, 16), TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "opt-post-norm", "falcon-new", "mpt"])
def test_sequences_no_longer_than_the_positions_have_no_ratio_at_their_last_token(name: str) -> None:
    """It predicts nothing, so no gradient comes back to it, and 0 ÷ 0 is no ratio."""
    tables = ours(name, (POSITIONS, POSITIONS, 9))
    reference.assert_same(tables, expected(name, (POSITIONS, POSITIONS, 9)), TOLERANCE)
    last = tables["gradient_ratio"].query(f"position == {POSITIONS - 1}")
    assert last[["bloat", "compress", "change"]].isna().all(axis=None)
    assert last["input_norm"].notna().all()
    assert (tables["gradient"].query(f"position == {POSITIONS - 1}")["grad_norm"] == 0).all()
    assert tables["gradient_check"].query(f"position == {POSITIONS - 1}")["identity_residual"].isna().all()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "falcon", "bloom"])
def test_the_eager_kernel_gives_the_references_tables_too(name: str) -> None:
    for side in ("right", "left"):
        reference.assert_same(ours(name, side=side, kernel="eager"), expected(name, RAGGED), TOLERANCE)


@pytest.mark.parametrize("name", ["falcon", "falcon-new"])
def test_a_falcon_that_was_made_eager_gives_the_same_tables(name: str) -> None:
    """Its own matmul → softmax → matmul, where another Falcon calls the fused kernel."""
    model = double_model(name)
    config = model.config.__class__(**model.config.to_dict())
    eager = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float64)
    eager.load_state_dict(model.state_dict())
    eager.eval().requires_grad_(False)
    with in_double(eager):
        tables = backward(eager, batched(ragged_tokens(RAGGED), 2, "left")).tables
    reference.assert_same(tables, expected(name, RAGGED), TOLERANCE)


def test_tables_have_the_columns_that_are_published() -> None:
    for name in ("llama", "phi", "opt-post-norm"):
        tables = ours(name)
        assert tables.keys() == {*TABLES, *SAMPLES}
        for table_name, rows in tables.items():
            assert list(rows.columns) == ["layer", *column_names(table_name)]


# ------------------------------------------------------------------------------------------- definitions

# family → the ratios that its wiring leaves undefined, by branch (None: the branch has no rows)
UNDEFINED: dict[str, dict[str, set[str] | None]] = {
    "llama": {"attn": set(), "mlp": set()},
    "gemma2": {"attn": set(), "mlp": set()},
    "olmo2": {"attn": {"bloat", "compress"}, "mlp": {"bloat", "compress"}},
    "phi": {"attn": {"bloat", "compress", "change"}, "mlp": {"bloat", "compress", "change"}},
    "gpt_neox": {"attn": {"compress", "change"}, "mlp": {"compress", "change"}},
    "falcon-new": {"attn": {"compress", "change"}, "mlp": {"compress", "change"}},
    "opt-post-norm": {"attn": {"bloat", "compress"}, "mlp": None},
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_a_wiring_does_not_define_is_nan_and_has_a_reason(name: str) -> None:
    tables = ours(name)
    reasons = undefined_ratios(find_family(double_model(name)))
    for branch, undefined in UNDEFINED[name].items():
        rows = tables["gradient_ratio"].query(f"branch == '{branch}'")
        bounds = tables["norm_bound"].query(f"branch == '{branch}'")
        if undefined is None:
            assert rows.empty
            assert bounds.empty
            assert "the MLP's ratios" in reasons
            continue
        assert len(rows) == 3 * POSITIONS
        assert {ratio for ratio in ("bloat", "compress", "change") if rows[ratio].isna().any()} == undefined
        assert {ratio for ratio in ("bloat", "compress", "change") if rows[ratio].isna().all()} == undefined
        assert bounds.empty == ("compress" in undefined)
        assert all(any(ratio in names for names in reasons) for ratio in undefined)
    if not any(UNDEFINED[name].values()) and None not in UNDEFINED[name].values():
        assert reasons == {}


def test_a_parallel_block_reads_both_branches_from_one_input() -> None:
    rows = ours("gpt_neox")["gradient_ratio"].set_index(["layer", "position", "branch"])["input_norm"].unstack()
    assert (rows["attn"] == rows["mlp"]).all()
    assert branches_of(find_family(double_model("gpt_neox")))["mlp"] == Branch("layer_in", "mlp_norm", "mlp_out", None)


def test_the_loss_of_a_run_is_that_of_training() -> None:
    model = double_model("llama")
    sequences = ragged_tokens(RAGGED)
    truth = sum(sequence.loss for sequence in recorded("llama", RAGGED)[1]) / sum(len(ids) - 1 for ids in sequences)
    with in_double(model):
        for size in (1, 2, 5):
            for side in ("right", "left"):
                assert backward(model, batched(sequences, size, side)).loss == pytest.approx(truth, rel=1e-12)


def test_tokens_that_predict_are_all_but_the_last_real_one() -> None:
    for side, expected_mask in (("right", [[1, 1, 0, 0], [1, 1, 1, 0]]), ("left", [[0, 1, 1, 0], [1, 1, 1, 0]])):
        assert padded(ragged_tokens((3, 4)), side).predicting.int().tolist() == expected_mask
    logits = torch.zeros(2, 4, 96)
    for side in ("right", "left"):
        loss = loss_in_chunks(logits, padded(ragged_tokens((3, 4)), side))
        assert loss.tolist() == pytest.approx([2 * np.log(96), 3 * np.log(96)])


def test_tokens_at_positions_are_zero_past_a_sequences_end() -> None:
    batch = padded(ragged_tokens((3, 5)), "left")
    x = torch.arange(1.0, 21.0).view(2, 5, 2)
    at = batch.tokens_at(x, 4)
    assert at[0].tolist() == [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0], [0.0, 0.0]]
    assert at[1].tolist() == x[1, :4].tolist()
    heads = batch.tokens_at(x.view(2, 5, 2, 1), 4)
    assert torch.equal(heads.squeeze(-1), at)


# ----------------------------------------------------------------- what is broken on purpose is noticed


def last_batch_alone(self: Gradient, layer: int, pathway: str, *rest: Any) -> None:
    self.pathways.pop((layer, pathway), None)
    on_pathway(self, layer, pathway, *rest)


def norms_before_the_sum(self: Gradient, layer: int, pathway: str, *rest: Any) -> None:
    known = self.pathways.pop((layer, pathway), torch.zeros(1))
    batch, gradients = rest[0], rest[-1]
    on_pathway(self, layer, pathway, *rest)
    squares = batch.tokens_at(gradients.transpose(1, 2), POSITIONS).square().sum(0).transpose(0, 1)
    self.pathways[layer, pathway] = (known.square() + squares).sqrt()


def groups_in_another_order(
    self: TheoremOne, layer: int, found: torch.Tensor, routed: torch.Tensor, *rest: Any
) -> None:
    shuffled = routed.unflatten(1, (-1, found.shape[1])).transpose(1, 2).flatten(1, 2)
    add_value_gradient(self, layer, found, shuffled, *rest)


def key_and_value_swapped(self: Gradient, layer: int, read: AttentionRead, *rest: Any) -> None:
    watch_attention(self, layer, replace(read, key=read.value, value=read.key), *rest)


def of_all_heads_the_first(self: TheoremOne, layer: int, read: AttentionRead, upstream: torch.Tensor) -> torch.Tensor:
    return add_upstream(self, layer, read, upstream[:, :1].expand_as(upstream))


def branches_swapped(family: Any) -> dict[str, Branch]:
    found = branches_of(family)
    return {"attn": found["mlp"], "mlp": found["attn"]}


def changed_branch(branch: str, **sites: str) -> Callable:
    return lambda family: branches_of(family) | {branch: replace(branches_of(family)[branch], **sites)}


def not_scaled(self: Gradient, *arguments: Any) -> None:
    prepare(self, *arguments)
    self.loss_scale = 1.0


def mean_loss_of_the_batch(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    losses, gradient = loss_and_gradient(logits, batch)
    return losses, gradient / batch.predicting.sum()


def one_position_late(batch: Batch, x: torch.Tensor, positions: int) -> torch.Tensor:
    index = (batch.start[:, None] + torch.arange(1, positions + 1)).clamp(max=x.shape[-1] - 1)
    return x.gather(-1, index.view(len(index), *[1] * (x.dim() - 2), -1).expand(*x.shape[:-1], positions))


def gain_with(change: Callable[[nn.Module, NormGain], dict[str, Any]]) -> Callable:
    def changed(module: nn.Module, width: int) -> NormGain:
        found = norm_gain(module, width)
        return replace(found, **change(module, found))

    return changed


on_pathway, watch_attention, prepare = Gradient._on_pathway, Gradient.watch_attention, Gradient.prepare
add_value_gradient, add_upstream = TheoremOne.add_value_gradient, TheoremOne.add_upstream

# what → the family, the table that must notice, whose attribute it is, and what to put there
BROKEN: dict[str, tuple[str, str, Any, str, Any]] = {
    "the last batch alone": ("llama", "gradient", Gradient, "_on_pathway", last_batch_alone),
    "norms before the sum": ("llama", "gradient", Gradient, "_on_pathway", norms_before_the_sum),
    "key and value swapped": ("llama", "gradient", Gradient, "watch_attention", key_and_value_swapped),
    "not divided by the predicted": ("llama", "gradient", Gradient, "prepare", not_scaled),
    "mean loss of each batch": ("llama", "gradient", tracer_module, "loss_and_gradient", mean_loss_of_the_batch),
    "padding predicted": (
        "llama", "gradient", Batch, "predicting", property(lambda batch: torch.ones_like(batch.token_ids).bool()),
    ),
    "one position late": ("llama", "gradient", Batch, "at_positions", one_position_late),
    "ratios one position late": ("llama", "gradient_ratio", Batch, "at_positions", one_position_late),
    "ratios of the other branch": ("llama", "gradient_ratio", gradient, "branches_of", branches_swapped),
    "the stream behind the layer": (
        "llama", "gradient_ratio", gradient, "branches_of", changed_branch("attn", z="layer_out"),
    ),
    "another branch's output": (
        "llama", "gradient_ratio", gradient, "branches_of", changed_branch("attn", r="mlp_out"),
    ),
    "the shared norm for its own": (
        "phi", "gradient_ratio", gradient, "branches_of", changed_branch("attn", y="attn_norm"),
    ),
    "groups in another order": ("llama", "gradient_check", TheoremOne, "add_value_gradient", groups_in_another_order),
    "one head for all": ("llama", "gradient_check", TheoremOne, "add_upstream", of_all_heads_the_first),
    "a query left out": ("llama", "gradient_check", gradient, "row_chunks", lambda length: [slice(1, length)]),
    "fewer queries": ("llama", "gradient_check", gradient, "GRAM_QUERIES", 8),
    "no epsilon": ("llama", "norm_bound", gradient, "norm_gain", gain_with(lambda *_: {"epsilon": 0.0})),
    "LayerNorm taken for RMSNorm": (
        "gpt2", "norm_bound", gradient, "norm_gain", gain_with(lambda *_: {"centered": False}),
    ),
    "RMSNorm taken for LayerNorm": (
        "llama", "norm_bound", gradient, "norm_gain", gain_with(lambda *_: {"centered": True}),
    ),
    "Gemma's weight taken for γ": (
        "gemma2", "norm_bound", gradient, "norm_gain",
        gain_with(lambda module, _: {"largest": float(module.weight.abs().max())}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_measurement_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, table, owner, attribute, replacement = BROKEN[what]
    only = {table: expected(name, RAGGED)[table]}
    reference.assert_same(ours(name), only, TOLERANCE)  # whole, it passes
    monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises(AssertionError):
        reference.assert_same(measured_anew(name), only, TOLERANCE)


# site of the family "llama" → another place, reached in the same order. The gradient of a branch's output is that of
# the stream behind it, so that for `layer_out` any other place of it is as good.
ELSEWHERE = {
    "layer_in": "input_layernorm.output",
    "attn_norm": "self_attn.q_proj.output",
    "attn_out": "self_attn.o_proj.input",
    "mid": "post_attention_layernorm.output",
    "mlp_norm": "mlp.gate_proj.output",
    "mlp_out": "mlp.down_proj.input",
}


@pytest.mark.parametrize("site", ELSEWHERE)
def test_a_site_read_elsewhere_is_noticed(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = FAMILIES["llama"][0]
    monkeypatch.setitem(FAMILIES, "llama", (replace(row, sites={**row.sites, site: ELSEWHERE[site]}),))
    monkeypatch.setattr(gradient, "norm_gain", lambda module, width: NormGain(1.0, False, 0.0))  # it is no norm now
    only = {"gradient_ratio": expected("llama", RAGGED)["gradient_ratio"]}
    with pytest.raises((AssertionError, KeyError)):  # KeyError: its gradient comes before one that it is held against
        reference.assert_same(measured_anew("llama"), only, TOLERANCE)


def test_left_padding_without_position_ids_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.measuring.tracer._parameters", lambda model: ())
    with pytest.raises(AssertionError):
        reference.assert_same(measured_anew("gpt2", side="left"), expected("gpt2", RAGGED), TOLERANCE)


# ------------------------------------------------------------------------------------------- theorem 1

HEADS, KV_HEADS, TOKENS, WIDTH = 4, 2, 20, 6


def fixed_attention(sequences: int, one_hot: bool = False) -> AttentionRead:
    """The same random attention in every sequence, or each query on one key: even ones on 0, odd ones on 1."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    key = torch.randn(1, KV_HEADS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    if one_hot:
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        query[..., ::2, 0], query[..., 1::2, 1] = 1000.0, 1000.0
        key[..., 0, 0], key[..., 1, 1] = 1.0, 1.0
    query, key = (x.expand(sequences, *x.shape[1:]) for x in (query, key))
    call = AttentionCall(None, 1.0)
    _, lse = chunked_attention(query, key, key, call)
    batch = Batch(torch.zeros(sequences, TOKENS, dtype=torch.long), torch.ones(sequences, TOKENS, dtype=torch.long))
    return AttentionRead(query, key, key, lse, call, batch)


def theorem_table(read: AttentionRead, upstream: torch.Tensor, batches: int = 1) -> pd.DataFrame:
    """∇v as it follows from g: the theorem's own table of one layer."""
    theorem = TheoremOne(POSITIONS)
    for part, g in zip(split_read(read, batches), upstream.chunk(batches), strict=True):
        routed = theorem.add_upstream(0, part, g)
        theorem.add_value_gradient(0, routed.unflatten(1, (KV_HEADS, -1)).sum(2), routed, part.batch)
    return theorem.table()


def split_read(read: AttentionRead, batches: int) -> Iterator[AttentionRead]:
    tensors = [x.chunk(batches) for x in (read.query, read.key, read.value, read.lse, read.batch.token_ids)]
    for query, key, value, lse, ids in zip(*tensors, strict=True):
        yield AttentionRead(query, key, value, lse, read.call, Batch(ids, torch.ones_like(ids)))


def dense_weights(read: AttentionRead) -> torch.Tensor:
    """(H,T,T) by the textbook."""
    key = read.key[0].repeat_interleave(HEADS // KV_HEADS, dim=0)
    logits = read.query[0] @ key.transpose(-1, -2)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def noise(sequences: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Pairs ε and -ε: their mean is exactly 0, as the theorem assumes of the true one."""
    half = torch.randn(sequences // 2, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([half, -half])


MU = torch.linspace(-1.0, 2.0, HEADS * WIDTH, dtype=torch.float64).view(1, HEADS, 1, WIDTH)


def test_theorem_1_holds_where_g_is_a_mean_and_independent_noise() -> None:
    """And the bounds are those of the noise that was put in: σ² = 0.25 · 6, ρ → 0."""
    sequences = 4000
    read = fixed_attention(sequences)
    table = theorem_table(read, MU + 0.5 * noise(sequences, HEADS, TOKENS, WIDTH), batches=4)
    assert table["holds"].all()
    weights = dense_weights(read)
    mass, second = weights.sum(1)[:, :POSITIONS], weights.square().sum(1)[:, :POSITIONS]
    size = MU.square().sum((0, 2, 3))[:, None]
    np.testing.assert_allclose(table["lower_bound"], (mass.square() * size).flatten(), rtol=1e-9)
    np.testing.assert_allclose(table["measured"], (mass.square() * size + 1.5 * second).flatten(), rtol=0.1)
    excess = table["upper_bound"] - table["lower_bound"]
    np.testing.assert_array_less(1.4 * second.flatten(), excess)
    np.testing.assert_array_less(excess, (1.8 * second + 0.3 * (mass.square() - second)).flatten())


def test_theorem_1_holds_where_the_noise_of_all_queries_is_one() -> None:
    """ε_t the same for all t: ρ = σ², and the upper bound is reached."""
    sequences = 200
    read = fixed_attention(sequences)
    shared = noise(sequences, HEADS, 1, WIDTH).expand(-1, -1, TOKENS, -1)
    table = theorem_table(read, MU + shared)
    assert table["holds"].all()
    np.testing.assert_allclose(table["measured"], table["upper_bound"], rtol=1e-9)
    assert (table["lower_bound"] < 0.99 * table["measured"]).all()


def test_theorem_1_holds_where_every_g_is_the_same() -> None:
    """Both bounds are reached, so that round-off decides nothing: in float32, too."""
    for dtype in (torch.float32, torch.float64):
        read = fixed_attention(3)
        tensors = (x.to(dtype) for x in (read.query, read.key, read.value, read.lse))
        read = AttentionRead(*tensors, read.call, read.batch)
        table = theorem_table(read, MU.to(dtype).expand(3, HEADS, TOKENS, WIDTH))
        assert table["holds"].all()
        np.testing.assert_allclose(table["measured"], table["lower_bound"], rtol=1e-5)
        np.testing.assert_allclose(table["upper_bound"], table["lower_bound"], rtol=1e-5)


def test_a_mean_that_differs_between_queries_breaks_the_lower_bound_and_the_table_says_so() -> None:
    """g is μ on average, but the queries that look at key 0 have -μ and μ in turn: nothing reaches its value."""
    read = fixed_attention(2, one_hot=True)
    scale = torch.tensor([-1.0, 2.0, 1.0, 2.0], dtype=torch.float64).repeat(TOKENS // 4)[:, None]
    table = theorem_table(read, (MU * scale).expand(2, -1, -1, -1))
    first = table.query("position == 0")
    np.testing.assert_allclose(first["lower_bound"], 100 * MU.square().sum((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(first["measured"], 0.0, atol=1e-9)
    assert not first["holds"].any()
    assert table.query("position == 2")["holds"].all()  # of which nobody hears


def test_one_query_with_a_mean_of_its_own_breaks_the_upper_bound_and_the_table_says_so() -> None:
    """g = μ' at query 1 alone, the only one that looks at key 1."""
    read = fixed_attention(2, one_hot=True)
    query = read.query.clone()
    query[..., 3::2, :] = query[..., 2:3, :]  # all others look at key 0
    _, lse = chunked_attention(query, read.key, read.key, read.call)
    read = replace(read, query=query, lse=lse)
    upstream = torch.zeros(2, HEADS, TOKENS, WIDTH, dtype=torch.float64)
    upstream[:, :, 1] = MU[:, :, 0]
    table = theorem_table(read, upstream)
    second = table.query("position == 1")
    assert (second["measured"] > second["upper_bound"]).all()
    assert not second["holds"].any()


def test_theorem_1_does_not_depend_on_the_batches() -> None:
    read = fixed_attention(8)
    upstream = MU + noise(8, HEADS, TOKENS, WIDTH)
    whole = theorem_table(read, upstream)
    for batches in (2, 8):
        pd.testing.assert_frame_equal(theorem_table(read, upstream, batches), whole, rtol=1e-11, atol=1e-13)


def test_theorem_1_is_of_the_longest_sequences() -> None:
    """A shorter sequence, before or after, alone or padded, changes only the identity's residual."""
    equal = ours("llama", (LENGTH, LENGTH), size=1)["gradient_check"]
    long = ragged_tokens((LENGTH, LENGTH))
    short = ragged_tokens((9,), seed=5)
    model = double_model("llama")
    for sequences, size in ((long + short, 1), (short + long, 1), (short + long, 2), (short + long, 3)):
        for side in ("right", "left"):
            with in_double(model):
                table = backward(model, batched(sequences, size, side)).tables["gradient_check"]
            for column in ("lower_bound", "measured", "upper_bound", "holds"):
                np.testing.assert_allclose(table[column].astype(float), equal[column].astype(float), rtol=1e-10)


# ------------------------------------------------------------------------------------------- theorem 2


def random_norm(kind: str, width: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    norms: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: LlamaRMSNorm(width, eps=1e-5),
        "gemma2": lambda: Gemma2RMSNorm(width, eps=1e-6),
        "gemma3": lambda: Gemma3RMSNorm(width, eps=1e-6),
        "layer": lambda: nn.LayerNorm(width, eps=1e-5),
        "layer without bias": lambda: nn.LayerNorm(width, eps=1e-12, bias=False),
    }
    norm = norms[kind]().to(dtype).requires_grad_(False)
    for parameter in norm.parameters():
        parameter.copy_(1.5 * torch.randn(parameter.shape, dtype=dtype))
    return norm


EACH_NORM = pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "layer", "layer without bias"])


@EACH_NORM
def test_a_norms_gain_is_found_by_probing_it(kind: str) -> None:
    for width, dtype in itertools.product((32, 96, 576, 768, 4096), (torch.float32, torch.float64)):
        norm = random_norm(kind, width, dtype)
        found = norm_gain(norm, width)
        assert found.largest == pytest.approx(np.abs(reference.gain_of(norm)).max(), rel=1e-6), (width, dtype)
        assert found.centered == kind.startswith("layer"), (width, dtype)
        assert found.epsilon == {"llama": 1e-5, "layer": 1e-5, "layer without bias": 1e-12}.get(kind, 1e-6)


@EACH_NORM
def test_a_norms_gain_is_found_in_half_precision(kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        norm = random_norm(kind, 768, dtype)
        found = norm_gain(norm, 768)
        assert found.largest == pytest.approx(np.abs(reference.gain_of(norm)).max(), rel=0.01), dtype
        assert found.centered == kind.startswith("layer"), dtype


@EACH_NORM
def test_no_gradient_passes_a_norm_by_more_than_its_bound(kind: str) -> None:
    """Theorem 2 for every token and many upstream gradients, massive activations among the inputs."""
    width = 96
    norm = random_norm(kind, width)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 64, width, generator=generator, dtype=torch.float64)
    x[0, :16, 7] = 2e4
    x[0, 16:24] *= 1e-4  # smaller than ε
    x[0, 24:32] += 50.0  # of which LayerNorm sees nothing
    with double_of(norm):
        gain = norm_gain(norm, width)
        bound = (gain.largest / gain.divisor(x))[0]
        jacobians = torch.stack([torch.autograd.functional.jacobian(norm, token) for token in x[0]])
    operator_norms = torch.linalg.matrix_norm(jacobians, ord=2)
    assert (operator_norms <= bound * (1 + 1e-9)).all()
    assert (operator_norms >= 0.8 * bound).all()  # and the bound is no larger than it need be
    upstream = torch.randn(64, width, generator=generator, dtype=torch.float64)
    through = torch.einsum("tij,ti->tj", jacobians, upstream)
    ratios = through.norm(dim=-1) / upstream.norm(dim=-1)
    assert (ratios <= bound).all()


def double_of(norm: nn.Module) -> Any:
    return in_double(norm) if "transformers" in type(norm).__module__ else in_double(random_norm("llama", 2))


def test_a_layer_norms_divisor_is_the_standard_deviation_and_an_rms_norms_the_root_mean_square() -> None:
    x = torch.tensor([[[1.0, 3.0, 5.0, 7.0]]], dtype=torch.float64)
    assert NormGain(1.0, False, 0.0).divisor(x).item() == pytest.approx(np.sqrt(84 / 4))
    assert NormGain(1.0, True, 0.0).divisor(x).item() == pytest.approx(np.sqrt(5))
    assert NormGain(1.0, True, 4.0).divisor(x).item() == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "bloom", "mpt"])
def test_theorem_2_holds_at_every_token_of_a_model(name: str) -> None:
    bounds = ours(name)["norm_bound"]
    assert set(bounds["branch"]) == {"attn", "mlp"}
    assert (bounds["holds"] == 1.0).all()
    assert (bounds["tightness"] <= 1.0).all()
    assert bounds["tightness"].max() > 0.2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_norm_that_amplifies_more_than_its_probe_showed_breaks_the_bound(name: str) -> None:
    """Twice its γ, once it has been probed."""
    layer = 1
    path = {"llama": "post_attention_layernorm", "gemma2": "pre_feedforward_layernorm", "gpt2": "ln_2"}[name]

    def double(model: PreTrainedModel) -> None:
        norm = find_family(model).layer_modules(model)[layer].get_submodule(path)
        gains = torch.as_tensor(reference.gain_of(norm))
        norm.weight.copy_(2 * gains - (1 if name == "gemma2" else 0))

    model = tiny_model(name, dtype=torch.float64)
    bounds = backward(model, batched(ragged_tokens((LENGTH,) * 3), 2), prepared=double).tables["norm_bound"]
    broken = bounds.query(f"layer == {layer} and branch == 'mlp'")
    assert (broken["holds"] < 1).any()
    assert (broken["tightness"] > 1).any()
    others = bounds.drop(broken.index)
    assert (others["holds"] == 1).all()


# ------------------------------------------------------------------------------------ memory and graph


class Watching(Observable):
    """Notes every tensor that it is shown, without keeping it."""

    name = "watching"
    about = "a test's own"
    sites = Gradient.sites
    backward = True

    def __init__(self, keep: bool = False) -> None:
        super().__init__(Settings())
        self.seen: dict[tuple[int, str], weakref.ref] = {}
        self.kept: list[torch.Tensor] = []
        self.keep = keep

    def prepare(self, *arguments: Any) -> None:
        pass

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        self.seen[layer, site] = weakref.ref(tensor)
        if self.keep:
            self.kept.append(tensor)

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        tensors = {"query": read.query, "key": read.key, "value": read.value, "lse": read.lse, "mix": mix}
        self.seen |= {(layer, name): weakref.ref(tensor) for name, tensor in tensors.items()}

    def alive(self) -> list[tuple[int, str]]:
        return [place for place, reference_ in self.seen.items() if reference_() is not None]

    def tables(self) -> dict[str, pd.DataFrame]:
        return {}


def tensors_with_graph() -> int:
    """Of those made since the last gc.freeze()."""
    return sum(issubclass(type(found), torch.Tensor) and found.grad_fn is not None for found in gc.get_objects())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_of_a_batch_outlives_it(name: str) -> None:
    model = tiny_model(name)
    watching, measuring = Watching(), Gradient(Settings(positions=POSITIONS))
    gc.freeze()
    with open_tracer(model, find_family(model)) as tracer:
        measuring.prepare(model, tracer.family, 40)
        for batch in batched(ragged_tokens((LENGTH, 9, 17)), 2):
            tracer.forward_backward(batch, [measuring, watching])
            assert len(watching.seen) == 3 * (len(tracer.family.sites) + 5)
            assert watching.alive() == []
            assert tensors_with_graph() == 0
            for private in (measuring._seen, measuring._norms, measuring._scales, measuring._routed):
                assert private == {}
            assert all(not seam.call or seam.call.scores is None for seam in tracer.seams.values())


def test_what_is_kept_is_noticed() -> None:
    model = tiny_model("llama")
    watching = Watching(keep=True)
    gc.freeze()
    with open_tracer(model, find_family(model)) as tracer:
        tracer.forward_backward(padded(ragged_tokens((9, 9))), [watching])
        assert len(watching.alive()) == 3 * len(tracer.family.sites)
        assert tensors_with_graph() > 0


def hooks_of(model: nn.Module) -> list[tuple]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [tuple(tuple(vars(module)[name]) for name in names) for module in model.modules()]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_model_is_left_as_it_was(name: str) -> None:
    """Frozen, without gradients and hooks, with the same logits, and a later training step is the right one."""
    model, untouched = tiny_model(name), tiny_model(name)
    ids = tiny_tokens(2, LENGTH)
    hooks = hooks_of(model)
    implementation = model.config._attn_implementation
    backward(model, batched(ragged_tokens(RAGGED), 2))
    assert hooks_of(model) == hooks
    assert model.config._attn_implementation == implementation
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    if name == "gemma2":  # SDPA has no softcap
        model.set_attn_implementation("eager")
        untouched.set_attn_implementation("eager")
    for one in (model, untouched):
        one.requires_grad_(True)
        one(ids, labels=ids).loss.backward()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, untouched(ids).logits)
    for mine, other in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bloom", "falcon"])
def test_a_model_in_training_is_measured_as_a_frozen_one_and_keeps_its_gradients(name: str) -> None:
    frozen, training = tiny_model(name), tiny_model(name).requires_grad_(True)
    for parameter in training.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    batches, names = batched(ragged_tokens(RAGGED), 2), (*FORWARD, "gradient")
    expected_tables = backward(frozen, batches, names=names).tables
    for table_name, rows in backward(training, batches, names=names).tables.items():
        pd.testing.assert_frame_equal(rows, expected_tables[table_name], rtol=1e-4, atol=1e-7)
    assert all(parameter.requires_grad for parameter in training.parameters())
    assert all(bool((parameter.grad == 3.0).all()) for parameter in training.parameters())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "gpt_neox", "bloom", "falcon-new", "mpt"])
def test_forward_observables_are_the_same_beside_a_backward_pass(name: str) -> None:
    model, batches = tiny_model(name), batched(ragged_tokens(RAGGED), 2, "left")
    alone = measured(model, batches, Settings(positions=POSITIONS, window=8))
    for names in ((*FORWARD, "gradient"), ("gradient", *FORWARD)):
        beside = backward(model, batches, names=names).tables
        assert beside.keys() == alone.keys() | {*TABLES, *SAMPLES}
        for table_name, rows in alone.items():
            assert rows.equals(beside[table_name]), table_name
    only = backward(model, batches).tables
    for table_name in (*TABLES, *SAMPLES):
        assert only[table_name].equals(beside[table_name])


def test_an_exception_in_the_backward_pass_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise SinkscopeError("half-way")

    model = tiny_model("llama")
    hooks = hooks_of(model)
    batches = batched(ragged_tokens(RAGGED), 2)
    whole = backward(model, batches).tables
    with monkeypatch.context() as broken:
        broken.setattr(Gradient, "_add_ratios", failing)
        with pytest.raises(SinkscopeError, match="half-way"):
            backward(model, batches)
    assert hooks_of(model) == hooks
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    for table_name, rows in backward(model, batches).tables.items():
        assert rows.equals(whole[table_name])


# -------------------------------------------------------------------------------------- half precision

# columns that are compared, and what they are relative to: entries below a hundredth of the largest are not
HALF = {
    "gradient": ("grad_norm",),
    "gradient_ratio": ("input_norm", "bloat", "compress", "change"),
    "gradient_check": ("lower_bound", "measured", "upper_bound"),
    "norm_bound": ("measured", "bound"),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "bloom", "mpt", "falcon-new"])
def test_half_precision_gives_the_figures_of_float32(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The same weights: those of the half-precision model."""
    model = tiny_model(name, dtype=dtype, spread=4.0)
    batches = batched(ragged_tokens(RAGGED), 2, "left")
    half = backward(model, batches)
    single = backward(model.float(), batches)
    assert half.gradient.notices() == single.gradient.notices() == []
    assert half.loss == pytest.approx(single.loss, rel=tolerance)
    for table, columns in HALF.items():
        mine, truth = half.tables[table], single.tables[table]
        if table == "gradient":
            mine, truth = (rows[rows["head"] == -1] for rows in (mine, truth))
        for column in columns:
            x, y = mine[column].to_numpy(float), truth[column].to_numpy(float)
            assert (np.isnan(x) == np.isnan(y)).all()
            large = y > 0.01 * np.nanmax(y, initial=0.0)
            np.testing.assert_allclose(x[large], y[large], rtol=tolerance, err_msg=f"{table}.{column}")
    rounding = torch.finfo(dtype).eps
    assert half.tables["gradient_check"]["identity_residual"].max() < rounding
    assert (half.tables["norm_bound"]["holds"] == 1).all()
    first = half.tables["gradient"].query("pathway == 'query' and position == 0")
    assert (first["grad_norm"] == 0).all()


def with_small_gradients(dtype: torch.dtype) -> PreTrainedModel:
    """Logits by weights so small that their gradient is nothing in float16."""
    model = tiny_model("llama", dtype=dtype)
    model.lm_head.weight.mul_(1e-8)
    return model


def test_gradients_that_underflow_are_said_to() -> None:
    batches = batched(ragged_tokens(RAGGED), 2)
    found = backward(with_small_gradients(torch.float32).half(), batches)
    predicting = sum(length - 1 for length in RAGGED)
    assert found.gradient.counts["all"] == 3 * predicting
    assert found.gradient.counts["vanished"] > 0
    share = found.gradient.counts["vanished"] / found.gradient.counts["all"]
    (notice,) = found.gradient.notices()
    assert f"{share:.1%} of the tokens' gradients underflowed" in notice
    assert "--dtype bfloat16 or float32" in notice
    assert "underflowed" in run_of(with_small_gradients(torch.float32).half()).manifest["notices"][0]
    for dtype in (torch.float32, torch.bfloat16):
        assert backward(with_small_gradients(dtype), batches).gradient.notices() == []


def test_underflow_is_counted_of_the_tokens_that_predict() -> None:
    batch = padded(ragged_tokens((3, 5)), "left")
    measuring = Gradient(Settings(positions=POSITIONS))
    gradients = torch.ones(2, 5, 4)
    gradients[0, :2] = 0  # padding
    gradients[:, 4] = 0  # the last tokens
    gradients[1, 2] = 0  # underflow
    gradients[0, 3, 1:] = 0  # not all of it
    measuring._look_for_underflow(gradients, batch)
    assert measuring.counts == {"all": 6, "vanished": 1, "overflowed": 0}
    assert measuring.notices()[0].startswith("16.7% of")


def with_large_gradients(dtype: torch.dtype) -> PreTrainedModel:
    """One coordinate tells even tokens from odd ones: the last norm makes it small and the logits' weights large again.
    The logits are finite, but a wrong guess sends a gradient of up to twice 6e4 between the two; float16 ends at 65504.
    """
    model = tiny_model("llama")
    model.model.norm.weight[0] = 1e-5
    model.lm_head.weight[::2, 0], model.lm_head.weight[1::2, 0] = 6e4, -6e4
    return model.to(dtype)


def test_a_gradient_that_overflows_is_an_error() -> None:
    batches = batched(ragged_tokens(RAGGED), 2)
    found = backward(with_large_gradients(torch.float16), batches)
    assert np.isfinite(found.loss)
    with pytest.raises(SinkscopeError, match=r"overflowed.*--dtype bfloat16 or float32"):
        found.gradient.notices()
    assert backward(with_large_gradients(torch.bfloat16), batches).gradient.notices() == []
    with pytest.raises(SinkscopeError, match="overflowed"):
        run_of(with_large_gradients(torch.float16))


# --------------------------------------------------------------------------------------------- analyze


def run_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    defaults = {"num_seqs": 3, "seq_len": LENGTH, "positions": POSITIONS, "observables": ("gradient",)}
    return sinkscope.analyze(model, **defaults | {"input": source} | options)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "ragged.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in ragged_tokens(RAGGED)))
    return path


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt_neox"])
def test_analyze_gives_the_references_tables_at_every_batch_size(name: str, lines: Path) -> None:
    model = double_model(name)
    truth = sum(sequence.loss for sequence in recorded(name, RAGGED)[1]) / sum(length - 1 for length in RAGGED)
    with in_double(model):
        for size in (1, 2, "auto"):
            run = run_of(model, lines, num_seqs=len(RAGGED), batch_size=size)
            tables = {table: run.tables[table].drop(columns=["model", "condition"]) for table in TABLES}
            reference.assert_same(tables, expected(name, RAGGED), TOLERANCE)
            assert run.metric("loss") == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "bloom", "phi", "opt-post-norm"])
def test_analyze_measures_everything_at_once(name: str, lines: Path) -> None:
    run = run_of(tiny_model(name), lines, num_seqs=len(RAGGED), observables=(*FORWARD, "gradient"))
    assert set(TABLES) < set(run.tables)
    assert run.metric("identity_residual") < 1e-5
    assert run.manifest["notices"] == []


@pytest.mark.parametrize("observables", [("gradient",), (*FORWARD, "gradient")], ids=["alone", "beside others"])
def test_a_model_that_gives_no_numbers_is_an_error(observables: tuple[str, ...]) -> None:
    activations, logits = tiny_model("llama"), tiny_model("llama")
    activations.get_input_embeddings().weight.fill_(torch.inf)
    with pytest.raises(SinkscopeError, match="layer 0: the model itself gives NaN or infinite numbers"):
        run_of(activations, observables=observables)
    logits.lm_head.weight.fill_(torch.inf)  # no layer is at fault
    with pytest.raises(SinkscopeError, match="the loss is nan: gradients of this model on this input are meaningless"):
        run_of(logits, observables=observables)


@pytest.mark.parametrize("kind", ["npy", "jsonl"])
def test_sequences_of_one_token_predict_nothing_and_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"short.{kind}"
    if kind == "npy":
        np.save(path, np.full((3, 1), 5))
    else:
        path.write_text('{"input_ids": [5]}\n' * 3)
    with pytest.raises(InputError):
        run_of(tiny_model("llama"), path, num_seqs=3, seq_len=1)
    with pytest.raises(InputError):
        run_of(tiny_model("llama"), path, num_seqs=3)


# ------------------------------------------------------------------------------------------- the summary


def summary_tables() -> dict[str, pd.DataFrame]:
    """Two layers, eight positions: value gradients 10 and 30 at position 0, 1 and 2 elsewhere; compress = 7 ÷ norm."""
    positions = range(8)
    pathway = [
        (layer, name, head, position, (scale if position == 0 else layer + 1.0) * (1 if head == -1 else 100))
        for layer, scale in ((0, 10.0), (1, 30.0))
        for name in ("query", "key", "value")
        for head in (-1, 0)
        for position in positions
    ]
    ratios = [
        (layer, branch, position, norm, bloat, 7 / norm * (1 if branch == "attn" else norm), 1.0)
        for layer in range(3)
        for branch in ("attn", "mlp")
        for position in positions
        for norm, bloat in [(10.0 ** (layer + position), 50.0 if position == 0 else 2.0)]
    ]
    check = [(layer, 0, p, 1e-7 * (layer + 1), 1.0, 2.0, 3.0, p % 2 == 0) for layer in range(2) for p in positions]
    bounds = [(layer, "attn", p, 0.5, 1.0, 1.0, 0.5) for layer in range(2) for p in positions]
    rows = {"gradient": pathway, "gradient_ratio": ratios, "gradient_check": check, "norm_bound": bounds}
    return {name: pd.DataFrame(found, columns=["layer", *column_names(name)]) for name, found in rows.items()}


def test_the_summary_holds_gradient_sinks_against_settled_tokens() -> None:
    per_layer, totals = gradient_summary(summary_tables(), longest=8)
    assert per_layer["value_gradient_ratio"].tolist() == [10.0, 15.0]
    assert totals["value_gradient_ratio"] == pytest.approx(20 / 1.5)  # norms first averaged over layers
    assert totals["value_over_key_gradient"] == 1.0
    assert per_layer["bloat"].tolist() == [50.0] * 3
    assert per_layer["bloat_later"].tolist() == [2.0] * 3
    assert per_layer["theorem1_holds"].tolist() == [0.5, 0.5]
    assert per_layer["theorem2_holds"].tolist() == [1.0, 1.0]
    assert totals["identity_residual"] == 2e-7


def test_the_summary_fits_compression_to_a_power_of_the_norm() -> None:
    _, totals = gradient_summary(summary_tables(), longest=8)
    assert totals["compress_slope"] == pytest.approx(-1.0)
    assert totals["compress_correlation"] == pytest.approx(-1.0)
    tables = summary_tables()
    first = tables["gradient_ratio"]["layer"] == 0
    tables["gradient_ratio"].loc[first, "compress"] = 123.0  # the first layer is set apart
    assert gradient_summary(tables, longest=8)[1]["compress_slope"] == pytest.approx(-1.0)
    groups = {name: (a, b) for name, a, b in TOKEN_GROUPS}
    assert groups["2-3"] == (2, 3)
    assert "compress_slope_2-3" in totals
    assert "compress_slope_0" not in totals  # two layers are two points: no fit


def test_config_knows_the_observable() -> None:
    assert make_config(observables=("gradient",)).observables == ("gradient",)


def test_a_loss_that_depends_on_no_branch() -> None:
    """As of some encoders' stand-ins for attention: there are branches, and nothing is seen of them."""
    model = tiny_model("llama")
    measuring = Gradient(Settings(positions=POSITIONS))
    measuring.prepare(model, find_family(model), 1)
    tables = measuring.tables()
    assert tables["gradient_ratio"].empty
    assert "gradient_ratio_by_sequence" not in tables


def test_a_branch_times_a_multiplier_has_the_gradients_of_one_with_larger_weights() -> None:
    """Granite adds `residual_multiplier` times each branch; the same sum with that factor in the weights is equal."""
    scaled, plain = tiny_of("granite", torch.float64), tiny_of("granite", torch.float64)
    for layer in plain.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(layer.residual_multiplier)
        layer.residual_multiplier = 1.0
    tables = []
    for model in (scaled, plain):
        family, _ = family_of(model)
        multipliers = {term.scale for block in family.blocks for term in block.terms("attn_out")}
        assert multipliers == ({0.22} if model is scaled else set())
        with in_double(model):
            tables.append(backward(model, batched(ragged_tokens(RAGGED), 2), family=family).tables)
    for name in TABLES:
        pd.testing.assert_frame_equal(tables[0][name], tables[1][name], rtol=TOLERANCE)
