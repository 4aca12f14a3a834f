"""A close look at one sequence, once the run has shown where to look: attention maps of telling heads, and the tokens
and coordinates around the largest activation. Drawn by the figures `attention-maps` and `massive-map`.
"""

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Mean, Observable, Reading, Settings, long_form
from sinkscope.text.batch import Batch

TOKENS = 64  # of the sequence, from its first
MAP_TOKENS = 32  # of a map that is one of many
TOP_COORDINATES = 8  # of the largest magnitude …
OTHER_COORDINATES = 8  # … and evenly spaced ones beside them, to show what is usual


class AttentionMaps(Observable):
    """Table `attention_maps`: the weights of chosen (layer, head) pairs on the batch's first sequence."""

    name = "attention-maps"
    sites = ("attention",)

    def __init__(self, heads: list[tuple[int, int]]) -> None:
        super().__init__(Settings())
        self.heads = heads
        self.frames: list[pd.DataFrame] = []

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        start = int(batch.start[0])
        shown = slice(start, start + min(TOKENS, int(batch.lengths[0])))
        chosen = sorted(head for at, head in self.heads if at == layer)
        if not chosen:
            return
        weights = read.weights(shown, shown)[0][0, chosen]  # (heads, query, key)
        places = range(shown.stop - shown.start)
        frame = long_form(
            {"layer": layer, "head": chosen, "sequence": batch.first, "query": places, "key": places},
            {"weight": weights.cpu().numpy()},
        )
        frame = frame[frame["key"] <= frame["query"]]
        self.frames.append(frame.assign(token_id=batch.token_ids[0].numpy()[start + frame["key"]]))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"attention_maps": pd.concat(self.frames, ignore_index=True)}


class MeanMaps(Observable):
    """Table `arm_maps`: every layer's weights among the first tokens, mean over heads and sequences (NU's maps)."""

    name = "mean-maps"
    sites = ("attention",)

    def __init__(self) -> None:
        super().__init__(Settings())
        self.maps = Mean()

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        shown = slice(0, min(MAP_TOKENS, read.length))
        if batch.valid is not None:  # the first tokens are not at the same columns, or are not there
            return
        self.maps.add(layer, read.weights(shown, shown)[0].mean(1))

    def tables(self) -> dict[str, pd.DataFrame]:
        frames, layers = [], self.maps.keys()
        for layer in layers:
            weights = self.maps[layer].astype(np.float32)
            places = range(len(weights))
            frame = long_form({"layer": layer, "query": places, "key": places}, {"weight": weights})
            frames.append(frame[frame["key"] <= frame["query"]])
        return {"arm_maps": pd.concat(frames, ignore_index=True)} if frames else {}


class MassiveMap(Observable):
    """Table `massive_map`: magnitudes at one layer's output, tokens × coordinates, the largest coordinates first."""

    name = "massive-map"
    sites = ("layer_out",)

    def __init__(self, layer: int) -> None:
        super().__init__(Settings())
        self.layer = layer
        self.frame: pd.DataFrame | None = None

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if layer != self.layer:
            return
        start = int(batch.start[0])
        shown = slice(start, start + min(TOKENS, int(batch.lengths[0])))
        magnitude = upcast(reading.tensor[0, shown]).abs()
        top = magnitude.amax(0).argsort(descending=True)[:TOP_COORDINATES].tolist()
        even = np.linspace(0, magnitude.shape[1] - 1, OTHER_COORDINATES).round().astype(int).tolist()
        coordinates = top + [coordinate for coordinate in even if coordinate not in top]
        frame = long_form(
            {
                "layer": layer,
                "sequence": batch.first,
                "position": range(shown.stop - shown.start),
                "coordinate": coordinates,
            },
            {"magnitude": magnitude[:, torch.tensor(coordinates)].cpu().numpy()},
        )
        ids = batch.token_ids[0].numpy()
        self.frame = frame.assign(token_id=ids[start + frame["position"]], is_top=frame["coordinate"].isin(top))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {} if self.frame is None else {"massive_map": self.frame}


def telling_heads(attention: pd.DataFrame) -> list[tuple[int, int]]:
    """Six heads that show the range: the strongest, three quantiles and the weakest by window mass at position 0, and
    the head that gives a later position most.
    """
    first = attention[attention["position"] == 0].sort_values("window_mass", ascending=False, kind="stable")
    places = [round(share * (len(first) - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    chosen = [(int(row.layer), int(row.head)) for row in first.iloc[places].itertuples()]
    # from layer 1 on and past the first few tokens: a head that only looks at itself is no sink
    later = attention[attention["position"] >= 1].sort_values("window_mass", ascending=False, kind="stable")
    chosen += [(int(row.layer), int(row.head)) for row in later.head(1).itertuples()]
    return sorted(set(chosen))
