"""Studies: several runs that a claim reads together, such as the arms or steps of a training.

Each is searched for among all given folders; if it is missing, the command that makes it is named. Arms and
steps belong to trainings with the same settings; if several settings were trained, claims read one and name it.
"""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from sinkscope.options.option import flag
from sinkscope.options.register import options_by_command
from sinkscope.options.spec import parse_spec
from sinkscope.results.run import RunData
from sinkscope.results.scores import SCORE_TABLE, main_scores
from sinkscope.results.trainings import HELD_OUT, LOGGED, UNTOUCHED, courses, sinking_layer, tokens_a_step
from sinkscope.retrofits import make_retrofit

if TYPE_CHECKING:  # claims are listed also without the folder of steps
    from sinkscope.commands.steps.series import Series

# --- trainings, their arms and their steps

PLAIN = "none"  # the method of a plain training or fine-tune
# options that do not affect results, and options in which repetitions differ
UNCOMPARED_OPTIONS = {"config", "device_map", "log_every", "method", "observables", "save_every", "seed", "seeds"}
START_PARAMETERS = {"deviation"}  # parameters of methods that affect only the start of a training


@dataclass(frozen=True)
class Training:
    manifest: Mapping[str, Any]
    runs: Mapping[str, RunData] = field(repr=False)  # arm → its run on held-out text
    tables: Mapping[str, pd.DataFrame] = field(repr=False)  # `training` and `retrofit`, of all arms
    folder: Path | None = None

    @property
    def command(self) -> str:
        return self.manifest["command"]

    @property
    def model(self) -> str:
        """The name of the model; for `train`, the name of the configuration."""
        return next(iter(self.runs.values())).model

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that affect its numbers, except methods and seeds: equal settings are repetitions."""
        options = {name: value for name, value in self.manifest["config"].items() if name not in UNCOMPARED_OPTIONS}
        shape = {name: value for name, value in self.manifest.get("architecture", {}).items() if "version" not in name}
        return {"command": self.command, "processes": self.manifest.get("processes", 1), **options, **shape}

    @cached_property
    def courses(self) -> dict[tuple[str, str], dict[tuple[str, int], pd.DataFrame]]:
        """The loss and the sink rate by step of each arm and seed, for both pairs of their metrics."""
        return {names: courses(self.tables["training"], names) for names in (HELD_OUT, LOGGED)}

    @cached_property
    def arms(self) -> tuple["StudyArm", ...]:
        return tuple(
            StudyArm(self, record["label"], record["seed"], self.runs[name], record["method"], record["parameters"])
            for name, record in self.manifest["arms"].items()
            if name in self.runs
        )

    @cached_property
    def metrics(self) -> dict[Any, float]:
        """(label of an arm, seed, metric) → the value in the table `retrofit`."""
        keys = ["condition", "seed", "metric"]
        return self.tables["retrofit"].drop_duplicates(keys).set_index(keys)["value"].to_dict()

    @cached_property
    def sinking_layer(self) -> int:
        """The layer in which the plain arm attends most to <s>."""
        label = next(arm.label for arm in self.arms if arm.method == PLAIN)
        table = self.tables["training"]
        return sinking_layer(table[table["condition"] == label])

    def again(self, changed: Mapping[str, Any], into: Path | None = None) -> str:
        """Return the command that repeats the training with some options changed."""
        kind = options_by_command()[self.command]
        default = kind().model_dump(mode="json")
        options = {name: value for name, value in self.manifest["config"].items() if value != default.get(name)}
        options = {name: value for name, value in (options | dict(changed)).items() if name in kind.model_fields}
        words = ["sinkscope", self.command]
        for name, value in (options if into is None else options | {"out": str(into)}).items():
            if value is None or value is False:
                continue
            if name not in kind.arguments:
                words.append(flag(name))
            if value is not True:
                words.append(shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value)))
        return " ".join(words)


@dataclass(frozen=True)
class StudyArm:
    training: Training = field(repr=False)
    label: str
    seed: int
    run: RunData = field(repr=False)  # on held-out text
    method: str = UNTOUCHED  # as `sinkscope list retrofits` names it
    parameters: Mapping[str, Any] = field(default_factory=dict)  # parameters that were set

    @cached_property
    def variant(self) -> str:
        """The parameters of the method, with defaults for those that were not set."""
        return make_retrofit(self.method, self.parameters).model_dump_json()

    def metric(self, name: str) -> float:
        """Return a metric of the model from the table `retrofit`, or else from the run; NaN if both lack it."""
        value = self.training.metrics.get((self.label, self.seed, name))
        return self.run.metric(name) if value is None else float(value)

    def by_step(self, metric: str, layer: int = -1) -> pd.Series:
        table = self.training.tables["training"]
        rows = table[(table["condition"] == self.label) & (table["seed"] == self.seed)]
        rows = rows[(rows["metric"] == metric) & (rows["layer"] == layer)]
        return rows.set_index("step")["value"].sort_index()

    def is_wanted(self, typed: str, variant_of: Mapping[str, str]) -> bool:
        """Return whether a claim refers to this arm; parameters for the start of a training are ignored.

        All parameters that `typed` lacks must have their defaults; if it has none, `variant_of` has the method's.
        """
        if typed == self.method != PLAIN:
            return variant_of.get(typed) == self.variant
        return is_variant(typed, self.method, self.parameters)


def is_variant(typed: str, method: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a method with parameters is one that a claim reads; without parameters a claim reads all."""
    named, asked = parse_spec(typed, "--method")
    if named != method or not asked:
        return named == method
    ours, theirs = (make_retrofit(method, each).model_dump(exclude=START_PARAMETERS) for each in (parameters, asked))
    return ours == theirs


def variants(trainings: Iterable[Training]) -> dict[str, list[str]]:
    """Return method → the variants of its arms, in order, except for plain training, which has no variants."""
    by_method: dict[str, dict[str, None]] = {}
    for arm in (arm for training in trainings for arm in training.arms if arm.method != PLAIN):
        by_method.setdefault(arm.method, {})[arm.variant] = None
    return {method: list(known) for method, known in by_method.items()}


def split_arms(text: str) -> list[str]:
    """Split a list of arms such as `none,key-bias:value=axis,norm=5` before each name of a method."""
    return re.split(r",(?![^,:]*=)", text)


def arms_by_seed(
    trainings: Iterable[Training], wanted: Collection[str], variant_of: Mapping[str, str] | None = None
) -> list[dict[str, StudyArm]]:
    """Return method → arm for each seed that has all wanted arms, from a single folder if it has all of them."""
    # `wanted` may include "untouched", the model from which all arms of a `retrofit` began
    of_one_folder: dict[int, dict[str, StudyArm]] = {}
    of_several: dict[int, dict[str, StudyArm]] = {}
    for training in trainings:
        by_seed: dict[int, dict[str, StudyArm]] = {}
        for arm, typed in product(training.arms, wanted):
            if arm.is_wanted(typed, variant_of or {}):
                by_seed.setdefault(arm.seed, {}).setdefault(typed, arm)
        for seed, arms in by_seed.items():
            if UNTOUCHED in training.runs:
                arms[UNTOUCHED] = StudyArm(training, UNTOUCHED, seed, training.runs[UNTOUCHED])
            if set(wanted) <= arms.keys():
                of_one_folder.setdefault(seed, arms)
            of_several[seed] = arms | of_several.get(seed, {})
    complete = {seed: arms for seed, arms in of_several.items() if set(wanted) <= arms.keys()} | of_one_folder
    return [complete[seed] for seed in sorted(complete)]


# --- studies

Level = float | str
SEEDS = 3  # in suggested commands, because two seeds give a very wide interval
FEWEST_SIZES = 4  # a rank correlation over fewer has no interval


@dataclass(frozen=True)
class ClaimStudy:
    """Several runs that are read together. Each kind of study fills its own fields."""

    folders: tuple[Path | None, ...]
    setting: str = ""  # the setting that is read, in words, if there are several
    by_seed: tuple[Mapping[str, StudyArm], ...] = ()  # arms of trainings with the same settings, by seed and method
    by_level: Mapping[Level, Mapping[int, RunData]] = field(default_factory=dict)  # level of a factor → seed → run
    steps: tuple[Mapping[int, RunData], ...] = ()  # for each training of a model: step → run
    logged: tuple[Mapping[int, float], ...] = ()  # for each seed of a training: step → sink rate in percent, as logged
    runs: Mapping[str, RunData] = field(default_factory=dict)  # related models: name → run on text
    scores: Mapping[str, float] = field(default_factory=dict)  # name → score on a task


@dataclass(frozen=True)
class StudySources:
    """All data among which the studies of one model are searched for."""

    name: str  # name of the model
    trainings: tuple[Training, ...] = ()  # trainings of all models
    series: "tuple[Series, ...]" = ()  # the measured steps of this model's trainings
    naturals: Mapping[str, RunData] = field(default_factory=dict)  # model → its run on text, for all models
    variant: int = 0  # the index of the arm to read, if a method has several
    scores: tuple[RunData, ...] = ()

    def of_model(self, command: str = "", text: str = "") -> list[Training]:
        """Return the model's trainings by a command and on a text; "" for any."""
        by_command = [each for each in self.trainings if each.model == self.name and command in ("", each.command)]
        return [each for each in by_command if text in ("", each.settings["text"])]


Items = TypeVar("Items", bound=Sized)


def _group_by_settings(
    trainings: Iterable[Training], but: Iterable[str] = (), fixed: Callable[[Training], Any] = lambda training: None
) -> list[list[Training]]:
    """Group trainings by their settings, except for the settings in `but`, and by a further value."""
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        settings = {name: value for name, value in training.settings.items() if name not in but}
        groups.setdefault(json.dumps([settings, fixed(training)], sort_keys=True), []).append(training)
    return list(groups.values())


def _with_most(
    groups: Iterable[tuple[list[Training], Items]], but: Iterable[str] = ()
) -> tuple[list[Training], Items, str] | None:
    """Return the group with the most items, these items, and in words its setting; "" if there is only one.

    Among several, it is the group whose plain models end with the most sinks, because effects on sinks are visible only
    if there are some. Fine-tuned models had their sinks before: for them it is the first group.
    """
    groups = [(group, items) for group, items in groups if len(items)]
    if not groups:
        return None
    most = max(len(items) for _, items in groups)
    groups = [(group, items) for group, items in groups if len(items) == most]
    if len(groups) == 1:
        return *groups[0], ""
    sinks = []  # mean sink rate of plain models trained from random weights; 0 if it was not measured
    for group, _ in groups:
        arms = (arm for training in group if training.command == "train" for arm in training.arms)
        rates = [arm.metric("sink_rate") for arm in arms if arm.method == PLAIN]
        sinks.append(float(np.nan_to_num(np.mean(rates or 0.0))))
    group, items = groups[int(np.argmax(sinks))]
    alike = [index for index, (others, _) in enumerate(groups) if others[0].command == group[0].command]
    settings = [groups[index][0][0].settings for index in alike]
    if len(settings) == 1:
        return group, items, ""
    differing: dict[tuple[str, ...], str] = {}  # settings that differ in the same way are named once
    for name in dict.fromkeys(name for each in settings for name in each if name not in but):
        values = tuple(str(each.get(name)) for each in settings)
        if len(set(values)) > 1:
            differing.setdefault(values, f"{name}={group[0].settings.get(name)}")
    percent = ", ".join(f"{100 * sinks[index]:.1f}" for index in alike)
    which = f"the one with most plain sinks: {percent} %" if group[0].command == "train" else "the first"
    return group, items, f"{', '.join(differing.values())}, of {len(settings)} settings {which}"


def _folders(trainings: Iterable[Training]) -> tuple[Path | None, ...]:
    return tuple(dict.fromkeys(training.folder for training in trainings))


# --- arms of trainings


def find_arms(sources: StudySources, of: str, command: str = "", text: str = "") -> ClaimStudy | None:
    """Find arms such as `none,vga` of trainings by a command and on a text; "" for any."""
    wanted, trainings = split_arms(of), sources.of_model(command, text)
    known = variants(sources.of_model()).items()
    variant_of = {method: kinds[sources.variant] for method, kinds in known if sources.variant < len(kinds)}
    chosen = _with_most((group, arms_by_seed(group, wanted, variant_of)) for group in _group_by_settings(trainings))
    if chosen is None:
        return None
    _, by_seed, setting = chosen
    folders = _folders(arms[method].training for arms in by_seed for method in wanted)
    return ClaimStudy(folders, setting, by_seed=tuple(by_seed))


def train_arms(sources: StudySources, of: str, command: str = "", text: str = "") -> str:
    """Return the command that adds the arms to a folder, or that repeats the training if it has a single seed."""
    methods = ",".join(method for method in split_arms(of) if method != UNTOUCHED)
    if known := sources.of_model(command, text):
        if known[0].manifest["config"].get("seeds", 1) > 1:
            return known[0].again({"method": methods}, known[0].folder)
        return known[0].again({"method": methods, "seeds": SEEDS})
    words = "sinkscope train" if command == "train" else "sinkscope retrofit {model}"
    return f"sinkscope run {text}" if text else f"{words} --method {methods} --seeds {SEEDS}"


# --- plain trainings that differ in one setting


class Factor(NamedTuple):
    settings: tuple[str, ...]  # entries of `Training.settings` that may differ; the first that is set is the level
    options: str  # options to give to `train`, as typed
    level: Callable[[Training], Level | None] | None = None  # for other levels; returns None if not recorded
    fixed: Callable[[Training], Any] = lambda training: None  # a further value that has to be equal


def _tokens(training: Training) -> Level | None:
    blocks = training.manifest.get("text_blocks")
    return None if blocks is None else blocks * training.settings["block_length"]


IN_A_CONFIG = "--config config.json, several that differ in"
RATES = ("learning_rate", "new_learning_rate")  # the second is for methods, and a plain training does not use it
FACTORS = {
    "learning-rate": Factor(RATES, "--learning-rate R, with several R"),
    "learning-rate-and-steps": Factor(
        (*RATES, "steps", "warmup"),  # a share of the steps, which differs if all warm up equally long
        "--learning-rate R --steps N, with several R and the same R × N",
        fixed=lambda training: float(f"{training.settings['learning_rate'] * training.settings['steps']:.6g}")),
    "batch-size": Factor(("batch_size", "accumulation", "processes"), "--batch-size N, with several N",
        lambda training: tokens_a_step(training.settings, training.settings["processes"])),
    "data": Factor(("tokens",), "--tokens N, with a small N and a large one", _tokens),
    "random-tokens": Factor(("random_tokens",), "--random-tokens N, with N = 0, 1 and 2"),
    "fixed-position": Factor(("fixed_position",), "--fixed-position K, with K = 0, 1 and 2"),
    "positions": Factor(("position_scheme",), "--config llama-60m:position_scheme=S, with S = none, absolute, learned, "
        "relative, alibi and rotary"),
    "weight-decay": Factor(("weight_decay",), "--weight-decay W, with W = 0, others from 0.1 to 2, and 5"),
    "window": Factor(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        f"{IN_A_CONFIG} sliding_window",
        lambda training: training.settings.get("sliding_window") or inf),  # ∞: all earlier tokens are seen
    "optimizer": Factor(("optimizer",), "--optimizer O, with adamw and muon"),
    "feed-forward": Factor(("feed_forward", "hidden_act", "activation_function"), f"{IN_A_CONFIG} hidden_act"),
    "heads": Factor(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"),
        f"{IN_A_CONFIG} num_attention_heads",
        lambda training: training.settings.get("num_attention_heads") or training.settings.get("n_head")),
}  # fmt: skip


def _factor_and_arm(of: str) -> tuple[Factor, str]:
    """Parse «learning-rate» (of plain trainings) or «learning-rate,operation:kind=sigmoid» (of another arm)."""
    name, *arm = split_arms(of)
    return FACTORS[name], (arm or [PLAIN])[0]


def find_levels(sources: StudySources, of: str) -> ClaimStudy | None:
    """Find trainings that differ in a factor, by its level."""
    factor, arm = _factor_and_arm(of)
    fresh = [training for training in sources.trainings if training.command == "train"]
    groups = []
    for group in _group_by_settings(fresh, factor.settings, factor.fixed):
        by_level: dict[Level, dict[int, RunData]] = {}
        for training in group:
            runs = {arms[arm].seed: arms[arm].run for arms in arms_by_seed([training], [arm])}
            known = (training.settings.get(name) for name in factor.settings)
            level = factor.level(training) if factor.level else next((x for x in known if x is not None), None)
            if runs and level is not None:
                by_level[level] = runs | by_level.get(level, {})
        if len(by_level) > 1 and sources.name in {training.model for training in group}:
            groups.append((group, {level: by_level[level] for level in sorted(by_level)}))
    if (chosen := _with_most(groups, factor.settings)) is None:
        return None
    group, levels, setting = chosen
    return ClaimStudy(_folders(group), setting, by_level=levels)


def vary(sources: StudySources, of: str) -> str:
    """Return the command that trains other levels of a factor."""
    factor, arm = _factor_and_arm(of)
    if not (fresh := sources.of_model("train")):
        return f"sinkscope train --method {arm} --seeds {SEEDS} {factor.options}"
    config = {"config": None} if "--config" in factor.options else {}
    changed = {"method": arm, "seeds": SEEDS} | config | dict.fromkeys(factor.settings)
    return f"{fresh[0].again(changed)} {factor.options}"


# --- steps


def find_steps(sources: StudySources, of: str, logged: bool = False) -> ClaimStudy | None:
    """Find measured steps; without them, if `logged` rates suffice, the logs of trainings from random weights."""
    if sources.series:
        folders = tuple(series.folder for series in sources.series)
        return ClaimStudy(folders, steps=tuple(series.runs for series in sources.series))
    groups = ((group, arms_by_seed(group, [PLAIN])) for group in _group_by_settings(sources.of_model("train")))
    if not logged or (chosen := _with_most(groups)) is None:
        return None
    arms = [by_method[PLAIN] for by_method in chosen[1]]
    rates = tuple((100 * course).to_dict() for arm in arms if len(course := arm.by_step("sink_rate")))
    return ClaimStudy(_folders(arm.training for arm in arms), chosen[2], logged=rates) if rates else None


def measure_steps(sources: StudySources, of: str, logged: bool = False) -> str:
    """Return the command that measures the checkpoints of a plain training."""
    fresh = sources.of_model("train")
    plain = [arms[PLAIN].run.folder for training in fresh for arms in arms_by_seed([training], [PLAIN])]
    if plain and plain[0] is not None:
        return f"sinkscope analyze {plain[0].parent / 'checkpoints'}, and so on for the other seeds"
    return "sinkscope analyze {model} --revision STEP,STEP,…"


# --- related models

_SIZE = re.compile(r"(?<![a-z0-9])\d+(\.\d+)?[mbk](?![a-z0-9])", re.IGNORECASE)
_SIZE_IN_WORDS = re.compile(r"[-_](small|medium|large|xl)(?=$|[-_.])", re.IGNORECASE)
_CHAT = re.compile(r"[-_](chat|instruct|it|sft|dpo)(?=$|[-_.])", re.IGNORECASE)


def base_of(name: str) -> str | None:
    """Return the name of the base of a chat model; None if the name does not say that the model was tuned."""
    return _CHAT.sub("", name) if _CHAT.search(name) else None


def parameters(run: RunData) -> int:
    return int(run.manifest["model"]["parameters"])


def _measured_alike(first: RunData, second: RunData) -> bool:
    configs = first.manifest["config"], second.manifest["config"]
    return all(configs[0].get(key) == configs[1].get(key) for key in ("seq_len", "window", "epsilon"))


def find_sizes(sources: StudySources, of: str, scored: bool = False) -> ClaimStudy | None:
    """Find the models of a family that were measured alike, by size; if `scored`, those with a score on the task."""
    scores = {}
    for run in sources.scores if scored else ():
        for score in main_scores(run.tables[SCORE_TABLE]).query("condition == @of")["score"].head(1):
            scores[str(run.manifest["model"]["name"])] = (run.folder, float(score))
    known = {name: run for name, run in sources.naturals.items() if not scored or name in scores}
    if sources.name not in known:
        return None

    def family_of(name: str) -> str:
        return _SIZE_IN_WORDS.sub("", _SIZE.sub("…", name))

    alike = [name for name in known if family_of(name) == family_of(sources.name)]
    alike = [name for name in alike if _measured_alike(known[name], known[sources.name])]
    sizes = [(parameters(known[name]), name) for name in alike if known[name].manifest["model"].get("parameters")]
    if len({count for count, _ in sizes}) < FEWEST_SIZES:
        return None
    runs = {name: known[name] for _, name in sorted(sizes, key=itemgetter(0))}
    folders = (*(run.folder for run in runs.values()), *(scores[name][0] for name in runs if name in scores))
    return ClaimStudy(folders, runs=runs, scores={name: scores[name][1] for name in runs if name in scores})


def measure_sizes(sources: StudySources, of: str, scored: bool = False) -> str:
    """Return the command that judges several sizes."""
    folders = "--from RUN … --from SCORES" if scored else "--from RUN --from RUN"
    scores = f" and the results of sinkscope benchmark --tasks {of} for each" if scored else ""
    return f"sinkscope claims {folders} …, with runs of {FEWEST_SIZES} or more sizes of its family{scores}"


def find_base(sources: StudySources, of: str) -> ClaimStudy | None:
    """Find the base of a chat model and the chat model, in this order, if both were measured alike."""
    names = (base_of(sources.name) or "", sources.name)
    runs = {name: sources.naturals[name] for name in names if name in sources.naturals}
    if len(runs) < 2 or not _measured_alike(*runs.values()):
        return None
    return ClaimStudy(tuple(run.folder for run in runs.values()), runs=runs)


def analyze_base(sources: StudySources, of: str) -> str:
    """Return the command that measures the base of a chat model."""
    base = base_of(sources.name)
    is_on_the_hub = base and "/" in base  # the name of a file does not give the path of its base
    return f"sinkscope analyze {base}" if is_on_the_hub else f"sinkscope analyze BASE, its base model {base}"
