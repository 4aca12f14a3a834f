"""Printing the result of a command: results on stdout, notes and the folder on stderr."""

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
        console = Console()
        if console.is_terminal:
            console.print(Markdown(result.markdown))
        else:
            print(result.markdown)
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


def print_table(rows: "pd.DataFrame", title: str | None = None, numbers: bool = False) -> None:
    """Print a table as wide as the terminal, or in pipes and files as wide as it needs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    table = Table(title=title and Text(title), title_justify="left")
    for index, column in enumerate(rows.columns):
        justify: Literal["left", "right"] = "right" if numbers and index else "left"
        table.add_column(Text(str(column)), justify=justify, overflow="fold")
    for row in rows.itertuples(index=False):
        table.add_row(*(Text(str(value) or "–") for value in row))  # Text: brackets are no markup
    console.print(table)
