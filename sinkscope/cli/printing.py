"""Printing the result of a command: results on stdout, notes and the folder on stderr."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.text import Text

from sinkscope.measuring.console import Messages, Terminal, print_line, print_notices

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.commands.printout import Printout

BROKEN = 28  # a longer word may be broken over two lines, unless it is a number
NUMBER = re.compile(r"\W*\d")


def print_result(result: "Printout") -> None:
    """Print the result on stdout."""
    console = Terminal()
    if result.markdown and console.is_terminal:
        console.print(InMarkdown(result.markdown))
    elif result.markdown:
        print_line(console, result.markdown)
    if result.text:
        print_line(console, result.text)
    if result.numbers is not None:
        written = result.numbers.map(lambda value: "–" if value != value else f"{value:.4g}")
        print_table(written.reset_index(), numbers=True)
    for title, table in result.tables.items():
        print_table(table, title=title if len(result.tables) > 1 else None)


def print_messages(result: "Printout") -> None:
    """Print notes and the folder on stderr."""
    console = Messages()
    print_notices(console, result.notes)
    if result.folder is not None:
        print_line(console, f"written to {result.folder}")


def print_table(rows: "pd.DataFrame", title: str | None = None, numbers: bool = False) -> None:
    """Print a table as wide as the terminal or COLUMNS, or else in pipes and files as wide as it needs."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Terminal(width=10_000)
    header = [
        Text(str(name), justify="right" if numbers and place else "left") for place, name in enumerate(rows.columns)
    ]
    # Text: brackets are text, not rich markup
    cells = [[Text(str(value) or "–") for value in row] for row in rows.itertuples(index=False)]
    if title:
        console.print(Text(title, style="italic"))
    console.print(fitted(header, cells, console.width))


def fitted(header: Sequence[Text], rows: Sequence[Sequence[Text]], room: int) -> RenderableType:
    """Return a table at most `room` characters wide that cuts no number; one for each row if it does not fit.

    A column is aligned as its header.
    """
    columns = list(zip(header, *rows, strict=True))
    least = [max(_longest_word(cell) for cell in column) for column in columns]
    most = [max(cell.cell_len for cell in column) for column in columns]
    spare = room - 1 - sum(width + 3 for width in least)  # between borders
    if spare < 0:
        names = max(name.cell_len for name in header)
        stacked = Table(box=None, show_header=False)
        stacked.add_column(width=names)
        stacked.add_column(width=room - names - 4, overflow="fold")
        for row in rows:
            for name, cell in zip(header, row, strict=True):
                stacked.add_row(name.plain, cell)
            stacked.add_row()
        return stacked
    widths = least
    while spare and (cut := [place for place, width in enumerate(widths) if width < most[place]]):
        widths[max(cut, key=lambda place: most[place] / widths[place])] += 1  # the one with the most lines
        spare -= 1
    table = Table()
    for name, width in zip(header, widths, strict=True):
        table.add_column(name, width=width, justify=name.justify or "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _longest_word(text: Text) -> int:
    words = text.plain.split()
    return max((len(word) if NUMBER.match(word) else min(len(word), BROKEN) for word in words), default=1)


class _Table(TableElement):
    """A table in Markdown, which rich would cut to the width of the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        header, *rows = [
            [cell.content for cell in row.cells]
            for part in (self.header and [self.header.row], self.body and self.body.rows)
            for row in part or ()
            if row is not None
        ]
        yield fitted(header, rows, options.max_width)


class InMarkdown(Markdown):
    """Markdown whose tables cut no number."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _Table}
