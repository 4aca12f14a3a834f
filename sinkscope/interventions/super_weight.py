"""Interventions on the entries and experts that write massive activations (Yu et al. 2024; Su et al. 2025)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Self

import pandas as pd
import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Expectation, Intervention, Known, Target
from sinkscope.interventions.parameters import Index, Open
from sinkscope.models.edits import check_changes, replaced
from sinkscope.models.feed_forward import NO_EXPERT, FeedForward, feed_forwards, without_feed_forward

EARLY = 0.75  # massive activations form in this first part of the layers (Su et al., code)


class _Zeroed(Intervention):
    """Sets a part of the last projection of one layer's feed-forward network to zero until the end of the block."""

    reads = ("super-weight",)
    expects = Expectation.PERPLEXITY_COLLAPSES

    layer: Index | None = None  # None: measured
    expert: Index | None = None  # of a mixture; None: measured, or the layer has none

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        return without_feed_forward(target.model, target.family)

    def part(self, target: Target) -> FeedForward:
        """Return the projection; raise InputError if there is no such layer, expert, row or column."""
        found = feed_forwards(target.model, target.family)
        if self.layer not in found:
            raise InputError(f"{self.name}: name a layer with a feed-forward network, not {self.layer}")
        part = found[self.layer]
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

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        edits = self.part(target).zeroed(self.expert, *self.entries)
        check_changes(self.name, edits)
        with replaced(edits):
            yield


class ZeroSuperWeight(_Zeroed):
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

    rows: Open = None  # None: measured
    column: Index | None = None
    which: Literal["super", "largest"] = "super"

    @property
    def expects(self) -> Expectation | None:  # type: ignore[override]
        """The paper's effect is that of the super weight alone."""
        return super().expects if self.which == "super" else None

    @property
    def entries(self) -> tuple[tuple[int, ...] | None, int | None]:
        if self.rows is None or self.column is None:
            raise InputError(f"{self.name}: name the rows and the column")
        return self.rows, self.column

    def resolved(self, known: Known) -> Self:
        if self.layer is not None and self.rows is not None and self.column is not None:
            return self
        if "super_weights" not in known.tables:
            raise InputError(f"{self.name}: no super weight is known: name layer, rows and column")
        table = usual_pairs(known.tables["super_weights"])
        table = table[table["layer"] == self.layer] if self.layer is not None else table[table["is_early"]]
        if table.empty:
            raise InputError(f"{self.name}: name a layer with a feed-forward network, not {self.layer}")
        found = {name: int(x) for name, x in table.loc[table["written"].idxmax()][["layer", *PAIR]].items()}
        if self.which == "largest":
            weight = feed_forwards(known.target.model, known.target.family)[found["layer"]].weight(found["expert"])
            found["row"], found["column"] = divmod(int(weight.abs().argmax()), weight.shape[1])
        found["rows"] = (found.pop("row"),)  # type: ignore[assignment]
        return self.model_copy(update=found | ({"expert": None} if found["expert"] == NO_EXPERT else {}))

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """Return the change of a random other row of the column, or of a random other column of the row."""
        (rows, column), shape = self.entries, self.part(known.target).weight(self.expert or 0).shape
        along_row = bool(torch.randint(2, (), generator=draw))
        own = (column if along_row else (rows or (0,))[0]) or 0
        other = int(torch.randint(shape[along_row] - 1, (), generator=draw))
        other += other >= own
        return self.model_copy(update={"column": other} if along_row else {"rows": (other,)})


class ZeroSuperExpert(_Zeroed):
    name = "zero-super-expert"
    about = "the output of one expert of a mixture = 0 (layer, expert: those with the largest output)"
    paper = "Su et al."
    control_about = "a random other expert"
    expected = False  # only some models are mixtures

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        parts = feed_forwards(target.model, target.family).values()
        return super().inapplicable(target) or (None if any(part.experts for part in parts) else "it has no experts")

    def resolved(self, known: Known) -> Self:
        if self.layer is not None and self.expert is not None:
            return self
        if "super_experts" not in known.tables:
            raise InputError(f"{self.name}: no super expert is known: name layer and expert")
        table = known.tables["super_experts"]
        table = table[table["is_super"]] if table["is_super"].any() else table
        found = table.loc[table["largest"].idxmax()]
        return self.model_copy(update={"layer": int(found["layer"]), "expert": int(found["expert"])})

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
    found = groups[["written", "input", "output", "weight", "share"]].mean()
    found["sequences"] = groups.size() / table["sequence"].nunique()
    found = found.reset_index().sort_values(["sequences", "written"], ascending=False).drop_duplicates("layer")
    return found.sort_values("layer").assign(is_early=found["layer"] < EARLY * (table["layer"].max() + 1))
