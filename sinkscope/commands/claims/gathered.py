"""All data for judging claims, grouped by model: runs, arms of trainings, their steps, and related models.

A training is judged under the name of its model, which is the pretrained model for `retrofit` and the configuration
for `train`. Its seeds are judged together. If a method has several arms with different parameters, the first is judged
under that name, and the others under their own names, unless claims name the parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sinkscope.commands.claims.columns import COMMAND
from sinkscope.commands.claims.evidence import MAIN, Evidence
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.studies import PLAIN, Given, Steps, Training, variants, wanted_arms
from sinkscope.commands.claims.table import evidence_of, models_of, with_studies
from sinkscope.commands.steps.series import COMMAND as STEPS
from sinkscope.commands.steps.series import Series
from sinkscope.errors import InputError
from sinkscope.options.option import checked
from sinkscope.options.recipe import CELLS, COMPARISON, SWEEP
from sinkscope.options.register import options_by_command
from sinkscope.output.run import Run
from sinkscope.results.manifest import MANIFEST, RUNS, read_manifest
from sinkscope.results.run import RunData
from sinkscope.results.scores import COLUMNS as SCORES_COLUMNS
from sinkscope.results.scores import COMMAND as SCORES
from sinkscope.results.scores import TABLE as SCORES_TABLE
from sinkscope.results.tables import LEADING_COLUMNS, read_table

TRAININGS = ("retrofit", "train")
CHECKPOINTS = "checkpoints"  # the folder of an arm's steps
Skipped = Mapping[str, Mapping[str, str]]  # model → role → why it does not apply


@dataclass(frozen=True)
class Collection:
    """All data of all models."""

    runs: Sequence[RunData] = ()
    trainings: tuple[Training, ...] = ()
    series: tuple[Steps, ...] = ()
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
        found: dict[str, Evidence] = {}
        for name in dict.fromkeys([*runs, *(training.model for training in self.trainings), *self._series_by_model]):
            own = replace(evidence_of(runs.get(name, ()), name, skipped), model=folders.get(name, name))
            found |= self.completed(own, name)
        return found

    def completed(self, evidence: Evidence, name: str) -> dict[str, Evidence]:
        """Add a model's studies to its evidence. Return it with the evidence of further variants of the model's arms,
        which lacks the runs, because these do not depend on the variant.
        """
        found = {name: self._complete(evidence, name, 0)}
        named_by_claims = {
            method
            for claim in CLAIMS.values()
            for need in claim.needs
            for method, colon, _ in (arm.partition(":") for arm in wanted_arms(need.of))
            if colon
        }
        own = [training for training in self.trainings if training.model == name]
        labels = {(arm.method, arm.variant): arm.label for training in own for arm in training.arms}
        known = {method: kinds for method, kinds in variants(own).items() if method not in named_by_claims}
        for variant in range(1, max(map(len, known.values()), default=0)):
            called = [labels[method, kinds[variant]] for method, kinds in known.items() if variant < len(kinds)]
            found[f"{name} ({', '.join(called)})"] = self._complete(replace(evidence, runs={}), name, variant)
        return found

    def _complete(self, evidence: Evidence, name: str, variant: int) -> Evidence:
        known = {model: Evidence.of(runs, [MAIN]).runs for model, runs in models_of(self.runs).items()}
        known[name] = known.get(name, {}) | evidence.runs
        naturals = {model: of[MAIN] for model, of in known.items() if MAIN in of}
        series = self._series_by_model.get(name, ())
        given = Given(name, self.trainings, tuple(series), naturals, variant, self.scores)
        examples = [run for part in (*given.own, *series) for run in part.runs.values()]
        return replace(with_studies(evidence, given), example=next(iter(examples), None))

    @property
    def _series_by_model(self) -> dict[str, list[Steps]]:
        """Map each model to the steps of its trainings. Raises InputError if a training was measured twice."""
        found: dict[str, list[Steps]] = {}
        known: dict[str, Steps] = {}
        for series in self.series:
            before = known.setdefault(str(series.of), series)
            if before is not series:
                raise InputError(f"--from {before.folder} and {series.folder} are steps of one training: name one")
            found.setdefault(self._trained_model(series), []).append(series)
        return found

    def _trained_model(self, series: Steps) -> str:
        """Return the name of the model that was trained: the name of an arm, if its training was given."""
        if series.of.name != CHECKPOINTS:
            return series.manifest["model"]
        arm, folder = series.of.parent.name, series.of.resolve().parent.parent
        for training in self.trainings:
            if training.folder is not None and training.folder.resolve() == folder and arm in training.runs:
                record = training.manifest["arms"][arm]
                return training.model if record["method"] == PLAIN else f"{training.model} ({record['label']})"
        return str(series.of.parent)


# --- the content of folders of `claims`, `sweep`, and any command that measures or trains

JUDGED = (*RUNS, *TRAININGS, STEPS, COMMAND, SCORES)


def collected(runs: Iterable[Run], folders: Iterable[Path]) -> Collection:
    """Collect the given runs and the content of the folders."""
    every, trainings, series, scores = list(runs), list[Training](), list[Steps](), list[RunData]()
    for folder in folders:
        command = read_manifest(folder, JUDGED)["command"]
        if command in TRAININGS:
            trainings.append(_training(folder))
        elif command == SCORES:
            table = read_table(folder / "tables" / f"{SCORES_TABLE}.parquet", (*LEADING_COLUMNS, *SCORES_COLUMNS))
            scores.append(RunData(read_manifest(folder, JUDGED), {SCORES_TABLE: table}, folder))
        elif command == STEPS:
            steps = Series.open(folder)
            series.append(Steps(steps.manifest, steps.runs, steps.folder))
        elif command != COMMAND:
            every.append(Run.open(folder))
        elif (folder / "runs").is_dir():
            every += [Run.open(each) for each in sorted((folder / "runs").iterdir())]
        else:
            raise InputError(f"--from {folder} judged runs of other folders: name those folders")
    return Collection(every, tuple(trainings), tuple(series), tuple(scores))


def judged_folders(folders: Iterable[Path]) -> list[Path]:
    """Return each folder once, with the finished cells in place of a sweep; InputError if nothing can be judged."""
    found: dict[Path, None] = {}
    for folder in folders:
        manifest = read_manifest(folder, (*JUDGED, SWEEP))
        if manifest["command"] != SWEEP:
            found[folder] = None
            continue
        comparison = folder / COMPARISON
        compared = read_manifest(comparison, (SWEEP,)) if (comparison / MANIFEST).is_file() else manifest
        # the comparison leaves out cells that have to be measured again
        cells = [folder / CELLS / name for name in manifest["cells"] if name in compared.get("cells", ())]
        manifests = {cell: read_manifest(cell, None) for cell in cells if (cell / MANIFEST).is_file()}
        # resumable commands write their tables last
        done = [cell for cell, own in manifests.items() if own["command"] in JUDGED and own["tables"]]
        if not done:
            raise InputError(f"--from {folder}: no cell that claims can judge is done")
        found |= dict.fromkeys(done)
    return list(found)


def _training(folder: Path) -> Training:
    """Open the folder of `retrofit` or `train`, with the default values of options that an older folder lacks."""
    from sinkscope.commands.train.output import Trained  # other runs need no training

    trained = Trained.open(folder)
    try:
        options = checked(options_by_command()[trained.manifest["command"]], trained.manifest["config"])
    except InputError as error:
        raise InputError(f"{folder} is of another sinkscope, or damaged: {error}") from None
    config = options.model_dump(mode="json", exclude={"method"})
    return Training(trained.manifest | {"config": config}, trained.runs, trained.tables, trained.folder)


def skipped_in(folders: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Map each model to its roles that do not apply, with the reasons, from folders of `claims`."""
    return merged(*(read_manifest(folder, JUDGED).get("skipped_roles", {}) for folder in folders))


def merged(*found: Skipped) -> dict[str, dict[str, str]]:
    """Merge mappings of model → role → reason."""
    models = dict.fromkeys(model for one in found for model in one)
    return {model: {role: why for one in found for role, why in one.get(model, {}).items()} for model in models}
