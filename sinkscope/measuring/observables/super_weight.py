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
from sinkscope.interventions.super_weight import EARLY, PAIR
from sinkscope.measuring.observables.observable import NEURONS, Maxima, Observable, Reading, Rows, Settings
from sinkscope.measuring.observables.reductions import filled
from sinkscope.models.family import Family
from sinkscope.models.feed_forward import FeedForward, without_feed_forward
from sinkscope.results.tables import POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

SUPER = 0.1, 0.995  # a super expert exceeds this share of the largest expert, and this quantile of all
EXPERT = Column("expert", "expert of a mixture, from 0 on; −1 without a mixture", kind="whole")


class SuperWeight(Observable):
    """Lists, for each layer and sequence, the largest entry that the feed-forward network adds to the residual stream,
    and the largest input |u| of its last projection m = W u + b at the same token: the row and the column of W.

    Yu et al. take the row from the largest |m|. This is the same in models without a norm after the feed-forward
    network; with one, the largest m is not the largest entry of the stream. In a mixture, the expert is the one of the
    token's experts with the largest |m| in this row, before routing weights.
    """

    name = "super-weight"
    about = "entry of each feed-forward network's last projection between its largest input and output; super experts"
    sites = (NEURONS, "mlp_out")
    by_default = False
    columns: ClassVar = {
        "super_weights": (
            EXPERT, SEQUENCE, POSITION, TOKEN_ID, TOKEN,
            Column("row", "row of W: coordinate of the largest entry that is added to the stream", kind="whole"),
            Column("column", "column of W: neuron with the largest input", kind="whole"),
            Column("written", "that entry"),
            Column("input", "that input u"),
            Column("output", "the row's output m, before a norm and routing weights"),
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
        self.called: tuple[FeedForward, tuple] | None = None

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return family.absent_sites().get("mlp_out") or without_feed_forward(model, family)

    @torch.no_grad()
    def see_neurons(self, layer: int, part: FeedForward, args: tuple, batch: Batch) -> None:
        self.called = part, args  # until the layer's mlp_out is read
        for expert, tokens, u in part.inputs(args) if part.experts else ():
            largest = upcast(outputs(u, part, expert)).abs().amax(1)
            largest = largest.where(batch.attention_mask.flatten().bool().to(u.device)[tokens], 0.0)
            self.experts.receive(partial(self.experts.add, (layer, expert)), largest.max().double())

    @torch.no_grad()
    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if self.called is None:  # a layer without this projection
            return
        (part, args), self.called = self.called, None
        written = upcast(reading.tensor)
        token = filled(written.abs().amax(-1), batch.on(written.device, "valid"), -1.0).argmax(1)
        sequence = torch.arange(len(token), device=token.device)
        row = written[sequence, token].abs().argmax(1)
        names = ("expert", "column", "input", "output", "weight")
        best = {name: torch.zeros(len(token), dtype=torch.float64, device=token.device) for name in names}
        place = sequence * written.shape[1] + token  # in the flattened batch
        for expert, tokens, u in part.inputs(args):
            which, input_row = (tokens == place[:, None]).nonzero().unbind(1)  # sequences whose token the expert gets
            column = u[input_row].abs().argmax(1)
            candidate = {
                "expert": torch.full_like(column, expert),
                "column": column,
                "input": u[input_row, column],
                "output": outputs(u[input_row], part, expert).gather(1, row[which, None])[:, 0],
                "weight": part.weight(expert)[row[which], column],
            }
            is_larger = candidate["output"].abs() >= best["output"][which].abs()
            for name, values in best.items():
                values[which] = candidate[name].to(values).where(is_larger, values[which])
        best |= {"row": row, "written": written[sequence, token, row]}

        def add(token: torch.Tensor, *columns: torch.Tensor) -> None:
            sequence, by_name = np.arange(len(token)), zip(best, columns, strict=True)
            self.rows.add({
                "layer": layer, "sequence": sequence + batch.first, "position": (token - batch.start).numpy(),
                "token_id": batch.token_ids.numpy()[sequence, token.numpy()],
                **{name: x.numpy().astype(int if name in PAIR else float) for name, x in by_name},
            })  # fmt: skip

        self.rows.receive(add, token, *best.values())

    def tables(self) -> dict[str, pd.DataFrame]:
        if not self.rows:
            return {}
        table = self.rows.table("layer", "sequence")
        table["share"] = table["weight"] * table["input"] / table["output"]
        tables = {"super_weights": table}
        if self.experts:
            keys = sorted(self.experts)
            experts = pd.DataFrame(keys, columns=["layer", "expert"])
            experts["largest"] = [float(self.experts[key]) for key in keys]
            least = max(experts["largest"].quantile(SUPER[1]), SUPER[0] * experts["largest"].max())
            early = experts["layer"] < EARLY * (table["layer"].max() + 1)
            tables["super_experts"] = experts.assign(is_super=early & (experts["largest"] >= least))
        return tables


def outputs(u: torch.Tensor, part: FeedForward, expert: int) -> torch.Tensor:
    """Return m = W u + b of inputs u (n,F), (n,D)."""
    return torch.nn.functional.linear(u, part.weight(expert), part.bias(expert))
