"""The command `retrofit`: trains a model with and without each method, and measures the results on held-out text.

training_arms.py describes the folder.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from sinkscope.commands.printout import Printout
from sinkscope.commands.train.arms import Methods, parse_methods
from sinkscope.commands.train.arms_command import TrainingArms, shown
from sinkscope.commands.train.blocks import check_options
from sinkscope.commands.train.options import RetrofitOptions
from sinkscope.commands.train.output import Trained
from sinkscope.measuring.console import print_notices, spinner
from sinkscope.measuring.observables import check_names
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.subject import ModelLike, family_of, load_model, options_of
from sinkscope.models.in_memory import undisturbed
from sinkscope.options.keywords import RetrofitKeywords
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options


def command(options: RetrofitOptions, output: OutputOptions) -> Printout:
    return shown(retrofit(options.model, config=options, record=output.record, **output.where), output)


def check(options: RetrofitOptions) -> None:
    """Raise InputError for wrong options of a recipe, before a model is loaded."""
    parse_methods(options.method)
    check_names(options.observables)
    check_names(options.probe, "--probe")
    check_options(options, None)


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
    figures: bool = True,
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
        figures: also draw figures of each arm and of all arms together.
        **options: those of the command line, which are listed below.

    Returns:
        The runs, their comparison, tables and figures.

    Raises:
        InputError: wrong options, a method that does not apply, a text that is too short, or a folder made with other
            options; nothing has been trained.
        SinkscopeError: a training failed. Finished arms and checkpoints stay in `out`.
    """
    given = options if methods is None else options | {"method": methods}
    config = config or options_of(RetrofitOptions, model, given)
    check(config)
    arms = TrainingArms("retrofit", config, out, overwrite, quiet, record, page, figures)
    with arms.own_folder(config.model, config.adapter, config.text):
        with spinner(arms.console, "loading the model"):
            loaded = load_model(model, tokenizer, arms.measuring.model_copy(update={"device_map": "cpu"}))
        with undisturbed(loaded.model):
            family, notices = family_of(loaded.model)
            check_beforehand(loaded.model, family, is_calibrated=bool(notices))
            print_notices(arms.console, (*loaded.notices, *notices))
            return arms.finish(loaded, family, begin=lambda arm: copy.deepcopy(loaded.model))
