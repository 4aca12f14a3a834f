"""What position 0 adds to a head's output: nothing (a no-op), or the same vector at every token (a broadcast).

arXiv 2606.08105 defines both on vision transformers, where all tokens are queries (thresholds: `results/findings.py`).
Here the queries are the tokens t > 0.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinkscope.attention.kernels import repeat_heads, upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.errors import InputError
from sinkscope.measuring.observables.attention import weights_on_first
from sinkscope.measuring.observables.entropy import entropy, spectrum
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.observables.reductions import filled, mean_over
from sinkscope.models.family import Family
from sinkscope.models.in_memory import weight_in_memory
from sinkscope.models.projections import check_plain
from sinkscope.results.findings import HALF
from sinkscope.results.tables import HEAD, KV_HEAD, SEQUENCE, Column
from sinkscope.text.batch import Batch

SINK_OUTPUT = (
    Column("share", "‖a[t,0] v_0‖ ÷ (‖a[t,0] v_0‖ + ‖Σ a[t,j] v_j‖ over j > 0), mean over queries t > 0", "share"),
    Column("share_spread", "standard deviation of this over queries"),
    Column("uniform_share", "`share` if each query gives all keys that it sees the same weight", "share"),
    Column("at_half", "share of queries that give position 0 at least half of their attention", "share"),
    Column("value_ratio", "‖W_O v_0‖ ÷ mean ‖W_O v_j‖, j > 0, before a gate; of v if W_O is no single plain matrix",
        "ratio"),
    Column("effective_rank", "exp of the entropy of p = σ² ÷ Σσ² of the head's outputs y_t, t > 0, before W_O"),
    Column("effective_rank_without", "the same without the term of position 0"),
    Column("stable_rank", "Σσ² ÷ the largest σ² of W_O y_t, t > 0; of y_t if W_O is no single plain matrix"),
)  # fmt: skip


class SinkOutput(Observable):
    """Splits each head's outputs into the term of position 0 and that of all other keys.

    A query that does not see position 0, as past a sliding window, counts with a share of 0. Tables: `sink_output`
    (means over sequences) and `sink_output_by_sequence`; sequences of one token have no query.
    """

    name = "sink-output"
    about = "position 0's share of each head's output, norm of its value, and rank of the outputs: no-op or broadcast"
    sites = ("attention",)
    by_default = False
    columns: ClassVar = {
        "sink_output": (HEAD, KV_HEAD, *SINK_OUTPUT),
        "sink_output_by_sequence": (HEAD, KV_HEAD, SEQUENCE, *SINK_OUTPUT),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.projections: dict[int, nn.Module] = {}  # layer → the module that reads the outputs of its heads

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        for layer, attention in family.attentions(model).items():
            try:
                module = attention.get_submodule(family.output or "none")
                check_plain(module)
            except (AttributeError, InputError):
                continue
            self.projections[layer] = module

    @torch.no_grad()
    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        heads, start = read.query.shape[1], batch.on(read.value.device, "start")
        is_sink = torch.arange(read.length, device=start.device) == start[:, None]
        later = batch.attention_mask.bool().to(start.device) & ~is_sink  # (B,T)
        value = repeat_heads(upcast(read.value), heads)
        written = output_factor(self.projections.get(layer), heads, value)
        of_sink, of_others = (value.masked_fill(~keys[:, None, :, None], 0.0) for keys in (is_sink, later))
        term, rest = (torch.zeros_like(value) for _ in range(2))
        uniform = value.new_zeros(value.shape[:3])
        for rows in row_chunks(read.length):
            keys = read.keys(rows)
            weights = read.mix_weights(rows, keys).to(value)
            allowed = read.allowed(rows, keys)
            alike = torch.ones_like(weights[:1, :1]) if allowed is None else allowed.to(value)
            term[:, :, rows], rest[:, :, rows] = (weights @ x[:, :, keys] for x in (of_sink, of_others))
            uniform[:, :, rows] = share_of(*(alike @ x[:, :, keys] for x in (of_sink, of_others)))
        share = share_of(term, rest)
        norms = torch.linalg.vector_norm(value @ written, dim=-1)
        outputs, without = (filled(x.mT, later).mT.double() for x in (term + rest, rest))
        p, p_without, p_written = map(spectrum, (outputs, without, outputs @ written.double()))
        mean = mean_over(share, later)
        statistics = {
            "share": mean,
            "share_spread": mean_over((share - mean[..., None]).square(), later).sqrt(),
            "uniform_share": mean_over(uniform, later),
            "at_half": mean_over((weights_on_first(read, batch) >= HALF).to(value), later),
            "value_ratio": filled(norms, is_sink).sum(-1) / mean_over(norms, later),
            "effective_rank": entropy(p).exp(),
            "effective_rank_without": entropy(p_without).exp(),
            "stable_rank": 1 / p_written[..., -1],
        }
        statistics = {name: x.double() for name, x in statistics.items()}
        labels = {"layer": layer, "group": heads // read.key.shape[1]}
        has_query = (batch.lengths > 1)[:, None]
        self.statistics["sink_output"].add(statistics, has_query, **labels)
        self.statistics["sink_output_by_sequence"].add(batch, statistics, has_query, **labels)


def share_of(term: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return ‖term‖ ÷ (‖term‖ + ‖rest‖), (…,d) → (…)."""
    first, second = (torch.linalg.vector_norm(x, dim=-1) for x in (term, rest))
    return first / (first + second)


def output_factor(module: nn.Module | None, heads: int, value: torch.Tensor) -> torch.Tensor:
    """Return R (H,d,r) by head with ‖W_O v‖ = ‖v R‖ for all v, hence the same singular values; or else the identity.

    `value` (B,H,T,d) has the head's width, dtype and device. R is the factor of a QR decomposition of the d columns
    of W_O that read the head, so that no vector as wide as the model is made.
    """
    width = value.shape[-1]
    weight = None if module is None else upcast(weight_in_memory(module)).to(value)
    if weight is None or weight.shape[0 if isinstance(module, Conv1D) else 1] != heads * width:
        return torch.eye(width, dtype=value.dtype, device=value.device).expand(heads, -1, -1)
    rows = weight if isinstance(module, Conv1D) else weight.T
    return torch.linalg.qr(rows.unflatten(0, (heads, width)).mT, mode="r").R.mT
