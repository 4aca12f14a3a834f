"""A run with its figures and its verdict, and how it is written."""

import base64
import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pandas as pd
from rich.console import Console

from sinkscope import figures
from sinkscope.errors import InputError, Known, counted, printable
from sinkscope.figures import figure_spec
from sinkscope.figures.style import Figure
from sinkscope.html_page import Contents
from sinkscope.measuring.console import spinner
from sinkscope.measuring.tables import all_tables
from sinkscope.options.register import records
from sinkscope.output.drawing import Drawings
from sinkscope.output.result import Result, written
from sinkscope.results.activations import ATTENTION, FILE, MAPPED, MASK_FILE
from sinkscope.results.findings import FINDING, Finding
from sinkscope.results.folders import own_folder
from sinkscope.results.metric_estimates import estimate_table
from sinkscope.results.metrics import METRICS, MISSING, SHORT_METRICS
from sinkscope.results.papers import paper_tables
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.sequences import Sequences
from sinkscope.results.side_by_side import span
from sinkscope.results.tables import Columns, blaming_tables
from sinkscope.verdict import analysis
from sinkscope.verdict.report import Report, report_markdown, report_of
from sinkscope.verdict.table_formats import BOLD, EstimateTable, as_markdown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from sinkscope.models.loading import LoadedModel

MOST_ARMS = 6  # most arms in this line
NOTEBOOK_FIGURE = "sinks-by-layer"  # what a notebook shows of `analyze`; of a command, its first figure that applies


class Run(RunData, Result):
    """The result of `analyze`, `intervene`, `quantize` or `kv-plan`.

    `run.tables["attention"]`, `run.metric("sink_rate")`, `run.figure("sink-map")`, `run.verdict`.
    """

    columns: ClassVar[Mapping[str, Columns]] = all_tables()

    @classmethod
    def of_analysis(
        cls, manifest: dict[str, Any], tables: Mapping[str, pd.DataFrame], folder: Path | None = None, **more: Any
    ) -> Self:
        """Return a run of `analyze`, with the table of its findings; `more` are further fields."""
        with_findings = Known("table", tables)
        run = cls(manifest | {"tables": sorted([*manifest["tables"], FINDING])}, with_findings, folder, **more)
        with_findings[FINDING] = analysis.finding_table(run, run.report)
        return run

    def estimate(
        self,
        metric: str,
        by: str | Sequence[str] = (),
        epsilon: float | Sequence[float] = (),
        null: RunData | None = None,
    ) -> EstimateTable:
        """Return a metric with 95 % intervals over texts, from the tables of the run: nothing is measured again.

        Args:
            metric: a key of METRICS of which the run has values by sequence.
            by: "layer", or "layer" and "head"; (): the whole model.
            epsilon: thresholds of a rate; (): that of the run.
            null: a run whose values are the column `null`, such as `analyze(…, random_weights=True)`; None: uniform
                attention on the same lengths.

        Returns:
            A DataFrame with a row for each layer, head and ε: metric, `by`, epsilon, value, low, high, null,
            sequences. Its `to_latex()` needs no further package.

        Raises:
            InputError: there is no such metric, a run has no values by sequence of it or several arms, the metric does
                not depend on ε, or `null` has other layers or heads.
        """
        epsilons = (epsilon,) if isinstance(epsilon, int | float) else epsilon
        with blaming_tables():
            of_null = None if null is None else Sequences(null)
            return EstimateTable(estimate_table(Sequences(self), metric, by, epsilons, of_null))

    def figure(self, name: str, *, figsize: tuple[float, float] | None = None, **options: Any) -> Figure:
        """Draw one figure from the tables, as a figure of matplotlib.

        Args:
            name: see `sinkscope list figures`.
            figsize: width and height in inches; None: the figure's own.
            **options: what this figure can show instead, such as `position` in sink-map.

        Raises:
            InputError: there is no such figure or option, or this run has no data for it.
        """
        with blaming_tables():
            figure = figures.draw(name, self, **options)
        if figsize is not None:
            figure.set_size_inches(figsize)
        return figure

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        figures: Iterable[str] | None = None,
        page: bool = True,
    ) -> "Run":
        """Write the run folder, as the command does with `out`, and return the run with its folder.

        Args:
            folder: the folder to write.
            overwrite: replace an earlier run in it.
            figures: names of the figures to draw; None: all that apply.
            page: also write index.html.

        Raises:
            InputError: the folder holds something else, there is no such figure, or this is one arm of an experiment;
                nothing was written.
            SinkscopeError: writing failed.
        """
        if self._is_arm:
            raise InputError(f"{self.condition} is one arm of an experiment: save the run of `intervene`")
        with own_folder(folder, overwrite, reads=(self.folder,)) as locked:
            return finished(replace(self, folder=locked), Console(quiet=True), figures, page)

    def attention(
        self,
        layer: int,
        head: int | None = None,
        text: str | Sequence[int] | None = None,
        model: "torch.nn.Module | LoadedModel | None" = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        sequence: int = 0,
    ) -> "pd.DataFrame | torch.Tensor":
        """Return the attention weights of a head (query × key, labeled by tokens) or of a layer's heads (H,T,T).

        For the first sequence they come from `activations` (float16) if all its tokens are there. Otherwise the model
        runs again: the one that was passed to the command, or the one that the run names, without permissions. The
        weights of many sequences are in `activations["attention"]` of a run with `keep="attention"`.

        Args:
            layer, head: counted from 0; no head: all of them.
            text: a text, or token ids; None: a sequence of the run.
            model, tokenizer: a loaded model in place of the run's; for many texts, it need not be loaded again.
            sequence: the number of the run's sequence.

        Raises:
            InputError: the head does not exist, the model or the text cannot be read, or this is a changed arm of an
                experiment.
        """
        if "arms" in self.manifest and self.command == "analyze" and self.condition != BEFORE:
            raise InputError(f"{self.condition} is an arm of an experiment: analyze its model within `intervening`")
        from sinkscope.measuring.keeping import attention_of, check_head  # imported late, because it runs models

        stored = self.activations.get(ATTENTION) if text is None and model is None and not sequence else None
        length = int(self.activations.attention_mask[0].sum()) if stored else 0  # with register tokens
        is_named = "attention_maps" in self.tables and length <= MAPPED  # the table that has its tokens
        if stored and length <= next(iter(stored.values())).shape[-1] and (is_named or head is None):
            check_head(layer, head, {index: weights.shape[1] for index, weights in stored.items()})
            weights = stored[layer][0, slice(None) if head is None else [head], :length, :length].float()
            if head is not None:
                tokens = self.tables["attention_maps"].drop_duplicates("key").sort_values("key")["token"].tolist()
        else:
            model = model if model is not None or self.loaded is None else self.loaded()
            weights, tokens = attention_of(self.manifest, layer, head, text, model, tokenizer, sequence)
        if head is None:
            return weights
        return pd.DataFrame(weights[0].numpy(), pd.Index(tokens, name="query"), pd.Index(tokens, name="key"))

    @property
    def drawings(self) -> Drawings:
        return {name: partial(self.figure, name) for name in figures.applicable(self)}

    @cached_property
    def report(self) -> Report:
        """The findings, as data."""
        with blaming_tables():
            return report_of(self)

    @cached_property
    def verdict(self) -> str:
        """The findings as Markdown: the most important ones, a table, the rest by subject, and the files."""
        parts = [report_markdown(self.report)]
        if self.folder is not None:
            parts += ["### Files", f"```\n{_file_tree(self, self.folder)}\n```"]
        return printable("\n\n".join(parts))

    @property
    def findings(self) -> Sequence[Finding]:
        return self.report.findings

    @property
    def texts(self) -> dict[str, str]:
        papers = {f"tables/{name}.md": as_markdown(table) + "\n" for name, table in paper_tables(self).items()}
        of_command = {name: text() for name, text in _files_of_command(self).items() if text is not None}
        return papers | {"verdict.md": self.verdict + "\n"} | of_command

    def write_files(self, folder: Path) -> None:
        super().write_files(folder)
        self.activations.write(folder)
        if self.further is not None:
            self.further(folder)
        for write in OUTPUTS.values():
            write(self, folder)

    @property
    def contents(self) -> Contents:
        return replace(super().contents, activations=self.activations)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        """The table of the verdict, and the tables that papers print."""
        return {"": self.report.table, **paper_tables(self)}

    @property
    def _is_arm(self) -> bool:
        """Whether it is one arm of an experiment, which has no findings of its own."""
        return self.command == "analyze" and "arms" in self.manifest

    def __repr__(self) -> str:
        """Return three lines: what was measured, the main numbers, and where the run is."""
        read = self.manifest["input"]
        measured = f"{counted(read['sequences'], 'sequence')} of {span((read['shortest'], read['longest']))} tokens"
        what = f"Run of `{self.command}` on {self.model}, {self.manifest['dtype']}: {measured} ({self.condition})"
        unsaved = "in memory" + ("" if self._is_arm else "; run.save(folder) writes it")
        with blaming_tables():
            if "summary" in self.tables:
                texts = {METRICS[name].short: METRICS[name].text(self.metric(name)) for name in SHORT_METRICS}
                numbers = ", ".join(f"{label} {text}" for label, text in texts.items() if text != MISSING)
                numbers = numbers or f"tables {', '.join(name for name, table in self.tables.items() if len(table))}"
            elif self._is_arm:
                numbers = f"tables {', '.join(self.tables)}"
            else:
                first, second, *_ = table = self.report.table
                rows = zip(table[first].str.strip(), table[second], strict=True)
                arms = [BOLD.sub(r"\1", f"{name} {value}") for name, value in rows if value and name != "control"]
                numbers = f"{second}: {', '.join(arms[:MOST_ARMS])}" + ", …" * (len(arms) > MOST_ARMS)
        return printable(f"{what}\n{numbers}\n{unsaved if self.folder is None else f'in {self.folder}'}")

    def _repr_html_(self) -> str:  # for notebooks
        lines = [html.escape(line) for line in repr(self).split("\n")]
        if not self._is_arm:
            headlines = [finding for finding in self.findings if finding.is_headline]
            items = [f"<li><b>{html.escape(one.section)}:</b> {html.escape(one.sentence)}</li>" for one in headlines]
            if items:
                lines[1] = f"<ul>{''.join(items)}</ul>"
            figure_names = records()[self.command].figures.get("one run", ((NOTEBOOK_FIGURE,),))
            if picture := next((name for name, *_ in figure_names if name in self.drawings), None):
                png = base64.b64encode(self.figure(picture)._repr_png_()).decode()
                lines[1] += f'<img style="max-width:100%" src="data:image/png;base64,{png}">'
            lines[2] += "; <code>run.verdict</code> has all findings"
        return f"<p><b>{lines[0]}</b></p>{lines[1]}<p>{lines[2]}</p>"


def _files_of_command(run: RunData) -> Mapping[str, Callable[[], str] | None]:
    """Map further files of the run's command to functions that return their texts; None if `further` writes it."""
    record = records()[run.command]
    return record.imported(record.files)(run) if record.files else {}


def _file_tree(run: Run, folder: Path) -> str:
    """Return the run folder as a tree, with names in columns, as `ls` prints them."""

    def columns(names: Sequence[str], indent: str) -> list[str]:
        width = max(map(len, names), default=0) + 2
        rows = [names[first : first + 4] for first in range(0, len(names), 4)]
        return [(indent + "".join(name.ljust(width) for name in row)).rstrip() for row in rows]

    drawn: Sequence[str] | None = run.drawn
    if drawn is None:
        recipe = run.manifest.get("recipe")  # a recipe draws only its own figures
        drawn = recipe["content"].get("figures", []) if recipe else figures.applicable(run)
    tables = [f"{name}.parquet" for name in sorted(run.tables)] + [f"{name}.md" for name in paper_tables(run)]
    first = ["run.json", "verdict.md", "index.html (except with --no-page)", *_files_of_command(run)]
    first += [FILE] if run.activations else []
    first += [MASK_FILE] if run.manifest["config"].get("export_mask") else []
    lines = [f"{folder.name}/", *(f"├── {name}" for name in first), "├── tables/", *columns(tables, "│   ")]
    drawings = ["└── figures/ (each as .png and .pdf)", *columns(drawn, "    ")] if drawn else []
    return "\n".join([*lines, *drawings])


# further files of every run folder: name → function that writes one, before run.json
OUTPUTS: dict[str, Callable[[Run, Path], None]] = {}


def finished(run: Run, console: Console, figures: Iterable[str] | None = None, page: bool = True) -> Run:
    """Return the run, written to its folder if it has one; InputError for a figure that does not exist."""
    figures = None if figures is None else tuple(figures)
    for name in figures or ():
        figure_spec(name)
    with spinner(console, "drawing the figures"):
        return written(replace(run, drawn=figures), page, figures)
