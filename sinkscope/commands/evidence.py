"""Everything that was given to be judged, by model: runs, arms of trainings, their steps, and related models.

A training is judged under the name of its model: of `retrofit` the pretrained one, of `train` that of the
configuration. Its seeds are together in one judgment. Where a method has several arms with other parameters, the first
is judged under that name, and the others under names of their own, unless claims say which parameters they mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sinkscope.errors import InputError
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.studies import Given
from sinkscope.paper_claims.table import evidence_of, models_of, with_studies
from sinkscope.paper_claims.trainings import PLAIN, Steps, Training, variants, wanted_arms
from sinkscope.results.run import RunData
from sinkscope.results.scores import Scores

CHECKPOINTS = "checkpoints"  # the folder of an arm's steps
Skipped = Mapping[str, Mapping[str, str]]  # model → role → why it does not apply


def told_apart() -> set[str]:
    """Methods of which claims name the parameters: their arms are judged under one name."""
    arms = (arm for claim in CLAIMS.values() for need in claim.needs for arm in wanted_arms(need.partition(":")[2]))
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
        known = {method: kinds for method, kinds in variants(own).items() if method not in told_apart()}
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
