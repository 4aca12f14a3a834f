"""The comparison of all cells of a sweep, as a folder.

OUT/run.json                        which cells are done
OUT/tables/sweep.parquet            a row for each metric of a cell, with the cell's coordinates
OUT/tables/sweep_epsilon.parquet    the sink rate of each cell at many ε
OUT/tables/*.parquet                tables of cells of other commands
OUT/figures/*.png|pdf
OUT/sweep.md                        sink rates by model and input, next to published ones
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from sinkscope.commands.sweep.cells import COMMAND
from sinkscope.commands.sweep.factor_study import PAPER, STUDY, summary
from sinkscope.commands.sweep.file import SweepContent
from sinkscope.commands.sweep.tables import EPSILON, SweepTables, cells_as_text
from sinkscope.errors import InputError, one_line
from sinkscope.figures import KINDS
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.results.findings import SINK
from sinkscope.results.manifest import read_manifest, tables_folder
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import LENGTH, TRANSCRIBED, WSE_SETTING, WSE_TABLE_1
from sinkscope.results.tables import read_table
from sinkscope.verdict.table_formats import as_markdown

TRAININGS_TITLE = "Trainings at their last step, mean ± standard deviation over seeds"
TRAININGS = (
    f"{TRAININGS_TITLE}. The sink rate is at position 0, or at the fixed token, in the first 64 tokens of held-out "
    "blocks, or in as many as a sliding window holds; for operations other than softmax it is that of the proxy "
    f"|sim| ÷ Σ|sim|. A sink counts as present from the first log with a sink rate above {SINK:g} %."
)
TOTAL_WEIGHT = (
    " The total weight is Σ|sim ÷ Z| over the tokens that a query sees, which is 1 for softmax: its median over the "
    "queries after that token, and over the queries whose share on it is above ε. Where that is close to 0, the "
    "proxy is a share of almost no weight."
)
MARKED = f" {TRANSCRIBED}: from a transcription of the paper."


@dataclass(frozen=True, kw_only=True)
class SweepComparison(Result):
    """All cells of a sweep that are done."""

    compared: SweepTables

    @property
    def texts(self) -> Mapping[str, str]:
        return {"sweep.md": words(self.compared, self.manifest["config"]) + "\n"}

    @property
    def drawings(self) -> Drawings:
        drawings = drawings_of(KINDS["cells of a sweep"], self.compared)
        if "claim" in self.tables:
            from sinkscope.commands.claims.figures import drawings_by_model  # other sweeps need no claims

            claims = {name: one_cell_per_model(self.tables[name]) for name in ("claim", "route")}
            return {**drawings, **drawings_by_model(claims)}
        return drawings

    @property
    def summary_tables(self) -> Mapping[str, pd.DataFrame]:
        return summary_tables(self.compared)


def summary_tables(tables: SweepTables) -> dict[str, pd.DataFrame]:
    """Return by title the trainings by level, and WSE table 1 of these models, if there are cells for them."""
    by_title = {TRAININGS_TITLE: summary(tables.tables[STUDY])} if STUDY in tables.tables else {}
    if not tables.main.empty:
        by_title[f"Sink rate at position 0 ({_measured_at(tables)})"] = _with_published(tables)
    return by_title


def summaries(folder: Path) -> Mapping[str, pd.DataFrame]:
    """Return the tables that `compare` prints of the folder of a sweep; InputError if it is damaged."""
    folder = tables_folder(folder)
    manifest = read_manifest(folder, (COMMAND,))
    tables = {name: read_table(folder / "tables" / f"{name}.parquet") for name in manifest["tables"]}
    try:
        models = SweepContent.model_validate(manifest["config"]["content"]).models
    except (KeyError, TypeError, ValidationError) as error:
        raise InputError(f"{folder} is damaged: {one_line(error)}") from error
    return summary_tables(SweepTables(tables, {entry.label: entry.paper for entry in models if entry.paper}))


def one_cell_per_model(claims: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one cell of each model: the first cell of its last revision."""
    cells = claims.drop_duplicates("cell")
    last = cells.groupby("model")["revision"].transform("last")
    chosen = cells[cells["revision"] == last].drop_duplicates("model")["cell"]
    return claims[claims["cell"].isin(chosen)]


def words(tables: SweepTables, record: Mapping[str, Any]) -> str:
    """Return the title, the trainings by level, and WSE table 1 of these models."""
    parts = [f"## {record['content']['title']}"]
    if STUDY in tables.tables:
        table = summary(tables.tables[STUDY])
        has_weight, is_marked = METRICS["total_weight"].short in table, TRANSCRIBED in "".join(table[PAPER])
        parts.append(TRAININGS + TOTAL_WEIGHT * has_weight + MARKED * is_marked)
        parts.append(as_markdown(table, numbers=True))
    for title, text in cells_as_text(tables.tables).items():
        parts += [f"{title}:", as_markdown(text, numbers=True)]
    if tables.main.empty:
        return "\n\n".join(parts if len(parts) > 1 else [*parts, "No cell of `analyze` is done."])
    parts.append(
        f"Sink rate at position 0 ({_measured_at(tables)}), mean over layers and heads; BOS: whether one is in front "
        "of every sequence."
    )
    parts.append(as_markdown(_with_published(tables), numbers=True))
    if EPSILON in tables.tables:
        parts.append("At other ε: `tables/sweep_epsilon.parquet`, from the window masses that the runs keep.")
    return "\n\n".join(parts)


def _measured_at(tables: SweepTables) -> str:
    """Return the lengths and thresholds."""
    return "; ".join(dict.fromkeys(f"T = {row.seq_len}, ε = {row.epsilon:g}" for row in tables.main.itertuples()))


def _with_published(tables: SweepTables) -> pd.DataFrame:
    """Return the overview, and after it the paper's rates of the models that name one, in the same setting."""
    table = tables.overview
    same = all((tables.main[name] == value).all() for name, value in {**WSE_SETTING, "seq_len": LENGTH}.items())
    if not same or not tables.papers:
        return table
    papers = table["model"].map(tables.papers)
    for reads in [name for name in table.columns[1:] if any(name in WSE_TABLE_1.get(p, {}) for p in papers.dropna())]:
        rates = [WSE_TABLE_1.get(paper, {}).get(reads) if isinstance(paper, str) else None for paper in papers]
        table[f"{reads} (WSE)"] = ["–" if rate is None else f"{rate.value:.1f}%{rate.mark}" for rate in rates]
    return table
