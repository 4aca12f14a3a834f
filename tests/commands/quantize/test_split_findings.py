"""The answers of `quantize --prefix`, from hand-made tables."""

import pytest
from support.made_up_runs import run_manifest, split_table

from sinkscope import Run
from sinkscope.commands.quantize import split_findings as quantization_split
from sinkscope.results.findings import Finding, Outcome

SHARES = {"tokens": 0.2, "coordinates": 0.1, "both": 0.3, "prefix": 0.6}
RANDOM = {"tokens": [0.0, 0.05], "coordinates": [0.0], "prefix": [0.0] * 20}


def found(shares: dict[str, float], random: dict[str, list[float]] | None = None, cost: float = 1.0) -> list[Finding]:
    given = {"prefix": [5], "prefix_text": "a", "without_cache": "", "without_rotation": "why not"}
    table = split_table(SHARES | shares, RANDOM | (random or {}), cost)
    return quantization_split.findings(
        Run(run_manifest(command="quantize", quantization=given), {"quantization_split": table})
    )


@pytest.mark.parametrize(
    ("shares", "random", "outcome", "answer"),
    [
        ({}, {}, Outcome.ABSENT, "most of it is in neither."),
        ({"tokens": 0.7, "both": 0.8}, {}, Outcome.PRESENT, "is in few tokens."),
        ({"tokens": 0.55, "both": 0.8}, {}, Outcome.PARTLY, "both together"),  # its interval begins at 0.45
        ({"tokens": 0.7, "both": 0.5}, {"tokens": [0.8]}, Outcome.UNDECIDED, "do not decide"),  # as random tokens
        ({"coordinates": 0.7}, {}, Outcome.PRESENT, "is in few coordinates."),
        ({"tokens": 0.7, "coordinates": 0.7}, {}, Outcome.PRESENT, "either of them alone"),
    ],
)
def test_where_most_of_the_cost_is(
    shares: dict[str, float], random: dict[str, list[float]], outcome: Outcome, answer: str
) -> None:
    split = found(shares, random)[0]
    assert (split.outcome, answer in split.sentence) == (outcome, True)
    assert "random tokens 0% to 5%" in split.sentence or "tokens" in random


@pytest.mark.parametrize(
    ("share", "random", "outcome", "words"),
    [
        (0.6, [0.0] * 20, Outcome.CONFIRMED, "helps, and more than 20 of 20 random ones"),
        (0.6, [0.7] + [0.0] * 19, Outcome.PARTLY, "random ones may help as much: 1 of 20"),
        (0.6, [0.0] * 10, Outcome.PARTLY, "0 of 10"),  # too few to tell
        (0.05, [0.0] * 20, Outcome.ABSENT, "is not shown to help"),
        (-0.3, [0.0] * 20, Outcome.ABSENT, "does not help"),
    ],
)
def test_a_prefix_against_random_ones(share: float, random: list[float], outcome: Outcome, words: str) -> None:
    _, prefix, *_ = found({"prefix": share}, {"prefix": random})
    assert (prefix.outcome, words in prefix.sentence) == (outcome, True)


def test_nothing_is_split_where_nothing_is_lost() -> None:
    split, *_, rotation = found({}, cost=0.005)
    assert split.outcome == Outcome.ABSENT
    assert split.sentence.endswith("too little to split.")
    assert rotation.sentence == "The residual stream was not rotated: why not."
