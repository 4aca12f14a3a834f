"""Claims of When Attention Sink Emerges (WSE) on related models: sizes of a family, a chat model and its base."""

import numpy as np

from sinkscope.paper_claims.claim import Claim, Part, above, between
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.over_seeds import study_of
from sinkscope.paper_claims.quantities import sink_rates
from sinkscope.paper_claims.relatives import base_of, parameters
from sinkscope.paper_claims.scopes import causal
from sinkscope.paper_claims.studies import ModelStudy, ScoreStudy
from sinkscope.results.papers import WSE_TABLE_1, published
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate, bootstrap, rank_correlation

ALIKE = 5.0  # points: as much as domains of text may differ by (W-19). One of the paper's four pairs differs by more
HELLASWAG = "scores:hellaswag"
BASES = ("Mistral-7B", "LLaMA2-7B", "LLaMA2-13B", "LLaMA3-8B")


def _rates(run: RunData) -> np.ndarray:
    return sink_rates(Evidence({MAIN: run}))


def _with_size(evidence: Evidence, role: str = "sizes") -> Estimate:
    runs = list(study_of(evidence, role, ModelStudy).runs.values())
    counts, rates = np.array([parameters(run) for run in runs]), np.array([_rates(run)[0] for run in runs])
    words = ", ".join(f"{count / 1e6:.3g} M {rate:.1f} %" for count, rate in zip(counts, rates, strict=True))
    return rank_correlation(counts, rates).over(f"{words}; interval over models")


def _hellaswag_with_size(evidence: Evidence) -> Estimate:
    study = study_of(evidence, HELLASWAG, ScoreStudy)
    counts = np.array([parameters(run) for run in study.runs.values()])
    scores = np.array(list(study.scores.values()))
    words = ", ".join(f"{count / 1e6:.3g} M {score:.3f}" for count, score in zip(counts, scores, strict=True))
    return rank_correlation(counts, scores).over(f"{words}; interval over models")


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
        (Part("sink rate, chat model − base, in points", _beside_base, between(-ALIKE, ALIKE)),), ("base",),
        (causal, _tuned_to_chat),
        published("WSE table 1", {name: round(WSE_TABLE_1[f"{name} chat"]["natural"].value
            - WSE_TABLE_1[name]["natural"].value, 2) for name in BASES}, "chat model − base, in points")),
    Claim("W-22", "fig. 4", "The sink grows with size within a family.",
        (Part("rank correlation of the sink rate and the number of parameters", _with_size, above(0.0)),), ("sizes",),
        (causal,), is_ours=False),
    Claim("W-23", "fig. 10", "Size raises the sink and HellaSwag within a family.",
        (Part("rank correlation of the sink rate and the number of parameters",
            lambda e: _with_size(e, HELLASWAG), above(0.0)),
         Part("rank correlation of the score on HellaSwag and the number of parameters", _hellaswag_with_size,
            above(0.0))), (HELLASWAG,), (causal,), is_ours=False),
)  # fmt: skip
