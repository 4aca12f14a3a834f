"""Runs made by hand: random tables as `analyze` writes them, summaries alone, and claims' tables of given metrics."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.output.run import Run
from sinkscope.results.manifest import FORMAT, write_manifest
from sinkscope.results.tables import write_tables


def run_manifest(**changes: Any) -> dict[str, Any]:
    """Return the manifest of a run of `analyze`; `changes` replace complete entries."""
    return {
        "sinkscope": "0.1.0",
        "format": FORMAT,
        "command": "analyze",
        "condition": "natural",
        "config": {"seq_len": 64, "window": 64, "positions": 16, "epsilon": 0.3},
        "model": {
            "name": "org/model", "source": "org/model", "revision": None, "layer_types": None, "sliding_window": None,
        },
        "family": {"name": "llama", "wiring": "sequential", "positions": "rotary"},
        "absent": {},
        "input": {
            "sequences": 100, "tokens": 6400, "shortest": 64, "longest": 64, "token_zero": "bos",
            "sha256": "0123456789abcdef",
        },
        "dtype": "float32",
        "kernel": "sdpa",
        "tables": [],
    } | changes  # fmt: skip


def grid(**axes: Any) -> pd.DataFrame:
    """Return one row for each combination of the axes' values."""
    return pd.MultiIndex.from_product(axes.values(), names=list(axes)).to_frame(index=False)


def picture_tables() -> dict[str, pd.DataFrame]:
    """Return random tables of two pictures, in two tiles, and of a vision transformer with a CLS token."""
    random, patches = np.random.default_rng(1), grid(layer=range(4), sequence=range(2), tile=range(2), row=range(2))
    visual = pd.concat([patches.assign(column=at) for at in range(3)], ignore_index=True)
    visual = visual.assign(mass=random.uniform(0, 1, len(visual)), phi=random.uniform(0, 40, len(visual)))
    places = pd.DataFrame({"row": [-1, 0, 0, 1, 1], "column": [0, 0, 1, 0, 1]})
    encoder = grid(layer=range(2), sequence=range(2)).merge(places, how="cross")
    encoder = encoder.assign(norm=random.uniform(1, 9, len(encoder)), mass=random.uniform(0, 1, len(encoder)))
    dot = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    picture = pd.DataFrame({"layer": -1, "sequence": range(2), "name": ["a $1.png", "b.png"], "thumbnail": dot})
    return {"visual_patch": visual.assign(random_share=0.1), "encoder_patch": encoder, "picture": picture}


def gradient_tables(layers: int = 4, heads: int = 4, kv_heads: int = 2, positions: int = 16) -> dict[str, pd.DataFrame]:
    """Return random tables of a backward pass: query 0 has no gradient, compress falls as the input's norm grows."""
    random = np.random.default_rng(1)
    ends = {"query": heads, "key": kv_heads, "value": kv_heads}
    parts = [
        grid(layer=range(layers), pathway=[name], head=range(-1, end), position=range(positions))
        for name, end in ends.items()
    ]
    gradient = pd.concat(parts, ignore_index=True)
    gradient["grad_norm"] = 10 ** random.uniform(-4, -1, len(gradient))
    gradient.loc[(gradient["pathway"] == "query") & (gradient["position"] == 0), "grad_norm"] = 0.0

    ratio = grid(layer=range(layers), branch=["attn", "mlp"], position=range(positions))
    ratio["input_norm"] = 10 ** random.uniform(0, 4, len(ratio))
    ratio["bloat"] = 10 ** random.uniform(0, 3, len(ratio))
    ratio["compress"] = 3 / ratio["input_norm"] * 10 ** random.uniform(-0.2, 0.2, len(ratio))
    ratio["change"] = 10 ** random.uniform(-0.1, 0.3, len(ratio))

    check = grid(layer=range(layers), head=range(heads), position=range(positions))
    check["identity_residual"] = random.uniform(1e-7, 5e-7, len(check))
    check["measured"] = 10 ** random.uniform(-3, 3, len(check))
    check["lower_bound"] = check["measured"] * random.uniform(0.1, 1.02, len(check))
    check["upper_bound"] = check["measured"] * random.uniform(0.95, 9, len(check))
    check["holds"] = check["measured"].between(check["lower_bound"], check["upper_bound"])

    bound = ratio[["layer", "branch", "position"]].assign(measured=ratio["compress"])
    bound["tightness"] = random.uniform(0.1, 1, len(bound))
    bound = bound.assign(bound=bound["measured"] / bound["tightness"], holds=1.0)
    return {"gradient": gradient, "gradient_ratio": ratio, "gradient_check": check, "norm_bound": bound}


def state_tables(layers: int, sequences: int) -> dict[str, pd.DataFrame]:
    """Return random tables of the residual stream: two tokens join the first sink, a coordinate is a residual sink."""
    random = np.random.default_rng(2)
    entropy = grid(layer=range(layers))
    names = ("entropy", "entropy_without_first", "entropy_rescaled", "entropy_bound", "anisotropy", "anisotropy_bound")
    entropy = entropy.assign(**{name: random.uniform(0, 1, layers) for name in names})
    parallel = grid(layer=range(layers), sequence=range(sequences)).assign(parallel=0.3, sinks=0.01)
    sinks = grid(layer=[0], sequence=range(sequences), position=[0, 1, 5]).assign(token_id=lambda t: t["position"])
    kinds = {0: "first", 1: "lasting", 5: "secondary"}
    sinks = sinks.assign(token=sinks["position"].map({0: "<s>", 1: "\n", 5: "漢字"}), kind=sinks["position"].map(kinds))
    coordinates = grid(layer=range(layers), coordinate=[7, 38]).assign(share=random.uniform(0.9, 1, 2 * layers))
    coordinates["kind"] = coordinates["coordinate"].map({7: "residual sink", 38: "spike"})
    spikes = grid(layer=range(layers)).assign(norm_ratio=10 ** random.uniform(0, 2, layers), rotated_share=0.0)
    spikes = spikes.assign(cosine=1.0, cosine_of_others=random.uniform(0, 1, layers), step=["up"] + [""] * (layers - 1))
    steps = grid(layer=range(layers), sequence=range(sequences), step=range(6))
    drawn = {name: random.uniform(0, 1, len(steps)) for name in ("sink_mass", "sink_heads", "ratio", "headroom")}
    steps = steps.assign(**drawn, largest=10 ** random.uniform(0, 3, len(steps)), uniform=0.05, coordinate=7)
    steps = steps.assign(position=24 + steps["step"], token_id=5, token="漢字", is_thought=steps["step"].between(1, 3))
    named = {"entropy": entropy, "parallel_tokens": parallel, "sink_tokens": sinks, "decoding": steps}
    return named | {"residual_sinks": coordinates, "spikes": spikes}


TOKENS = ["<s>", " the", "\n", ".", " $x$", "漢字", "\x00", None, "\t", " incomprehensibilities", "�", "  "]


@cache
def tables_of(layers: int, heads: int, kv_heads: int, positions: int, sequences: int, length: int) -> dict:
    """Return random tables of a run with a sink at position 0, as `analyze` would make them."""
    random = np.random.default_rng(0)

    def of(frame: pd.DataFrame, **columns: tuple[float, float]) -> pd.DataFrame:
        return frame.assign(**{name: random.uniform(*span, len(frame)) for name, span in columns.items()})

    def with_tokens(frame: pd.DataFrame, column: str = "position") -> pd.DataFrame:
        ids = frame[column] % len(TOKENS)
        return frame.assign(token_id=ids, token=ids.map(dict(enumerate(TOKENS))))

    by_head = grid(layer=range(layers), head=range(heads), position=range(positions))
    by_head["kv_head"] = by_head["head"] // (heads // kv_heads)
    masses = dict.fromkeys(("window_mass", "sink_rate", "sink_mass", "sink_second_moment"), (0.0, 0.2))
    attention = of(by_head, **masses)
    attention.loc[attention["position"] == 0, list(masses)] += random.uniform(0, 0.8, (layers * heads, 1))
    geometry = of(by_head, **{f"{x}_norm": (1, 20) for x in ("query", "key", "value")}, qk_cosine=(-0.5, 0.8))
    geometry = of(geometry, qk_norm_product=(1, 400), sink_logit_gap=(-2, 12))
    sites = ["layer_in", "attn_out", "mid", "mlp_out", "layer_out", "value"]
    activation = of(grid(layer=range(layers), site=sites, position=range(positions)), norm_mean=(1, 3e4))
    activation["norm_max"] = activation["norm_mean"] * 2
    massive = with_tokens(
        of(grid(layer=range(layers), sequence=range(sequences), position=range(3)), value=(-3e4, 3e4))
    )
    massive = massive.assign(coordinate=7, median=1.0, ratio=massive["value"].abs())
    massive["is_massive"] = massive["layer"] % 2 == 1
    sinks = of(grid(layer=range(layers), head=range(heads), sequence=range(sequences), position=range(length)))
    sinks = with_tokens(of(sinks, window_mass=(0.3, 0.9))).sample(frac=0.3, random_state=0)
    sinks = sinks.assign(queries=length - sinks["position"], uniform_mass=0.0)
    shown = range(min(length, 64))
    magnitudes = of(
        grid(layer=[layers - 1], sequence=[0], position=shown, coordinate=range(0, 40, 4)), magnitude=(0, 9)
    )
    magnitudes["is_top"] = magnitudes["coordinate"].isin([8, 20])
    magnitudes.loc[(magnitudes["coordinate"] == 20) & (magnitudes["position"] == 0), "magnitude"] = 9e3
    maps = of(
        grid(layer=[0, layers - 1], head=range(min(heads, 2)), sequence=[0], query=shown, key=shown), weight=(0, 1)
    )
    maps = with_tokens(maps[maps["key"] <= maps["query"]].drop_duplicates(["layer", "head", "query", "key"]), "key")
    metrics = ["sink_rate", "value_drain", "norm_ratio", "massive_count", "delta_gap"]
    query_bias = of(
        grid(layer=range(layers), head=range(-1, heads), position=range(length)),
        delta_mean=(-160, 100), delta_std=(0, 20), key_alignment=(-1, 1),
    )  # fmt: skip
    gamma = of(grid(layer=range(layers), coordinate=range(40)), gamma=(-5, 5))
    gamma["epe_0"] = gamma["coordinate"].map({7: 90.0, 38: -50.0}).fillna(0.5)
    gamma["is_massive_epe"] = gamma["coordinate"].isin([7, 38])
    bins = grid(layer=range(layers), group=["position 0", "later"], delta=np.linspace(-160, 100, 60))
    return {
        "attention": attention, "geometry": geometry, "activation": activation, "massive": massive,
        "sink_positions": sinks, "massive_map": with_tokens(magnitudes), "attention_maps": maps,
        "query_bias": query_bias, "gamma": gamma, "gate": of(by_head, gate=(0, 1), raw_value_norm=(1, 20)),
        "delta_distribution": bins.assign(count=random.integers(0, 9, len(bins))),
        "summary": of(grid(layer=range(-1, layers), metric=metrics), value=(0, 1)),
    } | gradient_tables(layers, heads, kv_heads, positions) | state_tables(layers, sequences)  # fmt: skip


def make_run(
    layers: int = 4, heads: int = 4, kv_heads: int = 2, positions: int = 16, sequences: int = 3, length: int = 24,
    model: str = "org/Tiny-1M", condition: str = "natural", **replaced: pd.DataFrame,
) -> Run:  # fmt: skip
    manifest = run_manifest(condition=condition)
    manifest["model"] |= {"name": model, "source": model}
    manifest["input"] |= {"sequences": sequences, "tokens": sequences * length, "shortest": length, "longest": length}
    made = tables_of(layers, heads, kv_heads, positions, sequences, length)
    return Run(manifest, {name: table.copy() for name, table in made.items()} | replaced)


def made_up(condition: str = "natural", sink_rate: float = 0.5, layers: int = 2, **changes: Any) -> Run:
    """Return a run that has only a summary. `changes` are merged into the manifest, including nested dicts."""
    manifest = run_manifest(condition=condition, tables=["summary"])
    for name, value in changes.items():
        manifest[name] = manifest[name] | value if isinstance(value, dict) else value
    rows = [(layer, metric, value + layer) for layer in range(layers) for metric, value in (("sink_rate", 0.0),)]
    rows += [(-1, "sink_rate", sink_rate), (-1, "kurtosis", 0.0)]
    summary = pd.DataFrame(rows, columns=["layer", "metric", "value"])
    summary = summary.assign(model=manifest["model"]["name"], condition=condition)
    return Run(manifest, {"summary": summary[["model", "condition", "layer", "metric", "value"]]})


def save(run: Run, folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_tables(run.tables, folder)
    write_manifest(folder, run.manifest)
    return folder


SEQUENCES, HEADS, POSITIONS, GROUPS = 2, 100, 16, 20


def summarized(
    summary: dict[str, list[float]] | None = None,
    whole: dict[str, float] | None = None,
    tables: dict[str, pd.DataFrame] | None = None,
    **manifest: Any,
) -> Run:
    """Return a run with these metrics by layer, and for the whole model their means or the given values."""
    rows = [(layer, metric, value) for metric, values in (summary or {}).items() for layer, value in enumerate(values)]
    means = {metric: sum(values) / len(values) for metric, values in (summary or {}).items()} | (whole or {})
    rows += [(-1, metric, value) for metric, value in means.items()]
    measured = {"summary": pd.DataFrame(rows, columns=["layer", "metric", "value"])}
    measured |= _by_sequence(summary or {}) | (tables or {})
    if "gradient" in measured:  # the groups of sequences are all the same
        parts = [measured["gradient"].assign(group=group) for group in range(GROUPS)]
        measured["gradient_by_group"] = pd.concat(parts, ignore_index=True)
    record = run_manifest(**manifest)
    record["input"] |= {"sequences": SEQUENCES}
    return Run(record, measured)


def by_sequence(
    columns: Mapping[str, Any], layers: int = 4, noise: float = 0.0, sequences: int = 40, **axes: Sequence[Any]
) -> pd.DataFrame:
    """Return a row for each layer, sequence and index on further axes, with noise that differs by sequence.

    Values are (layers, *axes), or can be broadcast to that.
    """
    sizes = [len(labels) for labels in axes.values()]
    frame = grid(layer=range(layers), sequence=range(sequences), **axes)
    draw = np.random.default_rng(0)
    for name, values in columns.items():
        values = np.broadcast_to(np.asarray(values, float), (layers, *sizes))
        frame[name] = (values[:, None] + noise * draw.normal(size=(layers, sequences, *sizes))).ravel()
    return frame


def _by_sequence(summary: Mapping[str, list[float]]) -> dict[str, pd.DataFrame]:
    """Return tables in which all sequences are the same, and the first heads of a layer have the sink."""
    tables, heads = {}, range(HEADS)
    table = partial(by_sequence, layers=max(map(len, summary.values()), default=0), sequences=SEQUENCES)
    mass: Any = 0.1
    if "sink_rate" in summary:
        rates, first = np.array(summary["sink_rate"])[:, None], np.arange(POSITIONS) == 0
        columns = {"sink_rate": rates * first, "uniform_mass": 0.05}
        tables["attention_by_sequence"] = table(columns, position=range(POSITIONS))
        mass = np.where(np.arange(HEADS) < np.round(HEADS * rates), 0.9, 0.1)
    if {"sink_rate", "value_drain"} & summary.keys():
        tables["attention_heads_by_sequence"] = table({"window_mass": mass, "uniform_mass": 0.05}, head=heads)
    if "value_drain" in summary:
        drains = {"value_norm": np.array(summary["value_drain"])[:, None], "value_norm_later": 1.0}
        tables["geometry_by_sequence"] = table(drains, head=heads)
    return tables


def split_table(
    shares: dict[str, float], random: dict[str, list[float]], cost: float = 1.0, half: float = 0.1
) -> pd.DataFrame:
    """Make a table `quantization_split`: shares by setting, each with an interval of ± half, and by random draw."""
    rows = [("full", -1, 1.0), ("all", -1, 0.0), *((setting, -1, share) for setting, share in shares.items())]
    rows += [(setting, draw, share) for setting, draws in random.items() for draw, share in enumerate(draws)]
    table = pd.DataFrame(rows, columns=["setting", "draw", "share"])
    table["cost"] = cost * (1 - table["share"])
    for name, reach in (("share", half), ("cost", cost * half)):
        table = table.assign(**{f"{name}_low": table[name] - reach, f"{name}_high": table[name] + reach})
    table["loss"] = 3.0 + table["cost"]
    table["perplexity"] = table["loss"].map(lambda loss: 2.718281828**loss)
    return table.assign(layer=-1, tokens=1.5, coordinates=8, prefix="5", sequences=8, full_loss=3.0)
