"""Gradients by group and by sequence, before gates and under interventions, against plain autograd in float64."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import gradient_reference as reference
import numpy as np
import pandas as pd
import pytest
import torch
from gradient_reference import in_double
from support.plain import record
from support.retrofitted import retrofitted
from tiny import batched, measured, ragged_tokens, tiny_model
from transformers import PreTrainedModel

import sinkscope
from sinkscope import Run
from sinkscope.measuring.observables.gradient import GROUPS, RATIO_COLUMNS
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import inputs_for, load_model
from sinkscope.models.families import find_family
from sinkscope.models.projections import projections
from sinkscope.options.measuring import make_config
from sinkscope.results.tables import names_of

POSITIONS = 6
LENGTHS = (12, 9, 4, 12, 7) * 5  # 25 sequences in 20 groups; one shorter than POSITIONS in each five


def tables(model: PreTrainedModel, sequences: Sequence[np.ndarray], size: int = 4) -> dict[str, pd.DataFrame]:
    settings = Settings(positions=POSITIONS, window=8)
    with in_double(model.base_model):
        return measured(model, batched(sequences, size), settings, ("gradient",), backward=True)


def assert_near(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10 * np.nanmax(np.abs(expected)))


def test_the_gradient_without_a_group_is_that_of_a_run_without_its_sequences() -> None:
    model, sequences = tiny_model("llama", dtype=torch.float64), ragged_tokens(LENGTHS)
    table = tables(model, sequences)["gradient_by_group"].query("pathway == 'value'")
    assert sorted(table["group"].unique()) == list(range(GROUPS))
    for group in (0, 7):  # groups of two sequences and of one
        others = [ids for index, ids in enumerate(sequences) if index % GROUPS != group]
        with in_double(model):
            expected = reference.gradient(reference.record(model, others), POSITIONS).query("pathway == 'value'")
        mine = table[table["group"] == group].sort_values(["layer", "head", "position"])["grad_norm"]
        assert_near(mine.to_numpy(), expected.sort_values(["layer", "head", "position"])["grad_norm"].to_numpy())


@pytest.mark.parametrize("name", ["llama", "opt-post-norm"])
def test_ratios_of_sequences_have_the_tables_ratio_as_their_mean(name: str) -> None:
    found = tables(tiny_model(name, dtype=torch.float64), ragged_tokens(LENGTHS))
    keys = ["layer", "branch", "position"]
    by_sequence = found["gradient_ratio_by_sequence"]
    means = by_sequence.groupby(keys)[list(names_of(RATIO_COLUMNS))].mean().reset_index()
    expected = found["gradient_ratio"].sort_values(keys, ignore_index=True)
    pd.testing.assert_frame_equal(means[expected.columns], expected, check_dtype=False, rtol=1e-6)
    have = by_sequence.query("layer == 0 and branch == 'attn'").groupby("sequence")["input_norm"].count()
    assert have.tolist() == [min(length, POSITIONS) for length in LENGTHS]
    if name == "llama":  # the last of four tokens predicts nothing
        assert by_sequence.query("sequence == 2 and position == 3")["compress"].isna().all()
        assert by_sequence.query("sequence == 2 and position < 3")["compress"].notna().all()


def raw_value_norms(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """Return the norms of the gradients of projected values before a retrofit's hook, (layers,K,P)."""
    projected = [projections(model, find_family(model), layer)["value"] for layer in range(3)]
    last: dict[int, torch.Tensor] = {}  # layer → the last gradient, that of the loss

    def watch(layer: int, module: Any, args: tuple, output: torch.Tensor) -> None:
        output.register_hook(partial(last.__setitem__, layer))

    total = torch.zeros(3, POSITIONS, *projected[0].places.shape, dtype=torch.float64)
    with ExitStack() as stack, in_double(model.base_model):
        for layer, projection in enumerate(projected):
            stack.enter_context(projection.module.register_forward_hook(partial(watch, layer), prepend=True))
        for ids in sequences:
            record(model, ids, sum(len(each) - 1 for each in sequences))
            for layer, projection in enumerate(projected):
                total[layer, : len(ids)] += last[layer][0, :POSITIONS, projection.places]
    return total.norm(dim=-1).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "label"), [("llama", "vga"), ("llama", "iga"), ("gpt2", "vscale"), ("falcon-new", "iga")]
)
def test_the_gradient_at_the_raw_value_is_autograds(name: str, label: str) -> None:
    model, sequences = retrofitted(name, label), ragged_tokens((12, 9, 4))
    table = tables(model, sequences, 2)["gradient"].query("pathway == 'raw_value'")
    norms = raw_value_norms(model, sequences)
    heads = norms.shape[1]
    assert len(table) == 3 * (1 + heads) * POSITIONS
    together = norms.square().sum(1, keepdim=True).sqrt()
    found = table.sort_values(["layer", "head", "position"])["grad_norm"].to_numpy()
    assert_near(found.reshape(3, 1 + heads, POSITIONS), torch.cat([together, norms], dim=1).numpy())


@pytest.mark.parametrize(("name", "is_zero"), [("llama", True), ("gpt_oss", False)])
def test_the_table_also_has_autograds_gradient_of_the_first_query(name: str, is_zero: bool) -> None:
    """A softmax over one key is constant; the learned logit of gpt-oss competes with it."""
    model = tiny_model(name)
    batches, settings = batched(ragged_tokens((12, 12)), 2), Settings(positions=POSITIONS, window=8)
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


LENGTH = 14
SMALL: dict[str, Any] = {
    "input": "random", "num_seqs": 3, "seq_len": LENGTH, "positions": POSITIONS, "window": 8, "bos": "never",
}  # fmt: skip
GRADIENTS = ("gradient", "gradient_by_group", "gradient_ratio", "gradient_ratio_by_sequence")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def masked(llama: PreTrainedModel) -> Run:
    with in_double(llama):
        return sinkscope.intervene(llama, "mask-sink", observables=("gradient",), draws=2, **SMALL)


def by_position(gradient: pd.DataFrame) -> np.ndarray:
    """Return ‖∇v‖ (layers,P) of all heads together."""
    table = gradient.query("pathway == 'value' and head == -1")
    return table.pivot(index="layer", columns="position", values="grad_norm").to_numpy()


def plain_norms(model: PreTrainedModel, hidden: int | None) -> np.ndarray:
    """Return ‖∇v‖ of plain transformers, with the key `hidden` masked for all other tokens."""
    forbidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if hidden is not None:
        forbidden[:, hidden] |= torch.arange(LENGTH) != hidden
    mask = torch.zeros(1, 1, LENGTH, LENGTH).double().masked_fill(forbidden, torch.finfo(torch.float64).min)
    config = make_config(**SMALL)
    sequences = inputs_for(load_model(model, None, config), config).sequences
    with ExitStack() as stack, in_double(model):
        for layer in model.model.layers:
            stack.enter_context(layer.self_attn.register_forward_pre_hook(
                lambda module, args, given: (args, given | {"attention_mask": mask}), with_kwargs=True
            ))  # fmt: skip
        return by_position(reference.gradient(reference.record(model, sequences), POSITIONS))


def test_gradients_under_an_intervention_are_those_of_the_changed_model(llama: PreTrainedModel, masked: Run) -> None:
    (control,) = masked.manifest["arms"]["mask-sink"]["controls"][0]
    moved = int(control.partition("positions=")[2])
    found = {name: by_position(rows) for name, rows in masked.tables["gradient"].groupby("condition")}
    for condition, hidden in (("before", None), ("mask-sink", 0), ("mask-sink control 0", moved)):
        np.testing.assert_allclose(found[condition], plain_norms(llama, hidden), rtol=1e-10)
    # the intervention changes the gradients
    assert np.abs(found["mask-sink"] / found["before"] - 1)[:, 0].max() > 0.1


def test_every_arm_and_control_has_the_tables_of_the_chosen_observables(masked: Run) -> None:
    conditions = {"before", "mask-sink", "mask-sink control 0", "mask-sink control 1"}
    for name in (*GRADIENTS, "attention"):
        assert set(masked.tables[name]["condition"]) == conditions, name
    assert set(masked.tables["massive"]["condition"]) == {"before", "mask-sink"}
    assert masked.manifest["config"]["observables"] == ["attention", "massive", "mean-maps", "gradient"]


def test_a_norm_four_times_as_large_lets_a_quarter_through() -> None:
    """The input norm is 4 times as large, and theorem 2's bound is a quarter as large."""
    model = tiny_model("llama")
    run = sinkscope.intervene(model, "rescale-norm:layers=1,factor=4", observables=("gradient",), draws=1, **SMALL)
    control = f"{next(iter(run.manifest['arms']))} control 0"
    for table, column, expected in (("gradient_ratio", "input_norm", 4.0), ("norm_bound", "bound", 0.25)):
        rows = run.tables[table].query("branch == 'attn' and layer < 2")
        values = rows.pivot(index=["layer", "position"], columns="condition", values=column)
        ratio = values["rescale-norm"] / values["before"]
        assert ratio[1, 0] == pytest.approx(expected, rel=1e-4)
        np.testing.assert_allclose(ratio.drop((1, 0)), 1.0, rtol=1e-5)
        assert (values[control] / values["before"])[1, 0] == pytest.approx(1.0, rel=1e-5)  # it is at another token
