"""Findings from the tables of a run, as data and as a sentence.

Thresholds of claims are defined with the claims (`paper_claims`); all others that decide an outcome are constants here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

# --- thresholds

SINK = 10.0  # percent: a sink rate above this is a sink (W-1)
NO_SINK = 0.01  # a sink rate below this is none
ALMOST_NO_SINK = 0.05  # a layer with a sink rate below this has almost none
STRONG = 0.5  # a layer has the sink when at least this share of its heads has it
MOSTLY = 0.25  # a layer has most later sinks if its rate is at least this share of the largest layer's rate
RARE = 0.01  # tokens with less than this share of the later sinks are not named
FEWEST_QUERIES = 16  # with fewer queries from a position on, a sink there may be a head that reads itself
USUAL = 0.5  # a layer has a massive activation when at least this share of the sequences has it
AT_ONE_POSITION = 0.9  # massive activations are at one position when more than this share of them is
OUTLIER = 2.0  # standard deviations that set position 0's Δ apart (NU §4.2.1)
COARSE_STEP = 2.0  # a quantization step of more median entries than this rounds most of the tensor to zero

SPREAD = 2.0  # standard deviations of the random controls that an intervention's change must exceed
MATERIAL = 0.005  # a rate or mass that changes by less than this has not changed
HALF = 0.5  # a sink, or a cost, of which less than this share is left has mostly gone
COLLAPSE = 10.0  # perplexity multiplied by more than this has collapsed
HARM = 0.05  # a perplexity that changes by more than this share has changed


class Outcome(StrEnum):
    """The outcome of a finding."""

    MEASURED = "measured"  # a number without a threshold
    PRESENT = "present"
    WEAK = "weak"
    ABSENT = "absent"
    RISES = "rises"
    FALLS = "falls"
    UNCHANGED = "unchanged"  # not beyond the random controls
    UNDECIDED = "undecided"  # nothing to decide by
    CONFIRMED = "confirmed"  # a published outcome is found here
    PARTLY = "partly"
    REFUTED = "refuted"


class Published(NamedTuple):
    """A published value to compare with the value of a finding."""

    name: str  # the name of the model
    value: float
    setting: str  # the setting of the measurement
    source: str  # paper and table
    mark: str = ""  # † where it was not taken from the paper itself


@dataclass(frozen=True)
class Finding:
    """One finding."""

    name: str  # its subject, such as "sink"; the key of its rows in the table `finding`
    section: str  # the heading under which it is reported
    outcome: Outcome = Outcome.MEASURED
    value: float = float("nan")  # its main number; NaN if it has none
    spread: float | None = None  # standard deviation of `value` if that is a mean
    threshold: float | None = None  # the number that decided the outcome, if there is one
    published: tuple[Published, ...] = ()  # values to compare with
    numbers: Mapping[str, Any] = field(
        default_factory=dict
    )  # further numbers, layers (tuples), sites and tokens by name
    is_headline: bool = False  # whether it is among the first findings that a reader sees
    low: float = float("nan")  # lower end of the 95 % interval of `value`; NaN if it has none
    high: float = float("nan")
    claim: str = ""  # id of the claim that judges `value`, such as "GS-20"; "" if none
    sentence: str = ""  # the finding in words, with these numbers and no others
