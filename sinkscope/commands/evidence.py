"""Everything that was given to be judged, by model: runs, arms of trainings, their steps, and related models.

A training is judged under the name of its model: of `retrofit` the pretrained one, of `train` that of the
configuration. Its seeds are together in one judgment. Where a method has several arms with other parameters, the first
is judged under that name, and the others under names of their own, unless claims say which parameters they mean.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError
from sinkscope.options.option import checked
from sinkscope.options.recipe import COMPARISON
from sinkscope.output.run import Run
from sinkscope.output.series import COMMAND as STEPS
from sinkscope.output.series import Series
from sinkscope.output.trained import COMMANDS as TRAININGS
from sinkscope.output.trained import Trained
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.studies import OPTIONS, PLAIN, Given, Steps, Training, variants, wanted_arms
from sinkscope.paper_claims.table import evidence_of, models_of, with_studies
from sinkscope.results.cells import CELLS
from sinkscope.results.cells import COMMAND as SWEEP
from sinkscope.results.manifest import MANIFEST, RUNS, read_manifest
from sinkscope.results.run import RunData
from sinkscope.results.scorecard import COMMAND
from sinkscope.results.scores import COLUMNS as SCORES_COLUMNS
from sinkscope.results.scores import COMMAND as SCORES
from sinkscope.results.scores import TABLE as SCORES_TABLE
from sinkscope.results.scores import Scores
from sinkscope.results.tables import LEADING_COLUMNS, read_table

CHECKPOINTS = "checkpoints"  # the folder of an arm's steps
Skipped = Mapping[str, Mapping[str, str]]  # model → role → why it does not apply


def methods_with_fixed_parameters() -> set[str]:
    """Return the methods whose parameters claims name: their arms are judged under one name."""
    arms = (arm for claim in CLAIMS.values() for need in claim.needs for arm in wanted_arms(need.of))
    return {method for method, colon, _ in (arm.partition(":") for arm in arms) if colon}


@dataclass(frozen=True)
class Collection:
    """All that was given, of all models."""

    runs: Sequence[RunData] = ()
    trainings: tuple[Training, ...] = ()
    series: tuple[Steps, ...] = ()
    scores: tuple[Scores, ...] = ()

    def evidence(self, skipped: Skipped) -> dict[str, Evidence]:
        """By model."""
        of_runs = models_of(self.runs)
        found: dict[str, Evidence] = {}
        for name in dict.fromkeys([*of_runs, *(training.model for training in self.trainings), *self._by_name]):
            own = replace(evidence_of(of_runs.get(name, ()), name, skipped), model=self._typed(name))
            found |= self.completed(own, name)
        return found

    def completed(self, evidence: Evidence, name: str) -> dict[str, Evidence]:
        """The evidence of a model with the studies that it is in; and that of further variants of its arms."""
        return {name: self._complete(evidence, name), **self._variants(evidence, name)}

    def _complete(self, evidence: Evidence, name: str, variant: int = 0) -> Evidence:
        naturals = {model: run for model, runs in models_of(self.runs).items() if (run := _natural(runs))}
        if MAIN in evidence.runs:
            naturals[name] = evidence.runs[MAIN]
        series = self._by_name.get(name, ())
        given = Given(name, self.trainings, tuple(series), naturals, variant, self.scores)
        examples = [run for part in (*given.own, *series) for run in part.runs.values()]
        return replace(with_studies(evidence, given), example=next(iter(examples), None))

    def _variants(self, evidence: Evidence, name: str) -> dict[str, Evidence]:
        """Of further arms of the same methods, without the runs on which these have no bearing."""
        own = [training for training in self.trainings if training.model == name]
        labels = {(arm.method, arm.variant): arm.label for training in own for arm in training.arms}
        known = {
            method: kinds for method, kinds in variants(own).items() if method not in methods_with_fixed_parameters()
        }
        found = {}
        for variant in range(1, max(map(len, known.values()), default=0)):
            called = [labels[method, of[variant]] for method, of in known.items() if variant < len(of)]
            others = replace(evidence, runs={})
            found[f"{name} ({', '.join(called)})"] = self._complete(others, name, variant)
        return found

    def _typed(self, name: str) -> str:
        """How a model is named in commands: one that was trained from random weights by its folder."""
        for training in self.trainings:
            if training.model == name and training.command == "train" and training.folder is not None:
                return str(training.folder / next(iter(training.runs)) / "model")
        return name

    @property
    def _by_name(self) -> dict[str, list[Steps]]:
        """Model → the steps of its trainings, of each training once.

        Raises:
            InputError: a training was measured twice.
        """
        found: dict[str, list[Steps]] = {}
        known: dict[str, Steps] = {}
        for series in self.series:
            before = known.setdefault(str(series.of), series)
            if before is not series:
                raise InputError(f"--from {before.folder} and {series.folder} are steps of one training: name one")
            found.setdefault(self._whose(series), []).append(series)
        return found

    def _whose(self, series: Steps) -> str:
        """Which model is trained: of an arm of a training that was given that one's model."""
        if series.of.name != CHECKPOINTS:
            return series.manifest["model"]
        arm, folder = series.of.parent.name, series.of.resolve().parent.parent
        for training in self.trainings:
            if training.folder is not None and training.folder.resolve() == folder and arm in training.runs:
                record = training.manifest["arms"][arm]
                return training.model if record["method"] == PLAIN else f"{training.model} ({record['label']})"
        return str(series.of.parent)


def _natural(runs: Iterable[RunData]) -> RunData | None:
    """A model's run on text."""
    return Evidence.of(runs, [MAIN]).runs.get(MAIN)


# --- what is in the folders: of any command that measures or trains, of `claims` or `sweep`

JUDGED = (*RUNS, *TRAININGS, STEPS, COMMAND, SCORES)
GIVEN = (*JUDGED, SWEEP)


def collected(runs: Iterable[Run], folders: Iterable[Path]) -> Collection:
    """What stands in folders of any command that measures, and what is handed over."""
    found: dict[type, list[Any]] = {Run: list(runs), Training: [], Steps: [], Scores: []}
    for folder in folders:
        for kind, one in _runs_in(folder):
            found[kind].append(one)
    return Collection(found[Run], tuple(found[Training]), tuple(found[Steps]), tuple(found[Scores]))


def judged_folders(folders: Iterable[Path]) -> list[Path]:
    """The folders, each once; of a sweep those of its cells that are done and can be judged.

    Raises:
        InputError: a folder is of another command, or a sweep has no such cell.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        manifest = read_manifest(folder, GIVEN)
        if manifest["command"] != SWEEP:
            found[folder] = None
            continue
        comparison = folder / COMPARISON
        compared = read_manifest(comparison, (SWEEP,)) if (comparison / MANIFEST).is_file() else manifest
        # the comparison leaves out cells that have to be measured again
        cells = [folder / CELLS / name for name in manifest["cells"] if name in compared.get("cells", ())]
        done = [cell for cell in cells if (cell / MANIFEST).is_file() and _is_done(read_manifest(cell, None))]
        if not done:
            raise InputError(f"--from {folder}: none of its cells is done that claims could judge")
        found |= dict.fromkeys(done)
    return list(found)


def _is_done(manifest: Mapping[str, Any]) -> bool:
    """Of a cell; commands that go on where they were write their tables last."""
    return manifest["command"] in JUDGED and bool(manifest["tables"])


def _runs_in(folder: Path) -> Iterator[tuple[type, Any]]:
    """A run, or all that are in a folder of `claims`; the arms of a training, its steps, or scores on tasks."""
    command = read_manifest(folder, JUDGED)["command"]
    if command in TRAININGS:
        yield Training, _training(folder)
    elif command == SCORES:
        table = read_table(folder / "tables" / f"{SCORES_TABLE}.parquet", (*LEADING_COLUMNS, *SCORES_COLUMNS))
        yield Scores, Scores(read_manifest(folder, JUDGED), table, folder)
    elif command == STEPS:
        series = Series.open(folder)
        yield Steps, Steps(series.manifest, series.runs, series.folder)
    elif command != COMMAND:
        yield Run, Run.open(folder)
    elif (folder / "runs").is_dir():
        yield from ((Run, Run.open(each)) for each in sorted((folder / "runs").iterdir()))
    else:
        raise InputError(f"--from {folder} judged runs that stand elsewhere: name those")


def _training(folder: Path) -> Training:
    """What `retrofit` or `train` left, with all its options: an older folder may lack some."""
    trained = Trained.open(folder)
    try:
        options = checked(OPTIONS[trained.manifest["command"]], trained.manifest["config"])
    except InputError as error:
        raise InputError(f"{folder} is of another sinkscope, or damaged: {error}") from None
    config = options.model_dump(mode="json", exclude={"method"})
    return Training(trained.manifest | {"config": config}, trained.runs, trained.tables, trained.folder)


def skipped_in(folders: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Model → role → why it does not apply, as folders of `claims` have it."""
    return merged(*(read_manifest(folder, JUDGED).get("skipped_roles", {}) for folder in folders))


def merged(*found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Model → role → why it does not apply, of several such."""
    models = dict.fromkeys(model for one in found for model in one)
    return {model: {role: why for one in found for role, why in one.get(model, {}).items()} for model in models}
