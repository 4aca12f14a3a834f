"""The numbers that a reader sees first."""

from pathlib import Path

import pytest

from sinkscope.results.manifest import read_manifest
from sinkscope.results.run import RunData
from sinkscope.results.tables import read_table
from sinkscope.verdict.at_a_glance import GLANCES, REPORTED, Glance, glances

REPORTS = Path(__file__).parents[2] / "reports"


def glances_of(report: str, **changes: float) -> dict[str, Glance]:
    """Return the numbers of a report by metric; `changes` replace values of the whole model."""
    folder = REPORTS / report
    summary = read_table(folder / "tables/summary.parquet")
    for metric, value in changes.items():
        summary.loc[(summary["layer"] == -1) & (summary["metric"] == metric), "value"] = value
    return {one.metric: one for one in glances(RunData(read_manifest(folder, None), {"summary": summary}, folder))}


@pytest.mark.parametrize("model", REPORTED)
def test_the_numbers_of_other_models_are_those_of_their_reports(model: str) -> None:
    by_metric = glances_of(REPORTED[model])
    assert list(by_metric) == list(GLANCES)
    assert all("Among" in one.elsewhere and f"{model} {one.value}" in one.elsewhere for one in by_metric.values())


def test_a_number_far_from_all_others_says_so() -> None:
    by_metric = glances_of("smollm2-135m", sink_rate=0.95, max_inf_norm=0.15)
    assert by_metric["sink_rate"].value == "95.0%"
    assert by_metric["sink_rate"].elsewhere.startswith("Above ")
    assert by_metric["sink_rate"].null.startswith("Uniform attention gives ")
    assert by_metric["sink_rate"].null.endswith(" 0%.")
    assert by_metric["max_inf_norm"].elsewhere.startswith("Below ")
    assert by_metric["max_inf_norm"].null == "float16 holds 436,693 times that; below 1, it would be infinite."


def test_a_number_that_reports_lack_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.verdict.at_a_glance._reported", lambda: {"a model": {"max_inf_norm": 3.0}})
    rows = glances_of("smollm2-135m")
    assert rows["sink_rate"].elsewhere == "" != rows["max_inf_norm"].elsewhere
