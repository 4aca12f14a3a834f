"""Query, key and value projections of one attention layer, in one form for all families.

They may be separate modules or one, with weights stored (out, in) or (in, out) as GPT-2 does, and with fewer key/value
heads than query heads: each is read here as a set of one module's outputs, head by head.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinkscope.errors import InputError
from sinkscope.models.edits import check_own_map
from sinkscope.models.family import Family, Outputs, Role
from sinkscope.models.quantized import is_ordinary

ROLES: tuple[Role, ...] = ("query", "key", "value")


@dataclass(frozen=True)
class Projection:
    """One of a layer's three projections.

    module: a Linear, a Conv1D or what stands in for one (an adapter's layer, one of quantized weights), which may hold
        the other two as well. `weight` and `bias` are of the first two alone, and an InputError of others.
    places: (heads, d), the indices of the module's outputs that belong to each head.
    path: of the module within the attention module.
    """

    module: Any
    places: torch.Tensor
    path: str

    @property
    def heads(self) -> int:
        return self.places.shape[0]

    @property
    def width(self) -> int:
        """D, the width of what it reads."""
        return int(self.module.nx if isinstance(self.module, Conv1D) else self.module.in_features)

    @property
    def is_whole(self) -> bool:
        """Whether the module's outputs are these places and no others, in order."""
        return bool(torch.equal(self.places.flatten(), torch.arange(_outputs(self.module), device="cpu")))

    @property
    def weight(self) -> torch.Tensor:
        """(heads, d, D), as in k = W x."""
        return self._oriented(self._plain.weight)[self.places]

    @property
    def bias(self) -> torch.Tensor | None:
        """(heads, d); None where the module has none."""
        return None if self._plain.bias is None else self.module.bias[self.places]

    def with_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of the module's whole weight, in its own layout, with this projection's replaced by (heads, d, D)."""
        whole = self.module.weight.detach().clone()
        self._oriented(whole)[self.places] = weight.to(whole.dtype)
        return whole

    def with_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """A copy of the module's whole bias with this projection's replaced by (heads, d)."""
        whole = self.module.bias.detach().clone()
        whole[self.places] = bias.to(whole.dtype)
        return whole

    @property
    def _plain(self) -> Any:
        """The module. Raises InputError where its weights are not what it computes with."""
        check_plain(self.module)
        return self.module

    def _oriented(self, weight: torch.Tensor) -> torch.Tensor:
        """A view (out, in)."""
        return weight.T if isinstance(self.module, Conv1D) else weight


def check_plain(module: Any) -> None:
    """Raise InputError unless a module computes with its `weight` and `bias` alone, in ordinary numbers."""
    check_ordinary(module)
    if not isinstance(module, nn.Linear | Conv1D):  # an adapter's layer has more weights than `weight`
        package, kind = type(module).__module__.partition(".")[0], type(module).__name__
        raise InputError(f"it projects by {package}'s {kind}, not by one matrix: merge its adapter first")
    check_own_map(module)


def check_ordinary(module: Any) -> None:
    """Raise InputError if a module's weight is quantized; it may have an adapter."""
    if not hasattr(module, "weight") or not is_ordinary(module.weight):
        raise InputError("its weights are quantized: load it in float32, bfloat16 or float16")


def projections(model: PreTrainedModel, family: Family, layer: int) -> dict[Role, Projection]:
    """Query, key and value projection of a layer; of a family that was found numerically, those that were found.

    Raises:
        InputError: how they are kept is not known, or a module does not say how many outputs it has.
    """
    if not family.qkv and not family.projections.get(layer):
        raise InputError(f"'{family.name}' keeps q, k and v together in a way that is not known: its row needs `qkv`")
    named = _named(model, family, layer) if family.qkv else {}
    if layer not in family.projections:
        return named
    attention = family.attentions(model)[layer]
    found = {role: _found(attention, outputs) for role, outputs in family.projections[layer].items()}
    return {role: projection for role, projection in named.items() if role != "value"} | found


def lacking(family: Family, layers: Iterable[int], role: Role) -> str | None:
    """Why a projection of these layers cannot be edited; None where it can."""
    if not family.projections:
        return None if family.qkv else "how it keeps q, k and v together is not known: its row needs `qkv`"
    if (family.qkv and role != "value") or all(role in family.projections.get(layer, {}) for layer in layers):
        return None
    return f"its {role} states are not what one projection gives (a norm, a convolution or a latent is between)"


def _found(attention: nn.Module, outputs: Outputs) -> Projection:
    return Projection(attention.get_submodule(outputs.module), torch.tensor(outputs.places), outputs.module)


def _named(model: PreTrainedModel, family: Family, layer: int) -> dict[Role, Projection]:
    """As a row says it."""
    config: Any = model.config.get_text_config()
    attention = family.attentions(model)[layer]
    try:
        modules = [attention.get_submodule(name) for name in family.qkv]
    except AttributeError:
        kind = type(attention)
        raise InputError(
            f"layer {layer} attends by {kind.__module__}.{kind.__qualname__}, which has no {' and '.join(family.qkv)}"
        ) from None
    heads = config.num_attention_heads
    if not family.fused:
        width = _outputs(modules[0]) // heads
        return {
            role: Projection(module, torch.arange(_outputs(module)).view(-1, width), path)
            for role, module, path in zip(ROLES, modules, family.qkv, strict=True)
        }
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = (_outputs(modules[0]) // width - heads) // 2
    places = torch.arange(_outputs(modules[0])).view(-1, width)
    by_role = _FUSED[family.fused](heads, key_heads)
    return {role: Projection(modules[0], places[rows], family.qkv[0]) for role, rows in by_role.items()}


def _blocks(heads: int, key_heads: int) -> dict[Role, torch.Tensor]:
    """All query heads, then all key heads, then all value heads."""
    query, key, value = torch.arange(heads + 2 * key_heads).split([heads, key_heads, key_heads])
    return {"query": query, "key": key, "value": value}


def _groups(heads: int, key_heads: int) -> dict[Role, torch.Tensor]:
    """A key head's query heads, the key head, its value head; then the next key head's."""
    rows = torch.arange(heads + 2 * key_heads).view(key_heads, -1)
    return {"query": rows[:, :-2].flatten(), "key": rows[:, -2], "value": rows[:, -1]}


_FUSED = {"blocks": _blocks, "groups": _groups}


def _outputs(module: Any) -> int:
    count = module.nf if isinstance(module, Conv1D) else getattr(module, "out_features", None)
    if not isinstance(count, int):
        raise InputError(f"it projects by a {type(module).__name__}, which does not say how many outputs it has")
    return count
