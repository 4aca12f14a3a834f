"""A plugin for sinkscope, with an entry of every kind: how far one entry dominates a token's residual norm."""

from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from sinkscope.commands.claims.claim import Claim, Part
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.figures import FIGURES, plot
from sinkscope.figures.labels import title
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.style import COLUMN, SINK, Figure, new_figure
from sinkscope.interventions import INTERVENTIONS, Intervention, Target
from sinkscope.interventions.intervention import Expectation, edited_positions
from sinkscope.interventions.parameters import Indices
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Reading
from sinkscope.measuring.summary import METRICS_OF, layerwise
from sinkscope.plugins import Plugin
from sinkscope.results.judgment import at_least
from sinkscope.results.metrics import METRICS, Metric
from sinkscope.results.papers import CLAIMS_PAPERS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import exact
from sinkscope.results.tables import POSITION, Column
from sinkscope.retrofits import RETROFITS, Retrofit
from sinkscope.retrofits.retrofit import Layer, ValuePart
from sinkscope.text.batch import Batch


class Dominance(Observable):
    name = "dominance"
    about = "share of each token's squared norm that its largest entry holds, by layer and position"
    sites = ("layer_out",)
    columns: ClassVar = {
        "dominance": (POSITION, Column("share", "of the squared norm, mean over sequences", "share")),
    }

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        positions = self.settings.positions
        squares = reading.tensor.float().square()
        share = batch.at_positions(squares.amax(-1) / squares.sum(-1), positions)
        self.statistics["dominance"].add({"share": share}, batch.present(positions), layer=layer)


FIRST = Metric(
    "dominance_first", "share of the largest entry at position 0", "largest entry's share",
    "largest squared entry ÷ squared norm of the layer's output at position 0, averaged over sequences",
    unit="share", form="{:.1%}",
)  # fmt: skip


def draw_dominance_by_layer(run: RunData) -> Figure:
    figure = new_figure(COLUMN, 2.0)
    ax = figure.subplots()
    plot.line_by_layer(ax, run.tables["dominance"].query("position == 0").set_index("layer")["share"], **SINK)
    plot.panel(ax, FIRST.short, FIRST.unit, share=True)
    return figure.finish(title(run, COLUMN))


class HalveFirstEmbedding(Intervention):
    name = "halve-first-embedding"
    about = "token embedding of position 0 ÷ 2 (positions)"
    paper = "an example"
    control_about = "random positions"
    redraws = "positions"
    expects = Expectation.SINK_STAYS

    positions: Indices = (0,)

    def applied(self, target: Target) -> AbstractContextManager[None]:
        embedding = target.model.get_input_embeddings()
        return edited_positions(self.name, target, [embedding], self.positions, lambda module, position, x: x / 2)


class Scale(ValuePart):
    """A learned factor exp(θ) of each key/value head's values; 1 at the start."""

    def __init__(self, layer: Layer, method: Retrofit) -> None:
        super().__init__(layer, method)
        self.theta = layer.empty(layer.value_heads)  # starts at 0 by default

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.theta.exp().expand(value.shape[:-1])


class HeadScale(Retrofit):
    name = "head-scale"
    about = "a learned factor of each key/value head's values"
    paper = "an example"
    part = Scale


LARGEST = Part(
    "largest share of one entry at position 0, over layers",
    lambda evidence: exact(evidence.natural.table("dominance").query("position == 0")["share"].max()),
    at_least(0.5),
)


def register(plugin: Plugin) -> None:
    """Called once by sinkscope, before a command runs."""
    plugin.add(OBSERVABLES, Dominance)
    plugin.add(METRICS, FIRST)
    plugin.add(METRICS_OF, {FIRST.name: layerwise("dominance", "share", where="position == 0")}, name="dominance")
    about = "share of the largest entry at position 0, by layer"
    plugin.add(FIGURES, FigureSpec("dominance-by-layer", __name__, about, ("dominance",)))
    plugin.add(INTERVENTIONS, HalveFirstEmbedding)
    plugin.add(RETROFITS, HeadScale)
    plugin.add(CLAIMS_PAPERS, "an example", name="D")
    plugin.add(CLAIMS, Claim("D-1", "§1", "One entry dominates position 0.", (LARGEST,)))
