"""Measures all tables of a run: one pass over the batches, then the follow-ups on the first sequence."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console

from sinkscope.attention.taps import denominator_of, operations_of
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.close_ups import AttentionMaps
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.parity import parity_check
from sinkscope.measuring.passes import pass_over, tables_of
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.summary import MeasuredTables, summarize
from sinkscope.measuring.tables import publish
from sinkscope.measuring.tracer import Reader, open_tracer
from sinkscope.models.family import text_tower
from sinkscope.options.measuring import RunConfig
from sinkscope.results import manifest
from sinkscope.results.metrics import notice_without_rate
from sinkscope.results.tables import of_whole_model
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.inputs import TokenInputs

WORTH_TELLING = 20  # seconds to wait


@dataclass
class Facts:
    """Facts for the manifest that are known after the pass."""

    batch_size: int = 0
    scaling: tuple[float, ...] = ()  # scale of the logits, by layer
    outside: dict[str, list[int]] = field(default_factory=dict)  # attention targets other than text → their layers
    loss: float | None = None  # cross-entropy per predicted token, if there was a backward pass
    until: float | None = None  # when it was expected to end, after its first batch, in seconds since 1970
    parity: float | None = None  # largest relative difference from the bare model; None: not compared
    notices: tuple[str, ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)  # observable that does not apply → the reason
    pictures: dict[str, Any] | None = None  # how many, and the coordinates of φ (measuring/pictures.py)


def run_manifest(
    subject: Subject, config: RunConfig, facts: Facts, tables: list[str], start: float, command: str = "analyze"
) -> dict[str, Any]:
    """Return the manifest of a run (run.json): the common head, and the facts about model and input."""
    loaded, family, inputs = subject.loaded, subject.family, subject.inputs
    parameters = next(loaded.model.parameters())
    text = loaded.model.config.get_text_config()
    path, tower = text_tower(loaded.model)
    described = {
        "condition": inputs.condition,
        "model": {
            **loaded.origin,
            "adapter": loaded.adapter,
            "architecture": type(loaded.model).__name__,
            "text_tower": {"path": path, "architecture": type(tower).__name__} if path else None,
            "parameters": sum(p.numel() for p in loaded.model.parameters()),
            "registers": registers_before(loaded.model),  # tokens before the text
            "operations": operations_of(loaded.model),  # attention operations other than softmax
            "layer_types": getattr(text, "layer_types", None),
            "sliding_window": getattr(text, "sliding_window", None),
        },
        "family": {
            "name": family.name,
            "wiring": family.wiring,
            "positions": family.positions,
            "layer_positions": family.layer_positions if len(family.kinds_of_positions) > 1 else None,
            "door": family.door,
            "gated": family.gated,
            "causal": family.causal,
            "prefix": family.prefix,  # tokens at the beginning that all tokens see
            "copies": family.copies and family.copies.count,  # copies of the residual stream; their mean is measured
            "unknown": [layer for layer, block in enumerate(family.blocks) if block.wiring == "unknown"] or None,
            "kinds": [block.kind for block in family.blocks] or None,  # kinds of the layers, if they differ
        },
        "outside": facts.outside,
        "absent": family.absent_sites(),
        "not_measured": facts.not_measured,
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "device": str(parameters.device),
        "processes": team().count,
        "kernel": config.attn,
        "scaling": [None if math.isnan(scaling) else scaling for scaling in facts.scaling],
        "batch_size": facts.batch_size,
        "expected": {  # beside `wall_seconds` and `peak_memory_mb`
            "memory_mb": subject.memory and round(subject.memory.peak(parameters.dtype) / 2**20, 1),
            "seconds": facts.until and round(facts.until - start, 2),
        },
        "parity": facts.parity,
        "notices": list(facts.notices),
        "pictures": facts.pictures,
        "input": {
            **described_input(inputs),
            "masked": None if inputs.masked is None else inputs.num_predicted,
            "per_passage": inputs.per_passage,
        },
        "seed": config.seed,
    }
    asked = config.model_dump(mode="json")
    if config.reads_all:
        asked["seq_len"] = inputs.longest
        asked |= {name: min(asked[name], inputs.longest) for name in ("positions", "window")}
    return manifest.make_manifest(command, asked, start, tables, **described)


def described_input(inputs: TokenInputs) -> dict[str, Any]:
    """Return the facts about a text that run.json of every command has."""
    texts = inputs.texts
    return {
        "read": inputs.said,
        "sequences": len(inputs),
        "tokens": inputs.num_tokens,
        "shortest": inputs.shortest,
        "longest": inputs.longest,
        "token_zero": inputs.token_zero,
        "sha256": inputs.sha256,
        # the number of each sequence's text, if some are copies of one text
        "texts": None if len(set(texts)) == len(texts) else list(texts),
    }


def measure(
    subject: Subject, config: RunConfig, console: Console | None = None, heads: Sequence[tuple[int, int]] = ()
) -> tuple[dict[str, pd.DataFrame], Facts]:
    """Measure a model on its inputs. Returns the run's tables by name, and facts about the pass.

    The maps of attention weights are of `heads`, as (layer, head); without them, some are chosen.

    Raises InputError if a named observable does not apply, and SinkscopeError for NaN, infinity or too little memory.
    """
    loaded, family, inputs = subject.loaded, subject.family, subject.inputs
    chosen, settings = choose(subject, config), settings_of(subject, config)
    facts = Facts(not_measured=chosen.left_out)
    check = parity_check(subject, config, chosen.backward)

    def fresh() -> list[Observable]:
        return [*prepared(chosen.first, settings, subject), *check.fresh()]

    def expect(seconds: float) -> None:
        """Print after the first batch how long the rest takes and how much memory the run needs."""
        facts.until = time.time() + seconds
        if console is not None and subject.memory is not None and seconds > WORTH_TELLING:
            print_line(console, f"about {lasting(seconds)}, {subject.memory}")

    with open_tracer(loaded.model, family, config.attn) as tracer:
        step = tracer.forward_backward if chosen.backward else tracer.forward
        done = pass_over(tracer.model, inputs, fresh, step, config.batch_size, chosen.backward, console, expect)
        facts.batch_size, facts.parity = done.batch_size, check.error
        facts.loss = done.loss / inputs.num_predicted if chosen.backward else None
        if facts.loss is not None and not math.isfinite(facts.loss):
            raise SinkscopeError(f"the loss is {facts.loss}: gradients of this model on this input are meaningless")
        facts.notices = tuple(notice for observable in done.observables for notice in observable.notices())
        raw = tables_of(done.observables) | done.loss_tables(inputs)
        follow_ups = [
            AttentionMaps(settings, heads)
            if heads and name == AttentionMaps.name
            else OBSERVABLES[name].from_tables(settings, raw)
            for name in chosen.follow_ups
        ]
        if follow_ups:
            tracer.forward(next(inputs.batches(1)), follow_ups)
        raw |= tables_of(follow_ups)
        facts.scaling, facts.outside = attention_facts(tracer)
    tables = publish(raw, loaded, inputs.condition)
    measured = MeasuredTables(tables, inputs, family, facts.scaling, facts.outside, settings)
    summary = summarize(measured, facts.loss)
    if notice := notice_without_rate(of_whole_model(summary), settings.epsilon):
        facts.notices += (notice,)
    return tables | publish({"summary": summary}, loaded, inputs.condition), facts


def attention_facts(reader: Reader) -> tuple[tuple[float, ...], dict[str, list[int]]]:
    """Return the scale of each layer's logits, and targets of attention other than the text with their layers."""
    outside: dict[str, list[int]] = defaultdict(list)
    for layer, attention in reader.family.attentions(reader.model).items():
        term, call = denominator_of(attention), reader.seams[layer].call
        if term is not None:
            outside[term.called].append(layer)
        elif call is not None and call.sink_logits is not None:
            outside["the model's own sink logits"].append(layer)
        if reader.registers:
            outside["register tokens"].append(layer)
    calls = {layer: seam.call for layer, seam in reader.seams.items() if seam.call is not None}
    scaling = tuple(calls[layer].scaling if layer in calls else math.nan for layer in range(reader.depth))
    return scaling, dict(outside)


def settings_of(subject: Subject, config: RunConfig, positions: int = 0) -> Settings:
    """Return the run's settings for at least `positions` positions, limited to the longest sequence."""
    longest = subject.inputs.longest
    fitted = {"positions": min(max(config.positions, positions), longest), "window": min(config.window, longest)}
    return config.model_copy(update=fitted)


def prepared(names: Iterable[str], settings: Settings, subject: Subject) -> list[Observable]:
    """Create the observables of one pass."""
    observables = [OBSERVABLES[name](settings) for name in names]
    for observable in observables:
        observable.prepare(subject.loaded.model, subject.family, subject.inputs.num_predicted)
    return observables


@dataclass(frozen=True)
class ChosenObservables:
    """The names of a run's observables."""

    first: tuple[str, ...]  # observables of the pass over all batches
    follow_ups: tuple[str, ...]  # observables of a second pass over the first sequence
    left_out: dict[str, str]  # expected observables that do not apply → the reason

    @property
    def backward(self) -> bool:
        return any(OBSERVABLES[name].backward for name in self.first)


def choose(subject: Subject, config: RunConfig) -> ChosenObservables:
    """Choose the named observables, or all that apply, with follow-ups. Raises InputError if a named one does not."""
    named = config.observables or tuple(name for name, kind in OBSERVABLES.items() if kind.by_default)
    wanted = dict.fromkeys(needed for name in named for needed in (*OBSERVABLES[name].after, name))
    model, family = subject.loaded.model, subject.family
    reasons = {name: OBSERVABLES[name].inapplicable(model, family) for name in wanted}
    if subject.without_loss:
        reasons |= {name: subject.without_loss for name in wanted if OBSERVABLES[name].backward}
    if not subject.inputs.repeats_one_token:
        reason = "the tokens of a sequence are not one and the same (--input repeated --bos never)"
        reasons |= {name: reason for name in wanted if OBSERVABLES[name].of_equal_tokens}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if config.observables is not None and left_out:
        name, reason = next(iter(left_out.items()))
        raise InputError(f"--observables {name} does not apply to {subject.loaded.name}: {reason}")
    first = tuple(name for name in wanted if name not in left_out and not OBSERVABLES[name].after)
    follow_ups = tuple(
        name
        for name, kind in OBSERVABLES.items()
        if kind.after and set(kind.after) <= set(first) and kind.inapplicable(model, family) is None
    )
    expected = {name: reason for name, reason in left_out.items() if OBSERVABLES[name].expected}
    return ChosenObservables(first, follow_ups, expected)
