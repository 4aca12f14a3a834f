"""What is measured on the Bigram-Backcopy task at one step of a training (VGA §4.1, figures 4–6).

Queries are those from position 1 on: <s> sees only itself. Every number is a mean over them in the held-out
sequences; of attention, by layer, over heads too.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.close_ups import AttentionMaps
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.families import Family
from sinkscope.retrofits.retrofit import Layer, layers_of
from sinkscope.text.batch import Batch
from sinkscope.training.tasks.bigram_backcopy import BigramBackcopy

AT_ONCE = 64  # sequences


@torch.no_grad()
def measure(task: BigramBackcopy, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
    """Measure the metrics `BACKCOPY` of results/metrics.py on sequences (N,T) of the task, of a model in eval mode.

    Returns:
        layer (−1: the whole model), metric, value.
    """
    seen: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    with open_tracer(model, family) as tracer:
        for first in range(0, len(held_out), AT_ONCE):
            batch = _batch(held_out[first : first + AT_ONCE])
            kinds = _kinds(task, batch)
            for metric, values in risks(task, tracer.logits(batch), batch).items():
                seen[WHOLE_MODEL, metric].append(values)
            for layer, metric, values in _in_layers(tracer, batch, kinds):
                seen[layer, metric].append(values)
    rows = []
    for (layer, metric), parts in seen.items():
        mean = torch.cat(parts).double().mean(0)
        if mean.dim() == 0:
            rows.append((layer, metric, float(mean)))
            continue
        rows.append((layer, metric, float(mean.mean())))  # of heads
        if metric == "attention_to_start":
            rows.append((layer, f"{metric}_max", float(mean.max())))
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])


@torch.no_grad()
def example(
    task: BigramBackcopy, model: PreTrainedModel, family: Family, sequence: np.ndarray
) -> dict[str, pd.DataFrame]:
    """One sequence (T,) seen closely, as VGA figures 4 and 6 show it.

    → `attention_maps`, every head's weights as that table has them elsewhere, and `value_norms`: layer, sequence,
    position, token_id, is_trigger, norm as the projection makes it, attended_norm behind a gate on the values.
    """
    batch = _batch(sequence[None])
    layers = layers_of(model, family)
    heads = [(index, head) for index, layer in enumerate(layers) for head in range(layer.heads)]
    maps = AttentionMaps(Settings(), heads)
    with open_tracer(model, family) as tracer, _watched(layers) as ends:
        tracer.forward(batch, [maps])
    frames = [
        pd.DataFrame(
            {
                "layer": index,
                "sequence": 0,
                "position": range(len(sequence)),
                "token_id": sequence,
                "is_trigger": task.is_trigger(sequence),
                "norm": _norms(ends[index]["value"])[0],
                "attended_norm": _norms(ends[index]["attended"])[0],
            }
        )
        for index in range(len(layers))
    ]
    return maps.tables() | {"value_norms": pd.concat(frames, ignore_index=True)}


def _batch(sequences: np.ndarray) -> Batch:
    ids = torch.from_numpy(sequences)
    return Batch(ids, torch.ones_like(ids))


# -------------------------------------------------------------------------------------------------- which queries


def _kinds(task: BigramBackcopy, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries are no triggers, and which are triggers, (B,T) bool each; position 0 is neither."""
    trigger = torch.from_numpy(task.is_trigger(batch.token_ids.numpy()))
    plain = ~trigger
    plain[:, 0] = False
    return plain, trigger


# ----------------------------------------------------------------------------------------------------- the losses


def risks(task: BigramBackcopy, logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """Each position's loss above the optimum. For a pair it is KL(p ‖ model), not the loss of the token drawn."""
    log_q = upcast(logits).log_softmax(-1).cpu().double()
    ids = batch.token_ids
    plain, trigger = _kinds(task, batch)
    p = torch.from_numpy(task.transitions)[ids[plain]]
    bigram = (torch.xlogy(p, p) - p * log_q[plain]).sum(-1)
    before = ids.roll(1, dims=1)  # a trigger never stands at position 0
    backcopy = -log_q.gather(-1, before[..., None]).squeeze(-1)[trigger]
    return {"bigram_risk": bigram, "backcopy_risk": backcopy}


# ----------------------------------------------------------------------------------------------------- the layers


def _in_layers(
    tracer: Tracer, batch: Batch, kinds: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Layer, metric, and its observations: (n,), or (n,H) where heads differ."""
    plain, trigger = kinds
    layers = layers_of(tracer.model, tracer.family)
    attention = _ToStart(plain, trigger)
    with _watched(layers) as ends:
        tracer.forward(batch, [attention])
    yield from attention.found
    for layer, end in enumerate(ends):
        for name, norms in (("value", _norms(end["value"])), ("attended", _norms(end["attended"]))):
            yield layer, f"start_{name}_norm", norms[:, 0]
            yield layer, f"trigger_{name}_norm", norms[trigger]
            yield layer, f"other_{name}_norm", norms[plain]
        before, after = (torch.linalg.vector_norm(upcast(end[name]), dim=-1).cpu() for name in ("mix", "gated"))
        left = after / before.clamp(min=torch.finfo(before.dtype).tiny)
        yield layer, "plain_output_gate", left[plain]
        yield layer, "trigger_output_gate", left[trigger]


def _norms(value: torch.Tensor) -> torch.Tensor:
    """(B,T,K,d) → (B,T): of all heads' values together."""
    return torch.linalg.vector_norm(upcast(value), dim=(-2, -1)).cpu()


class _ToStart(Observable):
    """Each query's weight on <s> and on triggers, and the lead of <s> in the logits."""

    name = "to-start"
    sites = ("attention",)

    def __init__(self, plain: torch.Tensor, trigger: torch.Tensor) -> None:
        super().__init__(Settings())
        self.plain, self.trigger = plain, trigger
        self.found: list[tuple[int, str, torch.Tensor]] = []

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        whole = slice(0, read.length)
        weights = read.weights(whole, whole)[0].movedim(1, -1).cpu()  # (B,T,T,H)
        to_start = weights[:, :, 0]
        to_triggers = weights.masked_fill(~self.trigger[:, None, :, None], 0.0).sum(2)
        allowed = read.allowed(whole, whole)
        assert allowed is not None  # causal, of more than one token
        lead = start_lead(read.logits(whole, whole), allowed).movedim(1, -1).cpu()
        self.found += [
            (layer, "attention_to_start", to_start[self.plain]),
            (layer, "early_attention_to_start", to_start[self.plain & (self.trigger.cumsum(1) == 0)]),
            (layer, "attention_to_triggers", to_triggers[self.plain]),
            (layer, "trigger_attention_to_start", to_start[self.trigger]),
            (layer, "delta_logit", lead[self.plain]),
        ]


def start_lead(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Δlogit (VGA §4.1): the logit of key 0 minus the mean of the other keys', among those that the query may see.

    logits (B,H,T,T), allowed (B|1,H|1,T,T) bool → (B,H,T); query 0 has no other keys, and no lead.
    """
    others = allowed.clone()
    others[..., 0] = False
    mean = logits.masked_fill(~others, 0.0).sum(-1) / others.sum(-1).clamp(min=1)
    return logits[..., 0] - mean


@contextmanager
def _watched(layers: list[Layer]) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Keep, of each layer's last forward pass: `value` (B,T,K,d) as projected, `attended` after a retrofit has changed
    it; `mix` (B,T,H,d) of the heads, `gated` as their output projection reads it.
    """
    ends: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    with ExitStack() as hooks:
        for layer, end in zip(layers, ends, strict=True):
            for name, first in (("value", True), ("attended", False)):
                keep = partial(_keep_value, end, name, layer)
                hooks.enter_context(layer.value.module.register_forward_hook(keep, prepend=first))
            for name, first in (("mix", True), ("gated", False)):
                keep = partial(_keep_mix, end, name, layer)
                hooks.enter_context(layer.output.register_forward_pre_hook(keep, prepend=first))
        yield ends


def _keep_value(
    end: dict[str, torch.Tensor], name: str, layer: Layer, module: nn.Module, args: tuple, output: torch.Tensor
) -> None:
    end[name] = output[..., layer.value.places]


def _keep_mix(end: dict[str, torch.Tensor], name: str, layer: Layer, module: nn.Module, args: tuple) -> None:
    end[name] = args[0].unflatten(-1, (layer.heads, -1))
