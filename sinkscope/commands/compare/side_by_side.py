"""`compare` for every kind of folder: analyses by metrics, interventions by routes, scorecards by claims, runs of
`quantize` by cost.

No model is loaded.

OUT/run.json                             the names of the runs, and the settings in which they differ
OUT/tables/comparison.parquet            analyses: a row for each metric of the whole model, a column for each run
OUT/tables/comparison_by_layer.parquet   the same metrics by layer, a row for each value
OUT/tables/comparison_by_head.parquet    two analyses with --by head: a row for each head and metric
OUT/tables/differing_heads.parquet       the same: how many heads differ, and how many between halves of one run's texts
OUT/tables/comparison_by_scheme.parquet  two runs of `quantize`: a row for each scheme and part
OUT/tables/route.parquet                 interventions and scorecards: a row for each route of a model
OUT/tables/claim.parquet                 scorecards: a row for each number of a claim
OUT/tables/training.parquet              trainings: a row for each metric, layer and step
OUT/figures/*.png|pdf
OUT/formats.md, OUT/routes.md, OUT/scorecard.md, OUT/curves.md
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sinkscope.commands.compare.options import CompareOptions
from sinkscope.errors import InputError
from sinkscope.options.option import split_all_names
from sinkscope.options.register import records
from sinkscope.options.signatures import spelled_for_python
from sinkscope.output.comparison import compared
from sinkscope.output.result import Result, written
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import CALLBACK_TRAINING, RUNS, folder_of, read_manifest
from sinkscope.results.tables import blaming_tables

if TYPE_CHECKING:
    from sinkscope.commands.claims.routes import Routes
    from sinkscope.commands.claims.scorecard import Scorecard
    from sinkscope.commands.compare.curves import Curves
    from sinkscope.commands.quantize.format_comparison import FormatComparison
    from sinkscope.output.comparison import Comparison

Given = Result | str | os.PathLike[str]


@spelled_for_python(CompareOptions)
def compare(
    *runs: Given | list[Given] | tuple[Given, ...],
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    page: bool = True,
    metrics: str | Sequence[str] = (),
    by: Literal["head"] | None = None,
) -> "Comparison | FormatComparison | Routes | Scorecard | Curves":
    """Put folders of one kind side by side; with `out`, also write tables and figures there.

    Args:
        *runs: Runs of `analyze`, of `intervene`, two of `quantize`, or scorecards, or their folders, or folders that
            `SinkCallback` wrote: all of one kind, one by one or in lists. One folder of `SinkCallback` is enough.
        out: The folder to write.
        overwrite: Replace an earlier comparison in `out`.
        page: With `out`, also write index.html.
        metrics: Of runs of `analyze`: the metrics to compare; (): all of them.
        by: "head": which heads of two runs of `analyze` differ, at a false discovery rate of 5 %.

    Raises:
        InputError: There are fewer than two, they are of different kinds, a folder holds none of these, or `out` is
            taken.
        SinkscopeError: Writing failed.
    """
    start = time.time()
    listed: list[Given] = []
    for one in runs:
        listed += one if isinstance(one, list | tuple) else [one]
    commands = list(dict.fromkeys(map(_command, listed)))
    if len(listed) < 2 and commands != [CALLBACK_TRAINING.name]:
        raise InputError(f"a comparison needs at least two runs; {len(listed) or 'none'} was given")
    if len(commands) > 1:
        names = "` and `".join(commands)
        raise InputError(f"runs of `{names}` have nothing in common: compare those of one command")
    (first,) = commands
    reads = [one.folder if isinstance(one, Result) else one for one in listed]
    # other commands' modules are not imported
    places = [(record, record.compared[first]) for record in records().values() if first in record.compared]
    ways = [record.imported(place) for record, place in places]
    set_side_by_side: Callable[[Sequence[Any], float], Any] = ways[0] if ways else compared
    if set_side_by_side is compared:
        set_side_by_side = partial(compared, metrics=split_all_names(metrics), by=by)
    elif metrics or by:
        raise InputError("--metrics and --by are those of runs of `analyze`")
    with blaming_tables(), own_folder(out, overwrite, ("compare",), reads=reads) as folder:
        return written(replace(set_side_by_side(listed, start), folder=folder), page)


def _command(one: Given) -> str:
    comparable = (*RUNS, *(command for record in records().values() for command in record.compared))
    if isinstance(one, Result) and one.manifest["command"] in comparable:
        return str(one.manifest["command"])
    if not isinstance(one, str | os.PathLike):
        raise InputError(f"a run, a result of `claims` or the folder of one is needed: this is a {type(one).__name__}")
    return str(read_manifest(folder_of(one), comparable)["command"])
