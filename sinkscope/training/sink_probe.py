"""What is measured while a model is trained, at every log: sink rates, the weights that they are shares of, and what a
task adds.
"""

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.attention import Attention
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.family import Family
from sinkscope.results.metrics import is_sink
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch
from sinkscope.training.history import Probe
from sinkscope.training.sharding import is_sharded
from sinkscope.training.tasks import Task

SEQUENCES, LENGTH = 32, 64  # that are measured: the beginnings of held-out blocks; WSE's length


def probe_of(
    task: Task | None, family: Family, held_out: np.ndarray, epsilon: float, position: int = 0
) -> Probe | None:
    """What is measured at step 0 and at every log of a training: sink rates at a position of held-out blocks, and what
    a task measures. None of a model that FSDP has sharded, which a task refuses.
    """
    if task is not None:
        return lambda model: pd.concat(
            [task.probe(model, family, held_out), sinks(model, family, held_out, epsilon, position)], ignore_index=True
        )
    return None if is_sharded() else lambda model: sinks(model, family, held_out, epsilon, position)


@torch.no_grad()
def sinks(
    model: PreTrainedModel, family: Family, held_out: np.ndarray, epsilon: float, position: int = 0
) -> pd.DataFrame:
    """The sink rate at one position of blocks (N,T), register tokens not counted, and how much weight there is to
    share, `TotalWeight`; of a model in eval mode. Of a sliding window only as many tokens as see the first one.

    Returns:
        layer (−1: the whole model), metric, value; nothing of a model without attention, or of a position behind the
        tokens that are measured.
    """
    before = registers_before(model)
    seen = getattr(model.config.get_text_config(), "sliding_window", None) or LENGTH
    ids = torch.from_numpy(held_out[:SEQUENCES, : min(LENGTH, max(1, seen - before))])
    if not family.has_attention or position >= ids.shape[1]:
        return pd.DataFrame(columns=["layer", "metric", "value"])
    at = before + position
    settings = Settings(positions=at + 1, window=before + ids.shape[1], epsilon=epsilon)
    attention, total = Attention(settings), TotalWeight(settings, at)
    with open_tracer(model, family) as tracer:
        tracer.forward(Batch(ids, torch.ones_like(ids)), [attention, total])
    by_layer = attention.tables()["attention"].query("position == @at").groupby("layer")["sink_rate"].mean()
    rates = [(layer, "sink_rate", rate) for layer, rate in (*by_layer.items(), (WHOLE_MODEL, by_layer.mean()))]
    return pd.DataFrame([*rates, *total.rows()], columns=["layer", "metric", "value"])


class TotalWeight(Observable):
    """Σ|sim ÷ Z| of a query over the tokens that it sees: by how much their values are multiplied in all.

    It is 1 of softmax (less where a learned key takes part) and of every operation that is divided by its own sum. Of
    those that are not, it may be close to 0: what the proxy |sim| ÷ Σ|sim| then shows is a share of nothing. So its
    median is taken over the queries behind one token, mostly the first, of all heads and sequences, and once more over
    those of them that give it a share above ε; of the whole model over the queries of all layers.
    """

    name = "total-weight"
    sites = ("attention",)

    def __init__(self, settings: Settings, at: int) -> None:
        super().__init__(settings)
        self.at = at  # the token's column
        # layer → of each query its total, and whether its share on the token is above ε
        self.seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        whole, behind = slice(0, read.length), slice(self.at + 1, None)
        total = read.mix_weights(whole, whole).abs().sum(-1)[..., behind]
        share = read.weights(whole, slice(self.at, self.at + 1))[0][..., behind, 0]
        chosen = is_sink(share, self.settings.epsilon)
        self.seen[layer] = (upcast(total).flatten().cpu().numpy(), chosen.flatten().cpu().numpy())

    def rows(self) -> list[tuple[int, str, float]]:
        """Layer (−1: the whole model), metric, median; none of queries of which there are none."""
        totals, to_token = (np.concatenate(parts) for parts in zip(*self.seen.values(), strict=True))
        return [
            (layer, name, float(np.median(values)))
            for layer, (total, chosen) in (*self.seen.items(), (WHOLE_MODEL, (totals, to_token)))
            for name, values in (("total_weight", total), ("total_weight_at_sink", total[chosen]))
            if len(values)
        ]
