"""Entries of activations that stay in full precision, and are left out of the ranges of their sites.

Tokens are spared in all activations, coordinates site by site; weights are never spared. Tokens of the beginning that
are spared in every sequence are a prefix whose keys and values a cache holds in full precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from sinkscope.errors import InputError
from sinkscope.quantization.grids import Grid, RowGrids
from sinkscope.quantization.sites import CACHED, SCORES, SOFTMAX, WEIGHT, Site
from sinkscope.text.batch import Batch

ALL_ROWS = slice(None)


@dataclass
class Spared:
    """The spared entries of a text; none by default. `read` is called before each forward pass."""

    tokens: Sequence[np.ndarray] = ()  # by sequence: (T,) bool
    coordinates: Mapping[Site, torch.Tensor] = field(default_factory=dict)  # bool, broadcast to the site's tensor
    _tokens: torch.Tensor | None = field(default=None, init=False)  # (B,T) bool, of the batch that is read

    def read(self, batch: Batch) -> None:
        """Take the spared tokens of a batch without padding on the left."""
        rows = self.tokens[batch.first : batch.first + len(batch.token_ids)]
        self._tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True) if len(rows) else None

    def without(self, site: Site, x: torch.Tensor, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Return x with 0, which is on every grid and widens none, in place of spared entries.

        Args:
            x: A tensor at the site; of attention scores and softmax outputs only the `rows` of these queries.
        """
        spared = self._mask(site, x, rows)
        return x if spared is None else x.masked_fill(spared, 0.0)

    def snap(self, site: Site, grid: Grid | RowGrids, x: torch.Tensor, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Round all entries of x that are not spared; see `without`."""
        spared = self._mask(site, x, rows)
        return grid.snap(x) if spared is None else x.where(spared, grid.snap(x.masked_fill(spared, 0.0)))

    def _mask(self, site: Site, x: torch.Tensor, rows: slice) -> torch.Tensor | None:
        coordinates, tokens = self.coordinates.get(site), self._tokens
        coordinates = None if coordinates is None else coordinates.to(x.device)
        if tokens is None or site.part == WEIGHT:
            return coordinates
        if site.part in (SCORES, SOFTMAX):  # (B,H,R,T)
            tokens = tokens[:, None, rows, None]
        elif site.part in CACHED:  # (B,Hkv,T,D)
            tokens = tokens[:, None, :, None]
        elif x.shape[0] == 1 < len(tokens):  # positional embeddings, which all sequences share
            tokens = tokens.all(0, keepdim=True)[..., None]
        elif x.numel() == tokens.numel() * x.shape[-1]:
            tokens = tokens.view(*x.shape[:-1], 1)
        else:
            raise InputError(f"--prefix does not apply: {site} reads only some tokens (a mixture of experts)")
        tokens = tokens.to(x.device)
        return tokens if coordinates is None else tokens | coordinates


NOTHING = Spared()


def random_tokens(spared: np.ndarray, drawn: np.random.Generator) -> np.ndarray:
    """Return a mask of equally many other tokens of a sequence, the control of the spared ones (T,)."""
    mask, free = np.zeros_like(spared), np.flatnonzero(~spared)
    mask[drawn.choice(free, min(len(free), int(spared.sum())), replace=False)] = True
    return mask
