"""The command `train`: trains a small model from random weights, plainly and with each method, as GS and VGA do.

training_arms.py describes the folder. `sinkscope analyze OUT/ARM/checkpoints` measures an arm's model at its saved
steps. With several seeds the arms are none-seed0, none-seed1, …; all methods start from the same weights of each seed,
and read the same text.
"""

import os
from collections.abc import Mapping
from typing import Any, Unpack

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from sinkscope.commands.printout import Printout
from sinkscope.commands.train.architectures import architecture, fresh_model, predicts_next, tokenizer_of
from sinkscope.commands.train.arms import Methods, parse_methods
from sinkscope.commands.train.arms_command import TrainingArms, shown
from sinkscope.commands.train.blocks import check_options, is_written
from sinkscope.commands.train.options import TrainOptions
from sinkscope.commands.train.output import Trained
from sinkscope.commands.train.tasks import TASKS, Task
from sinkscope.commands.train.tasks.backcopy import Opening
from sinkscope.errors import InputError
from sinkscope.measuring.console import print_notices, spinner
from sinkscope.measuring.observables import check_names
from sinkscope.measuring.subject import family_of
from sinkscope.models.in_memory import text_of
from sinkscope.models.loading import LoadedModel, load_tokenizer
from sinkscope.options.keywords import TrainKeywords
from sinkscope.options.option import checked
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.text.sources import documents


def command(options: TrainOptions, output: OutputOptions) -> Printout:
    return shown(train(options=options, record=output.record, **output.where), output)


def check(options: TrainOptions) -> None:
    """Raise InputError for wrong options of a recipe, before a model is made."""
    parse_methods(options.method)
    check_names(options.observables)
    check_names(options.probe, "--probe")
    if options.text == "sampled":
        raise InputError("--text sampled: a model with random weights cannot write a text; name a text file")
    check_options(options, options.text if options.text in TASKS else None)
    architecture(options.config)


@with_options(TrainOptions)
def train(
    config: str | os.PathLike[str] | None = None,
    methods: Methods | None = None,
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    options: TrainOptions | None = None,
    record: Mapping[str, Any] | None = None,
    page: bool = True,
    figures: bool = True,
    **given: Unpack[TrainKeywords],
) -> Trained:
    """Train a model from random weights with each method, and measure all of them on held-out text.

    Args:
        config: a name in ARCHITECTURES, or a config.json.
        methods: as for `retrofit`.
        out: the folder to write.
        tokenizer: a hub id, a folder, or one already loaded; None: made from the text, with as many tokens as the
            configuration has.
        overwrite: start again, and replace the content of `out`.
        quiet: print no progress.
        options: all options at once, in place of `given`.
        record: the content of a recipe, for run.json.
        page: also write index.html.
        figures: also draw figures of each arm and of all arms together.
        **given: those of the command line, which are listed below.

    Raises:
        InputError: as for `retrofit`, or a configuration or tokenizer does not exist.
        SinkscopeError: as for `retrofit`.
    """
    if options is None:
        named = getattr(tokenizer, "name_or_path", tokenizer)
        typed = {"config": config and text_of(config), "method": methods, "tokenizer": named and os.fspath(named)}
        options = checked(TrainOptions, given | {name: value for name, value in typed.items() if value is not None})
    check(options)
    task = _task(options, tokenizer)
    shape = architecture(options.config)
    arms = TrainingArms(
        "train", options, out, overwrite, quiet, record, page, figures, architecture=shape.to_diff_dict()
    )
    with arms.own_folder(options.config, options.text, options.tokenizer):
        with spinner(arms.console, "making the tokenizer"):
            tokens = task.tokenizer if task else _tokenizer(tokenizer or options.tokenizer, options, shape)
        if tokens is not None:  # the vocabulary and its special tokens are the tokenizer's
            shape.vocab_size = len(tokens)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(shape, name, getattr(tokens, name))
        fresh = fresh_model(shape, options.seed)
        loaded = LoadedModel(fresh, tokens, options.shape_name, options.config, None, None, ())
        family, notices = family_of(loaded.model)
        print_notices(arms.console, notices)
        return arms.finish(loaded, family, lambda arm: fresh_model(shape, arm.seed), task)


def _task(options: TrainOptions, tokenizer: object) -> Task | None:
    """Return the task that `text` names; None for a text."""
    if options.text not in TASKS:
        return None
    for name, given in (("dataset", options.dataset), ("tokenizer", tokenizer or options.tokenizer)):
        if given is not None:
            raise InputError(f"--text {options.text} has its own {name}: leave --{name} out")
    return TASKS[options.text](Opening(options.bos != "never", options.random_tokens, options.fixed_position))


def _tokenizer(
    wanted: str | os.PathLike[str] | PreTrainedTokenizerBase | None, options: TrainOptions, shape: PreTrainedConfig
) -> PreTrainedTokenizerBase | None:
    """Return the named tokenizer, or one made from the text; None for a text of token ids."""
    if isinstance(wanted, PreTrainedTokenizerBase):
        return wanted
    if wanted is not None:
        return load_tokenizer(os.fspath(wanted))
    if not is_written(options.text, options.dataset):
        return None
    return tokenizer_of(documents(options.text, options.dataset)[1], shape.vocab_size, predicts_next(shape))
