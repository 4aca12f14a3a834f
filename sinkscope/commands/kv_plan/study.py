"""Plans are made for each budget on calibration texts, and measured on others, next to controls of equal memory."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.kernels import fused_attention, upcast
from sinkscope.attention.seam import attending_by_kernels
from sinkscope.attention.taps import Seam
from sinkscope.commands.kv_plan.caches import (
    Format,
    attending_after_evictions,
    attending_with_plans,
    exact_tokens,
    rounded_pair,
)
from sinkscope.commands.kv_plan.eviction import (
    EVICTIONS,
    EXPECTED,
    evicting_attention,
    numbers_on,
)
from sinkscope.commands.kv_plan.options import SHORTEST_TEXT
from sinkscope.commands.kv_plan.plan import (
    ABLE,
    ALL_TOKENS,
    AS_MANY,
    CACHE_BITS,
    COMBINED,
    COSTLIEST_SPARED,
    DENSE,
    FIRST_AND_LAST,
    FIRST_FOUR,
    FULL_BITS,
    NO_SINKS,
    PREDICTED,
    RANDOM,
    RANDOM_COMBINED,
    RANDOM_SPARED,
    RANKINGS,
    SERVED,
    SPARED,
    Attended,
    HeadsOnText,
    Plan,
    Ranking,
    Sizes,
    lost_output,
)
from sinkscope.commands.kv_plan.texts import COPY, PAIRS, TEXTS_PER_COPY, CopiedText
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.console import print_line
from sinkscope.measuring.engine import Setting, logits_on, resampled_cost, run_settings
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.memory import sequences_that_fit
from sinkscope.measuring.observables.observable import Accumulator, deliver
from sinkscope.measuring.processes import team
from sinkscope.measuring.sink_rule import FIRST_TOKENS
from sinkscope.measuring.streaming import token_losses
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.results.statistics import bootstrap, resamplings_of, weighted_means
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

KEPT_SHARES = (1.0, 0.8, 0.6)  # shares of all tokens that are kept, with fewer bits
WHOLE_SHARES = (0.0, 0.5, 0.9)  # shares of the kept tokens that belong to heads that keep all tokens
RANDOM_PLANS = 3  # random rankings
PLANS_AT_ONCE = 12  # plans with which the model reads a text in one batch, if they fit into memory


class PlanCost(NamedTuple):
    """The losses and the retrieval of a plan on some sequences."""

    loss: np.ndarray  # (N,): mean over the text's tokens, in nats
    copy_loss: np.ndarray  # (N,): mean over the copy's tokens
    retrieval: np.ndarray  # (N,): share of the copy's tokens that are predicted
    guessed: np.ndarray  # (N,): share of the same tokens that are predicted where they occur first


def retrieved(cost: PlanCost, dense: PlanCost, weights: np.ndarray) -> dict[str, float]:
    """Return the columns RETRIEVED of a plan; `weights` (1 + draws,N) are those of resampled texts."""
    of_dense = weighted_means(dense.retrieval, weights)
    share = bootstrap(weighted_means(cost.retrieval, weights) / np.where(of_dense[0] < ABLE, np.nan, of_dense))
    return {"retrieval": cost.retrieval.mean(), "guessed": cost.guessed.mean(), **share.as_columns("kept")}


def number_spared(layers: int) -> int:
    """Return how many of this number of layers a format leaves unquantized."""
    return max(1, round(SPARED * layers))


def plan_does_not_apply(subject: Subject, reason: str) -> InputError:
    return InputError(f"kv-plan does not apply to {subject.loaded.name}, because {reason}")


def check_plan_applies(subject: Subject) -> None:
    """Raise InputError if the model has no KV cache to plan, or the texts differ in length or are too short."""
    family, inputs = subject.family, subject.inputs
    if not family.has_attention:
        raise plan_does_not_apply(subject, "it has no attention, and no cache of keys and values")
    if not family.causal or family.prefix:
        raise plan_does_not_apply(subject, "its tokens see later ones, so that it has no cache of earlier ones")
    if getattr(subject.loaded.model.config.get_text_config(), "kv_lora_rank", None):
        reason = "engines cache one latent of each token for all heads (MLA), and a plan is of keys and values by heads"
        raise plan_does_not_apply(subject, f"{reason}: take a model without latent attention")
    subject.need_loss()
    if inputs.shortest != inputs.longest:
        raise InputError(
            f"kv-plan reads sequences of one length: these have {inputs.shortest} to {inputs.longest} tokens"
        )
    if inputs.longest < SHORTEST_TEXT:
        raise InputError(f"--seq-len {inputs.longest}: a plan needs texts of at least {SHORTEST_TEXT} tokens")
    copied, limit = inputs.longest // TEXTS_PER_COPY, position_limit(subject.loaded.model, family)
    if limit is not None and inputs.longest + copied > limit:
        longest = (TEXTS_PER_COPY * (limit + 1) - 1) // (TEXTS_PER_COPY + 1)  # fits with its copy
        most = f"take a --seq-len of at most {longest}"
        what = f"a text of {inputs.longest} tokens and the {copied} that follow it once more"
        raise InputError(f"{what} are beyond the model's {limit} positions: {most}")


class PlanStudy:
    """Makes plans for each budget on calibration texts, and measures them on the others."""

    def __init__(
        self,
        subject: Subject,
        seams: Mapping[int, Seam],
        texts: Sequence[CopiedText],
        calibration: int,
        console: Console,
        seed: int,
    ) -> None:
        """The last `calibration` texts are not measured, those before are by task, and the seams are in place."""
        self.subject, self.seams, self.console, self.seed = subject, seams, console, seed
        size, self.calibration = (len(texts) - calibration) // (1 + len(PAIRS)), texts[-calibration:]
        self.tasks = {task: texts[nth * size : (nth + 1) * size] for nth, task in enumerate((COPY, *PAIRS))}
        self.measured = self.tasks[COPY]
        self.layers = sorted(seams)
        self.centers: dict[int, list[torch.Tensor]] = {}  # layer → means of keys and values (K,1,d), without sinks
        self.sizes = self._sizes(max(len(text.sinks) for text in texts))
        self.costs: dict[tuple, PlanCost] = {}  # (plan, texts) → cost
        self.dense = self._plan(DENSE, self.sizes.dense, sinks=NO_SINKS)
        self.rows: list[dict[str, Any]] = []
        self.sequences: list[dict[str, Any]] = []
        self.retrievals: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []

    def tables(self, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
        equal = {budget: self._equal_windows(budget) for budget in budgets}
        self._note(1.0, [self.dense])
        plain = f"{CACHE_BITS[1]} bits"
        formats = {plain: ("", CACHE_BITS[1])} | {name: (name, kind.bits) for name, kind in SERVED.items()}
        scores, losses = self.calibrate({name: kind() for name, kind in RANKINGS.items()}, budgets, formats)
        for budget in budgets:
            print_line(self.console, f"planning for {budget:.0%} of the memory")
            self._plan_for(budget, scores[budget], losses[plain], equal[budget])
        print_line(self.console, f"rounding to {', '.join(map(str, CACHE_BITS))} bits, and as vLLM does")
        self._note(1.0, [*self._rounded_plans(), *self._served_plans(losses)])
        layers = [
            pd.DataFrame({"layer": self.layers, "format": name, "key_loss": lost[:, 0], "value_loss": lost[:, 1]})
            for name, lost in losses.items()
        ]
        tables = {"kv_plan": self.rows, "kv_plan_by_sequence": self.sequences, "kv_heads": self.heads}
        tables["kv_tasks"] = self.retrievals
        of_layers = pd.concat(layers, ignore_index=True)
        return {name: pd.DataFrame(rows) for name, rows in tables.items()} | {"kv_layers": of_layers}

    # --- what the calibration texts show

    def _attend(self, see: Callable[..., None]) -> None:
        """Read the calibration texts, and call `see` with text, index of the layer, attention call, mix and lse."""

        def attend(text: CopiedText, index: int, *call: Any) -> Attended:
            whole = fused_attention(*call)
            see(text, index, *call, whole)
            return whole

        for batch, text in zip(self._inputs(self.calibration).batches(1), self.calibration, strict=True):
            kernels = {layer: partial(attend, text, index) for index, layer in enumerate(self.layers)}
            with attending_by_kernels(self.seams, kernels):
                logits_on(self.subject, batch)

    def _sizes(self, sinks: int) -> Sizes:
        """Read the dense cache's sizes and centers. Raises InputError where the model's own code has no kernel."""
        shapes: dict[int, torch.Size] = {}

        def see(text: CopiedText, index: int, query: Any, key: torch.Tensor, value: torch.Tensor, *_: Any) -> None:
            shapes[index] = key.shape
            others = numbers_on(key.device, tuple(sorted({*range(key.shape[2])} - {*text.sinks})))
            means = [upcast(x)[0, :, others].mean(1, keepdim=True) / len(self.calibration) for x in (key, value)]
            layer = self.layers[index]
            known = self.centers.get(layer)
            self.centers[layer] = [a + b for a, b in zip(means, known, strict=True)] if known else means

        self._attend(see)
        if len(shapes) < len(self.layers):
            reason = "it has attention code of its own, whose cache cannot be simulated"
            raise plan_does_not_apply(self.subject, reason)
        if len({shape[1::2] for shape in shapes.values()}) > 1:
            raise plan_does_not_apply(self.subject, "its layers differ in key/value heads or their width")
        config = self.subject.loaded.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        sliding = getattr(config, "sliding_window", None)
        if sliding is not None and not kinds:
            kinds = ["sliding_attention"] * (1 + max(self.layers))
        limits = {"sliding_attention": sliding, "chunked_attention": getattr(config, "attention_chunk_size", None)}
        seen = [limits.get(kinds[layer]) if kinds else None for layer in self.layers]
        _, heads, length, width = shapes[0]
        end = length - self.calibration[0].copied
        return Sizes(np.array([min(end, limit or end) for limit in seen]), heads, width, sinks)

    def calibrate(
        self, rankings: Mapping[str, Ranking], budgets: Sequence[float], formats: Mapping[str, Format]
    ) -> tuple[dict[float, dict[str, np.ndarray]], dict[str, np.ndarray]]:
        """Return the scores (L,K) by budget and ranking, and the losses (L,2) of each format, means over texts.

        A head is scored with sinks and a window, as if half of the budget were for heads with all tokens; a key/value
        head gets its query heads' largest score. A layer loses output with keys or values in a format, mean over heads.
        Sinks are in full precision, except in a format that is served.
        """
        windows = {budget: max(1, int(budget / 2 * self.sizes.tokens.max())) for budget in budgets}
        scores = {budget: {name: np.zeros(self.sizes.dense.shape) for name in rankings} for budget in budgets}
        losses, waiting = np.zeros((len(self.layers), 2, len(formats))), Accumulator()

        def see(text: CopiedText, index: int, query: Any, key: Any, value: Any, call: Any, whole: Attended) -> None:
            for budget, window in windows.items():
                streamed = evicting_attention(query, key, value, call, [[window] * key.shape[1]], [text.sinks])
                read = HeadsOnText(query, key, call, *whole, *streamed, text)
                for name, ranking in rankings.items():
                    of_heads = ranking.score(read).unflatten(0, (key.shape[1], -1)).amax(-1)
                    waiting.receive(partial(add, scores[budget][name], index), of_heads)
            kinds = list(formats.values())
            exact = exact_tokens(key.device, key.shape[2], tuple(() if served else text.sinks for served, _ in kinds))
            dense = key.expand(len(kinds), *key.shape[1:]), value.expand(len(kinds), *value.shape[1:])
            keys, values = rounded_pair(dense, [kinds, kinds], exact, self.centers[self.layers[index]])
            pairs = torch.cat([keys, dense[0]]), torch.cat([dense[1], values])
            mix, _ = fused_attention(query.expand(2 * len(kinds), *query.shape[1:]), *pairs, call)
            waiting.receive(partial(add, losses, index), lost_output(whole[0], mix).mean(1).unflatten(0, (2, -1)))

        def add(sums: np.ndarray, index: int, of_text: torch.Tensor) -> None:
            sums[index] += of_text.double().numpy() / len(self.calibration)

        self._attend(see)
        deliver([waiting])
        by_format = dict(zip(formats, np.moveaxis(losses, -1, 0), strict=True))
        return team().of_the_first(lambda: (scores, by_format))  # equal plans in all processes

    # --- plans

    def _plan(self, name: str, windows: np.ndarray, bits: int = FULL_BITS, sinks: str = PREDICTED) -> Plan:
        return Plan(name, windows, np.full((len(windows), 2), bits), sinks)

    def _equal_windows(self, budget: float) -> np.ndarray:
        """Return windows (L,K) next to the first tokens in all heads. Raises InputError if sinks leave none."""
        equal = np.zeros(self.sizes.dense.shape)
        first_and_last = self.sizes.split(equal, budget, 0.0, sinks=FIRST_TOKENS)
        if first_and_last is None or self.sizes.split(equal, budget, 0.0) is None:
            raise InputError(f"--budget {budget:g} leaves no token for a window: take a larger one, or longer texts")
        return first_and_last

    def _plan_for(
        self, budget: float, scores: Mapping[str, np.ndarray], losses: np.ndarray, first_and_last: np.ndarray
    ) -> None:
        """Measure each ranking's best plan without quantization, the best with it, and the controls.

        `scores` (L,K) are of each ranking, `losses` (L,2) those of each layer's output with keys or values on fewer
        bits; `first_and_last` (L,K) are windows next to the first tokens.
        """
        sizes = self.sizes

        def made(
            name: str, scores: np.ndarray, losses: np.ndarray, tokens: Iterable[float], shares: Iterable[float]
        ) -> list[Plan]:
            """Return the plans that keep a share of all tokens, with as many bits as the budget permits."""
            plans = []
            for tokens_kept, share in itertools.product(tokens, shares):
                windows = sizes.split(scores, tokens_kept, share)
                bits = None if windows is None else sizes.fitting_bits(losses, budget, windows)
                if windows is not None and bits is not None:
                    plans.append(Plan(name, windows, bits, tokens=tokens_kept, share=share))
            return plans

        by_ranking = {name: made(name, scores[name], losses, [budget], WHOLE_SHARES) for name in RANKINGS}
        self._read([self.dense, *itertools.chain(*by_ranking.values())], self.calibration)
        best = {name: min(plans, key=self._added) for name, plans in by_ranking.items()}
        ranking = min(best, key=lambda name: self._added(best[name]))
        shares_kept = [budget, *(share for share in KEPT_SHARES if share > budget)]
        combining = made(COMBINED, scores[ranking], losses, shares_kept, WHOLE_SHARES)
        self._read(combining, self.calibration)
        combined = min(combining, key=self._added)
        plans = [*best.values(), combined]
        for name, plan in [*best.items(), (ranking, combined)]:
            whole = plan.windows == ALL_TOKENS
            for (index, head), score in np.ndenumerate(scores[name]):
                self.heads.append(
                    {
                        "layer": self.layers[index],
                        "budget": budget,
                        "plan": plan.name,
                        "kv_head": head,
                        "score": score,
                        "window": -1 if whole[index, head] else int(plan.windows[index, head]),
                        "key_bits": int(plan.bits[index, 0]),
                        "value_bits": int(plan.bits[index, 1]),
                    }
                )
        shuffled = np.random.default_rng(self.seed).permutation
        for draw in range(1, 1 + RANDOM_PLANS):
            heads, layers = (shuffled(each.ravel()).reshape(each.shape) for each in (scores[ranking], losses))
            for name, plan in ((RANDOM, best[ranking]), (RANDOM_COMBINED, combined)):
                # heads whose layers see more tokens may leave none for windows
                plans += made(f"{name} {draw}", heads, layers, [plan.tokens], [plan.share, 0.0])[:1]
        self._note(budget, [*plans, control := self._plan(FIRST_AND_LAST, first_and_last, sinks=FIRST_FOUR)])
        self._note_tasks(budget, [self.dense, *self._evictions(budget), *best.values(), combined, control])

    def _evictions(self, budget: float) -> list[Plan]:
        """Return plans that keep a share of all tokens after the prompt, for the scores that the model has."""
        windows = np.maximum(1, budget * self.sizes.tokens).astype(int)[:, None].repeat(self.sizes.kv_heads, 1)
        family = self.subject.family
        has_tables = family.door == "interface" or "rotary" not in family.kinds_of_positions
        names = [name for name in EVICTIONS if name != EXPECTED or has_tables]
        return [replace(self._plan(name, windows, sinks=NO_SINKS), evicts=name) for name in names]

    def _rounded_plans(self) -> list[Plan]:
        """Return keys and values on fewer bits, with predicted sinks, first tokens or none in full precision."""
        names = itertools.product(CACHE_BITS, (PREDICTED, AS_MANY, NO_SINKS))
        return [self._plan(f"{bits} bits", self.dense.windows, bits, sinks) for bits, sinks in names]

    def _served_plans(self, losses: Mapping[str, np.ndarray]) -> list[Plan]:
        """Return the formats that are served: alone, without the costliest or random layers, and without first tokens.

        `losses` (L,2) are those of each layer's output with keys or values in a format.
        """
        plans, count = list[Plan](), number_spared(len(self.layers))
        drawn = np.random.default_rng(self.seed).permutation(len(self.layers))[:count]
        for name, kind in SERVED.items():
            costliest = np.argsort(-losses[name].sum(1), kind="stable")[:count]
            for label, layers, sinks in (
                (name, [], NO_SINKS), (f"{name}, {COSTLIEST_SPARED}", costliest, NO_SINKS),
                (f"{name}, {RANDOM_SPARED}", drawn, NO_SINKS), (name, [], FIRST_FOUR),
            ):  # fmt: skip
                plan = replace(self._plan(label, self.dense.windows, kind.bits, sinks), served=name)
                plan.bits[layers] = FULL_BITS
                plans.append(plan)
        return plans

    # --- costs

    def _inputs(self, texts: Sequence[CopiedText]) -> TokenInputs:
        return replace(self.subject.inputs, sequences=tuple(text.ids for text in texts))

    def _read(self, plans: Sequence[Plan], texts: Sequence[CopiedText]) -> list[PlanCost]:
        """Return the cost of each plan. Raises SinkscopeError if a loss is not finite."""
        model = self.subject.loaded.model
        modules = self.subject.family.attentions(model)

        def read_batch(plans: Sequence[Plan], opened: None, batch: Batch, observables: Any) -> torch.Tensor:
            text = texts[batch.first]
            plain, evicting = ([plan for plan in plans if bool(plan.evicts) is evicts] for evicts in (False, True))
            sinks = [plan.sinks_of(text) for plan in plain]
            prompt = registers_before(model) + len(text.ids) - text.copied
            rows = batch.repeated(len(plans))
            pruned = attending_after_evictions(modules, self.seams, evicting, batch, prompt, self.sizes)
            with attending_with_plans(self.seams, plain, sinks, self.centers), pruned if evicting else nullcontext():
                logits = logits_on(self.subject, rows)
            ids = rows.on(logits.device, "token_ids")
            losses, hits = token_losses(logits, ids), logits[:, :-1].argmax(-1) == ids[:, 1:]
            of_text, of_copy, before = text.parts
            parts = (losses[:, of_text], losses[:, of_copy], hits[:, of_copy], hits[:, before])
            return torch.stack([part.double().mean(1) for part in parts], dim=1)[None]

        keys = []
        for plan in plans:
            sinks = tuple(plan.sinks_of(text) for text in texts)
            sizes = plan.windows.tobytes(), plan.bits.tobytes()
            keys.append((id(texts), *sizes, plan.served, plan.evicts, sinks))
        unread = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in self.costs}
        subject = replace(self.subject, inputs=self._inputs(texts))
        fitting = sequences_that_fit(model, len(texts[0].ids), backward=False)
        size, order = min(PLANS_AT_ONCE, fitting), sorted(unread, key=lambda key: bool(unread[key].evicts))
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        settings = [Setting(nullcontext, partial(read_batch, [unread[key] for key in each])) for each in batches]
        passes = run_settings(subject, settings, batch_size=1, console=self.console, by_batch=False)
        for each, done in zip(batches, passes, strict=True):
            if not done.losses.isfinite().all():
                raise SinkscopeError("the model gives NaN or infinite losses; try --dtype float32")
            by_plan = zip(each, done.losses.numpy().transpose(1, 2, 0), strict=True)  # (N,plans,4)
            self.costs |= {key: PlanCost(*numbers) for key, numbers in by_plan}
        return [self.costs[key] for key in keys]

    def _added(self, plan: Plan) -> float:
        """Return how much a plan adds to the losses of calibration texts and of their copies, in nats."""
        cost, dense = self._read([plan, self.dense], self.calibration)
        return float((cost.loss - dense.loss).mean() + (cost.copy_loss - dense.copy_loss).mean())

    def _note(self, budget: float, plans: Sequence[Plan]) -> None:
        """Measure plans and record them."""
        dense, *costs = self._read([self.dense, *plans], self.measured)
        texts = self._inputs(self.measured).texts
        weights = resamplings_of(texts)
        for plan, cost in zip(plans, costs, strict=True):
            ratio = bootstrap(np.exp(resampled_cost(cost.loss, dense.loss, np.ones(len(texts)), texts)))
            measured = f"perplexity × {ratio.value:.3f}, {cost.retrieval.mean():.0%} of the copy predicted"
            print_line(self.console, f"{plan.name} ({plan.sinks} kept): {measured}")
            whole, loss = plan.windows == ALL_TOKENS, float(cost.loss.mean())
            shared = np.broadcast_to(plan.windows.max(1, keepdims=True), plan.windows.shape)
            row = {"layer": -1, "budget": budget, "plan": plan.name, "sinks": plan.sinks}
            self.rows.append(
                row
                | {
                    "bits": float(plan.bits.mean()),
                    "whole_heads": int(whole.sum()),
                    "window": -1 if whole.all() else int(np.median(plan.windows[~whole])),
                    "memory": self.sizes.memory(plan),
                    "paged_memory": self.sizes.memory(replace(plan, windows=shared)),
                    "loss": loss,
                    "perplexity": perplexity(loss),
                    **ratio.as_columns("ratio"),
                    **retrieved(cost, dense, weights),
                }
            )
            for sequence, numbers in enumerate(zip(cost.loss, cost.retrieval, strict=True)):
                self.sequences.append(
                    row | {"sequence": sequence} | dict(zip(("loss", "retrieval"), numbers, strict=True))
                )

    def _note_tasks(self, budget: float, plans: Sequence[Plan]) -> None:
        """Measure and record retrieval with plans; the first plan is the dense cache."""
        weights = resamplings_of(self._inputs(self.measured).texts)
        for task, texts in self.tasks.items():
            costs = self._read(plans, texts)
            for plan, cost in zip(plans, costs, strict=True):
                row = {"layer": -1, "budget": budget, "plan": plan.name, "task": task, "loss": cost.copy_loss.mean()}
                self.retrievals.append(row | {"memory": self.sizes.memory(plan)} | retrieved(cost, costs[0], weights))
