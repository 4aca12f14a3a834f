"""Training with transformers' Trainer: new parameters at a learning rate of their own, and resumed after a kill.

FOLDER/training.json    what is trained on what: a folder is resumed only by the same training
FOLDER/checkpoint-500/  as the Trainer writes them; the newest two are kept

On one process of the CPU, a training that was killed and resumed ends with the very weights of an unbroken one.
"""

import atexit
import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from rich.console import Console
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.models.families import is_retrofitted
from sinkscope.options.training import TrainingConfig
from sinkscope.results.folders import write_json
from sinkscope.retrofits import gate_displacement, new_parameters
from sinkscope.retrofits.register_tokens import IGNORED
from sinkscope.training.blocks import Blocks
from sinkscope.training.sharding import check_sharding, is_sharded

RECORD = "training.json"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
KEPT = 2  # checkpoints
HOUR = 3600
# what may differ when a training is resumed: none of these decides its weights
FREE = ("save_every", "log_every")

Probe = Callable[[PreTrainedModel], pd.DataFrame]  # → layer (-1: the whole model), metric, value


def train(
    model: PreTrainedModel,
    blocks: Blocks,
    config: TrainingConfig,
    out: str | os.PathLike[str],
    *,
    resume: bool = True,
    keep_all: bool = False,
    cpu: bool = False,
    console: Console | None = None,
    probe: Probe | None = None,
) -> pd.DataFrame:
    """Train a model in place, retrofitted or not, and leave checkpoints in `out`. → its history: layer (-1: the whole
    model), step, metric, value.

    `probe` measures the model at step 0 and at every log, in eval mode; the training does not see that it was there.

    With `resume`, a training that was broken off goes on from its last whole checkpoint. Afterwards the model is in
    eval mode with its parameters frozen, as it was loaded. `keep_all`: every checkpoint stays, and not the last two
    only. `cpu`: even where there is a GPU.

    Errors: InputError for what cannot be trained so, before anything is written; SinkscopeError for want of memory
    or disk, and for a loss that is no number. Checkpoints then stay.
    """
    folder = Path(out)
    launched(cpu)
    if len(blocks.train) == 0:
        raise InputError("there is no block to train on: give a longer text")
    check_trainable(model, config.only_new)
    if probe is not None and is_sharded():
        raise InputError("a probe needs the model whole, and FSDP has cut it up: launch without its configuration")
    last = _claim(folder, _record(model, blocks, config), resume)
    kept = math.ceil(config.steps / config.save_every) if keep_all else KEPT
    _check_room(model, config, folder, kept)
    was_cached = getattr(model.config, "use_cache", None)
    _unfreeze(model, config.only_new)
    with failures(folder), no_bars(), torch.random.fork_rng():
        if last is not None:
            _load(model, last)
        trained = copy.deepcopy(model) if is_sharded() else model  # FSDP cuts it up for good
        trainer = _Trainer(
            model=trained,
            args=_arguments(config, folder, kept, cpu),
            train_dataset=_TrainingBlocks(
                blocks.train, config.blocks_wanted(PartialState().num_processes), config.seed
            ),
            callbacks=[_Watch(trained, probe), *([_Bar()] if _has_bar(console) else [])],
        )
        trainer.new_learning_rate = config.new_learning_rate
        trainer.remove_callback(PrinterCallback)  # it would print on stdout
        if last is not None and _step(last) == config.steps:  # killed afterwards: the Trainer would take one step more
            logs = _logs(last)
        else:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
            logs = trainer.state.log_history
            if trained is not model:
                _load_last(model, folder)
        # accelerate's bf16 stays on the model, and its own way of taking it off takes a retrofit's `forward` with it
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)
    if was_cached is not None:
        model.config.use_cache = was_cached
    model.zero_grad(set_to_none=True)
    model.eval().requires_grad_(False)
    return _history(logs)


def launched(cpu: bool = False) -> PartialState:
    """The processes that `accelerate launch` has started, or this one alone. To be asked before any other question
    of accelerate's: its own first answer does not see the others on a machine without a GPU.
    """
    state = PartialState(cpu=cpu or not torch.cuda.is_available(), timeout=timedelta(seconds=24 * HOUR))
    check_sharding()
    atexit.register(state.destroy_process_group)  # left to the interpreter's end, gloo can abort
    return state


# -------------------------------------------------------------------------------------------- what is checked


def check_trainable(model: PreTrainedModel, only_new: bool) -> None:
    """Errors: InputError where there is nothing to train."""
    if only_new and not new_parameters(model):
        method = model.config.retrofit["method"] if is_retrofitted(model.config) else "none"
        raise InputError(f"--only-new leaves nothing to train: {method} adds no parameters to this model")


def _unfreeze(model: PreTrainedModel, only_new: bool) -> None:
    """A loaded model's parameters are frozen."""
    model.requires_grad_(not only_new)
    for parameter in new_parameters(model).values():
        parameter.requires_grad_(True)


def _record(model: PreTrainedModel, blocks: Blocks, config: TrainingConfig) -> dict[str, Any]:
    """By what a training is known: with another of these its weights would be others."""
    return {
        "config": config.model_dump(exclude=set(FREE)),
        "retrofit": model.config.retrofit if is_retrofitted(model.config) else None,
        "text": blocks.sha256,
        "processes": PartialState().num_processes,
        "sharded": is_sharded(),
    }


def _claim(folder: Path, record: dict[str, Any], resume: bool) -> Path | None:
    """The folder is this training's from now on. → its last whole checkpoint.

    Errors: InputError where it is another one's.
    """
    state = PartialState()
    path = folder / RECORD
    before = _filled(_read(path)) if resume else None
    if before is not None and before != record:
        differing = sorted(key for key in record if before.get(key) != record[key])
        raise InputError(
            f"{folder} holds another training (unlike in {_differences(before, record) or ', '.join(differing)}): "
            "repeat that one's options to resume it, or name another folder"
        )
    try:
        if state.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            _clear(folder, everything=not resume)
            write_json(path, record)
        state.wait_for_everyone()
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    return _last_checkpoint(folder)


def _filled(before: dict[str, Any] | None) -> dict[str, Any] | None:
    """A record as today's sinkscope would have written it: what an older one did not know was as it is by default."""
    if before is None:
        return None
    known = TrainingConfig().model_dump(exclude=set(FREE))
    return {"sharded": False} | before | {"config": known | (before.get("config") or {})}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    old, new = before.get("config") or {}, now["config"]
    return ", ".join(f"{name}: {old.get(name)}, now {value}" for name, value in new.items() if old.get(name) != value)


def _clear(folder: Path, everything: bool) -> None:
    """Checkpoints that a kill has left half written: the Trainer would count them among those it keeps."""
    for path in folder.iterdir():
        if CHECKPOINT.fullmatch(path.name) and (everything or not _is_whole(path)):
            shutil.rmtree(path)


def _last_checkpoint(folder: Path) -> Path | None:
    whole = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name) and _is_whole(path)]
    return max(whole, key=_step, default=None)


def _is_whole(checkpoint: Path) -> bool:
    """The state is what the Trainer writes last, and of what it deletes anything may be gone."""
    needed = ("config.json", "model*.safetensors", "optimizer.*", "scheduler.pt")  # FSDP's is optimizer.bin
    return all(any(checkpoint.glob(name)) for name in needed) and _read_state(checkpoint) is not None


def _read_state(checkpoint: Path) -> dict[str, Any] | None:
    state = _read(checkpoint / "trainer_state.json")
    return state if state is not None and "log_history" in state else None


def _logs(checkpoint: Path) -> list[dict[str, Any]]:
    return (_read_state(checkpoint) or {})["log_history"]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _read(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds; None where there is none, or half of one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _check_room(model: PreTrainedModel, config: TrainingConfig, folder: Path, kept: int) -> None:
    """Errors: InputError where the disk cannot hold the checkpoints and the model: not after hours, but now."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for p in new_parameters(model).values()) if config.only_new else weights
    model_files = 2 * weights if is_sharded() else weights  # FSDP's own besides
    needed = (kept + 1) * (model_files + 2 * trained) + weights  # AdamW's two moments; one more before an old one goes
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + held
    if free < needed:
        raise InputError(
            f"{folder} has {free / 2**30:.1f} GB left on its disk and its checkpoints need {needed / 2**30:.1f}: "
            "make room, or name another folder"
        )


@contextmanager
def failures(folder: Path) -> Iterator[None]:
    """What can happen in hours of training, in words. A checkpoint that could not be finished goes, as it is no good
    and takes up room.
    """
    try:
        yield
    except (SinkscopeError, KeyboardInterrupt):
        raise
    except Exception as error:
        gist = " ".join(str(error).split())[:200]
        last = _last_checkpoint(folder) if folder.is_dir() else None
        kept = f"the training up to step {_step(last)} is kept" if last else "what was reached is kept"
        if "out of memory" in gist.lower() or "allocate memory" in gist or isinstance(error, MemoryError):
            raise SinkscopeError(
                "memory ran out: take a smaller --batch-size with more --accumulation, a shorter --block-length, or "
                f"--bf16 ({kept})"
            ) from error
        signs = ("No space left", "I/O error", "file write failed", "PytorchStreamWriter", "enforce fail", "os error")
        if isinstance(error, OSError) or any(sign in gist for sign in signs):
            if folder.is_dir():
                _clear(folder, everything=False)
            raise SinkscopeError(
                f"writing to {folder} failed [{gist}]: {kept}; make room and repeat the command to go on"
            ) from error
        raise


@contextmanager
def no_bars() -> Iterator[None]:
    """Without transformers' bars for weights that are read or written, which would cut through ours."""
    had = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had:
            transformers_logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------------ the Trainer


def _arguments(config: TrainingConfig, folder: Path, kept: int, cpu: bool) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_steps=math.ceil(config.warmup * config.steps),
        lr_scheduler_type="linear",
        bf16=config.bf16,
        use_cpu=cpu or not torch.cuda.is_available(),
        seed=config.seed,
        train_sampling_strategy="sequential",  # _TrainingBlocks has the order
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=kept,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # it would hide a loss that is no number
        report_to="none",
        disable_tqdm=True,  # the bar is our own
        ddp_timeout=24 * HOUR,  # while the first process measures, the others wait
    )
    if arguments.n_gpu > 1:  # in one process the Trainer would copy the model to each; `accelerate launch` uses them
        arguments._n_gpu = 1
    return arguments


class _Trainer(Trainer):
    model: Any
    new_learning_rate: float

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Three groups: pretrained weights, with weight decay and without, and the new parameters."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(parameter_groups(self.model, self.args, self.new_learning_rate), **options)
        return self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """`train` has done that."""


def _load(model: PreTrainedModel, checkpoint: Path) -> None:
    """As a model is loaded anywhere else: mixtures of experts are saved under other names than they have here, which
    the Trainer takes for weights that are missing, and warns of.
    """
    kept: Any = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(kept.state_dict())


def _load_last(model: PreTrainedModel, folder: Path) -> None:
    """What the processes have each a part of comes back whole to all of them."""
    PartialState().wait_for_everyone()
    last = _last_checkpoint(folder)
    assert last is not None  # the Trainer's last step writes one
    _load(model, last)


def parameter_groups(model: PreTrainedModel, args: TrainingArguments, new_learning_rate: float) -> list[dict[str, Any]]:
    """Of what requires a gradient. Norms and biases are not decayed, nor is what a retrofit has added: decay would
    pull it back to 0, where it mostly started.
    """
    new = new_parameters(model)
    decayed = set(Trainer.get_decay_parameter_names(None, model)) - set(new)  # type: ignore[arg-type]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained.items() if name not in decayed | set(new)], "weight_decay": 0.0},
        {"params": [p for name, p in trained.items() if name in new], "weight_decay": 0.0, "lr": new_learning_rate},
    ]
    return [group for group in groups if group["params"]]


class _TrainingBlocks(Dataset):
    """Every block that is read from the first step to the last, in that order: each step's the same ones however many
    processes share them, and no batch smaller for being an epoch's last.
    """

    def __init__(self, blocks: np.ndarray, wanted: int, seed: int) -> None:
        self.blocks = blocks
        self.order = shuffled(len(blocks), wanted, seed)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.blocks[self.order[index]].copy())
        labels = ids.clone()
        labels[0] = IGNORED  # nothing predicts it, and the Trainer divides by the number of labels
        return {"input_ids": ids, "labels": labels}


def shuffled(count: int, wanted: int, seed: int) -> np.ndarray:
    """`wanted` indices below `count`, all of them once before any comes again: each epoch in an order of its own."""
    generator = torch.Generator()
    epochs = [torch.randperm(count, generator=generator.manual_seed(seed + at)) for at in range(-(-wanted // count))]
    return torch.cat(epochs)[:wanted].numpy()


class _Watch(TrainerCallback):
    """Adds to each log, which checkpoints keep, how far the gates have moved and what the probe finds; refuses a loss
    that is no number.
    """

    def __init__(self, model: PreTrainedModel, probe: Probe | None) -> None:
        self.model = model
        self.probe = probe

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.probe is not None and state.global_step == 0:
            state.log_history.append({"step": 0})
            self._probe(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" not in logs:  # the last one, of times
            return
        if not math.isfinite(logs["loss"]):
            raise SinkscopeError(
                f"the loss is {logs['loss']} at step {state.global_step}: take smaller learning rates, or more warmup"
            )
        moved = gate_displacement(self.model)
        state.log_history[-1]["gates"] = [
            [int(layer), float(distance.mean()), float(distance.max())]
            for layer, distance in moved.groupby("layer")["displacement"]
        ]
        self._probe(state)

    def _probe(self, state: Any) -> None:
        if self.probe is None or not state.is_world_process_zero:
            return
        self.model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            found = self.probe(self.model)
        self.model.train()
        state.log_history[-1]["probe"] = [
            [int(row.layer), str(row.metric), float(row.value)] for row in found.itertuples()
        ]


class _Bar(ProgressCallback):
    """The Trainer's, with the last log beside it instead of above."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            shown = {"loss": f"{logs['loss']:.3f}"}
            gates = state.log_history[-1].get("gates")
            if gates:
                shown["gates"] = f"{max(most for _, _, most in gates):.3g}"
            self.training_bar.set_postfix(shown)


def _has_bar(console: Console | None) -> bool:
    return console is not None and console.is_terminal and not console.quiet


# ------------------------------------------------------------------------------------------------ the history

LOGGED = {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "gradient_norm"}


def _history(logs: list[dict[str, Any]]) -> pd.DataFrame:
    rows: list[tuple[int, int, str, float]] = []
    for log in logs:
        step = int(log["step"])
        rows += [(WHOLE_MODEL, step, name, float(log[key])) for key, name in LOGGED.items() if key in log]
        for layer, mean, most in log.get("gates", ()):
            rows.append((layer, step, "gate_displacement_mean", mean))
            rows.append((layer, step, "gate_displacement_max", most))
        rows += [(layer, step, metric, value) for layer, metric, value in log.get("probe", ())]
    return pd.DataFrame(rows, columns=["layer", "step", "metric", "value"])
