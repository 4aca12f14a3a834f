"""WSE table 1 as a chart: the sink rate of every model on every input, beside what the paper has."""

from sinkscope.figures.spec import declare
from sinkscope.figures.style import GRAY, Figure
from sinkscope.figures.sweep_parts import dots_by_model, places_in_row
from sinkscope.results.papers import LENGTH, SETTING, WSE_TABLE_1
from sinkscope.verdict.sweep_tables import SweepTables


def lacking(tables: SweepTables) -> str | None:
    return "no cell of `analyze` is done" if tables.main.empty else None


@declare("sweep-inputs", "sink rate by model and input, beside WSE table 1", "sweep", lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    rows = tables.main
    figure, ax = dots_by_model(rows, "input")
    if all((rows[name] == value).all() for name, value in {**SETTING, "seq_len": LENGTH}.items()):
        models = list(rows["model"].unique())
        colors = {line.get_label(): line.get_color() for line in ax.lines}
        places = places_in_row(rows["input"])
        for at, model in enumerate(models):
            for reads, found in WSE_TABLE_1.get(tables.papers.get(model, ""), {}).items():
                ax.plot(
                    [found.value], [at + places.get(reads, 0.0)], marker="o", markersize=8, fillstyle="none",
                    linestyle="none", color=colors.get(reads, GRAY), zorder=1,
                )  # fmt: skip
        if tables.papers:
            ax.set_title("rings: as published (WSE)", fontsize=7)
    return figure
