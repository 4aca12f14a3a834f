"""What is measured on the Bigram-Backcopy task at one step of a training (VGA §4.1, figures 4–6).

Queries are those from position 1 on, for the first token sees only itself, and behind an opening that the chain does
not follow. "Start" is the first token, mostly <s>. Every number is a mean over them in the held-out
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
from sinkscope.models.family import Family
from sinkscope.retrofits.retrofit import RETROFIT, GatePart
from sinkscope.text.batch import Batch
from sinkscope.training.tasks.bigram_backcopy import BigramBackcopy

AT_ONCE = 64  # sequences


@torch.no_grad()
def measure(
    task: BigramBackcopy, model: PreTrainedModel, family: Family, held_out: np.ndarray, opening: int = 1
) -> pd.DataFrame:
    """Measure the metrics `BACKCOPY` of results/metrics.py on sequences (N,T) of the task, whose first `opening` tokens
    are no part of the chain, of a model in eval mode.

    Returns:
        layer (−1: the whole model), metric, value.
    """
    seen: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    with open_tracer(model, family) as tracer:
        for first in range(0, len(held_out), AT_ONCE):
            batch = _batch(held_out[first : first + AT_ONCE], family, opening)
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
    batch = _batch(sequence[None], family, 1)
    heads = range(model.config.get_text_config().num_attention_heads)
    maps = AttentionMaps(Settings(), [(layer, head) for layer in family.attentions(model) for head in heads])
    with open_tracer(model, family) as tracer, _watched(tracer) as ends:
        tracer.forward(batch, [maps])
    frames = [
        pd.DataFrame(
            {
                "layer": layer,
                "sequence": 0,
                "position": range(len(sequence)),
                "token_id": sequence,
                "is_trigger": task.is_trigger(sequence),
                "norm": _norms(end["value"], len(sequence))[0],
                "attended_norm": _norms(end["attended"], len(sequence))[0],
            }
        )
        for layer, end in ends.items()
    ]
    return maps.tables() | {"value_norms": pd.concat(frames, ignore_index=True)}


def _batch(sequences: np.ndarray, family: Family, opening: int) -> Batch:
    ids = torch.from_numpy(sequences)
    return Batch(ids, torch.ones_like(ids), first_predicted=max(1, opening, family.prefix))


# -------------------------------------------------------------------------------------------------- which queries


def _kinds(task: BigramBackcopy, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries are no triggers, and which are triggers, (B,T) bool each; those of an opening and of a prefix are
    neither.
    """
    trigger = torch.from_numpy(task.is_trigger(batch.token_ids.numpy()))
    counted = torch.arange(trigger.shape[1]) >= batch.first_predicted
    return ~trigger & counted, trigger & counted


# ----------------------------------------------------------------------------------------------------- the losses


def risks(task: BigramBackcopy, logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """Each position's loss above the optimum. For a pair it is KL(p ‖ model), not the loss of the token drawn."""
    log_q = upcast(logits).log_softmax(-1).cpu().double()
    ids = batch.token_ids
    plain, trigger = _kinds(task, batch)
    p = torch.from_numpy(task.transitions)[ids[plain]]
    bigram = (torch.xlogy(p, p) - p * log_q[plain]).sum(-1)
    before = ids.roll(1, dims=1)  # a trigger is never the first of a chain
    backcopy = -log_q.gather(-1, before[..., None]).squeeze(-1)[trigger]
    return {"bigram_risk": bigram, "backcopy_risk": backcopy}


# ----------------------------------------------------------------------------------------------------- the layers


def _in_layers(
    tracer: Tracer, batch: Batch, kinds: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Layer, metric, and its observations: (n,), or (n,H) where heads differ."""
    plain, trigger = kinds
    attention = _ToStart(plain, trigger)
    with _watched(tracer) as ends:
        tracer.forward(batch, [attention])
    yield from attention.found
    for layer, end in ends.items():
        for name in ("value", "attended"):
            norms = _norms(end[name], plain.shape[1])
            yield layer, f"start_{name}_norm", norms[:, 0]
            yield layer, f"trigger_{name}_norm", norms[trigger]
            yield layer, f"other_{name}_norm", norms[plain]
        before, after = (torch.linalg.vector_norm(upcast(end[name]), dim=-1).cpu() for name in ("mix", "gated"))
        left = (after / before.clamp(min=torch.finfo(before.dtype).tiny))[:, -plain.shape[1] :]
        yield layer, "plain_output_gate", left[plain]
        yield layer, "trigger_output_gate", left[trigger]


def _norms(value: torch.Tensor, length: int) -> torch.Tensor:
    """(B,n+T,K,d) → (B,T): of all heads' values together; of the T tokens behind n register tokens."""
    return torch.linalg.vector_norm(upcast(value[:, -length:]), dim=(-2, -1)).cpu()


class _ToStart(Observable):
    """Each query's weight on <s> and on triggers, and the lead of <s> in the logits."""

    name = "to-start"
    sites = ("attention",)

    def __init__(self, plain: torch.Tensor, trigger: torch.Tensor) -> None:
        super().__init__(Settings())
        self.plain, self.trigger = plain, trigger
        self.found: list[tuple[int, str, torch.Tensor]] = []

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        text = slice(read.length - self.plain.shape[1], read.length)  # behind register tokens
        weights = read.weights(text, text)[0].movedim(1, -1).cpu()  # (B,T,T,H)
        to_start = weights[:, :, 0]
        to_triggers = weights.masked_fill(~self.trigger[:, None, :, None], 0.0).sum(2)
        allowed = read.allowed(text, text)
        assert allowed is not None  # causal, of more than one token
        lead = start_lead(read.logits(text, text), allowed).movedim(1, -1).cpu()
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
def _watched(tracer: Tracer) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """Keep, of the last forward pass of each layer with attention: `value` (B,T,K,d) in front of a retrofit's gate,
    `attended` behind it; `mix` (B,T,H,d) of the heads, `gated` as their output projection reads it.
    """
    family = tracer.family
    attentions = family.attentions(tracer.model)
    ends: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in attentions}
    with ExitStack() as hooks:
        for layer, attention in attentions.items():
            end, seam = ends[layer], tracer.seams[layer]
            gate = getattr(attention, RETROFIT, None)
            if isinstance(gate, GatePart):
                hooks.enter_context(gate.register_forward_hook(partial(_keep_raw, end)))
            hooks.enter_context(seam.value.register_forward_hook(partial(_keep_attended, end)))
            hooks.enter_context(seam.mix.register_forward_hook(partial(_keep_mix, end)))
            output = attention.get_submodule(family.output)
            hooks.enter_context(output.register_forward_pre_hook(partial(_keep_gated, end)))
        yield ends


def _keep_raw(end: dict[str, torch.Tensor], gate: nn.Module, args: tuple, factors: torch.Tensor) -> None:
    end["value"] = args[1]


def _keep_attended(end: dict[str, torch.Tensor], tap: nn.Module, args: tuple, value: torch.Tensor) -> None:
    end["attended"] = value.transpose(1, 2)
    end.setdefault("value", end["attended"])  # no gate


def _keep_mix(end: dict[str, torch.Tensor], tap: nn.Module, args: tuple, mix: torch.Tensor) -> None:
    end["mix"] = mix


def _keep_gated(end: dict[str, torch.Tensor], output: nn.Module, args: tuple) -> None:
    end["gated"] = args[0].view(end["mix"].shape)
