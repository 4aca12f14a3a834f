"""Claims on the steps of a training: when the sink appears, and whether the gradient spike is there ever since.

The interval of several trainings is over these, the seeds; of a single one over its sequences, as of any model.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sinkscope.paper_claims.arms import SINK
from sinkscope.paper_claims.claim import Claim, NotDefined, Part, above, at_least, below
from sinkscope.paper_claims.evidence import MAIN, NULL, Evidence, Lacks
from sinkscope.paper_claims.over_seeds import PERCENT, Ends, mean_of_ratios, study_of, with_setting, words_for
from sinkscope.paper_claims.papers.gs import SPIKE
from sinkscope.paper_claims.quantities import gradients, later_positions, sink_rates
from sinkscope.paper_claims.studies import LoggedStudy, StepStudy
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate, bootstrap, least_of, mean_of_rates, mean_of_runs, positive_jackknife

STEPS, COURSE = "steps", "course"
BEGINNING = 1.0  # percent: fewer sinks are none

Course = Mapping[int, RunData]  # step → run


def _rates(runs: Course) -> tuple[list[int], np.ndarray]:
    """Steps, and (R, steps): the sink rate at position 0 in percent; the same sequences at every step."""
    columns = [sink_rates(Evidence({MAIN: run})) for run in runs.values()]
    return list(runs), np.stack(columns, axis=1)


def _onset(steps: list[int], rates: np.ndarray) -> int | None:
    """The place of the first step with a sink."""
    found = np.flatnonzero(rates[0] > SINK)
    return int(found[0]) if len(found) else None


def _rise(steps: list[int], rates: np.ndarray) -> tuple[np.ndarray, str]:
    onset = _onset(steps, rates)
    words = f"first above {SINK:g} % at step {steps[onset]}" if onset is not None else f"never above {SINK:g} %"
    return rates[:, -1] - rates[:, 0], words


def _first(steps: list[int], rates: np.ndarray) -> tuple[np.ndarray, str]:
    return rates[:, 0], f"step {steps[0]}"


def _over(
    of: Callable[[list[int], np.ndarray], tuple[np.ndarray, str]], ends: Ends | None = None
) -> Callable[[Evidence], Estimate]:
    """The interval is over the sequences of one training that was measured, and else over seeds.

    Args:
        of: Makes (R,) and words of the steps and (R, steps), the sink rates.
        ends: Between which the number is.
    """

    def measure(evidence: Evidence) -> Estimate:
        study = evidence.studies[COURSE]
        if isinstance(study, LoggedStudy):
            found = [of(list(rates), np.array([list(rates.values())])) for rates in study.each]
        else:
            found = [of(*_rates(runs)) for runs in study_of(evidence, COURSE, StepStudy).each]
        words = ", ".join(dict.fromkeys(words for _, words in found))
        if len(found) == 1 and not isinstance(study, LoggedStudy):
            return bootstrap(found[0][0]).over(f"{words}; one training, interval over its sequences")
        seeds, values = with_setting(study, words_for(len(found))), np.array([values[0] for values, _ in found])
        return (mean_of_rates(values, *ends) if ends else mean_of_runs(values)).over(f"{words}; {seeds}")

    return measure


def _gradient_ratios(run: RunData) -> np.ndarray:
    """(1 + groups,): the value gradient at position 0 ÷ later ones."""
    by_position = gradients(Evidence({MAIN: run}), "value").mean(1)
    return by_position[:, 0] / later_positions(by_position).mean(1)


def _least_spike(evidence: Evidence) -> Estimate:
    """Over the steps from the onset on; the null is step 0, else random weights."""
    found = []
    for runs in study_of(evidence, STEPS, StepStudy).each:
        steps, rates = _rates(runs)
        onset = _onset(steps, rates)
        if onset is None:
            raise NotDefined(f"at no step is the sink rate above {SINK:g} %")
        first = runs[0] if steps[0] == 0 and onset > 0 else evidence.runs.get(NULL)
        if first is None:
            raise Lacks(f"step 0, or a run on random weights: sinkscope claims {evidence.model}")
        null = _gradient_ratios(first)[0]
        found.append({step: _gradient_ratios(runs[step]) / null for step in steps[onset:]})
    common = [step for step in found[0] if all(step in each for each in found)]
    if not common:
        raise Lacks("the seeds have no step in common from the onset on")
    if len(found) == 1:
        words, by_step = (
            "one training, interval over its sequences",
            [positive_jackknife(found[0][at]) for at in common],
        )
    else:
        words, by_step = words_for(len(found)), [mean_of_ratios(_at(found, step)) for step in common]
    return least_of(by_step).over(f"steps from the onset on: {len(common)}; {words}")


def _at(found: Sequence[Mapping[int, np.ndarray]], step: int) -> np.ndarray:
    """(seeds,)"""
    return np.array([ratios[step][0] for ratios in found])


CLAIMS = (
    Claim("GS-27", "fig. 2", "The spike is there at every checkpoint.",
        (Part("value-gradient ratio ÷ null, least over steps behind the onset", _least_spike, at_least(SPIKE)),),
        (STEPS,)),
    Claim("W-30", "fig. 4", "The sink appears in training.",
        (Part("rise of the sink rate over steps, in points", _over(_rise), above(SINK)),
         Part("sink rate at the first step, in %", _over(_first, PERCENT), below(BEGINNING))), (COURSE,)),
)  # fmt: skip
