"""Claims on real weights."""

import numpy as np
import pytest

import sinkscope
from sinkscope.models.loading import LoadedModel
from sinkscope.results.statistics import bootstrap, resamplings, weighted_means

pytestmark = pytest.mark.real_model


def test_twice_the_sequences_shrink_intervals_by_the_root_of_two(smollm: LoadedModel) -> None:
    """On average over the layers' sink rates, of those layers in which sequences differ."""
    run = sinkscope.analyze(smollm, num_seqs=64, observables=("attention",))
    table = run.tables["attention_by_sequence"]
    first = table[table["position"] == 0].pivot(index="sequence", columns="layer", values="sink_rate").to_numpy()
    widths = []
    for size in (32, 64):
        means = weighted_means(first[:size], resamplings(size))
        intervals = [bootstrap(means[:, layer]) for layer in range(means.shape[1])]
        widths.append(np.array([one.high - one.low for one in intervals]))
    differing = widths[1] > 0
    assert differing.sum() > 20
    assert np.exp(np.log(widths[0][differing] / widths[1][differing]).mean()) == pytest.approx(np.sqrt(2), rel=0.15)
