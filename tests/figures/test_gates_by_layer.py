"""The figure of gates: the model's own, with gaps where a layer has no attention."""

import numpy as np
import pytest
from support.every_model import tiny_of

import sinkscope


def test_it_draws_the_gates_of_a_hybrid() -> None:
    run = sinkscope.analyze(
        tiny_of("qwen3_next"), input="random", num_seqs=2, seq_len=12, positions=12, observables=("gate", "activation")
    )
    by_layer, by_position = run.figure("gates-by-layer").axes
    gate = run.tables["gate"]
    first = gate[gate["position"] == 0].groupby("layer")["gate"].mean()
    x, y = by_layer.lines[0].get_data()
    assert list(x) == [1, 2, 3]
    np.testing.assert_allclose(y, first.reindex([1, 2, 3]))
    assert np.isnan(y[1])
    assert by_layer.get_xlim() == pytest.approx((-0.3, 3.3))  # from layer 0 on, which has no attention
    mean = gate.groupby(["position", "layer"])["gate"].mean().groupby("position").mean()
    np.testing.assert_allclose(by_position.lines[-1].get_ydata(), mean)
