"""Gradient observables in float64 against autograd's own (gradient_reference.py), and in small exact cases.

Also by group and by sequence, before gates and under interventions.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import gradient_reference as reference
import numpy as np
import pandas as pd
import pytest
import torch
from gradient_reference import in_double
from support.every_model import tiny_of
from support.hooked import hook_all
from support.plain import record
from support.retrofitted import each_pair, retrofitted
from tiny import FORWARD, TINY, batched, measured, ragged_tokens, tiny_model, written
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import sinkscope
from sinkscope import Run
from sinkscope.attention.kernels import AttentionCall, chunked_attention
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.estimates import gradients
from sinkscope.measuring.observables.gradient import (
    GROUPS,
    RATIO_COLUMNS,
    Gradient,
    TheoremOne,
    norm_gains,
    undefined_ratios,
)
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.one_pass import token_norms
from sinkscope.measuring.subject import family_of, inputs_for, load_model
from sinkscope.measuring.summary import gradient_summary
from sinkscope.measuring.tables import column_names
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.projections import projections
from sinkscope.options.measuring import make_config
from sinkscope.results.sequences import Sequences
from sinkscope.results.tables import names_of
from sinkscope.text.batch import Batch

POSITIONS, LENGTH = 12, 24
SETTINGS = Settings(positions=POSITIONS, window=8)
RAGGED = (LENGTH, 17, 2, LENGTH, 11)  # some shorter than POSITIONS; one predicts a single token
EQUAL = (LENGTH,) * 3
TABLES = ("gradient", "gradient_ratio", "gradient_check", "norm_bound")
SAMPLES = ("gradient_by_group", "gradient_ratio_by_sequence")
# the ways in which attention is read: fused, softcap, sink logits, the model's own code, and SDPA in the model's code
ONE_OF_EACH = ("llama", "gemma2", "gpt_oss", "bloom", "falcon")
TOLERANCE = 1e-10


@cache
def double_model(name: str) -> PreTrainedModel:
    return tiny_model(name, dtype=torch.float64)


@cache
def recorded(name: str, lengths: tuple[int, ...]) -> list[reference.Sequence]:
    model = double_model(name)
    with in_double(model):
        return reference.record(model, ragged_tokens(lengths))


@cache
def expected(name: str, lengths: tuple[int, ...] = RAGGED, positions: int = POSITIONS) -> dict[str, pd.DataFrame]:
    return reference.tables(recorded(name, lengths), positions)


@cache
def ours(
    name: str,
    lengths: tuple[int, ...] = RAGGED,
    size: int = 2,
    side: str = "right",
    kernel: str = "sdpa",
    positions: int = POSITIONS,
) -> dict[str, pd.DataFrame]:
    """Measure once for all tests that read these tables, which must not be changed."""
    model = double_model(name)
    with in_double(model):
        settings, batches = Settings(positions=positions, window=8), batched(ragged_tokens(lengths), size, side)
        return measured(model, batches, settings, ("gradient",), kernel, backward=True)


BATCHES = {"1": (1, "right"), "2 right": (2, "right"), "2 left": (2, "left"), "5 left": (5, "left")}
MEET_PADDING = ("gpt2", "gpt_oss", "falcon", "bloom")  # learned positions, sink logits, one key head, ALiBi


@each_pair(list(TINY), list(BATCHES), ("name", "batches"), whole=MEET_PADDING)
def test_every_table_is_the_references(name: str, batches: str) -> None:
    """Neither batches nor padding change anything; theorem 1's identity and theorem 2's bound hold everywhere."""
    tables, truth = ours(name, RAGGED, *BATCHES[batches]), expected(name)
    reference.assert_same(tables, truth, TOLERANCE)
    for check, bound in ((truth["gradient_check"], 1e-14), (tables["gradient_check"], 1e-10)):
        assert check["identity_residual"].notna().all()
        assert check["identity_residual"].max() < bound
    assert (tables["norm_bound"]["holds"] == 1.0).all()
    assert (tables["norm_bound"]["tightness"] <= 1.0).all()
    assert tables["norm_bound"].empty or tables["norm_bound"]["tightness"].max() > 0.2
    first = tables["gradient"].query("pathway == 'query' and position == 0")["grad_norm"]
    assert (first > 0).all() if name == "gpt_oss" else (first == 0).all()  # a sink logit competes with the only key


def test_gradients_are_those_of_what_leaves_the_users_hooks() -> None:
    model = hook_all(tiny_model("llama", dtype=torch.float64))
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + 1.5)
    with in_double(model):
        truth = reference.tables(reference.record(model, ragged_tokens(RAGGED)), POSITIONS)
        tables = measured(model, batched(ragged_tokens(RAGGED), 2), SETTINGS, ("gradient",), backward=True)
    del truth["norm_bound"]  # of norms without hooks
    reference.assert_same(tables, truth, 1e-8)


CHUNKS = (100, 70, 100)  # two chunks of rows, and more than GRAM_QUERIES queries


@pytest.mark.parametrize(
    ("name", "lengths", "options"),
    [
        *((name, EQUAL, {}) for name in ("llama", "opt-post-norm", "phi", "gpt_oss", "bloom")),
        *((name, CHUNKS, {"positions": 16}) for name in ("llama", "gemma2", "gpt_oss", "falcon-alibi")),
        *((name, (9, LENGTH, POSITIONS, LENGTH), {"size": 1}) for name in ("llama", "mpt")),  # theorem 1: longer later
        *((name, RAGGED, {"kernel": "eager", "side": side})
          for name, side in (("llama", "left"), ("gemma2", "right"), ("gpt_oss", "left"), ("falcon", "right"))),
    ],
)  # fmt: skip
def test_other_lengths_and_kernels_give_the_references_tables(name: str, lengths: tuple, options: dict) -> None:
    truth = expected(name, lengths, options.get("positions", POSITIONS))
    reference.assert_same(ours(name, lengths, **options), truth, TOLERANCE)


def test_a_branch_times_a_multiplier_has_the_gradients_of_one_with_larger_weights() -> None:
    """Granite adds `residual_multiplier` times each branch; a model with the factor in its weights gives equal sums."""
    scaled, plain = tiny_of("granite", torch.float64), tiny_of("granite", torch.float64)
    for layer in plain.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(layer.residual_multiplier)
        layer.residual_multiplier = 1.0
    tables = []
    for model in (scaled, plain):
        with in_double(model):
            batches, (family, _) = batched(ragged_tokens(RAGGED), 2), family_of(model)
            tables.append(measured(model, batches, SETTINGS, ("gradient",), family=family, backward=True))
    for name in TABLES:
        pd.testing.assert_frame_equal(tables[0][name], tables[1][name], rtol=TOLERANCE)


# family → the ratios that its wiring leaves undefined; the reference's tables have NaN or no rows there
UNDEFINED = {
    "llama": set(),
    "olmo2": {"bloat", "compress"},
    "phi": {"bloat", "compress", "change"},
    "gpt_neox": {"compress", "change"},
    "opt-post-norm": {"bloat", "compress", "the MLP's ratios"},
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_a_wiring_does_not_define_has_a_reason(name: str) -> None:
    tables = ours(name)
    assert tables.keys() == {*TABLES, *SAMPLES}
    for table_name, rows in tables.items():
        assert {*rows.columns} == {"layer", *column_names(table_name)}
    reasons = undefined_ratios(find_family(double_model(name)))
    named = {ratio for names in reasons for ratio in names.replace(", ", " and ").split(" and ")}
    assert named == UNDEFINED[name]
    undefined = tables["gradient_ratio"].drop(columns=["layer", "branch", "position"]).isna().all()
    assert {*undefined[undefined].index} == named - {"the MLP's ratios"}


HEADS, KV_HEADS, TOKENS, WIDTH = 4, 2, 20, 6


def fixed_attention(sequences: int) -> AttentionRead:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    key = torch.randn(1, KV_HEADS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    query, key = (x.expand(sequences, *x.shape[1:]) for x in (query, key))
    call = AttentionCall(None, 1.0)
    _, lse = chunked_attention(query, key, key, call)
    batch = Batch(torch.zeros(sequences, TOKENS, dtype=torch.long), torch.ones(sequences, TOKENS, dtype=torch.long))
    return AttentionRead(query, key, key, lse, call, batch)


def theorem_table(read: AttentionRead, upstream: torch.Tensor) -> pd.DataFrame:
    theorem = TheoremOne(POSITIONS)
    routed = theorem.add_upstream(0, read, upstream)
    theorem.add_value_gradient(0, routed.unflatten(1, (KV_HEADS, -1)).sum(2), routed, read.batch)
    return theorem.table()


MU = torch.linspace(-1.0, 2.0, HEADS * WIDTH, dtype=torch.float64).view(1, HEADS, 1, WIDTH)


def test_theorem_1_has_equal_bounds_if_g_is_the_same_for_all_queries_in_float32_too() -> None:
    read = fixed_attention(3)
    for dtype in (torch.float32, torch.float64):
        tensors = (x.to(dtype) for x in (read.query, read.key, read.value, read.lse))
        same = MU.to(dtype).expand(3, HEADS, TOKENS, WIDTH)
        table = theorem_table(AttentionRead(*tensors, read.call, read.batch), same)
        assert table["holds"].all()
        for bound in ("lower_bound", "upper_bound"):
            np.testing.assert_allclose(table["measured"], table[bound], rtol=1e-5)


def test_theorem_1_fails_below_its_lower_bound_however_large_the_upper_bound_is() -> None:
    upstream = MU.repeat(2, 1, TOKENS, 1)
    upstream[:, :, 1] = 0.0  # the query that attends most to position 1
    upstream[:, :, 0] = 1e4 * torch.tensor([1.0, -1.0]).view(2, 1, 1)  # read at position 0 alone; of mean 0
    row = theorem_table(fixed_attention(2), upstream).query("position == 1 and head < 2")
    assert (row["measured"] < 0.9 * row["lower_bound"]).all()
    assert (row["upper_bound"] > 1e6 * row["lower_bound"]).all()
    assert not row["holds"].any()


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
    for width, dtype, tolerance in (
        (32, torch.float32, 1e-6), (96, torch.float64, 1e-6), (4096, torch.float32, 1e-6), (576, torch.float64, 1e-6),
        (768, torch.bfloat16, 0.01), (768, torch.float16, 0.01),
    ):  # fmt: skip
        norm = random_norm(kind, width, dtype)
        gain = norm_gains({"norm": (norm, width)})["norm"]
        assert gain.largest == pytest.approx(np.abs(reference.gain_of(norm)).max(), rel=tolerance), (width, dtype)
        assert gain.centered == kind.startswith("layer"), (width, dtype)
        assert gain.epsilon == {"llama": 1e-5, "layer": 1e-5, "layer without bias": 1e-12}.get(kind, 1e-6)


@EACH_NORM
def test_a_norm_amplifies_no_gradient_beyond_its_bound(kind: str) -> None:
    """Theorem 2 is checked for the Jacobian at every token, with massive activations among the inputs."""
    width = 96
    norm = random_norm(kind, width)
    x = torch.randn(1, 64, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[0, :16, 7] = 2e4
    x[0, 16:24] *= 1e-4  # smaller than ε
    x[0, 24:32] += 50.0  # LayerNorm subtracts it
    with in_double(norm if "transformers" in type(norm).__module__ else random_norm("llama", 2)):
        gain = norm_gains({"norm": (norm, width)})["norm"]
        bound = gain.bound(x, token_norms(x))[0]
        jacobians = torch.stack([torch.autograd.functional.jacobian(norm, token) for token in x[0]])
    operator_norms = torch.linalg.matrix_norm(jacobians, ord=2)
    assert (operator_norms <= bound * (1 + 1e-9)).all()
    assert (operator_norms >= 0.8 * bound).all()  # the bound is no larger than necessary


class Watching(Observable):
    """Keeps a weak reference to every tensor that it receives."""

    name = "watching"
    about = "a test's own"
    sites = Gradient.sites
    backward = True

    def __init__(self) -> None:
        super().__init__(Settings())
        self.seen: dict[tuple[int, str], weakref.ref] = {}

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        self.seen[layer, site] = weakref.ref(tensor)

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        tensors = {"query": read.query, "key": read.key, "value": read.value, "lse": read.lse, "mix": mix}
        self.seen |= {(layer, name): weakref.ref(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_of_a_batch_outlives_it(name: str) -> None:
    model = tiny_model(name)
    watching, measuring = Watching(), Gradient(SETTINGS)
    gc.freeze()
    with open_tracer(model, find_family(model)) as tracer:
        measuring.prepare(model, tracer.family, 40)
        for batch in batched(ragged_tokens((LENGTH, 9, 17)), 2):
            tracer.forward_backward(batch, [measuring, watching])
            assert len(watching.seen) == 3 * (len(tracer.family.sites) + 5)
            assert [place for place, tensor in watching.seen.items() if tensor() is not None] == []
            tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
            assert not any(tensor.grad_fn is not None for tensor in tensors)
            for private in (measuring._seen, measuring._norms, measuring._bounds, measuring._routed):
                assert private == {}
            assert all(not seam.call or seam.call.scores is None for seam in tracer.seams.values())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_forward_observables_are_the_same_with_a_backward_pass(name: str) -> None:
    model, batches = tiny_model(name), batched(ragged_tokens(RAGGED), 2, "left")
    alone = measured(model, batches, SETTINGS)
    only = measured(model, batches, SETTINGS, ("gradient",), backward=True)
    for names in ((*FORWARD, "gradient"), ("gradient", *FORWARD)):
        together = measured(model, batches, SETTINGS, names, backward=True)
        assert together.keys() == alone.keys() | {*TABLES, *SAMPLES}
        for table_name, rows in (alone | only).items():
            assert rows.equals(together[table_name]), table_name


HALF = {  # columns that are compared, except for entries below a hundredth of the largest
    "gradient": ("grad_norm",),
    "gradient_ratio": ("input_norm", "bloat", "compress", "change"),
    "gradient_check": ("lower_bound", "measured", "upper_bound"),
    "norm_bound": ("measured", "bound"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("gemma2", torch.float16), ("gpt2", torch.float16), ("gpt_neox", torch.bfloat16),
     ("bloom", torch.bfloat16), ("falcon-new", torch.float16)],
)  # fmt: skip
def test_half_precision_gives_the_figures_of_float32(name: str, dtype: torch.dtype) -> None:
    """Both models have the weights of the half-precision model."""
    tolerance = 0.05 if dtype == torch.bfloat16 else 0.01
    model = tiny_model(name, dtype=dtype, spread=4.0)
    batches = batched(ragged_tokens(RAGGED), 2, "left")

    def tables_and_loss() -> tuple[dict[str, pd.DataFrame], float]:
        observable = Gradient(SETTINGS)
        with open_tracer(model, find_family(model)) as tracer:
            observable.prepare(model, tracer.family, sum(int(batch.predicting.sum()) for batch in batches))
            loss = sum(float(tracer.forward_backward(batch, [observable]).sum()) for batch in batches)
        assert observable.notices() == []
        return observable.tables(), loss

    half, loss = tables_and_loss()
    model.float()
    single, expected_loss = tables_and_loss()
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    for table, columns in HALF.items():
        mine, truth = half[table], single[table]
        if table == "gradient":
            mine, truth = (rows[rows["head"] == -1] for rows in (mine, truth))
        for column in columns:
            x, y = mine[column].to_numpy(float), truth[column].to_numpy(float)
            assert (np.isnan(x) == np.isnan(y)).all()
            large = y > 0.01 * np.nanmax(y, initial=0.0)
            np.testing.assert_allclose(x[large], y[large], rtol=tolerance, err_msg=f"{table}.{column}")
    assert half["gradient_check"]["identity_residual"].max() < torch.finfo(dtype).eps
    assert (half["norm_bound"]["holds"] == 1).all()


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("bloom", "auto")])
def test_analyze_gives_the_references_tables(name: str, size: Any, tmp_path: Path) -> None:
    path, model = written(tmp_path / "ragged.jsonl", ragged_tokens(RAGGED)), double_model(name)
    truth = sum(sequence.loss for sequence in recorded(name, RAGGED)) / sum(length - 1 for length in RAGGED)
    options = {
        "num_seqs": len(RAGGED),
        "seq_len": LENGTH,
        "positions": POSITIONS,
        "observables": (*FORWARD, "gradient"),
    }
    with in_double(model):
        run = sinkscope.analyze(model, input=path, batch_size=size, **options)
    tables = {table: run.tables[table].drop(columns=["model", "condition"]) for table in TABLES}
    reference.assert_same(tables, expected(name), TOLERANCE)
    assert run.metric("loss") == pytest.approx(truth, rel=1e-12)
    assert run.metric("identity_residual") < 1e-5
    assert run.manifest["notices"] == []


def summary_tables() -> dict[str, pd.DataFrame]:
    """Return tables of two layers and eight positions: value gradients 10 and 30 at position 0, 1 and 2 elsewhere."""
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
    return {name: pd.DataFrame(of_table, columns=["layer", *column_names(name)]) for name, of_table in rows.items()}


def test_the_summary_compares_gradient_sinks_with_later_tokens_and_fits_compression() -> None:
    per_layer, totals = gradient_summary(summary_tables(), longest=8)
    assert per_layer["value_gradient_ratio"].tolist() == [10.0, 15.0]
    assert totals["value_gradient_ratio"] == pytest.approx(20 / 1.5)  # norms first averaged over layers
    assert totals["value_over_key_gradient"] == 1.0
    assert per_layer["bloat"].tolist() == [50.0] * 3
    assert per_layer["bloat_later"].tolist() == [2.0] * 3
    assert per_layer["theorem1_holds"].tolist() == [0.5, 0.5]
    assert totals["identity_residual"] == 2e-7
    assert [totals["compress_slope"], totals["compress_correlation"]] == pytest.approx([-1.0, -1.0])
    tables = summary_tables()
    tables["gradient_ratio"].loc[tables["gradient_ratio"]["layer"] == 0, "compress"] = 123.0  # GS figure 3 has layer 0
    assert gradient_summary(tables, longest=8)[1]["compress_slope"] > -0.99
    assert "compress_slope_2-3" in totals
    tables["gradient_ratio"] = tables["gradient_ratio"].query("layer > 0")
    assert "compress_slope_0" not in gradient_summary(tables, longest=8)[1]  # two layers are two points: no fit


def test_estimates_read_the_rows_of_their_pathway_also_when_others_were_read_before() -> None:
    run = sinkscope.analyze(tiny_model("llama"), input="random", num_seqs=2, seq_len=20, observables="gradient")
    sequences, table = Sequences(run), run.tables["gradient"]
    for pathway in ("value", "key", "query"):
        rows = table[(table["pathway"] == pathway) & (table["head"] == -1)]
        by_position = rows.pivot(index="layer", columns="position", values="grad_norm")
        np.testing.assert_array_equal(gradients(sequences, pathway)[0], by_position)


# --- by group and by sequence, before gates and under interventions

FEW_POSITIONS = 6
MANY = (12, 9, 4, 12, 7) * 5  # 25 sequences in 20 groups; one shorter than FEW_POSITIONS in each five


def tables_of(model: PreTrainedModel, sequences: Sequence[np.ndarray], size: int = 4) -> dict[str, pd.DataFrame]:
    settings = Settings(positions=FEW_POSITIONS, window=8)
    with in_double(model.base_model):
        return measured(model, batched(sequences, size), settings, ("gradient",), backward=True)


def assert_near(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10 * np.nanmax(np.abs(expected)))


def test_the_gradient_without_a_group_is_that_of_a_run_without_its_sequences() -> None:
    model, sequences = tiny_model("llama", dtype=torch.float64), ragged_tokens(MANY)
    table = tables_of(model, sequences)["gradient_by_group"].query("pathway == 'value'")
    assert sorted(table["group"].unique()) == list(range(GROUPS))
    for group in (0, 7):  # groups of two sequences and of one
        others = [ids for index, ids in enumerate(sequences) if index % GROUPS != group]
        with in_double(model):
            expected = reference.gradient(reference.record(model, others), FEW_POSITIONS).query("pathway == 'value'")
        mine = table[table["group"] == group].sort_values(["layer", "head", "position"])["grad_norm"]
        assert_near(mine.to_numpy(), expected.sort_values(["layer", "head", "position"])["grad_norm"].to_numpy())


@pytest.mark.parametrize("name", ["llama", "opt-post-norm"])
def test_ratios_of_sequences_have_the_tables_ratio_as_their_mean(name: str) -> None:
    tables = tables_of(tiny_model(name, dtype=torch.float64), ragged_tokens(MANY))
    keys = ["layer", "branch", "position"]
    by_sequence = tables["gradient_ratio_by_sequence"]
    means = by_sequence.groupby(keys)[list(names_of(RATIO_COLUMNS))].mean().reset_index()
    expected = tables["gradient_ratio"].sort_values(keys, ignore_index=True)
    pd.testing.assert_frame_equal(means[expected.columns], expected, check_dtype=False, rtol=1e-6)
    have = by_sequence.query("layer == 0 and branch == 'attn'").groupby("sequence")["input_norm"].count()
    assert have.tolist() == [min(length, FEW_POSITIONS) for length in MANY]
    if name == "llama":  # the last of four tokens predicts nothing
        assert by_sequence.query("sequence == 2 and position == 3")["compress"].isna().all()
        assert by_sequence.query("sequence == 2 and position < 3")["compress"].notna().all()


def raw_value_norms(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """Return the norms of the gradients of projected values before a retrofit's hook, (layers,K,P)."""
    projected = [projections(model, find_family(model), layer)["value"] for layer in range(3)]
    last: dict[int, torch.Tensor] = {}  # layer → the last gradient, that of the loss

    def watch(layer: int, module: Any, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(partial(last.__setitem__, layer))

    total = torch.zeros(3, FEW_POSITIONS, *projected[0].places.shape, dtype=torch.float64)
    with ExitStack() as stack, in_double(model.base_model):
        for layer, projection in enumerate(projected):
            stack.enter_context(projection.module.register_forward_hook(partial(watch, layer), prepend=True))
        for ids in sequences:
            record(model, ids, sum(len(each) - 1 for each in sequences))
            for layer, projection in enumerate(projected):
                total[layer, : len(ids)] += last[layer][0, :FEW_POSITIONS, projection.places]
    return total.norm(dim=-1).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "label"), [("llama", "vga"), ("llama", "iga"), ("gpt2", "vscale"), ("falcon-new", "iga")]
)
def test_the_gradient_at_the_raw_value_is_autograds(name: str, label: str) -> None:
    model, sequences = retrofitted(name, label), ragged_tokens((12, 9, 4))
    table = tables_of(model, sequences, 2)["gradient"].query("pathway == 'raw_value'")
    norms = raw_value_norms(model, sequences)
    heads = norms.shape[1]
    assert len(table) == 3 * (1 + heads) * FEW_POSITIONS
    together = norms.square().sum(1, keepdim=True).sqrt()
    computed = table.sort_values(["layer", "head", "position"])["grad_norm"].to_numpy()
    assert_near(computed.reshape(3, 1 + heads, FEW_POSITIONS), torch.cat([together, norms], dim=1).numpy())


@pytest.mark.parametrize(("name", "is_zero"), [("llama", True), ("gpt_oss", False)])
def test_the_table_also_has_autograds_gradient_of_the_first_query(name: str, is_zero: bool) -> None:
    """A softmax over one key is constant; the learned logit of gpt-oss competes with it."""
    model = tiny_model(name)
    batches, settings = batched(ragged_tokens((12, 12)), 2), Settings(positions=FEW_POSITIONS, window=8)
    table = measured(model, batches, settings, ("gradient",), backward=True)["gradient"]
    by_autograd = table.query("pathway == 'query_measured'")
    first = table.query("pathway == 'query' and position == 0")
    assert by_autograd["position"].unique().tolist() == [0]
    largest = table.query("pathway == 'query'")["grad_norm"].max()
    if is_zero:
        assert (first["grad_norm"] == 0).all()
        assert (by_autograd["grad_norm"] < 1e-6 * largest).all()
    else:
        assert by_autograd["grad_norm"].to_list() == first["grad_norm"].to_list()
        assert by_autograd["grad_norm"].max() > 1e-3 * largest


SHORT = 14
ARMS: dict[str, Any] = {
    "input": "random", "num_seqs": 3, "seq_len": SHORT, "positions": FEW_POSITIONS, "window": 8, "bos": "never",
}  # fmt: skip
GRADIENTS = ("gradient", "gradient_by_group", "gradient_ratio", "gradient_ratio_by_sequence")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def masked(llama: PreTrainedModel) -> Run:
    with in_double(llama):
        return sinkscope.intervene(llama, "mask-sink", observables=("gradient",), draws=2, **ARMS)


def by_position(gradient: pd.DataFrame) -> np.ndarray:
    """Return ‖∇v‖ (layers,P) of all heads together."""
    table = gradient.query("pathway == 'value' and head == -1")
    return table.pivot(index="layer", columns="position", values="grad_norm").to_numpy()


def plain_norms(model: PreTrainedModel, hidden: int | None) -> np.ndarray:
    """Return ‖∇v‖ of plain transformers, with the key `hidden` masked for all other tokens."""
    forbidden = torch.ones(SHORT, SHORT, dtype=torch.bool).triu(1)
    if hidden is not None:
        forbidden[:, hidden] |= torch.arange(SHORT) != hidden
    mask = torch.zeros(1, 1, SHORT, SHORT).double().masked_fill(forbidden, torch.finfo(torch.float64).min)
    config = make_config(**ARMS)
    sequences = inputs_for(load_model(model, None, config), config).sequences
    with ExitStack() as stack, in_double(model):
        for layer in model.model.layers:
            stack.enter_context(layer.self_attn.register_forward_pre_hook(
                lambda module, args, named: (args, named | {"attention_mask": mask}), with_kwargs=True
            ))  # fmt: skip
        return by_position(reference.gradient(reference.record(model, sequences), FEW_POSITIONS))


def test_gradients_under_an_intervention_are_those_of_the_changed_model(llama: PreTrainedModel, masked: Run) -> None:
    (control,) = masked.manifest["arms"]["mask-sink"]["controls"][0]
    moved = int(control.partition("positions=")[2])
    by_condition = {name: by_position(rows) for name, rows in masked.tables["gradient"].groupby("condition")}
    for condition, hidden in (("before", None), ("mask-sink", 0), ("mask-sink control 0", moved)):
        np.testing.assert_allclose(by_condition[condition], plain_norms(llama, hidden), rtol=1e-10)
    # the intervention changes the gradients
    assert np.abs(by_condition["mask-sink"] / by_condition["before"] - 1)[:, 0].max() > 0.1


def test_every_arm_and_control_has_the_tables_of_the_chosen_observables(masked: Run) -> None:
    conditions = {"before", "mask-sink", "mask-sink control 0", "mask-sink control 1"}
    for name in (*GRADIENTS, "attention"):
        assert set(masked.tables[name]["condition"]) == conditions, name
    assert set(masked.tables["massive"]["condition"]) == {"before", "mask-sink"}
    assert masked.manifest["config"]["observables"] == ["attention", "massive", "mean-maps", "gradient"]


def test_a_norm_four_times_as_large_lets_a_quarter_through() -> None:
    """The input norm is 4 times as large, and theorem 2's bound is a quarter as large."""
    model = tiny_model("llama")
    run = sinkscope.intervene(model, "rescale-norm:layers=1,factor=4", observables=("gradient",), draws=1, **ARMS)
    control = f"{next(iter(run.manifest['arms']))} control 0"
    for table, column, expected in (("gradient_ratio", "input_norm", 4.0), ("norm_bound", "bound", 0.25)):
        rows = run.tables[table].query("branch == 'attn' and layer < 2")
        values = rows.pivot(index=["layer", "position"], columns="condition", values=column)
        ratio = values["rescale-norm"] / values["before"]
        assert ratio[1, 0] == pytest.approx(expected, rel=1e-4)
        np.testing.assert_allclose(ratio.drop((1, 0)), 1.0, rtol=1e-5)
        assert (values[control] / values["before"])[1, 0] == pytest.approx(1.0, rel=1e-5)  # it is at another token
