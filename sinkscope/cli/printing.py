"""What a command prints: results on stdout, notes and where it wrote on stderr."""

import sys
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.commands.result import Result


def print_result(result: "Result") -> None:
    if result.markdown:
        _print_markdown(result.markdown)
    if result.text:
        Console().print(result.text, markup=False, highlight=False, soft_wrap=True)
    if result.numbers is not None:
        written = result.numbers.map(lambda value: "–" if value != value else f"{value:.4g}")
        print_table(written.reset_index(), numbers=True)
    for title, table in result.tables.items():
        print_table(table, title=title if len(result.tables) > 1 else None)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if result.folder is not None:
        print(f"written to {result.folder}", file=sys.stderr)


def _print_markdown(text: str) -> None:
    """Rendered for people; as it is for pipes and files."""
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)


def print_table(rows: "pd.DataFrame", title: str | None = None, numbers: bool = False) -> None:
    """A table as wide as the terminal; in pipes and files as wide as it needs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    table = Table(title=title and Text(title), title_justify="left")
    for place, column in enumerate(rows.columns):
        justify: Literal["left", "right"] = "right" if numbers and place else "left"
        table.add_column(Text(str(column)), justify=justify, overflow="fold")
    for row in rows.itertuples(index=False):
        table.add_row(*(Text(str(value) or "–") for value in row))  # Text: brackets are no markup
    console.print(table)
