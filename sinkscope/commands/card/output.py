"""Cards of models, and a dataset of all of them: what `card` writes.

OUT/README.md              the card of the dataset: its tables and metrics, and the findings on each model
OUT/model-card-MODEL.md    the metrics of a model as the `model-index` of its card (YAML), and the findings
OUT/tables/*.parquet       the dataset (commands/card/tables.py)
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from huggingface_hub import DatasetCardData, EvalResult, ModelCardData

from sinkscope.commands.card.tables import LAYERS, MODELS, VALUES, values_of
from sinkscope.commands.claims.columns import CLAIM
from sinkscope.commands.claims.columns import COMMAND as CLAIMS
from sinkscope.commands.claims.scorecard import Scorecard, scorecard_summary
from sinkscope.commands.claims.table import NOT_JUDGED
from sinkscope.options.option import as_folder_name, distinct_folder_name
from sinkscope.options.register import records
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.manifest import folder_of, read_manifest, tables_folder
from sinkscope.results.metrics import HEADLINE_METRICS, METRICS
from sinkscope.results.side_by_side import span
from sinkscope.results.tables import read_table
from sinkscope.verdict.report import summary_markdown
from sinkscope.verdict.table_formats import as_markdown

README = "README.md"
DIGITS = 6  # significant digits in the card of a model
TABLES = {  # in the order of the dataset's card; the first that exists is shown by default
    MODELS: "a row for each model and input, a column for each metric of the whole model",
    VALUES: "a row for each metric of the whole model, also with an intervention or in fewer bits (`setting`)",
    LAYERS: "a row for each layer and metric",
    CLAIM: "claims of papers, tested on these models: a row for each number",
}
TITLE = "Attention sinks and massive activations"


Given = Run | Scorecard | str | os.PathLike[str]


def opened(source: Given) -> Iterator[tuple[Run | Scorecard, str]]:
    """Yield a run or a scorecard with the family of its model; of a sweep, those of its cells, named as in the file."""
    if isinstance(source, Run | Scorecard):
        yield source, ""
        return
    folder = folder_of(source)
    grids = {name: record.runs_in for name, record in records().items() if record.runs_in}
    measuring = [name for name, record in records().items() if record.whole_model]
    command = read_manifest(folder, (*measuring, CLAIMS, *grids))["command"]
    if command not in grids:
        yield Scorecard.open(folder) if command == CLAIMS else Run.open(folder), ""
        return
    comparison = tables_folder(folder)
    cells: dict[str, Any] = {}
    for name in read_manifest(comparison, grids)["tables"]:
        table = read_table(comparison / "tables" / f"{name}.parquet")
        cells |= {row.cell: row for row in table.drop_duplicates("cell").itertuples()}
    for name, cell in cells.items():
        path = comparison.parent / grids[command] / name
        command_of_cell = read_manifest(path, None)["command"]
        if command_of_cell == CLAIMS:
            card = Scorecard.open(path)
            yield replace(card, tables={**card.tables, CLAIM: card.table.assign(model=cell.model)}), cell.family
        elif command_of_cell in measuring:
            run = Run.open(path)
            named = run.manifest | {"model": run.manifest["model"] | {"name": cell.model}}
            yield replace(run, manifest=named), cell.family


@dataclass(frozen=True)
class Card(Result):
    """The cards of all models of some runs and scorecards, and their dataset."""

    runs: tuple[Run, ...] = ()
    scorecards: tuple[Scorecard, ...] = ()

    @cached_property
    def model_cards(self) -> dict[str, str]:
        """Model → its card: a block of YAML between lines of ---, and the findings in Markdown."""
        results = [(run.model, result) for run in self.runs for result in _results_of_run(run)]
        for card in self.scorecards:
            # the numbers that decide claims; the type of a number is the claim's id
            judged = card.table[~card.table["outcome"].isin(NOT_JUDGED) & np.isfinite(card.table["value"])]
            for row in judged.itertuples():
                result = EvalResult(
                    task_type="text-generation",
                    dataset_type=row.condition,
                    dataset_config=row.paper,  # the hub groups numbers by type and config
                    dataset_name=row.paper,
                    metric_type=row.claim,
                    metric_name=f"{row.statement.removesuffix('.')} ({row.quantity})",
                    metric_value=_rounded(row.value),
                    metric_args={"holds_if": row.test, "outcome": row.outcome},
                )
                results.append((row.model, result))
        cards = {}
        for model, findings in self.findings_on.items():
            measured = [result for of, result in results if of == model]
            data = ModelCardData(model_name=model, eval_results=measured or None)
            cards[model] = f"---\n{data}\n---\n\n{findings}"
        return cards

    @cached_property
    def findings_on(self) -> dict[str, str]:
        """Model → the main findings on it, as Markdown."""
        texts = [(run.model, summary_markdown(run.report)) for run in self.runs]
        texts += [(model, scorecard_summary(card, model)) for card in self.scorecards for model in card.models]
        return {model: "\n\n".join(text for of, text in texts if of == model) for model, _ in texts}

    @property
    def dataset_card(self) -> str:
        """The card of the dataset: its tables for the viewer (YAML), the metrics' definitions, and all findings."""
        names = [name for name in TABLES if name in self.tables]
        configs = [{"config_name": name, "data_files": f"tables/{name}.parquet"} for name in names]
        data = DatasetCardData(pretty_name=TITLE, tags=["attention-sinks", "interpretability"], configs=configs)
        measured = {name for table in self.tables.values() if "metric" in table for name in table["metric"]}
        defined = [(name, one.label, one.definition) for name, one in METRICS.items() if name in measured]
        metrics = as_markdown(pd.DataFrame(defined, columns=["metric", "label", "definition"])) if defined else ""
        files = "\n".join(f"- `tables/{name}.parquet`: {TABLES[name]}" for name in names)
        version = self.manifest["sinkscope"]
        measured_by = f"Measured by sinkscope {version}. Position 0 is the first token of a sequence."
        parts = [f"---\n{data}\n---\n\n# {TITLE}", measured_by, files, *self.findings_on.values(), metrics]
        return "\n\n".join(part for part in parts if part)

    @property
    def texts(self) -> Mapping[str, str]:
        models_by_name = Counter(map(as_folder_name, self.model_cards))
        texts = {README: f"{self.dataset_card}\n"}
        for model, text in self.model_cards.items():
            name = as_folder_name(model)
            if models_by_name[name] > 1:
                name = distinct_folder_name(model)
            texts[f"model-card-{name}.md"] = f"{text}\n"
        return texts


def _results_of_run(run: Run) -> list[EvalResult]:
    """Return the metrics that the verdict shows, of the model as it is and as it was changed."""
    read = run.manifest["input"]
    lengths = span((read["shortest"], read["longest"]))
    values = values_of(run)
    return [
        EvalResult(
            task_type="text-generation" if run.is_causal else "fill-mask",
            dataset_type=run.condition,
            dataset_config=f"{read['sequences']} x {lengths} tokens, {read['sha256'][:12]}",
            dataset_name=f"{run.condition}: {read['sequences']} sequences of {lengths} tokens",
            dataset_args={"token_zero": read["token_zero"], "sha256": read["sha256"]},
            metric_type=row.metric,
            metric_name=METRICS[row.metric].label,
            metric_value=_rounded(row.value),
            metric_config=row.setting or None,
        )
        for row in values[values["metric"].isin(HEADLINE_METRICS)].itertuples()
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
