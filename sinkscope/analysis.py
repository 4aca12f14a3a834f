"""`analyze`: from a model's name to a Run. Read this file to see a run from end to end."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pandas as pd
import torch
from accelerate.utils import find_executable_batch_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinkscope import loading
from sinkscope.batch import Batch
from sinkscope.config import RunConfig, make_config
from sinkscope.details import AttentionMaps, MassiveMap, telling_heads
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.families import Family, calibrate, embedding_weight, find_family
from sinkscope.inputs import TokenInputs, build_inputs, check_source, token_text
from sinkscope.loading import LoadedModel
from sinkscope.manifest import Facts, make_manifest
from sinkscope.observables import OBSERVABLES
from sinkscope.observables.observable import GradientObservable, Observable, Settings
from sinkscope.run import Run, check_output, new_folder, write_run
from sinkscope.summary import summarise
from sinkscope.tables import shape_table
from sinkscope.tracer import Tracer, open_tracer

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}  # where --batch-size auto starts
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
    with _status(console, "loading the model"):
        loaded = _loaded(model, tokenizer, config)
    family, notices = family_of(loaded.model)
    inputs = inputs_for(loaded, config)
    _tell(console, (*loaded.notices, *notices, *inputs.notices))

    tables, facts = measure(loaded, family, inputs, config, console)
    _tell(console, facts.notices)
    manifest = make_manifest(loaded, family, inputs, config, facts, list(tables), start)
    run = Run(manifest, tables, folder)
    if folder is not None:
        with _status(console, "drawing the figures"), new_folder(folder) as fresh:
            write_run(run, fresh)
    return run


def _loaded(
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
        max_positions=next((limit for limit in limits if limit), None),
        num_seqs=config.num_seqs,
        seq_len=config.seq_len,
        bos=config.bos,
        bos_token_id=text.bos_token_id,
        special_ids=(text.bos_token_id, text.pad_token_id, *ends),
        seed=config.seed,
    )


def measure(
    loaded: LoadedModel, family: Family, inputs: TokenInputs, config: RunConfig, console: Console | None = None
) -> tuple[dict[str, pd.DataFrame], Facts]:
    """All tables of a run: one pass over every batch, then a close look at the first sequence."""
    # JSON lines may be shorter than --seq-len
    settings = Settings(min(config.positions, inputs.longest), min(config.window, inputs.longest), config.epsilon)
    names = config.observables or tuple(OBSERVABLES)
    facts = Facts()
    with open_tracer(loaded.model, family, config.attn) as tracer:
        observables = _pass(tracer, inputs, names, settings, config, facts, console)
        facts.notices = tuple(notice for observable in observables for notice in observable.notices())
        raw = {name: table for observable in observables for name, table in observable.tables().items()}
        raw |= _details(tracer, inputs, raw)
        facts.scaling = tuple(seam.call.scaling if seam.call else float("nan") for seam in tracer.seams)
    tables = publish(raw, loaded, inputs.condition)
    summary = summarise(tables, inputs, family, facts.scaling, facts.loss)
    return tables | {"summary": shape_table("summary", summary, loaded.name, inputs.condition, {})}, facts


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
    """Every batch through the tracer. Out of memory: again from the start with half the batch."""
    backward = any(issubclass(OBSERVABLES[name], GradientObservable) for name in names)
    predicted = inputs.num_tokens - len(inputs)  # all but each sequence's first
    device = tracer.model.device.type
    tokens = TOKENS_PER_BATCH.get(device, TOKENS_PER_BATCH["cpu"]) // (BACKWARD_COSTS if backward else 1)
    automatic = max(1, tokens // inputs.longest)
    wanted = automatic if config.batch_size == "auto" else config.batch_size

    def all_batches(batch_size: int) -> list[Observable]:
        facts.batch_size = batch_size
        observables = [OBSERVABLES[name](settings) for name in names]
        for observable in observables:
            if isinstance(observable, GradientObservable):
                observable.prepare(tracer.model, tracer.family, predicted)
        loss = 0.0
        with _progress(console) as advance:
            for first, batch in batches_of(inputs, batch_size):
                if backward:
                    loss += tracer.forward_backward(batch, observables)
                else:
                    tracer.forward(batch, observables)
                advance(first + len(batch.token_ids), len(inputs))
        facts.loss = loss / predicted if backward else None
        if facts.loss is not None and not math.isfinite(facts.loss):
            raise SinkscopeError(f"the loss is {facts.loss}: gradients of this model on this input mean nothing")
        return observables

    attempt = find_executable_batch_size(
        all_batches, starting_batch_size=min(wanted, len(inputs)), reduce_batch_size_fn=lambda: facts.batch_size // 2
    )
    try:
        return attempt()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise SinkscopeError(
            "out of memory even with one sequence a batch: "
            "take a shorter --seq-len, --dtype bfloat16 or --device-map auto"
        ) from None


def batches_of(inputs: TokenInputs, batch_size: int, padding_side: str = "right") -> Iterator[tuple[int, Batch]]:
    """(index of the first sequence, Batch) pairs, in order."""
    first = 0
    for ids, mask in inputs.batches(batch_size, padding_side=padding_side):
        yield first, Batch(ids, mask, first)
        first += len(ids)


def _tell(console: Console, notices: Iterable[str]) -> None:
    for notice in notices:
        console.print(f"note: {notice}", markup=False, highlight=False, soft_wrap=True)


def _status(console: Console, words: str) -> AbstractContextManager:
    """A spinner; nothing where stderr is no terminal."""
    return console.status(words) if console.is_terminal else nullcontext()


def _progress(console: Console | None) -> Any:
    """A context that gives advance(done, total); silent without a console."""
    if console is None or console.quiet or not console.is_terminal:
        return nullcontext(lambda done, total: None)
    return _Bar(console)


class _Bar:
    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("sequences"), TimeRemainingColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("measuring", total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.progress.start()
        return lambda done, total: self.progress.update(self.task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


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
    _, first = next(batches_of(inputs, 1))
    tracer.forward(first, looks)
    return {name: table for look in looks for name, table in look.tables().items()}
