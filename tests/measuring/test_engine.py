"""The engine of settings × texts: order, text, progress and the interval of a cost."""

import numpy as np
import pytest

from sinkscope.measuring.engine import resampled_cost


def test_the_interval_of_a_cost_resamples_sequences_in_pairs() -> None:
    random = np.random.default_rng(0)
    full, predicted = 100.0 + 10 * random.normal(size=400), [10] * 400
    losses = full + 5 + random.normal(size=400)
    drawn = resampled_cost(losses, full, predicted, range(400))
    assert drawn[0] == pytest.approx(0.5, abs=0.02)
    assert drawn[1:].std() == pytest.approx(0.1 / 20, rel=0.1)  # the spread of the costs only, not of the losses
    copies = resampled_cost(losses[:20].repeat(20), full[:20].repeat(20), predicted, np.arange(20).repeat(20).tolist())
    np.testing.assert_allclose(copies, resampled_cost(losses[:20], full[:20], predicted[:20], range(20)))
