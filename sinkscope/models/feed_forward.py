"""The last projection of a feed-forward network, m = W u + b, of one network or of every expert of a mixture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinkscope.errors import InputError
from sinkscope.models.edits import Edit
from sinkscope.models.family import Family
from sinkscope.models.projections import LINEAR_LAYERS, check_plain

NO_EXPERT = -1  # the expert of a layer without a mixture


@dataclass(frozen=True)
class FeedForward:
    """The last projection of one layer. An expert's W is a part of one tensor (E,…), as transformers keeps it."""

    path: str  # the module's path within the layer
    module: Any  # a Linear, a Conv1D, or the module that holds all experts

    @property
    def experts(self) -> int:
        """The number of experts; 0 without a mixture."""
        return len(self.module.down_proj) if hasattr(self.module, "down_proj") else 0

    @property
    def _name(self) -> str:
        return "down_proj" if self.experts else "weight"

    def _oriented(self, parameter: torch.Tensor, expert: int) -> torch.Tensor:
        """Return a view (D,F) of the parameter, or of an expert's part."""
        part, transposed = parameter, isinstance(self.module, Conv1D)
        if self.experts:
            part, transposed = parameter[expert], self.module.is_transposed
        return part.T if transposed else part

    def weight(self, expert: int = NO_EXPERT) -> torch.Tensor:
        """Return W (D,F) of the network or of an expert, without gradient, like `bias`."""
        if not self.experts:
            check_plain(self.module)
        return self._oriented(getattr(self.module, self._name).detach(), expert)

    def bias(self, expert: int = NO_EXPERT) -> torch.Tensor | None:
        bias = getattr(self.module, f"{self._name}_bias" if self.experts else "bias", None)
        return bias if bias is None else bias.detach()[expert] if self.experts else bias.detach()

    def zeroed(self, expert: int | None, rows: Sequence[int] | None, column: int | None) -> list[Edit]:
        """Return the edits that set W at some rows of a column to 0; rows None: all of an expert's W and b."""
        bias = [] if rows or self.bias(expert or 0) is None else [f"{self._name}_bias"]
        copies = {name: getattr(self.module, name).detach().clone() for name in (self._name, *bias)}
        for copy in copies.values():
            if rows:
                self._oriented(copy, expert or 0)[list(rows), column] = 0
            else:
                copy[expert] = 0
        return [(self.module, name, copy) for name, copy in copies.items()]

    def inputs(self, args: tuple) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield expert, indices of tokens (n,) in the flattened batch, and their u (n,F), from the module's arguments.

        The module of a mixture gets the normed states (N,D) and each token's experts (N,k).
        """
        if not self.experts:
            u = args[0].detach().flatten(0, -2)
            yield NO_EXPERT, torch.arange(len(u), device=u.device), u
            return
        states, chosen = args[0].detach().flatten(0, -2), args[1].flatten(0, -2)
        module = self.module
        for expert in range(self.experts):
            tokens = (chosen == expert).any(-1).nonzero()[:, 0]
            if len(tokens):
                up = module.gate_up_proj[expert]
                bias = module.gate_up_proj_bias[expert] if module.has_bias else None
                hidden = F.linear(states[tokens], up.T if module.is_transposed else up, bias)
                yield expert, tokens, module._apply_gate(hidden)


def feed_forwards(model: PreTrainedModel, family: Family) -> dict[int, FeedForward]:
    """Return layer → its last projection, of the layers whose feed-forward network has the form of the family."""
    by_layer = {}
    for layer, module in enumerate(family.layer_modules(model)):
        parts = dict(module.named_modules(remove_duplicate=False))
        for path in (family.down, family.experts):
            part: Any = parts.get(path)
            is_mixture = all(hasattr(part, name) for name in ("gate_up_proj", "is_transposed", "_apply_gate"))
            weight = getattr(part, "down_proj", None) if is_mixture else None
            if isinstance(part, LINEAR_LAYERS) or (isinstance(weight, nn.Parameter) and weight.dim() == 3):
                by_layer[layer] = FeedForward(path, part)
    return by_layer


def without_feed_forward(model: PreTrainedModel, family: Family) -> str | None:
    """Return why the last projections of the feed-forward networks cannot be read; None if they can."""
    by_layer = feed_forwards(model, family)
    if not by_layer:
        return f"no layer has its feed-forward network's last projection at {family.down} or {family.experts}"
    try:
        for part in by_layer.values():
            part.weight(0)
    except InputError as error:
        return str(error)
    return None
