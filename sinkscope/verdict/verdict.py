"""The verdict of a run: its findings as Markdown, and the files that it wrote."""

from collections.abc import Callable, Sequence
from pathlib import Path

from sinkscope.figures import applicable
from sinkscope.results.paper_tables import paper_tables
from sinkscope.results.run import RunData
from sinkscope.verdict import analysis, effects, quantization, spared
from sinkscope.verdict.markdown import Report, report_markdown

# command that made the run → its report
REPORTS: dict[str, Callable[[RunData], Report]] = {
    "analyze": analysis.report,
    "intervene": effects.report,
    "quantize": quantization.report,
}

ACROSS = 4  # names in a line of the tree


def verdict(run: RunData, report: Report) -> str:
    """The findings as Markdown: the most important ones, a table, the others by subject, and the files."""
    parts = [report_markdown(report)]
    if run.folder is not None:
        parts += ["### Files", f"```\n{_files(run, run.folder)}\n```"]
    return "\n\n".join(parts)


def _files(run: RunData, folder: Path) -> str:
    """The run folder as a tree."""
    recipe = run.manifest.get("recipe")  # which draws its own figures only
    figures = recipe["content"].get("figures", []) if recipe else applicable(run)
    tables = [f"{name}.parquet" for name in sorted(run.tables)] + [f"{name}.md" for name in paper_tables(run)]
    first = ("run.json", "verdict.md", "index.html (but with --no-page)", *spared.files(run))
    lines = [f"{folder.name}/", *(f"├── {name}" for name in first), "├── tables/", *_columns(tables, "│   ")]
    lines += ["└── figures/ (each as .png and .pdf)", *_columns(figures, "    ")]
    return "\n".join(lines)


def _columns(names: Sequence[str], indent: str) -> list[str]:
    """Names in columns, as `ls` prints them."""
    width = max(map(len, names), default=0) + 2
    rows = [names[first : first + ACROSS] for first in range(0, len(names), ACROSS)]
    return [(indent + "".join(name.ljust(width) for name in row)).rstrip() for row in rows]
