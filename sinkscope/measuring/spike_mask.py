"""The spike mask: which tokens are sinks in the output of which layers, and the coordinates that are large there.

A sparse autoencoder, a probe or a steering vector that is fitted to all tokens is fitted to the sinks, whose norm may
be hundreds of times that of the others: the mask leaves them out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from sinkscope.measuring.measure import measure
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.residual_sinks import RESIDUAL, ResidualSinks
from sinkscope.measuring.observables.sink_tokens import SinkTokens
from sinkscope.measuring.subject import Subject
from sinkscope.options.measuring import RunConfig
from sinkscope.results.activations import MASK_FILE, write_tensors
from sinkscope.retrofits.retrofit import registers_before

MEASURED = (SinkTokens.name, ResidualSinks.name, Massive.name)


@dataclass(frozen=True, eq=False)
class SpikeMask:
    """The sinks of some sequences: `acts[layer][~mask.tokens[layer]]` are the states (N,T,D) of the other tokens."""

    tokens: torch.Tensor  # (L,N,T) bool: whether the token is a sink, first or secondary, in the layer's output
    start: torch.Tensor  # (N,T): the first layer in which it is; -1 for a token that is no sink
    lifetime: torch.Tensor  # (N,T): the number of these layers
    massive_coordinates: torch.Tensor  # (L,D) bool: some token has a massive activation there
    residual_coordinates: torch.Tensor  # (L,D) bool: most tokens are large there
    token_ids: torch.Tensor  # (N,T), with register tokens, if the model has some
    attention_mask: torch.Tensor  # (N,T): 1 for a token, 0 past the end of a sequence

    def write(self, folder: Path) -> None:
        """Write FOLDER/spike_mask.safetensors, with a tensor for each field."""
        write_tensors(vars(self), folder / MASK_FILE)


def measured_mask(subject: Subject, config: RunConfig) -> SpikeMask:
    """Measure the mask of all sequences of a subject, in a pass of its own. Raises InputError without attention."""
    asked = config.model_copy(update={"observables": MEASURED, "skip_parity": True})
    tables, _ = measure(subject, asked)
    model = subject.loaded.model
    batch = next(subject.inputs.batches(len(subject.inputs))).with_registers(registers_before(model))
    width, depth = model.config.get_text_config().hidden_size, tables["spikes"]["layer"].nunique()
    sinks, residual, shape = tables["sink_tokens"], tables["residual_sinks"], batch.token_ids.shape
    place = sinks["sequence"].to_numpy(), sinks["position"].to_numpy()
    start, last, lifetime = (np.full(shape, fill) for fill in (-1, -1, 0))
    for array, column in ((start, "layer"), (last, "last_layer"), (lifetime, "lifetime")):
        array[place] = sinks[column]
    layers = np.arange(depth)[:, None, None]
    return SpikeMask(
        torch.from_numpy((start >= 0) & (layers >= start) & (layers <= last)),
        torch.from_numpy(start),
        torch.from_numpy(lifetime),
        _coordinates(tables["massive"].query("is_massive"), depth, width),
        _coordinates(residual[residual["kind"] == RESIDUAL], depth, width),
        batch.token_ids,
        batch.attention_mask,
    )


def _coordinates(rows: pd.DataFrame, depth: int, width: int) -> torch.Tensor:
    found = np.zeros((depth, width), bool)
    found[rows["layer"].to_numpy(int), rows["coordinate"].to_numpy(int)] = True
    return torch.from_numpy(found)
