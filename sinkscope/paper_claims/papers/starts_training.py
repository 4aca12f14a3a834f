"""Claims of When Attention Sink Emerges (WSE §5) on trainings whose blocks begin in other ways."""

from collections.abc import Callable

import numpy as np

from sinkscope.paper_claims.arms import SINK
from sinkscope.paper_claims.claim import Claim, Part, above
from sinkscope.paper_claims.evidence import Evidence, Lacks, table_of
from sinkscope.paper_claims.over_seeds import Measure, by_level, common_seeds, mean_of_percent, study_of, with_a_sink
from sinkscope.paper_claims.studies import FactorStudy
from sinkscope.results.papers import published
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate, least_of, mean_of_runs

RANDOM, FIXED = "factor:random-tokens", "factor:fixed-position"


def rate_at(run: RunData, position: int) -> float:
    """S_k in percent. Raises Lacks where the run does not report the position."""
    table = table_of(run, "attention_by_sequence")
    rows = table[table["position"] == position]
    if rows.empty:
        raise Lacks(f"a run reports {position} positions or fewer: --positions {position + 1}")
    return 100 * float(rows["sink_rate"].mean())


def _rates(study: FactorStudy, level: int, position: int) -> np.ndarray:
    """(seeds,): S_k of the trainings at one level. Raises Lacks where there is none."""
    if level not in study.by_level:
        raise Lacks(f"no training has {level} random tokens at the beginning of its blocks")
    return np.array([rate_at(study.by_level[level][seed], position) for seed in common_seeds(study)])


def _one_random(evidence: Evidence) -> Estimate:
    study = study_of(evidence, RANDOM, FactorStudy)
    rates = with_a_sink(np.stack([_rates(study, level, 0) for level in (0, 1)], axis=1))
    return mean_of_runs(rates[:, 1] - rates[:, 0]).over(by_level(study, (0, 1), rates))


def _two_random(evidence: Evidence) -> Estimate:
    study = study_of(evidence, RANDOM, FactorStudy)
    rates = with_a_sink(np.stack([_rates(study, 2, position) for position in (0, 1)], axis=1))
    return mean_of_runs(rates[:, 1] - rates[:, 0]).over(by_level(study, ("S₀", "S₁"), rates))


def _at_fixed(of: Callable[[RunData, int], float], mean: Callable[[np.ndarray], Estimate]) -> Measure:
    """The smallest over levels of a number of each run and the position k of its fixed token; `mean`: over seeds."""

    def measure(evidence: Evidence) -> Estimate:
        study = study_of(evidence, FIXED, FactorStudy)
        seeds, levels = common_seeds(study), study.by_level
        found = np.array([[of(runs[seed], int(level)) for level, runs in levels.items()] for seed in seeds])
        return least_of([mean(each) for each in found.T]).over(by_level(study, levels, found))

    return measure


def _above_others(run: RunData, position: int) -> float:
    """S_k less the largest sink rate in percent at another position that the run reports."""
    table = table_of(run, "attention_by_sequence")
    others = table[table["position"] != position].groupby("position")["sink_rate"].mean()
    return rate_at(run, position) - 100 * float(others.max())


CLAIMS = (
    Claim("W-35", "§5", "A random first token gives more sink.",
        (Part("sink rate, first token random − plain, in points", _one_random, above(0.0)),), (RANDOM,),
        published=published("WSE §5", {"difference": 8.85}, "60M model: 27.03 against 18.18 %"), is_ours=False),
    Claim("W-36", "§5", "Two random first tokens move the sink to the second.",
        (Part("S₁ − S₀ in points, two tokens random", _two_random, above(0.0)),), (RANDOM,),
        published=published("WSE §5", {"difference": 12.10}, "60M model: S₀ 1.98, S₁ 14.08 %"), is_ours=False),
    Claim("W-37", "table 10", "A fixed token at position k makes k the sink.",
        (Part("S_k in %, k with the least", _at_fixed(rate_at, mean_of_percent), above(SINK)),
         Part("S_k − the largest elsewhere in points, k with the least", _at_fixed(_above_others, mean_of_runs),
            above(0.0))),
        (FIXED,),
        published=published("WSE table 10", {"k = 0": 74.11, "k = 1": 69.03, "k = 2": 69.64})),
)  # fmt: skip
