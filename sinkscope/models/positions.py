"""Learned positions: their vectors, effective positional encodings, and massive coordinates of a vector.

NU is "Attention Sink Mechanisms Are Not Universal".
"""

import torch
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.family import Family
from sinkscope.models.in_memory import weight_in_memory

# Massive coordinates (NU appendix C): the gap is searched for among this many of the largest entries …
FIRST_PLACES = 16
GAP = 2.0  # … the last massive one is at least this times the next one …
OUTLYING = 10.0  # … and this times the median


def known_positions(model: PreTrainedModel, family: Family) -> int | None:
    """Return the number of positions that have a learned vector; None if positions are not learned."""
    if not family.position_embedding:
        return None
    return len(weight_in_memory(model.get_submodule(family.position_embedding))) - family.position_offset


def position_vectors(model: PreTrainedModel, family: Family, count: int) -> torch.Tensor:
    """Return learned absolute positions p_0 … p_{count-1}, (count, D); raise InputError if there are none, or fewer."""
    if not family.position_embedding:
        raise InputError(f"'{family.name}' has no learned positions (its positions: {family.positions})")
    vectors = weight_in_memory(model.get_submodule(family.position_embedding))[family.position_offset :]
    if count > len(vectors):
        raise InputError(f"the model has {len(vectors)} positions, and {count} were requested")
    return vectors[:count]


@torch.no_grad()
def effective_positions(model: PreTrainedModel, family: Family, count: int) -> torch.Tensor:
    """Return effective positional encodings EPE_i = MLP⁽¹⁾(p_i) + p_i, (count, D), of the first positions (NU §3.2.1).

    MLP⁽¹⁾ is the first layer's feed-forward network, applied to the positional vector without a norm.
    """
    vectors = hidden = position_vectors(model, family, count)
    for name in family.mlp:
        hidden = family.layer_modules(model)[0].get_submodule(name)(hidden)
    return vectors + hidden


def massive_coordinates(vector: torch.Tensor) -> list[int]:
    """Return the coordinates of entries that a gap separates from the rest, ascending; [] without a gap.

    NU appendix C: sort |entries| in descending order; the gap is the largest ratio of an entry to the next among the
    first FIRST_PLACES. The entries before it are massive if the gap is at least GAP and the smallest of them is at
    least OUTLYING times the median.
    """
    magnitude, coordinates = vector.double().abs().sort(descending=True, stable=True)
    ratios = magnitude[:-1][:FIRST_PLACES] / magnitude[1:][:FIRST_PLACES]
    ratios = ratios.nan_to_num(nan=1.0)  # 0 ÷ 0
    last = int(ratios.argmax())
    if ratios[last] < GAP or magnitude[last] < OUTLYING * magnitude.median():
        return []
    return sorted(coordinates[: last + 1].tolist())
