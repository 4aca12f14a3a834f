"""Heads ablated by a score of how dormant they are (Sandoval-Segura et al. 2025)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from pydantic import Field
from torch import nn

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Intervention, Known, Target, must_change
from sinkscope.interventions.parameters import Chosen, Open, Places, Real, chosen
from sinkscope.interventions.sink import MaskSink
from sinkscope.models.edits import edited_input


def without_separate_heads(target: Target) -> str | None:
    for layer, attention in target.family.attentions(target.model).items():
        module = attention._modules.get(target.family.output)
        width = getattr(module, "nx", getattr(module, "in_features", 0))
        if not width or width % target.query_heads:
            return f"layer {layer} has no projection that reads the outputs of its heads one after the other"
    return None


class AblateHeads(Intervention):
    """Sets the outputs of some heads to zero before the output projection.

    The paper flags heads on each input by itself; here the mean score over the sequences chooses them once, so that the
    same heads are ablated on every input. Controls are as many random heads of the whole model.
    """

    name = "ablate-heads"
    about = (
        "outputs of heads = 0 (share: 0.12 of all heads; by: output-norm, those with the smallest norm in their layer, "
        "or first-mass, those with most attention to position 0; or numbers: layer × heads of a layer + head)"
    )
    paper = "Sandoval-Segura et al."
    control_about = "as many random heads"
    reads = ("head-scores",)
    opens = ("numbers",)
    asks_for = "the numbers of heads"
    requires = (MaskSink.inapplicable, without_separate_heads)

    by: Literal["output-norm", "first-mass"] = "output-norm"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.12
    numbers: Open = None  # None: chosen by score and share

    def check(self, target: Target, length: int | None = None) -> None:
        super().check(target, length)
        heads = target.query_heads
        have = {layer * heads + head for layer in target.attending() for head in range(heads)}
        if missing := sorted(set(self.numbers or ()) - have):
            layer, head = divmod(missing[0], heads)
            raise InputError(f"{self.name}: there is no head {missing[0]}, which is head {head} of layer {layer}")

    def measured(self, known: Known) -> dict[str, Any]:
        table = known.table("head_scores", f"{self.name}: no scores of heads are known: name the numbers of heads")
        return {"numbers": dormant(table, self.by, self.share)}

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        heads = known.target.query_heads
        every = [layer * heads + head for layer in known.target.attending() for head in range(heads)]
        order = torch.randperm(len(every), generator=draw)[: len(self.numbers or ())].tolist()
        return self.model_copy(update={"numbers": tuple(sorted(every[index] for index in order))})

    def begins_at(self, target: Target) -> int:
        return min(self.numbers or (0,)) // target.query_heads

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        heads = target.query_heads
        by_layer: dict[int, list[int]] = {}
        for number in self.numbers or ():
            by_layer.setdefault(number // heads, []).append(number % heads)

        def zeroed(ablated: list[int], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x.unflatten(-1, (heads, -1))[..., ablated, :] = 0.0
            touch()
            return x

        with must_change(self.name, "a token") as touch, ExitStack() as stack:
            for layer, attention in target.family.attentions(target.model).items():
                if layer in by_layer:
                    module = attention.get_submodule(target.family.output)
                    stack.enter_context(edited_input(module, partial(zeroed, by_layer[layer])))
            yield


class ScaleHeadOutputs(Intervention):
    """Scales the outputs o of heads at a token before the output projection: around=mean, μ + λ(o − μ), else λ·o.

    μ is the mean of the head's outputs over the sequence's tokens up to that one. A token that attends to few others
    averages few values, so that its outputs deviate more from the mean: around=mean makes them do so with the
    attention as it is.
    """

    name = "scale-head-outputs"
    about = (
        "outputs of heads at a token deviate from their mean over tokens by a factor more (factor: 5; positions: 10; "
        "layers, query heads), or with around=zero are scaled as a whole"
    )
    paper = "2605.06611"
    control_about = "another position"
    redraws = "positions"
    requires = (MaskSink.inapplicable, without_separate_heads)

    layers: Chosen = None
    heads: Chosen = None
    positions: Places = (10,)  # as in the paper
    factor: Real = 5.0
    around: Literal["mean", "zero"] = "mean"

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        layout, heads = target.layout, chosen(self.heads, target.query_heads)
        if self.factor == 1.0:
            raise InputError(f"{self.name} would change nothing: its factor is 1")

        def scaled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            before, x = x.unflatten(-1, (target.query_heads, -1)), x.clone()  # (B,T,H,d)
            outputs = x.unflatten(-1, (target.query_heads, -1))
            for position in self.positions:
                rows, columns = layout.once(layout.locate, x.device, *x.shape[:2], position)
                if not len(rows):
                    continue
                center = torch.zeros_like(before[rows, columns])
                if self.around == "mean":
                    if layout.past:
                        raise InputError(
                            f"{self.name}: around=mean needs all tokens up to position {position} in one pass"
                        )
                    column = torch.arange(x.shape[1], device=x.device)
                    is_before = (column <= columns[:, None]) & (column >= columns[:, None] - position)
                    center = torch.einsum("nt,nthd->nhd", is_before.to(x), before[rows]) / (position + 1)
                changed = center + self.factor * (before[rows, columns] - center)
                outputs[rows[:, None], columns[:, None], torch.tensor(heads, device=x.device)] = changed[:, heads]
                touch()
            return x

        missing = f"position {', '.join(map(str, self.positions))}"
        with must_change(self.name, missing) as touch, ExitStack() as stack:
            for layer in target.attending(self.layers):
                module = target.family.attentions(target.model)[layer].get_submodule(target.family.output)
                stack.enter_context(edited_input(module, scaled))
            yield


def dormant(head_scores: pd.DataFrame, by: str, share: float) -> tuple[int, ...]:
    """Return the numbers (layer × heads + head) of this share of all heads, at least one, the most dormant by a score.

    Ties are broken by layer and head.
    """
    # the column of `head_scores`, and whether the heads with the smallest values are dormant
    column, smallest = {"output-norm": ("relative_norm", True), "first-mass": ("first_mass", False)}[by]
    ranked = head_scores.sort_values([column, "layer", "head"], ascending=[smallest, True, True])
    ranked = ranked.head(max(1, round(share * len(ranked))))
    heads = int(head_scores["head"].max()) + 1
    return tuple(sorted((ranked["layer"] * heads + ranked["head"]).astype(int).tolist()))
