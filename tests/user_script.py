"""A user's script, which `make check` type-checks: the public functions have real types. It is not run."""

from pathlib import Path
from typing import assert_type

import pandas as pd

import sinkscope
from sinkscope.figures.style import Figure
from sinkscope.output.comparison import Comparison
from sinkscope.output.curves import Curves
from sinkscope.output.side_by_side import Routes
from sinkscope.output.trained import Trained


def user_script(folder: Path) -> None:
    run = sinkscope.analyze("org/model", num_seqs=4, out=folder)
    assert_type(run, sinkscope.Run)
    assert_type(run.metric("sink_rate"), float)
    assert_type(run.tables["attention"], pd.DataFrame)
    assert_type(run.figure("sink-map"), Figure)
    assert_type(run.verdict, str)
    assert_type(sinkscope.Run.open(folder), sinkscope.Run)
    changed = sinkscope.intervene("org/model", "mask-sink", draws=2)
    assert_type(changed.at("mask-sink"), sinkscope.Run)
    assert_type(sinkscope.quantize("org/model"), sinkscope.Run)
    assert_type(sinkscope.compare(run, changed.at("before")), Comparison | Routes | sinkscope.Scorecard | Curves)
    assert_type(sinkscope.retrofit("org/model", "vga,none", out=folder), Trained)
    assert_type(sinkscope.train("tiny-llama", out=folder).model("none"), Path)
    assert_type(sinkscope.analyze_steps(folder), sinkscope.Series)
    with sinkscope.watch(sinkscope.load("org/model").model) as seen:
        assert_type(seen.sink_rate, float)
    with sinkscope.intervening(sinkscope.load("org/model").model, "mask-sink"):
        pass
