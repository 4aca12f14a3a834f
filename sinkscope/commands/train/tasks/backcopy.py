"""The Bigram-Backcopy task (Guo et al. 2024; VGA §4.1): a Markov chain of characters, with triggers that copy.

    <s> h t h i s a t a n …      t, e and the space are triggers: the token before a trigger is repeated after it

Every sequence begins with <s>, or as an `Opening` says. After a token that is not a trigger, the next one is drawn by
the frequencies of character pairs in the text of `--input natural`, which needs no attention. After a trigger, the
token before the trigger is repeated, which needs attention. The first character is not a trigger. As in the paper's
code, the triggers are the three most frequent of 64 characters; its text is tiny Shakespeare.

Measurements (VGA figures 4–6) are means over the queries from position 1 on, or after an opening, in the held-out
sequences; numbers on attention are by layer and averaged over heads. "Start" is the first token, mostly <s>.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.train.blocks import Blocks
from sinkscope.measuring.observables.close_ups import AttentionMaps
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.family import Family
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.retrofits.retrofit import RETROFIT, GatePart
from sinkscope.text.batch import Batch
from sinkscope.text.sources import documents


@dataclass(frozen=True)
class Opening:
    """The beginning of each sequence, after which the rules of the task start (WSE §5). Each field is an option."""

    bos: bool = True  # whether the sequence begins with <s>
    random_tokens: int = 0  # number of tokens, drawn uniformly from all except <s>, that replace <s>
    fixed_position: int | None = None  # position of <s>; tokens of another sequence precede it

    @property
    def in_front(self) -> int:
        """Number of tokens before the <s> of the sequence that follows the rules."""
        return self.random_tokens or self.fixed_position or 0

    @property
    def has_start(self) -> bool:
        """Whether <s> directly precedes the tokens that follow the rules."""
        return self.fixed_position is not None or (self.bos and not self.random_tokens)

    @property
    def length(self) -> int:
        """Number of tokens before the first token that follows the rules."""
        return self.in_front + self.has_start


WITH_BOS = Opening()
NAME = "bigram-backcopy"
START, START_ID = "<s>", 0
CHARACTERS = 64
TRIGGERS = 3


@dataclass(frozen=True, eq=False)
class Chain:
    """A Markov chain of tokens, with triggers after which the token before is repeated."""

    tokens: tuple[str, ...]  # <s>, then the characters from the most to the least frequent: triggers are ids 1 … 3
    transitions: np.ndarray  # (V,V), in each row the probabilities of the next token; zero in the rows of triggers
    triggers: tuple[int, ...] = tuple(range(1, 1 + TRIGGERS))

    def sample(self, count: int, length: int, seed: int | list[int] = 0, bos: bool = True) -> np.ndarray:
        """Draw sequences (count, length) of token ids, int64; without `bos`, the first <s> is removed."""
        if not bos:
            return self.sample(count, length + 1, seed)[:, 1:]
        rng = np.random.default_rng(seed)
        sums = self.transitions.cumsum(1)
        cumulative = sums / np.maximum(sums[:, -1:], np.finfo(float).tiny)  # ends at exactly 1, above every drawn u
        ids = np.full((count, length), START_ID, dtype=np.int64)
        for position in range(1, length):
            last = ids[:, position - 1]
            drawn = (cumulative[last] <= rng.random((count, 1))).sum(1)
            ids[:, position] = np.where(self.is_trigger(last), ids[:, position - 2], drawn)
        return ids

    def is_trigger(self, ids: np.ndarray) -> np.ndarray:
        return np.isin(ids, self.triggers)


def chain_of(text: str | None = None) -> Chain:
    """Make the chain from the character frequencies of a text, by default the bundled one."""
    if text is None:
        text = "".join(documents("natural")[1])
    counts = Counter(text)
    characters = sorted(counts, key=lambda character: (-counts[character], character))[:CHARACTERS]
    tokens = (START, *characters)
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = np.zeros((len(tokens), len(tokens)))
    for before, after in pairwise(ids[character] for character in text if character in ids):
        pairs[before, after] += 1
    pairs[0, 1:] = [counts[character] for character in characters]  # <s>
    pairs[0, 1 : 1 + TRIGGERS] = 0.0
    pairs[1 : 1 + TRIGGERS] = 0.0
    return Chain(tokens, pairs / np.maximum(pairs.sum(1, keepdims=True), 1.0))


AT_ONCE = 64  # sequences


@torch.no_grad()
def measure_chain(
    chain: Chain, model: PreTrainedModel, family: Family, held_out: np.ndarray, opening: int = 1
) -> pd.DataFrame:
    """Measure the metrics `BACKCOPY` of results/metrics.py for a model in eval mode on sequences (N,T) of the task.

    The first `opening` tokens are not part of the chain. Returns layer (−1: the whole model), metric, value.
    """
    seen: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)  # observations: (n,), or (n,H) of heads
    with open_tracer(model, family) as tracer:
        for first in range(0, len(held_out), AT_ONCE):
            ids = torch.from_numpy(held_out[first : first + AT_ONCE])
            batch = Batch(ids, torch.ones_like(ids), first_predicted=max(1, opening, family.prefix))
            for metric, values in risks(chain, tracer.logits(batch), batch).items():
                seen[WHOLE_MODEL, metric].append(values)
            plain, trigger = plain_and_triggers(chain, batch)
            attention = _WeightOnStart(plain, trigger)
            with _record_ends(tracer) as ends:
                tracer.forward(batch, [attention])
            for layer, metric, values in attention.observations:
                seen[layer, metric].append(values)
            for layer, end in ends.items():
                for name in ("value", "attended"):
                    norms = _value_norms(end[name], plain.shape[1])
                    seen[layer, f"start_{name}_norm"].append(norms[:, 0])
                    seen[layer, f"trigger_{name}_norm"].append(norms[trigger])
                    seen[layer, f"other_{name}_norm"].append(norms[plain])
                before, after = (torch.linalg.vector_norm(upcast(end[name]), dim=-1).cpu() for name in ("mix", "gated"))
                left = (after / before.clamp(min=torch.finfo(before.dtype).tiny))[:, -plain.shape[1] :]
                seen[layer, "plain_output_gate"].append(left[plain])
                seen[layer, "trigger_output_gate"].append(left[trigger])
    rows = []
    for (layer, metric), parts in seen.items():
        mean = torch.cat(parts).double().mean(0)
        rows.append((layer, metric, float(mean.mean())))  # over heads, if there are several
        if metric == "attention_to_start":
            rows.append((layer, f"{metric}_max", float(mean.max())))
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])


@torch.no_grad()
def example(chain: Chain, model: PreTrainedModel, family: Family, sequence: np.ndarray) -> dict[str, pd.DataFrame]:
    """Measure one sequence (T,) in detail, as VGA figures 4 and 6 show it: `attention_maps`, and `value_norms` of the
    projected values (`norm`) and of those after a gate on the values (`attended_norm`).
    """
    ids = torch.from_numpy(sequence[None])
    heads = range(model.config.get_text_config().num_attention_heads)
    maps = AttentionMaps(Settings(), [(layer, head) for layer in family.attentions(model) for head in heads])
    with open_tracer(model, family) as tracer, _record_ends(tracer) as ends:
        tracer.forward(Batch(ids, torch.ones_like(ids), first_predicted=max(1, family.prefix)), [maps])
    places = {"sequence": 0, "position": range(len(sequence)), "token_id": sequence}
    places["is_trigger"] = chain.is_trigger(sequence)
    frames = []
    for layer, end in ends.items():
        norms = {"norm": end["value"], "attended_norm": end["attended"]}
        columns = {name: _value_norms(value, len(sequence))[0] for name, value in norms.items()}
        frames.append(pd.DataFrame({"layer": layer, **places, **columns}))
    return maps.tables() | {"value_norms": pd.concat(frames, ignore_index=True)}


def plain_and_triggers(chain: Chain, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks (B,T) of the queries that are not triggers and of triggers, without an opening or a prefix."""
    trigger = torch.from_numpy(chain.is_trigger(batch.token_ids.numpy()))
    counted = torch.arange(trigger.shape[1]) >= batch.first_predicted
    return ~trigger & counted, trigger & counted


def risks(chain: Chain, logits: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the loss above the optimum at each position; for pairs KL(p ‖ model), not the loss of the drawn token."""
    log_q = upcast(logits).log_softmax(-1).cpu().double()
    ids = batch.token_ids
    plain, trigger = plain_and_triggers(chain, batch)
    p = torch.from_numpy(chain.transitions)[ids[plain]]
    bigram = (torch.xlogy(p, p) - p * log_q[plain]).sum(-1)
    before = ids.roll(1, dims=1)  # a trigger is never the first of a chain
    backcopy = -log_q.gather(-1, before[..., None]).squeeze(-1)[trigger]
    return {"bigram_risk": bigram, "backcopy_risk": backcopy}


def _value_norms(value: torch.Tensor, length: int) -> torch.Tensor:
    """Return the norm of all heads' values together, (B,n+T,K,d) → (B,T), for the T tokens after n register tokens."""
    return torch.linalg.vector_norm(upcast(value[:, -length:]), dim=(-2, -1)).cpu()


class _WeightOnStart(Observable):
    """Measures each query's weight on <s> and on triggers, and the lead of <s> in the logits."""

    name = "to-start"
    sites = ("attention",)

    def __init__(self, plain: torch.Tensor, trigger: torch.Tensor) -> None:
        super().__init__(Settings())
        self.plain, self.trigger = plain, trigger
        self.observations: list[tuple[int, str, torch.Tensor]] = []

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        text = slice(read.length - self.plain.shape[1], read.length)  # after register tokens
        weights = read.weights(text, text)[0].movedim(1, -1).cpu()  # (B,T,T,H)
        to_start = weights[:, :, 0]
        to_triggers = weights.masked_fill(~self.trigger[:, None, :, None], 0.0).sum(2)
        allowed = read.allowed(text, text)
        assert allowed is not None  # causal attention over more than one token
        lead = start_lead(read.logits(text, text), allowed).movedim(1, -1).cpu()
        self.observations += [
            (layer, "attention_to_start", to_start[self.plain]),
            (layer, "early_attention_to_start", to_start[self.plain & (self.trigger.cumsum(1) == 0)]),
            (layer, "attention_to_triggers", to_triggers[self.plain]),
            (layer, "trigger_attention_to_start", to_start[self.trigger]),
            (layer, "delta_logit", lead[self.plain]),
        ]


def start_lead(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return Δlogit (VGA §4.1): the logit of key 0 minus the mean logit of the other keys that the query may see."""
    # logits (B,H,T,T), allowed (B|1,H|1,T,T) bool → (B,H,T); query 0 has no other keys, and no lead
    others = allowed.clone()
    others[..., 0] = False
    mean = logits.masked_fill(~others, 0.0).sum(-1) / others.sum(-1).clamp(min=1)
    return logits[..., 0] - mean


@contextmanager
def _record_ends(tracer: Tracer) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """Record the last forward pass of each layer with attention: `value` (B,T,K,d) before a retrofit's gate and
    `attended` after it; `mix` (B,T,H,d), the heads' outputs, and `gated`, the input of their output projection.
    """
    attentions = tracer.family.attentions(tracer.model)
    ends: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in attentions}

    def keep(layer: int, name: str, module: nn.Module, args: tuple, output: Any = None) -> None:
        end = ends[layer]
        if name == "value":  # the input of a gate
            end["value"] = args[1]
        elif name == "attended":
            end["attended"] = output.transpose(1, 2)
            end.setdefault("value", end["attended"])  # no gate
        else:
            end[name] = output if name == "mix" else args[0].view(end["mix"].shape)

    with ExitStack() as hooks:
        for layer, attention in attentions.items():
            seam = tracer.seams[layer]
            places: dict[str, nn.Module] = {"attended": seam.value, "mix": seam.mix}
            if isinstance(gate := getattr(attention, RETROFIT, None), GatePart):
                places["value"] = gate
            for name, module in places.items():
                hooks.enter_context(module.register_forward_hook(partial(keep, layer, name)))
            projection = attention.get_submodule(tracer.family.output)
            hooks.enter_context(projection.register_forward_pre_hook(partial(keep, layer, "gated")))
        yield ends


MEASURED_SEQUENCES = 64  # held-out sequences that are measured at every log
SHOWN_TOKENS = 20  # tokens that the figure shows of its sequence


@dataclass
class BackcopyTask:
    opening: Opening = WITH_BOS
    chain: Chain = field(default_factory=chain_of)

    name: ClassVar = NAME
    about: ClassVar = "characters that depend on the last one, and triggers after which the token before is repeated"

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer with one token per character and a first <s>. It drops all other characters."""
        tokens = self.chain.tokens
        core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=START))
        known = "".join(f"\\x{{{ord(character):x}}}" for character in tokens[1:])
        core.normalizer = normalizers.Replace(Regex(f"[^{known}]"), "")
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, START_ID)])
        core.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=START, clean_up_tokenization_spaces=False)

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        """Draw the blocks; no block is read twice, because the chain has no end."""

        def drawn(count: int, seeds: list[int]) -> np.ndarray:
            opening, chain = self.opening, self.chain
            if opening.random_tokens:
                rng = np.random.default_rng([*seeds, 1])
                front = rng.integers(1, len(chain.tokens), (count, opening.in_front))
            else:
                front = chain.sample(count, opening.in_front, [*seeds, 1], opening.bos)
            rest = chain.sample(count, length - opening.in_front, seeds, opening.has_start)
            return np.concatenate([front, rest], axis=1)

        return Blocks(drawn(train, [seed, 0]), drawn(held_out, [seed, 1]), self.name)

    def probe(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> pd.DataFrame:
        return measure_chain(self.chain, model, family, held_out[:MEASURED_SEQUENCES], self.opening.length)

    def tables(self, model: PreTrainedModel, family: Family, held_out: np.ndarray) -> dict[str, pd.DataFrame]:
        return example(self.chain, model, family, held_out[0, :SHOWN_TOKENS])


class BackcopyWithTextTask(BackcopyTask):
    """The task with every second block replaced by a passage of text.

    Passages begin at random positions and follow the same opening. In text, a token depends on more than the last one,
    and triggers copy nothing.
    """

    name: ClassVar = f"{NAME}-with-text"
    about: ClassVar = f"{NAME}, every second block replaced by a passage of text; only blocks of the task are held out"

    def blocks(self, length: int, train: int, held_out: int, seed: int) -> Blocks:
        drawn = super().blocks(length, train, held_out, seed)
        text = self.tokenizer("".join(documents("natural")[1]), add_special_tokens=False)["input_ids"]
        passage = length - self.opening.length
        starts = np.random.default_rng([seed, 2]).integers(len(text) - passage + 1, size=train // 2)
        drawn.train[1::2, -passage:] = sliding_window_view(np.array(text), passage)[starts]
        return drawn
