"""What `retrofit`, `train` and `analyze` over steps left, as claims read it, and what of it can be compared."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.options.option import Options, flag
from sinkscope.options.spec import parse_spec
from sinkscope.options.training import RetrofitOptions, TrainOptions
from sinkscope.report.retrofit_table import UNTOUCHED
from sinkscope.results.run import RunData
from sinkscope.retrofits import make_retrofit

PLAIN = "none"  # the method of a plain training or fine-tune
OPTIONS: dict[str, type[Options]] = {"retrofit": RetrofitOptions, "train": TrainOptions}
# options that decide no number, and those by which trainings are repeated
OF_NO_ACCOUNT = {"config", "device_map", "log_every", "method", "observables", "save_every", "seed", "seeds"}


@dataclass(frozen=True)
class Training:
    """What one `retrofit` or `train` left.

    Attributes:
        manifest: Of its folder.
        runs: Arm → its run on held-out text.
        tables: `training` and `retrofit`, of all arms.
        folder: Where it stands.
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
        """The model's name: of `train` that of the configuration."""
        return next(iter(self.runs.values())).model

    @property
    def settings(self) -> dict[str, Any]:
        """What decides its numbers, but for methods and seeds: trainings with the same settings are repetitions."""
        options = {name: value for name, value in self.manifest["config"].items() if name not in OF_NO_ACCOUNT}
        shape = {name: value for name, value in self.manifest.get("architecture", {}).items() if "version" not in name}
        return {"command": self.command, "processes": self.manifest.get("processes", 1), **options, **shape}

    @cached_property
    def arms(self) -> tuple["Arm", ...]:
        """Those that were trained and measured, in their order."""
        return tuple(
            Arm(self, record["label"], record["seed"], self.runs[name], record["method"], record["parameters"])
            for name, record in self.manifest["arms"].items()
            if name in self.runs
        )

    def again(self, changed: Mapping[str, Any], into: Path | None = None) -> str:
        """The command that trains so again, with other options."""
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
        training: That it is an arm of.
        label: What it is called.
        seed: Of its training.
        run: On held-out text.
        method: As `sinkscope list retrofits` names it.
        parameters: Of the method, those that were given.
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
        """Of the whole model, as the table `retrofit` has it, else as its run has; NaN if neither was measured."""
        rows = self._rows(self.training.tables["retrofit"])
        found = rows[rows["metric"] == name]["value"]
        return float(found.iloc[0]) if len(found) else self.run.metric(name)

    def by_step(self, metric: str, layer: int = -1) -> pd.Series:
        """Step → what was recorded in training."""
        rows = self._rows(self.training.tables["training"])
        rows = rows[(rows["metric"] == metric) & (rows["layer"] == layer)]
        return rows.set_index("step")["value"].sort_index()

    def _rows(self, table: pd.DataFrame) -> pd.DataFrame:
        return table[(table["condition"] == self.label) & (table["seed"] == self.seed)]


@dataclass(frozen=True)
class Steps:
    """What one `analyze` over steps left: a run for each step of a training.

    Attributes:
        manifest: Of its folder.
        runs: Step → its run, in their order.
        folder: Where it stands.
    """

    manifest: Mapping[str, Any]
    runs: Mapping[int, RunData] = field(repr=False)
    folder: Path | None = None

    @property
    def of(self) -> Path:
        """The model or the folder of checkpoints, as it was named."""
        return Path(self.manifest["config"]["model"])


OF_THE_START = {"deviation"}  # parameters of methods that say where a training begins, not what is trained


def alike(
    trainings: Iterable[Training], but: Iterable[str] = (), fixed: Callable[[Training], Any] = lambda training: None
) -> list[list[Training]]:
    """Trainings with the same settings together.

    Args:
        trainings: Of any models.
        but: Settings that may differ.
        fixed: What has to be the same besides.
    """
    found: dict[str, list[Training]] = {}
    for training in trainings:
        settings = {name: value for name, value in training.settings.items() if name not in but}
        found.setdefault(json.dumps([settings, fixed(training)], sort_keys=True), []).append(training)
    return list(found.values())


def variants(trainings: Iterable[Training]) -> dict[str, list[str]]:
    """Method → the variants that its arms are of, in their order; but for plain training, which has none."""
    found: dict[str, dict[str, None]] = {}
    for arm in (arm for training in trainings for arm in training.arms if arm.method != PLAIN):
        found.setdefault(arm.method, {})[arm.variant] = None
    return {method: list(known) for method, known in found.items()}


def wanted_arms(text: str) -> list[str]:
    """Arms as they are typed, `none,key-bias:value=axis,norm=5`, one by one."""
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
    return own.model_dump(exclude=OF_THE_START) == asked.model_dump(exclude=OF_THE_START)
