"""The commands `retrofit` and `train`, which train a model with and without each method; arms.py describes the folder.

`sinkscope analyze OUT/ARM/checkpoints` measures an arm of `train` at its saved steps. With several seeds the arms are
none-seed0, none-seed1, …; all methods start from the same weights of each seed, and read the same text.
"""

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from sinkscope.commands.printout import Printout
from sinkscope.commands.train.architectures import architecture, fresh_model, predicts_next, tokenizer_of
from sinkscope.commands.train.arms import Methods, TrainingArms, parse_methods
from sinkscope.commands.train.blocks import check_options, is_written
from sinkscope.commands.train.options import ArmOptions, RetrofitOptions, TrainOptions
from sinkscope.commands.train.output import Trained
from sinkscope.commands.train.tasks import TASKS
from sinkscope.commands.train.tasks.backcopy import Opening
from sinkscope.errors import InputError
from sinkscope.measuring.console import print_notices, spinner
from sinkscope.measuring.observables import check_names
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.subject import ModelLike, family_of, load_model, options_of
from sinkscope.models.in_memory import text_of, undisturbed
from sinkscope.models.loading import LoadedModel, load_tokenizer
from sinkscope.options.keywords import RetrofitKeywords, TrainKeywords
from sinkscope.options.option import checked
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.text.sources import documents


def command(options: ArmOptions, output: OutputOptions) -> Printout:
    if isinstance(options, RetrofitOptions):
        done = retrofit(options.model, config=options, record=output.record, **output.where)
    else:
        assert isinstance(options, TrainOptions)
        done = train(options=options, record=output.record, **output.where)
    return Printout(done, done.verdict, notes=done.notes, folder=output.out, failure=done.failure)


def check(options: ArmOptions) -> None:
    """Raise InputError for wrong options of a recipe, before a model is loaded or made."""
    parse_methods(options.method)
    check_names(options.observables)
    check_names(options.probe, "--probe")
    if not isinstance(options, TrainOptions):
        check_options(options, None)
        return
    if options.text == "sampled":
        raise InputError("--text sampled: a model with random weights cannot write a text; name a text file")
    check_options(options, options.text if options.text in TASKS else None)
    architecture(options.config)


@with_options(RetrofitOptions)
def retrofit(
    model: ModelLike = None,
    methods: Methods | None = None,
    *,
    out: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: RetrofitOptions | None = None,
    record: Mapping[str, Any] | None = None,
    page: bool = True,
    figures: bool | Iterable[str] = True,
    **options: Unpack[RetrofitKeywords],
) -> Trained:
    """Retrofit and train a model with each method, and measure the results and the unchanged model on held-out text.

    Every method starts from the unchanged model. Under `accelerate launch`, all processes train, and the first one
    measures. The same call resumes an interrupted one.

    Args:
        model: a hub id, a folder, a .gguf file, or a model already loaded; None for the demo model.
        methods: "vga,none", "vga:placement=output", a list of these, or label → method.
        out: the folder to write.
        tokenizer: the tokenizer of a model already loaded.
        overwrite: start again, and replace the content of `out`.
        quiet: print no progress.
        config: all options at once, in place of `options`.
        record: the content of a recipe, for run.json.
        page: also write index.html.
        figures: whether to draw figures of each arm and of all arms together; or the names of those of all arms.
        **options: those of the command line, which are listed below.

    Returns:
        The runs, their comparison, tables and figures.

    Raises:
        InputError: wrong options, a method that does not apply, a text that is too short, or a folder made with other
            options; nothing has been trained.
        SinkscopeError: a training failed. Finished arms and checkpoints stay in `out`.
    """
    typed = options if methods is None else options | {"method": methods}
    config = config or options_of(RetrofitOptions, model, typed)
    check(config)
    arms = TrainingArms("retrofit", config, out, overwrite, quiet, record, page, figures)
    with arms.locked_folder(config.model, config.adapter, config.text):
        with spinner(arms.console, "loading the model"):
            loaded = load_model(model, tokenizer, arms.measuring.model_copy(update={"device_map": "cpu"}))
        with undisturbed(loaded.model):
            family, notices = family_of(loaded.model)
            check_beforehand(loaded.model, family, is_calibrated=bool(notices))
            print_notices(arms.console, (*loaded.notices, *notices))
            return arms.finish(loaded, family, begin=lambda seed: copy.deepcopy(loaded.model))


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
    figures: bool | Iterable[str] = True,
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
        figures: whether to draw figures of each arm and of all arms together; or the names of those of all arms.
        **given: those of the command line, which are listed below.

    Raises:
        InputError: as for `retrofit`, or a configuration or tokenizer does not exist.
        SinkscopeError: as for `retrofit`.
    """
    if options is None:
        name = getattr(tokenizer, "name_or_path", tokenizer)
        typed = {"config": config and text_of(config), "method": methods, "tokenizer": name and os.fspath(name)}
        options = checked(TrainOptions, given | {field: value for field, value in typed.items() if value is not None})
    check(options)
    wanted, task = tokenizer or options.tokenizer, None
    if options.text in TASKS:
        for field, value in (("dataset", options.dataset), ("tokenizer", wanted)):
            if value is not None:
                raise InputError(f"--text {options.text} has its own {field}: leave --{field} out")
        opening = Opening(options.bos != "never", options.random_tokens, options.fixed_position)
        task = TASKS[options.text](opening)
    shape = architecture(options.config)
    facts = {"architecture": shape.to_diff_dict()}
    arms = TrainingArms("train", options, out, overwrite, quiet, record, page, figures, **facts)
    with arms.locked_folder(options.config, options.text, options.tokenizer):
        with spinner(arms.console, "making the tokenizer"):
            tokens: PreTrainedTokenizerBase | None = None
            if task is not None:
                tokens = task.tokenizer
            elif isinstance(wanted, PreTrainedTokenizerBase):
                tokens = wanted
            elif wanted is not None:
                tokens = load_tokenizer(os.fspath(wanted))
            elif is_written(options.text, options.dataset):  # else a text of token ids
                texts = documents(options.text, options.dataset)[1]
                tokens = tokenizer_of(texts, shape.vocab_size, predicts_next(shape))
        if tokens is not None:  # the vocabulary and its special tokens are the tokenizer's
            shape.vocab_size = len(tokens)
            for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(shape, field, getattr(tokens, field))
        fresh = fresh_model(shape, options.seed)
        loaded = LoadedModel(fresh, tokens, options.shape_name, options.config, None, None, ())
        family, notices = family_of(loaded.model)
        print_notices(arms.console, notices)
        return arms.finish(loaded, family, lambda seed: fresh_model(shape, seed), task)
