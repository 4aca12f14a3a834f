"""Claims of When Attention Sink Emerges (WSE §4 to §7) on plain trainings that differ in one setting."""

from collections.abc import Callable

import numpy as np

from sinkscope.paper_claims.arms import SINK
from sinkscope.paper_claims.claim import Claim, Part, above, at_most, below
from sinkscope.paper_claims.evidence import Evidence, Lacks
from sinkscope.paper_claims.over_seeds import (
    PERCENT,
    Ends,
    Measure,
    largest_rate,
    over_levels,
    range_of_rates,
    slope,
    study_of,
)
from sinkscope.paper_claims.studies import FactorStudy
from sinkscope.results.papers import published
from sinkscope.results.statistics import Estimate

RATE, RATE_AND_STEPS, BATCH, DATA = (
    f"factor:{name}" for name in ("learning-rate", "learning-rate-and-steps", "batch-size", "data")
)
DECAY, WINDOW, FEED_FORWARD, HEADS = (f"factor:{name}" for name in ("weight-decay", "window", "feed-forward", "heads"))
GOOD_DECAYS, LARGE_DECAY = (0.1, 2.0), 5.0

Numbers = Callable[[np.ndarray, np.ndarray], np.ndarray | Estimate]


def _at(place: int) -> Numbers:
    """(seeds,): the sink rate at the lowest (0) or the highest level (−1)."""
    return lambda levels, rates: rates[:, place]


def _rise(levels: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """(seeds,): from the lowest to the highest level."""
    return rates[:, -1] - rates[:, 0]


def _at_large_decay(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    return largest_rate(levels, _among(levels >= LARGE_DECAY, rates, f"weight decays of {LARGE_DECAY:g} or more"))


def _best_decay(levels: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """(seeds,): the highest sink rate at weight decays that the paper found best − at all others.

    Which decays these are is found on the other seeds: the largest of several levels of the same seed would exceed the
    largest of fewer by chance alone, where all are alike.
    """
    good = (levels >= GOOD_DECAYS[0]) & (levels <= GOOD_DECAYS[1])
    inside = _among(good, rates, f"weight decays from {GOOD_DECAYS[0]:g} to {GOOD_DECAYS[1]:g}")
    return _highest_elsewhere(inside) - _highest_elsewhere(_among(~good, rates, "other weight decays"))


def _highest_elsewhere(rates: np.ndarray) -> np.ndarray:
    """(seeds,): each seed's rate at the level (seeds, levels) that is highest on average over the other seeds; over
    itself where it is the only one.
    """
    others = rates.sum(0) - rates if len(rates) > 1 else rates
    return np.take_along_axis(rates, others.argmax(1)[:, None], 1)[:, 0]


def _over_windows(of: Numbers, ends: Ends | None = None) -> Measure:
    """As `over_levels`. Raises Lacks where a window is shorter than what the sink rate is averaged over: queries that
    do not see the first token count as those that do not attend to it.
    """
    measure = over_levels(WINDOW, of, ends)

    def within(evidence: Evidence) -> Estimate:
        by_level = study_of(evidence, WINDOW, FactorStudy).by_level
        smallest = min(map(float, by_level))
        counted = max(run.manifest["config"]["window"] for runs in by_level.values() for run in runs.values())
        if smallest < counted:
            raise Lacks(
                f"the sink rate is an average over {counted} queries, of which a sliding window of {smallest:g} tokens "
                f"lets only the first {smallest:g} see the first token: --window {smallest:g}"
            )
        return measure(evidence)

    return within


def _among(chosen: np.ndarray, rates: np.ndarray, what: str) -> np.ndarray:
    if not chosen.any():
        raise Lacks(f"no training has {what}: sinkscope train --weight-decay W")
    return rates[:, chosen]


POINTS = "slope of the sink rate on log₂ of the learning rate, in points"
RANGE = "largest difference of two levels, in points"

CLAIMS = (
    Claim("W-31", "table 9", "More sink with a larger learning rate, equal steps.",
        (Part(POINTS, over_levels(RATE, slope), above(0.0)),), (RATE,),
        published=published("WSE table 9", {"slope": 9.50},
            "60M model: 2.90, 11.21, 18.18, 32.23 % at 1e-4, 2e-4, 4e-4, 8e-4"), is_ours=False),
    Claim("W-32", "table 9", "More sink with a larger learning rate, equal rate × steps.",
        (Part(POINTS, over_levels(RATE_AND_STEPS, slope), above(0.0)),), (RATE_AND_STEPS,),
        published=published("WSE table 9", {"slope": 5.28},
            "60M model: 6.29, 16.81, 18.18, 23.44 % at 1e-4, 2e-4, 4e-4, 8e-4"), is_ours=False),
    Claim("W-33", "table 10", "The batch size hardly matters.",
        (Part(f"{RANGE}, equal steps", over_levels(BATCH, range_of_rates), at_most(3.0)),), (BATCH,),
        published=published("WSE table 10", {"range": 1.99},
            "60M model: 16.45, 17.19, 18.18, 16.19 % at 0.25, 0.5, 1, 2 M tokens", "†")),
    Claim("W-34", "fig. 28", "With little data there is no sink.",
        (Part("sink rate in %, least data", over_levels(DATA, _at(0), PERCENT), below(1.0)),
         Part("most data", over_levels(DATA, _at(-1), PERCENT), above(SINK))), (DATA,)),
    Claim("W-38", "table 2", "Most sink at a weight decay of 0.1 to 2, none at 5.",
        (Part("sink rate in % at 5 and more", over_levels(DECAY, _at_large_decay), below(1.0)),
         Part("best from 0.1 to 2 − best of all others, in points", over_levels(DECAY, _best_decay), above(0.0))),
        (DECAY,),
        published=published("WSE table 2", {"at 5": 0.01},
            "60M model: 15.20, 15.39, 15.23, 18.18, 41.08, 37.71, 6.13 % at 0, 0.001, 0.01, 0.1, 0.5, 1, 2")),
    Claim("W-40", "fig. 6", "A small window has no sink, a large one has.",
        (Part("sink rate in %, smallest window", _over_windows(_at(0), PERCENT), below(1.0)),
         Part("rise to the largest, in points", _over_windows(_rise), above(SINK))), (WINDOW,)),
    Claim("W-45", "table 11", "The feed-forward design hardly matters.",
        (Part(RANGE, over_levels(FEED_FORWARD, range_of_rates), at_most(5.0)),), (FEED_FORWARD,),
        published=published("WSE table 11", {"range": 4.30},
            "60M model: SwiGLU 18.18, GeGLU 17.86, ReGLU 13.88, ReLU 16.90, GeLU 14.76, Swish 17.89 %", "†")),
    Claim("W-46", "table 12", "Nor does the number of heads.",
        (Part(RANGE, over_levels(HEADS, range_of_rates), at_most(10.0)),), (HEADS,),
        published=published("WSE table 12", {"range": 8.82},
            "60M model: 18.18, 10.68, 12.95, 19.50 % with 8, 4, 2, 1 heads, 21.76 % with 8 that are summed", "†")),
)  # fmt: skip
