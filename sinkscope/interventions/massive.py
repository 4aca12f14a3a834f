"""Changes to the sink's residual state: massive activations set to zero or to their mean, and its norm rescaled."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import nn

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Expectation, Intervention, Known, Target, edited_positions
from sinkscope.interventions.parameters import Open, Places, Real, Reals
from sinkscope.models.edits import edited_input, edited_output

ELSEWHERE = 0.25  # a coordinate of the sink is massive at no more than this share of the other tokens


def several_copies(target: Target) -> str | None:
    return "its residual stream has several copies, of which the mean is known" if target.family.copies else None


class MassiveEdits(Intervention):
    """Changes coordinates of layers' outputs at chosen positions (S2M §3, Sun et al. 2024)."""

    paper = "S2M §3"
    control_about = "random coordinates"
    redraws = "coordinates"
    opens = ("layers", "coordinates")
    requires = (several_copies,)

    puts_mean: ClassVar[bool] = False  # whether massive activations of other tokens are set to their mean, or else to 0

    layers: Open = None  # None: all layers at whose output a coordinate is massive
    positions: Places = (0,)
    coordinates: Open = None  # None: coordinates that are massive at the sink and at few other tokens
    # massive activations of other tokens, such as delimiters: groups of layer, coordinate, smallest magnitude and mean
    elsewhere: Reals | None = None

    def measured(self, known: Known) -> dict[str, Any]:
        layers, coordinates = sink_massive(self.name, known, self.positions[0], self.layers, self.coordinates)
        layers, coordinates = self.layers or layers, self.coordinates or coordinates
        elsewhere = self.elsewhere
        if elsewhere is None and self.positions == (0,):
            table = known.tables["massive"]
            rows = table[table["is_massive"] & (table["position"] != 0)]
            rows = rows[rows["layer"].isin(layers) & rows["coordinate"].isin(coordinates)]
            groups = rows.groupby(["layer", "coordinate"])["value"]
            rows = groups.agg(least=lambda x: x.abs().min(), mean="mean").reset_index()
            elsewhere = tuple(rows.to_numpy(dtype=float).flatten().tolist()) or None
        return {"layers": layers, "coordinates": coordinates, "elsewhere": elsewhere}

    def values(self, *shape: int) -> torch.Tensor:
        """Return the new values, (layers, positions, coordinates)."""
        return torch.zeros(shape)

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        coordinates = list(self.coordinates or ())
        layers: dict[int, nn.Module] = {layer: target.layers[layer] for layer in self.layers or ()}
        new = self.values(len(layers), len(self.positions), len(coordinates)).flatten(0, 1)
        values = dict(zip(product(layers.values(), self.positions), new, strict=True))
        numbers = self.elsewhere or ()
        rows = [(int(row[0]), int(row[1]), *row[2:]) for row in zip(*[iter(numbers)] * 4, strict=False)]
        if len(numbers) % 4 or not all(row[0] in layers and row[1] in coordinates for row in rows):
            raise InputError(f"{self.name}: elsewhere needs a chosen layer, a chosen coordinate, magnitude and mean")

        def edit(module: nn.Module, position: int, x: torch.Tensor) -> torch.Tensor:
            x[:, coordinates] = values[module, position].to(x)
            return x

        with ExitStack() as stack:
            for layer, coordinate, least, mean in rows:
                value = mean if self.puts_mean else 0.0
                put = partial(replace_large, coordinate=coordinate, least=least, value=value)
                stack.enter_context(edited_output(layers[layer], put))
            # registered later, so that the positions get their own values
            stack.enter_context(edited_positions(self.name, target, layers.values(), self.positions, edit))
            yield

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        # the means of other coordinates are measured separately
        others: Any = super().control(known, draw)
        return type(self)(layers=self.layers, positions=self.positions, coordinates=others.coordinates)


class ZeroMassive(MassiveEdits):
    name = "zero-massive"
    about = "hidden-state coordinates at the sink = 0 (layers, positions, coordinates, elsewhere: the massive ones)"
    expects = Expectation.PERPLEXITY_COLLAPSES


class MeanMassive(MassiveEdits):
    name = "mean-massive"
    about = "hidden-state coordinates at the sink = their mean over sequences (as zero-massive; means)"
    expects = Expectation.PERPLEXITY_UNHARMED
    puts_mean = True

    means: Reals | None = None  # by layer, position, coordinate; None: measured

    def resolved(self, known: Known) -> Self:
        decided = super().resolved(known)
        if decided.means is not None:
            return decided
        if known.means is None:
            raise InputError(f"{self.name}: name the means, one for every layer, position and coordinate")
        places = product(decided.layers or (), decided.positions)
        means = [known.means(*place)[list(decided.coordinates or ())] for place in places]
        return decided.model_copy(update={"means": tuple(torch.cat(means).tolist())})

    def values(self, *shape: int) -> torch.Tensor:
        if self.means is None or len(self.means) != math.prod(shape):
            raise InputError(f"{self.name}: {' × '.join(map(str, shape))} means are needed")
        return torch.tensor(self.means).view(shape)


def replace_large(module: nn.Module, x: torch.Tensor, coordinate: int, least: float, value: float) -> torch.Tensor:
    """Set a coordinate of x (B,T,D) to a value wherever its magnitude is at least `least`."""
    x = x.clone()
    entries = x[..., coordinate]
    entries.masked_fill_(entries.abs() >= least, value)
    return x


def sink_massive(
    name: str,
    known: Known,
    position: int,
    layers: tuple[int, ...] | None = None,
    coordinates: tuple[int, ...] | None = None,
    to_name: str = "layers and coordinates",
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return layers and coordinates of the massive activations at a position; raise InputError if there are none.

    They are massive in at least half of the sequences, at coordinates that are massive at few other tokens (ELSEWHERE)
    in every layer. Other coordinates are features of the stream instead of the sink: Gemma3-270M has one at nearly all
    tokens of its first layers. `layers` and `coordinates` limit the search; `to_name` is the advice in the error
    message.
    """
    missing = f"{name}: no massive activations at position {position} are known: name {to_name}"
    table = known.table("massive", missing)
    sequences = table["sequence"].nunique()
    massive = table[table["is_massive"]]
    elsewhere = massive[massive["position"] != position].groupby(["layer", "coordinate"]).size()
    common = elsewhere[elsewhere > ELSEWHERE * sequences * (known.length - 1)].reset_index()["coordinate"]
    here = massive[(massive["position"] == position) & ~massive["coordinate"].isin(common)]
    here = here if layers is None else here[here["layer"].isin(layers)]
    if coordinates is not None and here["coordinate"].isin(coordinates).any():
        here = here[here["coordinate"].isin(coordinates)]
    counts = here.groupby(["layer", "coordinate"]).size()
    usual = counts[counts >= sequences / 2].reset_index()
    if usual.empty:
        raise InputError(missing)
    return tuple(sorted(set(usual["layer"].tolist()))), tuple(sorted(set(usual["coordinate"].tolist())))


class RescaleNorm(Intervention):
    """Multiplies the input of the chosen layers at the sink by a factor (GS §4: does the norm regulate gradients?).

    The change also affects later layers. RMSNorm maps c·h to the same output as h, up to its ε, and scales the gradient
    by 1/c. So a branch computes the same, and its gradient enters the residual stream 1/c times as large.
    """

    name = "rescale-norm"
    about = (
        "the input of a layer at the sink times a factor, with its direction kept (layers: the one after the first "
        "massive activation, positions, factor: 0.5)"
    )
    paper = "GS §4"
    control_about = "another position"
    redraws = "positions"
    expects = Expectation.PERPLEXITY_UNHARMED
    opens = ("layers",)
    requires = (
        several_copies,
        lambda target: (
            None
            if any("attn_norm" in target.family.block(layer).sites for layer in range(len(target.layers)))
            else "it has no norm before its branches, so they would read a different state"
        ),
    )

    layers: Open = None  # None: the layer after the first at whose output the position has massive activations
    positions: Places = (0,)
    factor: Annotated[Real, Field(gt=0)] = 0.5

    def measured(self, known: Known) -> dict[str, Any]:
        layers, _ = sink_massive(self.name, known, self.positions[0], to_name="layers")
        return {"layers": (layers[0] + 1,)}

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.factor == 1.0:
            raise InputError(f"{self.name} would change nothing: its factor is 1")
        modules = [target.layers[layer] for layer in self.layers or ()]
        return edited_positions(
            self.name, target, modules, self.positions, lambda module, position, x: self.factor * x, edited_input
        )
