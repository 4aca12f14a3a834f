"""The rehearsal: two of its cases end to end, and what it says of results that are not those on record."""

import json
from pathlib import Path
from typing import Any

import pytest
from rehearse import RECIPES, RECORD, SWEEPS, differences, main

ON_RECORD = json.loads(RECORD.read_text(encoding="utf-8"))
SMALL = ("when-sinks-emerge-60m", "not-universal-figure-6")  # a training that is killed and resumed; a model of the hub


def test_what_is_on_record_has_all_claims() -> None:
    assert ON_RECORD.keys() == {*SWEEPS, *RECIPES}
    for name, results in ON_RECORD.items():
        claims = RECIPES[name].claims if name in RECIPES else SWEEPS[name]
        assert differences(results, results, claims) == []


@pytest.mark.slow
def test_small_rehearsals_end_as_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(Path("build"), list(SMALL), record=False) == 0
    assert capsys.readouterr().out.count(": done (") == 2


CLAIM = "made GS-21 0"
RESULTS: dict[str, Any] = {"figures": ["by-layer", "retrofit-layers"], "claims": {CLAIM: 0.5, "made GS-22 0": 2.0}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"claims": {CLAIM: 0.5001, "made GS-22 0": 2.0}}, []),  # another machine
        ({"claims": {CLAIM: -0.5, "made GS-22 0": 2.0}}, [f"claim {CLAIM}: -0.5, not 0.5"]),
        ({"claims": {CLAIM: float("nan"), "made GS-22 0": 2.0}}, [f"claim {CLAIM}: nan, not 0.5"]),
        ({"claims": {CLAIM: 0.5}}, ["claim GS-22 is not measured", "claim made GS-22 0: nan, not 2"]),
        ({"claims": "status 1: it failed"}, ["claims: status 1: it failed"]),
        ({"figures": ["by-layer"]}, ["figure retrofit-layers"]),
    ],
)
def test_other_results_are_told(changed: dict[str, Any], expected: list[str]) -> None:
    assert differences(RESULTS | changed, RESULTS, ("GS-21", "GS-22")) == expected


def test_costs_of_8_bits_differ_by_more_between_machines() -> None:
    costs = [{"figures": [], "claims": {"made V-18 0": cost}} for cost in (0.02, 0.04, 0.06)]
    assert differences(costs[1], costs[0], ()) == []
    assert differences(costs[2], costs[0], ()) == ["claim made V-18 0: 0.06, not 0.02"]
