"""One training with transformers' Trainer: new parameters have their own learning rate, and a killed training resumes.

It resumes from the Trainer's last checkpoint, FOLDER/checkpoint-500. On one CPU process, a training that was killed and
resumed ends with exactly the weights of an uninterrupted one.
"""

import copy
import math
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging as transformers_logging

from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.history import Probe, Recorder, TrainingBar, history
from sinkscope.commands.train.options import KEPT_CHECKPOINTS, TrainingConfig
from sinkscope.commands.train.sharding import is_sharded, launched
from sinkscope.errors import InputError, SinkscopeError, is_out_of_memory, one_line
from sinkscope.measuring.console import print_line
from sinkscope.measuring.processes import TIMEOUT
from sinkscope.models.adapters import check_no_adapter
from sinkscope.models.family import is_retrofitted, vocabulary
from sinkscope.models.files import gigabytes
from sinkscope.models.packed import check_not_packed
from sinkscope.models.steps import step_of
from sinkscope.retrofits import new_parameters
from sinkscope.text.batch import IGNORED
from sinkscope.text.inputs import masked

# the files of a checkpoint other than the model, for one process, several processes and FSDP
_RESUMED_FROM = ("*.pt", "*.pth", "*.bin", TRAINER_STATE_NAME)
# texts of errors of torch's and safetensors' writers which mean that writing to the disk failed
_DISK = ("No space left", "I/O error", "file write failed", "PytorchStreamWriter", "enforce fail", "os error")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder by step: those with a state, which the Trainer writes last."""
    complete = []
    for path in folder.glob("checkpoint-*"):
        with suppress(OSError, ValueError, TypeError):
            TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))
            complete.append(path)
    return sorted(complete, key=lambda path: step_of(path.name))


def _remove_incomplete(folder: Path) -> None:
    """Remove half-written checkpoints, which take up room, and which the Trainer would count as checkpoints to keep."""
    for path in set(folder.glob("checkpoint-*")).difference(checkpoints(folder)):
        shutil.rmtree(path)


def keep_models(training: Path, target: Path) -> None:
    """Move the checkpoints of a finished training, without the files for resuming, which are larger than the model."""
    for checkpoint in sorted(training.glob("checkpoint-*")):  # also one that was broken off between these two steps
        for path in (path for name in _RESUMED_FROM for path in checkpoint.glob(name)):
            path.unlink()
        checkpoint.replace(target / checkpoint.name)


@contextmanager
def failures(folder: Path) -> Iterator[None]:
    """Turn errors of full memory and full disks into a SinkscopeError that says what is kept in the training's folder.

    An incomplete checkpoint is deleted after an error of the disk, since it takes up room and cannot be used.
    """
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:
        reached = checkpoints(folder)
        what = f"the training up to step {step_of(reached[-1].name)}" if reached else "what was reached"
        saved = f"{what} is kept"
        if is_out_of_memory(error):
            raise SinkscopeError(
                "memory ran out: take a smaller --batch-size with more --accumulation, a shorter --block-length, or "
                f"--bf16 ({saved})"
            ) from error
        if isinstance(error, OSError) or any(sign in str(error) for sign in _DISK):
            _remove_incomplete(folder)
            raise SinkscopeError(
                f"writing to {folder} failed [{one_line(error)}]: {saved}; make room and repeat the command to continue"
            ) from error
        raise


# our schedule → its name in transformers
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def train_model(
    model: PreTrainedModel,
    blocks: Blocks,
    config: TrainingConfig,
    folder: Path,
    *,
    keep_all: bool = False,
    cpu: bool = False,
    console: Console | None = None,
    probe: Probe | None = None,
) -> pd.DataFrame:
    """Train a loaded model in place, retrofitted or not. Afterwards it is in eval mode with its parameters frozen.

    An encoder, whose blocks have `masked_by`, predicts masked tokens, which are drawn again whenever a block is read.

    The training continues from the last complete checkpoint in `folder`, which must be of the same training. The last
    two are kept, or all with `keep_all`. `probe` measures the model at step 0 and at every log, without influence on
    the training. Returns the history: layer (−1: the whole model), step, metric, value. Raises InputError, before
    anything is written, if the model cannot be trained in this way, and SinkscopeError if memory or disk ran out, or
    the loss is not finite; checkpoints stay.
    """
    state = launched(cpu)
    check_trainable(model, config.only_new)
    if probe is not None and is_sharded():
        raise InputError("a probe needs the whole model, and FSDP shards it: launch without its configuration")
    limit = math.ceil(config.steps / config.save_every) if keep_all else KEPT_CHECKPOINTS
    with failures(folder), hide_bars(), _trainable(model, config.only_new), torch.random.fork_rng():
        if state.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_incomplete(folder)
        state.wait_for_everyone()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        model_files = 2 * weights if is_sharded() else weights  # FSDP writes a file of its own, too
        # AdamW has two moments; one more checkpoint is written before an old one is deleted
        needed = (limit + 1) * (model_files + 2 * trained) + weights
        held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())  # what is replaced
        free = shutil.disk_usage(folder).free + held
        if free < needed:
            raise InputError(
                f"{folder} has {gigabytes(free)} left on its disk and its checkpoints need {gigabytes(needed)}: "
                "make room, or name another folder"
            )
        last = next(reversed(checkpoints(folder)), None)
        if last is not None:
            if (last / "optimizer.bin").exists() != is_sharded():  # only FSDP writes this file
                how = "without" if is_sharded() else "with"
                raise InputError(f"{folder} was begun {how} FSDP: launch it so to resume it, or name another folder")
            _load(model, last)
            if console is not None:
                print_line(console, f"resumed at step {step_of(last.name)}")
        network = copy.deepcopy(model) if is_sharded() else model  # FSDP does not reassemble a sharded model
        ignored = max(1, getattr(model.config, "prefix_length", 0))  # a prefix LM does not predict its prefix
        tokenizer, known, wanted = blocks.masked_by, vocabulary(model), config.blocks_wanted(state.num_processes)
        mask = None if tokenizer is None else partial(masked, tokenizer=tokenizer, vocab_size=known, seed=config.seed)
        dataset = _TrainingBlocks(blocks.train, wanted, config.seed, ignored, mask)
        trainer = _Trainer(
            model=network,
            args=training_arguments(config, folder, limit, cpu),
            train_dataset=dataset,
            compute_loss_func=None if mask is None else masked_loss,  # None: the model's own
        )
        trainer.config = config
        trainer.remove_callback(PrinterCallback)  # it would print on stdout
        trainer.add_callback(Recorder(network, probe))
        if console is not None and console.is_terminal and not console.quiet:
            trainer.add_callback(TrainingBar())
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        if network is not model:  # each process has a shard; load the whole model
            state.wait_for_everyone()
            _load(model, checkpoints(folder)[-1])  # the Trainer's last step writes one
        return history(trainer.state.log_history)


def check_trainable(model: PreTrainedModel, only_new: bool) -> None:
    """Raise InputError if nothing is to be trained, or if the model cannot be trained."""
    check_not_packed(model, "training")
    check_no_adapter(model, "training")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("its weights are offloaded and cannot be trained: load the whole model into memory")
    if only_new and not new_parameters(model):
        method = model.config.retrofit["method"] if is_retrofitted(model.config) else "none"
        raise InputError(f"--only-new leaves nothing to train: {method} adds no parameters to this model")


@contextmanager
def _trainable(model: PreTrainedModel, only_new: bool) -> Iterator[None]:
    """Unfreeze a loaded model, and restore its state at the end, also after an error."""
    was_cached = getattr(model.config, "use_cache", None)
    model.requires_grad_(not only_new)
    for parameter in new_parameters(model).values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        # accelerate's bf16 stays on the model, and its own function to remove it also removes a retrofit's `forward`
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)
        if was_cached is not None:
            model.config.use_cache = was_cached
        model.zero_grad(set_to_none=True)
        model.eval().requires_grad_(False)


def _load(model: PreTrainedModel, checkpoint: Path) -> None:
    # `from_pretrained`, because weights of mixtures of experts are saved under other names than in memory, and the
    # Trainer would take them for missing weights
    saved: Any = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


@contextmanager
def hide_bars() -> Iterator[None]:
    """Switch off transformers' progress bars for loading and saving weights, which would break up ours."""
    had = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had:
            transformers_logging.enable_progress_bar()


class _Trainer(Trainer):
    model: Any
    config: TrainingConfig

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            groups = parameter_groups(self.model, self.config)
            if self.config.optimizer == "muon":
                if not hasattr(torch.optim, "Muon") or is_sharded():
                    raise InputError("--optimizer muon needs torch 2.9, and a model that is not sharded")
                self.optimizer = MuonAndAdamW(groups, matrices_of(self.model), **options)
            else:
                self.optimizer = kind(groups, **options)
        return self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `train` has loaded the weights."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for some matrices, AdamW for the other parameters.

    Both have the learning rate of their group: Muon's updates are scaled to the root mean square of AdamW's.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], matrices: Collection[nn.Parameter], **options: Any) -> None:
        chosen = set(matrices)
        by_adam: list[dict[str, Any]] = []
        by_muon: list[dict[str, Any]] = []
        for group in groups:
            for part, is_in in ((by_adam, False), (by_muon, True)):
                parameters = [p for p in group["params"] if (p in chosen) == is_in]
                part += [group | {"params": parameters}] if parameters else []
        muon = torch.optim.Muon(by_muon, lr=options["lr"], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self.parts: tuple[torch.optim.Optimizer, ...] = (torch.optim.AdamW(by_adam, **options), muon)
        super().__init__([group for part in self.parts for group in part.param_groups], options)
        self._share_groups()

    def _share_groups(self) -> None:
        """Make the groups of both parts those of this optimizer, so that the schedule sets the rates of all."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def matrices_of(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the model's own matrices that map activations: no embeddings, no head of the vocabulary."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(p) for p in new_parameters(model).values()}
    left_out |= {id(table.weight) for table in (*tables, model.get_output_embeddings()) if table is not None}
    return [p for p in model.parameters() if p.dim() == 2 and p.requires_grad and id(p) not in left_out]


def training_arguments(config: TrainingConfig, folder: Path, limit: int, cpu: bool) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        max_grad_norm=config.clip,
        warmup_steps=math.ceil(config.warmup * config.steps),
        lr_scheduler_type=SCHEDULES[config.schedule],
        bf16=config.bf16,
        use_cpu=cpu or not torch.cuda.is_available(),
        seed=config.seed,
        train_sampling_strategy="sequential",  # _TrainingBlocks has the order
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=limit,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # it would hide a loss that is not finite
        report_to="none",
        disable_tqdm=True,  # we show our own bar
        ddp_timeout=int(TIMEOUT.total_seconds()),
    )
    if arguments.n_gpu > 1:  # in one process the Trainer would copy the model to each; `accelerate launch` uses them
        arguments._n_gpu = 1
    return arguments


def parameter_groups(model: PreTrainedModel, config: TrainingConfig) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: the model's own with and without weight decay, and new parameters."""
    # Norms, biases and new parameters are decayed only with `--decay all`, because decay would pull new parameters back
    # to 0, where most of them started.
    new = set(new_parameters(model))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    decays_all, decay = config.decay == "all", config.weight_decay
    decayed = set(trained) if decays_all else matrices
    of_new = {"lr": config.new_learning_rate, "weight_decay": decay if decays_all else 0.0}
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed - new], "weight_decay": decay},
        {"params": [p for name, p in trained.items() if name not in decayed | new], "weight_decay": 0.0},
        {"params": [p for name, p in trained.items() if name in new], **of_new},
    ]
    return [group for group in groups if group["params"]]


def masked_loss(output: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the masked tokens of a batch ÷ the number of masked tokens of the whole step.

    An encoder's own loss is a mean over one batch, which the Trainer takes for a share of the step: it would add up the
    means of several batches or processes.
    """
    losses = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses / num_items_in_batch.clamp(min=1)


class _TrainingBlocks(Dataset):
    """All blocks in the order in which they are read, from the first step to the last: each step reads the same blocks,
    with the same masks, for any number of processes, and no batch is smaller at the end of an epoch.
    """

    def __init__(self, blocks: np.ndarray, wanted: int, seed: int, ignored: int, mask: Any = None) -> None:
        self.blocks = blocks
        self.mask = mask  # for an encoder: `masked` with its tokenizer
        self.ignored = ignored  # tokens at the beginning that are not predicted, at least the first
        self.order = shuffled(len(blocks), wanted, seed)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[self.order[index]].astype(np.int64)
        if self.mask is not None:
            ((hidden, targets),) = self.mask([block], reading=index)
            return {"input_ids": torch.from_numpy(hidden), "labels": torch.from_numpy(targets)}
        ids = torch.from_numpy(block)
        labels = ids.clone()
        labels[: self.ignored] = IGNORED  # the Trainer divides by the number of labels
        return {"input_ids": ids, "labels": labels}


def shuffled(count: int, wanted: int, seed: int) -> np.ndarray:
    """Return `wanted` indices below `count`: epoch after epoch, each a different permutation."""
    generator = torch.Generator()
    seeds = range(seed, seed - (-wanted // count))  # one for each epoch
    epochs = [torch.randperm(count, generator=generator.manual_seed(epoch)) for epoch in seeds]
    return torch.cat(epochs)[:wanted].numpy()
