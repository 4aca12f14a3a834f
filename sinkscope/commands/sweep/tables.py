"""The tables of a sweep: the values that its cells measured, each with the cell's coordinates in the grid."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from sinkscope.commands.sweep.cells import Planned
from sinkscope.commands.sweep.factor_study import STUDY, study_rows
from sinkscope.errors import InputError
from sinkscope.models.steps import step_of
from sinkscope.options.register import records
from sinkscope.results.metrics import is_sink, lacks_rate
from sinkscope.results.run import RunData, policy_of
from sinkscope.results.scores import main_scores
from sinkscope.results.statistics import bootstrap, resamplings_of, weighted_means
from sinkscope.results.tables import LEADING, METRIC, VALUE, WHOLE_MODEL, Column, names_of, read_table
from sinkscope.results.trainings import tokens_a_step

SWEEP, EPSILON, SCORES, FORMATS = "sweep", "sweep_epsilon", "sweep_benchmark", "sweep_formats"
# table of a cell → name of this table for all cells, if that is not its name after sweep_
NAMES = {"summary": SWEEP, "claim": "claim", "route": "route"}
ALPHA = "attention_heads_by_sequence"  # the table with the window mass of position 0 for every head and sequence
EPSILONS = tuple(round(0.05 * step, 2) for step in range(1, 20))
NO_STEP = -1

COORDINATES = (
    Column("cell", "folder of the run, in cells/", kind="text"),
    Column("revision", "revision of the model, as named in the file", kind="text"),
    Column("step", "training step, from the name of the revision; -1 without one", kind="whole"),
    Column("family", "family of the model, as named in the file", kind="text"),
    Column("base", "model from which this model was tuned", kind="text"),
    Column("parameters", "number of parameters of the model", kind="whole"),
    Column("input", "input, as named in the file", kind="text"),
    Column("settings", "options that vary and their values", kind="text"),
    Column("seq_len", "option", "tokens", kind="whole"),
    Column("window", "option", "tokens", kind="whole"),
    Column("epsilon", "option"),
    Column("seed", "option", kind="whole"),
    Column("dtype", "data type of the weights", kind="text"),
    Column("token_zero", "description of the token at position 0", kind="text"),
    Column("bos", "with or without: whether the sequences begin with a BOS", kind="text"),
)
SWEEP_TABLES = {
    SWEEP: (*COORDINATES, METRIC, VALUE),
    EPSILON: (
        *COORDINATES,
        Column("sink_rate", "at this ε, from the stored window masses; NaN where uniform attention has one", "share"),
        Column("low", "lower end of its 95 % interval over texts", "share"),
        Column("high", "upper end", "share"),
    ),
}
ENDS = ["low", "high"]
_BOS_SETTING = r",?\bbos=\w+,?"  # the BOS policy in the settings of a cell, which is also in the column `bos`


@dataclass(frozen=True)
class SweepTables:
    tables: dict[str, pd.DataFrame] = field(repr=False)  # name → table, without tables that no cell has
    papers: Mapping[str, str]  # model → its name in WSE table 1

    @cached_property
    def rates(self) -> pd.DataFrame:
        """The sink rate of the whole model: a row for each cell of `analyze`, with the interval if there is one."""
        table = self.tables.get(SWEEP, pd.DataFrame(columns=[*LEADING, *names_of(SWEEP_TABLES[SWEEP])]))
        rows = table[(table["metric"] == "sink_rate") & (table["layer"] == WHOLE_MODEL)]
        rows = rows.rename(columns={"value": "sink_rate"}).reset_index(drop=True)
        ends = self.tables.get(EPSILON, pd.DataFrame()).reindex(columns=["cell", "epsilon", *ENDS])
        kinds = {"cell": object, "epsilon": float}  # also for an empty table
        return rows.astype(kinds).merge(ends.astype(kinds), on=["cell", "epsilon"], how="left")

    @property
    def by_policy(self) -> pd.DataFrame:
        """One row of `rates` for each model, input and BOS policy: the first other setting and the last revision."""
        settings = self.rates["settings"].str.replace(_BOS_SETTING, "", regex=True)
        rows = self.rates[settings.isin(settings[:1])]
        return rows.drop_duplicates(["model", "bos", "input"], keep="last")

    @property
    def main(self) -> pd.DataFrame:
        """One row of `by_policy` for each model and input, under the first BOS policy of the model."""
        rows = self.by_policy
        return rows[rows["bos"] == rows.groupby("model", sort=False)["bos"].transform("first")]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The main metric of each task, for each cell of `benchmark`."""
        if SCORES not in self.tables:
            return pd.DataFrame(columns=["model", "revision", "task", "score"])
        rows = main_scores(self.tables[SCORES]).reset_index(drop=True)
        return rows.assign(task=rows["condition"] + " (" + rows["metric"] + ")")

    @property
    def overview(self) -> pd.DataFrame:
        """`by_policy` as text in percent, rows models, columns inputs; then the scores on each benchmark."""
        rows = self.by_policy
        wide = rows.pivot(index=["model", "bos"], columns="input", values="sink_rate")
        wide = wide.reindex(pd.MultiIndex.from_frame(rows[["model", "bos"]].drop_duplicates()))[rows["input"].unique()]
        wide = wide.map(lambda rate: "–" if rate != rate else f"{rate:.1%}").reset_index()
        if not self.scores.empty:
            last = self.scores.drop_duplicates(["model", "task"], keep="last")
            scores = last.pivot(index="model", columns="task", values="score")
            scores = scores.reindex(index=last["model"].unique(), columns=last["task"].unique())
            scores = scores.map(lambda x: "–" if x != x else f"{x:.3f}")
            alone = pd.DataFrame({"model": scores.index[~scores.index.isin(wide["model"])]})
            wide = pd.concat([wide, alone]).merge(scores.reset_index(), on="model", how="left")
        return wide.fillna("–").rename(columns={"bos": "BOS"}).rename_axis(columns=None).reset_index(drop=True)


def name_in_sweep(name: str) -> str:
    """Return the name of a cell's table where it is put together for all cells."""
    return NAMES.get(name, f"sweep_{name}")


def sweep_tables(done: Sequence[Planned]) -> SweepTables:
    """Return the tables of all finished cells. Raises InputError if a table of a cell is damaged or missing.

    Each has the coordinates of its cells after the leading columns; `model` is the name in the file.
    """
    parts: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for each in done:
        for name in records()[each.cell.command].of_cells:
            if name not in each.manifest["tables"]:
                continue
            common = name_in_sweep(name)
            table = read_table(each.folder / "tables" / f"{name}.parquet")
            if common == STUDY:  # adds the number of tokens read before each step
                tokens = tokens_a_step(each.manifest["config"], each.manifest.get("processes", 1))
                table = study_rows(table)
                table = table.assign(tokens=table["step"] * tokens)
            parts[common].append(_with_coordinates(table, each))
        if each.cell.command == "analyze" and ALPHA in each.manifest["tables"]:
            parts[EPSILON].append(_with_coordinates(_by_epsilon(each), each))
    tables = {name: pd.concat(placed, ignore_index=True) for name, placed in sorted(parts.items())}
    return SweepTables(tables, {each.cell.model: each.cell.entry.paper for each in done if each.cell.entry.paper})


def cells_as_text(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return title → table as text, from what commands make of the tables of all cells."""
    texts: dict[str, pd.DataFrame] = {}
    for record in records().values():
        if record.cells_as_text:
            names = {name: name_in_sweep(name) for name in record.of_cells}
            of_cells = {name: tables[common] for name, common in names.items() if common in tables}
            texts |= record.imported(record.cells_as_text)(of_cells)
    return texts


def _with_coordinates(table: pd.DataFrame, each: Planned) -> pd.DataFrame:
    """Return a cell's table with its coordinates, except those that it has as columns, such as ε in a table by ε."""
    cell, manifest = each.cell, each.manifest
    config, model = manifest["config"], manifest.get("model")
    token_zero = manifest.get("input", {}).get("token_zero", "")
    try:
        step = NO_STEP if cell.revision is None else step_of(cell.revision)
    except InputError:
        step = NO_STEP
    coordinates = {
        "cell": cell.name,
        "revision": cell.revision or "",
        "step": step,
        "family": cell.entry.family or "",
        "base": cell.entry.base or "",
        "parameters": int(model.get("parameters") or 0) if isinstance(model, dict) else 0,
        "input": cell.input,
        "settings": cell.setting,
        "seq_len": config.get("seq_len") or config.get("block_length", 0),
        "window": config.get("window", 0),  # 0 if the command has no such option
        "epsilon": float(config.get("epsilon", 0)),
        "seed": config.get("seed", 0),
        "dtype": manifest.get("dtype", ""),
        "token_zero": token_zero,
        "bos": policy_of(token_zero),
    }
    first = [*LEADING, *coordinates]
    table = table.assign(**{name: value for name, value in coordinates.items() if name not in table}, model=cell.model)
    return table[[*first, *(name for name in table if name not in first)]]


def _by_epsilon(each: Planned) -> pd.DataFrame:
    """Return sink rates of the model at several ε: share of heads and sequences, mean of layers (WSE fig. 3)."""
    alpha = read_table(each.folder / "tables" / f"{ALPHA}.parquet")
    uniform = alpha["uniform_mass"]
    epsilons = sorted({*EPSILONS, each.manifest["config"]["epsilon"]})
    sinks = pd.DataFrame(
        {
            epsilon: is_sink(alpha["window_mass"], epsilon).astype(float).mask(lacks_rate(uniform, epsilon))
            for epsilon in epsilons
        }
    )
    by_sequence = sinks.groupby([alpha["sequence"], alpha["layer"]]).mean().unstack("layer")  # means over heads
    of_layers = by_sequence.to_numpy().reshape(len(by_sequence), len(epsilons), -1)
    texts = RunData(dict(each.manifest), {}).text_numbers[by_sequence.index]
    rates = weighted_means(of_layers, resamplings_of(texts)).mean(-1)
    leading = {"model": "", "condition": each.manifest["condition"], "layer": WHOLE_MODEL}
    low, high = np.transpose([(estimate.low, estimate.high) for estimate in map(bootstrap, rates.T)])
    return pd.DataFrame({**leading, "epsilon": epsilons, "sink_rate": rates[0], "low": low, "high": high})


def several(rows: pd.DataFrame, within: Iterable[str], column: str) -> pd.DataFrame:
    """Return the rows whose group, by the columns `within`, has several values of `column`."""
    if rows.empty:
        return rows
    return rows[rows.groupby(list(within))[column].transform("nunique") > 1]
