"""Gradients of an experiment's arms, against plain autograd in float64 for a model that is changed by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from gradient_reference import in_double
from support.plain_gradients import value_gradients
from tiny import tiny_model
from transformers import PreTrainedModel

import sinkscope
from sinkscope import Run
from sinkscope.measuring.subject import inputs_for, load_model
from sinkscope.options.measuring import make_config

LENGTH, POSITIONS = 14, 6
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


def value_norms(model: PreTrainedModel, hidden: int | None) -> np.ndarray:
    """Return ‖∇v‖ (layers,P) of transformers' own eager model, with the key `hidden` masked for all other tokens."""
    forbidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if hidden is not None:
        forbidden[:, hidden] |= torch.arange(LENGTH) != hidden
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(forbidden, torch.finfo(torch.float64).min)
    config = make_config(**SMALL)
    sequences = inputs_for(load_model(model, None, config), config).sequences
    gradients = value_gradients(model, sequences, POSITIONS, mask[None, None])
    return torch.linalg.vector_norm(gradients, dim=(1, 3)).numpy()


def norms_of(run: Run, condition: str) -> np.ndarray:
    table = run.tables["gradient"].query("condition == @condition and pathway == 'value' and head == -1")
    return table.pivot(index="layer", columns="position", values="grad_norm").to_numpy()


def test_gradients_under_an_intervention_are_those_of_the_changed_model(llama: PreTrainedModel, masked: Run) -> None:
    (control,) = masked.manifest["arms"]["mask-sink"]["controls"][0]
    moved = int(control.partition("positions=")[2])
    for condition, hidden in (("before", None), ("mask-sink", 0), ("mask-sink control 0", moved)):
        np.testing.assert_allclose(norms_of(masked, condition), value_norms(llama, hidden), rtol=1e-10)
    # the intervention changes the gradients
    assert np.abs(norms_of(masked, "mask-sink") / norms_of(masked, "before") - 1)[:, 0].max() > 0.1


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
