"""`analyze`: from a model's name to a Run. Read this file to see a run from end to end."""

import math
import os
import time
from typing import Any

import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.console import print_notices
from sinkscope.measuring.manifest import Facts, make_manifest
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.close_ups import AttentionMaps, MassiveMap, telling_heads
from sinkscope.measuring.observables.observable import GradientObservable, Observable, Settings
from sinkscope.measuring.passes import batches_of, pass_over
from sinkscope.measuring.subject import ModelLike, Subject, config_of, load_subject
from sinkscope.measuring.summary import summarise
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import RunConfig
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output
from sinkscope.results.tables import shape_table
from sinkscope.text.inputs import TokenInputs
from sinkscope.text.tokens import token_text

BACKWARD_COSTS = 4  # times the memory of a forward pass, about: logits and every layer's activations stay


def analyze(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: RunConfig | None = None,
    **options: Any,
) -> Run:
    """Measure one model and return its Run; with `out`, also write the run folder.

    `model` is a hub id, a folder, a .gguf file, or a model already loaded (with its tokenizer beside it); without
    one, SmolLM2-135M. `options` are those of the command line, with underscores: see `RunConfig`. A whole `config`
    takes their place.

    Errors: InputError for wrong options or input, before anything is written; SinkscopeError for a run that failed.
    """
    start = time.time()
    config = config or config_of(model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    subject = load_subject(model, tokenizer, config, console)

    tables, facts = measure(subject, config, console)
    print_notices(console, facts.notices)
    manifest = make_manifest(subject, config, facts, list(tables), start)
    return finished(Run(manifest, tables, folder), console)


def measure(
    subject: Subject, config: RunConfig, console: Console | None = None
) -> tuple[dict[str, pd.DataFrame], Facts]:
    """All tables of a run: one pass over every batch, then a close look at the first sequence."""
    loaded, family, inputs = subject.loaded, subject.family, subject.inputs
    # JSON lines may be shorter than --seq-len
    settings = Settings(min(config.positions, inputs.longest), min(config.window, inputs.longest), config.epsilon)
    names, left_out = chosen_observables(subject, config)
    facts = Facts(not_measured=left_out)
    with open_tracer(loaded.model, family, config.attn) as tracer:
        observables = _pass(tracer, inputs, names, settings, config, facts, console)
        facts.notices = tuple(notice for observable in observables for notice in observable.notices())
        raw = {name: table for observable in observables for name, table in observable.tables().items()}
        raw |= _details(tracer, inputs, raw)
        facts.scaling = tuple(seam.call.scaling if seam.call else float("nan") for seam in tracer.seams)
    tables = publish(raw, loaded, inputs.condition)
    summary = summarise(tables, inputs, family, facts.scaling, facts.loss)
    return tables | {"summary": shape_table("summary", summary, loaded.name, inputs.condition, {})}, facts


def chosen_observables(subject: Subject, config: RunConfig) -> tuple[tuple[str, ...], dict[str, str]]:
    """The observables that were named, else all that apply; and those left out that one would expect, with the reason.

    Errors: InputError where one that was named does not apply to this model.
    """
    wanted = config.observables or tuple(OBSERVABLES)
    model, family = subject.loaded.model, subject.family
    reasons = {name: OBSERVABLES[name].inapplicable(model, family) for name in wanted}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if config.observables is not None and left_out:
        name, reason = next(iter(left_out.items()))
        raise InputError(f"--observables {name} does not apply to {subject.loaded.name}: {reason}")
    expected = {name: reason for name, reason in left_out.items() if OBSERVABLES[name].expected}
    return tuple(name for name in wanted if name not in left_out), expected


def publish(raw: dict[str, pd.DataFrame], loaded: LoadedModel, condition: str) -> dict[str, pd.DataFrame]:
    """The observables' tables with their leading columns and token texts."""
    ids = {int(token) for table in raw.values() if "token_id" in table for token in table["token_id"].unique()}
    tokens = {token: token_text(loaded.tokenizer, token) for token in ids}
    return {name: shape_table(name, table, loaded.name, condition, tokens) for name, table in raw.items()}


def _pass(
    tracer: Tracer,
    inputs: TokenInputs,
    names: tuple[str, ...],
    settings: Settings,
    config: RunConfig,
    facts: Facts,
    console: Console | None,
) -> list[Observable]:
    """Every batch through the tracer: forward, and backward where an observable asks for it."""
    backward = any(issubclass(OBSERVABLES[name], GradientObservable) for name in names)
    predicted = inputs.num_predicted

    def fresh() -> list[Observable]:
        observables = [OBSERVABLES[name](settings) for name in names]
        for observable in observables:
            observable.prepare(tracer.model, tracer.family, predicted)
        return observables

    step = tracer.forward_backward if backward else tracer.forward
    done = pass_over(tracer, inputs, fresh, step, config.batch_size, BACKWARD_COSTS if backward else 1, console)
    facts.batch_size = done.batch_size
    facts.loss = done.loss / predicted if backward else None
    if facts.loss is not None and not math.isfinite(facts.loss):
        raise SinkscopeError(f"the loss is {facts.loss}: gradients of this model on this input mean nothing")
    return done.observables


def _details(tracer: Tracer, inputs: TokenInputs, raw: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The first sequence once more, now that it is known which heads and which layer to look at."""
    looks: list[Observable] = []
    if "attention" in raw:
        looks.append(AttentionMaps(telling_heads(raw["attention"])))
    if "massive" in raw:
        worst = raw["massive"].loc[raw["massive"]["ratio"].idxmax(), "layer"]
        looks.append(MassiveMap(int(worst)))
    if not looks:
        return {}
    first = next(batches_of(inputs, 1))
    tracer.forward(first, looks)
    return {name: table for look in looks for name, table in look.tables().items()}
