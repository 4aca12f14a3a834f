"""What is measured while a model is trained: the sink rate of its layers at every log, and what a task adds."""

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.measuring.observables.attention import Attention
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.family import Family
from sinkscope.text.batch import Batch
from sinkscope.training.history import Probe
from sinkscope.training.sharding import is_sharded
from sinkscope.training.tasks import Task

SEQUENCES, LENGTH = 32, 64  # that are measured: the beginnings of held-out blocks; WSE's length


def probe_of(task: Task | None, family: Family, held_out: np.ndarray, epsilon: float) -> Probe | None:
    """What is measured at step 0 and at every log of a training: sink rates on held-out blocks, and what a task
    measures. None of a model that FSDP has sharded, which a task refuses.
    """
    if task is not None:
        return lambda model: pd.concat(
            [task.probe(model, family, held_out), sink_rates(model, family, held_out, epsilon)], ignore_index=True
        )
    return None if is_sharded() else lambda model: sink_rates(model, family, held_out, epsilon)


@torch.no_grad()
def sink_rates(model: PreTrainedModel, family: Family, held_out: np.ndarray, epsilon: float) -> pd.DataFrame:
    """The sink rate at position 0 of blocks (N,T), of a model in eval mode.

    Returns:
        layer (−1: the whole model), metric, value; nothing of a model without attention.
    """
    if not family.has_attention:
        return pd.DataFrame(columns=["layer", "metric", "value"])
    ids = torch.from_numpy(held_out[:SEQUENCES, :LENGTH])
    attention = Attention(Settings(positions=1, window=ids.shape[1], epsilon=epsilon))
    with open_tracer(model, family) as tracer:
        tracer.forward(Batch(ids, torch.ones_like(ids)), [attention])
    by_layer = attention.tables()["attention"].groupby("layer")["sink_rate"].mean()
    rows = [(layer, "sink_rate", rate) for layer, rate in (*by_layer.items(), (WHOLE_MODEL, by_layer.mean()))]
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])
