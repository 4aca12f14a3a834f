"""`intervene`: a model before and after interventions, and under random controls of the same kind."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS, Intervention, parse_all
from sinkscope.measuring.experiment import BEFORE, MEASURED, Experiment
from sinkscope.measuring.manifest import Facts, make_manifest
from sinkscope.measuring.subject import ModelLike, config_of, subject_of
from sinkscope.options.measuring import DRAWS, RunConfig
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output

Do = str | Intervention | Iterable[str | Intervention]


def intervene(
    model: ModelLike = None,
    do: Do | None = None,
    *,
    arms: Mapping[str, Do] | Literal["all"] | None = None,
    draws: int = DRAWS,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: RunConfig | None = None,
    figures: Iterable[str] | None = None,
    **options: Any,
) -> Run:
    """Measure a model before and after interventions, and under random controls of the same kind.

    The model is afterwards bit for bit as it was, also after an error.

    Args:
        do: one intervention or several, applied in their order: "zero-massive:layers=11,coordinates=507".
        arms: several such experiments by name; "all": every intervention that applies, the rest with the reason.
        draws: random controls of each arm.
        figures: names of the figures to draw; None: all that apply.
        **options: these and the other arguments as for `analyze`.

    Returns:
        A Run with the tables `effect`, `attention`, `massive` and `arm_maps` of every arm (their `condition`), and
        `streaming` where that was asked for.

    Raises:
        InputError: something does not exist, does not apply, or would change nothing; nothing was written.
        SinkscopeError: the run failed.
    """
    start = time.time()
    wanted = wanted_arms(do, arms)
    if draws < 0:
        raise InputError(f"--draws {draws}: it must be 0 or more")
    if options.get("observables") or (config and config.observables):
        raise InputError(f"`intervene` always measures {' and '.join(MEASURED)}: leave `observables` out")
    config = config or config_of(model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    subject = subject_of(model, tokenizer, config, console)

    experiment = Experiment(subject, config, wanted, draws, arms == "all", console)
    tables = experiment.run()
    manifest = make_manifest(subject, config, Facts(experiment.batch_size), list(tables), start)
    manifest |= {
        "command": "intervene", "draws": draws, "arms": experiment.records, "skipped": experiment.skipped,
    }  # fmt: skip
    return finished(Run(manifest, tables, folder), console, figures)


def wanted_arms(do: Do | None, arms: Mapping[str, Do] | Literal["all"] | None) -> dict[str, tuple[Intervention, ...]]:
    """Label → its interventions, in the order in which they are applied.

    Raises:
        InputError: nothing or both were named, or an arm cannot be measured.
    """
    if (do is None) == (arms is None):
        raise InputError("name what to do: `sinkscope list interventions` shows what there is")
    if arms == "all":
        return {name: (kind(),) for name, kind in INTERVENTIONS.items() if not kind.is_control}
    if arms is None:
        stack = parse_all(do)  # type: ignore[arg-type]
        arms = {"+".join(part.name for part in stack): stack}
    wanted = {label: parse_all(stack) for label, stack in arms.items()}
    for label, stack in wanted.items():
        if not stack:
            raise InputError(f"arm '{label}' does nothing: name an intervention")
        if label == BEFORE:
            raise InputError(f"an arm cannot be called '{BEFORE}', which is the model as it is")
        alone = next((part.name for part in stack if part.measured_by != "pass"), None)
        if alone and len(stack) > 1:
            raise InputError(f"{alone} stands alone: it is measured by perplexity only")
    return wanted
