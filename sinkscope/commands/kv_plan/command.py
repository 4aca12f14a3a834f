"""The command `kv-plan`: which heads of the KV cache need all tokens, and what less memory costs."""

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Unpack

import torch
from transformers import PreTrainedTokenizerBase

from sinkscope.attention.seam import open_seam
from sinkscope.commands.kv_plan.options import KvPlanOptions
from sinkscope.commands.kv_plan.study import PlanStudy, check_plan_applies
from sinkscope.commands.kv_plan.texts import CopiedText, predicted_sinks, questions_of
from sinkscope.commands.measured import opened, shown
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import print_line
from sinkscope.measuring.measure import Facts, run_manifest
from sinkscope.measuring.parity import parity_check
from sinkscope.measuring.subject import ModelLike, check_config, options_of
from sinkscope.measuring.tables import publish
from sinkscope.options.keywords import KvPlanKeywords
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.run import Run, finished


def command(options: KvPlanOptions, output: OutputOptions) -> Printout:
    return shown(kv_plan(options.model, config=options, **output.where), output)


check = check_config  # checks the options of a recipe before a model is loaded


@with_options(KvPlanOptions)
def kv_plan(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: KvPlanOptions | None = None,
    figures: Iterable[str] | None = None,
    page: bool = True,
    **options: Unpack[KvPlanKeywords],
) -> Run:
    """Plan the KV cache of a model: which heads need all tokens, what the others and fewer bits cost.

    Args:
        model, tokenizer, out, overwrite, quiet, config, figures, page: as for `analyze`.
        **options: those of the command line, which are listed below.

    Returns:
        A Run with the tables `kv_plan` (every plan and control), `kv_heads` (the plan of every head), `kv_layers`,
        `kv_tasks` (what plans retrieve) and `kv_plan_by_sequence`.

    Raises:
        InputError: an option is wrong, the model has no such cache, or the input is too short; nothing was written.
        SinkscopeError: the run failed.
    """
    start = time.time()
    config = config or options_of(KvPlanOptions, model, options)
    enough = config.model_copy(update={"num_seqs": config.num_seqs + config.calibration})
    with opened(model, tokenizer, enough, out, overwrite, quiet) as (whole, folder, console), torch.no_grad():
        check_plan_applies(whole)
        measured = len(whole.inputs) - config.calibration
        if measured < 1:
            needed = f"a plan needs {config.calibration} for --calibration, and others that are measured"
            raise InputError(f"the input holds {counted(len(whole.inputs), 'sequence')}: {needed}")
        subject = replace(whole, inputs=whole.inputs.part(0, measured))
        parity = parity_check(whole, config)
        print_line(console, "looking for sinks")
        texts = [CopiedText.of(ids) for ids in whole.inputs.sequences]
        texts[len(subject.inputs) : len(subject.inputs)] = questions_of(subject.inputs.sequences, config.seed)
        rule, texts = predicted_sinks(whole, texts, config.calibration, parity)
        with open_seam(whole.loaded.model, whole.family) as seams:
            study = PlanStudy(whole, seams, texts, config.calibration, console, config.seed)
            tables = publish(study.tables(config.budget), whole.loaded, whole.inputs.condition)
        manifest = run_manifest(subject, config, Facts(1, parity=parity.error), list(tables), start)
        record = {
            "budgets": list(config.budget),
            "calibration": config.calibration,
            "documents": subject.inputs.documents,
            "copied": texts[0].copied,
            "sink_layer": rule.layer,
            "sink_coordinates": list(rule.coordinates),
            "sink_at_least": None if rule.layer < 0 else rule.at_least,
            "sinks": [len(text.sinks) for text in study.measured],
        }
        manifest |= {"command": "kv-plan", "kv_plan": record}
        return finished(Run(manifest, tables, folder), console, figures, page)
