"""The feed-forward networks of a checkpoint, found by the names of its family and by shapes, and what they can write.

For neuron j of a network with gate g, up u and last projection W (D,F), behind a norm with gain n (D,) and before one
with gain m (D,), where there are such norms:

    gain_j = max_i |m_i W[i,j]| · ‖g_j ∘ n‖ · ‖u_j ∘ n‖        (without a gate: without its factor)

Biases are left out. A rank by it is a candidate, because weights do not show which inputs occur.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import pandas as pd
import torch

from sinkscope.errors import InputError
from sinkscope.measuring.observables.super_weight import EXPERT
from sinkscope.models.checkpoint import Stored
from sinkscope.models.families import BUILT_AS, CENTERED_GAINS, FAMILIES, INPUTS_FIRST, INTERLEAVED_GATES
from sinkscope.models.family import Family, base_type
from sinkscope.models.feed_forward import NO_EXPERT
from sinkscope.models.packed import method_of
from sinkscope.results.tables import COORDINATE, Column

KEPT = 10  # neurons of each layer in the table
GGUF = Family(  # its names are the same for all families
    name="GGUF", layers="blk", attention="", down="ffn_down", wiring="parallel",
    sites={"mlp_norm": "ffn_norm.output", "attn_norm": "attn_norm.output", "mlp_out": "post_ffw_norm.output"},
)  # fmt: skip
ROWS = [row for rows in FAMILIES.values() for row in rows if row.causal]
DOWN = {row.down.rpartition(".")[2] for row in ROWS} | {"w2", "ffn_down", "ffn_down_exps", "ffn_down_shexp"}

SCAN_TABLES = {
    "scan": (
        EXPERT, COORDINATE,
        Column("neuron", "neuron of the feed-forward network: row of gate and up, column of W", kind="whole"),
        Column("gain", "what it can write for an input of norm 1: |weight| × norm of its rows of gate and of up, and "
            "the gains of the norms before and after the network"),
        Column("rank", "place of the gain among the neurons of the layer, from 1 on", kind="whole"),
        Column("weight", "the entry of W"),
        Column("bound", "largest |output| there (of the norm after the network) for an input of unit root mean square"),
    ),
    "scan_norms": (
        Column("side", "before or after the feed-forward network", kind="text"),
        COORDINATE, Column("largest", "largest |gain|, which is at the coordinate"), Column("median", "median |gain|"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """The matrices of one layer's network or of one expert, and the gains of the norms around it."""

    layer: int
    expert: int
    down: Stored
    inputs: tuple[Stored, ...]  # gate and up, both in one matrix, or one without a gate
    norm: torch.Tensor  # (D,): n
    post: torch.Tensor  # (D,): m
    part: int  # its number in matrices of several experts, (E,…)
    is_interleaved: bool  # whether a neuron's gate and up are next to each other in one matrix
    is_transposed: bool  # whether matrices are (in, out), so that neurons are columns of the inputs and rows of W

    def _rows(self, stored: Stored) -> Iterator[tuple[slice, torch.Tensor]]:
        return stored.rows(self.part * stored.shape[-2], stored.shape[-2])

    def read(self) -> torch.Tensor:
        """Return the norms of the rows of gate and up of every neuron, times the gains of the norm before, (F,1|2)."""
        every = []
        for stored in self.inputs:
            squares = torch.zeros(stored.shape[-1 if self.is_transposed else -2], dtype=torch.float64)
            for part, rows in self._rows(stored):
                if self.is_transposed:
                    squares += (rows * self.norm[part, None]).square().sum(0, dtype=torch.float64)
                else:
                    squares[part] = (rows * self.norm).square().sum(1, dtype=torch.float64)
            every.append(squares.sqrt())
        neurons = prod(self.down.shape[-2:]) // len(self.norm)
        return torch.cat(every).view(neurons, -1) if self.is_interleaved else torch.cat(every).view(-1, neurons).T

    def written(self) -> torch.Tensor:
        """Return max_i |m_i W[i,j]| of every neuron, its coordinate i, and the entry W[i,j], (3,F)."""
        best = torch.zeros(3, prod(self.down.shape[-2:]) // len(self.norm), dtype=torch.float64)
        coordinates = torch.arange(len(self.norm))
        for part, rows in self._rows(self.down):
            entries, neurons = (rows.T, part) if self.is_transposed else (rows, slice(None))
            of_rows = coordinates if self.is_transposed else coordinates[part]
            values, index = (entries * self.post[of_rows, None]).abs().max(0)
            new = torch.stack([values, of_rows[index], entries.gather(0, index[None])[0]]).double()
            best[:, neurons] = new.where(new[0] > best[0, neurons], best[:, neurons])
        return best

    def table(self) -> pd.DataFrame:
        """Return the KEPT neurons with the largest gains."""
        read, (written, coordinate, weight) = self.read(), self.written()
        gain, neuron = (read.prod(1) * written).topk(min(KEPT, len(written)))
        coordinate, width = coordinate[neuron].long(), len(self.norm) ** 0.5  # the norm of a unit root mean square
        after = self.post[coordinate].abs() * width
        bound = after if self.post.ne(1).any() else gain * width ** read.shape[1]
        columns = {"neuron": neuron, "gain": gain, "coordinate": coordinate, "weight": weight[neuron], "bound": bound}
        numbers = {name: column.numpy() for name, column in columns.items()}
        return pd.DataFrame(numbers | {"layer": self.layer, "expert": self.expert})


def find_networks(
    settings: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> tuple[Family, list[Network], dict[int, dict[str, Stored]]]:
    """Return the family by whose names they are found, the networks of all layers, and these layers' tensors by name.

    `settings` is {} for GGUF. Names are those within the layer, without `.weight`.

    Raises:
        InputError: weights are packed, or no family has these names.
    """
    if method := method_of(settings):
        raise InputError(f"its weights are packed by {method}: scan a checkpoint in full precision, or a GGUF file")
    text = settings.get("text_config") or settings
    kind = base_type(str(text.get("model_type", "")))
    for row in FAMILIES.get(BUILT_AS.get(kind, kind), ROWS) if settings else [GGUF]:
        if all(text.get(name, value) == value for name, value in row.when.items()):
            towers: dict[str, dict[int, dict[str, Stored]]] = defaultdict(lambda: defaultdict(dict))
            pattern = re.compile(rf"(|.*\.){row.layers.rpartition('.')[2]}\.(\d+)\.(.+?)(\.weight)?")
            for match, stored in ((pattern.fullmatch(name), stored) for name, stored in tensors.items()):
                if match:
                    towers[match[1]][int(match[2])][match[3]] = stored
            by_tower = [
                (
                    [network for layer in sorted(layers) for network in _of_layer(layer, layers[layer], row, kind)],
                    layers,
                )
                for layers in towers.values()
            ]
            networks, layers = max(by_tower, key=lambda tower: len(tower[0]), default=([], {}))
            if networks:
                return row, networks, layers
    raise InputError(f"no layer has the feed-forward network and the norms of a known family (type {kind or 'GGUF'})")


def _of_layer(layer: int, tensors: Mapping[str, Stored], row: Family, kind: str) -> Iterator[Network]:
    """Yield the networks of a layer, by experts; none if it lacks the row's norms."""
    paths = {site: address.rpartition(".")[0] for site, address in row.sites.items()}
    norms = {site: x for site, path in paths.items() if (x := tensors.get(path)) and len(x.shape) == 1}
    if not norms or not (row is GGUF or {"attn_norm", "mlp_norm"} & row.sites.keys() <= norms.keys()):
        return
    (width,) = shape = next(iter(norms.values())).shape
    is_known = row is GGUF or kind in FAMILIES or kind in BUILT_AS
    if not is_known and any(
        x.shape == shape and "." not in name and x not in norms.values() for name, x in tensors.items()
    ):
        return  # it has a norm that the row does not have
    before = ("mlp_norm", "mid", "attn_norm") if row.wiring == "parallel" else ("mlp_norm", "mid")
    if row is GGUF and not {"mlp_norm", "mlp_out"} & norms.keys() and (between := tensors.get("post_attention_norm")):
        norms["mlp_norm"] = between  # gpt-oss, Qwen 3.5 and others: the second norm has the name of what is before it
    around = next((norms[site] for site in before if site in norms), None), norms.get("mlp_out")
    offset = float(kind in CENTERED_GAINS)
    norm, post = (torch.ones(width) if one is None else next(one.rows(0, 1))[1][0] + offset for one in around)
    units: dict[str, dict[str, Stored]] = defaultdict(dict)  # by the module of the matrices, which GGUF's names lack
    for name, stored in tensors.items():
        if len(stored.shape) > 1 and width in stored.shape[-2:]:
            of_gguf = re.fullmatch(r"(ffn)_\w+?(_exps|_shexp)?", name)
            units["".join(of_gguf.groups("")) if of_gguf else name.rpartition(".")[0]][name] = stored
    for unit, matrices in units.items():
        for down in (stored for name, stored in matrices.items() if name.rpartition(".")[2] in DOWN):
            size, number = prod(down.shape[-2:]), re.fullmatch(r".*\.(\d+)", unit)
            inputs = tuple(x for x in matrices.values() if x is not down and prod(x.shape[-2:]) in (size, 2 * size))
            parts = down.shape[0] if len(down.shape) == 3 else 1
            sides = down.shape[-2:]
            is_transposed = sides[0] != width if sides[0] != sides[1] else kind in INPUTS_FIRST
            for part in range(parts if inputs else 0):
                expert = part if parts > 1 else int(number[1]) if number else NO_EXPERT
                yield Network(layer, expert, down, inputs, norm, post, part, kind in INTERLEAVED_GATES, is_transposed)
