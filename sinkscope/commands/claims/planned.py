"""Which claims the arms of trainings will be read by, before any of them is trained.

`claims` searches for the studies of a claim among finished trainings; here it searches among trainings that have no
results yet. An arm is therefore named only for claims that find all other arms and levels, too.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.studies import PLAIN, ClaimStudy, StudySources, Training, split_arms, variants
from sinkscope.results.run import RunData
from sinkscope.results.trainings import UNTOUCHED


def training_to_come(
    command: str, model: str, options: Mapping[str, Any], architecture: Mapping[str, Any],
    methods: Mapping[str, tuple[str, Mapping[str, Any]]], parameters: int,
) -> Training:  # fmt: skip
    """Return a training without results.

    Args:
        command: `train` or `retrofit`.
        model: the name of its model, or of its configuration.
        options: the options of the command, as in run.json.
        architecture: the model's configuration; only that of `train` tells trainings apart.
        methods: label of an arm → its method and the parameters that were set.
        parameters: the number of the model's parameters.
    """
    records = {
        f"{label}-seed{seed}": {"label": label, "method": method, "parameters": set_to, "seed": seed}
        for label, (method, set_to) in methods.items()
        for seed in range(options["seed"], options["seed"] + options["seeds"])
    }
    facts = {"model": {"name": model, "parameters": parameters}, "command": command, "condition": ""}
    run = RunData(facts, {})
    rows = [(record["label"], record["seed"], -1, 0, "sink_rate", math.nan) for record in records.values()]
    table = pd.DataFrame(rows, columns=["condition", "seed", "layer", "step", "metric", "value"])
    blocks = (options["tokens"] or 0) // (options["block_length"] or 1)
    manifest = {"command": command, "config": dict(options), "arms": records, "text_blocks": blocks}
    names = (*records, UNTOUCHED) if command == "retrofit" else records
    shape = {"architecture": architecture} if command == "train" else {}
    return Training(manifest | shape, dict.fromkeys(names, run), {"retrofit": table, "training": table})


def claims_of_arms(trainings: Iterable[Training]) -> dict[str, list[str]]:
    """Return label of an arm → ids of the claims that read it; plain arms have only those that read no other method."""
    trainings = tuple(trainings)
    read: dict[str, set[str]] = {arm.label: set() for training in trainings for arm in training.arms}
    for name, run in {training.model: next(iter(training.runs.values())) for training in trainings}.items():
        kinds = max((len(kinds) for kinds in variants(trainings).values()), default=1)
        for sources in (StudySources(name, trainings, variant=variant) for variant in range(kinds)):
            for claim in CLAIMS.values():
                if not all(need.is_study for need in claim.needs):
                    continue
                studies = [need.record.find(sources, need.of) for need in claim.needs]  # type: ignore[misc]
                if None in studies or any(scope(run) for scope in claim.scope):
                    continue
                for need, study in zip(claim.needs, studies, strict=True):
                    for label in _labels(trainings, need.of, study):  # type: ignore[arg-type]
                        read[label].add(claim.id)
    return {label: [id for id in CLAIMS if id in ids] for label, ids in read.items()}


def _labels(trainings: Iterable[Training], of: str, study: ClaimStudy) -> set[str]:
    """Return the labels of a study's arms; of several methods without the plain one."""
    if not study.by_seed:  # levels of a factor, or steps: all are of one arm, which is plain if it is not named
        wanted = [*split_arms(of)[1:], PLAIN][0]
        return {arm.label for training in trainings for arm in training.arms if arm.is_wanted(wanted, {})}
    arms = [arm for by_method in study.by_seed for arm in by_method.values() if arm.method != UNTOUCHED]
    return {arm.label for arm in arms if arm.method != PLAIN} or {arm.label for arm in arms}
