"""The spike mask: which tokens are sinks in the output of which layers, and the coordinates that are large there.

A sparse autoencoder, a probe or a steering vector that is fitted to all tokens is fitted to the sinks, whose norm may
be hundreds of times that of the others: the mask leaves them out.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from sinkscope.measuring.measure import measure
from sinkscope.measuring.observables.spikes import RESIDUAL_SINK
from sinkscope.measuring.subject import Subject
from sinkscope.options.files import user_path
from sinkscope.options.measuring import RunConfig
from sinkscope.results.activations import MASK_FILE, Activations
from sinkscope.retrofits.retrofit import registers_before

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
