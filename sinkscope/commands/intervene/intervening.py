"""Interventions on a loaded model within a block, for any use of the model.

with intervening(model, "zero-massive", tokenizer=tokenizer):
    model.generate(…)
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Unpack

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from sinkscope.attention.seam import open_seam
from sinkscope.commands.intervene.experiment import Experiment
from sinkscope.errors import InputError
from sinkscope.interventions import Intervention, Known, Target, applied, parse_all
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.subject import open_subject, position_limit, row_or_calibrated, unread_notice
from sinkscope.models.in_memory import called_uncompiled, on_cpu_by_default, unwrapped
from sinkscope.models.loading import LoadedModel
from sinkscope.options.keywords import InputKeywords
from sinkscope.options.measuring import InputOptions, make_config
from sinkscope.options.signatures import spelled_for_python, with_options
from sinkscope.results.run import BEFORE


@with_options(InputOptions)
@contextmanager
def intervening(
    model: nn.Module | LoadedModel,
    *do: str | Intervention | Iterable[str | Intervention],
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Unpack[InputKeywords],
) -> Iterator[None]:
    """Change a loaded model until the end of the block, for calls, `generate` and gradients.

    Interventions are applied in the given order. Parameters that they leave open, such as the layers and coordinates
    of zero-massive, are found by measuring the model on the input, as `intervene` does. Afterwards the model is
    restored bit for bit. A compiled model runs uncompiled in the block.

    Args:
        model: A transformers model or what `load` returned, also wrapped by torch.compile, PEFT, nnsight,
            DistributedDataParallel, or DataParallel on one device.
        *do: Interventions as objects or in the syntax of the command line, single or in lists.
        tokenizer: That of the model, to read a text; only for parameters that are left open.
        **options: The input on which these are found, as below.

    Raises:
        InputError: An intervention does not apply, names something that the model does not have, or would change
            nothing.
        SinkscopeError: The model's attention differs from sinkscope's computation; or, at the end of the block,
            no forward pass contained the position to change.
    """
    network = unwrapped(model.model if isinstance(model, LoadedModel) else model, changed=True)
    parts = tuple(part.from_the_start(()) for each in do for part in parse_all(each))
    family, notices = row_or_calibrated(network)
    check_beforehand(network, family, is_calibrated=bool(notices))
    for notice in unread_notice(family):
        warnings.warn(f"{notice}; interventions on attention leave it as it is there", stacklevel=3)
    known = Known(Target(network, family, seams={}), position_limit(network, family) or 1)
    try:
        parts = tuple(part if part.inapplicable(known.target) else part.resolved(known) for part in parts)
    except InputError as left_open:
        # what it misses is decided by measuring the unchanged model
        console, label = Console(quiet=True), "do"
        with spelled_for_python(InputOptions):
            config = make_config(observables=("attention", "massive"), **options)
        try:
            with spelled_for_python(InputOptions), open_subject(model, tokenizer, config, console) as subject:
                experiment = Experiment(subject, config, {label: parts}, 0, False, console, without_loss=(BEFORE,))
                parts = experiment.resolved()[label]
        except InputError as error:
            if str(error) == str(left_open):
                raise
            raise InputError(f"{left_open}\nIt could not be found by measuring: {error}") from error
    with ExitStack() as stack:
        with on_cpu_by_default():
            stack.enter_context(called_uncompiled(network))
            target = Target(network, family, stack.enter_context(open_seam(network, family)))
            stack.enter_context(applied(target, parts))
        yield
