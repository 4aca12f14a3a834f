"""Claims of When Attention Sink Emerges (WSE) on related models: sizes of a family, a chat model and its base."""

import numpy as np

from sinkscope.report.claims.claim import Claim, Part, above, between
from sinkscope.report.claims.estimates import Estimate, bootstrap, rank_correlation
from sinkscope.report.claims.evidence import MAIN, Evidence
from sinkscope.report.claims.over_seeds import study_of
from sinkscope.report.claims.published import published
from sinkscope.report.claims.quantities import sink_rates
from sinkscope.report.claims.relatives import base_of, parameters
from sinkscope.report.claims.scopes import causal
from sinkscope.report.claims.studies import ModelStudy
from sinkscope.results.run import RunData


def _rates(run: RunData) -> np.ndarray:
    return sink_rates(Evidence({MAIN: run}))


def _with_size(evidence: Evidence) -> Estimate:
    runs = list(study_of(evidence, "sizes", ModelStudy).runs.values())
    counts, rates = np.array([parameters(run) for run in runs]), np.array([_rates(run)[0] for run in runs])
    words = ", ".join(f"{count / 1e6:.3g} M {rate:.1f} %" for count, rate in zip(counts, rates, strict=True))
    return rank_correlation(counts, rates).over(f"{words}; interval over models")


def _beside_base(evidence: Evidence) -> Estimate:
    """The sequences are resampled together where both models read the same tokens."""
    base, chat = study_of(evidence, "base", ModelStudy).runs.values()
    before, after = _rates(base), _rates(chat)
    words = f"{before[0]:.1f} → {after[0]:.1f} %"
    if base.manifest["input"].get("sha256") == chat.manifest["input"].get("sha256"):
        return bootstrap(after - before).over(words)
    return (bootstrap(after) - bootstrap(before)).over(words)


def _tuned_to_chat(evidence: Evidence) -> str | None:
    name = evidence.any_run.model
    return None if base_of(name) else "its name does not say that it was tuned to chat"


CLAIMS = (
    Claim("W-12", "C7", "Chat models have the sink of their base.",
        (Part("sink rate, chat model − base, in points", _beside_base, between(-10.0, 10.0)),), ("base",),
        (causal, _tuned_to_chat),
        published("WSE table 1", {"smallest": 0.17, "largest": 9.15}, "difference of chat and base, in points")),
    Claim("W-22", "fig. 4", "The sink grows with size within a family.",
        (Part("rank correlation of the sink rate and the number of parameters", _with_size, above(0.0)),), ("sizes",),
        (causal,), is_ours=False),
)  # fmt: skip
