"""Needs of claims, and studies: several runs that a claim reads together, such as the arms or steps of a training.

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
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import pandas as pd

from sinkscope.options.option import flag
from sinkscope.options.register import options_by_command
from sinkscope.options.spec import parse_spec
from sinkscope.results.run import RunData
from sinkscope.results.scores import TABLE as SCORES
from sinkscope.results.scores import main_scores
from sinkscope.results.trainings import HELD_OUT, LOGGED, UNTOUCHED, courses, sinking_layer, tokens_a_step
from sinkscope.retrofits import make_retrofit

# --- needs of claims: a run of the model, or a study

Analysis = Literal["natural", "null", "with-bos", "without-bos", "length", "domain", "states"]
Controlled = Literal["do", "loss-do", "gradient-do", "mixing-do", "repeated-do"]  # interventions with random controls
Alone = Literal["loss-do-alone", "gradient-do-alone"]  # interventions without random controls
Arms = Literal["arms", "retrofit", "train", "backcopy"]  # arms of trainings, over seeds
OtherStudy = Literal["factor", "steps", "course", "sizes", "base", "scores"]
Kind = Analysis | Controlled | Alone | Literal["streaming"] | Arms | OtherStudy

ARMS, STUDIES = get_args(Arms), (*get_args(Arms), *get_args(OtherStudy))
OF_STATES = ("attention", "massive", "entropy", "sink-tokens", "residual-sinks")  # observables of "states"
CONTROLLED, ALONE = get_args(Controlled), get_args(Alone)


@dataclass(frozen=True)
class Need:
    kind: Kind  # how it is measured or found (`KINDS` in `evidence.py` and `studies.py`)
    of: str = ""  # the intervention, input, number of tokens, draw, methods or factor; "" for a kind without a choice

    @property
    def name(self) -> str:
        """The name of the role in run.json; in the name of a folder, the colon becomes a hyphen."""
        return f"{self.kind}:{self.of}" if self.of else self.kind

    @property
    def is_study(self) -> bool:
        return self.kind in STUDIES

    @property
    def has_controls(self) -> bool:
        return self.kind in CONTROLLED

    @property
    def is_intervention(self) -> bool:
        return self.kind in (*CONTROLLED, *ALONE)


# --- trainings, their arms and their steps

PLAIN = "none"  # the method of a plain training or fine-tune
# options that do not affect results, and options in which repetitions differ
IGNORED_OPTIONS = {"config", "device_map", "log_every", "method", "observables", "save_every", "seed", "seeds"}
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
        options = {name: value for name, value in self.manifest["config"].items() if name not in IGNORED_OPTIONS}
        shape = {name: value for name, value in self.manifest.get("architecture", {}).items() if "version" not in name}
        return {"command": self.command, "processes": self.manifest.get("processes", 1), **options, **shape}

    @cached_property
    def courses(self) -> dict[tuple[str, str], dict[tuple[str, int], pd.DataFrame]]:
        """The loss and the sink rate by step of each arm and seed, for both pairs of their metrics."""
        return {names: courses(self.tables["training"], names) for names in (HELD_OUT, LOGGED)}

    @cached_property
    def arms(self) -> tuple["Arm", ...]:
        return tuple(
            Arm(self, record["label"], record["seed"], self.runs[name], record["method"], record["parameters"])
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
        given = {name: value for name, value in self.manifest["config"].items() if value != default.get(name)}
        given = {name: value for name, value in (given | dict(changed)).items() if name in kind.model_fields}
        words = ["sinkscope", self.command]
        for name, value in (given if into is None else given | {"out": str(into)}).items():
            if value is None or value is False:
                continue
            if name not in kind.arguments:
                words.append(flag(name))
            if value is not True:
                words.append(shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value)))
        return " ".join(words)


@dataclass(frozen=True)
class Arm:
    training: Training = field(repr=False)
    label: str
    seed: int
    run: RunData = field(repr=False)  # on held-out text
    method: str = UNTOUCHED  # as `sinkscope list retrofits` names it
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the given parameters

    @cached_property
    def variant(self) -> str:
        """The parameters of the method, with defaults for parameters that were not given."""
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

    def is_wanted(self, typed: str, meant: Mapping[str, str]) -> bool:
        """Return whether a claim refers to this arm; parameters for the start of a training are ignored.

        All parameters that `typed` lacks must have their defaults; if it has none, `meant` gives the method's variant.
        """
        method, parameters = parse_spec(typed, "--method")
        if self.method != method:
            return False
        if not parameters:
            return method == PLAIN or meant.get(method) == self.variant
        own, asked = (make_retrofit(method, given) for given in (self.parameters, parameters))
        return own.model_dump(exclude=START_PARAMETERS) == asked.model_dump(exclude=START_PARAMETERS)


@dataclass(frozen=True)
class Steps:
    """The folder of an `analyze` over steps, which has a run for each step of a training."""

    manifest: Mapping[str, Any]
    runs: Mapping[int, RunData] = field(repr=False)  # step → its run, in order
    folder: Path | None = None

    @property
    def of(self) -> Path:
        return Path(self.manifest["config"]["model"])


def variants(trainings: Iterable[Training]) -> dict[str, list[str]]:
    """Return method → the variants of its arms, in order, except for plain training, which has no variants."""
    found: dict[str, dict[str, None]] = {}
    for arm in (arm for training in trainings for arm in training.arms if arm.method != PLAIN):
        found.setdefault(arm.method, {})[arm.variant] = None
    return {method: list(known) for method, known in found.items()}


def wanted_arms(text: str) -> list[str]:
    """Split a list of arms such as `none,key-bias:value=axis,norm=5` before each name of a method."""
    return re.split(r",(?![^,:]*=)", text)


def arms_by_seed(
    trainings: Iterable[Training], wanted: Collection[str], meant: Mapping[str, str] | None = None
) -> list[dict[str, Arm]]:
    """Return method → arm for each seed that has all wanted arms, from a single folder if it has all of them."""
    # `wanted` may include "untouched", the model from which all arms of a `retrofit` began
    of_one_folder: dict[int, dict[str, Arm]] = {}
    of_several: dict[int, dict[str, Arm]] = {}
    for training in trainings:
        by_seed: dict[int, dict[str, Arm]] = {}
        for arm, typed in product(training.arms, wanted):
            if arm.is_wanted(typed, meant or {}):
                by_seed.setdefault(arm.seed, {}).setdefault(typed, arm)
        for seed, arms in by_seed.items():
            if UNTOUCHED in training.runs:
                arms[UNTOUCHED] = Arm(training, UNTOUCHED, seed, training.runs[UNTOUCHED])
            if set(wanted) <= arms.keys():
                of_one_folder.setdefault(seed, arms)
            of_several[seed] = arms | of_several.get(seed, {})
    complete = {seed: arms for seed, arms in of_several.items() if set(wanted) <= arms.keys()} | of_one_folder
    return [complete[seed] for seed in sorted(complete)]


# --- settings in which plain trainings differ

Level = float | str


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
        (*RATES, "steps"), "--learning-rate R --steps N, with several R and the same R × N",
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
    "feed-forward": Factor(("feed_forward", "hidden_act", "activation_function"), f"{IN_A_CONFIG} hidden_act"),
    "heads": Factor(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"),
        f"{IN_A_CONFIG} num_attention_heads",
        lambda training: training.settings.get("num_attention_heads") or training.settings.get("n_head")),
}  # fmt: skip


# --- studies

SEEDS = 3  # in suggested commands, because two seeds give a very wide interval
TASK = "bigram-backcopy"
FEWEST = 4  # number of sizes: a rank correlation over fewer has no interval


@dataclass(frozen=True)
class Study:
    """Several runs that are read together. Each kind of study fills its own fields."""

    folders: tuple[Path | None, ...]
    setting: str = ""  # the setting that is read, in words, if there are several
    by_seed: tuple[Mapping[str, Arm], ...] = ()  # arms of trainings with the same settings, for each seed by method
    by_level: Mapping[Level, Mapping[int, RunData]] = field(default_factory=dict)  # level of a factor → seed → run
    steps: tuple[Mapping[int, RunData], ...] = ()  # for each training of a model: step → run
    logged: tuple[Mapping[int, float], ...] = ()  # for each seed of a training: step → sink rate in percent, as logged
    runs: Mapping[str, RunData] = field(default_factory=dict)  # related models: name → run on text
    scores: Mapping[str, float] = field(default_factory=dict)  # name → score on a task


@dataclass(frozen=True)
class Given:
    name: str
    trainings: tuple[Training, ...] = ()  # of all models
    series: tuple[Steps, ...] = ()  # the measured steps of this model's trainings
    naturals: Mapping[str, RunData] = field(default_factory=dict)  # model → its run on text, for all models
    variant: int = 0  # the index of the arm to read, if a method has several
    scores: tuple[RunData, ...] = ()

    @property
    def own(self) -> list[Training]:
        return [training for training in self.trainings if training.model == self.name]

    @property
    def own_fresh(self) -> list[Training]:
        return [training for training in self.own if training.command == "train"]


Found = TypeVar("Found", bound=Sized)


def _alike(
    trainings: Iterable[Training], but: Iterable[str] = (), fixed: Callable[[Training], Any] = lambda training: None
) -> list[list[Training]]:
    """Group trainings by their settings, except for the settings in `but`, and by a further value."""
    found: dict[str, list[Training]] = {}
    for training in trainings:
        settings = {name: value for name, value in training.settings.items() if name not in but}
        found.setdefault(json.dumps([settings, fixed(training)], sort_keys=True), []).append(training)
    return list(found.values())


def _with_most(
    groups: Iterable[tuple[list[Training], Found]], but: Iterable[str] = ()
) -> tuple[list[Training], Found, str] | None:
    """Return the group with the most items, these items, and in words its setting; "" if there is only one.

    Among several, it is the group whose plain models end with the most sinks, because effects on sinks are visible only
    if there are some. Fine-tuned models had their sinks before: for them it is the first group.
    """
    found = [(group, own) for group, own in groups if len(own)]
    if not found:
        return None
    most = max(len(own) for _, own in found)
    found = [(group, own) for group, own in found if len(own) == most]
    if len(found) == 1:
        return *found[0], ""
    sinks = [_plain_sinks(group) for group, _ in found]
    group, own = found[int(np.argmax(sinks))]
    same = [at for at, (others, _) in enumerate(found) if others[0].command == group[0].command]
    settings = [found[at][0][0].settings for at in same]
    if len(settings) == 1:
        return group, own, ""
    differing: dict[tuple[str, ...], str] = {}  # settings that differ in the same way are named once
    for name in dict.fromkeys(name for each in settings for name in each if name not in but):
        values = tuple(str(each.get(name)) for each in settings)
        if len(set(values)) > 1:
            differing.setdefault(values, f"{name}={group[0].settings.get(name)}")
    rates = ", ".join(f"{100 * sinks[at]:.1f}" for at in same)
    which = f"the one with most plain sinks: {rates} %" if group[0].command == "train" else "the first"
    return group, own, f"{', '.join(differing.values())}, of {len(settings)} settings {which}"


def _plain_sinks(trainings: Iterable[Training]) -> float:
    """Return the mean sink rate of plain models trained from random weights; 0 if it was not measured."""
    arms = (arm for training in trainings if training.command == "train" for arm in training.arms)
    return float(np.nan_to_num(np.mean([arm.metric("sink_rate") for arm in arms if arm.method == PLAIN] or 0.0)))


def _folders(trainings: Iterable[Training]) -> tuple[Path | None, ...]:
    return tuple(dict.fromkeys(training.folder for training in trainings))


# --- arms

OF_ARMS: dict[Kind, tuple[str, str]] = {  # kind → command and text of the trainings; "" for any
    "arms": ("", ""),
    "retrofit": ("retrofit", ""),
    "train": ("train", ""),
    "backcopy": ("train", TASK),
}


def _with_arms(given: Given, need: Need) -> list[Training]:
    command, text = OF_ARMS[need.kind]
    return [each for each in given.own if command in ("", each.command) and text in ("", each.settings["text"])]


def _find_arms(given: Given, need: Need) -> Study | None:
    wanted, known = wanted_arms(need.of), variants(given.own).items()
    meant = {method: kinds[given.variant] for method, kinds in known if given.variant < len(kinds)}
    found = _with_most((group, arms_by_seed(group, wanted, meant)) for group in _alike(_with_arms(given, need)))
    if found is None:
        return None
    _, by_seed, setting = found
    folders = _folders(arms[method].training for arms in by_seed for method in wanted)
    return Study(folders, setting, by_seed=tuple(by_seed))


def _train_arms(given: Given, need: Need) -> str:
    """Return the command that adds the arms to a folder, or that repeats the training if it has a single seed."""
    methods = ",".join(method for method in wanted_arms(need.of) if method != UNTOUCHED)
    if known := _with_arms(given, need):
        if known[0].manifest["config"].get("seeds", 1) > 1:
            return known[0].again({"method": methods}, known[0].folder)
        return known[0].again({"method": methods, "seeds": SEEDS})
    command, text = OF_ARMS[need.kind]
    words = "sinkscope train" if command == "train" else "sinkscope retrofit {model}"
    return f"sinkscope run {text}" if text else f"{words} --method {methods} --seeds {SEEDS}"


# --- plain trainings that differ in one setting


def _factor_and_arm(need: Need) -> tuple[Factor, str]:
    """Parse «learning-rate» (of plain trainings) or «learning-rate,operation:kind=sigmoid» (of another arm)."""
    name, *arm = wanted_arms(need.of)
    return FACTORS[name], (arm or [PLAIN])[0]


def _find_factor(given: Given, need: Need) -> Study | None:
    factor, arm = _factor_and_arm(need)
    fresh = [training for training in given.trainings if training.command == "train"]
    groups = []
    for group in _alike(fresh, factor.settings, factor.fixed):
        by_level: dict[Level, dict[int, RunData]] = {}
        for training in group:
            runs = {arms[arm].seed: arms[arm].run for arms in arms_by_seed([training], [arm])}
            known = (training.settings.get(name) for name in factor.settings)
            level = factor.level(training) if factor.level else next((x for x in known if x is not None), None)
            if runs and level is not None:
                by_level[level] = runs | by_level.get(level, {})
        if len(by_level) > 1 and given.name in {training.model for training in group}:
            groups.append((group, {level: by_level[level] for level in sorted(by_level)}))
    found = _with_most(groups, factor.settings)
    if found is None:
        return None
    group, by_level, setting = found
    return Study(_folders(group), setting, by_level=by_level)


def _vary(given: Given, need: Need) -> str:
    factor, arm = _factor_and_arm(need)
    if not given.own_fresh:
        return f"sinkscope train --method {arm} --seeds {SEEDS} {factor.options}"
    config = {"config": None} if "--config" in factor.options else {}
    changed = {"method": arm, "seeds": SEEDS} | config | dict.fromkeys(factor.settings)
    return f"{given.own_fresh[0].again(changed)} {factor.options}"


# --- steps


def _find_steps(given: Given, need: Need) -> Study | None:
    """Find measured steps; for a `course` without measured steps, the logs of trainings from random weights."""
    if given.series:
        folders = tuple(series.folder for series in given.series)
        return Study(folders, steps=tuple(series.runs for series in given.series))
    groups = ((group, arms_by_seed(group, [PLAIN])) for group in _alike(given.own_fresh))
    if need.kind == "steps" or (found := _with_most(groups)) is None:
        return None
    _, by_seed, setting = found
    arms = [by_method[PLAIN] for by_method in by_seed]
    logged = tuple((100 * rates).to_dict() for arm in arms if len(rates := arm.by_step("sink_rate")))
    return Study(_folders(arm.training for arm in arms), setting, logged=logged) if logged else None


def _analyze_steps(given: Given, need: Need) -> str:
    plain = [arms[PLAIN].run.folder for training in given.own_fresh for arms in arms_by_seed([training], [PLAIN])]
    if plain and plain[0] is not None:
        return f"sinkscope analyze {plain[0].parent / 'checkpoints'}, and so on for the other seeds"
    return "sinkscope analyze {model} --revision STEP,STEP,…"


# --- related models

_SIZE = re.compile(r"(?<![a-z0-9])\d+(\.\d+)?[mbk](?![a-z0-9])", re.IGNORECASE)
_SIZE_IN_WORDS = re.compile(r"[-_](small|medium|large|xl)(?=$|[-_.])", re.IGNORECASE)
_CHAT = re.compile(r"[-_](chat|instruct|it|sft|dpo)(?=$|[-_.])", re.IGNORECASE)


def family_of(name: str) -> str:
    return _SIZE_IN_WORDS.sub("", _SIZE.sub("…", name))


def base_of(name: str) -> str | None:
    """Return the name of the base of a chat model; None if the name does not say that the model was tuned."""
    return _CHAT.sub("", name) if _CHAT.search(name) else None


def parameters(run: RunData) -> int:
    return int(run.manifest["model"]["parameters"])


def _measured_alike(first: RunData, second: RunData) -> bool:
    configs = first.manifest["config"], second.manifest["config"]
    return all(configs[0].get(key) == configs[1].get(key) for key in ("seq_len", "window", "epsilon"))


def _find_sizes(given: Given, need: Need) -> Study | None:
    """Find the models of a family that were measured alike, by increasing size; for `scores`, models with a score."""
    scores = {}
    for one in given.scores if need.kind == "scores" else ():
        for score in main_scores(one.tables[SCORES]).query("condition == @need.of")["score"].head(1):
            scores[str(one.manifest["model"]["name"])] = (one.folder, float(score))
    known = {name: run for name, run in given.naturals.items() if need.kind == "sizes" or name in scores}
    if given.name not in known:
        return None
    family = [
        (parameters(run), name)
        for name, run in known.items()
        if family_of(name) == family_of(given.name)
        and _measured_alike(run, known[given.name])
        and run.manifest["model"].get("parameters")
    ]
    if len({count for count, _ in family}) < FEWEST:
        return None
    runs = {name: known[name] for _, name in sorted(family, key=itemgetter(0))}
    folders = (*(run.folder for run in runs.values()), *(scores[name][0] for name in runs if name in scores))
    return Study(folders, runs=runs, scores={name: scores[name][1] for name in runs if name in scores})


def _find_base(given: Given, need: Need) -> Study | None:
    """Find the base of a chat model and the chat model, in this order, if both were measured alike."""
    names = (base_of(given.name) or "", given.name)
    runs = {name: given.naturals[name] for name in names if name in given.naturals}
    if len(runs) < 2 or not _measured_alike(*runs.values()):
        return None
    return Study(tuple(run.folder for run in runs.values()), runs=runs)


def _analyze_base(given: Given, need: Need) -> str:
    base = base_of(given.name)
    is_on_the_hub = base and "/" in base  # the name of a file does not give the path of its base
    return f"sinkscope analyze {base}" if is_on_the_hub else f"sinkscope analyze BASE, its base model {base}"


def _measure_sizes(given: Given, need: Need) -> str:
    words = f"with runs of {FEWEST} or more sizes of its family"
    if need.kind == "sizes":
        return f"sinkscope claims --from RUN --from RUN …, {words}"
    of_task = f"the results of sinkscope benchmark --tasks {need.of} for each"
    return f"sinkscope claims --from RUN … --from SCORES …, {words} and {of_task}"


# --- all kinds

# kind → how its studies are found, and the command that makes one
KINDS: dict[Kind, tuple[Callable[[Given, Need], Study | None], Callable[[Given, Need], str]]] = {
    **dict.fromkeys(OF_ARMS, (_find_arms, _train_arms)),  # arms:none,vga
    "factor": (_find_factor, _vary),  # factor:weight-decay
    "steps": (_find_steps, _analyze_steps),
    "course": (_find_steps, _analyze_steps),  # only the sink rate, which trainings log
    "sizes": (_find_sizes, _measure_sizes),
    "scores": (_find_sizes, _measure_sizes),  # scores:hellaswag
    "base": (_find_base, _analyze_base),
}


def studies_of(given: Given, needs: Iterable[Need]) -> tuple[dict[Need, Study], dict[Need, str]]:
    """Return the studies that were found, and for each missing study the command that makes it."""
    found: dict[Need, Study] = {}
    commands: dict[Need, str] = {}
    for need in dict.fromkeys(need for need in needs if need.is_study):
        typed = wanted_arms(need.of) if need.kind in OF_ARMS else []
        has_variants = any(":" not in arm and arm not in (PLAIN, UNTOUCHED) for arm in typed)
        find, command = KINDS[need.kind]
        if (given.variant == 0 or has_variants) and (study := find(given, need)):
            found[need] = study
        else:
            commands[need] = command(given, need)
    return found, commands
