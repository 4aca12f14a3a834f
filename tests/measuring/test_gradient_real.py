"""SmolLM2's gradients: known facts, and plain autograd.

The model comes with `make install`. If it is missing, these tests fail.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import gradient_reference as reference
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import sinkscope
from sinkscope.measuring.subject import inputs_for
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config
from sinkscope.output.run import Run

pytestmark = pytest.mark.real_model

SEQUENCES, TOKENS = 4, 64


@pytest.fixture(scope="module")
def run(smollm_on_cpu: LoadedModel) -> Run:
    return sinkscope.analyze(smollm_on_cpu, num_seqs=SEQUENCES, seq_len=TOKENS, observables=("gradient",))


def test_known_facts_hold(run: Run) -> None:
    """Norms are averaged over layers first, as in GS figure 2; the slope of figure 3 is -1; change is near 1."""
    gradient = run.tables["gradient"]
    assert (gradient.query("pathway == 'query' and position == 0")["grad_norm"] == 0.0).all()
    norms = gradient.query("head == -1").groupby(["pathway", "position"])["grad_norm"].mean().unstack()
    ratio = norms[0] / norms.loc[:, 5:15].mean(axis=1)
    assert ratio["value"] > max(10, ratio["key"])
    assert run.metric("value_gradient_ratio") == pytest.approx(ratio["value"])
    rows = run.tables["gradient_ratio"].query("branch == 'attn' and layer >= 1")
    x, y = np.log10(rows["input_norm"]), np.log10(rows["compress"])
    slope, _ = np.polyfit(x, y, 1)
    assert -1.1 <= slope <= -0.8
    assert abs(np.corrcoef(x, y)[0, 1]) > 0.95
    assert run.metric("compress_slope") == pytest.approx(slope)
    assert rows["change"].median() == pytest.approx(1.0, abs=0.2)
    assert run.tables["gradient_check"]["identity_residual"].max() < 1e-5
    assert (run.tables["norm_bound"]["holds"] == 1.0).all()
    assert run.tables["norm_bound"]["tightness"].max() > 0.5


OPTIONS = {"num_seqs": 2, "seq_len": 20, "positions": 16}


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Convert the model to float64 and back; a model from GGUF rejects `.double()`."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        with reference.in_double(model):
            yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def test_gradients_are_plain_autograds_to_round_off(smollm_on_cpu: LoadedModel) -> None:
    """All tables are compared in float64, with trained weights, massive activations and gradient sinks."""
    model = smollm_on_cpu.model
    with in_float64(model):
        run = sinkscope.analyze(smollm_on_cpu, observables=("gradient",), **OPTIONS)
        sequences = [np.array(ids) for ids in inputs_for(smollm_on_cpu, make_config(**OPTIONS)).sequences]
        before = model.config._attn_implementation
        model.set_attn_implementation(reference.NAME)
        try:
            recorded = reference.record(model, sequences)
        finally:
            model.set_attn_implementation(before)
        expected = reference.tables(model, recorded, 16)
    print(reference.assert_same(run.tables, expected, 1e-9))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert next(model.parameters()).dtype == torch.float32
    truth = reference.gradient(recorded, 16).query("pathway == 'query' and position == 0")
    assert truth["grad_norm"].max() < 1e-15
