"""Claims on runs of one model, with hand-made tables for which a claim is known to hold or to fail."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.hand_made_runs import (
    BOS,
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    NO_BOS,
    NOT_APPLIES,
    SEQUENCES,
    UNMEASURED,
    analysis,
    by_sequence,
    experiment,
    family,
    judged,
    manifest,
)

from sinkscope.commands.claims.arms import sink_left
from sinkscope.commands.claims.collection import Collection
from sinkscope.commands.claims.evidence import LONG_TEXT, MAIN, NULL, STATES, Evidence, Need, _has_arm
from sinkscope.commands.claims.papers.s2m import coordinates_of_largest
from sinkscope.commands.claims.papers.wse import OTHER_DOMAINS
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.table import judged as table_of
from sinkscope.measuring.observables.query_bias import NO_QUERY_BIAS
from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Sequences

LAYERS, WIDTH = 4, 300
TERMS = ["biases", "content", "delta", "key bias"]


def gamma(massive: dict[int, float]) -> pd.DataFrame:
    """Make γ with these entries where EPE_0 is massive, and other entries of magnitude 1 at most."""
    entries = np.random.default_rng(0).uniform(-1, 1, WIDTH)
    entries[list(massive)] = list(massive.values())
    is_massive = np.isin(np.arange(WIDTH), list(massive))
    frame = pd.DataFrame({"coordinate": range(WIDTH), "gamma": entries, "is_massive_epe": is_massive})
    return pd.concat([frame.assign(layer=layer) for layer in range(LAYERS)], ignore_index=True)


def alignment(first: float, later: float) -> pd.DataFrame:
    places = [(layer, head, position) for layer in range(LAYERS) for head in (-1, 0) for position in range(16)]
    table = pd.DataFrame(places, columns=["layer", "head", "position"])
    return table.assign(key_alignment=np.where(table["position"] == 0, first, later) * (table["head"] == -1))


def deltas(first: Any, later: float = -140.0, spread: float = 30.0) -> pd.DataFrame:
    return by_sequence({"delta": first, "delta_later": later, "delta_later_std": spread}, LAYERS, 1.0)


def terms(first: Any, others: Any) -> pd.DataFrame:
    return by_sequence({"at_first": first, "at_others": others}, LAYERS, 0.01, term=TERMS)


def rests(cosine: Any) -> pd.DataFrame:
    return by_sequence({"cosine": cosine, "cosine_whole": 0.7}, LAYERS, 0.01)


def natural(**changes: Any) -> RunData:
    """Make a model for which all claims of NU on a single run hold, except for the given tables."""
    cosines = [(0, group, position, 0.7) for group in range(-1, 20) for position in range(16)]
    tables = {
        "query_bias": alignment(0.8, -0.1),
        "gamma": gamma({138: 12.0, 247: -18.0}),
        "query_bias_by_sequence": deltas(100.0),
        "logit_terms_by_sequence": terms([0.3, 1.0, 3.0, 0.5], [0.3, 0.0, 0.0, 0.5]),
        "epe_by_group": pd.DataFrame(cosines, columns=["layer", "group", "position", "cosine"]),
        "epe_rest_by_sequence": rests(0.05),
        "attention_by_sequence": by_sequence({"sink_rate": [0.6, 0.1]}, LAYERS, 0.01, position=range(2)),
    }
    return analysis(tables | changes)


def elsewhere(positions: str, reason: str | None = None, rate: float = 0.6) -> RunData:
    table = by_sequence({"sink_rate": [rate, 0.0]}, LAYERS, 0.01, position=range(2))
    not_measured = {"query-bias": reason} if reason else {}
    return analysis({"attention_by_sequence": table}, family=family(positions), not_measured=not_measured)


BEFORE = {"before": [0.6, 0.05]}
QUIET = {f"control {draw}": [0.6 + 0.002 * draw, 0.05] for draw in range(3)}
WIDE = {f"control {draw}": [rate, 0.05] for draw, rate in enumerate((0.2, 0.4, 0.6))}
LOW, MIDDLE = ({f"control {draw}": [rate + 0.001 * draw, 0.05] for draw in range(3)} for rate in (0.2, 0.4))
NO_SINK = {condition: [0.02, 0.02] for condition in ("before", *QUIET)} | {"after": [0.0, 0.02]}


def arm(name: str, after: list[float], controls: Mapping[str, Any] = QUIET, *read: str, **facts: Any) -> RunData:
    """Make an experiment on a model with a sink rate of 60 % at position 0."""
    run = experiment(BEFORE | {"after": after} | dict(controls), name, *read, **facts)
    table = run.tables["attention_by_sequence"].assign(sink_rate=lambda rows: rows["sink_rate"].clip(0))
    return RunData(run.manifest, {"attention_by_sequence": table})


def equal(
    kind: str, layers: int = LAYERS, wrong: Mapping[str, float] | None = None, **more_columns: Any
) -> pd.DataFrame:
    """Make the table of equal tokens; `wrong` changes a column in one sequence of one layer."""
    columns = {"state_difference": 1e-5, "weight_difference": np.nan, "bound_share": np.nan, "bound_ratio": np.nan}
    columns |= {"bound_share": 1.0, "bound_ratio": 0.9} if kind == "rotary" else {"weight_difference": 1e-6}
    table = by_sequence(columns | more_columns, layers).assign(positions=kind)
    for column, value in (wrong or {}).items():
        table.loc[len(table) // 2, column] = value
    return table


def repeated(kind: str, wrong: Mapping[str, float] | None = None, smallest: Any = 1000.0, **facts: Any) -> RunData:
    norms = by_sequence({"norm": 1000.0, "norm_later": 1000.0, "norm_smallest": smallest}, LAYERS, 1.0)
    tables = {"equal_tokens": equal(kind, wrong=wrong), "activation_by_sequence": norms.assign(site="layer_out")}
    return analysis(tables, "repeated", family=family(kind), **facts)


def operating(operation: str) -> RunData:
    return repeated("rotary", model={"name": "made", "weights": "trained", "operations": [operation]})


def mixed() -> RunData:
    """Make a model whose first layers have rotary positions, and whose last layer has none."""
    table = pd.concat([equal("rotary"), equal("none").assign(layer=LAYERS)])
    return analysis({"equal_tokens": table}, "repeated", family=family("rotary", layer_positions=["rotary", "none"]))


def text(massive: bool = True, rate: float = 0.5, norm: Any = 1000.0, **facts: Any) -> RunData:
    norms = by_sequence({"norm": norm, "norm_later": 10.0, "norm_smallest": 5.0}, LAYERS, 1.0)
    entries = by_sequence({"position": 0.0}, LAYERS).assign(is_massive=massive)
    entries["is_massive"] &= entries["layer"] > 0
    tables = {"activation_by_sequence": norms.assign(site="layer_out"), "massive": entries}
    tables["attention_by_sequence"] = by_sequence({"sink_rate": [rate]}, LAYERS, position=range(1))
    return analysis(tables, **{"family": family("rotary"), "input": NO_BOS} | facts)


def read(condition: str, rate: float, bos: bool, kind: str = "rotary", main: bool = False) -> RunData:
    """Make a run on an input with this sink rate at position 0; `main` is the unchanged model, with more tables."""
    table = by_sequence({"sink_rate": [rate, 0.01]}, noise=1e-3 * (rate > 0), position=range(2))
    tables = {"attention_by_sequence": table} | ({"attention": table} if main else {})
    return analysis(tables, condition, family=family(kind), input=BOS if bos else NO_BOS)


def of_both(kind: str = "rotary", **rates: tuple[float, float]) -> list[RunData]:
    """Make runs from input → its sink rates with a BOS, which the model's own text has, and without."""
    return [
        read(name, rate, bos, kind, main=name == "natural" and bos)
        for name, both in rates.items()
        for rate, bos in zip(both, (True, False), strict=True)
    ]


def by_length(
    *shares: tuple[float, float, float], windows: Sequence[int] = (16, 32, 64, 128), uniform: float = 1.0
) -> list[RunData]:
    """Make a hundred heads of one layer: shares of them with a window mass above 0.2, 0.3 and 0.4 at each length.

    Uniform attention gives position 0 `uniform` ÷ length.
    """
    runs = []
    for length, window, own in zip((16, 32, 64, 128), windows, shares, strict=True):
        heads = np.array([0.1 + 0.1 * sum(place < 100 * share for share in own) + 0.01 for place in range(100)])
        table = by_sequence({"window_mass": heads[None]}, 1, 1e-3, head=range(100)).assign(
            uniform_mass=uniform / length
        )
        config = {"epsilon": 0.3, "seq_len": length, "window": window}
        tables = {"attention_heads_by_sequence": table} | ({"attention": table} if length == 64 else {})
        runs.append(RunData(manifest() | {"config": config}, tables))
    return runs


def no_op(name: str, *losses: float) -> RunData:
    """Make an experiment from the losses before, in the arm, and in its controls."""
    conditions = ["before", name, *(f"{name} control {draw}" for draw in range(len(losses) - 2))]
    rows = {"layer": -1, "sequence": range(SEQUENCES), "predicted": 63}
    parts = [
        pd.DataFrame(rows | {"loss": loss, "condition": label}) for label, loss in zip(conditions, losses, strict=True)
    ]
    arms = {name: {"asked": [name], "do": [name], "watched": [0], "controls": [[name]] * (len(losses) - 2)}}
    return RunData(manifest("natural", "intervene", arms=arms), {"loss_by_sequence": pd.concat(parts)})


def outliers(*shares: float) -> RunData:
    """Make sequences whose other tokens have this share of the largest entry, in the second of two layers."""
    count = len(shares)
    entries = {"layer": 1, "sequence": range(count), "position": 0, "coordinate": 7, "value": 2e4, "ratio": 1e4}
    places = {"sequence": [*range(count)] * 2, "layer": [0] * count + [1] * count, "position": 0, "coordinate": 7}
    rows = pd.DataFrame(places | {"largest": 2e4, "elsewhere": [1e4] * count + [2e4 * share for share in shares]})
    tables = {"massive": pd.DataFrame(entries).assign(is_massive=True), "massive_elsewhere": rows}
    return RunData(manifest() | {"input": {**BOS, "sequences": count}}, tables)


def prefixed(position: int, late: bool = False, count: int = 40, prefix: int = 3) -> RunData:
    sinks = pd.DataFrame({"layer": 0, "head": 0, "sequence": range(count), "position": position, "queries": 30})
    sinks = sinks.assign(window_mass=0.9, uniform_mass=0.05)
    if late:  # a key with only two queries does not count
        sinks = pd.concat([sinks, sinks.assign(position=60, queries=2)])
    return analysis({"sink_positions": sinks}, family=family("rotary", prefix=prefix))


def windowed(mass: float, window: int | None = 8, rate: float = 0.5) -> RunData:
    table = {"window_edge_by_sequence": by_sequence({"edge_mass": mass}, noise=0.001)}
    table["attention_by_sequence"] = by_sequence({"sink_rate": [rate]}, noise=0.001, position=[0])
    return analysis(table, model={"name": "made", "weights": "trained", "sliding_window": window})


def without_rates() -> RunData:
    table = by_sequence({"sink_rate": [np.nan, *[0.0] * 15], "uniform_mass": 0.4}, 4, position=range(16))
    return analysis({"attention_by_sequence": table}, model={"name": "made", "weights": "trained", "parameters": 10**6})


def branch(*names: str, compress: float = 1.0, bloat: Sequence[float] = (1.0, 1.0)) -> RunData:
    """Return the gains of these branches; `bloat` is that of position 0 in each."""
    gains = {name: np.ones(16) for name in ("bloat", "compress", "change", "input_norm")}
    one = by_sequence(gains, noise=0.01, position=range(16))
    one = one.assign(compress=one["compress"] * compress)
    of_first = [np.where(one["position"] == 0, first, 1.0) for first in bloat]
    parts = [one.assign(branch=name, bloat=one["bloat"] * x) for name, x in zip(names, of_first, strict=False)]
    return analysis({"gradient_ratio_by_sequence": pd.concat(parts, ignore_index=True)})


def reshaping(of_layers: Sequence[float]) -> RunData:
    """Return a run whose norms gain 1 ÷ ‖h‖, times a factor for each layer."""
    norms = np.exp(np.arange(4)[:, None] + np.linspace(0, 1, 16))
    gains = {"input_norm": norms, "compress": np.asarray(of_layers)[:, None] / norms}
    return analysis({"gradient_ratio_by_sequence": by_sequence(gains, position=range(16)).assign(branch="attn")})


def writing(norms: Sequence[float]) -> RunData:
    """Return a run whose MLPs write these norms at position 0."""
    return analysis({"activation_by_sequence": by_sequence({"norm": norms}, len(norms)).assign(site="mlp_out")})


def peaks(values: Sequence[float], least: float) -> RunData:
    """Return a run whose layers have these largest entries, and others half as large, massive from `least` on."""
    table = by_sequence({"value": np.outer(values, [1, 0.5])}, len(values), coordinate=[3, 4]).assign(position=0)
    return analysis({"massive": table.assign(ratio=table["value"], is_massive=table["value"] >= least)})


def of_domains(natural: float, elsewhere: float) -> list[RunData]:
    """Return runs on text of all domains with these sink rates."""
    names = [str(role.of) for role in OTHER_DOMAINS]
    rates = {"natural": natural} | dict.fromkeys(names, elsewhere)
    return [
        analysis({"attention_by_sequence": by_sequence({"sink_rate": [rate]}, position=[0])}, condition=name)
        for name, rate in rates.items()
    ]


def attracting(longest: int = 64) -> RunData:
    """Return three layers of two heads, in which 3 of 4 heads that read a massive state have a sink there.

    Elsewhere there is one sink with enough queries, which 49 of 64 positions have.
    """
    of_massive = [(0, 0), (1, 0), (2, 0), (0, 60)]
    of_sinks = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (1, 1, 48), (1, 0, 60)]
    massive, sinks = (
        pd.DataFrame(rows, columns=columns).merge(pd.DataFrame({"sequence": range(SEQUENCES)}), how="cross")
        for rows, columns in ((of_massive, ["layer", "position"]), (of_sinks, ["layer", "head", "position"]))
    )
    heads = pd.MultiIndex.from_product([range(3), range(2)], names=["layer", "head"]).to_frame(index=False)
    tables = {
        "massive": massive.assign(is_massive=True),
        "sink_positions": sinks.assign(queries=64 - sinks["position"]),
        "attention_heads": heads,
    }
    return analysis(tables, input={**NO_BOS, "shortest": 64, "longest": longest})


def taking(*later: float) -> RunData:
    """Return heads with these value gradients, later ÷ at position 0; only the first head has a strong sink."""
    heads = range(len(later))
    attention = pd.DataFrame({"layer": 0, "head": heads, "kv_head": heads, "position": 0})
    attention["window_mass"] = np.where(attention["head"] == 0, 0.95, 0.3)
    rows = [(0, "value", head, at, 1.0 if at == 0 else later[head]) for head in heads for at in range(16)]
    gradient = pd.DataFrame(rows, columns=["layer", "pathway", "head", "position", "grad_norm"])
    noise = [(group, 1 + 1e-3 * (group - 2) * (gradient["position"] > 0)) for group in range(5)]
    parts = [gradient.assign(group=group, grad_norm=gradient["grad_norm"] * factor) for group, factor in noise]
    by_group = pd.concat(parts, ignore_index=True)
    return analysis({"attention": attention, "gradient": gradient, "gradient_by_group": by_group})


def strengthening(by_layer: Sequence[float]) -> RunData:
    """Return a head in each layer: its mass on position 0 rises by layer, where its value gradient is this."""
    layers = range(len(by_layer))
    attention = pd.DataFrame({"layer": layers, "kv_head": 0, "position": 0})
    places = pd.MultiIndex.from_product([layers, range(16)], names=["layer", "position"]).to_frame(index=False)
    gradient = places.assign(pathway="value", head=0)
    gradient["grad_norm"] = np.where(gradient["position"] == 0, np.repeat(by_layer, 16), 1.0)
    return analysis({"attention": attention.assign(sink_mass=attention["layer"] / 10), "gradient": gradient})


def backward(**norms: Sequence[float]) -> RunData:
    """Return norms of gradients by pathway: at position 0, at position 1, and at all others."""
    rows = [(0, name, -1, place, x[min(place, 2)]) for name, x in norms.items() for place in range(16)]
    gradient = pd.DataFrame(rows, columns=["layer", "pathway", "head", "position", "grad_norm"])
    by_group = gradient.merge(pd.DataFrame({"group": range(5)}), how="cross")
    return analysis({"gradient": gradient, "gradient_by_group": by_group})


def heads(mass: np.ndarray, **geometry: Any) -> RunData:
    """Return heads (layers, heads) with these window masses and columns of `geometry`."""
    columns = {"attention_heads": {"window_mass": mass, "uniform_mass": 0.05}, "geometry": geometry}
    tables = {name: by_sequence(each, len(mass), head=range(mass.shape[1])) for name, each in columns.items()}
    return analysis({f"{name}_by_sequence": table for name, table in tables.items()})


def gaining(name: str, by_layer: Any) -> RunData:
    """Return a run whose gradients have this gain in each layer, at all or at each of 16 positions."""
    gains = {"bloat": 1.0, "compress": 1.0, "change": 1.0, "input_norm": 1.0} | {name: by_layer}
    return analysis({"gradient_ratio_by_sequence": by_sequence(gains, position=range(16)).assign(branch="attn")})


def blocks(*by_layer: float) -> RunData:
    table = by_sequence({"sink_rate": np.array(by_layer)[:, None]}, len(by_layer), position=[0])
    return analysis({"attention_by_sequence": table})


def mixing(after: float, *controls: float, before: float = 0.1) -> RunData:
    name = "mask-sink:begin=massive"
    numbers = {"before": before, name: after} | {f"{name} control {draw}": x for draw, x in enumerate(controls)}
    parts = [by_sequence({"change": x}, noise=1e-3).assign(condition=label) for label, x in numbers.items()]
    arms = {name: {"asked": [name], "do": [name], "watched": [0], "controls": [[name]] * len(controls)}}
    return RunData(manifest("natural", "intervene", arms=arms), {"over_mixing_by_sequence": pd.concat(parts)})


def editing(do: str, milder: str, alone: float, mild: float, controls: float = 0.1) -> RunData:
    """Make sink rates of 60 % at position 0, and at position 1, which two arms change, 0 % before."""
    rates = {"before": 0.0, "after": alone} | {f"control {draw}": controls + 0.002 * draw for draw in range(3)}
    run = experiment({label: [0.6, rate] for label, rate in rates.items()}, do)
    other = experiment({"after": [0.6, mild]}, milder)
    arms = {name: arm | {"watched": [1]} for name, arm in (run.manifest["arms"] | other.manifest["arms"]).items()}
    table = pd.concat([one.tables["attention_by_sequence"] for one in (run, other)])
    losses = by_sequence({"loss": 2.0, "predicted": 63}).assign(condition="before")
    return RunData(run.manifest | {"arms": arms}, {"attention_by_sequence": table, "loss_by_sequence": losses})


isolating = partial(editing, "isolate", "isolate:hidden=0")
deviating = partial(editing, "scale-head-outputs", "scale-head-outputs:around=zero")


def of_tokens(*places: tuple[int, str]) -> RunData:
    """Return a run whose massive activations are at these positions and tokens, in every sequence."""
    table = pd.DataFrame(places, columns=["position", "token"]).merge(
        pd.DataFrame({"sequence": range(SEQUENCES)}), how="cross")  # fmt: skip
    return analysis({"massive": table.assign(layer=0, is_massive=True)})


BY_MASS = "ablate-heads:by=first-mass"
USUAL = {None: 10.0, 0: 90.0, 1: 13.0, 2: 12.0, 4: 10.1}  # first tokens kept (None: dense) → perplexity


def streams(otherwise: Mapping[int | None, float], registers: int = 0) -> list[RunData]:
    """Make a model with eight streamed texts, about as hard for every method; a wider window costs nothing."""
    rows = [
        {"method": "dense" if keep is None else "kept", "window": -1 if keep is None else window, "keep": keep or 0}
        | {"sequence": text, "loss": np.log(perplexity) + 0.5 * np.sin(text) + 0.002 * np.sin((keep or 7) * text)}
        for window, perplexities in ((64, USUAL | dict(otherwise)), (128, dict.fromkeys((0, 1, 2, 4, 5), 10.0)))
        for keep, perplexity in perplexities.items()
        for text in range(8)
    ]
    run, streamed = analysis({}), analysis({})
    run.manifest["model"]["registers"] = registers
    streamed.manifest["input"]["longest"] = LONG_TEXT
    tables = {"streaming": pd.DataFrame(), "streaming_by_sequence": pd.DataFrame(rows)}
    return [run, RunData(streamed.manifest | {"command": "intervene", "arms": {}}, tables)]


def identities(pathway: str, *residuals: float) -> RunData:
    table = pd.DataFrame({"layer": 0, "pathway": pathway, "residual": residuals})
    return analysis({"gradient_identity": table})


LARGEST = "zero-super-weight:which=largest"
LARGEST_ZEROED = no_op(LARGEST, 2.0, 2.0)
MASS = np.random.default_rng(0).permutation(np.linspace(0.05, 0.95, 60)).reshape(30, 2)
SINK_HEADS = np.where(np.arange(10) < 4, 0.9, 0.05)[None]
GATES = pd.DataFrame({"position": range(20), "gate": [0.1, *[9.0] * 4, *[0.5] * 11, *[9.0] * 4]})  # 5–15 are later
CHECK = pd.DataFrame({"position": [0, 1] * 9, "holds": [1.0, 0.0] * 9, "measured": 1.0, "upper_bound": 2.0})
LIKE_GEMMA = of_both(natural=(0.80, 0.0), random=(0.79, 0.0), repeated=(0.61, 0.0))
OUTSIDE = repeated("rotary", outside={"the model's own sink logits": [0]})
BOUND = pd.DataFrame({"layer": [0, 0], "position": [0, 1], "holds": [np.nan] * 2, "tightness": [np.nan] * 2})
ON_REPEATED = {condition: [0.03, 0.03] for condition in ("before", *QUIET)} | {"after": [0.01, 0.03]}
AFTER_BOS = arm("replace-epe", [0.1, 0.05], QUIET, "repeated")
AFTER_BOS = RunData(AFTER_BOS.manifest | {"input": BOS}, AFTER_BOS.tables)
OTHER_LABEL = arm("replace-epe:at=epe", [0.0, 0.0])
OTHER_LABEL = RunData(
    OTHER_LABEL.manifest | {"arms": {"replace-epe:at=epe": {"asked": ["replace-epe"]}}}, OTHER_LABEL.tables
)
NO_BOS_BEFORE = arm("nullify-first-embedding", [0.5, 0.0], input=NO_BOS)
# claim, runs, outcome of the claim or of each number, value of the first number, words of its note or the reason
CASES: list[tuple[str, list[RunData], Any, float | None, str]] = [
    # NU, on one run
    *((f"N-{number}", [natural()], HOLDS, value, "")
        for number, value in ((1, 1), (2, 0.8), (3, 2), (4, 1), (5, 150 / WIDTH), (11, 0.75), (13, 0.7), (14, 0.05))),
    ("N-1", [natural(query_bias_by_sequence=deltas([100.0, 100.0, -150.0, -80.0], spread=50.0))], (FAILS,), None, ""),
    ("N-2", [natural(query_bias=alignment(0.4, -0.1))], (FAILS, HOLDS), 0.4, ""),
    ("N-2", [natural(query_bias=alignment(0.8, -0.5))], (HOLDS, FAILS), 0.8, ""),  # later keys are no parallels either
    ("N-3", [natural(gamma=gamma({}))], (FAILS,), 0.0, ""),
    ("N-4", [natural(gamma=gamma({138: -9.0, 247: -8.0}))], HOLDS, 1.0, ""),  # by magnitude
    ("N-4", [natural(gamma=gamma({}))], NOT_APPLIES, None, "EPE_0 has no massive coordinate"),
    ("N-4", [natural(gamma=gamma({138: 1.0, 247: -1.0}))], (FAILS,), 0.0, ""),  # by more than one deviation alone
    ("N-5", [natural(gamma=gamma({138: 0.5, 247: -0.4}))], (FAILS,), None, ""),
    ("N-5", [natural(gamma=gamma({9: 0.0, 138: 12.0, 247: -18.0}))], HOLDS, 100 * 2 / WIDTH, ""),  # ranks 1, 2, 300
    ("N-11", [natural(logit_terms_by_sequence=terms([0.0, 3.0, 1.0, 0.0], 0.0))], (FAILS,), 0.25, ""),
    ("N-11", [natural(logit_terms_by_sequence=terms([[0] * 4, [0, 1, 1, 0], [0, 0, 3, 0], [0, 2, 8, 0]], 0.0))], HOLDS,
        12 / 15, "by layer, without the first"),  # layers count by their gaps
    ("N-11", [natural(logit_terms_by_sequence=terms(0.0, 1.0))], (INCONCLUSIVE,), None, ""),  # there is no gap
    ("N-14", [natural(epe_rest_by_sequence=rests(0.6))], (FAILS, HOLDS), 0.6, ""),
    ("N-14", [natural(epe_rest_by_sequence=rests([0.6, 0.6, 0.05, 0.05]))], HOLDS, 0.05, ""),  # the second half
    ("N-14", [natural(query_bias=alignment(0.1, 0.0))], (HOLDS, FAILS), 0.05, ""),  # neither the rest nor EPE
    # interventions: an arm decides if there was a sink, and beyond random changes
    *((claim, [arm(name, after)], outcome, None, "")
        for claim, name, holds, fails in (
            ("N-6", "nullify-query-bias", [0.3, 0.05], [0.62, 0.05]),
            ("N-7", "replace-epe:at=epe", [0.0, 0.1], [0.4, 0.1]),
            ("N-8", "transplant-epe:at=epe", [0.1, 0.5], [0.5, 0.1]),
            ("N-9", "nullify-first-embedding", [0.55, 0.05], [0.1, 0.05]),
            ("N-10", "zero-key-columns", [0.3, 0.05], [0.62, 0.05]))
        for after, outcome in ((holds, HOLDS), (fails, FAILS))),
    *((claim, [experiment(NO_SINK, name)], FAILS, None, "") for claim, name in (
        ("N-6", "nullify-query-bias"), ("N-7", "replace-epe:at=epe"), ("N-8", "transplant-epe:at=epe"),
        ("N-9", "nullify-first-embedding"), ("N-10", "zero-key-columns"))),
    ("N-6", [natural()], UNMEASURED, None, "sinkscope intervene MODEL --do nullify-query-bias"),
    *(("N-6", [arm("nullify-query-bias", [0.3, 0.05], controls)], INCONCLUSIVE, None, "")
        for controls in (WIDE, {"control 0": [0.6, 0.05]}, {})),
    ("N-10", [arm("zero-key-columns", [0.0, 0.05], LOW)], (HOLDS, FAILS, HOLDS), None, ""),
    ("N-10", [arm("zero-key-columns", [0.0, 0.05], MIDDLE)], HOLDS, None, ""),  # random ones leave two thirds
    ("N-7", [natural(), OTHER_LABEL], UNMEASURED, None, ""),
    ("N-9", [NO_BOS_BEFORE], NOT_APPLIES, None, "position 0 is no BOS"),
    # sinks elsewhere count where part of the mechanism is missing
    ("N-12", [elsewhere("learned")], NOT_APPLIES, None, "it has a query bias and learned positions"),
    ("N-12", [elsewhere("learned", NO_QUERY_BIAS)], HOLDS, None, NO_QUERY_BIAS),
    ("N-12", [elsewhere("rotary", NO_QUERY_BIAS)], HOLDS, None, "its positions are rotary"),
    ("N-12", [elsewhere("rotary")], HOLDS, None, "its positions are rotary"),  # a query bias, but no learned positions
    ("N-12", [elsewhere("learned", "its weights are quantized")], NOT_APPLIES, None, "not known"),
    ("N-12", [elsewhere("rotary", rate=0.01)], FAILS, None, ""),
    # equal tokens: one wrong sequence of one layer is enough; layers of other positions do not count
    *((claim, [repeated(kind, {column: value} if value else None)], FAILS if value else HOLDS, value or None, "")
        for claim, kind, column, wrong in (
            ("W-5", "rotary", "state_difference", 2e-3), ("W-7", "none", "weight_difference", 2e-4),
            ("W-8", "alibi", "weight_difference", 2e-4), ("W-61", "relative", "weight_difference", 2e-4),
            ("W-9", "rotary", "bound_share", 0.99))
        for value in (0.0, wrong)),
    ("W-7", [analysis({"equal_tokens": equal("none", weight_difference=np.nan)}, "repeated", family=family("none"))],
        NOT_APPLIES, None, "denominator"),
    ("W-7", [mixed()], HOLDS, None, "1 layer"),
    ("W-9", [mixed()], HOLDS, None, ""),
    ("W-8", [mixed()], NOT_APPLIES, None, "its positions are none and rotary"),
    ("W-5", [repeated("learned")], NOT_APPLIES, None, "its positions are learned"),
    *(("W-5", [operating(name)], NOT_APPLIES, None, f"its attention is {name}, whose weights do not sum to 1")
        for name in ("sigmoid", "p-norm softmax")),
    *(("W-5", [operating(name)], HOLDS, None, "") for name in ("elu-kernel", "softmax", "scaled softmax")),
    ("W-5", [OUTSIDE], NOT_APPLIES, None, "get more attention"),
    ("W-9", [analysis({}, "repeated", family=family("rotary"))], NOT_APPLIES, None, "not one repeated token"),
    ("W-7", [repeated("none", dict.fromkeys(["weight_difference"], np.nan))], HOLDS, None, "4 layers"),
    # the smallest repeated token is as massive as the sink; a BOS or no massive layers leave nothing to compare
    ("W-6", [text(), repeated("rotary", smallest=990.0)], HOLDS, 0.99, ""),
    ("W-6", [text(), repeated("rotary", smallest=[10.0, 990.0, 100.0, 990.0])], FAILS, 0.1, "layer 2"),  # 0 has none
    ("W-6", [text(input=BOS), repeated("rotary")], UNMEASURED, None, ""),
    ("W-6", [text(input=BOS)], UNMEASURED, None, "sinkscope analyze MODEL --bos never"),  # the first that is missing
    ("W-13", [text(norm=[10.0, 20.0, 40.0, 1000.0])], HOLDS, 4.0, "3 layers"),
    ("W-5", [repeated("rotary", input=BOS)], UNMEASURED, None, ""),
    ("W-6", [text(massive=False), repeated("rotary")], NOT_APPLIES, None, "no layer has massive activations"),
    ("W-6", [text(rate=0.0), repeated("rotary")], NOT_APPLIES, None, "no sink without a BOS"),
    # table 7, also with runs on text or after a BOS, which are other experiments
    *((claim, [experiment(BEFORE | {"after": after} | QUIET, name, "repeated", **facts)], outcome, None, "")
        for claim, name, holds, fails in (
            ("W-10", "replace-epe", [0.1, 0.05], [0.5, 0.05]), ("W-11", "transplant-epe", [0.05, 0.55], [0.05, 0.1]))
        for after, outcome, facts in (
            (holds, HOLDS, {}), (fails, FAILS, {}), (holds, NOT_APPLIES, {"family": family("rotary")}))),
    ("W-10", [experiment(ON_REPEATED, "replace-epe", "repeated")], FAILS, None, ""),
    ("W-10", [analysis({}), arm("replace-epe", [0.1, 0.05])], UNMEASURED, None, ""),
    ("W-10", [analysis({}), AFTER_BOS], UNMEASURED, None, ""),
    ("W-11", [arm("transplant-epe", [0.61, 0.55], QUIET, "repeated")], (HOLDS, INCONCLUSIVE, HOLDS), None, ""),
    # inputs are compared under one policy: a sink at the BOS stays on random tokens after it, and only there
    ("W-2", LIKE_GEMMA, HOLDS, 0.79 / 0.80, "with a BOS text 80.0, random 79.0 %; without text 0.0, random 0.0 %"),
    ("W-2", [read("natural", 0.8, True, main=True), read("random", 0.0, False)], UNMEASURED, None,
        "sinkscope analyze MODEL --input random --bos always"),
    ("W-1", LIKE_GEMMA, HOLDS, 80.0, "with a BOS text 80.0 %; without text 0.0 %"),
    ("W-1", [read("natural", 0.8, False, main=True)], HOLDS, 80.0, "without text 80.0 %"),
    ("W-3", LIKE_GEMMA, NOT_APPLIES, None, "with a BOS text 80.0, repeated 61.0 %; without text 0.0, repeated 0.0 %"),
    ("W-3", of_both(natural=(0.80, 0.7), repeated=(0.61, 0.0)), HOLDS, None, ""),
    ("W-3", of_both(natural=(0.80, 0.7), repeated=(0.0, 0.61)), FAILS, None, ""),
    ("W-4", of_both("learned", natural=(0.80, 0.7), repeated=(0.0, 0.6)), HOLDS, 0.6 / 0.7, ""),
    ("W-4", of_both("learned", natural=(0.80, 0.7), repeated=(0.6, 0.0)), FAILS, None, ""),
    # lengths: in points, the same fall of a smaller rate is smaller, but it is not flatter; a rate near 0 cannot fall
    ("W-20", by_length((0.90, 0.78, 0.65), (0.72, 0.58, 0.42), (0.58, 0.43, 0.35), (0.44, 0.31, 0.24)), (HOLDS, HOLDS),
        None, ""),
    ("W-20", by_length((0.90, 0.8, 0.5), (0.6, 0.5, 0.48), (0.4, 0.35, 0.3), (0.3, 0.28, 0.26)), (HOLDS, FAILS),
        None, ""),
    ("W-20", by_length((0.3, 0.3, 0.3), (0.4, 0.4, 0.35), (0.5, 0.5, 0.4), (0.6, 0.6, 0.5)), FAILS, None, ""),
    ("W-20", by_length((0.9, 0.5, 0.12), (0.8, 0.3, 0.05), (0.7, 0.1, 0.0), (0.6, 0.0, 0.0)), NOT_APPLIES, None,
        "which is a floor"),
    # at 16 tokens uniform attention has more than 0.2, so that all heads exceed it: with them, it would fail
    ("W-20", by_length((1.0, 0.90, 0.15), (0.7, 0.6, 0.45), (0.6, 0.45, 0.3), (0.5, 0.3, 0.2), uniform=3.4),
        (HOLDS, HOLDS), None, ""),
    ("W-20", by_length((0.90, 0.78, 0.65), (0.72, 0.58, 0.42), (0.0, 0.0, 0.0), (0.44, 0.31, 0.24),
        windows=(16, 32, 16, 128)),
        (HOLDS, HOLDS), -15.3571, ""),  # the run's own length has another window, and does not count
    ("W-20", by_length(*[(0.05, 0.0, 0.0)] * 4), NOT_APPLIES, None, "at no length is a sink rate above"),
    ("W-20", by_length(*[(0.9, 0.8, 0.5)] * 4, windows=(8, 32, 64, 128)), UNMEASURED, None, "--seq-len 16 --window 16"),
    # outlier features are looked for in every sequence: the first does not represent the others
    ("S-15", [outliers(*[0.01] * 10)], HOLDS, None, ""),
    ("S-15", [outliers(0.01, *[0.9] * 9)], FAILS, 0.811, ""),
    ("S-15", [outliers(*[0.01, 0.2] * 5)], INCONCLUSIVE, None, ""),
    # other masks
    *(("W-39", [prefixed(at, late)], outcome, None, "") for at, outcome in ((2, HOLDS), (3, FAILS)) for late in (0, 1)),
    ("W-39", [prefixed(2, prefix=0)], NOT_APPLIES, None, "it is no prefix LM"),
    ("W-39", [prefixed(2, count=0)], NOT_APPLIES, None, "no sink at any position"),
    ("W-41", [windowed(0.01)], HOLDS, 0.01, ""),
    ("W-41", [windowed(0.2)], FAILS, 0.2, ""),
    ("W-41", [windowed(0.01, rate=0.02)], (HOLDS, FAILS), 0.01, ""),  # there is no sink at all
    # uniform attention alone exceeds ε
    *((claim, [without_rates()], NOT_APPLIES, None, "position 0 has no sink rate")
        for claim in ("GS-2", "W-1", "W-18", "W-21")),
    *(("W-21", [analysis(blocks(0.5, 0.5).tables, model={"name": "made", "parameters": count})], outcome, None, "")
        for count, outcome in ((150e6, HOLDS), (250e6, NOT_APPLIES))),
    ("W-41", [windowed(0.01, None)], NOT_APPLIES, None, "it has no sliding window"),
    # models without the gradient's gain of one branch, without enough points, or without a bound
    ("GS-15", [branch("attn")], NOT_APPLIES, None, "the gradient's gain in the mlp branch is not defined in any layer"),
    ("GS-15", [branch("attn", "mlp")], FAILS, 1.0, ""),
    ("GS-15", [branch("attn", "mlp", bloat=(9.0, 3.0))], HOLDS, 3.0, ""),
    ("GS-17", [branch("attn", compress=0.0)], NOT_APPLIES, None, "too few layers"),
    # the bare embeddings are among the points of figure 3
    ("GS-17", [reshaping([1, 1, 1, 1])], (HOLDS, HOLDS), -1.0, ""),
    ("GS-17", [reshaping([9, 1, 1, 1])], FAILS, None, ""),
    ("GS-9", [backward(query=[9, 1.5, 1])], HOLDS, 1.5, ""),  # without position 0
    ("GS-10", [backward(query=[0, 1, 1], query_measured=[1e-6] * 3)], HOLDS, None, ""),
    ("GS-11", [backward(value=[10, 2, 1])], HOLDS, 0.2, ""),
    ("GS-13", [analysis({"gradient_check": CHECK})], HOLDS, 1.0, "median of measured ÷ upper bound 0.5"),
    # the mean of one state is the state
    *((claim, [analysis({}, input=BOS)], NOT_APPLIES, None, "the BOS before all") for claim in ("S-9", "S-12")),
    ("S-12", [analysis({}, input=BOS, family=family("learned", causal=False)), no_op("mean-massive", 2.0, 2.01)], HOLDS,
        np.exp(0.01), ""),  # an encoder's first token sees the others
    ("S-13", [attracting()], HOLDS, (3 / 4) / (4 / (4 * 49)), "75% against 2.0%"),
    ("S-13", [attracting(longest=128)], HOLDS, (3 / 4) / (4 / (4 * 49)), "75% against 2.0%"),  # positions of all
    ("V-3", [taking(0.05, 0.9, 0.9)], HOLDS, 0.05, "1 key/value head"),
    ("V-3", [taking(0.9, 0.05, 0.05)], FAILS, 0.9, ""),
    ("V-1", [heads(MASS, value_norm=1 - 0.9 * MASS, value_norm_later=1.0)], HOLDS, -1.0, ""),
    ("V-12", [analysis({"gate": GATES})], HOLDS, 0.2, ""),
    ("W-16", [heads(SINK_HEADS, qk_cosine=np.where(SINK_HEADS > 0.3, 0.6, 0.4), qk_cosine_later=0.5)], HOLDS, 1.0, ""),
    *((claim, [heads(SINK_HEADS, **{column: SINK_HEADS, f"{column}_later": 1.0})], HOLDS, 0.9, "4 of 10 heads")
        for claim, column in (("W-14", "key_norm"), ("W-15", "value_norm"), ("W-17", "qk_norm_product"))),
    ("GS-14", [strengthening(range(1, 25))], HOLDS, 1.0, ""),
    ("GS-14", [strengthening(range(24, 0, -1))], FAILS, -1.0, ""),
    ("GS-16", [gaining("bloat", np.where(np.arange(16) == 0, 9.0, 1.0))], HOLDS, 1.0, ""),
    ("GS-16", [gaining("bloat", np.where(np.arange(16) == 3, 9.0, 1.0))], FAILS, 0.0, ""),
    ("GS-18", [gaining("change", [[9.0], [1.0], [1.0], [1.0]])], HOLDS, 1.0, ""),  # layer 0 does not count
    ("GS-18", [gaining("change", [[1.0], [1.0], [9.0], [0.1]])], FAILS, 1 / 3, ""),
    ("W-18", [blocks(0.1, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)], HOLDS, -40.0, ""),
    ("W-18", [blocks(0.5, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)], FAILS, 40.0, ""),
    ("S-10", [of_tokens((0, "the"), (5, "▁,"), (7, "▁"), (9, "dog"))], HOLDS, 0.5, ""),  # a space is no delimiter
    ("S-10", [of_tokens((0, "the"), (7, "Ġ"), (9, "dog"))], FAILS, 1 / 3, ""),
    # over-mixing and dormant heads, against what any mask or any heads do
    ("FT-1", [mixing(0.2, 0.1, 0.101, 0.099)], HOLDS, np.log(2), "0.1 → 0.2; controls [0.1"),
    ("FT-1", [mixing(0.2, 0.3, 0.31, 0.29)], (HOLDS, FAILS), np.log(2), ""),
    ("IH-2", [no_op(BY_MASS, 2.0, 2.1, 2.5, 2.51, 2.49, 2.5)], HOLDS, 0.4, ""),
    ("IH-2", [no_op(BY_MASS, 2.0, 2.5, 2.1, 2.11, 2.09, 2.1)], FAILS, -0.4, ""),
    ("IH-1", [no_op("ablate-heads", 2.0, 2.1, 2.5), no_op(BY_MASS, 2.0, 2.4, 2.5)], HOLDS, 0.3, ""),
    ("SO-1", [isolating(0.35, 0.01)], HOLDS, None, ""),
    ("SO-1", [isolating(0.35, 0.3)], (HOLDS, HOLDS, FAILS, HOLDS), None, ""),
    ("SO-1", [isolating(0.05, 0.01)], FAILS, None, ""),
    ("SO-1", [isolating(0.35, 0.01, controls=0.4)], (HOLDS, FAILS, HOLDS, HOLDS), None, ""),
    ("SO-2", [deviating(0.15, 0.01)], HOLDS, None, ""),
    ("SO-2", [deviating(0.15, 0.12)], (HOLDS, HOLDS, FAILS, HOLDS), None, ""),
    ("SO-2", [deviating(0.02, 0.01)], FAILS, None, ""),
    ("SO-2", [deviating(0.15, 0.01, controls=0.2)], (HOLDS, FAILS, HOLDS, HOLDS), None, ""),
    # a model without massive activations has none that appear or end
    *((claim, [peaks([1, 1, 5000, 5000, 20], least)], outcome, None, "") for claim in ("S-7", "S-8")
        for least, outcome in ((1000, HOLDS), (9000, FAILS))),
    ("S-5", [peaks([1, 5000, 2e4, 20], 1000)], HOLDS, 2e4, ""),
    ("S-7", [peaks([1, 6, 36, 216, 1296], 1000)], (FAILS, HOLDS), 6.0, ""),  # in each layer less than tenfold
    *(("S-11", [analysis({}), no_op("zero-massive", 2.0, 2.0 + harm, *[2.0 + of_controls] * 2)], outcome, np.exp(harm),
        "") for harm, of_controls, outcome in ((3, 0.05, HOLDS), (1, 0.05, (FAILS, HOLDS)), (3, 0.2, (HOLDS, FAILS)))),
    ("S-11", [analysis({}), arm("zero-massive", [0.1, 0.05])], UNMEASURED, None,
        "sinkscope intervene MODEL --do zero-massive"),  # the arm was measured without its loss
    # with four layers, two of them have half of any sum
    ("GS-4", [writing([1, 1, 1, 1])], NOT_APPLIES, None, "two of 4 layers have at least half of any sum"),
    ("GS-4", [writing([5, 1, 5, 1, 1])], HOLDS, 10 / 13, ""),
    ("GS-4", [writing([1, 1, 1, 1, 1])], FAILS, 0.4, ""),
    # without a sink, no domain can have more
    ("W-19", of_domains(0.5, 0.52), HOLDS, None, "natural 50.0"),
    ("W-19", of_domains(0.5, 0.3), FAILS, None, ""),
    ("W-19", of_domains(0.0, 0.02), NOT_APPLIES, None, "no sink rate is above 10 %"),
    # without the second part, the claim would hold for any weight of any model, with random weights, too
    ("SW-2", [no_op("zero-super-weight", 2.0, 4.5, 2.0), LARGEST_ZEROED], HOLDS, None, ""),
    ("SW-2", [no_op("zero-super-weight", 2.0, 2.0, 2.0), LARGEST_ZEROED], (HOLDS, FAILS), None, ""),
    ("SW-2", [no_op("zero-super-weight", 2.0, 4.5, 2.0), no_op(LARGEST, 2.0, 4.5)], (FAILS, FAILS), np.exp(2.5), ""),
    *((claim, [identities(pathway, 1e-7, value, 1.0, np.nan)], outcome, None, "largest 1.0e+00")
      for claim, pathway in (("GS-33", "key"), ("GS-34", "query"))
      for value, outcome in ((5e-5, HOLDS), (5e-4, FAILS))),
    ("GS-33", [identities("raw_value", 1e-7)], NOT_APPLIES, None,
        "the model computes its logits in its own code, or has no softmax"),
    ("GS-19", [analysis({"norm_bound": BOUND})], NOT_APPLIES, None, "the bound applies to no layer of this model"),
    # streaming
    *((claim, streams(otherwise), FAILS if otherwise else HOLDS, None, "")
        for claim, wrong in (("S-1", {0: 10.5}), ("S-2", {4: 13.0}), ("S-3", {2: 10.1}), ("S-3", {1: 10.1}))
        for otherwise in ({}, wrong)),
    ("S-2", streams({0: 10.5}), NOT_APPLIES, None, "a window without kept tokens suffices"),
    ("S-4", streams({0: 10.5, 2: 10.1, 5: 10.0}, registers=2), NOT_APPLIES, None, "without kept tokens suffices"),
    ("S-4", streams({}), NOT_APPLIES, None, "no register tokens"),
    ("S-4", streams({2: 10.1, 5: 10.0}, registers=2), HOLDS, None, ""),
    ("S-4", streams({2: 12.0, 5: 10.0}, registers=2), FAILS, 1.2, "2 register tokens"),
    ("S-4", streams({}, registers=2), UNMEASURED, None, "keep=5"),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "runs", "expected", "value", "words"), CASES)
def test_claims_are_decided(claim: str, runs: list[RunData], expected: Any, value: float | None, words: str) -> None:
    judgment = judged(claim, *runs)
    assert (judgment.outcomes if isinstance(expected, tuple) else judgment.outcome) == expected
    assert words in (judgment.reason or judgment.estimates[0].note)
    if value is not None:
        assert judgment.estimates[0].value == pytest.approx(value, rel=0.01, abs=0.001)
        assert judgment.estimates[0].low <= judgment.estimates[0].value <= judgment.estimates[0].high


def test_the_spread_of_delta_is_that_of_all_later_tokens() -> None:
    """Sequences with means −150 and −130 and deviations of 5 have a common deviation of √125."""
    table = by_sequence({"delta": -117.0, "delta_later": -140.0, "delta_later_std": 5.0}, LAYERS)
    table["delta_later"] += np.where(table["sequence"] % 2, 10.0, -10.0)
    (estimate,) = judged("N-1", natural(query_bias_by_sequence=table)).estimates
    assert f"{23 / 125**0.5:+.1f}" in estimate.note


@pytest.mark.parametrize("bos", [True, False])
def test_a_no_op_is_set_against_a_constant(bos: bool) -> None:
    """If zeros do harm and the mean over sequences does not, the values of the sink are a bias."""
    zero = no_op("scale-sink-value:where=sinks", 2.0, 2.5, 2.2, 2.2)
    mean = no_op("mean-sink-value:where=sinks", 2.0, 2.01)
    mass = by_sequence({"window_mass": [[0.9, 0.9]] * 4}, head=range(2)).assign(uniform_mass=0.05)
    run = analysis({"attention_heads_by_sequence": mass}, input=BOS if bos else NO_BOS)
    judgment = judged("V-24", run, zero, mean)
    assert judgment.outcome == FAILS
    assert judgment.estimates[0].value == pytest.approx(np.exp(0.5 - 0.2))
    assert "with their mean over sequences in place of zero ×1.01 [1.01, 1.01]" in judgment.estimates[0].note
    assert ("constant anyway" in judgment.estimates[0].note) == bos


# --- the residual stream

DEPTH = 12
VALLEY = range(3, 9)  # layers with massive activations


def states(
    valley: float = 0.02, rescaled: float = 0.5, loose: Any = 0.0, written: float = 0.97, attention: float = 3.0,
    sinks: float = 0.04, residual: Any = 0.98, rotated: float = 0.0, others: float = 0.5,
) -> RunData:  # fmt: skip
    """Return a run with a valley, a secondary sink in each sequence, a residual sink, and a spike in layer 3."""
    inside = np.isin(np.arange(DEPTH), VALLEY)
    entropy = np.where(inside, valley, 0.6 + 0.01 * np.arange(DEPTH))
    columns = {"entropy": entropy, "entropy_rescaled": np.where(inside, rescaled, entropy)}
    columns |= {"anisotropy": np.where(inside, 0.99, 0.3), "anisotropy_bound": np.where(inside, 0.99 - loose, 0.1)}
    sequence = np.arange(SEQUENCES)
    secondary = pd.DataFrame({
        "layer": 4, "sequence": sequence, "position": 9, "kind": "secondary", "lifetime": 2 + sequence % 4,
        "norm": 100.0 + sequence % 4, "written": written, "attention": attention, "attention_elsewhere": 1.0,
    })  # fmt: skip
    first = {"position": 0, "kind": "first", "lifetime": 9, "norm": 1.0, "written": 0.0, "attention": 99.0}
    massive = by_sequence({"value": inside}, DEPTH).assign(position=0)
    rate = np.isin(np.arange(DEPTH) - 1, VALLEY).astype(float) - 1e-3 * np.arange(DEPTH)
    spikes = pd.DataFrame({"layer": range(DEPTH), "cosine": 0.5, "cosine_of_others": others, "step": ""})
    spikes.loc[3, ["cosine", "step"]] = 1.0, "up"
    tables = {
        "entropy_by_sequence": by_sequence(columns, DEPTH, noise=1e-4),
        "entropy": pd.DataFrame({"layer": range(DEPTH), "entropy": entropy}),
        "massive": massive.assign(is_massive=massive["value"] > 0),
        "attention": pd.DataFrame({"layer": range(DEPTH), "head": 0, "position": 0, "sink_rate": rate}),
        "sink_tokens": pd.concat([secondary.assign(**first), secondary], ignore_index=True),
        "parallel_tokens": by_sequence({"parallel": 0.05 * inside, "sinks": sinks * inside}, DEPTH),
        "spikes_by_sequence": by_sequence({"largest_share": residual, "rotated_share": rotated}, DEPTH),
        "spikes": spikes,
    }
    return analysis(tables, input=NO_BOS)


@pytest.mark.parametrize(
    ("claim", "against"),
    [
        ("CV-1", {"loose": 0.1 * (np.arange(DEPTH) == 5)}),  # one layer of the valley is enough
        ("CV-2", {"valley": 0.5}),
        ("CV-3", {"rescaled": 0.1}),
        ("SS-1", {"written": 0.5}),
        ("SS-3", {"attention": 0.9}),
        ("SS-4", {"sinks": 0.001}),
        ("RS-1", {"residual": 0.3}),
        ("RS-1", {"rotated": 0.95}),
        ("RS-2", {"others": 0.99}),
    ],
)
def test_a_claim_on_states_holds_where_its_number_passes_and_fails_where_not(claim: str, against: dict) -> None:
    assert judged(claim, states()).outcome == HOLDS
    assert judged(claim, states(**against)).outcome == FAILS


def test_the_numbers_of_claims_on_states() -> None:
    valley = judged("CV-2", states()).estimates[0]
    assert valley.value == pytest.approx(0.02 / 0.71, rel=1e-2)  # the largest entropy is the last layer's
    ends = [judged("CV-4", states(valley=entropy)) for entropy in (0.02, 0.9)]
    assert [judgment.outcome == HOLDS for judgment in ends] == [True, False]
    assert ends[0].estimates[0].value < 0 < ends[1].estimates[0].value
    entropy, rate = states().tables["entropy"]["entropy"], states().tables["attention"]["sink_rate"]
    expected = stats.spearmanr(entropy[:-1], rate[1:])[0]  # a layer's output is the next one's input
    assert ends[0].estimates[0].value == pytest.approx(expected)
    residual = states(residual=np.where(np.arange(DEPTH) == 5, 0.98, 0.1))  # in one layer
    assert judged("RS-1", residual).estimates[0].value == pytest.approx(0.98)
    assert judged("SS-3", states()).estimates[0].value == pytest.approx(3.0)
    assert judged("SS-2", states()).estimates[0].value == pytest.approx(1.0)
    assert judged("SS-2", states()).outcome in (HOLDS, INCONCLUSIVE)
    assert judged("SS-4", states()).estimates[0].value == pytest.approx(0.8)


def test_copies_of_a_text_are_no_further_secondary_sinks() -> None:
    run, copies = states(), 20
    sinks = run.tables["sink_tokens"]
    falling = sinks["lifetime"].mask(sinks["sequence"].between(1, copies - 1), 200 - sinks["norm"])
    manifest = run.manifest | {"input": {**NO_BOS, "texts": [0] * copies + list(range(1, SEQUENCES - copies + 1))}}
    judgment = judged("SS-2", RunData(manifest, {**run.tables, "sink_tokens": sinks.assign(lifetime=falling)}))
    assert judgment.estimates[0].value == pytest.approx(1.0)


def test_claims_on_states_do_not_apply_without_their_objects() -> None:
    run = states()
    run.tables["massive"]["is_massive"] = False  # type: ignore[index]
    without = RunData(run.manifest, {**run.tables, "sink_tokens": run.tables["sink_tokens"].head(0)})
    for claim in ("CV-1", "CV-2", "CV-3", "SS-1", "SS-2", "SS-3"):
        assert judged(claim, without).outcome == NOT_APPLIES, claim


def test_states_are_those_of_a_run_with_all_their_tables() -> None:
    few = analysis(dict.fromkeys(("entropy", *"abc")))
    every = analysis(dict.fromkeys(("entropy", "sink_tokens", "spikes")))
    assert Evidence.of([few, every], [MAIN, STATES]).runs == {MAIN: few, STATES: every}


def test_an_arm_without_controls_leaves_a_claim_the_null_of_the_others() -> None:
    judgment = judged("SO-1", isolating(0.35, 0.01))
    assert (judgment.null_passes, judgment.tells) == (0.0, "yes")


@pytest.mark.parametrize("role", [MAIN, NULL])
def test_several_runs_for_a_need_give_the_one_with_the_most_tables(role: Need) -> None:
    model = manifest("natural")["model"] | ({"weights": WEIGHTS_AT_RANDOM} if role == NULL else {})
    few, many = (analysis(dict.fromkeys(range(count)), model=model) for count in (1, 3))
    for runs in ([few, many], [many, few]):
        assert Evidence.of(runs, [role]).runs == {role: many}


def test_the_sink_that_is_left_is_that_of_the_position_of_the_claim() -> None:
    evidence = Evidence.of([isolating(0.3, 0.0)], [Need("do", "isolate")])
    left = [sink_left(evidence, Need("do", "isolate"), position).value for position in (0, 1)]
    assert left == pytest.approx([1.0, 0.5], abs=0.05)


def test_interventions_on_repeated_tokens_count_without_a_bos_alone() -> None:
    for condition, begins, counts in (("repeated", NO_BOS, True), ("repeated", BOS, False), ("natural", BOS, False)):
        run = arm("replace-epe", [0.1, 0.05], QUIET, condition)
        assert _has_arm(RunData(run.manifest | {"input": begins}, run.tables), "replace-epe", repeated=True) == counts


def test_the_largest_massive_activation_may_be_negative() -> None:
    rows = [(1, 0, 0, 7, 5000.0), (1, 0, 0, 8, -9000.0), (2, 1, 0, 7, 8000.0)]
    table = pd.DataFrame(rows, columns=["layer", "sequence", "position", "coordinate", "value"])
    run = analysis({"massive": table.assign(ratio=table["value"].abs(), is_massive=True)})
    assert coordinates_of_largest(Sequences(run)).to_dict() == {0: 8, 1: 7}


def test_the_table_has_the_outcome_of_each_number_and_of_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.commands.claims.table.CLAIMS", {"W-41": CLAIMS["W-41"]})
    (evidence,) = Collection(runs=[windowed(0.01, rate=0.02)]).evidence({}).values()
    table = table_of(evidence)
    assert (table["passes"].tolist(), set(table["outcome"])) == (["holds", "fails"], {"fails"})
