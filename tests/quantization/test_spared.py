"""Spared tokens and coordinates on small tensors: which entries stay as they are, and what ranges are made of."""

import numpy as np
import torch

from sinkscope.quantization.grids import RowGrids
from sinkscope.quantization.sites import INPUT, KEYS, SCORES, WEIGHT, Site
from sinkscope.quantization.spared import Spared
from sinkscope.text.batch import Batch

TOKENS = [np.array([1, 1, 1], bool), np.array([1, 0, 1], bool), np.array([1, 1], bool)]  # of sequences 0 to 2
SITE = Site("up", INPUT, 0, "up")


def spared_of(coordinates: torch.Tensor | None = None) -> Spared:
    """Return what is spared while sequences 1 and 2 are read."""
    spared = Spared(TOKENS, {} if coordinates is None else {SITE: coordinates})
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    spared.read(Batch(torch.full((2, 3), 5), mask, first=1))
    return spared


def is_spared(spared: Spared, site: Site, x: torch.Tensor, **place: slice) -> list:
    return (spared.without(site, x, **place) == 0).tolist()


def test_a_token_is_spared_in_its_sequence_and_a_coordinate_in_all_tokens() -> None:
    ones = torch.ones(2, 3, 2)
    whole, none = [True] * 2, [False] * 2
    assert is_spared(spared_of(), SITE, ones) == [[whole, none, whole], [whole, whole, none]]
    both = is_spared(spared_of(torch.tensor([False, True])), SITE, ones)
    assert both == [[whole, [False, True], whole], [whole, whole, [False, True]]]
    assert is_spared(spared_of(), SITE, torch.ones(6, 1)) == [[True], [False], [True], [True], [True], [False]]
    keys = is_spared(spared_of(), Site("self_attn", KEYS, 0, ""), torch.ones(2, 1, 3, 1))
    assert keys == [[[[True], [False], [True]]], [[[True], [True], [False]]]]


def test_of_attention_scores_the_rows_of_spared_queries_are() -> None:
    site = Site("self_attn", SCORES, 0, "")
    marks = is_spared(spared_of(), site, torch.ones(2, 1, 2, 3), rows=slice(1, 3))
    assert marks == [[[[False] * 3, [True] * 3]], [[[True] * 3, [False] * 3]]]


def test_positions_that_all_sequences_share_are_spared_if_all_spare_them() -> None:
    assert is_spared(spared_of(), SITE, torch.ones(1, 3, 1)) == [[[True], [False], [False]]]


def test_weights_are_never_spared() -> None:
    weight = torch.ones(3, 2)
    assert not np.any(is_spared(spared_of(), Site("up", WEIGHT, 0, "up"), weight))


def test_spared_entries_stay_as_they_are_and_widen_no_dynamic_range() -> None:
    x = torch.tensor([[1.0, 2.0, 900.0], [0.3, 0.7, -500.0], [50.0, 60.0, 70.0]]).expand(2, 3, 3)
    grid = RowGrids(4, is_symmetric=False)
    snapped = spared_of(torch.tensor([False, False, True])).snap(SITE, grid, x)
    assert torch.equal(snapped[0, [0, 2]], x[0, [0, 2]])
    assert torch.equal(snapped[..., 2], x[..., 2])
    assert torch.equal(snapped[0, 1, :2], grid.snap(torch.tensor([0.3, 0.7, 0.0]))[:2])
