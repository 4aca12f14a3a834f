"""An unknown name in a result raises InputError with the closest known name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.made_up_runs import made_up, save

from sinkscope.errors import InputError
from sinkscope.output.run import Run
from sinkscope.output.series import Series
from sinkscope.output.trained import Trained
from sinkscope.verdict.scorecard import Scorecard


@pytest.fixture(params=["in memory", "opened"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    made = made_up(layers=2)
    return made if request.param == "in memory" else Run.open(save(made, tmp_path / "run"))


def test_names_in_a_run(run: Run) -> None:
    for ask, message in (
        (lambda: run.metric("sinkrate"), "metric 'sinkrate' is unknown; did you mean 'sink_rate'"),
        (lambda: run.metric("sink_rate", 99), "no layer 99: this run has 0 to 1, and -1 for the whole model"),
        (lambda: run.metric("sink_rate", -2), "no layer -2"),
        (lambda: run.tables["sumary"], "table 'sumary' is unknown; did you mean 'summary'"),
        (lambda: run.at("naturel"), "arm 'naturel' is unknown; did you mean 'natural'"),
    ):
        with pytest.raises(InputError, match=message):
            ask()
    assert run.metric("sink_rate", 1) == run.metric("sink_rate", np.int64(1))
    assert np.isnan(run.metric("compress_slope"))  # the metric was not measured
    assert run.tables.get("sumary") is None
    assert "sumary" not in run.tables
    with pytest.raises(KeyError):
        run.tables["sumary"]


def test_names_in_what_holds_several_runs() -> None:
    run = made_up()
    trained = Trained({"arms": {"vga": {}}}, {"gates": run.tables["summary"]}, folder=Path("out"), runs={"vga": run})
    series = Series({}, {"series": run.tables["summary"]}, runs={512: run})
    card: Any = Scorecard({}, run.tables["summary"].assign(claim="GS-1"), run.tables["summary"])
    for ask, message in (
        (lambda: trained.runs["vgaa"], "arm 'vgaa' is unknown; did you mean 'vga'"),
        (lambda: trained.model("vgaa"), "arm 'vgaa' is unknown; did you mean 'vga'"),
        (lambda: trained.tables["gate"], "table 'gate' is unknown; did you mean 'gates'"),
        (lambda: series.runs[511], "step '511' is unknown; did you mean '512'"),
        (lambda: card.outcome("GS1"), "claim 'GS1' is unknown; did you mean 'GS-1'"),
        (lambda: card.outcome("GS-1", "other"), "model 'other' is unknown"),
    ):
        with pytest.raises(InputError, match=message):
            ask()
