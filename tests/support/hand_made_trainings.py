"""Folders of `retrofit`, `train` and `analyze` over steps made by hand, in which a claim's quantity is known."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.commands.claims.claim import Judgment, judge
from sinkscope.commands.claims.collection import Collection
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.studies import Training
from sinkscope.commands.steps.series import Series
from sinkscope.commands.train.options import RetrofitOptions, TrainOptions
from sinkscope.results.run import RunData
from sinkscope.results.trainings import UNTOUCHED
from support.hand_made_runs import by_sequence, manifest

SHAPE = {"model_type": "llama", "hidden_act": "silu", "num_attention_heads": 4}

Numbers = Mapping[str, Sequence[float]]  # metric → a value for each seed
Tables = Mapping[str, pd.DataFrame]


def judged(claim: str, *parts: Training | Series, name: str = "made") -> Judgment:
    trainings = tuple(part for part in parts if isinstance(part, Training))
    series = tuple(part for part in parts if isinstance(part, Series))
    return judge(CLAIMS[claim], Collection((), trainings, series).evidence({})[name])


def training(
    arms: Mapping[str, Numbers], command: str = "train", tables: Mapping[str, Sequence[Tables]] | None = None,
    courses: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] | None = None, model: str = "made",
    folder: Path | None = None, blocks: int = 100, shape: Mapping[str, Any] = SHAPE, **options: Any,
) -> Training:  # fmt: skip
    """Return one folder of a training, from methods as on the command line (or "untouched") → metrics by seed.

    `tables` has for each method and seed the tables of its run, and `courses` for each method, metric and seed the
    values by step, in layer 0 and for the whole model.
    """
    seeds = range(max(len(next(iter(numbers.values()), ())) for numbers in arms.values()))
    records, runs, rows, by_step = {}, {}, [], []
    for typed, numbers in arms.items():
        method, _, settings = typed.partition(":")
        parameters = dict(part.split("=") for part in settings.split(",") if part)
        for seed in seeds:
            name = UNTOUCHED if method == UNTOUCHED else f"{typed}-seed{seed}"
            own = (tables or {}).get(typed, [{}] * len(seeds))[seed]
            if method != UNTOUCHED:
                records[name] = {"method": method, "parameters": parameters, "label": typed, "seed": seed}
            rows += [(typed, -1, seed, metric, values[seed]) for metric, values in numbers.items()]
            path = None if folder is None else folder / name / "run"
            runs[name] = arm_run(model, name, {metric: values[seed] for metric, values in numbers.items()}, own, path)
            for metric, values in (courses or {}).get(typed, {}).items():
                by_step += [(typed, at, seed, step, metric, x) for at in (-1, 0) for step, x in enumerate(values[seed])]
    kind = {"train": TrainOptions, "retrofit": RetrofitOptions}[command]
    config = kind(**{"method": ("none",), "seeds": len(seeds)} | options).model_dump(mode="json", exclude={"method"})
    facts = {"architecture": dict(shape)} if command == "train" else {}
    return Training(
        {"command": command, "config": config, "arms": records, "processes": 1, "text_blocks": blocks, **facts},
        runs,
        {
            "retrofit": pd.DataFrame(rows, columns=["condition", "layer", "seed", "metric", "value"]),
            "training": pd.DataFrame(by_step, columns=["condition", "layer", "seed", "step", "metric", "value"]),
        },
        folder,
    )


def arm_run(
    model: str, condition: str, numbers: Mapping[str, float], tables: Tables, folder: Path | None = None
) -> RunData:
    summary = pd.DataFrame({"layer": -1, "metric": list(numbers), "value": list(numbers.values())})
    described = manifest(condition) | {"model": {"name": model, "weights": "trained", "parameters": 1000}}
    described["family"] = described["family"] | {"wiring": "sequential"}
    described["input"] = described["input"] | {"longest": 64}
    return RunData(described, {"summary": summary, **tables}, folder)


def norms(others: float = 1.0, **by_site: Sequence[float]) -> pd.DataFrame:
    """Return the table `activation`: site → norms at position 0, by layer; `others` at other positions."""
    rows = [
        (layer, site, position, norm if position == 0 else others)
        for site, by_layer in by_site.items()
        for layer, norm in enumerate(by_layer)
        for position in range(3)
    ]
    return pd.DataFrame(rows, columns=["layer", "site", "position", "norm_mean"])


def rates(at_first: float, noise: float = 0.01, later: Sequence[float] = (0.0, 0.0)) -> pd.DataFrame:
    """Return the table `attention_by_sequence`: sink rates at position 0 and later ones, the same in all layers."""
    return by_sequence({"sink_rate": [at_first, *later]}, noise=noise, position=range(1 + len(later)))


def gradients(ratio: float, groups: int = 5) -> Tables:
    """Return the tables of value gradients: at position 0 `ratio` times the later ones, plus noise by group."""
    places = [(layer, position) for layer in range(2) for position in range(16)]
    rows = [(layer, "value", -1, at, ratio if at == 0 else 1.0) for layer, at in places]
    whole = pd.DataFrame(rows, columns=["layer", "pathway", "head", "position", "grad_norm"])
    parts = [
        whole.assign(group=group, grad_norm=whole["grad_norm"] * np.where(whole["position"] == 0, 1 + 0.01 * group, 1))
        for group in range(groups)
    ]
    return {"gradient": whole, "gradient_by_group": pd.concat(parts, ignore_index=True)}


def steps(of: str, by_step: Mapping[int, Tables], folder: str, model: str = "made") -> Series:
    """Return one folder of `analyze` over steps; `of` is the name of the model on the command line."""
    runs = {step: arm_run(model, "natural", {}, tables) for step, tables in by_step.items()}
    return Series(
        {"command": "analyze_steps", "model": Path(of).name, "config": {"model": of}}, {}, Path(folder), runs=runs
    )
