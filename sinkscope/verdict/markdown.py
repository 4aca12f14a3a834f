"""Markdown: tables, and a report of findings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from sinkscope.results.findings import Finding
from sinkscope.results.metrics import METRICS
from sinkscope.verdict.words import say, say_published


@dataclass(frozen=True)
class Report:
    """What is said of a run."""

    title: str
    settings: Sequence[Finding]  # how it was measured
    table: pd.DataFrame  # texts
    findings: Sequence[Finding]


def report_markdown(report: Report) -> str:
    """Title, headlines, table, setting, and the other findings under the headings of their sections."""
    headlines = [f"**{finding.section}:** {say(finding)}" for finding in report.findings if finding.is_headline]
    parts = [f"## {report.title}", _list(headlines), as_markdown(report.table, numbers=True)]
    parts.append(" ".join(say(finding) for finding in report.settings))
    for section in dict.fromkeys(finding.section for finding in report.findings):
        lines = [line for finding in report.findings if finding.section == section for line in _lines(finding)]
        if lines:
            parts += [f"### {section}", _list(lines)]
    return "\n\n".join(part for part in parts if part)


def _lines(finding: Finding) -> list[str]:
    return ([] if finding.is_headline else [say(finding)]) + say_published(finding.published)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def as_markdown(table: pd.DataFrame, numbers: bool = False) -> str:
    """A Markdown table with the columns' names as its head. `numbers`: all columns but the first to the right."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(table.columns) - 1)
    texts = [[_cell(value) for value in row] for row in (table.columns, *table.itertuples(index=False))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (texts[0], rule, *texts[1:]))


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


def table_with_spread(mean: pd.DataFrame, spread: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """Means and standard deviations (rows methods, columns metrics) as texts, under the metrics' headings."""
    table = pd.DataFrame({"Method": mean.index})
    for name in metrics:
        metric, cells = METRICS[name], zip(mean[name], spread[name], strict=True)
        table[metric.heading] = [metric.text_with_spread(value, deviation) for value, deviation in cells]
    return table
