"""Findings on states, super weights, over-mixing and pictures: their intervals are over sequences."""

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import run_manifest
from tiny import tiny_model

from sinkscope import Run, analyze
from sinkscope.results.findings import Finding
from sinkscope.results.statistics import resamplings
from sinkscope.verdict.probes import findings

OBSERVABLES = ("entropy", "sink-tokens", "residual-sinks", "super-weight", "over-mixing")
# finding → table with a row for each sequence, its column, and how means by layer (draws,L) become one number
NUMBERS = {
    "state-entropy": ("entropy_by_sequence", "entropy", lambda means, layer: means.min(1)),
    "spike": ("spikes_by_sequence", "norm_ratio", lambda means, layer: means[:, layer]),
    "over-mixing": ("over_mixing_by_sequence", "change", lambda means, layer: means.mean(1)),
}


@pytest.fixture(scope="module")
def run() -> Run:
    return analyze(tiny_model("llama"), input="random", num_seqs=6, seq_len=12, observables=OBSERVABLES)


def by_name(run: Run) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings(run)}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_interval_is_that_of_resampled_sequences(name: str, run: Run) -> None:
    found = by_name(run)[name]
    table, column, over_layers = NUMBERS[name]
    by_layer = run.tables[table].pivot(index="sequence", columns="layer", values=column).to_numpy(float)
    drawn = over_layers(resamplings(6) @ by_layer / 6, found.numbers.get("layer"))
    assert found.value == pytest.approx(drawn[0])
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn[1:], [0.025, 0.975])))
    assert found.low < found.value < found.high


def test_without_the_tables_by_sequence_the_numbers_are_the_same_without_intervals(run: Run) -> None:
    less = Run(run.manifest, {name: table for name, table in run.tables.items() if "_by_" not in name})
    whole = by_name(run)
    for name, found in by_name(less).items():
        assert found.value == pytest.approx(whole[name].value, rel=1e-6)
        assert name in {"secondary-sinks", "super-weight"} or np.isnan(found.low)


def test_a_head_sees_a_picture_if_half_of_what_it_gives_it_is_not_on_sinks() -> None:
    patches = pd.DataFrame({"sequence": [0, 0], "layer": 2, "phi": [30.0, 1.0], "mass": 0.1, "random_share": 0.0})
    heads = pd.DataFrame({"sequence": 0, "layer": 2, "head": range(4), "first_mass": 0.1})
    masses = {"visual_mass": [0.8, 0.8, 0.3, 0.1], "sink_mass": [0.3, 0.5, 0.2, 0.0]}
    pictures = {"pictures": 1, "coordinates": [7], "is_massive": True}
    tables = {"visual_patch": patches, "visual_head": heads.assign(**masses)}
    found = by_name(Run(run_manifest(pictures=pictures), tables))["visual-attention"]
    assert (found.numbers["seeing"], found.numbers["heads"]) == (1, 4)
    assert "1 of 4 heads see the picture: they give it at least 0.2" in found.sentence
