"""The five numbers that a reader sees first."""

from pathlib import Path

import pytest

from sinkscope.results.manifest import read_manifest
from sinkscope.results.run import RunData
from sinkscope.results.tables import read_table
from sinkscope.verdict.at_a_glance import GLANCES, REPORTED, glances

REPORTS = Path(__file__).parents[2] / "reports"


@pytest.mark.parametrize("model", REPORTED)
def test_the_numbers_of_other_models_are_those_of_their_reports(model: str) -> None:
    folder = REPORTS / REPORTED[model]
    run = RunData(read_manifest(folder, None), {"summary": read_table(folder / "tables/summary.parquet")}, folder)
    assert [glance.metric for glance in glances(run)] == list(GLANCES)
    assert all("Among" in glance.elsewhere for glance in glances(run))
    assert all(f"{model} {glance.value}" in glance.elsewhere for glance in glances(run))


def test_a_number_above_all_others_says_so() -> None:
    folder = REPORTS / "smollm2-135m"
    summary = read_table(folder / "tables/summary.parquet")
    summary.loc[(summary["layer"] == -1) & (summary["metric"] == "sink_rate"), "value"] = 0.95
    first = next(glances(RunData(read_manifest(folder, None), {"summary": summary}, folder)))
    assert first.value == "95.0%"
    assert first.elsewhere.startswith("Above ")
    assert first.null.startswith("Uniform attention gives ")
    assert first.null.endswith(" 0%.")


def test_numbers_far_from_one_are_written_out() -> None:
    folder = REPORTS / "smollm2-135m"
    summary = read_table(folder / "tables/summary.parquet")
    summary.loc[(summary["layer"] == -1) & (summary["metric"] == "max_inf_norm"), "value"] = 0.15
    largest = list(glances(RunData(read_manifest(folder, None), {"summary": summary}, folder)))[1]
    assert largest.null == "float16 holds 436,693 times that; below 1, it overflows."
