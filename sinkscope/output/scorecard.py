"""A scorecard is written: its tables, figures, words and page."""

from pathlib import Path

from sinkscope.figures import OF_CLAIMS, OF_ROUTES
from sinkscope.figures.spec import draw_all
from sinkscope.figures.style import Figure
from sinkscope.html_page import Contents, write_page
from sinkscope.output.drawing import save_figures
from sinkscope.results.manifest import write_manifest
from sinkscope.results.tables import write_tables
from sinkscope.verdict.scorecard import Scorecard, legend

FIGURES, WORDS = "figures", "scorecard.md"


def write_scorecard(card: Scorecard, folder: Path, page: bool = True) -> None:
    """Write a scorecard for which nothing was measured into an empty folder."""
    write_tables(card.tables, folder)
    save_figures(scorecard_figures(card), folder / FIGURES)
    (folder / WORDS).write_text(scorecard_words(card), encoding="utf-8")
    if page:
        write_page(Contents(card.manifest, card.tables, folder=folder), folder)
    write_manifest(folder, card.manifest)


def scorecard_figures(card: Scorecard) -> dict[str, Figure]:
    return draw_all(OF_CLAIMS, card) | draw_all(OF_ROUTES, card.routes)


def scorecard_words(card: Scorecard) -> str:
    return f"{card.markdown}\n\n{legend()}\n"
