"""Studies: runs that claims read together, since none of them decides alone.

- arms of a training against each other, over its seeds;
- trainings, plain ones or those of one arm, that differ in one setting, over their seeds;
- the steps of a training, as they were measured or as the training logged them;
- models of one family in several sizes, and a chat model beside its base (`relatives.py`).

Each is found among everything that was given; where it is not, the command is named that would make it. Arms and steps
are of trainings with the same settings; where several settings were trained, those of one, which claims name.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from sinkscope.paper_claims import relatives
from sinkscope.paper_claims.factors import FACTORS, Level
from sinkscope.paper_claims.trainings import PLAIN, Arm, Steps, Training, alike, arms_by_seed, variants, wanted_arms
from sinkscope.results.run import RunData
from sinkscope.results.scores import Scores
from sinkscope.training.tables import UNTOUCHED

SEEDS = 3  # that a command which is named trains with: two give hardly any interval
TASK = "bigram-backcopy"

Found = TypeVar("Found", bound=Sized)


@dataclass(frozen=True)
class Study:
    """Runs that are read together.

    Attributes:
        folders: Where they stand.
        setting: Of several settings that were trained the one that is read, in words; empty where there is one.
    """

    folders: tuple[Path | None, ...]
    setting: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class ArmStudy(Study):
    """Arms of trainings with the same settings. `by_seed`: for each seed its arms by method."""

    by_seed: tuple[Mapping[str, Arm], ...]


@dataclass(frozen=True)
class FactorStudy(Study):
    """Arms, mostly plain ones, of trainings that differ in one setting.

    Attributes:
        by_level: The setting's level, in their order → seed → run.
    """

    by_level: Mapping[Level, Mapping[int, RunData]]


@dataclass(frozen=True)
class StepStudy(Study):
    """One or several trainings of a model by step. `each`: step → run."""

    each: tuple[Mapping[int, RunData], ...]


@dataclass(frozen=True)
class LoggedStudy(Study):
    """The seeds of one plain training. `each`: step → the sink rate in percent, as it was logged."""

    each: tuple[Mapping[int, float], ...]


@dataclass(frozen=True)
class ModelStudy(Study):
    """Several models on text. `runs`: by the models' names."""

    runs: Mapping[str, RunData]


@dataclass(frozen=True)
class ScoreStudy(ModelStudy):
    """Several models on text and on a task. `scores`: by the models' names."""

    scores: Mapping[str, float]


@dataclass(frozen=True)
class Given:
    """Everything that was given to be judged, and which model is spoken of.

    Attributes:
        name: Of the model.
        trainings: Of all models.
        series: Of this model's trainings.
        naturals: Model → its run on text; of all models.
        variant: Which arms are meant, where a method has several.
        scores: What `benchmark` found of models.
    """

    name: str
    trainings: tuple[Training, ...] = ()
    series: tuple[Steps, ...] = ()
    naturals: Mapping[str, RunData] = field(default_factory=dict)
    variant: int = 0
    scores: tuple[Scores, ...] = ()

    @property
    def meant(self) -> dict[str, str]:
        """Method → the variant that is meant, of those that have so many."""
        return {
            method: known[self.variant] for method, known in variants(self.own).items() if self.variant < len(known)
        }

    @property
    def own(self) -> list[Training]:
        return [training for training in self.trainings if training.model == self.name]


class Kind(NamedTuple):
    """How studies of a kind are found, and the command that makes one; by what stands behind the kind's colon."""

    find: Callable[[Given, str], Study | None]
    command: Callable[[Given, str], str]


# --- arms


def _arms(command: str = "", task: str = "") -> Kind:
    """Of either command or of one; on any text, or on a task."""

    def known(given: Given) -> list[Training]:
        fits = (command, task)
        return [each for each in given.own if fits[0] in ("", each.command) and fits[1] in ("", each.settings["text"])]

    def find(given: Given, methods: str) -> ArmStudy | None:
        wanted = wanted_arms(methods)
        most, setting = _of_one_setting(known(given), lambda group: arms_by_seed(group, wanted, given.meant))
        if not most:
            return None
        arms = [arms[method] for arms in most for method in wanted]
        return ArmStudy(_folders(arm.training for arm in arms), tuple(most), setting=setting)

    def named(given: Given, methods: str) -> str:
        wanted = ",".join(method for method in wanted_arms(methods) if method != UNTOUCHED)
        if there := known(given):
            return _with_methods(there[0], wanted)
        if task:
            return f"sinkscope run {task}"
        words = f"sinkscope {command}" if command == "train" else "sinkscope retrofit {model}"
        return f"{words} --method {wanted} --seeds {SEEDS}"

    return Kind(find, named)


def _of_one_setting(
    trainings: Iterable[Training], arms_of: Callable[[list[Training]], list[dict[str, Arm]]]
) -> tuple[list[dict[str, Arm]], str]:
    """The arms by seed of trainings with the same settings, and in words which of several settings that is.

    Of those with most seeds it is the one in which plain models end with most sinks, for what is said of sinks can be
    seen where there are some. Fine-tuned models have theirs from before: there it is the first.
    """
    found = [(group, arms) for group in alike(trainings) if (arms := arms_of(group))]
    if not found:
        return [], ""
    _, arms, setting = _with_most(found)
    return arms, setting


def _with_most(
    found: Sequence[tuple[list[Training], Found]], but: Container[str] = ()
) -> tuple[list[Training], Found, str]:
    """Of groups of trainings, each with what was found in it, those in which most was found, and of these the one whose
    plain models end with most sinks; and which setting that is, in words. `but`: settings that differ within each.
    """
    most = max(len(own) for _, own in found)
    found = [(group, own) for group, own in found if len(own) == most]
    sinks = [_plain_sinks(group) for group, _ in found]
    group, own = found[int(np.argmax(sinks))]
    return group, own, _setting_of(group[0], [group[0] for group, _ in found], sinks, but)


def _setting_of(chosen: Training, among: Sequence[Training], sinks: Sequence[float], but: Container[str]) -> str:
    """«learning_rate=0.002, of 2 settings that with most plain sinks: 0.0, 59.4 %»; empty where there is one.

    Args:
        but: Settings that differ within each, too.
    """
    same = [place for place, training in enumerate(among) if training.command == chosen.command]
    settings = [among[place].settings for place in same]
    if len(settings) == 1:
        return ""
    differing: dict[tuple[str, ...], str] = {}  # one name of settings that follow each other
    for name in dict.fromkeys(name for each in settings for name in each if name not in but):
        values = tuple(str(each.get(name)) for each in settings)
        if len(set(values)) > 1:
            differing.setdefault(values, f"{name}={chosen.settings.get(name)}")
    rates = ", ".join(f"{100 * sinks[place]:.1f}" for place in same)
    which = f"that with most plain sinks: {rates} %" if chosen.command == "train" else "the first"
    return f"{', '.join(differing.values())}, of {len(settings)} settings {which}"


def _plain_sinks(trainings: Iterable[Training]) -> float:
    """The mean sink rate of models that were trained plainly, from random weights; 0 where it was not measured."""
    fresh = [training for training in trainings if training.command == "train"]
    rates = [arm.metric("sink_rate") for training in fresh for arm in training.arms if arm.method == PLAIN]
    return float(np.nan_to_num(np.mean(rates))) if rates else 0.0


def _with_methods(training: Training, wanted: str) -> str:
    """Further arms of a folder; all of them in another one where it has a single seed."""
    if training.manifest["config"].get("seeds", 1) > 1:
        return training.again({"method": wanted}, training.folder)
    return training.again({"method": wanted, "seeds": SEEDS})


def _folders(trainings: Iterable[Training]) -> tuple[Path | None, ...]:
    return tuple(dict.fromkeys(training.folder for training in trainings))


# --- plain trainings that differ in one setting


def _named(of: str) -> tuple[str, str]:
    """A factor, and the arm whose runs are read: `learning-rate` of plain trainings, or behind it another arm's,
    `learning-rate,operation:kind=sigmoid`.
    """
    name, *arm = wanted_arms(of)
    return name, (arm or [PLAIN])[0]


def _find_factor(given: Given, of: str) -> FactorStudy | None:
    """Of those among which this model is the one with most levels; of several, as `_of_one_setting` has it."""
    name, arm = _named(of)
    factor = FACTORS[name]
    fresh = [training for training in given.trainings if training.command == "train"]
    found = []
    for group in alike(fresh, factor.settings, factor.fixed):
        by_level = _by_level(group, factor.level, arm)
        if len(by_level) > 1 and given.name in {training.model for training in group}:
            found.append((group, by_level))
    if not found:
        return None
    group, by_level, setting = _with_most(found, factor.settings)
    return FactorStudy(_folders(group), by_level, setting=setting)


def _by_level(
    trainings: Iterable[Training], level: Callable[[Training], Level | None], arm: str
) -> dict[Level, dict[int, RunData]]:
    found: dict[Level, dict[int, RunData]] = {}
    for training in trainings:
        runs = {arms[arm].seed: arms[arm].run for arms in arms_by_seed([training], [arm])}
        at = level(training)
        if runs and at is not None:
            found[at] = runs | found.get(at, {})
    return {at: found[at] for at in sorted(found)}


def _vary(given: Given, of: str) -> str:
    name, arm = _named(of)
    factor = FACTORS[name]
    fresh = [training for training in given.own if training.command == "train"]
    changed = {"method": arm, "seeds": SEEDS}
    words = f"sinkscope train --method {arm} --seeds {SEEDS}"
    if fresh:
        config = {"config": None} if "--config" in factor.options else {}
        words = fresh[0].again(changed | config | dict.fromkeys(factor.settings))
    return f"{words} {factor.options}"


# --- steps


def _find_steps(given: Given, _: str) -> StepStudy | None:
    if not given.series:
        return None
    folders = tuple(series.folder for series in given.series)
    return StepStudy(folders, tuple(series.runs for series in given.series))


def _find_course(given: Given, of: str) -> Study | None:
    """Runs of steps; where there are none, what trainings from random weights logged."""
    return _find_steps(given, of) or _find_logged(given)


def _find_logged(given: Given) -> LoggedStudy | None:
    fresh = [training for training in given.own if training.command == "train"]
    most, setting = _of_one_setting(fresh, lambda group: arms_by_seed(group, [PLAIN]))
    arms = [by_method[PLAIN] for by_method in most]
    each = [(100 * rates).to_dict() for arm in arms if len(rates := arm.by_step("sink_rate"))]
    return LoggedStudy(_folders(arm.training for arm in arms), tuple(each), setting=setting) if each else None


def _analyze_steps(given: Given, _: str) -> str:
    folders = [
        arms[PLAIN].run.folder
        for training in given.own
        if training.command == "train"
        for arms in arms_by_seed([training], [PLAIN])
    ]
    if folders and folders[0] is not None:
        return f"sinkscope analyze {folders[0].parent / 'checkpoints'}, and of every other seed"
    return "sinkscope analyze {model} --revision STEP,STEP,…"


# --- other models


def _find_sizes(given: Given, _: str) -> ModelStudy | None:
    runs = relatives.sizes(given.name, given.naturals)
    return ModelStudy(tuple(run.folder for run in runs.values()), runs) if runs else None


def _find_scores(given: Given, task: str) -> ScoreStudy | None:
    """The sizes of a family that have a score on the task."""
    known = {
        str(one.manifest["model"]["name"]): (one, float(rows["score"].iloc[0]))
        for one in given.scores
        if len(rows := one.main[one.main["condition"] == task])
    }
    runs = relatives.sizes(given.name, {name: run for name, run in given.naturals.items() if name in known})
    folders = (*(run.folder for run in runs.values()), *(known[name][0].folder for name in runs))
    return ScoreStudy(folders, runs, {name: known[name][1] for name in runs}) if runs else None


def _find_base(given: Given, _: str) -> ModelStudy | None:
    runs = relatives.with_base(given.name, given.naturals)
    return ModelStudy(tuple(run.folder for run in runs.values()), runs) if runs else None


def _analyze_base(given: Given, _: str) -> str:
    """By its name on the hub; a file's name does not say where its base is."""
    base = relatives.base_of(given.name)
    return f"sinkscope analyze {base}" if base and "/" in base else f"sinkscope analyze BASE, its base, called {base}"


ARMS = {
    "arms": _arms(),  # arms:none,vga
    "retrofit": _arms("retrofit"),
    "train": _arms("train"),
    "backcopy": _arms("train", TASK),
}
KINDS = {
    **ARMS,
    "factor": Kind(_find_factor, _vary),  # factor:weight-decay
    "steps": Kind(_find_steps, _analyze_steps),
    "course": Kind(_find_course, _analyze_steps),  # of the sink rate alone, which trainings log
    "sizes": Kind(_find_sizes, lambda given, _: relatives.MORE_SIZES),
    "base": Kind(_find_base, _analyze_base),
    "scores": Kind(_find_scores, lambda given, task: relatives.MORE_SCORES.format(task)),  # scores:hellaswag
}


def studies_of(given: Given, needs: Iterable[str]) -> tuple[dict[str, Study], dict[str, str]]:
    """Role → the study that plays it; and of those that are not there role → the command that would make it."""
    found: dict[str, Study] = {}
    commands: dict[str, str] = {}
    for need in dict.fromkeys(needs):
        kind, _, of = need.partition(":")
        if kind not in KINDS:
            continue
        study = KINDS[kind].find(given, of) if given.variant == 0 or _of_methods(kind, of) else None
        if study is None:
            commands[need] = KINDS[kind].command(given, of)
        else:
            found[need] = study
    return found, commands


def _of_methods(kind: str, of: str) -> bool:
    """Whether a study has methods of which any parameters are wanted, so that there may be variants of it."""
    return kind in ARMS and any(":" not in typed and typed not in (PLAIN, UNTOUCHED) for typed in wanted_arms(of))
