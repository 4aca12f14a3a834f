"""Learned positions: their vectors, effective positional encodings (NU §3.2.1), and the coordinates massive in them."""

import torch
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.families import Family


def known_positions(model: PreTrainedModel, family: Family) -> int | None:
    """How many positions have a learned vector; None where positions are not learned."""
    if not family.position_embedding:
        return None
    rows: torch.Tensor = model.get_submodule(family.position_embedding).weight  # type: ignore[assignment]
    return rows.shape[0] - family.position_offset


def position_vectors(model: PreTrainedModel, family: Family, count: int) -> torch.Tensor:
    """Learned absolute positions p_0 … p_{count-1}, (count, D). Errors: InputError where positions are not learned."""
    known = known_positions(model, family)
    if known is None:
        raise InputError(f"'{family.name}' has no learned positions (its positions: {family.positions})")
    rows: torch.Tensor = model.get_submodule(family.position_embedding).weight  # type: ignore[assignment]
    if count > known:
        raise InputError(f"the model knows {known} positions, and {count} were asked for")
    return rows[family.position_offset : family.position_offset + count]


@torch.no_grad()
def effective_positions(model: PreTrainedModel, family: Family, count: int) -> torch.Tensor:
    """EPE_i = MLP⁽¹⁾(p_i) + p_i of the first `count` positions, (count, D): NU §3.2.1.

    The first layer's feed-forward network on the raw positional vector, no norm in between.
    """
    vectors = position_vectors(model, family, count)
    first = family.layer_modules(model)[0]
    hidden = vectors
    for name in family.mlp:
        hidden = first.get_submodule(name)(hidden)
    return vectors + hidden


FIRST_PLACES = 16  # the gap is looked for among this many largest entries …


GAP = 2.0  # … the last massive one is at least this times the next one …


OUTLYING = 10.0  # … and this times the median


def massive_coordinates(vector: torch.Tensor) -> list[int]:
    """Coordinates of the entries that a gap sets apart, in rising order; [] where there is no gap (NU appendix C).

    |entries| in falling order: the largest ratio of one to the next among the first FIRST_PLACES is the gap. Those in
    front of it are massive if it is at least GAP, and the smallest of them at least OUTLYING times the median.
    """
    magnitude, coordinates = vector.double().abs().sort(descending=True, stable=True)
    ratios = magnitude[:-1][:FIRST_PLACES] / magnitude[1:][:FIRST_PLACES]
    ratios = ratios.nan_to_num(nan=1.0)  # 0 ÷ 0
    place = int(ratios.argmax())
    if ratios[place] < GAP or magnitude[place] < OUTLYING * magnitude.median():
        return []
    return sorted(coordinates[: place + 1].tolist())
