"""The findings of `doctor --dtype` and its figure, on a run made by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import run_manifest

from sinkscope.commands.doctor import findings as findings_of
from sinkscope.commands.doctor.figures import draw_overflow_headroom
from sinkscope.output.run import Run
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS

LIMIT = 65504.0
RUNS = [  # setting, dtype, factor, cost, divergence
    ("as it is", "float16", np.nan, 0.0, 0.0),
    ("norms decomposed", "float16", np.nan, 0.5, 0.75),
    ("rescaled", "float32", 8.0, 0.001, 0.0),
    ("rescaled", "float16", 8.0, 0.25, 0.0),
]


def run_of(largest: float = 4e4, broken: tuple[int, str] = (-1, ""), product: float = 7e4) -> Run:
    """Make a run whose residual stream has this largest entry, in layer 1; squares inside two norms overflow.

    `broken` are layer and site of the first numbers that are not finite in float16, as is then layer 1's output.
    """
    sites = [
        (-1, "embed.output", 80.0, False), (0, "layer_in", 9.0, False), (0, "ln_0 (x − mean)²", 81.0, True),
        (0, "ln_1 (x − mean)²", 9e8, True), (0, "q·k", 9.0, True), (0, "scaled q·k", 3.0, True),
        (0, "mlp_out", 50.0, False), (1, "q·k", product, True), (1, "scaled q·k", product / 8, True),
        (1, "ln_2 (x − mean)²", 1.6e9, True), (1, "layer_out", largest, False), (1, "mlp.act.output", 70.0, False),
        (1, "mlp.up.output", 60.0, False), (1, "mlp.down.input", 5.0, False),
    ]  # fmt: skip
    table = pd.DataFrame(sites, columns=["layer", "site", "largest", "is_inside"])
    table = table.assign(order=range(len(table)), headroom=LIMIT / table["largest"], clip=np.nan, is_finite=True)
    table["overflows"] = table["largest"] > LIMIT
    table = table.assign(position=3, token="a", coordinate=7)
    runs = pd.DataFrame(RUNS, columns=["setting", "dtype", "factor", "cost", "divergence"])
    runs = runs.assign(loss=3.0, difference=0.01, layer=-1, site="")
    if broken[1]:
        runs.loc[0, ["layer", "site"]] = broken
        table["is_finite"] = table["site"] != "layer_out"
    record = {"dtype": "float16", "limit": LIMIT, "refused": {}}
    return Run(run_manifest(command="doctor", overflow=record), {"overflow": table, "overflow_runs": runs})


def found(name: str, **changes: Any) -> Finding:
    (one,) = (finding for finding in findings_of.findings(run_of(**changes)) if finding.name == name)
    return one


@pytest.mark.parametrize(("largest", "outcome"), [(4e4, Outcome.WEAK), (3e4, Outcome.ABSENT)])
def test_a_number_near_the_limit_is_a_weak_finding(largest: float, outcome: Outcome) -> None:
    """Numbers inside norms are larger, but are no part of this finding."""
    one = found("overflow", largest=largest)
    assert (one.outcome, one.value) == (outcome, pytest.approx(LIMIT / largest))
    assert (one.numbers["largest"], one.numbers["layer"]) == (largest, 1)
    assert ("so that other text may overflow" in one.sentence) == (outcome == Outcome.WEAK)


@pytest.mark.parametrize(
    ("largest", "broken", "words"),
    [
        (1e5, (1, "layer_out"), "layer_out of layer 1 is the first that is not finite, as predicted"),
        (1e5, (0, "mlp_out"), "mlp_out of layer 0 is the first that is not finite, unlike predicted"),
        (3e4, (1, "layer_out"), "layer_out of layer 1 is the first that is not finite, unlike predicted"),
        (1e5, (-1, ""), "every number is finite, unlike predicted, and it costs 0"),
    ],
)
def test_a_run_in_the_dtype_is_compared_with_what_was_predicted(
    largest: float, broken: tuple[int, str], words: str
) -> None:
    one = found("overflow", largest=largest, broken=broken)
    assert one.outcome == Outcome.PRESENT
    assert f"; run in it, {words}" in one.sentence
    assert ("float16 overflows: 100,000 at layer_out of layer 1 (coordinate 7, position 3, token 'a') is the first" in
            one.sentence) == (largest > LIMIT)  # fmt: skip
    assert one.sentence.endswith("and neither is the residual stream of layer 1.") == bool(broken[1])
    fits = found("overflow", largest=3e4)
    assert "; run in it, every number is finite, and it costs 0" in fits.sentence


def test_norms_have_their_largest_number_and_its_headroom() -> None:
    one = found("overflow-norms")
    assert one.value == pytest.approx(LIMIT / 1.6e9)
    assert "squares numbers up to 40,000, which float16 cannot hold, from ln_1 of layer 0 on" in one.sentence
    assert "moves the next tokens of the text by 0.75" in one.sentence


@pytest.mark.parametrize(("product", "outcome"), [(7e4, Outcome.WEAK), (6e4, Outcome.ABSENT)])
def test_the_largest_product_of_a_query_and_a_key(product: float, outcome: Outcome) -> None:
    one = found("overflow-qk", product=product)
    assert (one.outcome, one.value) == (outcome, pytest.approx(LIMIT / product))
    assert one.numbers == {"largest": product, "scaled": product / 8, "layer": 1}


def test_the_overview_has_costs_and_the_first_that_is_not_finite() -> None:
    table = findings_of.overview(run_of(broken=(1, "layer_out")))
    costs = [[METRICS["cost"].text(x) for x in (3.0, *row[3:])] for row in RUNS]
    assert table[["loss", "cost", "divergence"]].values.tolist() == costs
    assert table["first not finite"].tolist() == ["layer_out of layer 1", "–", "–", "–"]


@pytest.mark.parametrize(("difference", "outcome"), [(0.01, Outcome.PRESENT), (np.inf, Outcome.ABSENT)])
def test_a_remedy_helps_if_its_numbers_are_finite_also_without_a_loss(difference: float, outcome: Outcome) -> None:
    columns = {"setting": "rescaled", "dtype": "float16", "factor": 8.0, "cost": np.nan, "layer": 1, "site": "mid"}
    one = findings_of._remedy(SimpleNamespace(difference=difference, **columns), None, [])
    assert one.outcome == outcome
    assert one.sentence.endswith("is not finite from mid of layer 1 on.") == (outcome == Outcome.ABSENT)


def test_a_remedy_costs_something_in_the_models_own_dtype_and_in_the_other() -> None:
    one = found("overflow-rescaled")
    assert (one.value, one.numbers["own_cost"], one.numbers["factor"]) == (0.25, 0.001, 8.0)
    assert "that read the stream by 64 costs 0.001 nats per token in float32, 0.25" in one.sentence


@pytest.mark.parametrize(
    ("cost", "site", "outcome", "words"),
    [
        ((0.03, 0.01, 0.05), "", Outcome.ABSENT,
         "costs 0.030 (95 % interval 0.010 to 0.050) nats per token, below the threshold of 0.1."),
        ((0.2, 0.1, 0.3), "", Outcome.PRESENT, "nats per token, not below the threshold of 0.1."),
        ((0.2, 0.09, 0.3), "", Outcome.UNDECIDED, "nats per token, not shown to be below the threshold of 0.1."),
        ((0.05, 0.01, 0.1), "", Outcome.UNDECIDED, "nats per token, not shown to be below the threshold of 0.1."),
        ((np.nan, -np.inf, np.inf), "", Outcome.UNDECIDED, "is finite; there is no loss to show its cost."),
        ((np.nan, -np.inf, np.inf), "mid", Outcome.PRESENT, "is not finite from mid of layer 1 on."),
    ],
)  # fmt: skip
def test_the_cost_of_scaled_float8_decides(cost: tuple[float, ...], site: str, outcome: Outcome, words: str) -> None:
    run = run_of(1e5, (1, "layer_out"))
    runs = run.tables["overflow_runs"].head(2).assign(dtype="float8_e4m3", setting=["as it is", "scaled"])
    runs.loc[1, ["layer", "site"]] = 1, site
    scaled = pd.DataFrame([cost], columns=["cost", "cost_low", "cost_high"])
    manifest = {**run.manifest, "overflow": {**run.manifest["overflow"], "dtype": "float8_e4m3"}}
    tables = {**run.tables, "overflow_runs": runs, "overflow_scaled": scaled}
    float8, unscaled, _ = findings_of.findings(Run(manifest, tables))
    assert (float8.name, float8.outcome, float8.is_headline) == ("float8", outcome, True)
    assert float8.sentence.endswith(words)
    assert (unscaled.name, unscaled.outcome, unscaled.is_headline) == ("overflow-unscaled", Outcome.PRESENT, False)
    assert unscaled.sentence.startswith("float8_e4m3 without scales overflows: 100,000 at layer_out")


def test_the_figure_has_the_named_sites_and_the_two_largest_others() -> None:
    figure = draw_overflow_headroom(run_of())
    *sites, limit = figure.axes[0].lines
    assert sorted(line.get_ydata()[-1] for line in sites) == [50, 60, 70, 4e4]
    assert set(limit.get_ydata()) == {LIMIT}
