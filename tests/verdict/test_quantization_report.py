"""Findings of `quantize`, from hand-made tables."""

from typing import Any

import pandas as pd
import pytest
from support.manifests import run_manifest

from sinkscope.output.run import Run
from sinkscope.quantization.settings import COSTLY
from sinkscope.results.findings import Finding, Outcome
from sinkscope.verdict import quantization

SETTINGS = {"full": 0.0, "all": 1.4, "weights": 0.05, "activations": 1.3, "massive-kept": 0.9}
COLUMNS = ["layer", "setting", "site", "part", "kept", "cost"]
SITES = [(2, "down_proj", "output", True, 693.0), (3, "down_proj", "output", False, 90.0)]


def run_of(costs: dict[str, float], costliest: float | None = None) -> Run:
    """Make a run on 8 sequences: costs of the whole model, a kind of site that costs 0.8, and one layer of it."""
    rows: list[tuple[Any, ...]] = [(-1, setting, "", "", "", cost) for setting, cost in costs.items()]
    rows += [(-1, "alone", "down_proj", "output", "", 0.8), (2, "alone", "down_proj", "output", "", 0.3)]
    rows += [(-1, "kept", "down_proj", "output", "", 0.6)]
    if costliest is not None:
        rows += [(-1, "costliest-kept", "", "", "layer 2 down_proj output, layer 3 down_proj output", costliest)]
    table = pd.DataFrame(rows, columns=COLUMNS).assign(sequences=8, max_inf_norm=9.0, kurtosis=3.0)
    table["loss"] = 3.0 + table["cost"]
    table["perplexity"] = table["loss"].map(lambda loss: 2.718281828**loss)
    sites = pd.DataFrame(SITES, columns=["layer", "site", "part", "is_massive", "max_abs"])
    sites = sites.assign(median_abs=0.5, zeroed=0.93)
    given = {"bits_weights": 8, "bits_activations": 8, "calibration": 4, "linear_layers": 2, "not_quantized": {}}
    return Run(
        run_manifest(command="quantize", quantization=given), {"quantization": table, "quantization_sites": sites}
    )


def found(run: Run, name: str) -> list[Finding]:
    return [finding for finding in quantization.findings(run) if finding.name == name]


def test_a_cost_is_found_from_its_threshold_on() -> None:
    (cost,) = found(run_of(SETTINGS), "cost")
    assert (cost.outcome, cost.threshold) == (Outcome.PRESENT, COSTLY)
    assert cost.value == pytest.approx(2.718281828**1.4)
    harmless = run_of(SETTINGS | {"all": 0.009})
    assert found(harmless, "cost")[0].outcome == Outcome.ABSENT
    assert {finding.name for finding in quantization.findings(harmless)} == {"cost", "massive-sites"}


def test_costly_kinds_and_sites_are_findings_of_their_own() -> None:
    run = run_of(SETTINGS)
    (kind,), (site,), (kept,) = (found(run, name) for name in ("kind", "site", "kept"))
    assert (kind.value, kind.numbers["kind"], kind.numbers["sequences"]) == (0.8, "down_proj output", 8)
    assert (site.value, site.numbers["layer"], site.numbers["largest"]) == (0.3, 2, 693.0)
    assert (kept.value, kept.numbers["before"]) == (0.6, 1.4)
    assert "`down_proj output` of layer 2" in site.sentence


@pytest.mark.parametrize(
    ("cost", "outcome", "words"),
    [
        (0.1, Outcome.CONFIRMED, "nearly restores perplexity"),
        (0.7, Outcome.PARTLY, "recovers 50% of the cost"),
        (1.5, Outcome.ABSENT, "recovers nothing"),
    ],
)
def test_the_share_of_the_cost_that_sparing_sites_recovers(cost: float, outcome: Outcome, words: str) -> None:
    run = run_of(SETTINGS, costliest=cost)
    restored = found(run, "restored")[-1]
    assert restored.outcome == outcome
    assert words in restored.sentence
    (costliest,) = found(run, "costliest")
    assert costliest.numbers == {"count": 2, "total": 2, "massive": 1, "sites": (("down_proj output", (2, 3)),)}
    assert "1 of which hold massive activations: `down_proj output` of layers 2–3" in costliest.sentence
