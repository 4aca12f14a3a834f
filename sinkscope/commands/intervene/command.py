"""The command `intervene`: measures a model before and after interventions, and under random controls."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from sinkscope.commands.intervene.experiment import Experiment
from sinkscope.commands.intervene.options import InterveneOptions
from sinkscope.commands.measured import opened, shown
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.interventions import INTERVENTIONS, Intervention, parse_all
from sinkscope.measuring.console import print_notices
from sinkscope.measuring.measure import Facts, run_manifest
from sinkscope.measuring.subject import ModelLike, check_config, options_of
from sinkscope.options.keywords import InterveneKeywords
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.run import Run, finished
from sinkscope.results.run import BEFORE

Do = str | Intervention | Iterable[str | Intervention]


def command(options: InterveneOptions, output: OutputOptions) -> Printout:
    run = intervene(options.model, config=options, **output.where)
    failure, failed = "", run.manifest["failed"]
    if failed:
        reasons = "; ".join(f"{label}: {one_line(reason)}" for label, reason in failed.items())
        count = len(failed) + len(run.manifest["arms"])
        failure = f"{len(failed)} of {count} arms failed, and the others are kept: {reasons}"
    return shown(run, output, failure)


def check(options: InterveneOptions) -> None:
    """Raise InputError for wrong options of a recipe, before a model is loaded."""
    wanted_arms(options.stacks)
    check_config(options)


@with_options(InterveneOptions)
def intervene(
    model: ModelLike = None,
    do: Do | None = None,
    *,
    arms: Mapping[str, Do] | Literal["all"] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: InterveneOptions | None = None,
    figures: Iterable[str] | None = None,
    page: bool = True,
    **options: Unpack[InterveneKeywords],
) -> Run:
    """Measure a model before and after interventions, and under random controls of the same kind.

    Afterwards the model is restored bit for bit, also after an error. If an arm fails, the others are still measured,
    and the manifest's `failed` has the reason. An interrupt after the first arm writes the finished arms, if there is a
    folder.

    Args:
        model: as for `analyze`.
        do: one intervention or several, applied in their order: "zero-massive:layers=11,coordinates=507".
        arms: several experiments by name, each with its own controls (`arm` lists them without names); "all": every
            intervention that applies. The manifest's `skipped` has the reasons why others do not apply.
        tokenizer, out, overwrite, quiet, config, figures, page: as for `analyze`.
        **options: those of the command line, which are listed below.

    Returns:
        A Run with the tables `effect`, `attention`, `attention_by_sequence`, `loss_by_sequence`, `massive`, `arm_maps`
        and those of further `observables`, whose `condition` is the arm, and `streaming` if requested.

    Raises:
        InputError: an option is wrong, or an intervention does not apply or would change nothing; nothing was written.
        SinkscopeError: the run or every arm of it failed.
    """
    start = time.time()
    if config is None:
        named: dict[str, Any] = {"do": _texts(do or ()), "arms": {}}
        if arms == "all":
            named["do"] = (*named["do"], "all")
        elif isinstance(arms, Mapping):
            named["arms"] = {label: _texts(stack) for label, stack in arms.items()}
        config = options_of(InterveneOptions, model, named | options)
    wanted = wanted_arms(config.stacks)
    with opened(model, tokenizer, config, out, overwrite, quiet) as (subject, folder, console):
        experiment = Experiment(subject, config, wanted, config.draws, config.stacks == "all", console)
        tables = experiment.run()
        if experiment.interrupt is not None and folder is None:
            raise experiment.interrupt
        facts = Facts(experiment.batch_size, parity=experiment.parity_error, notices=tuple(experiment.notices))
        manifest = run_manifest(subject, config, facts, list(tables), start, "intervene")
        manifest |= {"arms": experiment.records, "skipped": experiment.skipped, "failed": experiment.failed}
        print_notices(console, (f"{label} failed: {reason}" for label, reason in experiment.failed.items()))
        run = finished(Run(manifest, tables, folder), console, figures, page)
        if experiment.interrupt is not None:
            finished_arms = f"{len(run.manifest['arms'])} of {len(wanted)} arms are kept in {run.folder}"
            raise SinkscopeError(f"interrupted: {finished_arms}") from experiment.interrupt
        return run


def _texts(do: Do) -> list[str]:
    return [str(part) for part in parse_all(do)]


def wanted_arms(stacks: Mapping[str, Do] | Literal["all"]) -> dict[str, tuple[Intervention, ...]]:
    """Map each label to its interventions, in their order. Raises InputError if an arm cannot be measured."""
    if stacks == "all":
        return {name: (kind(),) for name, kind in INTERVENTIONS.items() if not kind.is_control}
    wanted = {label: parse_all(stack) for label, stack in stacks.items()}
    for label, stack in wanted.items():
        if not stack:
            raise InputError(f"arm '{label}' does nothing: name an intervention")
        if label == BEFORE:
            raise InputError(f"an arm cannot be called '{BEFORE}', which is the unchanged model")
        alone = next((part.name for part in stack if part.measured_by != "pass"), None)
        if alone and len(stack) > 1:
            raise InputError(f"{alone} needs an arm of its own: it is measured by perplexity only")
    return wanted
