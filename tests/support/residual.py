"""What each layer adds to the residual stream, read off the sums that the model's own code makes.

While a layer runs, every sum of two tensors as large as the residual stream is kept. What leads from the layer's input
to its output by such sums, and by a norm behind a sum, is the stream; what is added on the way are the branches:

    mid = layer_in + attn_out       where the code of a later branch reads the sum
    layer_out = mid + mlp_out

Of branches that read the same, attention's (or that of what a layer has in its place) is the one that depends on other
tokens. No module is known by its name, and no constant is fitted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

ADDED_TO = (torch.Tensor.add_, torch.Tensor.__iadd__)  # the first of the two becomes the sum
ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, *ADDED_TO)


class Kept:
    """A tensor with its graph, and what it held at the time: the model may change it in place."""

    def __init__(self, live: torch.Tensor, x: torch.Tensor) -> None:
        self.live = live
        self.x = x  # (B,T,D)
        self.key = (x + 0.0).numpy().tobytes()  # of -0.0 and 0.0 alike


@dataclass
class Sums:
    """Of one layer. A value is found again bit for bit, whatever tensor holds it."""

    taken: Kept
    terms: dict[bytes, tuple[Kept, Kept]] = field(default_factory=dict)  # sum → what was added
    totals: dict[bytes, Kept] = field(default_factory=dict)
    normed: dict[bytes, Kept] = field(default_factory=dict)  # what a norm gave → what it took

    def sites(self, given: torch.Tensor) -> dict[str, torch.Tensor]:
        """Site → (B,T,D); without branches where no sums lead from the layer's input to what it gives."""
        out = self.kept(given)
        steps = self._steps(out.key) or []
        added = [branch for branch, _ in steps]
        behind = next((at for at in range(1, len(steps)) if self._reads(added[at], steps[:at])), None)
        if behind is None:
            alone = [part for branch in added for part in self._parts(branch)]
            mixing = [self._mixes_tokens(part) for part in alone]
            parts = {
                "attn_out": [part for part, mixes in zip(alone, mixing, strict=True) if mixes],
                "mlp_out": [part for part, mixes in zip(alone, mixing, strict=True) if not mixes],
            }
        else:
            parts = {"attn_out": added[:behind], "mid": [steps[behind - 1][1]], "mlp_out": added[behind:]}
        found = {"layer_in": [self.taken], **parts, "layer_out": [out]}
        return {site: torch.stack([part.x for part in several]).sum(0) for site, several in found.items() if several}

    def kept(self, x: torch.Tensor, scale: float = 1) -> Kept:
        return Kept(x, scale * x.detach().double().clone().reshape(self.taken.x.shape))

    def _steps(self, target: bytes, above: frozenset[bytes] = frozenset()) -> list[tuple[Kept, Kept]] | None:
        """From the layer's input to the target: what is added, and the sum. None where no way leads there."""
        if target == self.taken.key:
            return []
        if target in above:
            return None
        if target in self.normed:
            return self._steps(self.normed[target].key, above | {target})
        terms = self.terms.get(target, ())
        for stream, branch in zip(terms, reversed(terms), strict=True):
            before = self._steps(stream.key, above | {target})
            if before is not None:
                return [*before, (branch, self.totals[target])]
        return None

    def _parts(self, branch: Kept) -> list[Kept]:
        terms = self.terms.get(branch.key)
        return [branch] if terms is None else [part for term in terms for part in self._parts(term)]

    def _reads(self, branch: Kept, before: Sequence[tuple[Kept, Kept]]) -> bool:
        """Whether a branch is made of what was added before, or of the sums."""
        sources = [each.live for step in before for each in step]
        return any(gradient is not None for gradient in _gradients(branch.live.sum(), sources))

    def _mixes_tokens(self, branch: Kept) -> bool:
        """Whether what is added to the last token depends on what the layer takes of those before."""
        last = branch.live.reshape(self.taken.x.shape)[0, -1]
        (gradient,) = _gradients(last @ torch.linspace(1, 2, len(last), dtype=last.dtype), [self.taken.live])
        return gradient is not None and bool(gradient.reshape(self.taken.x.shape)[0, :-1].any())


def _gradients(of: torch.Tensor, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return torch.autograd.grad(of, sources, retain_graph=True, allow_unused=True)


class Additions(TorchFunctionMode):
    """Keeps the sums of the layer that is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Sums | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, layer = kwargs or {}, self.layer
        if layer is None or func not in ADDITIONS or not all(_is_like(layer.taken.x, x) for x in args[:2]):
            return func(*args, **kwargs)
        first = args[0].clone() if func in ADDED_TO else args[0]
        terms = layer.kept(first), layer.kept(args[1], kwargs.get("alpha", 1))
        given = func(*args, **kwargs)
        total = layer.kept(given)
        layer.terms[total.key], layer.totals[total.key] = terms, total
        return given

    def see_norm(self, module: nn.Module, args: tuple, given: Any) -> None:
        """Forward hook of any module: a norm has gains of its channels, and no matrix."""
        layer = self.layer
        if layer is None or not args or not all(_is_like(layer.taken.x, x) for x in (args[0], given)):
            return
        if {parameter.dim() for parameter in module.parameters()} == {1} and not any(module.children()):
            layer.normed[layer.kept(given).key] = layer.kept(args[0])


def _is_like(stream: torch.Tensor, x: Any) -> bool:
    is_real = isinstance(x, torch.Tensor) and x.is_floating_point()
    return is_real and x.numel() == stream.numel() and x.shape[-1] == stream.shape[-1]


@contextmanager
def additions() -> Iterator[Additions]:
    mode = Additions()
    with register_module_forward_hook(mode.see_norm), mode:
        yield mode
