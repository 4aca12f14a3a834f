"""recipes/tour.ipynb: its code runs from top to bottom, and its results agree with its text."""

import json
from pathlib import Path
from typing import Any

import pytest

import sinkscope
from sinkscope.models.loading import LoadedModel

TOUR = Path(__file__).parents[1] / "recipes" / "tour.ipynb"


def code_cells() -> list[dict[str, Any]]:
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_committed_tour_was_executed_without_errors() -> None:
    cells = code_cells()
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for output in outputs} <= {"execute_result", "stream"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert TOUR.stat().st_size < 400_000


@pytest.mark.real_model
def test_the_tour_finds_what_it_says(smollm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkscope, "load", lambda: smollm)  # `load` has given the same model
    for name in ("analyze", "intervene"):  # fewer sequences and controls show the same
        own, fewer = getattr(sinkscope, name), {"num_seqs": 3} | ({"draws": 1} if name == "intervene" else {})
        monkeypatch.setattr(sinkscope, name, lambda *args, own=own, fewer=fewer, **given: own(*args, **given | fewer))
    names: dict[str, Any] = {}
    for index, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"{TOUR.name}, code cell {index}", "exec"), names)

    assert (names["layer"], names["coordinate"]) == (11, 507)
    perplexity = names["whole_model"].query("metric == 'perplexity'").groupby(["condition", "arm"])["value"].first()
    before, zero, mean = perplexity["zero", "before"], perplexity["zero", "after"], perplexity["mean", "after"]
    assert zero > 100 * before
    assert mean == pytest.approx(before, rel=0.02)
    assert names["before"] == names["after"] != names["during"]
    natural, random, repeated = names["comparison"].table.loc["sink_rate"]
    assert random == pytest.approx(natural, abs=0.1)
    assert natural > 0.5
    assert repeated == 0
