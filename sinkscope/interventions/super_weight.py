"""Interventions on the entries and experts that write massive activations (Yu et al. 2024; Su et al. 2025)."""

from typing import Any, ClassVar, Literal

import pandas as pd
import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Expectation, Intervention, Known, Requirement, Target, WeightEdits
from sinkscope.interventions.parameters import Index, Open
from sinkscope.models.edits import Edit
from sinkscope.models.feed_forward import NO_EXPERT, FeedForward, feed_forwards, without_feed_forward

EARLY = 0.75  # massive activations form in this first part of the layers (Su et al., code)


class ZeroedPart(WeightEdits):
    """Sets a part of the last projection of one layer's feed-forward network to zero until the end of the block."""

    reads = ("super-weight",)
    expects = Expectation.PERPLEXITY_COLLAPSES
    requires: ClassVar[tuple[Requirement, ...]] = (lambda target: without_feed_forward(target.model, target.family),)

    layer: Index | None = None  # None: measured
    expert: Index | None = None  # number of the expert; None: measured, or the layer has no experts

    def part(self, target: Target) -> FeedForward:
        """Return the projection; raise InputError if there is no such layer, expert, row or column."""
        parts = feed_forwards(target.model, target.family)
        if self.layer not in parts:
            raise InputError(f"{self.name}: name a layer with a feed-forward network, not {self.layer}")
        part = parts[self.layer]
        if (self.expert is None) == bool(part.experts):
            has = f"{part.experts} experts: name one" if part.experts else "no experts"
            raise InputError(f"{self.name}: layer {self.layer} has {has}")
        rows, column = self.entries
        sizes = part.experts or 1, *part.weight(0).shape
        numbers = self.expert or 0, max(rows or (0,)), column or 0
        for what, number, size in zip(("expert", "row", "column"), numbers, sizes, strict=True):
            if number >= size:
                raise InputError(f"{self.name}: there is no {what} {number}: layer {self.layer} has {size}, from 0 on")
        return part

    @property
    def entries(self) -> tuple[tuple[int, ...] | None, int | None]:
        """The rows and the column of W; None, None: all of W, and the bias."""
        return None, None

    def begins_at(self, target: Target) -> int:
        return self.layer or 0

    def edits(self, target: Target) -> list[Edit]:
        return self.part(target).zeroed(self.expert, *self.entries)


class ZeroSuperWeight(ZeroedPart):
    """Sets entries of one column of W, the weights that one neuron writes, to zero; by default the super weight alone.

    Rows that share a column are one neuron. With which=largest, the default is the entry of the same matrix with the
    largest magnitude, because magnitude alone does not make a super weight.
    """

    name = "zero-super-weight"
    about = (
        "one entry of a feed-forward network's last projection = 0 (layer, rows, column, expert: the entry that writes "
        "the largest output; which: super, or the largest entry of its matrix)"
    )
    paper = "Yu et al."
    control_about = "a random entry of the same row or of the same column"
    opens = ("layer", "rows", "column")
    asks_for = "the rows and the column"

    rows: Open = None  # None: measured
    column: Index | None = None
    which: Literal["super", "largest"] = "super"

    @property
    def expects(self) -> Expectation | None:  # type: ignore[override]
        """The paper's effect is that of the super weight alone."""
        return super().expects if self.which == "super" else None

    @property
    def entries(self) -> tuple[tuple[int, ...] | None, int | None]:
        return self.rows, self.column

    def measured(self, known: Known) -> dict[str, Any]:
        missing = f"{self.name}: no super weight is known: name layer, rows and column"
        table = usual_pairs(known.table("super_weights", missing))
        table = table[table["layer"] == self.layer] if self.layer is not None else table[table["is_early"]]
        if table.empty:
            raise InputError(f"{self.name}: name a layer with a feed-forward network, not {self.layer}")
        layer, expert, row, column = map(int, table.loc[table["written"].idxmax()][["layer", *PAIR]])
        if self.which == "largest":
            weight = feed_forwards(known.target.model, known.target.family)[layer].weight(expert)
            row, column = divmod(int(weight.abs().argmax()), weight.shape[1])
        return {"layer": layer, "expert": None if expert == NO_EXPERT else expert, "rows": (row,), "column": column}

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """Return the change of a random other row of the column, or of a random other column of the row."""
        (rows, column), shape = self.entries, self.part(known.target).weight(self.expert or 0).shape
        along_row = bool(torch.randint(2, (), generator=draw))
        treated = (column if along_row else (rows or (0,))[0]) or 0
        other = int(torch.randint(shape[along_row] - 1, (), generator=draw))
        other += other >= treated
        return self.model_copy(update={"column": other} if along_row else {"rows": (other,)})


def without_experts(target: Target) -> str | None:
    parts = feed_forwards(target.model, target.family).values()
    return None if any(part.experts for part in parts) else "it has no experts"


class ZeroSuperExpert(ZeroedPart):
    name = "zero-super-expert"
    about = "the output of one expert of a mixture = 0 (layer, expert: those with the largest output)"
    paper = "Su et al."
    control_about = "a random other expert"
    expected = False  # only some models are mixtures
    opens = ("layer", "expert")
    requires = (*ZeroedPart.requires, without_experts)

    def measured(self, known: Known) -> dict[str, Any]:
        table = known.table("super_experts", f"{self.name}: no super expert is known: name layer and expert")
        table = table[table["is_super"]] if table["is_super"].any() else table
        largest = table.loc[table["largest"].idxmax()]
        return {"layer": int(largest["layer"]), "expert": int(largest["expert"])}

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        parts = feed_forwards(known.target.model, known.target.family).items()
        every = [(layer, expert) for layer, part in parts for expert in range(part.experts)]
        places = [place for place in every if place != (self.layer, self.expert)]
        layer, expert = places[int(torch.randint(len(places), (), generator=draw))]
        return ZeroSuperExpert(layer=layer, expert=expert)


PAIR = ["expert", "row", "column"]


def usual_pairs(super_weights: pd.DataFrame) -> pd.DataFrame:
    """Return each layer's most frequent pair of row and column, with means over the sequences that have it.

    The columns are layer, expert, row, column; written, input and output, as magnitudes; weight, share, sequences
    (the share of sequences with the pair) and is_early.
    """
    table = super_weights.assign(**super_weights[["written", "input", "output"]].abs())
    groups = table.groupby(["layer", *PAIR])
    pairs = groups[["written", "input", "output", "weight", "share"]].mean()
    pairs["sequences"] = groups.size() / table["sequence"].nunique()
    pairs = pairs.reset_index().sort_values(["sequences", "written"], ascending=False).drop_duplicates("layer")
    return pairs.sort_values("layer").assign(is_early=pairs["layer"] < EARLY * (table["layer"].max() + 1))
