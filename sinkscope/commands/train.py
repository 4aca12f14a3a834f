"""`train`: a small model from random weights, plainly and with each method, as GS and VGA compare pretrainings.

training_arms.py says what OUT/ holds. `sinkscope analyze OUT/ARM/checkpoints` reads an arm's model at every so many
steps. With several seeds an arm is none-seed0, none-seed1, …; all methods start from the same weights of each seed,
and read the same text.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from sinkscope.commands.retrofit import make_plan, split_options
from sinkscope.commands.training_arms import TrainingArms
from sinkscope.errors import InputError
from sinkscope.measuring.console import status, tell
from sinkscope.measuring.subject import family_of
from sinkscope.models.loading import LoadedModel, load_tokenizer
from sinkscope.options.training import PRETRAINING
from sinkscope.report.trained import Trained
from sinkscope.text.inputs import documents
from sinkscope.training.architectures import ARCHITECTURES, architecture, fresh_model
from sinkscope.training.arms import Methods, one_each, parse_methods, with_seeds
from sinkscope.training.blocks import check_text, is_written, read_blocks
from sinkscope.training.sharding import launched
from sinkscope.training.tasks import TASKS, Task
from sinkscope.training.tokenizer import tokenizer_of

METHODS = ("none", "vscale")  # GS's figure 5
NOT_OPTIONS = ("model", "revision", "gguf_file", "trust_remote_code", "allow_pickle", "only_new")


def train(
    config: str | os.PathLike[str] = "tiny-llama",
    methods: Methods = METHODS,
    *,
    out: str | os.PathLike[str],
    text: str | os.PathLike[str] = "natural",
    dataset: str | None = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    seeds: int = 1,
    overwrite: bool = False,
    quiet: bool = True,
    **options: Any,
) -> Trained:
    """Train a model from random weights with each method, and measure all of them on held-out text.

    Args:
        config: a name of ARCHITECTURES, or a config.json.
        methods: as for `retrofit`.
        out: the folder to write.
        text: "natural", a file, or a task: a name of TASKS.
        dataset: a HuggingFace dataset in place of `text`.
        tokenizer: a hub id, a folder, or one already loaded; None: made from the text, with as many tokens as the
            configuration has.
        seeds: how often everything is repeated, from `seed` on.
        overwrite: begin anew, and replace what is in `out`.
        quiet: say nothing meanwhile.
        **options: of TrainingConfig, with the defaults of PRETRAINING, and those of `analyze` for measuring. New
            parameters learn as fast as all others unless `new_learning_rate` is given.

    Raises:
        InputError: as `retrofit` does, and for a configuration or tokenizer that does not exist.
        SinkscopeError: as `retrofit` does.
    """
    wanted = parse_methods(methods)
    _check_options(options, seeds)
    training, measuring = split_options("train", None, with_defaults(options))
    launched(cpu=measuring.device_map == "cpu")
    text = os.fspath(text)
    check_source(text)
    task = _task(text, dataset, tokenizer)
    shape = architecture(config)
    named = getattr(tokenizer, "name_or_path", tokenizer and os.fspath(tokenizer))
    own = {"architecture": shape.to_diff_dict(), "tokenizer": named, "seeds": seeds}
    plan = make_plan("train", out, measuring, training, overwrite, quiet, text=text, dataset=dataset, **own)
    plan.check_folder()
    with status(plan.console, "making the tokenizer"):
        tokens = task.tokenizer if task else _tokenizer(tokenizer, text, dataset, shape.vocab_size)
    _fit(shape, tokens)
    name = config if config in ARCHITECTURES else Path(config).expanduser().resolve().stem
    loaded = LoadedModel(fresh_model(shape, training.seed), tokens, str(name), str(config), None, None, ())
    family, notices = family_of(loaded.model)
    tell(plan.console, notices)
    plan.check_methods(wanted, loaded.model, family)
    length, count = training.block_length, training.blocks_wanted(PartialState().num_processes)
    with status(plan.console, "reading the text"):
        if task:
            blocks = task.blocks(length, count, measuring.num_seqs, training.seed)
        else:
            blocks = read_blocks(loaded, text, dataset, length, count, training.eval_share)
    arms = TrainingArms(plan, loaded, family, blocks, lambda arm: fresh_model(shape, arm.seed), True, task)
    drawn = range(training.seed, training.seed + seeds)
    return arms.finish(with_seeds(wanted, drawn) if seeds > 1 else one_each(wanted, training.seed), untouched=False)


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the defaults of training from scratch where they are not given."""
    rate = options.get("learning_rate", PRETRAINING["learning_rate"])
    return PRETRAINING | {"new_learning_rate": rate} | dict(options)


def check_source(text: str) -> None:
    """Raise InputError for a text that `train` cannot read, before anything is made."""
    if text == "sampled":
        raise InputError("--text sampled: a model with random weights has nothing to say; name a text file")
    if text not in TASKS:
        check_text(text)


def _check_options(options: dict[str, Any], seeds: int) -> None:
    for name in NOT_OPTIONS:
        if name in options:
            raise InputError(f"--{name.replace('_', '-')} does not go with `train`, which begins with random weights")
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: it must be at least 1")


def _task(text: str, dataset: str | None, tokenizer: object) -> Task | None:
    """The task that `text` names, if it names one, which then has its own of everything else."""
    if text not in TASKS:
        return None
    for name, given in (("dataset", dataset), ("tokenizer", tokenizer)):
        if given is not None:
            raise InputError(f"--text {text} has its own {name}: leave --{name} out")
    return TASKS[text]()


def _tokenizer(
    wanted: str | os.PathLike[str] | PreTrainedTokenizerBase | None, text: str, dataset: str | None, vocab_size: int
) -> PreTrainedTokenizerBase | None:
    """As named, or made from the text; None where the text is token ids."""
    if isinstance(wanted, PreTrainedTokenizerBase):
        return wanted
    if wanted is not None:
        return load_tokenizer(os.fspath(wanted))
    return tokenizer_of(documents(text, dataset)[1], vocab_size) if is_written(text, dataset) else None


def _fit(shape: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """The vocabulary and its special tokens are the tokenizer's."""
    if tokenizer is None:
        return
    shape.vocab_size = len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(shape, name, getattr(tokenizer, name))
