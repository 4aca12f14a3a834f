"""What `retrofit`, `train` and `analyze` over steps left, as claims read it, and what of it can be compared."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.options.option import Options, flag
from sinkscope.options.training import RetrofitOptions, TrainOptions
from sinkscope.report.retrofit_table import UNTOUCHED
from sinkscope.results.run import RunData

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

    def labels(self, method: str) -> list[str]:
        """What its arms of a method are called, in their order: several where its parameters differ."""
        arms = self.manifest["arms"]
        own = (arms[arm] for arm in self.runs if arm in arms)
        return list(dict.fromkeys(arm["label"] for arm in own if arm["method"] == method))

    @property
    def methods(self) -> list[str]:
        arms = self.manifest["arms"]
        return list(dict.fromkeys(arms[arm]["method"] for arm in self.runs if arm in arms))

    def arms(self, label: str) -> dict[int, "Arm"]:
        """Seed → the arm that is called so."""
        return {
            record["seed"]: Arm(self, label, record["seed"], self.runs[arm], record["method"], record["parameters"])
            for arm, record in self.manifest["arms"].items()
            if arm in self.runs and record["label"] == label
        }

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
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
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


def arms_by_seed(trainings: Iterable[Training], methods: Iterable[str], variant: int = 0) -> list[dict[str, Arm]]:
    """For each seed that has all these methods, its arms by method; of each seed those of one folder.

    Args:
        trainings: With the same settings.
        methods: As the folders name them, and "untouched": the model that all arms of a `retrofit` began from.
        variant: Which arm of a method that there are several of, in their order; of plain training always the first.
    """
    found: dict[int, dict[str, Arm]] = {}
    for training in trainings:
        arms = {method: _arms_of(training, method, variant) for method in [*training.methods, UNTOUCHED]}
        for seed in {record["seed"] for record in training.manifest["arms"].values()}:
            mine = {method: by_seed[seed] for method, by_seed in arms.items() if seed in by_seed}
            if set(methods) <= mine.keys():
                found.setdefault(seed, mine)
    return [found[seed] for seed in sorted(found)]


def _arms_of(training: Training, method: str, variant: int) -> dict[int, Arm]:
    if method == UNTOUCHED:
        run = training.runs.get(UNTOUCHED)
        seeds = {record["seed"] for record in training.manifest["arms"].values()}
        return {} if run is None else {seed: Arm(training, UNTOUCHED, seed, run) for seed in seeds}
    labels = training.labels(method)
    chosen = 0 if method == PLAIN else variant
    return training.arms(labels[chosen]) if chosen < len(labels) else {}
