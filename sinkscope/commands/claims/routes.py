"""The table `route`: the routes that carry the sink in a model, from interventions that each cut one route."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sinkscope.commands.claims.arms import before_and_after, beyond_controls, control_rates, sink_left
from sinkscope.commands.claims.columns import ROUTE, ROUTE_COLUMNS
from sinkscope.commands.claims.evidence import Evidence, Need, models_of
from sinkscope.figures import KINDS
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.findings import HALF, SINK
from sinkscope.results.sequences import Lacks
from sinkscope.results.side_by_side import comparison_manifest, differing_settings, distinct_names
from sinkscope.results.statistics import Estimate, bootstrap, one_more_run
from sinkscope.results.tables import LEADING, WHOLE_MODEL, names_of
from sinkscope.verdict.table_formats import as_markdown


class RouteEffect(StrEnum):
    GOES = "goes"  # the sink falls, and less than half of it is left
    FALLS = "falls"  # the sink falls more than under one further random control
    RISES = "rises"
    STAYS = "stays"
    UNDECIDED = "undecided"  # fewer than two controls
    NO_SINK = "no sink"  # there is no sink before the cut
    DOES_NOT_APPLY = "does not apply"  # the model has no such route
    NOT_MEASURED = "not measured"


class Route(NamedTuple):
    """A part of the model by which the first token may become a sink."""

    name: str
    cut: str  # how it is cut, in words
    role: Need  # the run that cuts it
    published: str = ""  # the effect on GPT-2's sink according to NU; "" if NU does not cut this route
    published_effect: RouteEffect = RouteEffect.NOT_MEASURED


ROUTES = (
    Route("query bias", "b_Q = 0", Need("do", "nullify-query-bias"), "diminishes (fig. 3b)", RouteEffect.FALLS),
    # two edits: of the vector p₀, which the first attention layer reads, and of EPE₀ = MLP(p₀) + p₀ after it
    Route("position vector", "p₀ = another's", Need("do", "replace-epe")),
    Route("effective position", "EPE₀ = another's", Need("do", "replace-epe:at=epe"), "disappears (fig. 3c)",
        RouteEffect.GOES),
    Route("first embedding", "token's vector = 0", Need("do", "nullify-first-embedding"), "persists (fig. 3e)",
        RouteEffect.STAYS),
    Route("key columns", "W_k's massive inputs = 0", Need("do", "zero-key-columns"), "is reduced (fig. 3f)",
        RouteEffect.FALLS),
    Route("massive activation", "= 0 where it appears", Need("do", "zero-massive")),
)  # fmt: skip
ROUTE_ROLES = tuple(route.role for route in ROUTES)


def routes_of(evidence: Evidence) -> pd.DataFrame:
    run = evidence.any_run
    labels = {"model": run.model, "condition": run.condition, "layer": WHOLE_MODEL}
    rows = [labels | _row(route, evidence) for route in ROUTES]
    table = pd.DataFrame(rows, columns=[*LEADING, *names_of(ROUTE_COLUMNS)])
    return table.astype({column.name: float for column in ROUTE_COLUMNS if column.kind == "number"})


def _row(route: Route, evidence: Evidence) -> dict[str, Any]:
    role = route.role
    row: dict[str, Any] = {"route": route.name, "do": role.of, "draws": 0, "note": ""}
    if not evidence.has(role):
        reason = evidence.inapplicable(role)
        effect = RouteEffect.DOES_NOT_APPLY if reason else RouteEffect.NOT_MEASURED
        return row | {"effect": str(effect), "note": reason or evidence.command(role)}
    try:
        before, after = (bootstrap(rates) for rates in before_and_after(evidence, role))
        drawn, beyond = control_rates(evidence, role), beyond_controls(evidence, role)
        left = sink_left(evidence, role)
    except Lacks as reason:
        return row | {"effect": str(RouteEffect.NOT_MEASURED), "note": str(reason)}
    if before.value <= SINK:
        effect = RouteEffect.NO_SINK
    elif not np.isfinite([beyond.low, beyond.high]).all():
        effect = RouteEffect.UNDECIDED
    elif beyond.high < 0:
        effect = RouteEffect.GOES if left.high < HALF else RouteEffect.FALLS
    else:
        effect = RouteEffect.RISES if beyond.low > 0 else RouteEffect.STAYS
    row |= {"draws": len(drawn), "effect": str(effect)}
    control = one_more_run(drawn) if len(drawn) else Estimate(np.nan)
    for name, estimate in {"before": before, "after": after, "control": control, "beyond": beyond}.items():
        row |= estimate.as_columns(name)
    return row


def routes_of_models(evidence: Mapping[str, Evidence]) -> pd.DataFrame:
    return pd.concat([routes_of(one).assign(model=name) for name, one in evidence.items()], ignore_index=True)


def models_with_routes(table: pd.DataFrame) -> list[str]:
    """Return the models in which a route was cut or does not apply."""
    return list(dict.fromkeys(table[table["effect"] != RouteEffect.NOT_MEASURED]["model"]))


# --- words

ROUTES_TITLE = "Which route carries the sink (sink rate at position 0 in % [95 %])"


def routes_text(table: pd.DataFrame) -> pd.DataFrame:
    """Return models × routes, such as «falls: 42.5 [41.3, 43.8] → 30.5 [29.1, 31.8], random controls 40.8»."""
    published = {route.name: route.published or "not tested" for route in ROUTES}
    lines = [{"model": "GPT-2 in NU (figure 3: maps, no rates)"} | published]
    for model, rows in table.groupby("model", sort=False):
        line = {"model": str(model)}
        for row in rows.itertuples():
            before = f"{row.before:.1f} [{row.before_low:.1f}, {row.before_high:.1f}]"
            after = f"{row.after:.1f} [{row.after_low:.1f}, {row.after_high:.1f}]"
            control = f"random controls {row.control:.1f}" if row.draws else "no random controls"
            control += f" [{row.control_low:.1f}, {row.control_high:.1f}]" if row.draws > 1 else ""
            is_cut = row.effect not in (RouteEffect.DOES_NOT_APPLY, RouteEffect.NOT_MEASURED)
            line[row.route] = f"{row.effect}: " + (f"{before} → {after}, {control}" if is_cut else row.note)
        lines.append(line)
    return pd.DataFrame(lines)


# --- runs of `intervene` side by side


@dataclass(frozen=True, kw_only=True)
class Routes(Result):
    """Interventions on several models side by side."""

    differing: pd.DataFrame  # settings in which the runs differ, a column for each run

    @property
    def table(self) -> pd.DataFrame:
        """A row for each route of a model."""
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


def compared_routes(folders_or_runs: Sequence[Any], start: float) -> Routes:
    runs = [one if isinstance(one, Run) else Run.open(one) for one in folders_or_runs]
    models = models_of(runs)
    table = routes_of_models({model: Evidence.of(of_model, ROUTE_ROLES, model) for model, of_model in models.items()})
    names = distinct_names([(run.model, run.folder) for run in runs])
    differing = differing_settings([run.manifest for run in runs], names)
    facts = [{"label": name, "folder": run.folder} for name, run in zip(names, runs, strict=True)]
    return Routes(comparison_manifest(start, [ROUTE], facts, differing), {ROUTE: table}, differing=differing)
