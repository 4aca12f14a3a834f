"""Super weights (Yu et al. 2024): the entry of a feed-forward network's last projection that writes the massive
activation; and super experts (Su et al. 2025), the experts of a mixture that do.
"""

from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.interventions.super_weight import EARLY
from sinkscope.measuring.observables.observable import NEURONS, Maxima, Observable, Rows, Settings
from sinkscope.models.family import Family
from sinkscope.models.feed_forward import DENSE, FeedForward, without_feed_forward
from sinkscope.results.tables import POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

SUPER = 0.1, 0.995  # a super expert exceeds this share of the largest expert, and this quantile of all
EXPERT = Column("expert", "expert of a mixture, from 0 on; −1 without a mixture", kind="whole")


class SuperWeight(Observable):
    """Lists, for each layer and sequence, the largest output |m| of m = W u + b and the largest input |u| to it.

    Both are of the same token and, in a mixture, of the same expert before its routing weight; the row of W is that of
    m, the column that of u. Yu et al. read the largest m and u of a layer at any token.
    """

    name = "super-weight"
    about = "entry of each feed-forward network's last projection between its largest input and output; super experts"
    sites = (NEURONS,)
    by_default = False
    columns: ClassVar = {
        "super_weights": (
            EXPERT, SEQUENCE, POSITION, TOKEN_ID, TOKEN,
            Column("row", "row of W: coordinate of the largest output", kind="whole"),
            Column("column", "column of W: neuron with the largest input to it", kind="whole"),
            Column("input", "that input u"),
            Column("output", "that output m, before norms and routing weights"),
            Column("weight", "the entry of W"),
            Column("share", "weight × input ÷ output: the share of the output that this entry writes"),
        ),
        "super_experts": (
            EXPERT,
            Column("largest", "largest |m| of the expert at any token, before its routing weight"),
            Column("is_super", "above the 99.5th percentile and a tenth of the largest, in the first ¾ of the layers",
                kind="truth"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows = Rows(list)
        self.experts: Maxima[tuple[int, int]] = Maxima()
        self.depth = Maxima[str]()

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return without_feed_forward(model, family)

    def see_neurons(self, layer: int, part: FeedForward, args: tuple, batch: Batch) -> None:
        real = batch.attention_mask.to(args[0].device).flatten().bool()
        best = {name: real.new_zeros(len(real), dtype=torch.float64) for name in ("expert", *FOUND)}
        for expert, tokens, u in part.inputs(args):
            found = largest_pairs(u, part.weight(expert), part.bias(expert))
            found["output"] = found["output"].where(real[tokens], 0.0)  # no padding
            found["expert"] = torch.full_like(found["output"], expert)
            if expert != DENSE:
                self.experts.receive(partial(self.experts.add, (layer, expert)), found["output"].abs().max())
            is_larger = found["output"].abs() > best["output"][tokens].abs()
            for name, values in best.items():
                values[tokens] = found[name].to(values).where(is_larger, values[tokens])
        token = best["output"].view(len(batch.token_ids), -1).abs().argmax(1)
        flat = token + torch.arange(len(token), device=token.device) * batch.token_ids.shape[1]
        self.rows.receive(partial(self._list, layer, batch), token, *(values[flat] for values in best.values()))

    def _list(self, layer: int, batch: Batch, token: torch.Tensor, *values: torch.Tensor) -> None:
        found = dict(zip(("expert", *FOUND), (x.numpy() for x in values), strict=True))
        sequence = np.arange(len(token))
        self.rows.add({
            "layer": np.full(len(token), layer),
            "sequence": sequence + batch.first,
            "position": (token - batch.start).numpy(),
            "token_id": batch.token_ids.numpy()[sequence, token.numpy()],
            **{name: x.astype(int) if name in ("expert", "row", "column") else x for name, x in found.items()},
        })  # fmt: skip
        self.depth.add("layers", torch.tensor(layer + 1))

    def tables(self) -> dict[str, pd.DataFrame]:
        if not self.rows:
            return {}
        table = self.rows.table("layer", "sequence")
        table["share"] = table["weight"] * table["input"] / table["output"]
        found = {"super_weights": table}
        if self.experts:
            keys = sorted(self.experts)
            experts = pd.DataFrame(keys, columns=["layer", "expert"])
            experts["largest"] = [float(self.experts[key]) for key in keys]
            least = max(experts["largest"].quantile(SUPER[1]), SUPER[0] * experts["largest"].max())
            early = experts["layer"] < EARLY * int(self.depth["layers"])
            found["super_experts"] = experts.assign(is_super=early & (experts["largest"] >= least))
        return found


FOUND = ("row", "column", "input", "output", "weight")


def largest_pairs(u: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return, for inputs u (n,F) of m = W u + b, each token's largest |m| and |u|: row, column, values and W there."""
    output = upcast(torch.nn.functional.linear(u, weight, bias))
    row, column = output.abs().argmax(1, keepdim=True), u.abs().argmax(1, keepdim=True)
    found = {"row": row, "column": column, "input": u.gather(1, column), "output": output.gather(1, row)}
    return {**{name: x[:, 0] for name, x in found.items()}, "weight": weight[row[:, 0], column[:, 0]]}
