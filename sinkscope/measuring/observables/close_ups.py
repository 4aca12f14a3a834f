"""Maps of a few tokens, for the figures `attention-maps`, `arm-maps` and `massive-map`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import ROW_CHUNK, upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Means, Observable, Reading, Settings
from sinkscope.measuring.observables.reductions import long_table
from sinkscope.results.activations import MAPPED
from sinkscope.results.tables import COORDINATE, HEAD, KEY, POSITION, QUERY, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

MEAN_MAP_TOKENS = 32  # number of first tokens in one of many maps
TOP_COORDINATES = 8  # coordinates of the largest magnitude
OTHER_COORDINATES = 8  # evenly spaced coordinates for comparison


class AttentionMaps(Observable):
    """Records the weights of chosen (layer, head) pairs on the batch's first sequence: table `attention_maps`."""

    name = "attention-maps"
    about = "attention weights of six heads, from strong to weak sinks, on the first sequence; follows `attention`"
    sites = ("attention",)
    after = ("attention",)
    columns: ClassVar = {
        "attention_maps": (
            HEAD, SEQUENCE, QUERY, KEY, TOKEN_ID, TOKEN, Column("weight", "the query's attention weight on the key"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings, heads: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(settings)
        self.heads = heads
        self.frames: list[pd.DataFrame] = []

    @classmethod
    def from_tables(cls, settings: Settings, tables: Mapping[str, pd.DataFrame]) -> Self:
        """Choose heads from strong to weak sinks at position 0, and the head with the most mass at a later position."""
        ranked = tables["attention"].sort_values("window_mass", ascending=False, kind="stable")
        first = ranked[ranked["position"] == 0]
        ranks = [round(share * (len(first) - 1)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        chosen = pd.concat([first.iloc[ranks], ranked[ranked["position"] >= 1].head(1)])
        return cls(settings, sorted({(int(row.layer), int(row.head)) for row in chosen.itertuples()}))

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        shown = first_columns(batch)
        chosen = sorted(head for chosen_layer, head in self.heads if chosen_layer == layer)
        if not chosen:
            return
        weights = weights_among(read, shown, chosen)
        positions = range(shown.stop - shown.start)
        axes = {"layer": layer, "head": chosen, "sequence": batch.first, "query": positions, "key": positions}
        frame = long_table([(axes, {"weight": weights})])
        if not read.call.looks_ahead:
            frame = frame[frame["key"] <= frame["query"]]
        self.frames.append(frame.assign(token_id=batch.token_ids[0].numpy()[shown.start + frame["key"]]))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"attention_maps": pd.concat(self.frames, ignore_index=True)} if self.frames else {}


class MeanMaps(Observable):
    """Averages every layer's weights among the first tokens over heads and sequences (NU figure 3): table `arm_maps`.

    The mean is over the sequences that have the query; a key that is missing in one of them counts as 0.
    """

    name = "mean-maps"
    about = "attention weights among the first tokens, mean over heads and sequences; measured by `intervene`"
    sites = ("attention",)
    by_default = False
    columns: ClassVar = {"arm_maps": (QUERY, KEY, Column("weight", "attention weight, mean over heads and sequences"))}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.maps = Means()
        self.causal = True

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        columns = slice(0, batch.columns(MEAN_MAP_TOKENS))
        by_key = batch.tokens_at(read.weights(columns, columns)[0].mean(1).transpose(1, 2), MEAN_MAP_TOKENS)
        by_both = batch.tokens_at(by_key.transpose(1, 2), MEAN_MAP_TOKENS)  # (B, query, key)
        present = batch.on(by_both.device, "present", MEAN_MAP_TOKENS)
        self.maps.add({"weight": by_both.transpose(1, 2)}, present, layer=layer)
        self.causal = not read.call.looks_ahead

    def tables(self) -> dict[str, pd.DataFrame]:
        frames = []
        for labels, means in self.maps:
            weights = means["weight"].T.astype(np.float32)
            positions = range(int(np.isfinite(weights[:, 0]).sum()))  # queries that some sequence has
            shown = weights[: len(positions), : len(positions)]
            frame = long_table([(labels | {"query": positions, "key": positions}, {"weight": shown})])
            frames.append(frame[frame["key"] <= frame["query"]] if self.causal else frame)
        return {"arm_maps": pd.concat(frames, ignore_index=True)} if frames else {}


class MassiveMap(Observable):
    """Records magnitudes of one layer's output, tokens × coordinates (largest first): table `massive_map`."""

    name = "massive-map"
    about = "tokens × coordinates of the first sequence at the layer with the largest activation; follows `massive`"
    sites = ("layer_out",)
    after = ("massive",)
    columns: ClassVar = {
        "massive_map": (
            SEQUENCE, POSITION, TOKEN_ID, TOKEN, COORDINATE,
            Column("magnitude", "absolute entry of the layer's output"),
            Column("is_top", "whether the coordinate is one of the largest", kind="truth"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings, layer: int = 0) -> None:
        super().__init__(settings)
        self.layer = layer
        self.frame: pd.DataFrame | None = None

    @classmethod
    def from_tables(cls, settings: Settings, tables: Mapping[str, pd.DataFrame]) -> Self:
        massive = tables["massive"]
        return cls(settings, int(massive.loc[massive["ratio"].idxmax(), "layer"]))

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if layer != self.layer:
            return
        shown = first_columns(batch)
        magnitude = upcast(reading.tensor[0, shown]).abs()
        top = magnitude.amax(0).argsort(descending=True)[:TOP_COORDINATES].tolist()
        even = np.linspace(0, magnitude.shape[1] - 1, OTHER_COORDINATES).round().astype(int).tolist()
        coordinates = top + [coordinate for coordinate in even if coordinate not in top]
        positions = range(shown.stop - shown.start)
        axes = {"layer": layer, "sequence": batch.first, "position": positions, "coordinate": coordinates}
        frame = long_table([(axes, {"magnitude": magnitude[:, coordinates]})])
        token_ids = batch.token_ids[0].numpy()[shown.start + frame["position"]]
        self.frame = frame.assign(token_id=token_ids, is_top=frame["coordinate"].isin(top))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {} if self.frame is None else {"massive_map": self.frame}


def first_columns(batch: Batch, most: int = MAPPED) -> slice:
    """Return the columns of the first sequence's first tokens."""
    start = int(batch.start[0])
    return slice(start, start + min(most, int(batch.lengths[0])))


def weights_among(read: AttentionRead, tokens: slice, heads: Sequence[int] | slice = slice(None)) -> torch.Tensor:
    """Return the weights of some heads among some tokens of the first sequence, (heads, query, key)."""
    starts = range(tokens.start, tokens.stop, ROW_CHUNK)
    chunks = (slice(start, min(start + ROW_CHUNK, tokens.stop)) for start in starts)
    return torch.cat([read.weights(rows, tokens)[0][0, heads] for rows in chunks], dim=1)
