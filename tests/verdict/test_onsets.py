"""Onsets and cross-lags, on courses whose answers are known."""

import numpy as np
import pytest

from sinkscope.verdict.onsets import lag_table, onset, onset_table

STEPS = np.array([0, 1, 3, 7, 15])  # log₂ (1 + step) is 0, 1, 2, 3, 4


def test_the_onset_is_interpolated_in_the_logarithm_of_steps() -> None:
    course = np.array([[0, 0, 8, 16, 20], [0, 0, 0, 0, 9], [12, 0, 0, 0, 0], [0, 10, 0, 20, 20]], float)
    found = onset(course, STEPS, threshold=10.0)
    assert found[0] == pytest.approx(2 ** (2 + 2 / 8) - 1)
    assert np.isnan(found[1])
    assert found[2] == 0
    assert found[3] == pytest.approx(1)


def test_what_follows_a_step_later_has_the_larger_lagged_correlation() -> None:
    leading = np.random.default_rng(0).normal(size=24).cumsum() + 50
    following = np.exp(0.1 * np.concatenate([leading[:1], leading[:-1]]))
    replicates = {"sink": leading[None], "gradient": following[None], "norm": np.exp(leading / 50)[None]}
    lags = lag_table(replicates).set_index(["first", "then"])
    assert lags.loc[("sink", "gradient"), "correlation"] == pytest.approx(1)
    assert lags.loc[("norm", "gradient"), "correlation"] == pytest.approx(1)
    assert lags.loc[("gradient", "sink"), "correlation"] < lags.loc[("sink", "gradient"), "low"]
    assert (lags["low"] <= lags["correlation"]).all()


def test_the_interval_of_an_onset_is_that_of_its_replicates() -> None:
    rate = np.array([0.0, 4.0, 8.0, 16.0, 20.0])
    drawn = np.stack([rate, *(rate * factor for factor in np.linspace(0.9, 1.1, 41))])
    table = onset_table(STEPS, {"sink": drawn}).set_index("measure")
    assert table.loc["sink", "low"] < table.loc["sink", "step"] < table.loc["sink", "high"]
    assert table.loc["sink", "step"] == pytest.approx(onset(rate[None], STEPS, 10.0)[0])
    never = onset_table(STEPS, {"norm": np.ones((30, 5))}).iloc[0]
    assert np.isnan(never["step"])
    assert never["high"] == np.inf
