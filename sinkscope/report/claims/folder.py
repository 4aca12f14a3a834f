"""How a scorecard is written into its folder."""

from pathlib import Path

from sinkscope.report.claims.scorecard import ROUTES, TABLE, Scorecard, legend
from sinkscope.report.figures import OF_CLAIMS, OF_ROUTES, save_figures
from sinkscope.report.figures.spec import draw_all
from sinkscope.report.outputs import write_run
from sinkscope.report.run import Run
from sinkscope.results.manifest import write_manifest
from sinkscope.results.tables import write_tables


def write_scorecard(card: Scorecard, folder: Path) -> None:
    """The runs that were measured for it, the table, the figures and the words; run.json last."""
    for role, run in card.measured.items():
        where = folder / "runs" / role.replace(":", "-")
        where.mkdir(parents=True)
        write_run(Run(run.manifest, run.tables), where, figures=())
    write_tables({TABLE: card.table, ROUTES: card.routes}, folder)
    save_figures(draw_all(OF_CLAIMS, card) | draw_all(OF_ROUTES, card.routes), folder / "figures")
    (folder / "scorecard.md").write_text(f"{card.markdown}\n\n{legend()}\n", encoding="utf-8")
    write_manifest(folder, card.manifest)
