"""Claims of streaming, on perplexities made by hand: the known outcome both ways."""

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import FAILS, HOLDS, UNMEASURED, analysis
from support.hand_made_runs import judged as judged_runs

from sinkscope.paper_claims.claim import Judgment
from sinkscope.results.run import RunData

USUAL = {None: 10.0, 0: 90.0, 1: 13.0, 2: 12.0, 4: 10.1}  # first tokens kept (None: dense) → perplexity


def streamed(perplexities: dict[int | None, float]) -> RunData:
    """Eight texts, each nearly as hard for one method as for another."""
    rows = [
        {"method": "dense" if keep is None else "kept", "window": -1 if keep is None else 64, "keep": keep or 0}
        | {"sequence": text, "loss": np.log(perplexity) + 0.5 * np.sin(text) + 0.002 * np.sin((keep or 7) * text)}
        for keep, perplexity in perplexities.items()
        for text in range(8)
    ]
    run = analysis({})
    run.manifest["input"]["longest"] = 512
    tables = {"streaming": pd.DataFrame(), "streaming_by_sequence": pd.DataFrame(rows)}
    return RunData(run.manifest | {"command": "intervene", "arms": {}}, tables)


def judged(claim: str, perplexities: dict[int | None, float], registers: int = 0) -> Judgment:
    natural = analysis({})
    natural.manifest["model"]["registers"] = registers
    return judged_runs(claim, natural, streamed(perplexities))


@pytest.mark.parametrize(
    ("claim", "otherwise"), [("S-1", {0: 10.5}), ("S-2", {4: 13.0}), ("S-3", {2: 10.1}), ("S-3", {1: 10.1})]
)
def test_perplexities_decide(claim: str, otherwise: dict[int | None, float]) -> None:
    assert judged(claim, USUAL).outcome == HOLDS
    assert judged(claim, USUAL | otherwise).outcome == FAILS


def test_register_tokens_alone_against_more_first_tokens() -> None:
    assert "no register tokens" in judged("S-4", USUAL).reason
    assert judged("S-4", {**USUAL, 2: 10.1, 5: 10.0}, registers=2).outcome == HOLDS
    found = judged("S-4", {**USUAL, 2: 12.0, 5: 10.0}, registers=2)
    assert (found.outcome, found.estimates[0].value) == (FAILS, pytest.approx(1.2, rel=0.01))
    assert found.estimates[0].note == "2 register tokens"
    missing = judged("S-4", USUAL, registers=2)  # no stream kept five first tokens
    assert (missing.outcome, "keep=5" in missing.reason) == (UNMEASURED, True)
