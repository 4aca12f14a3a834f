"""Every number of a verdict is in a table of its run, and agrees with the scorecard if it belongs to a claim."""

import re
import tempfile
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from support.printed_numbers import FIXED, all_numbers, numbers_of, stands_in
from tiny import VOCAB, tiny_model

import sinkscope
from sinkscope import Run, retrofit_model
from sinkscope.commands.claims.table import evidence_of, judged
from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.results import findings
from sinkscope.results.findings import FINDING
from sinkscope.verdict import analysis

CONSTANTS = {value for value in vars(findings).values() if isinstance(value, float)}
COUNTED = {  # numbers that count rows
    "tokens", "heads", "total", "layers", "weak_layers", "having", "coordinates", "places", "usual",
}  # fmt: skip
SETTINGS = {"sequences", "lengths", "epsilon", "longest", "masked"}  # numbers from run.json


@cache
def measured(name: str) -> Run:
    """Return a run of a tiny model ("sink" has a sink with massive activations at the BOS), or of SmolLM2 ("real")."""
    torch.manual_seed(0)
    if name == "real":
        return sinkscope.analyze(num_seqs=4)
    if name == "vscale":
        model = retrofit_model(tiny_model("llama", spread=1.0), None, "vscale")
    else:
        model = tiny_model("gpt2" if name == "sink" else name, spread=1.0)
    if name == "sink":
        with torch.no_grad():
            model.transformer.wte.weight[1, 7] = 30_000.0
    tokens = np.random.default_rng(0).integers(3, VOCAB, size=(5, 32))
    tokens[:, 0] = 1
    path = f"{tempfile.mkdtemp()}/text.npy"
    np.save(path, tokens)
    return sinkscope.analyze(model, input=path, bos="never", seq_len=32)


NAMES = ("gpt2", "vscale", "sink", "gemma3", "real")
EACH = pytest.mark.parametrize(
    "name", [*NAMES[:-1], pytest.param(NAMES[-1], marks=[pytest.mark.real_model, pytest.mark.slow])]
)


@EACH
def test_every_number_of_the_verdict_is_in_a_table(name: str) -> None:
    run = measured(name)
    table = run.tables[FINDING].set_index("finding")
    said = (*analysis.settings(run), *analysis.findings(run))
    assert len(said) > 10
    for finding in said:
        rows = table.loc[[finding.name]] if finding.name in table.index else table.iloc[:0]
        known = rows[["value", "low", "high", "threshold"]].to_numpy().ravel().tolist()
        text = re.sub(r"'[^']*'|`[^`]*`|\([^()]*position \d+[^()]*\)", " ", FIXED.sub(" ", finding.sentence))
        quoted = [value for value in finding.numbers.values() if isinstance(value, str)]  # reasons, names
        known += [number.value for quote in quoted for number in numbers_of(quote)]
        for number in numbers_of(text):
            assert stands_in(number, known), (number, finding.sentence)
    whole = run.tables["summary"].query("layer == -1")["value"]
    for row in analysis.overview(run).itertuples(index=False):
        assert all(stands_in(number, whole) for number in numbers_of(row.value)), row


@EACH
def test_the_findings_numbers_are_those_of_the_measured_tables(name: str) -> None:
    run = measured(name)
    known = all_numbers(table for key, table in run.tables.items() if key != FINDING)
    rows = run.tables[FINDING]
    free = rows[(rows["claim"] == "") | ~rows["number"].isin(["value"])]
    free = free[~free["number"].isin(COUNTED | SETTINGS)]
    step = free[free["finding"] == "8-bit-step"].set_index("number")["value"]
    assert step["value"] == pytest.approx(step["largest"] / 255 / step["median"])  # computed from the other numbers
    free = free.drop(free.index[(free["finding"] == "8-bit-step") & free["number"].isin(["value", "median"])])
    massive = run.tables["massive"].groupby("layer")["median"].mean()
    assert step["median"] == pytest.approx(massive[step["layer"]])
    of_claims = scorecard(name)[["value", "low", "high", "least", "most"]]  # another part of a claim, or a threshold
    for row in free.itertuples():
        near = np.abs(known - abs(row.value)).min() <= 1e-9 + 1e-6 * abs(row.value)
        assert near or row.value in CONSTANTS or np.isclose(of_claims, row.value, rtol=1e-9).any(), row


@cache
def scorecard(name: str) -> pd.DataFrame:
    """Judge claims from the run, and with the same run as random weights, which does not change the values."""
    run = measured(name)
    at_random = run.manifest["model"] | {"weights": WEIGHTS_AT_RANDOM}
    return judged(evidence_of([run, replace(run, manifest=run.manifest | {"model": at_random})], "MODEL"))


@EACH
def test_a_verdict_and_a_scorecard_of_one_run_agree(name: str) -> None:
    rows = measured(name).tables[FINDING].query("claim != '' and number == 'value'")
    table = scorecard(name)
    assert len(rows) >= 4
    for row in rows.itertuples():
        own = table[(table["claim"] == row.claim) & (table["part"] == 0)].iloc[0]
        assert row.value == own["value"]
        assert np.isnan(row.threshold) or row.threshold in (own["least"], own["most"])
        if np.isfinite(row.low):
            assert (row.low, row.high) == (own["low"], own["high"])
        said = {"present": "holds", "absent": "fails", "undecided": "inconclusive"}
        if row.outcome in said and row.claim != "S-6":  # massive activations are there; S-6 says that they are few
            assert own["passes"] == said[row.outcome]
