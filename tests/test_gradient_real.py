"""SmolLM2's gradients: the facts that are known of them, and plain autograd beside them.

The model comes with `make install`. If it is missing these tests fail; they do not skip.
"""

import os
from collections.abc import Iterator

import gradient_reference as reference
import numpy as np
import pytest
import torch

import sinkscope
from sinkscope.analysis import inputs_for
from sinkscope.config import make_config
from sinkscope.loading import LoadedModel
from sinkscope.run import Run

pytestmark = pytest.mark.real_model

SEQUENCES, TOKENS = 16, 64


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """Tiny models take one thread (tiny.py); this one takes what there is."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    try:
        return sinkscope.load(dtype="float32", device_map="cpu")
    except sinkscope.SinkscopeError as error:
        pytest.fail(f"SmolLM2 is missing: run `make install` ({error})")


@pytest.fixture(scope="module")
def run(smollm: LoadedModel) -> Run:
    return sinkscope.analyze(smollm, num_seqs=SEQUENCES, seq_len=TOKENS, observables=("gradient",))


def test_the_query_of_token_0_has_no_gradient(run: Run) -> None:
    rows = run.tables["gradient"].query("pathway == 'query' and position == 0")
    assert len(rows) == 30 * (1 + 9)
    assert (rows["grad_norm"] == 0.0).all()


def test_values_have_their_gradient_sink_at_token_0(run: Run) -> None:
    """Norms averaged over layers first, as the paper's figure 2 has them."""
    rows = run.tables["gradient"].query("head == -1")
    norms = rows.groupby(["pathway", "position"])["grad_norm"].mean().unstack()
    ratio = norms[0] / norms[[position for position in norms if position >= 5]].mean(axis=1)
    assert ratio["value"] > 10
    assert ratio["value"] > ratio["key"]
    assert run.metric("value_gradient_ratio") == pytest.approx(ratio["value"])


def test_compression_is_inverse_to_the_input_norm(run: Run) -> None:
    """The paper's figure 3: slope -1, here by numpy's own fit."""
    rows = run.tables["gradient_ratio"].query("branch == 'attn' and layer >= 1")
    x, y = np.log10(rows["input_norm"]), np.log10(rows["compress"])
    slope, _ = np.polyfit(x, y, 1)
    assert -1.1 <= slope <= -0.8
    assert abs(np.corrcoef(x, y)[0, 1]) > 0.95
    assert run.metric("compress_slope") == pytest.approx(slope)


def test_the_residual_stream_changes_gradients_little(run: Run) -> None:
    """The paper's figure 3, right: change is near 1, but for the first layer."""
    rows = run.tables["gradient_ratio"].query("branch == 'attn' and layer >= 1")
    assert rows["change"].median() == pytest.approx(1.0, abs=0.2)


def test_what_is_an_identity_and_what_is_a_bound_holds(run: Run) -> None:
    check = run.tables["gradient_check"]
    assert check["identity_residual"].max() < 1e-5
    assert (run.tables["norm_bound"]["holds"] == 1.0).all()
    assert run.tables["norm_bound"]["tightness"].max() > 0.5


def test_gradients_are_plain_autograds(smollm: LoadedModel) -> None:
    """Dense attention put into the bare model, `retain_grad` on every tensor, one sequence at a time."""
    options = {"num_seqs": 2, "seq_len": TOKENS, "positions": 16}
    measured = sinkscope.analyze(smollm, observables=("gradient",), **options)
    sequences = [np.asarray(ids) for ids in inputs_for(smollm, make_config(**options)).sequences]
    model = smollm.model
    before = model.config._attn_implementation
    model.set_attn_implementation(reference.NAME)
    try:
        recorded = reference.record(model, sequences)
    finally:
        model.set_attn_implementation(before)
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = {
        "gradient": reference.gradient(recorded, 16),  # query, key and value
        "gradient_ratio": reference.gradient_ratio(model, recorded, 16),  # of h, and of all that stands in eq. 3
    }
    tables = {name: measured.tables[name].drop(columns=["model", "condition"]) for name in expected}
    # the identity of the paper, in plain autograd: the first value's gradient is what all queries route to it
    layer = recorded[0].layers[20]
    routed = np.einsum("ht,htd->hd", layer.weights[:, :, 0], layer.mix).reshape(3, 3, -1).sum(1)
    np.testing.assert_allclose(routed, layer.value[:, 0], rtol=1e-3, atol=1e-5 * np.abs(routed).max())
    worst = reference.assert_same(tables, expected, 1e-4)
    print(worst)
