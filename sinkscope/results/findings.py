"""Findings from the tables of a run, as data and as a sentence.

Thresholds of claims are defined with the claims (`commands/claims/`); all other thresholds are constants here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from sinkscope.results.tables import Column

# --- the table
FINDING = "finding"
FINDING_COLUMNS = (
    Column("finding", "subject of the finding", kind="text"),
    Column("number", "name of the number: value, or another; a list has a row for each entry", kind="text"),
    Column("value", "the number"),
    Column("low", "lower end of its 95 % interval; NaN without one"),
    Column("high", "upper end"),
    Column("threshold", "threshold that decided the outcome; NaN without one"),
    Column("outcome", "outcome of the finding", kind="text"),
    Column("claim", "id of the claim with this number (`sinkscope list claims`); empty without one", kind="text"),
    Column("null", "the number without the effect; NaN without one"),
)  # fmt: skip
FINDING_TABLES = {FINDING: FINDING_COLUMNS}

# --- thresholds

SINK = 10.0  # percent: a sink rate above this is a sink (W-1)
NO_SINK = 0.01  # a sink rate below this counts as no sink
ALMOST_NO_SINK = 0.05  # a layer with a sink rate below this has almost no sink
STRONG = 0.5  # a layer has the sink when at least this share of its heads has it
MOSTLY = 0.25  # a layer has most later sinks if its rate is at least this share of the largest layer's rate
RARE = 0.01  # tokens with less than this share of the later sinks are not named
FEWEST_QUERIES = 16  # with fewer queries from a position on, a sink may be a head whose tokens attend to themselves
USUAL = 0.5  # a layer has a massive activation when at least this share of the sequences has it
AT_ONE_POSITION = 0.9  # massive activations are at one position when more than this share of them is there
OUTLIER = 2.0  # standard deviations by which Δ at position 0 must exceed later ones (NU §4.2.1)
COARSE_STEP = 2.0  # a quantization step of more median entries than this rounds most of the tensor to zero
LARGEST_FLOAT16 = 65504.0  # the largest finite number of float16
FLOAT8_COST = 0.1  # nats per token: scaled float8 that costs at least this (perplexity × 1.11) fails
HEADROOM = 2.0  # a dtype is safe where its largest number is this many times the largest measured one

SPREAD = 2.0  # standard deviations of the random controls that an intervention's change must exceed
MATERIAL = 0.005  # a rate or mass that changes by less than this has not changed
HALF = 0.5  # a sink or a cost has mostly gone when less than this share of it is left
COLLAPSE = 10.0  # the model has collapsed when perplexity is multiplied by more than this
SMALL_RATIO = 1.02  # a plan for the cache keeps perplexity when it is multiplied by at most this
KEPT_RETRIEVAL = 0.9  # … and keeps retrieval when at least this share of it is left
GIVING_HALF = 0.9  # a head has a sink when at least this share of its queries give a key half (2606.08105) …
NO_OP = 0.2  # … which is a no-op when the norm of the key's value is at most this many times the mean of the others …
BROADCAST = 0.5  # … or a broadcast when it is at least this many times …
ONE_VECTOR = 1.5  # … and the outputs have at most this stable rank
CLOSED = 0.1  # a gate below this is closed
PHI = 20.0  # a visual token with φ above this is a visual sink (Kang et al. 2025) …
AFTER_LAYER = 2  # … in layers from this on
VISUAL = 0.2  # a head sees the picture when it gives visual tokens at least this mass …
ON_SINKS = 0.5  # … and at most this share of it to visual sinks
HIGH_NORM = 3.0  # a patch is an outlier when its norm is this many times the median patch's in its layer
HARM = 0.05  # perplexity has changed when it changes by more than this share


class Outcome(StrEnum):
    """The outcome of a finding, or of a claim on one model."""

    MEASURED = "measured"  # a number without a threshold
    PRESENT = "present"
    WEAK = "weak"
    ABSENT = "absent"
    RISES = "rises"
    FALLS = "falls"
    UNCHANGED = "unchanged"  # changes no more than under the random controls
    UNDECIDED = "undecided"  # the data do not decide
    UNDEFINED = "undefined"  # there is no such number on these data
    CONFIRMED = "confirmed"  # the model shows the published outcome
    PARTLY = "partly"
    REFUTED = "refuted"
    # of a claim, and of each of its numbers
    HOLDS = "holds"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"  # the interval spans the threshold
    NOT_ENOUGH_SEEDS = "not enough seeds"  # inconclusive even if the claim is true
    DOES_NOT_APPLY = "does not apply"
    NOT_MEASURED = "not measured"


class Published(NamedTuple):
    """A published value to compare with the value of a finding."""

    name: str  # the name of the model
    value: float
    setting: str  # the setting of the measurement
    source: str  # paper and table
    mark: str = ""  # † for a value that was not taken from the paper itself


@dataclass(frozen=True)
class Finding:
    """A finding, with its outcome, its numbers and its sentence."""

    name: str  # its subject, such as "sink"; the key of its rows in the table `finding`
    section: str  # the heading under which it is reported
    outcome: Outcome = Outcome.MEASURED
    value: float = float("nan")  # its main number; NaN if it has none
    spread: float | None = None  # standard deviation of `value` if that is a mean
    null: float = float("nan")  # `value` without the effect; NaN if it has none
    threshold: float | None = None  # the number that decided the outcome, if there is one
    published: tuple[Published, ...] = ()  # published values to compare with
    numbers: Mapping[str, Any] = field(default_factory=dict)  # by name: more numbers, layers (tuples), sites and tokens
    is_headline: bool = False  # whether it is listed at the top of the verdict
    low: float = float("nan")  # lower end of the 95 % interval of `value`; NaN if it has none
    high: float = float("nan")
    claim: str = ""  # id of the claim that judges `value`, such as "GS-20"; "" if there is none
    sentence: str = ""  # the finding in words, with no other numbers than these
