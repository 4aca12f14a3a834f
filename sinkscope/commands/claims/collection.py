"""All data for judging claims, grouped by model: runs, arms of trainings, their steps, and related models.

A training is judged under the name of its model, which is the pretrained model for `retrofit` and the configuration
for `train`. Its seeds are judged together. If a method has several arms with different parameters, the first is judged
under that name, and the others under their own names, unless claims name the parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sinkscope.commands.claims.columns import COMMAND
from sinkscope.commands.claims.evidence import MAIN, Evidence, Skipped, models_of
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.studies import PLAIN, StudySources, Training, split_arms, variants
from sinkscope.commands.claims.table import NEEDS, evidence_of
from sinkscope.commands.steps.series import COMMAND as STEPS
from sinkscope.commands.steps.series import Series
from sinkscope.errors import InputError
from sinkscope.options.option import checked
from sinkscope.options.recipe import COMPARISON
from sinkscope.options.register import options_by_command, records
from sinkscope.output.run import Run
from sinkscope.results.manifest import MANIFEST, RUNS, read_manifest
from sinkscope.results.run import RunData
from sinkscope.results.scores import BENCHMARK, SCORE_COLUMNS, SCORE_TABLE
from sinkscope.results.tables import LEADING_COLUMNS, read_table

JUDGED_TRAININGS = ("retrofit", "train")
JUDGED = (*RUNS, *JUDGED_TRAININGS, STEPS, COMMAND, BENCHMARK)


@dataclass(frozen=True)
class Collection:
    """All data of all models."""

    runs: Sequence[RunData] = ()
    trainings: tuple[Training, ...] = ()
    series: tuple[Series, ...] = ()
    scores: tuple[RunData, ...] = ()

    def evidence(self, skipped: Skipped) -> dict[str, Evidence]:
        """Return the evidence by model."""
        runs = models_of(self.runs)
        # in commands, a model that was trained from random weights is named by its folder
        folders = {
            training.model: str(training.folder / next(iter(training.runs)) / "model")
            for training in reversed(self.trainings)
            if training.command == "train" and training.folder is not None
        }
        by_model: dict[str, Evidence] = {}
        for name in dict.fromkeys([*runs, *(training.model for training in self.trainings), *self._series_by_model]):
            evidence = evidence_of(runs.get(name, ()), name, skipped)
            by_model |= self.completed(replace(evidence, model=folders.get(name, name)), name)
        return by_model

    def completed(self, evidence: Evidence, name: str) -> dict[str, Evidence]:
        """Add a model's studies to its evidence. Return it with the evidence of further variants of the model's arms,
        which lacks the runs, because these do not depend on the variant.
        """
        trainings = [training for training in self.trainings if training.model == name]
        runs_by_model = {model: Evidence.of(runs, [MAIN]).runs for model, runs in models_of(self.runs).items()}
        runs_by_model[name] = runs_by_model.get(name, {}) | evidence.runs
        naturals = {model: runs[MAIN] for model, runs in runs_by_model.items() if MAIN in runs}
        series = self._series_by_model.get(name, [])
        described_by: list[Mapping[Any, RunData]] = [*(one.runs for one in trainings), *(one.runs for one in series)]
        example = next((run for runs in described_by for run in runs.values()), None)
        sources = StudySources(name, self.trainings, tuple(series), naturals, scores=self.scores)
        by_variant = {name: replace(evidence.with_studies(sources, NEEDS), example=example)}

        arms = [arm for claim in CLAIMS.values() for need in claim.needs for arm in split_arms(need.of)]
        with_parameters = {method for method, colon, _ in (arm.partition(":") for arm in arms) if colon}
        labels = {(arm.method, arm.variant): arm.label for training in trainings for arm in training.arms}
        free = {method: kinds for method, kinds in variants(trainings).items() if method not in with_parameters}
        for variant in range(1, max(map(len, free.values()), default=0)):
            called = [labels[method, kinds[variant]] for method, kinds in free.items() if variant < len(kinds)]
            studied = evidence.with_studies(replace(sources, variant=variant), NEEDS)
            by_variant[f"{name} ({', '.join(called)})"] = replace(studied, runs={}, example=example)
        return by_variant

    @cached_property
    def _series_by_model(self) -> dict[str, list[Series]]:
        """Map each model to the steps of its trainings. Raises InputError if a training was measured twice.

        The name is that of the model that was trained: the name of an arm, if its training is among the folders.
        """
        by_model: dict[str, list[Series]] = {}
        known: dict[Path, Series] = {}
        for series in self.series:
            path = Path(series.manifest["config"]["model"])
            place = path.resolve()
            before = known.setdefault(place, series)
            if before is not series:
                raise InputError(f"--from {before.folder} and {series.folder} are steps of one training: name one")
            name = series.manifest["model"]
            if path.name == "checkpoints":  # the checkpoints of an arm
                name = str(path.parent)
                arm, folder = path.parent.name, place.parent.parent
                for training in self.trainings:
                    if training.folder is not None and training.folder.resolve() == folder and arm in training.runs:
                        record = training.manifest["arms"][arm]
                        suffix = "" if record["method"] == PLAIN else f" ({record['label']})"
                        name = f"{training.model}{suffix}"
                        break
            by_model.setdefault(name, []).append(series)
        return by_model


# --- the content of folders of `claims`, `sweep`, and any command that measures or trains


def collect_runs(runs: Iterable[Run], folders: Iterable[Path]) -> Collection:
    """Collect the given runs and the content of the folders."""
    every, trainings, series, scores = list(runs), list[Training](), list[Series](), list[RunData]()
    for folder in folders:
        manifest = read_manifest(folder, JUDGED)
        command = manifest["command"]
        if command in JUDGED_TRAININGS:
            from sinkscope.commands.train.output import Trained  # other runs need no training

            trained = Trained.open(folder)
            try:
                options = checked(options_by_command()[command], trained.manifest["config"])
            except InputError as error:
                raise InputError(f"{folder} is of another sinkscope, or damaged: {error}") from None
            described = trained.manifest | {"config": options.model_dump(mode="json", exclude={"method"})}
            trainings.append(Training(described, trained.runs, trained.tables, trained.folder))
        elif command == BENCHMARK:
            table = read_table(folder / "tables" / f"{SCORE_TABLE}.parquet", (*LEADING_COLUMNS, *SCORE_COLUMNS))
            scores.append(RunData(manifest, {SCORE_TABLE: table}, folder))
        elif command == STEPS:
            series.append(Series.open(folder))
        elif command != COMMAND:
            every.append(Run.open(folder))
        elif (folder / "runs").is_dir():
            every += [Run.open(each) for each in sorted((folder / "runs").iterdir())]
        else:
            raise InputError(f"--from {folder} judged runs of other folders: name those folders")
    return Collection(every, tuple(trainings), tuple(series), tuple(scores))


def judged_folders(folders: Iterable[Path]) -> list[Path]:
    """Return each folder once, with the finished cells in place of a sweep; InputError if nothing can be judged."""
    grids = {name: record.runs_in for name, record in records().items() if record.runs_in}
    to_judge: dict[Path, None] = {}
    for folder in folders:
        manifest = read_manifest(folder, (*JUDGED, *grids))
        if manifest["command"] not in grids:
            to_judge[folder] = None
            continue
        comparison = folder / COMPARISON
        compared = read_manifest(comparison, grids) if (comparison / MANIFEST).is_file() else manifest
        # the comparison leaves out cells that have to be measured again
        place = grids[manifest["command"]]
        cells = [folder / place / name for name in manifest[place] if name in compared.get(place, ())]
        manifests = {cell: read_manifest(cell, None) for cell in cells if (cell / MANIFEST).is_file()}
        # resumable commands write their tables last
        done = [cell for cell, entries in manifests.items() if entries["command"] in JUDGED and entries["tables"]]
        if not done:
            raise InputError(f"--from {folder}: no cell that claims can judge is done")
        to_judge |= dict.fromkeys(done)
    return list(to_judge)


def skipped_in(folders: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Map each model to its roles that do not apply, with the reasons, from folders of `claims`."""
    return merge_reasons(*(read_manifest(folder, JUDGED).get("skipped_roles", {}) for folder in folders))


def merge_reasons(*mappings: Skipped) -> dict[str, dict[str, str]]:
    """Merge mappings of model → role → reason."""
    models = dict.fromkeys(model for one in mappings for model in one)
    return {model: {role: why for one in mappings for role, why in one.get(model, {}).items()} for model in models}
