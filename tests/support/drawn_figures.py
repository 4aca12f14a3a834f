"""One figure of each name, drawn from small tables made by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.commands.compare.figures import CURVES
from sinkscope.commands.steps.onsets import RunsByStep
from sinkscope.commands.sweep.factor_study import STUDY
from sinkscope.commands.sweep.tables import EPSILON, SCORES, SWEEP, SweepTables
from sinkscope.commands.train.figures import TrainedArms
from sinkscope.figures import FIGURES, KINDS, draw
from sinkscope.figures.style import Figure
from sinkscope.output.run import Run
from sinkscope.results.metrics import BACKCOPY
from support.made_up_runs import gradient_tables, grid, make_run, picture_tables, split_table
from support.made_up_steps import made_up_steps, sigmoid

SEEDS, STEPS = range(3), range(0, 101, 10)
SINGLE = {"nullify-query-bias": [0]}
MANY = {
    "nullify-first-embedding": [0],
    "transplant-epe": [0, 1],
    "costs $5, or $x$ more": [0],
    "zero-massive+nullify-query-bias+mask-sink": [0],
    **{f"arm {place}": [0] for place in range(7)},
}
ELSEWHERE = {"first": [0], "second": [2, 4, 5], "third": [3]}
DOUBLED = [0, *(2**power for power in range(12))]  # steps of a training
STEP_METRICS = (
    "loss", "sink_rate", "value_gradient_ratio", "key_gradient_ratio", "norm_ratio", "compress_slope",
    "compress_correlation",
)  # fmt: skip
OF_EXPERIMENTS = {"over-mixing", "effects", "effects-by-layer", "arm-maps", "arm-maps-by-layer"}
# figures of text, whose cells have no axes
TEXTS = {"scorecard", "scorecard-by-model", "routes"}


def drawn(name: str) -> Figure:
    for kind, data in DATA.items():
        if name in KINDS[kind]:
            return KINDS[kind][name](_onsets() if name == "training-onsets" else data())
    return draw(name, experiment() if name in OF_EXPERIMENTS else _run())


def names() -> list[str]:
    return [name for register in (FIGURES, *(KINDS[kind] for kind in DATA)) for name in register]


def _onsets() -> RunsByStep:
    rise = sigmoid(DOUBLED, 50)
    courses = {"value_gradient": 1 + 40 * rise, "norm": 1 + 200 * rise, "sink_rate": 0.4 * rise}
    return RunsByStep(made_up_steps(DOUBLED, courses))


def _curves() -> pd.DataFrame:
    """Return what `SinkCallback` measured of two trainings."""
    rows = [
        ("org/One_1", name, -1, step, metric, (1 + place) * rise)
        for name, place in (("plain", 0), ("with $gates", 1))
        for metric in CURVES
        for step, rise in zip(DOUBLED, 0.4 * sigmoid(DOUBLED, 50), strict=True)
    ]
    return pd.DataFrame(rows, columns=["model", "condition", "layer", "step", "metric", "value"])


def _values(frame: pd.DataFrame, low: float = 0.1, high: float = 0.9, column: str = "value") -> pd.DataFrame:
    return frame.assign(**{column: np.random.default_rng(len(frame)).uniform(low, high, len(frame))})


def _run() -> Run:
    kinds = grid(layer=[-1], setting=["alone"], site=["q_proj", "down_proj"], part=["input", "weight", "output"])
    one = grid(layer=range(3), setting=["alone"], site=["down_proj"], part=["input"])
    whole = grid(layer=[-1], setting=["full", "all", "weights", "activations"], site=[""], part=[""])
    quantization = _values(pd.concat([kinds, one, whole], ignore_index=True), 20, 400, "perplexity")
    quantization = quantization.assign(sequences=16, kept="", cost=0.1, cost_low=-0.1, cost_high=0.3)
    sites = grid(layer=range(3), site=["q_proj", "down_proj"], part=["input", "output"]).assign(is_massive=False)
    for column, size in (("median_abs", 1.0), ("max_abs", 3e3), ("step", 20.0), ("low", -3e3), ("high", 1e3)):
        sites = _values(sites, *sorted([0.5 * size, size]), column)
    ways = pd.DataFrame({"method": ["dense", "window", "sinks kept"], "window": [-1, 64, 64], "keep": [0, 0, 4]})
    streaming = _values(ways.merge(pd.DataFrame({"bucket": [-1, 0, 64, 128, 192]}), how="cross"), 10, 400, "perplexity")
    plans = pd.DataFrame({"plan": ["dense", "combined", "output-loss", "random 1", "first-and-last", "8 bits"]})
    plans = plans.assign(
        memory=[1, 0.25, 0.25, 0.25, 0.25, 0.5], sinks="predicted sinks", budget=[1, 0.25, 0.25, 0.25, 0.25, 1]
    )
    for column, size in (("ratio", 1.1), ("kept", 0.9)):
        plans = _values(plans, 0.9 * size, size, column).assign(**{f"{column}_low": 0.8, f"{column}_high": 1.2})
    overflow = grid(layer=range(3), site=["mid", "layer_out", "mlp.down_proj.input"]).assign(is_inside=False)
    overflow = _values(overflow, 1, 3e5, "largest")
    entry = {"scheme": "static", "bits_weights": 8, "bits_activations": 8, "bits_kv_cache": 8, "kv_cache_per": None}
    entry |= {"activations_per": "tensor", "calibration": 4, "prefix": [5]}
    formats = grid(scheme=["W8A8", "NVFP4"], part=["all", "weights", "inputs"])
    for column in ("cost", "sink_share", "random_share", "ahead"):
        ends = {f"{column}{end}": 0.1 + step for end, step in (("", 0.0), ("_low", -0.05), ("_high", 0.05))}
        formats = formats.assign(**ends)
    split = split_table({"tokens": 0.7, "coordinates": 0.1, "prefix": 0.6}, {"tokens": [0.0, 0.1], "prefix": [0.5]})
    heads = _values(grid(layer=range(3), head=range(4)).assign(kv_head=0), 0.0, 1.0, "first_mass")
    heads = _values(heads, 0.3, 1.5, "relative_norm").assign(output_norm=1.0)
    weights = grid(layer=range(4), sequence=range(2)).assign(expert=-1, row=7, column=9, weight=-3.0)
    for column, size in (("written", 2e4), ("input", 3e3), ("output", 2e4), ("share", 0.9)):
        weights = _values(weights, 0.001 * size, size, column)
    plain = make_run()
    return Run(
        plain.manifest
        | {"quantization": entry, "dtype": "float32", "overflow": {"dtype": "float16", "limit": 65504.0}},
        {
            **plain.tables,
            **picture_tables(),
            "formats": formats,
            "quantization": quantization,
            "quantization_sites": sites,
            "streaming": streaming,
            "kv_plan": plans,
            "overflow": overflow,
            "quantization_split": split,
            "head_scores": heads,
            "super_weights": weights,
        },
    )


def effect_table(watched: dict[str, list[int]], layers: int, draws: int) -> pd.DataFrame:
    random = np.random.default_rng(1)
    by_arm = [("before", -1), ("after", -1), *(("control", draw) for draw in range(draws))]
    parts = []
    for label, positions in watched.items():
        rows = [(metric, at) for metric in ("sink_rate", "window_mass") for at in positions]
        rows += [("massive_magnitude", -1), ("perplexity", -1)]
        for arm, draw_ in by_arm:
            for metric, position in rows:
                own = range(-1, 0) if metric == "perplexity" else range(-1, layers)
                value = random.uniform(0, 1, len(own)) * (100 if position == -1 else 1)
                one = pd.DataFrame({"layer": own, "value": value, "metric": metric, "position": position})
                parts.append(one.assign(condition=label, name=label, arm=arm, draw=draw_, model="org/Tiny-1M"))
    return pd.concat(parts, ignore_index=True)


def maps_table(conditions: Sequence[str], layers: Sequence[int], tokens: int) -> pd.DataFrame:
    table = grid(condition=conditions, layer=layers, query=range(tokens), key=range(tokens))
    table = table[table["key"] <= table["query"]].assign(model="org/Tiny-1M")
    return table.assign(weight=np.random.default_rng(2).uniform(0, 1, len(table)))


def experiment(
    watched: dict[str, list[int]] = MANY, layers: int = 4, draws: int = 3, tokens: int = 8,
    without_maps: Sequence[str] = (), **replaced: pd.DataFrame,
) -> Run:  # fmt: skip
    labels = [label for label in watched if label not in without_maps]
    conditions = ["before", *labels, *(f"{label} control 0" for label in labels if draws)]
    measured = ["before", *watched, *(f"{label} control {draw}" for label in watched for draw in range(draws))]
    tables = {
        "effect": effect_table(watched, layers, draws),
        "over_mixing": _values(grid(condition=measured, layer=range(layers), distance=[1, 2, 4]), column="change"),
        "over_mixing_by_sequence": _values(
            grid(condition=measured, layer=range(layers), sequence=range(2)), column="change"
        ),
        "arm_maps": maps_table(conditions, range(layers), tokens),
        "attention": make_run().tables["attention"],  # one table for all arms, which sink-map cannot draw
    }
    arms: dict[str, dict[str, Any]] = {label: {"watched": positions} for label, positions in watched.items()}
    arms["streaming-window"] = {"watched": []}  # this arm is measured only by perplexity
    return Run(make_run().manifest | {"command": "intervene", "arms": arms, "draws": draws}, tables | replaced)


def checkpoint(step: int, layers: int = 3, positions: int = 16, **names: str) -> tuple[int, Run]:
    random = np.random.default_rng(step)
    summary = grid(layer=range(-1, layers), metric=STEP_METRICS)
    activation = grid(layer=range(layers), site=["mlp_out", "layer_out"], position=range(positions))
    gradient = gradient_tables(layers, positions=positions)["gradient"]
    tables = {
        "summary": summary.assign(value=random.uniform(0.1, 0.9, len(summary))),
        "activation": activation.assign(norm_mean=random.uniform(1, 100, len(activation))),
        "gradient": gradient.assign(grad_norm=gradient["grad_norm"] * (1 + step / 1000)),
    }
    return step, make_run(layers=layers, **names, **tables)


def backcopy_training(arms: int = 3, seeds: int = 2, layers: int = 1) -> pd.DataFrame:
    names = [f"arm {arm}" for arm in range(arms)]
    table = grid(model=["tiny"], condition=names, layer=range(layers), seed=range(seeds), step=STEPS, metric=BACKCOPY)
    of_model = table["metric"].str.endswith("risk")
    table = table[~of_model | (table["layer"] == 0)].assign(layer=table["layer"].mask(of_model, -1))
    return table.assign(value=np.random.default_rng(0).uniform(0.1, 1, len(table)))


def backcopy_maps(arms: int = 2, layers: int = 1, heads: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    text = pd.Series(["<s>", "h", " ", "h", "$", "t"])
    tokens, names = range(len(text)), [f"arm {arm}" for arm in range(arms)]
    of_arm = {"model": ["tiny"], "condition": names, "layer": range(layers)}
    weights = grid(**of_arm, head=range(heads), sequence=[0], query=tokens, key=tokens)
    weights = weights[weights["key"] <= weights["query"]]
    weights = weights.assign(token_id=10 + weights["key"], token=weights["key"].map(text))
    weights["weight"] = np.random.default_rng(0).uniform(size=len(weights))
    norms = grid(**of_arm, sequence=[0], position=tokens)
    at = norms["position"]
    norms = norms.assign(token_id=10 + at, token=at.map(text), is_trigger=at.map(text.isin([" ", "t"])), norm=1.0 + at)
    return weights, norms.assign(attended_norm=norms["norm"] / (1 + norms["condition"].str[-1].astype(int)))


def _arms() -> TrainedArms:
    metrics = [
        "perplexity", "perplexity_quantized", "layer_inf_norm", "kurtosis_with_norms", "sink_rate", "massive_count",
    ]  # fmt: skip
    of_model = {"model": ["tiny"], "condition": [f"arm {arm}" for arm in range(3)], "layer": [-1], "seed": SEEDS}
    logged = ["loss", "gate_displacement_mean", "held_out_loss", "sink_rate_by_weight"]
    course = _values(grid(**of_model, step=STEPS, metric=logged))
    maps, norms = backcopy_maps(3)
    tables = {
        "retrofit": _values(grid(**of_model, metric=metrics), 0.2, 0.9),
        "training": pd.concat([course, backcopy_training(3, len(SEEDS))], ignore_index=True),
        "attention_maps": maps,
        "value_norms": norms,
    }
    return TrainedArms(tables, {name: make_run(model="org/m_1") for name in of_model["condition"]})


def _sweep() -> SweepTables:
    cells = grid(model=["org/small_1", "org/large_1"], input=["natural", "code"], settings=["a", "b"], step=[1, 1000])
    cells = cells.assign(
        condition=cells["input"], layer=-1, cell=[str(place) for place in range(len(cells))], family="F", seed=0,
        revision=cells["step"].astype(str), base=cells["model"].map({"org/large_1": "org/small_1"}).fillna(""),
        parameters=cells["model"].map({"org/small_1": 10**6, "org/large_1": 10**8}), epsilon=0.3, dtype="float32",
        seq_len=cells["settings"].map({"a": 64, "b": 16}), window=cells["settings"].map({"a": 64, "b": 16}),
        token_zero="bos", bos="with", metric="sink_rate",
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
    formats = grid(model=["org/small_1", "org/large_1"], scheme=["W8A8", "NVFP4"], part=["all", "weights", "inputs"])
    formats = formats.assign(cell=formats["model"], cost=0.1, cost_low=0.05, cost_high=0.2)
    tables = {SWEEP: cells, EPSILON: by_epsilon, SCORES: scores, STUDY: studied, "sweep_formats": formats}
    return SweepTables(tables, {})


# kind of figures → what they are drawn from
DATA: dict[str, Callable[[], Any]] = {
    "several runs": lambda: [make_run(model="org/One_1"), make_run(model="org/Two_2")],
    "training steps": lambda: [checkpoint(step) for step in (0, 100, 1000)],
    "arms of a training": _arms,
    "trainings of your own": _curves,
    "cells of a sweep": _sweep,
}
