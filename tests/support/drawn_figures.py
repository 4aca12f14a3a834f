"""One figure of each name, drawn from small tables made by hand."""

from typing import Any

import numpy as np
import pandas as pd

from sinkscope.figures import FIGURES, OF_ARMS, OF_RUNS, OF_STEPS, OF_SWEEP, draw
from sinkscope.figures.style import Figure
from sinkscope.figures.training import Arms
from sinkscope.output.run import Run
from sinkscope.results.metrics import BACKCOPY
from sinkscope.verdict.factor_study import TABLE as STUDIED
from sinkscope.verdict.sweep_tables import EPSILON, SCORES, SWEEP, SweepTables
from support.figure_tables import grid, make_run

SEEDS, NAMES = range(3), ("untouched", "none", "vga")
OF_EXPERIMENTS = {"effects", "effects-by-layer", "arm-maps", "arm-maps-by-layer"}
# figures of text, whose cells have no axes
TEXTS = {"scorecard", "scorecard-by-model", "routes"}


def drawn(name: str) -> Figure:
    """Return the figure of this name."""
    if name in OF_RUNS:
        return OF_RUNS[name]([make_run(model="org/One_1"), make_run(model="org/Two_2")])
    if name in OF_STEPS:
        return OF_STEPS[name]([(step, _with_norms(step)) for step in (0, 100, 1000)])
    if name in OF_ARMS:
        return OF_ARMS[name](_arms())
    if name in OF_SWEEP:
        return OF_SWEEP[name](_sweep())
    return draw(name, _experiment() if name in OF_EXPERIMENTS else _run())


def names() -> list[str]:
    registers: list[Any] = [FIGURES, OF_RUNS, OF_STEPS, OF_ARMS, OF_SWEEP]
    return [name for register in registers for name in register]


def _values(frame: pd.DataFrame, low: float = 0.1, high: float = 0.9, column: str = "value") -> pd.DataFrame:
    return frame.assign(**{column: np.random.default_rng(len(frame)).uniform(low, high, len(frame))})


def _run() -> Run:
    kinds = grid(layer=[-1], setting=["alone"], site=["q_proj", "down_proj"], part=["input", "weight", "output"])
    one = grid(layer=range(3), setting=["alone"], site=["down_proj"], part=["input"])
    whole = grid(layer=[-1], setting=["full", "all", "weights", "activations"], site=[""], part=[""])
    quantization = _values(pd.concat([kinds, one, whole], ignore_index=True), 20, 400, "perplexity")
    quantization = quantization.assign(sequences=16, kept="", cost=0.1)
    sites = grid(layer=range(3), site=["q_proj", "down_proj"], part=["input", "output"]).assign(is_massive=False)
    for column, size in (("median_abs", 1.0), ("max_abs", 3e3), ("step", 20.0), ("low", -3e3), ("high", 1e3)):
        sites = _values(sites, *sorted([0.5 * size, size]), column)
    ways = pd.DataFrame({"method": ["dense", "window", "sinks kept"], "window": [-1, 64, 64], "keep": [0, 0, 4]})
    streaming = _values(ways.merge(pd.DataFrame({"bucket": [-1, 0, 64, 128, 192]}), how="cross"), 10, 400, "perplexity")
    given = {"bits_weights": 8, "bits_activations": 8, "calibration": 4}
    plain = make_run()
    return Run(
        plain.manifest | {"quantization": given, "dtype": "float32"},
        {**plain.tables, "quantization": quantization, "quantization_sites": sites, "streaming": streaming},
    )


def _experiment() -> Run:
    labels = {"zero-key-columns": [0], "transplant-epe": [0, 1]}
    arms = pd.DataFrame({"arm": ["before", "after", *["control"] * 3], "draw": [-1, -1, 0, 1, 2]})
    parts = []
    for label, positions in labels.items():
        for metric in ("sink_rate", "window_mass"):
            parts.append(grid(condition=[label], layer=range(-1, 4), metric=[metric], position=positions))
        parts.append(grid(condition=[label], layer=[-1], metric=["perplexity", "massive_magnitude"], position=[-1]))
    effect = _values(pd.concat(parts, ignore_index=True).merge(arms, how="cross"))
    effect = effect.assign(name=effect["condition"])
    of_model = effect["position"] == -1
    effect.loc[of_model, "value"] *= 10 ** (1 + 3 * effect.loc[of_model, "value"])
    conditions = ["before", *labels, *(f"{label} control 0" for label in labels)]
    maps = grid(condition=conditions, layer=range(3), query=range(8), key=range(8))
    maps = _values(maps[maps["key"] <= maps["query"]], column="weight")
    record = {"command": "intervene", "arms": {label: {"watched": at} for label, at in labels.items()}, "draws": 3}
    return Run(make_run().manifest | record, {"effect": effect, "arm_maps": maps})


def _with_norms(step: int) -> Run:
    metrics = ["loss", "sink_rate", "value_gradient_ratio", "key_gradient_ratio", "norm_ratio", "compress_slope"]
    run = make_run(summary=_values(grid(layer=range(-1, 4), metric=metrics)))
    gradient = run.tables["gradient"]
    return make_run(
        summary=run.tables["summary"], gradient=gradient.assign(grad_norm=gradient["grad_norm"] * (1 + step))
    )


def _arms() -> Arms:
    metrics = ["perplexity", "perplexity_quantized", "max_inf_norm", "kurtosis", "sink_rate", "massive_count"]
    at = {"model": ["org/m_1"], "condition": list(NAMES), "layer": [-1], "seed": SEEDS}
    training = _values(grid(**at, step=range(0, 101, 10), metric=["loss", "gate_displacement_mean", *BACKCOPY]))
    training.loc[~training["metric"].isin(["loss", "backcopy_risk", "bigram_risk"]), "layer"] = 0
    text = pd.DataFrame({"token": ["<s>", "h", " ", "h", "e", "t"], "token_id": range(6)})
    of_arm = {"model": ["m"], "condition": list(NAMES), "layer": [0]}
    maps = grid(**of_arm, head=[0], sequence=[0], query=range(6), key=range(6))
    maps = _values(maps[maps["key"] <= maps["query"]], column="weight")
    norms = grid(**of_arm, sequence=[0], position=range(6))
    norms = norms.join(text, on="position").assign(is_trigger=norms["position"] % 3 == 2)
    norms = _values(_values(norms, 1, 2, "norm"), 1, 2, "attended_norm")
    tables = {
        "retrofit": _values(grid(**at, metric=metrics), 0.2, 0.9),
        "training": training,
        "attention_maps": maps,
        "value_norms": norms,
    }
    return Arms(tables, {name: make_run(model="org/m_1") for name in NAMES})


def _sweep() -> SweepTables:
    cells = grid(model=["org/small_1", "org/large_1"], input=["natural", "code"], settings=["a", "b"], step=[1, 1000])
    cells = cells.assign(
        condition=cells["input"], layer=-1, cell=[str(place) for place in range(len(cells))], family="F", seed=0,
        revision=cells["step"].astype(str), base=cells["model"].map({"org/large_1": "org/small_1"}).fillna(""),
        parameters=cells["model"].map({"org/small_1": 10**6, "org/large_1": 10**8}), epsilon=0.3, dtype="float32",
        seq_len=cells["settings"].map({"a": 64, "b": 16}), window=cells["settings"].map({"a": 64, "b": 16}),
        token_zero="bos", metric="sink_rate",
    )  # fmt: skip
    cells = _values(cells)
    levels = pd.DataFrame({"epsilon": [0.1, 0.3, 0.5], "sink_rate": [0.9, 0.5, 0.1]})
    by_epsilon = cells.drop(columns=["metric", "value", "epsilon"]).merge(levels, how="cross")
    scores = cells[(cells["input"] == "natural") & (cells["settings"] == "a")]
    scores = scores.assign(
        condition="task", metric="acc", filter="none", score=0.5, error=0.01, questions=9, is_asked=True
    )
    trained = grid(
        model=["m"], condition=["none"], layer=[-1], settings=["weight-decay=0.1", "weight-decay=5.0"], seed=SEEDS,
        step=[0, 100, 200], metric=["sink_rate", "loss"],
    )  # fmt: skip
    studied = _values(trained, 0.1, 0.9)
    return SweepTables({SWEEP: cells, EPSILON: by_epsilon, SCORES: scores, STUDIED: studied}, {})
