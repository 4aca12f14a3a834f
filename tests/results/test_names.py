"""An unknown name in a result raises InputError with the closest known name."""

from pathlib import Path

import numpy as np
import pytest
from support.made_up_runs import made_up, save

from sinkscope.errors import InputError
from sinkscope.output.run import Run


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
