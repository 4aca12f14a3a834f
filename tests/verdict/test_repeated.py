"""What is said of repeated tokens depends on the positions that a model is found to have."""

import numpy as np
import pytest
from support.every_model import tiny_of

import sinkscope
from sinkscope.results.findings import Outcome
from sinkscope.verdict.analysis import findings


@pytest.mark.parametrize(
    ("model_type", "name", "outcome"),
    [
        ("smollm3", "repeated-bound", Outcome.PRESENT),  # rotary, and one layer without positions
        ("xglm", "repeated", Outcome.PRESENT),  # sinusoidal
        ("mpt", "repeated", Outcome.ABSENT),
        ("qwen3_next", "repeated", Outcome.UNDECIDED),  # rotary, but linear attention tells equal tokens apart
        ("jamba", "repeated", Outcome.UNDECIDED),
        ("gpt_oss", "repeated", Outcome.UNDECIDED),  # rotary, but a learned sink logit tells equal tokens apart
    ],
)
def test_repeated_tokens(model_type: str, name: str, outcome: Outcome) -> None:
    observables = ("attention", "geometry", *["equal-tokens"] * (name == "repeated-bound"))
    given = {"num_seqs": 2, "seq_len": 16, "bos": "never", "observables": observables}
    run = sinkscope.analyze(tiny_of(model_type), input="repeated", **given)
    (found,) = [finding for finding in findings(run) if finding.name.startswith("repeated")]
    assert (found.name, found.outcome) == (name, outcome)
    assert np.isfinite(run.metric("repeated_bound")) == (name == "repeated-bound")
    assert run.verdict
