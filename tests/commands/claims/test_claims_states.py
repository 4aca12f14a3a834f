"""Claims on the residual stream, on tables in which each quantity is known."""

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    NO_BOS,
    NOT_APPLIES,
    SEQUENCES,
    analysis,
    by_sequence,
    judged,
)

from sinkscope.results.run import RunData

LAYERS = 12
VALLEY = range(3, 9)  # layers with massive activations


def states(
    valley: float = 0.02,
    rescaled: float = 0.5,
    loose: float = 0.0,
    written: float = 0.97,
    attention: float = 3.0,
    sinks: float = 0.04,
    residual: float = 0.98,
    rotated: float = 0.0,
    others: float = 0.5,
) -> RunData:
    """Return a run with a valley, a secondary sink in each sequence, a residual sink, and a spike in layer 3."""
    inside = np.isin(np.arange(LAYERS), VALLEY)
    entropy = np.where(inside, valley, 0.6 + 0.01 * np.arange(LAYERS))
    columns = {"entropy": entropy, "entropy_rescaled": np.where(inside, rescaled, entropy)}
    columns |= {"anisotropy": np.where(inside, 0.99, 0.3), "anisotropy_bound": np.where(inside, 0.99 - loose, 0.1)}
    sequence = np.arange(SEQUENCES)
    secondary = pd.DataFrame({
        "layer": 4, "sequence": sequence, "position": 9, "kind": "secondary", "lifetime": 2 + sequence % 4,
        "norm": 100.0 + sequence % 4, "written": written, "attention": attention, "attention_elsewhere": 1.0,
    })  # fmt: skip
    massive = by_sequence({"value": inside}, LAYERS).assign(position=0)
    rate = np.isin(np.arange(LAYERS) - 1, VALLEY).astype(float) - 1e-3 * np.arange(LAYERS)
    spikes = pd.DataFrame({"layer": range(LAYERS), "cosine": 1.0, "cosine_of_others": others, "step": ""})
    spikes.loc[3, "step"] = "up"
    tables = {
        "entropy_by_sequence": by_sequence(columns, LAYERS, noise=1e-4),
        "entropy": pd.DataFrame({"layer": range(LAYERS), "entropy": entropy}),
        "massive": massive.assign(is_massive=massive["value"] > 0),
        "attention": pd.DataFrame({"layer": range(LAYERS), "head": 0, "position": 0, "sink_rate": rate}),
        "sink_tokens": secondary,
        "parallel_tokens": by_sequence({"parallel": 0.05 * inside, "sinks": sinks * inside}, LAYERS),
        "spikes_by_sequence": by_sequence({"largest_share": residual, "rotated_share": rotated}, LAYERS),
        "spikes": spikes,
    }
    return analysis(tables, input=NO_BOS)


@pytest.mark.parametrize(
    ("claim", "against"),
    [
        ("CV-1", {"loose": 0.1}),
        ("CV-2", {"valley": 0.5}),
        ("CV-3", {"rescaled": 0.1}),
        ("SS-1", {"written": 0.5}),
        ("SS-3", {"attention": 0.9}),
        ("SS-4", {"sinks": 0.001}),
        ("RS-1", {"residual": 0.3}),
        ("RS-1", {"rotated": 0.95}),
        ("RS-2", {"others": 0.99}),
    ],
)
def test_a_claim_on_states_holds_where_its_number_passes_and_fails_where_not(claim: str, against: dict) -> None:
    assert judged(claim, states()).outcome == HOLDS
    assert judged(claim, states(**against)).outcome == FAILS


def test_the_numbers_of_claims_on_states() -> None:
    valley = judged("CV-2", states()).estimates[0]
    assert valley.value == pytest.approx(0.02 / 0.71, rel=1e-2)  # the largest entropy is the last layer's
    ends = [judged("CV-4", states(valley=entropy)) for entropy in (0.02, 0.9)]
    assert [found.outcome == HOLDS for found in ends] == [True, False]
    assert ends[0].estimates[0].value < 0 < ends[1].estimates[0].value
    assert judged("SS-3", states()).estimates[0].value == pytest.approx(3.0)
    assert judged("SS-2", states()).estimates[0].value == pytest.approx(1.0)
    assert judged("SS-2", states()).outcome in (HOLDS, INCONCLUSIVE)
    assert judged("SS-4", states()).estimates[0].value == pytest.approx(0.8)


def test_claims_on_states_do_not_apply_without_their_objects() -> None:
    run = states()
    run.tables["massive"]["is_massive"] = False  # type: ignore[index]
    without = RunData(run.manifest, {**run.tables, "sink_tokens": run.tables["sink_tokens"].head(0)})
    for claim in ("CV-1", "CV-2", "CV-3", "SS-1", "SS-2", "SS-3"):
        assert judged(claim, without).outcome == NOT_APPLIES, claim
