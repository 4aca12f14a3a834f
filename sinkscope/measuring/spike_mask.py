"""The spike mask: which tokens are sinks in the output of which layers, and the coordinates that are large there.

A sparse autoencoder, a probe or a steering vector that is fitted to all tokens is fitted to the sinks, whose norm may
be hundreds of times that of the others: the mask leaves them out. A `SpikeFilter` recognizes them in batches of one's
own, from what a calibration has seen, while a model trains or decodes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.measure import measure
from sinkscope.measuring.observables.observable import Observable, Reading, Settings, Sums
from sinkscope.measuring.observables.spikes import FIRST_SINK, PARALLEL, RESIDUAL_SINK, SINK_NORM
from sinkscope.measuring.one_pass import token_norms
from sinkscope.measuring.passes import first_size
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import open_tracer
from sinkscope.options.files import user_path
from sinkscope.options.measuring import RunConfig
from sinkscope.results.activations import MASK_FILE, Activations
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch

MASK_OBSERVABLES = ("sink-tokens", "residual-sinks", "massive")
MASK_TABLES = {"sink_tokens", "residual_sinks", "spikes", "massive"}  # tables of these observables


@dataclass(frozen=True, eq=False)
class SpikeMask:
    """The sinks of some sequences: `acts[layer][~mask.tokens[layer]]` are the states (N,T,D) of the other tokens."""

    tokens: torch.Tensor  # (L,N,T) bool: whether the token is a sink, first or secondary, in the layer's output
    start: torch.Tensor  # (N,T): the first layer in which the token is a sink; -1 for a token that is not
    lifetime: torch.Tensor  # (N,T): the number of layers in which it is a sink
    massive_coordinates: torch.Tensor  # (L,D) bool: some token has a massive activation there
    residual_coordinates: torch.Tensor  # (L,D) bool: most tokens are large there
    token_ids: torch.Tensor  # (N,T), with register tokens, if the model has some
    attention_mask: torch.Tensor  # (N,T): 1 for a token, 0 past the end of a sequence

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write FOLDER/spike_mask.safetensors, with a tensor for each field."""
        Activations(vars(self)).write(user_path(folder), MASK_FILE)


def measured_mask(subject: Subject, config: RunConfig, tables: Mapping[str, pd.DataFrame] | None = None) -> SpikeMask:
    """Return the mask of all sequences of a subject, from a run's `tables` or, where one is missing, a further pass."""
    if tables is None or not tables.keys() >= MASK_TABLES:
        tables, _ = measure(subject, config.model_copy(update={"observables": MASK_OBSERVABLES, "skip_parity": True}))
    model, sinks, residual = subject.loaded.model, tables["sink_tokens"], tables["residual_sinks"]
    batch = subject.inputs.whole().with_registers(registers_before(model))
    sizes = tables["spikes"]["layer"].nunique(), model.config.get_text_config().hidden_size
    of_sinks = {name: torch.tensor(sinks[name].to_numpy(int)) for name in sinks.select_dtypes("integer")}
    place = of_sinks["sequence"], of_sinks["position"]
    start, last, lifetime = (torch.full(batch.token_ids.shape, fill) for fill in (-1, -2, 0))
    for tensor, column in ((start, "layer"), (last, "last_layer"), (lifetime, "lifetime")):
        tensor[place] = of_sinks[column]
    layers = torch.arange(sizes[0])[:, None, None]
    is_sink = (layers >= start) & (layers <= last)
    coordinates = np.zeros((2, *sizes), bool)
    rows = (tables["massive"].query("is_massive"), residual[residual["kind"] == RESIDUAL_SINK])
    for is_large, large in zip(coordinates, rows, strict=True):
        is_large[large["layer"].to_numpy(int), large["coordinate"].to_numpy(int)] = True
    massive, residual_sinks = torch.from_numpy(coordinates)
    return SpikeMask(is_sink, start, lifetime, massive, residual_sinks, batch.token_ids, batch.attention_mask)


@dataclass(frozen=True, eq=False)
class SpikeFilter:
    """Recognizes sink tokens by calibrated directions and norms: `states[~spikes(states, layer)]` are the others'.

    A token is a sink in a layer's output if its state is parallel to the mean direction of the calibration's first
    sinks (|cosine| > 0.9) and its norm is at least three times the calibration's median: the rule of the spike mask,
    which needs neither the other tokens nor the other layers. Where most tokens of a sequence are sinks, as with one
    token repeated, the mask, which compares with the sequence's own median, has none, and the filter all.
    """

    direction: torch.Tensor  # (L,D), unit vectors
    least_norm: torch.Tensor  # (L,); inf in layers in which fewer than half of the first sinks are sinks

    def __call__(self, states: torch.Tensor, layer: int) -> torch.Tensor:
        """Return which tokens are sinks, (…) bool, from the output (…,D) of a layer, counted from 0, of any dtype."""
        states = upcast(states)
        cosine = F.normalize(states, dim=-1) @ self.direction[layer].to(states)
        return (cosine.abs() > PARALLEL) & (torch.linalg.vector_norm(states, dim=-1) >= self.least_norm[layer].item())


class FirstSinks(Observable):
    """Sums the directions of the first sinks, and the median norms of all sequences, by layer."""

    name = "first-sinks"
    sites = ("layer_out",)

    def __init__(self, settings: Settings, positions: Mapping[int, int]) -> None:
        super().__init__(settings)
        self.positions = positions  # sequence → position of its first sink
        self.sums: Sums[tuple[int, str]] = Sums()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        hidden = upcast(reading.tensor)
        norms = token_norms(hidden)
        for row, (start, length) in enumerate(zip(batch.start.tolist(), batch.lengths.tolist(), strict=True)):
            self.sums.add((layer, "median"), norms[row, start : start + length].median().double().cpu())
            if (position := self.positions.get(batch.first + row)) is not None:
                state = F.normalize(hidden[row, start + position], dim=-1)
                self.sums.add((layer, "direction"), state.double().cpu())


def calibrated_filter(subject: Subject, config: RunConfig) -> SpikeFilter:
    """Return the filter of the first sinks of a subject's sequences, from two passes.

    Raises SinkscopeError if no sequence has a sink.
    """
    tables, _ = measure(subject, config.model_copy(update={"observables": ("sink-tokens",), "skip_parity": True}))
    sinks = tables["sink_tokens"]
    first = sinks[sinks["kind"] == FIRST_SINK]
    if first.empty:
        raise SinkscopeError(f"{subject.loaded.name} has no sink token in these {len(subject.inputs)} sequences")
    seen = FirstSinks(config, dict(zip(first["sequence"], first["position"], strict=True)))
    with open_tracer(subject.loaded.model, subject.family, config.attn) as tracer:
        for batch in subject.inputs.batches(first_size(subject.inputs, subject.loaded.model, config.batch_size)):
            tracer.forward(batch, [seen])
    layers = range(1 + max(layer for layer, _ in seen.sums))
    direction = torch.stack([seen.sums[layer, "direction"] for layer in layers])
    norms = SINK_NORM * torch.stack([seen.sums[layer, "median"] for layer in layers]) / len(subject.inputs)
    alive = [((first["layer"] <= layer) & (layer <= first["last_layer"])).sum() for layer in layers]
    is_alive = torch.tensor(alive) >= len(first) / 2
    return SpikeFilter(F.normalize(direction, dim=-1).float(), norms.where(is_alive, torch.inf).float())
