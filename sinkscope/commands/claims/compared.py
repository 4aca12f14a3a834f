"""Scorecards, and interventions, on several models side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sinkscope.commands.claims.columns import CLAIM, ROUTE, TABLES
from sinkscope.commands.claims.evidence import Evidence
from sinkscope.commands.claims.routes import ROLES, ROUTES_TITLE, routes_of_models, routes_text
from sinkscope.commands.claims.scorecard import Scorecard
from sinkscope.commands.claims.table import models_of
from sinkscope.errors import InputError
from sinkscope.figures import KINDS
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.side_by_side import comparison_manifest, differing_settings, distinct_names
from sinkscope.verdict.table_formats import as_markdown

OF_SCORECARDS = ("input", "dataset", "num_seqs", "seq_len", "window", "epsilon", "dtype", "bos", "seed", "draws")


@dataclass(frozen=True, kw_only=True)
class Routes(Result):
    """Interventions on several models side by side."""

    differing: pd.DataFrame  # settings in which the runs differ, a column for each run

    @property
    def table(self) -> pd.DataFrame:
        """A row for each route of a model (routes.py)."""
        return self.tables[ROUTE]

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {ROUTES_TITLE: routes_text(self.table)}

    @property
    def texts(self) -> Mapping[str, str]:
        return {"routes.md": self.markdown + "\n"}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(KINDS["interventions on several models"], self.table)

    @property
    def markdown(self) -> str:
        return f"## {ROUTES_TITLE}\n\n{as_markdown(routes_text(self.table))}"

    def _repr_markdown_(self) -> str:  # for notebooks
        return self.markdown


def routes(given: Sequence[Any], start: float) -> Routes:
    runs = [one if isinstance(one, Run) else Run.open(one) for one in given]
    models = models_of(runs)
    table = routes_of_models({model: Evidence.of(own, ROLES, model) for model, own in models.items()})
    names = distinct_names([(run.model, run.folder) for run in runs])
    differing = differing_settings([run.manifest for run in runs], names)
    facts = [{"label": name, "folder": run.folder} for name, run in zip(names, runs, strict=True)]
    return Routes(comparison_manifest(start, [ROUTE], facts, differing), {ROUTE: table}, differing=differing)


def scorecards(given: Sequence[Any], start: float) -> Scorecard:
    """Return one scorecard of all models; scorecards of the same model are distinguished by their folders."""
    cards = [one if isinstance(one, Scorecard) else Scorecard.open(one) for one in given]
    if empty := [card.folder for card in cards if not card.models]:
        raise InputError(f"{empty[0]} has no claims to compare")
    names = iter(distinct_names([(model, card.folder) for card in cards for model in card.models]))
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
    return Scorecard(comparison_manifest(start, TABLES, facts, differing), {CLAIM: table, ROUTE: routes})
