"""Measures decoding: each step's row of attention, its activations, and the decoded tokens that become sinks."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from sinkscope.attention.kernels import MASKED, masked_logits, raw_logits, upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Observable, Pending, Reading, Rows, Settings
from sinkscope.results.findings import FEWEST_QUERIES, LARGEST_FLOAT16
from sinkscope.results.metrics import is_sink
from sinkscope.results.tables import COORDINATE, HEAD, TOKEN_PLACE, Column, names_of
from sinkscope.text.batch import Batch

# the first and the last token of a thought, in the chat templates of Qwen3 and others, Magistral, and Command A
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))


class Decoding(Observable):
    """Reduces the decoding steps of one batch of sequences, in which the queries are the decoded tokens alone.

    It sees every step of the batch, unlike an observable of `analyze`, and is in no register.
    """

    name = "decoding"
    sites = ("attention", "layer_out")
    columns: ClassVar = {
        "decoding": (
            *TOKEN_PLACE,
            Column("step", "number of tokens that were decoded before this one", kind="whole"),
            Column("is_thought", "whether the token is within a thought of the chat template", kind="truth"),
            Column("sink_mass", "its attention to position 0, mean over heads; 0 past a sliding window", "share"),
            Column("sink_heads", "share of heads in which this is more than ε", "share"),
            Column("uniform", "1 ÷ the number of tokens up to this one", "share"),
            Column("largest", "the largest magnitude of the layer's output at this token"),
            COORDINATE,
            Column("ratio", "largest ÷ the median magnitude of the layer's output at this token", "ratio"),
            Column("headroom", "largest number of float16 ÷ largest", "ratio"),
        ),
        "decoding_sinks": (
            HEAD, *TOKEN_PLACE,
            Column("queries", "number of decoded tokens from this one on", kind="whole"),
            Column("received", "mean of their attention to it, more than ε", "share"),
        ),
    }  # fmt: skip

    def __init__(
        self,
        settings: Settings,
        prompt: Batch,
        ends: Collection[int] = (),
        thought: tuple[int, int] | None = None,
    ) -> None:
        """`prompt` may have no tokens, where it is not known; for `ends` and `thought` see the functions below."""
        super().__init__(settings)
        self.prompt, self.thought = prompt, thought
        self.attended, self.states = Rows(list), Rows(list)
        self._ends = torch.tensor(sorted(ends), dtype=torch.long)
        self._tokens: list[torch.Tensor] = []  # (B,) of each step
        self._first = torch.empty(0)  # (B,): the position of the first decoded token
        self._steps = torch.zeros(len(prompt.token_ids), dtype=torch.long)  # (B,), up to the sequence's end
        # layer → Σ of the attention to each decoded token, (B,H,steps or more)
        self._received: dict[int, torch.Tensor] = {}

    @property
    def steps(self) -> int:
        """The number of measured steps."""
        return len(self._tokens)

    def release(self) -> None:
        """Move what is kept to the CPU, after the last step."""
        self._received = {layer: received.cpu() for layer, received in self._received.items()}

    def begin(self, step: Batch) -> None:
        """Begin a step. A sequence ends with its first token of `ends`, which itself is not measured."""
        assert step.before is not None
        self.pending = Pending()  # without what a step that failed has left
        if not self._tokens:
            self._first = step.before
        self._steps += (self._steps == self.steps) & ~torch.isin(step.token_ids[:, 0], self._ends)
        self._tokens.append(step.token_ids[:, 0])

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        weights, newest = newest_weights(read)
        device, steps = weights.device, self.steps
        goes_on = (self._steps == steps).to(device)[:, None, None]
        # up to the newest token, the decoded ones have the last columns; a sliding window may hold fewer of them
        to_decoded = weights_at(weights, newest[:, None] - torch.arange(steps - 1, -1, -1, device=device))
        to_first = weights_at(weights, newest[:, None] - batch.on(device, "before")[:, None])
        received = self._received.get(layer, weights.new_zeros(*weights.shape[:2], 1))
        if received.shape[2] < steps:
            received = F.pad(received, (0, received.shape[2]))
        received[..., :steps] += to_decoded * goes_on
        self._received[layer] = received
        mass = to_first[..., 0]
        heads = is_sink(mass, self.settings.epsilon).to(mass)
        self.pending.add({"sink_mass": mass.mean(1), "sink_heads": heads.mean(1)}, "attended", layer=layer)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        magnitude = upcast(reading.tensor[:, 0]).abs()
        largest, coordinate = magnitude.max(-1)
        ratio = largest / magnitude.median(-1).values
        self.pending.add({"largest": largest, "coordinate": coordinate, "ratio": ratio}, "states", layer=layer)

    def finish(self, batch: Batch) -> None:
        for (table,), labels, statistics in self.pending.take():
            layers = [row["layer"] for row in labels]
            rows: Rows = getattr(self, table)
            rows.receive(partial(self._list, rows, layers, list(statistics)), *statistics.values())

    def _list(self, rows: Rows, layers: Sequence[int], names: Sequence[str], *statistics: torch.Tensor) -> None:
        """List the statistics (B,L) of the step for the sequences that go on."""
        step = self.steps - 1
        (going_on,) = np.nonzero(self._steps.numpy() > step)
        sequence, layer = (x.ravel() for x in np.meshgrid(going_on, layers, indexing="ij"))
        columns = {name: x.numpy()[going_on].ravel() for name, x in zip(names, statistics, strict=True)}
        rows.add({"sequence": sequence, "step": step, "layer": layer, **columns})

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables of the steps so far, with the prompt's numbers of sequences."""
        by = ["sequence", "step", "layer"]
        if not self.states:
            return {}
        table = self.states.table(*by)
        if self.attended:  # layers without attention have no row
            table = table.merge(self.attended.table(*by), how="left", on=by)
        else:
            table = table.assign(sink_mass=np.nan, sink_heads=np.nan)
        tokens, thoughts = torch.stack(self._tokens, 1).numpy(), self._thoughts()
        sequence, step = table["sequence"].to_numpy(), table["step"].to_numpy()
        position = self._first.numpy()[sequence] + step
        decoding = table.assign(
            position=position,
            token_id=tokens[sequence, step],
            is_thought=thoughts[sequence, step],
            uniform=1 / (position + 1),
            headroom=LARGEST_FLOAT16 / table["largest"],
        )
        tables = {"decoding": decoding, "decoding_sinks": self._sinks(tokens)}
        return {name: table.assign(sequence=table["sequence"] + self.prompt.first) for name, table in tables.items()}

    def _sinks(self, tokens: np.ndarray) -> pd.DataFrame:
        frames = []
        for layer, received in sorted(self._received.items()):
            queries = (self._steps[:, None] - torch.arange(tokens.shape[1])).clamp(min=0)  # (B,steps)
            mean = received[..., : tokens.shape[1]].cpu() / queries.clamp(min=1)[:, None]
            is_listed = is_sink(mean, self.settings.epsilon) & (queries >= FEWEST_QUERIES)[:, None]
            sequence, head, step = is_listed.nonzero().numpy().T
            columns: dict[str, Any] = {"head": head, "sequence": sequence, "token_id": tokens[sequence, step]}
            columns |= {"position": self._first.numpy()[sequence] + step, "queries": queries.numpy()[sequence, step]}
            frames.append(pd.DataFrame(columns | {"layer": layer, "received": mean.numpy()[sequence, head, step]}))
        names = ("layer", *names_of(self.columns["decoding_sinks"]))
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=names, dtype=float)

    def _thoughts(self) -> np.ndarray:
        """Return which decoded tokens are within a thought, (B,steps); the prompt may have begun it."""
        tokens = torch.cat([self.prompt.token_ids, torch.stack(self._tokens, 1)], 1)
        return tokens_of_thought(tokens, self.thought)[:, self.prompt.token_ids.shape[1] :].numpy()


def newest_weights(read: AttentionRead) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention weights (B,H,S) of a single query over all keys, and the column (B,) of its own key.

    They are the last row of `AttentionRead.weights` on the complete sequence. The keys are those that the KV cache
    gives: with a sliding window the last ones, and in a static cache empty slots after the query's own, which the mask
    hides. Columns of padding have weight 0.
    """
    call = read.call
    if call.scores is not None:
        logits = upcast(call.scores)
    else:
        logits = masked_logits(raw_logits(read.query, read.key, call), call, slice(0, 1), 1)
    log_sim = logits if call.operation is None else call.operation.log_similarity(logits)
    visible = logits[:, :, 0] > MASKED
    weights = (log_sim[:, :, 0] - read.lse).clamp(max=0.0).exp() * visible
    newest = (visible.any(1) * torch.arange(logits.shape[-1], device=logits.device)).amax(-1)
    return weights, newest


def weights_at(weights: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the weights (B,H,S) at columns (B,n) as (B,H,n); 0 at columns below 0, which a cache no longer holds."""
    columns = columns[:, None].expand(-1, weights.shape[1], -1)
    return weights.gather(2, columns.clamp(min=0)).masked_fill(columns < 0, 0.0)


def tokens_of_thought(token_ids: torch.Tensor, thought: tuple[int, int] | None) -> torch.Tensor:
    """Return which tokens (B,T) are within a thought: from its opening token to before the closing one."""
    if thought is None:
        return torch.zeros_like(token_ids, dtype=torch.bool)
    place = torch.arange(1, token_ids.shape[1] + 1)
    opened, closed = ((place * (token_ids == token)).cummax(1).values for token in thought)
    return opened > closed


def thought_of(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int] | None:
    """Return the ids of the tokens around a thought, if the chat template has them as single tokens."""
    template = str(getattr(tokenizer, "chat_template", None))
    vocabulary: Mapping[str, int] = {} if tokenizer is None else tokenizer.get_added_vocab()
    pairs = ((vocabulary.get(first), vocabulary.get(last)) for first, last in THOUGHTS if first in template)
    return next(((first, last) for first, last in pairs if first is not None and last is not None), None)


def ends_of(model: nn.Module) -> set[int]:
    """Return the ids of the tokens that end a sequence when the model generates."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set() if ends is None else set(np.atleast_1d(ends).tolist())
