"""`analyze`: from a model's name to a Run. Read this file to see a run from end to end."""

import math
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sinkscope import loading
from sinkscope.config import RunConfig, make_config
from sinkscope.details import AttentionMaps, MassiveMap, telling_heads
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.families import Family, calibrate, embedding_weight, find_family
from sinkscope.inputs import TokenInputs, build_inputs, check_source, token_text
from sinkscope.loading import LoadedModel
from sinkscope.manifest import Facts, make_manifest
from sinkscope.observables import OBSERVABLES
from sinkscope.observables.observable import GradientObservable, Observable, Settings
from sinkscope.passes import batches_of, pass_over
from sinkscope.run import Run, check_output, new_folder, write_run
from sinkscope.seam import registers_before
from sinkscope.summary import summarise
from sinkscope.tables import shape_table
from sinkscope.tracer import Tracer, open_tracer

SAMPLED_AT_ONCE = 64  # texts
MOST_SAMPLES = 20  # for each that is needed
BACKWARD_COSTS = 4  # times the memory of a forward pass, about: logits and every layer's activations stay


def analyze(
    model: str | os.PathLike[str] | PreTrainedModel | LoadedModel | None = None,
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
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if config is None:
        config = make_config(model=model if isinstance(model, str) else None, **options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)

    check_source(config.input)  # before minutes of loading
    with status(console, "loading the model"):
        loaded = loaded_model(model, tokenizer, config)
    family, notices = family_of(loaded.model)
    inputs = inputs_for(loaded, config)
    tell(console, (*loaded.notices, *notices, *inputs.notices))

    tables, facts = measure(loaded, family, inputs, config, console)
    tell(console, facts.notices)
    manifest = make_manifest(loaded, family, inputs, config, facts, list(tables), start)
    run = Run(manifest, tables, folder)
    if folder is not None:
        with status(console, "drawing the figures"), new_folder(folder) as fresh:
            write_run(run, fresh)
    return run


def loaded_model(
    model: str | PreTrainedModel | LoadedModel | None, tokenizer: PreTrainedTokenizerBase | None, config: RunConfig
) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, PreTrainedModel):
        name = model.config.name_or_path or type(model).__name__
        return LoadedModel(model, tokenizer, name, name, None, None, ())
    return loading.load(
        config.model,
        revision=config.revision,
        gguf_file=config.gguf_file,
        dtype=config.dtype,
        device_map=config.device_map,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )


def family_of(model: PreTrainedModel) -> tuple[Family, list[str]]:
    """The model's row in the table of families, or one calibrated now, which is said."""
    try:
        return find_family(model), []
    except InputError as missing:
        try:
            family = calibrate(model, torch.arange(3, 11, device=model.device)[None])
        except InputError as error:
            raise InputError(f"{missing}\n{error}") from None
        note = f"'{family.name}' has no row in the table of families: wired numerically as {family.wiring}"
        return family, [note]


def inputs_for(loaded: LoadedModel, config: RunConfig) -> TokenInputs:
    """The run's token sequences, fitted to the model's vocabulary and positions."""
    text = loaded.model.config.get_text_config()
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    return build_inputs(
        config.input,
        vocab_size=embedding_weight(loaded.model).shape[0],
        tokenizer=loaded.tokenizer,
        dataset=config.dataset,
        max_positions=next((limit - registers_before(loaded.model) for limit in limits if limit), None),
        num_seqs=config.num_seqs,
        seq_len=config.seq_len,
        bos=config.bos,
        bos_token_id=text.bos_token_id,
        special_ids=(text.bos_token_id, text.pad_token_id, *ends),
        seed=config.seed,
        sampler=partial(_sample, loaded.model),
    )


@torch.no_grad()
def _sample(model: PreTrainedModel, first: int, count: int, length: int, seed: int) -> np.ndarray:
    """Texts (count, length) that the model makes after the token `first`, drawn from its own distribution.

    Texts that end sooner are left out. (Forbidding the end instead gives text that the model finds most unlikely.)
    Errors: InputError where hardly any text gets so long.
    """
    # all settings are given here: a checkpoint's own (top-k, temperature) would make the text less its own
    ends = model.generation_config.eos_token_id
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length - 1, pad_token_id=first, eos_token_id=ends
    )  # fmt: skip
    start = torch.full((SAMPLED_AT_ONCE, 1), first, device=model.device)
    texts: list[np.ndarray] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(MOST_SAMPLES * count // SAMPLED_AT_ONCE + 1):
            mask = torch.ones_like(start)
            drawn = model.generate(start, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
            if drawn.shape[1] == length:
                ended = torch.isin(
                    drawn[:, 1:-1], torch.as_tensor(ends if ends is not None else [], device=drawn.device)
                )
                texts += list(drawn[~ended.any(1)].cpu().numpy())
            if len(texts) >= count:
                return np.stack(texts[:count])
    raise InputError(
        f"--input sampled: only {len(texts)} of {count} texts reached {length} tokens: take a shorter --seq-len"
    )


def measure(
    loaded: LoadedModel, family: Family, inputs: TokenInputs, config: RunConfig, console: Console | None = None
) -> tuple[dict[str, pd.DataFrame], Facts]:
    """All tables of a run: one pass over every batch, then a close look at the first sequence."""
    # JSON lines may be shorter than --seq-len
    settings = Settings(min(config.positions, inputs.longest), min(config.window, inputs.longest), config.epsilon)
    names, left_out = chosen_observables(loaded, family, config)
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


def chosen_observables(
    loaded: LoadedModel, family: Family, config: RunConfig
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The observables that were named, else all that apply; and those left out, with the reason.

    Errors: InputError where one that was named does not apply to this model.
    """
    wanted = config.observables or tuple(OBSERVABLES)
    reasons = {name: OBSERVABLES[name].inapplicable(loaded.model, family) for name in wanted}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if config.observables is not None and left_out:
        name, reason = next(iter(left_out.items()))
        raise InputError(f"--observables {name} does not apply to {loaded.name}: {reason}")
    return tuple(name for name in wanted if name not in left_out), left_out


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
    predicted = inputs.num_tokens - len(inputs)  # all but each sequence's first

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


def tell(console: Console, notices: Iterable[str]) -> None:
    for notice in notices:
        console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)


def tell_place(console: Console, label: str, place: int, count: int) -> None:
    """Of a run in several parts, which one begins."""
    console.print(f"{label} ({place} of {count})", markup=False, highlight=False)


def status(console: Console, words: str) -> AbstractContextManager:
    """A spinner; nothing where stderr is no terminal."""
    return console.status(words) if console.is_terminal else nullcontext()


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
