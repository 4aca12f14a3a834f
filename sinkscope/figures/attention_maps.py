"""Attention weights of selected heads on one sequence, from the strongest sink to the weakest."""

from sinkscope.figures.axes import panel_grid, whole_numbers
from sinkscope.figures.heatmaps import draw_weights, square
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import WIDE, Figure, new_figure
from sinkscope.results.run import RunData

ACROSS = 3
FAINTEST = 1e-3  # of the color scale: a sink's column and a diagonal can both be read


@declare("attention-maps", "attention weights of selected heads on the first sequence", "attention_maps")
def draw(run: RunData) -> Figure:
    table = run.tables["attention_maps"]
    heads = table.groupby(["layer", "head"])
    across = min(ACROSS, len(heads))
    width = WIDE * (across + 0.45) / (ACROSS + 0.45)
    figure = new_figure(width, 1.98 * -(-len(heads) // across) + 0.65)
    axes, _ = panel_grid(figure, len(heads), across)
    for ax, ((layer, head), rows) in zip(axes, heads, strict=True):
        image = draw_weights(ax, square(rows, int(rows["query"].max()) + 1), FAINTEST)
        ax.set_title(f"layer {layer}, head {head}")
        whole_numbers(ax, "x")
        whole_numbers(ax, "y")
    figure.colorbar(image, ax=figure.axes, label="attention weight", aspect=30, pad=0.02, extend="min")
    figure.supxlabel("key position")
    figure.supylabel("query position")
    figure.suptitle(title(run, width, f"one sequence ({table['sequence'].iloc[0]})"))
    return figure
