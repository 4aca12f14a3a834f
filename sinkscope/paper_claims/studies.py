"""Studies: several runs that a claim reads together.

- arms of a training against each other, over its seeds;
- trainings, plain ones or those of one arm, that differ in one setting, over their seeds;
- the steps of a training, as they were measured or as the training logged them;
- models of one family in several sizes, and a chat model with its base.

Each is found among everything that was given; for one that is not found, the command that would make it is named. Arms
and steps are of trainings with the same settings; if several settings were trained, claims read one and name it.
"""

import json
import re
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from sinkscope.options.option import Options, flag
from sinkscope.options.spec import parse_spec
from sinkscope.options.training import RetrofitOptions, TrainOptions, tokens_a_step
from sinkscope.paper_claims.need import ARMS, Need
from sinkscope.paper_claims.need import Kind as NeedKind
from sinkscope.results.run import RunData
from sinkscope.results.scores import Scores
from sinkscope.retrofits import make_retrofit
from sinkscope.training.tables import UNTOUCHED

# --- trainings, their arms and their steps

PLAIN = "none"  # the method of a plain training or fine-tune
OPTIONS: dict[str, type[Options]] = {"retrofit": RetrofitOptions, "train": TrainOptions}
# options that do not affect results, and those that repetitions differ in
IGNORED_OPTIONS = {"config", "device_map", "log_every", "method", "observables", "save_every", "seed", "seeds"}


@dataclass(frozen=True)
class Training:
    """The folder of one `retrofit` or `train`.

    Attributes:
        manifest: The content of run.json.
        runs: Arm → its run on held-out text.
        tables: `training` and `retrofit`, of all arms.
        folder: Its path.
    """

    manifest: Mapping[str, Any]
    runs: Mapping[str, RunData] = field(repr=False)
    tables: Mapping[str, pd.DataFrame] = field(repr=False)
    folder: Path | None = None

    @property
    def command(self) -> str:
        return self.manifest["command"]

    @property
    def model(self) -> str:
        """The model's name; for `train` that of the configuration."""
        return next(iter(self.runs.values())).model

    @property
    def settings(self) -> dict[str, Any]:
        """All that affects its numbers except methods and seeds: trainings with the same settings are repetitions."""
        options = {name: value for name, value in self.manifest["config"].items() if name not in IGNORED_OPTIONS}
        shape = {name: value for name, value in self.manifest.get("architecture", {}).items() if "version" not in name}
        return {"command": self.command, "processes": self.manifest.get("processes", 1), **options, **shape}

    @cached_property
    def arms(self) -> tuple["Arm", ...]:
        """The arms that were trained and measured, in their order."""
        return tuple(
            Arm(self, record["label"], record["seed"], self.runs[name], record["method"], record["parameters"])
            for name, record in self.manifest["arms"].items()
            if name in self.runs
        )

    def again(self, changed: Mapping[str, Any], into: Path | None = None) -> str:
        """Return the command that repeats the training with some options changed."""
        kind = OPTIONS[self.command]
        default = kind().model_dump(mode="json")
        given = {name: value for name, value in self.manifest["config"].items() if value != default.get(name)}
        given = {name: value for name, value in (given | dict(changed)).items() if name in kind.model_fields}
        if into is not None:
            given["out"] = str(into)
        words = [_word(name, value, kind) for name, value in given.items() if value is not None and value is not False]
        return " ".join(["sinkscope", self.command, *words])


def _word(name: str, value: Any, kind: type[Options]) -> str:
    text = shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value))
    if name in kind.arguments:
        return text
    return flag(name) if value is True else f"{flag(name)} {text}"


@dataclass(frozen=True)
class Arm:
    """One method, trained once.

    Attributes:
        training: The training that it is an arm of.
        label: Its name.
        seed: The seed of the training.
        run: Its run on held-out text.
        method: As `sinkscope list retrofits` names it.
        parameters: The given parameters of the method.
    """

    training: Training = field(repr=False)
    label: str
    seed: int
    run: RunData = field(repr=False)
    method: str = UNTOUCHED
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """The method's parameters, those that were not given at their defaults."""
        return make_retrofit(self.method, self.parameters).model_dump_json()

    def metric(self, name: str) -> float:
        """A metric of the whole model from the table `retrofit`, or else from its run; NaN if neither has it."""
        rows = self._rows(self.training.tables["retrofit"])
        found = rows[rows["metric"] == name]["value"]
        return float(found.iloc[0]) if len(found) else self.run.metric(name)

    def by_step(self, metric: str, layer: int = -1) -> pd.Series:
        """Step → a metric that was recorded in training."""
        rows = self._rows(self.training.tables["training"])
        rows = rows[(rows["metric"] == metric) & (rows["layer"] == layer)]
        return rows.set_index("step")["value"].sort_index()

    def _rows(self, table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["condition"] == self.label) & (table["seed"] == self.seed)]


@dataclass(frozen=True)
class Steps:
    """The folder of one `analyze` over steps: a run for each step of a training.

    Attributes:
        manifest: The content of run.json.
        runs: Step → its run, in their order.
        folder: Its path.
    """

    manifest: Mapping[str, Any]
    runs: Mapping[int, RunData] = field(repr=False)
    folder: Path | None = None

    @property
    def of(self) -> Path:
        """The model or the folder of checkpoints, as it was given."""
        return Path(self.manifest["config"]["model"])


START_PARAMETERS = {"deviation"}  # parameters of methods that say where a training begins, not what is trained


def alike(
    trainings: Iterable[Training], but: Iterable[str] = (), fixed: Callable[[Training], Any] = lambda training: None
) -> list[list[Training]]:
    """Group trainings by their settings.

    Args:
        trainings: Trainings of any models.
        but: Settings that may differ.
        fixed: A further value that has to be the same.
    """
    found: dict[str, list[Training]] = {}
    for training in trainings:
        settings = {name: value for name, value in training.settings.items() if name not in but}
        found.setdefault(json.dumps([settings, fixed(training)], sort_keys=True), []).append(training)
    return list(found.values())


def variants(trainings: Iterable[Training]) -> dict[str, list[str]]:
    """Method → the variants of its arms, in their order; except for plain training, which has none."""
    found: dict[str, dict[str, None]] = {}
    for arm in (arm for training in trainings for arm in training.arms if arm.method != PLAIN):
        found.setdefault(arm.method, {})[arm.variant] = None
    return {method: list(known) for method, known in found.items()}


def wanted_arms(text: str) -> list[str]:
    """Split arms as they are typed, `none,key-bias:value=axis,norm=5`."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" not in part:  # a further parameter of the last one
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def arms_by_seed(
    trainings: Iterable[Training], wanted: Iterable[str], meant: Mapping[str, str] | None = None
) -> list[dict[str, Arm]]:
    """For each seed that has all these arms, the arms as they are wanted, of one folder where one has all of them.

    Args:
        trainings: With the same settings.
        wanted: Methods as the folders name them, with parameters where only arms with these are wanted, and others at
            their defaults but for their start's, and "untouched": the model that all arms of a `retrofit` began from.
        meant: Method → the variant that is meant where no parameters are wanted; without it only plain arms are.
    """
    wanted = list(wanted)
    of_one_folder: dict[int, dict[str, Arm]] = {}
    of_several: dict[int, dict[str, Arm]] = {}
    for training in trainings:
        by_seed: dict[int, dict[str, Arm]] = {}
        for arm in training.arms:
            for typed in wanted:
                if _is_wanted(arm, typed, meant or {}):
                    by_seed.setdefault(arm.seed, {}).setdefault(typed, arm)
        for seed, arms in by_seed.items():
            if UNTOUCHED in training.runs:
                arms[UNTOUCHED] = Arm(training, UNTOUCHED, seed, training.runs[UNTOUCHED])
            if set(wanted) <= arms.keys():
                of_one_folder.setdefault(seed, arms)
            of_several[seed] = arms | of_several.get(seed, {})
    whole = {seed: arms for seed, arms in of_several.items() if set(wanted) <= arms.keys()} | of_one_folder
    return [whole[seed] for seed in sorted(whole)]


def _is_wanted(arm: Arm, typed: str, meant: Mapping[str, str]) -> bool:
    method, parameters = parse_spec(typed, "--method")
    if arm.method != method:
        return False
    if not parameters:
        return method == PLAIN or meant.get(method) == arm.variant
    own = make_retrofit(arm.method, arm.parameters)
    asked = make_retrofit(method, parameters)
    return own.model_dump(exclude=START_PARAMETERS) == asked.model_dump(exclude=START_PARAMETERS)


# --- the settings in which plain trainings differ

Level = float | str


@dataclass(frozen=True)
class Factor:
    """One setting.

    Attributes:
        settings: The only entries of `Training.settings` that may differ.
        level: The setting's value; None where a folder does not say.
        options: The options that have to be given to `train`, as typed.
        fixed: A further value that has to be the same.
    """

    settings: tuple[str, ...]
    level: Callable[[Training], Level | None]
    options: str
    fixed: Callable[[Training], Any] = lambda training: None


def _setting(*names: str) -> Callable[[Training], Level | None]:
    """The first of these entries that a training has."""
    return lambda training: next((found for name in names if (found := training.settings.get(name)) is not None), None)


def _tokens_a_step(training: Training) -> Level:
    return tokens_a_step(training.settings, training.settings["processes"])


def _tokens(training: Training) -> Level | None:
    """The tokens of the training text, each counted once."""
    blocks = training.manifest.get("text_blocks")
    return None if blocks is None else blocks * training.settings["block_length"]


def _rate_times_steps(training: Training) -> float:
    return float(f"{training.settings['learning_rate'] * training.settings['steps']:.6g}")


def _window(training: Training) -> Level:
    """The window in tokens; ∞ where all earlier ones are seen."""
    return training.settings.get("sliding_window") or inf


RATES = ("learning_rate", "new_learning_rate")  # the second is that of methods, of which a plain training has none
IN_A_CONFIG = "--config config.json, several that differ in"

FACTORS = {
    "learning-rate": Factor(RATES, _setting("learning_rate"), "--learning-rate R, with several R"),
    "learning-rate-and-steps": Factor(
        (*RATES, "steps"),
        _setting("learning_rate"),
        "--learning-rate R --steps N, with several R and the same R × N",
        _rate_times_steps,
    ),
    "batch-size": Factor(("batch_size", "accumulation", "processes"), _tokens_a_step, "--batch-size N, with several N"),
    "data": Factor(("tokens",), _tokens, "--tokens N, with a small N and a large one"),
    "random-tokens": Factor(("random_tokens",), _setting("random_tokens"), "--random-tokens N, with N = 0, 1 and 2"),
    "fixed-position": Factor(
        ("fixed_position",), _setting("fixed_position"), "--fixed-position K, with K = 0, 1 and 2"
    ),
    "positions": Factor(
        ("position_scheme",),
        _setting("position_scheme"),
        "--config llama-60m:position_scheme=S, with S = none, absolute, learned, relative, alibi and rotary",
    ),
    "weight-decay": Factor(
        ("weight_decay",), _setting("weight_decay"), "--weight-decay W, with W = 0, others from 0.1 to 2, and 5"
    ),
    "window": Factor(
        ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        _window,
        f"{IN_A_CONFIG} sliding_window",
    ),
    "feed-forward": Factor(
        ("feed_forward", "hidden_act", "activation_function"),
        _setting("feed_forward", "hidden_act", "activation_function"),
        f"{IN_A_CONFIG} hidden_act",
    ),
    "heads": Factor(
        ("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"),
        _setting("num_attention_heads", "n_head"),
        f"{IN_A_CONFIG} num_attention_heads",
    ),
}


# --- related models

FEWEST = 4  # sizes: resampled, fewer give no interval of a rank correlation
MORE_SIZES = f"sinkscope claims --from RUN --from RUN …, with runs of {FEWEST} or more sizes of its family"
MORE_SCORES = (
    f"sinkscope claims --from RUN … --from SCORES …, with runs of {FEWEST} or more sizes of its family and what "
    "sinkscope benchmark --tasks {} gave of each"
)
_SIZE = re.compile(r"(?<![a-z0-9])\d+(\.\d+)?[mbk](?![a-z0-9])", re.IGNORECASE)
_SIZE_IN_WORDS = re.compile(r"[-_](small|medium|large|xl)(?=$|[-_.])", re.IGNORECASE)
_CHAT = re.compile(r"[-_](chat|instruct|it|sft|dpo)(?=$|[-_.])", re.IGNORECASE)
_COMPARABLE = ("seq_len", "window", "epsilon")


def family_of(name: str) -> str:
    """A model's name without its size."""
    return _SIZE_IN_WORDS.sub("", _SIZE.sub("…", name))


def sizes(name: str, naturals: Mapping[str, RunData]) -> dict[str, RunData]:
    """Return the runs of this model's family that were measured alike, from the smallest model on; none if they are too
    few.
    """
    if name not in naturals:
        return {}
    found = {
        other: run
        for other, run in naturals.items()
        if family_of(other) == family_of(name)
        and _measured_alike(run, naturals[name])
        and run.manifest["model"].get("parameters")
    }
    by_size = dict(sorted(found.items(), key=lambda item: parameters(item[1])))
    return by_size if len(set(map(parameters, by_size.values()))) >= FEWEST else {}


def parameters(run: RunData) -> int:
    return int(run.manifest["model"]["parameters"])


def _measured_alike(first: RunData, second: RunData) -> bool:
    return all(first.manifest["config"].get(key) == second.manifest["config"].get(key) for key in _COMPARABLE)


def with_base(name: str, naturals: Mapping[str, RunData]) -> dict[str, RunData]:
    """The runs of a chat model's base and of itself, in this order; none unless both were measured, and alike."""
    base = base_of(name)
    if (
        base is None
        or base not in naturals
        or name not in naturals
        or not _measured_alike(naturals[base], naturals[name])
    ):
        return {}
    return {base: naturals[base], name: naturals[name]}


def base_of(name: str) -> str | None:
    """Return the name of a chat model's base; None if the name does not say that it was tuned."""
    base = _CHAT.sub("", name)
    return base if base != name else None


# --- studies

SEEDS = 3  # in the commands that are suggested: two seeds give hardly any interval
TASK = "bigram-backcopy"

Found = TypeVar("Found", bound=Sized)


@dataclass(frozen=True)
class Study:
    """Several runs that are read together.

    Attributes:
        folders: Their paths.
        setting: The setting that is read, in words, if several were trained; else empty.
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
    """Everything that was given to be judged, and the model that is judged.

    Attributes:
        name: The model's name.
        trainings: The trainings of all models.
        series: The measured steps of this model's trainings.
        naturals: Model → its run on text, for all models.
        variant: The index of the arm that is read, if a method has several.
        scores: The results of `benchmark`.
    """

    name: str
    trainings: tuple[Training, ...] = ()
    series: tuple[Steps, ...] = ()
    naturals: Mapping[str, RunData] = field(default_factory=dict)
    variant: int = 0
    scores: tuple[Scores, ...] = ()

    @property
    def meant(self) -> dict[str, str]:
        """Method → the variant that is read, for methods with enough variants."""
        return {
            method: known[self.variant] for method, known in variants(self.own).items() if self.variant < len(known)
        }

    @property
    def own(self) -> list[Training]:
        return [training for training in self.trainings if training.model == self.name]


class Kind(NamedTuple):
    """How studies of a kind are found, and the command that makes one; both take `Need.of`."""

    find: Callable[[Given, str], Study | None]
    command: Callable[[Given, str], str]


# --- arms


def _arms(command: str = "", task: str = "") -> Kind:
    """Arms of one command or of both, on any text or on a task."""

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
    """Choose among groups of trainings, each with what was found in it: among those with the most the one whose plain
    models end with most sinks. Also say which setting that is. `but`: settings that differ within each.
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
    """Return the command that adds arms to a folder, or repeats all of it elsewhere if it has a single seed."""
    if training.manifest["config"].get("seeds", 1) > 1:
        return training.again({"method": wanted}, training.folder)
    return training.again({"method": wanted, "seeds": SEEDS})


def _folders(trainings: Iterable[Training]) -> tuple[Path | None, ...]:
    return tuple(dict.fromkeys(training.folder for training in trainings))


# --- plain trainings that differ in one setting


def _named(of: str) -> tuple[str, str]:
    """Split a factor and the arm whose runs are read: `learning-rate` for plain trainings, or with another arm,
    `learning-rate,operation:kind=sigmoid`.
    """
    name, *arm = wanted_arms(of)
    return name, (arm or [PLAIN])[0]


def _find_factor(given: Given, of: str) -> FactorStudy | None:
    """Find the group with most levels that this model is in; among several choose as `_of_one_setting` does."""
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
    runs = sizes(given.name, given.naturals)
    return ModelStudy(tuple(run.folder for run in runs.values()), runs) if runs else None


def _find_scores(given: Given, task: str) -> ScoreStudy | None:
    """The sizes of a family that have a score on the task."""
    known = {
        str(one.manifest["model"]["name"]): (one, float(rows["score"].iloc[0]))
        for one in given.scores
        if len(rows := one.main[one.main["condition"] == task])
    }
    runs = sizes(given.name, {name: run for name, run in given.naturals.items() if name in known})
    folders = (*(run.folder for run in runs.values()), *(known[name][0].folder for name in runs))
    return ScoreStudy(folders, runs, {name: known[name][1] for name in runs}) if runs else None


def _find_base(given: Given, _: str) -> ModelStudy | None:
    runs = with_base(given.name, given.naturals)
    return ModelStudy(tuple(run.folder for run in runs.values()), runs) if runs else None


def _analyze_base(given: Given, _: str) -> str:
    """Name the base as on the hub; a file's name does not say where its base is."""
    base = base_of(given.name)
    return f"sinkscope analyze {base}" if base and "/" in base else f"sinkscope analyze BASE, its base, called {base}"


KINDS: dict[NeedKind, Kind] = {
    "arms": _arms(),  # arms:none,vga
    "retrofit": _arms("retrofit"),
    "train": _arms("train"),
    "backcopy": _arms("train", TASK),
    "factor": Kind(_find_factor, _vary),  # factor:weight-decay
    "steps": Kind(_find_steps, _analyze_steps),
    "course": Kind(_find_course, _analyze_steps),  # of the sink rate alone, which trainings log
    "sizes": Kind(_find_sizes, lambda given, _: MORE_SIZES),
    "base": Kind(_find_base, _analyze_base),
    "scores": Kind(_find_scores, lambda given, task: MORE_SCORES.format(task)),  # scores:hellaswag
}


def studies_of(given: Given, needs: Iterable[Need]) -> tuple[dict[Need, Study], dict[Need, str]]:
    """Return the studies that were found, and for each other study that is needed the command that would make it."""
    found: dict[Need, Study] = {}
    commands: dict[Need, str] = {}
    for need in dict.fromkeys(need for need in needs if need.is_study):
        study = KINDS[need.kind].find(given, need.of) if given.variant == 0 or _has_variants(need) else None
        if study is None:
            commands[need] = KINDS[need.kind].command(given, need.of)
        else:
            found[need] = study
    return found, commands


def _has_variants(need: Need) -> bool:
    """Whether a study has methods of which any parameters are wanted."""
    typed = wanted_arms(need.of) if need.kind in ARMS else []
    return any(":" not in arm and arm not in (PLAIN, UNTOUCHED) for arm in typed)
