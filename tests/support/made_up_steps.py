"""Checkpoints made by hand, in which value gradient, norm and sink rate have given courses."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sinkscope.results.run import RunData
from support.made_up_runs import grid

UNIFORM = 4.0  # the null of the value gradient
GROUPS, SEQUENCES = 20, 40


def sigmoid(steps: Sequence[int], onset: float, width: float = 0.1) -> np.ndarray:
    """Return a rise from 0 to 1 in log₁₀(step + 1), halfway at the step `onset`."""
    at = np.log10(np.asarray(steps) + 1.0)
    return 1 / (1 + np.exp(-(at - np.log10(onset + 1)) / width))


def by_sequence(at_step: Mapping[str, float], noise: float, random: np.random.Generator) -> dict[str, pd.DataFrame]:
    """Return the tables of one step in two layers, up to noise that differs between sequences.

    `value_gradient` and `norm` are ratios to later positions, `sink_rate` is a share.
    """
    value_gradient, norm, sink_rate = (at_step[name] for name in ("value_gradient", "norm", "sink_rate"))
    layers, positions = 2, range(16)
    draw = noise * random.normal(size=(3, layers, SEQUENCES))
    rows = grid(layer=range(layers), sequence=range(SEQUENCES))
    rates = pd.concat([rows.assign(position=at, sink_rate=0.0) for at in positions], ignore_index=True)
    rates.loc[rates["position"] == 0, "sink_rate"] = np.clip(sink_rate + draw[0], 0, 1).ravel()
    norms = rows.assign(site="layer_out", norm=(norm * np.exp(draw[1])).ravel(), norm_later=1.0)
    gradient = grid(layer=range(layers), pathway=["value"], head=[-1], position=positions)
    at_first = gradient["position"] == 0
    gradient["grad_norm"] = np.where(at_first, value_gradient, 1.0)
    of_groups = draw[2].mean(0).reshape(-1, GROUPS).mean(0)  # sequence i is in group i modulo GROUPS
    without = [
        gradient.assign(group=group, grad_norm=np.where(at_first, value_gradient * np.exp(-own / (GROUPS - 1)), 1.0))
        for group, own in enumerate(of_groups)
    ]
    return {
        "attention_by_sequence": rates,
        "activation_by_sequence": norms,
        "gradient": gradient,
        "gradient_by_group": pd.concat(without, ignore_index=True),
    }


def made_up_steps(
    steps: Sequence[int], courses: Mapping[str, np.ndarray], noise: float = 0.05, seed: int = 0
) -> list[tuple[int, RunData]]:
    """Return step, run for the courses «value_gradient», «norm» and «sink_rate»."""
    random, runs = np.random.default_rng(seed), []
    manifest = {"command": "analyze", "condition": "made up", "model": {"name": "made"},
                "input": {"sequences": SEQUENCES, "longest": 64, "sha256": "the same"}}  # fmt: skip
    for place, step in enumerate(steps):
        at_step = {name: float(course[place]) for name, course in courses.items()}
        tables = by_sequence(at_step, noise, random)
        summary = pd.DataFrame({"layer": [-1], "metric": ["uniform_gradient_ratio"], "value": [UNIFORM]})
        runs.append((step, RunData(manifest, tables | {"summary": summary})))
    return runs
