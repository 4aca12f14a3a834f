"""The rehearsal: two of its cases end to end, and what it says of results that are not those on record."""

import json
from math import nan
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from rehearse import RECIPES, RECORD, SIDE, SWEEPS, differences, main, thumbnails

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


CLAIM, OTHER = "made GS-21 0", "made GS-22 0"
RATE, LOSS = "sweep_training made softmax 0 sink_rate", "sweep_training made softmax 0 loss"
GRAY = "80" * SIDE**2
RESULTS: dict[str, Any] = {
    "figures": {"by-layer 0": GRAY}, "numbers": {RATE: 0.2, LOSS: 7.0}, "claims": {CLAIM: 0.5, OTHER: 2.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"claims": {CLAIM: 0.5001, OTHER: 2.0}}, []),  # another machine
        ({"claims": {CLAIM: -0.5, OTHER: 2.0}}, [f"claim {CLAIM}: -0.5, not 0.5"]),
        ({"claims": {CLAIM: nan, OTHER: 2.0}}, ["claim GS-21 has no number", f"claim {CLAIM}: nan, not 0.5"]),
        ({"claims": {CLAIM: 0.5}}, ["claim GS-22 has no number", f"claim {OTHER}: nan, not 2"]),
        ({"claims": "status 1: it failed"}, ["claims: status 1: it failed"]),
        ({"figures": {}}, ["figure by-layer 0 is missing or new"]),
        ({"figures": {"by-layer 0": "80" * (SIDE**2 - 1) + "82"}}, []),
        ({"figures": {"by-layer 0": "84" * SIDE**2}}, ["figure by-layer 0 is drawn otherwise, by 4.0 of 256"]),
        ({"numbers": {RATE: 0.21, LOSS: 7.001}}, []),
        ({"numbers": {RATE: 0.22, LOSS: 7.1}}, [f"number {LOSS}: 7.1, not 7", f"number {RATE}: 0.22, not 0.2"]),
        ({"numbers": {LOSS: 7.0}}, [f"number {RATE}: nan, not 0.2"]),
    ],
)
def test_other_results_are_told(changed: dict[str, Any], expected: list[str]) -> None:
    assert differences(RESULTS | changed, RESULTS, ("GS-21", "GS-22")) == expected


def test_numbers_that_depend_on_few_heads_or_on_rounding_differ_by_more_between_machines() -> None:
    """Costs in 8 bits are small differences, and one head changes a sink rate by a point."""
    for claim, near, far in (("V-18", 0.02, 0.06), ("W-33", 1.0, 3.0)):
        results = [
            {"figures": {}, "numbers": {}, "claims": {f"made {claim} 0": x}} for x in (2.0, 2.0 + near, 2.0 + far)
        ]
        assert differences(results[1], results[0], ()) == []
        assert differences(results[2], results[0], ()) == [f"claim made {claim} 0: {2 + far:g}, not 2"]


def test_a_figure_without_one_of_its_arms_or_with_another_arms_course_is_told(tmp_path: Path) -> None:
    steps = np.linspace(0.0, 1.0, 20)
    courses = {"vanilla": steps, "VGA": steps**2, "IGA": 0.5 + 0 * steps}

    def drawn(name: str, **changed: Any) -> dict[str, str]:
        figure, axes = plt.subplots(figsize=(4, 3))
        for label, course in (courses | changed).items():
            if course is not None:
                axes.plot(steps, course, label=label)
        axes.legend()
        (tmp_path / name / "figures").mkdir(parents=True)
        figure.savefig(tmp_path / name / "figures" / "curves.png")
        plt.close(figure)
        return thumbnails(tmp_path / name)

    def told(**changed: Any) -> list[str]:
        name = str(len(list(tmp_path.iterdir())))
        return differences({"figures": drawn(name, **changed)}, {"figures": before}, ())

    before = drawn("before")
    assert before.keys() == {"curves 0"}
    assert told(VGA=1.001 * steps**2) == []  # another machine
    assert len(told(IGA=None)) == len(told(VGA=1 - steps)) == 1
