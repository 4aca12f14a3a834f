"""`compare` for every kind of folder: analyses by metrics, interventions by routes, scorecards by claims.

No model is loaded.

OUT/run.json                             the names of the runs, and the settings in which they differ
OUT/tables/comparison.parquet            analyses: a row for each metric of the whole model, a column for each run
OUT/tables/comparison_by_layer.parquet   the same metrics by layer, a row for each value
OUT/tables/route.parquet                 interventions and scorecards: a row for each route of a model
OUT/tables/claim.parquet                 scorecards: a row for each number of a claim
OUT/tables/training.parquet              trainings: a row for each metric, layer and step
OUT/figures/*.png|pdf
OUT/routes.md, OUT/scorecard.md, OUT/curves.md
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.claims.columns import COMMAND as CLAIMS
from sinkscope.commands.claims.columns import ROUTE, TABLES
from sinkscope.commands.claims.evidence import Evidence
from sinkscope.commands.claims.output import DrawnScorecard
from sinkscope.commands.claims.routes import ROLES, ROUTES_TITLE, routes_of_models, routes_text
from sinkscope.commands.claims.scorecard import Scorecard
from sinkscope.commands.claims.table import models_of
from sinkscope.commands.compare.comparison import Comparison, compared, comparison_manifest
from sinkscope.commands.compare.curves import COMMAND as TRAINING
from sinkscope.commands.compare.curves import TABLE as CURVES
from sinkscope.commands.compare.curves import Curves, curves_of, training_of
from sinkscope.errors import InputError
from sinkscope.figures import OF_ROUTES
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result, written
from sinkscope.output.run import Run
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import RUNS, folder_of, read_manifest
from sinkscope.results.side_by_side import differing_settings
from sinkscope.results.tables import blaming_tables
from sinkscope.verdict.table_formats import as_markdown

Given = Run | Scorecard | str | os.PathLike[str]
OF_SCORECARDS = ("input", "dataset", "num_seqs", "seq_len", "window", "epsilon", "dtype", "bos", "seed", "draws")


@dataclass(frozen=True, kw_only=True)
class Routes(Result):
    """Interventions on several models side by side."""

    differing: pd.DataFrame  # settings in which the runs differ, a column for each run

    @property
    def table(self) -> pd.DataFrame:
        """A row for each route of a model (`paper_claims/routes.py`)."""
        return self.tables[ROUTE]

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {ROUTES_TITLE: routes_text(self.table)}

    @property
    def texts(self) -> Mapping[str, str]:
        return {"routes.md": self.markdown + "\n"}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(OF_ROUTES, self.table)

    @property
    def markdown(self) -> str:
        return f"## {ROUTES_TITLE}\n\n{as_markdown(routes_text(self.table))}"

    def _repr_markdown_(self) -> str:  # for notebooks
        return self.markdown


def compare(
    *given: Given | list[Given] | tuple[Given, ...],
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    page: bool = True,
) -> Comparison | Routes | Scorecard | Curves:
    """Put folders of one kind side by side; with `out`, also write tables and figures there.

    Args:
        *given: Runs of `analyze`, of `intervene`, or scorecards, or their folders, or folders that `SinkCallback`
            wrote: all of one kind, one by one or in lists.
        out: The folder to write.
        overwrite: Replace an earlier comparison in `out`.
        page: With `out`, also write index.html.

    Raises:
        InputError: There are fewer than two, they are of different kinds, a folder holds none of these, or `out` is
            taken.
        SinkscopeError: Writing failed.
    """
    start = time.time()
    runs: list[Given] = []
    for part in given:
        runs += part if isinstance(part, list | tuple) else [part]
    if len(runs) < 2:
        raise InputError(f"a comparison needs at least two runs; {len(runs) or 'none'} was given")
    commands = list(dict.fromkeys(map(_command, runs)))
    if len(commands) > 1:
        raise InputError(f"runs of `{'` and `'.join(commands)}` have nothing in common: compare those of one command")
    ways: dict[str, Callable[[Sequence[Any], float], Comparison | Routes | DrawnScorecard | Curves]] = {
        "intervene": _routes,
        CLAIMS: _scorecards,
        TRAINING: curves,
    }
    reads = [one.folder if isinstance(one, Run | Scorecard) else one for one in runs]
    with blaming_tables(), own_folder(out, overwrite, ("compare",), reads=reads) as folder:
        return written(replace(ways.get(commands[0], compared)(runs, start), folder=folder), page)


def _command(one: Given) -> str:
    if isinstance(one, Run | Scorecard):
        return str(one.manifest.get("command", "analyze"))
    if not isinstance(one, str | os.PathLike):
        raise InputError(f"a run, a scorecard or the folder of one is needed, and this is a {type(one).__name__}")
    return str(read_manifest(folder_of(one), (*RUNS, CLAIMS, TRAINING))["command"])


def _routes(given: Sequence[Any], start: float) -> Routes:
    runs = [one if isinstance(one, Run) else Run.open(one) for one in given]
    models = models_of(runs)
    table = routes_of_models({model: Evidence.of(own, ROLES, model) for model, own in models.items()})
    names = _distinct([(run.model, run.folder) for run in runs])
    differing = differing_settings([run.manifest for run in runs], names)
    facts = [{"label": name, "folder": run.folder} for name, run in zip(names, runs, strict=True)]
    return Routes(comparison_manifest(start, [ROUTE], facts, differing), {ROUTE: table}, differing=differing)


def curves(given: Sequence[Any], start: float) -> Curves:
    """Return the curves of one training or several."""
    folders = [folder_of(one) for one in given]
    names = _distinct([(training_of(folder), folder) for folder in folders])
    table = pd.concat([curves_of(folder, name) for folder, name in zip(folders, names, strict=True)], ignore_index=True)
    facts = [{"label": name, "folder": folder} for name, folder in zip(names, folders, strict=True)]
    return Curves(comparison_manifest(start, [CURVES], facts, pd.DataFrame()), {CURVES: table})


def _scorecards(given: Sequence[Any], start: float) -> DrawnScorecard:
    """Return one scorecard of all models; scorecards of the same model are distinguished by their folders."""
    cards = [one if isinstance(one, Scorecard) else Scorecard.open(one) for one in given]
    if empty := [card.folder for card in cards if not card.models]:
        raise InputError(f"{empty[0]} has no claims to compare")
    names = iter(_distinct([(model, card.folder) for card in cards for model in card.models]))
    renamed = [(card, {model: next(names) for model in card.models}) for card in cards]
    table, routes = (
        pd.concat([getattr(card, name).replace({"model": own}) for card, own in renamed], ignore_index=True)
        for name in ("table", "routes")
    )
    labels = [", ".join(own.values()) for _, own in renamed]
    # the options of a scorecard that judged other runs are not the options of these runs
    configs = [card.manifest["config"] for card in cards]
    rows = {
        name: ["its runs'" if config.get("from_") else str(config.get(name)) for config in configs]
        for name in OF_SCORECARDS
    }
    rows = {name: values for name, values in rows.items() if len(set(values)) > 1}
    differing = pd.DataFrame.from_dict(rows, orient="index", columns=labels)
    facts = [{"label": label, "folder": card.folder} for label, card in zip(labels, cards, strict=True)]
    return DrawnScorecard(comparison_manifest(start, TABLES, facts, differing), table, routes)


def _distinct(models: Sequence[tuple[str, Path | None]]) -> list[str]:
    """Return the names of the models; a repeated name gets the name of its folder, or a number."""
    counts = Counter(model for model, _ in models)
    names = [
        f"{model} ({folder.name})" if counts[model] > 1 and folder is not None else model for model, folder in models
    ]
    again = Counter(names)
    return [f"{name} ({place})" if again[name] > 1 else name for place, name in enumerate(names, 1)]
