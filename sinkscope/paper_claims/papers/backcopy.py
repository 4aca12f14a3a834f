"""Claims of Value-State Gated Attention (VGA) on the Bigram-Backcopy lab: plain, VGA and IGA, by step (figures 4 to 6).

All numbers are of queries that are no triggers, in the layer in which the plain arm's attention goes most to <s>.
"""

from collections.abc import Callable

import pandas as pd
from scipy import stats

from sinkscope.paper_claims.claim import Claim, Part, Test, above, at_least, at_most, below
from sinkscope.paper_claims.over_seeds import OfArm, correlation, difference, of_one, ratio
from sinkscope.paper_claims.trainings import PLAIN, Arm
from sinkscope.training.tables import sinking_layer

GATE, INPUT_GATE = "vga", "iga"
ALONE = f"backcopy:{PLAIN}"
BOTH = f"backcopy:{PLAIN},{GATE}"
ALL = f"backcopy:{PLAIN},{GATE},{INPUT_GATE}"
COST = 0.02  # nats: a risk that differs by less is the same

Course = Callable[[Arm], pd.Series]  # step → value


def _recorded(name: str) -> Course:
    def of(arm: Arm) -> pd.Series:
        table = arm.training.tables["training"]
        label = next(other.label for other in arm.training.arms if other.method == PLAIN)
        plain = table[table["condition"] == label]
        return arm.by_step(name, sinking_layer(plain))

    return of


ATTENTION, LOGIT = _recorded("early_attention_to_start"), _recorded("delta_logit")


def _value(arm: Arm) -> pd.Series:
    """The projected value of <s> ÷ of tokens that are no triggers."""
    return _recorded("start_value_norm")(arm) / _recorded("other_value_norm")(arm)


def _at_end(course: Course) -> OfArm:
    return lambda arm: float(course(arm).iloc[-1])


def _since_start(course: Course) -> OfArm:
    return lambda arm: float(course(arm).iloc[-1] - course(arm).iloc[0])


def _range(course: Course) -> OfArm:
    return lambda arm: float(course(arm).max() - course(arm).min())


def _risk(name: str) -> OfArm:
    return lambda arm: float(arm.by_step(name).iloc[-1])


def _cycle(arm: Arm) -> float:
    return float(stats.spearmanr(ATTENTION(arm), _value(arm))[0])


def _trend(arm: Arm) -> float:
    course = LOGIT(arm)
    return float(stats.spearmanr(course.index, course)[0])


def _claim(id: str, reference: str, statement: str, role: str, *parts: tuple) -> Claim:
    return Claim(id, reference, statement, tuple(Part(*part) for part in parts), (role,))


BEFORE_TRIGGERS = "attention on <s> before any trigger"
DRAIN = "‖v of <s>‖ ÷ others"
NOT_MORE: Test = at_most(COST)

CLAIMS = (
    _claim("V-4", "fig. 4", "The plain lab model sinks.", ALONE,
        (BEFORE_TRIGGERS, of_one(ALONE, _at_end(ATTENTION), PLAIN, ends=(0.0, 1.0)), at_least(0.5))),
    _claim("V-5", "fig. 4", "And drains.", ALONE, (DRAIN, of_one(ALONE, _at_end(_value), PLAIN), at_most(0.5))),
    _claim("V-6", "fig. 4", "VGA has no sink.", BOTH,
        (f"{BEFORE_TRIGGERS}, VGA − untrained", of_one(BOTH, _since_start(ATTENTION), GATE, PLAIN), at_most(0.0))),
    _claim("V-7", "fig. 4", "VGA has no drain.", BOTH,
        (DRAIN, of_one(BOTH, _at_end(_value), GATE, PLAIN), at_least(0.8))),
    _claim("V-8", "fig. 5", "The plain model runs a cycle.", ALONE,
        ("rank correlation of attention and value norm over steps", correlation(ALONE, _cycle, PLAIN), below(0.0)),
        ("rank correlation of Δlogit and the step", correlation(ALONE, _trend, PLAIN), above(0.0))),
    _claim("V-9", "fig. 5", "VGA is stable.", BOTH,
        ("range of the attention over steps, VGA ÷ plain", ratio(BOTH, _range(ATTENTION), GATE), below(0.5)),
        ("of the value norm", ratio(BOTH, _range(_value), GATE), below(0.5)),
        ("of Δlogit", ratio(BOTH, _range(LOGIT), GATE), below(0.5))),
    _claim("V-10", "fig. 5", "VGA learns as well.", BOTH,
        ("backcopy risk, VGA − plain, in nats", difference(BOTH, _risk("backcopy_risk"), GATE), NOT_MORE),
        ("of bigrams", difference(BOTH, _risk("bigram_risk"), GATE), NOT_MORE)),
    _claim("V-11", "fig. 6", "IGA stands between.", ALL,
        (f"{BEFORE_TRIGGERS}, plain − IGA", difference(ALL, _at_end(ATTENTION), PLAIN, INPUT_GATE), above(0.0)),
        ("IGA − VGA", difference(ALL, _at_end(ATTENTION), INPUT_GATE, GATE), above(0.0))),
)  # fmt: skip
