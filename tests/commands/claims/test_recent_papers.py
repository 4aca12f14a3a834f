"""Claims of recent papers: on optimizers, on the emergence of massive activations, and on hybrid models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import NOT_APPLIES, analysis, family
from support.hand_made_trainings import judged, training

from sinkscope.commands.claims.claim import judge
from sinkscope.commands.claims.collection import Collection
from sinkscope.commands.claims.papers.recent import _follows_curve, emergence, fit_of_emergence
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.studies import ClaimStudy, Training
from sinkscope.results.findings import Outcome
from sinkscope.results.judgment import NotDefined
from sinkscope.results.sequences import Lacks

AROUND = np.array([1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.0])


def optimized(name: str, outliers: float, cost: float) -> Training:
    """Make eight seeds of plain training with an optimizer, which gives these outliers and this cost of 8 bits."""
    numbers = {"max_inf_norm": outliers * AROUND, "kurtosis": outliers * AROUND}
    made = training({"none": numbers}, optimizer=name)
    for run, factor in zip(made.runs.values(), AROUND, strict=True):
        run.manifest["w8a8"] = {"loss": 2.0, "loss_quantized": 2.0 + cost * factor}
    return made


@pytest.mark.parametrize(
    ("outliers", "costs", "expected"),
    [
        ((9.0, 3.0), (0.1, 0.5), Outcome.HOLDS),  # the one with larger outliers costs less
        ((3.0, 9.0), (0.1, 0.5), Outcome.FAILS),
        ((3.0, 9.0), (0.3, 0.3), NOT_APPLIES),  # there is nothing to predict
    ],
)
def test_outliers_and_the_cost_of_quantization(
    outliers: Sequence[float], costs: Sequence[float], expected: Outcome
) -> None:
    made = [optimized(*each) for each in zip(("adamw", "muon"), outliers, costs, strict=True)]
    assert judged("OQ-1", *made).outcome == expected


def test_what_costs_vary_by_over_seeds_is_not_predicted() -> None:
    first, second = optimized("adamw", 3.0, 0.3), optimized("muon", 9.0, 0.35)
    for run, factor in zip(second.runs.values(), (0.2, 1.8) * 4, strict=True):
        run.manifest["w8a8"]["loss_quantized"] = 2.0 + 0.35 * factor
    verdict = judged("OQ-1", first, second)
    assert verdict.outcome == NOT_APPLIES
    assert "the optimizers do not differ in the cost of 8 bits" in str(verdict)


STEPS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000.0])


def test_the_curve_fits_itself_and_not_its_values_in_another_order() -> None:
    values = emergence(STEPS / STEPS.max(), 900.0, 0.05, 30.0, 1.0, 40.0)
    assert fit_of_emergence(STEPS, values) > 0.999
    assert fit_of_emergence(STEPS, emergence(STEPS / STEPS.max(), 900.0, 0.3, 3e3, 1.0, 40.0)) > 0.999  # from one start
    shuffled = [fit_of_emergence(STEPS, np.random.default_rng(seed).permutation(values)) for seed in range(5)]
    assert np.mean(shuffled) < 0.8


def measured(ratios: np.ndarray) -> Any:
    """Return the evidence of a training whose layers (layers, steps) have these largest ratios."""
    runs = {}
    for place, step in enumerate(STEPS[: ratios.shape[1]]):
        rows = [(layer, sequence, ratios[layer, place] * factor) for layer in range(len(ratios))
                for sequence in (0, 1) for factor in (1.0, 0.1 + 0.8 * (place % 2))]  # fmt: skip
        runs[int(step)] = analysis({"massive": pd.DataFrame(rows, columns=["layer", "sequence", "ratio"])})
    evidence = Collection(runs=[runs[0]]).evidence({})["made"]
    (need,) = CLAIMS["MD-1"].needs
    return replace(evidence, studies={need: ClaimStudy((), steps=(runs,))})


def test_layers_in_which_something_emerges_are_fitted() -> None:
    curve = emergence(STEPS / STEPS.max(), 900.0, 0.05, 30.0, 1.0, 40.0)
    estimate = _follows_curve(measured(np.stack([curve, 2 * curve, np.full(len(STEPS), 40.0)])))
    assert estimate.value > 0.999
    assert estimate.note == "2 layers, 12 steps"
    judgment = judge(CLAIMS["MD-1"], measured(np.stack([curve, 2 * curve])))
    assert (judgment.outcome, judgment.tells, judgment.null_passes) == (Outcome.HOLDS, "yes", 0)
    assert judgment.estimates[0].null_high < 0.9
    with pytest.raises(NotDefined, match="in no layer"):
        _follows_curve(measured(np.full((2, len(STEPS)), 40.0)))
    with pytest.raises(Lacks, match="needs 8 steps"):
        _follows_curve(measured(curve[None, :7]))


def hybrid(peaks: Sequence[int], every: int = 4, groups: int = 6) -> Any:
    """Make a hybrid whose token 0 is the sink; in each group its norm peaks at the layer `peaks` of the group."""
    layers = every * groups + 1
    kinds = ["attention" if layer % every == 0 else "linear_attention" for layer in range(layers)]
    norms, mass = [], []
    for layer in range(layers):
        peaks_here = layer % every == peaks[layer // every % len(peaks)]
        for position in range(3):  # the others' norms are largest in the first layer of a group
            norm = (9.0 if peaks_here else 1.0) if position == 0 else 1.0 + (layer % every == 1)
            norms.append((layer, "layer_out", position, norm))
            if layer % every == 0:
                mass.append((layer, position, 0.8 if position == 0 else 0.1))
    tables = {
        "activation": pd.DataFrame(norms, columns=["layer", "site", "position", "norm_mean"]),
        "attention": pd.DataFrame(mass, columns=["layer", "position", "sink_mass"]),
    }
    return analysis(tables, family=family("rotary") | {"kinds": kinds, "causal": True})


def judged_run(run: Any) -> Any:
    return judge(CLAIMS["HY-1"], next(iter(Collection(runs=[run]).evidence({}).values())))


def test_sinks_and_spikes_of_hybrids() -> None:
    aligned = judged_run(hybrid([3]))
    assert aligned.outcome == Outcome.HOLDS
    assert (aligned.estimates[0].value, aligned.estimates[0].null) == (1.0, 0.0)
    assert judged_run(hybrid([1])).outcome == Outcome.FAILS
    assert judged_run(hybrid([1, 3])).estimates[0].value == 0.5
    assert "two layers without full attention" in judged_run(hybrid([1], every=2)).reason
    assert judged_run(analysis({}, family=family("rotary"))).outcome == NOT_APPLIES
