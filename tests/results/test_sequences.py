"""Intervals over sequences: copies of a text are one unit, so that they narrow no interval."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny import tiny_model, tiny_tokens
from transformers import PreTrainedModel

import sinkscope
from sinkscope.commands.steps.onsets import left_out, resampled
from sinkscope.measuring.estimates import gradient_ratio, massive_count, sink_rates
from sinkscope.output.run import Run
from sinkscope.results.findings import Outcome
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Sequences
from sinkscope.results.statistics import Estimate, bootstrap, positive_jackknife, resamplings, resamplings_of

IDS = tiny_tokens(5, 24).tolist()
ORDER = [0, 1, 0, 2, 3, 3, 1, 2, 4, 4]  # each text twice


def estimates(run: Run) -> list[Estimate]:
    sequences = Sequences(run)
    onsets = [bootstrap(resampled(values[None])[:, 0]) for values in left_out(run).values()]
    rates = bootstrap(sink_rates(sequences)), bootstrap(sink_rates(sequences, position=1))
    losses = positive_jackknife(sequences.losses)
    return [*rates, massive_count(sequences), gradient_ratio(sequences, "value"), losses, *onsets]


def with_sink() -> PreTrainedModel:
    """Return a gpt2 whose query biases read a huge entry at position 0."""
    model = tiny_model("gpt2")
    width = model.config.n_embd
    model.transformer.wpe.weight[0, 7] += 100.0
    for block in model.transformer.h:
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        bias[:width] *= 3
        weight[7, width : 2 * width] = bias[:width]
    return model


@pytest.fixture(scope="module")
def measured() -> dict[str, Run]:
    inputs = {"once": IDS, "twice": [IDS[text] for text in ORDER], "one": [IDS[0]] * 20, "alone": IDS[:1]}
    observables = ("attention", "massive", "activation", "gradient")
    options: dict[str, Any] = {"observables": observables, "epsilon": 0.2}
    return {name: sinkscope.analyze(with_sink(), input=ids, **options) for name, ids in inputs.items()}


def test_copies_are_drawn_together() -> None:
    weights = resamplings_of([0, 1, 0, 2])
    assert weights[0].tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(weights, resamplings(3)[:, [0, 1, 0, 2]])
    assert not resamplings_of([7] * 20)[1:].any()


def test_a_loss_is_per_predicted_token_with_all_passages_and_without_each() -> None:
    table = pd.DataFrame({"layer": -1, "sequence": range(4), "loss": [1.0, 4, 2, 3], "predicted": [1, 3, 4, 2]})
    run = RunData({"input": {"sequences": 4, "per_passage": 2}}, {"loss_by_sequence": table})
    np.testing.assert_allclose(Sequences(run).losses, [27 / 10, 14 / 6, 13 / 4])


def test_copies_of_every_text_change_no_interval(measured: dict[str, Run]) -> None:
    assert measured["once"].manifest["input"]["texts"] is None
    assert measured["twice"].manifest["input"]["texts"] == [0, 1, 0, 2, 3, 3, 1, 2, 4, 4]
    pairs = list(zip(estimates(measured["once"]), estimates(measured["twice"]), strict=True))
    assert len(pairs) > 5
    for once, twice in pairs:
        ends = [[one.value, one.low, one.high] for one in (once, twice)]
        np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4, atol=1e-6)


def test_copies_of_a_single_text_decide_nothing(measured: dict[str, Run]) -> None:
    run = measured["one"]
    for one in estimates(run):
        assert one.low in (-np.inf, one.value) or not np.isfinite(one.low)
        assert not np.isfinite(one.high - one.low)
    outcomes = {name: {one.name: one.outcome for one in measured[name].findings} for name in ("one", "alone")}
    assert outcomes["one"] == outcomes["alone"]
    assert outcomes["one"]["sink"] == Outcome.UNDECIDED  # for the copies: with other texts there is a sink
    assert next(one for one in measured["once"].findings if one.name == "sink").outcome == Outcome.PRESENT
    assert "All 20 sequences are copies of one text. A single text has no 95 % interval" in run.verdict
    assert "Only 5 of the sequences are distinct" in measured["twice"].verdict
    assert "copies" not in measured["once"].verdict
