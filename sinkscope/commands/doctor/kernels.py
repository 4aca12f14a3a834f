"""What an attention kernel, or a server, ignores of a model: its outputs compared with those of eager attention.

A kernel that ignores an argument of transformers' attention interface gives wrong numbers without an error. If a kernel
departs from eager attention by more than round-off, the reference is run once more without each of the features that
the model passes to its kernel. The kernel ignores the feature without which the reference gives its numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from sinkscope.attention.kernels import is_visible, upcast
from sinkscope.attention.seam import attention_implementation, open_seam
from sinkscope.errors import is_out_of_memory, one_line
from sinkscope.measuring.parity import CHECKED_TOKENS, ROUNDING_MARGIN, largest_difference, perturbed_layers
from sinkscope.measuring.subject import tokens_within_positions
from sinkscope.measuring.tracer import model_inputs
from sinkscope.models.edits import Attend, attending_by
from sinkscope.models.family import Family, input_device
from sinkscope.models.wiring import record_ends
from sinkscope.text.batch import Batch

# without the package, transformers would download a kernel from the hub, which is code
FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
LONGEST_WINDOW = 1024  # tokens, for a window to be reached; longer windows are not tested

# (mask, other arguments) of an attention call, without padding → the same without the feature; None if it has none
Dropped = tuple[torch.Tensor | None, dict[str, Any]] | None


def _without(
    names: tuple[str, ...], query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
) -> Dropped:
    if all(options.get(name) is None for name in names):
        return None
    return mask, options | {name: None for name in names if name in options}


def _without_scaling(query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> Dropped:
    usual = query.shape[-1] ** -0.5
    scaling = options.get("scaling")
    return None if scaling is None or math.isclose(scaling, usual) else (mask, options | {"scaling": usual})


def _without_window(query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> Dropped:
    if mask is None:
        return None
    allowed = is_visible(mask)
    full = torch.ones_like(allowed)
    full = full if allowed.triu(1).any() else full.tril()  # an encoder's queries see later keys
    return None if torch.equal(allowed, full) else (full, options)


# what a model may need of its kernel → the call without it
FEATURES: dict[str, Callable[[torch.Tensor, torch.Tensor | None, dict[str, Any]], Dropped]] = {
    "learned sinks": partial(_without, ("s_aux", "sinks")),
    "softcap": partial(_without, ("softcap",)),
    "position bias": partial(_without, ("position_bias",)),
    "scaling": _without_scaling,
    "sliding window": _without_window,
}


@contextmanager
def lacking(model: PreTrainedModel, family: Family, features: tuple[str, ...]) -> Iterator[set[str]]:
    """Attend by sinkscope's eager attention without these features, and yield the set of all that the model uses."""
    used: set[str] = set()

    def attend(
        attend_as_before: Attend, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, **options: Any,
    ) -> Any:  # fmt: skip
        for feature, without in FEATURES.items():
            dropped = without(query, attention_mask, options)
            if dropped is not None:
                used.add(feature)
                attention_mask, options = dropped if feature in features else (attention_mask, options)
        return attend_as_before(module, query, key, value, attention_mask, **options)

    with open_seam(model, family, "eager"), attending_by(model, attend):
        yield used


@dataclass(frozen=True)
class ComparedKernel:
    """An attention kernel of transformers, compared with eager attention."""

    name: str
    difference: float = math.nan  # largest relative difference of the last layer's output
    layer: int | None = None  # first layer whose output departs by more than round-off; None if none does
    dropped: tuple[str, ...] = ()  # the features that explain it; empty if none do
    untried: str = ""  # why it was not run here


def tokens_to_compare(model: PreTrainedModel, family: Family) -> int:
    """Return how many tokens reach the model's window, if that is not too long."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    wanted = window + CHECKED_TOKENS // 4
    wanted = wanted if CHECKED_TOKENS <= wanted <= LONGEST_WINDOW else CHECKED_TOKENS
    return tokens_within_positions(wanted, model, family)


@torch.no_grad()
def compare_kernels(model: PreTrainedModel, family: Family, batch: Batch, tolerance: float) -> list[ComparedKernel]:
    """Compare every kernel that transformers runs here with eager attention, on one batch without padding.

    The family's attention goes through transformers' interface; `tolerance` is the largest relative difference of the
    last layer's output that round-off explains.
    """
    layers, inputs = family.layer_modules(model), model_inputs(model, batch, False, family.first_position)

    def run() -> dict[int, torch.Tensor]:
        ends = record_ends(model, layers, inputs)
        return {index: ends[layer][-1].x for index, layer in enumerate(layers) if layer in ends}

    def differences_of(outputs: Mapping[int, torch.Tensor], expected: Mapping[int, torch.Tensor]) -> dict[int, float]:
        return {layer: largest_difference(outputs[layer], x, batch.attention_mask) for layer, x in expected.items()}

    config: Any = model.config
    current = config._attn_implementation
    with attention_implementation(model, "eager"):
        expected = run()
    with lacking(model, family, ()) as used:
        run()
    kernels: list[ComparedKernel] = []
    for name in dict.fromkeys((current, "sdpa", *FLASH, "flex_attention")):  # what is compiled first comes last
        if name == "eager":
            continue
        if reason := _why_unavailable(name, input_device(model)) if name != current else "":
            kernels.append(ComparedKernel(name, untried=reason))
            continue
        try:
            with attention_implementation(model, name):
                outputs = run()
        except Exception as error:  # a package or device that it needs is missing: each library has errors of its own
            if is_out_of_memory(error):
                raise
            kernels.append(ComparedKernel(name, untried=one_line(error, 120)))
            continue
        differences = differences_of(outputs, expected)
        layer = next((layer for layer, difference in differences.items() if not difference <= tolerance), None)

        def is_same(outputs: dict[int, torch.Tensor] = outputs) -> bool:
            return all(difference <= tolerance for difference in differences_of(outputs, run()).values())

        dropped = () if layer is None else _ignored(model, family, used, is_same)
        kernels.append(ComparedKernel(name, list(differences.values())[-1], layer, dropped))
    return kernels


def _why_unavailable(name: str, device: torch.device) -> str:
    if not FLASH.get(name, lambda: True)():
        return "not installed"
    is_compiled_first = name == "flex_attention" and device.type == "cpu"
    return "on a CPU, compiling it takes a minute" if is_compiled_first else ""


def _ignored(model: PreTrainedModel, family: Family, used: set[str], is_same: Callable[[], bool]) -> tuple[str, ...]:
    """Return the features without which eager attention gives the same numbers; empty if there are none."""
    alone: list[tuple[str, ...]] = [(feature,) for feature in sorted(used)]
    for features in alone if len(alone) < 2 else [*alone, tuple(sorted(used))]:  # each alone, then all together
        with lacking(model, family, features):
            if is_same():
                return features
    return ()


# --- logits from elsewhere


@dataclass(frozen=True)
class Departure:
    """Logits from a server or an exported model, compared with the model's."""

    tokens: int
    departing: int  # tokens that differ by more than round-off
    sequence: int = -1  # the first of them
    position: int = -1
    excess: float = 0.0  # largest difference of a token ÷ what round-off explains
    dropped: tuple[str, ...] = ()  # features without which eager attention gives the same logits


@torch.no_grad()
def compare_logits(
    model: PreTrainedModel, family: Family, token_ids: torch.Tensor, elsewhere: torch.Tensor, dtype: torch.dtype
) -> Departure:
    """Compare logits (N,T,V) for token ids (N,T), computed elsewhere in a dtype, with those of a model.

    A constant may be added to each token's logits, so log-probabilities do as well.
    """
    rows = [Batch(ids[None], torch.ones_like(ids[None])) for ids in token_ids]

    def differences(expected: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([_token_differences(a, b) for a, b in zip(elsewhere, expected, strict=True)])

    def logits() -> list[torch.Tensor]:
        inputs = (model_inputs(model, row, True, family.first_position) for row in rows)
        return [model(**each).logits[0].cpu() for each in inputs]

    here = logits()
    with perturbed_layers(model, family, dtype):
        moved = torch.stack([_token_differences(a, b) for a, b in zip(logits(), here, strict=True)])
    tolerance = float(moved.max()) + ROUNDING_MARGIN * torch.finfo(dtype).eps
    departures = differences(here)
    departs, excess = ~(departures <= tolerance), float(departures.max()) / tolerance
    if not bool(departs.any()):
        return Departure(departures.numel(), 0, excess=excess)
    dropped: tuple[str, ...] = ()
    if family.door == "interface":
        with lacking(model, family, ()) as used:
            logits()
        dropped = _ignored(model, family, used, lambda: bool((differences(logits()) <= tolerance).all()))
    sequence, position = (int(index) for index in departs.nonzero()[0])
    return Departure(departures.numel(), int(departs.sum()), sequence, position, excess, dropped)


def _token_differences(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ‖a - b‖ ÷ ‖b‖ of each token's logits, without their mean: (T,V) → (T,)."""
    logits, expected = (upcast(x.cpu()) - upcast(x.cpu()).mean(-1, keepdim=True) for x in (logits, expected))
    return (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
