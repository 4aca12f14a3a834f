"""Conditions on models: each function returns the reason that a claim does not apply to a model, or None."""

from collections.abc import Callable

from sinkscope.paper_claims.evidence import Evidence
from sinkscope.results.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, unequal

UNEQUAL = {  # reasons that equal tokens do not stay equal, by the names in `unequal`
    "outside": "attention also goes to {}, the more the fewer tokens a query sees",
    "operations": "its attention is {}, whose weights do not sum to 1",
    "others": "{} layers mix tokens, too",
}
SMALL = 200e6  # parameters


def _positions(evidence: Evidence) -> str:
    return " and ".join(sorted(kinds_of_positions(evidence.any_run)))


def causal(evidence: Evidence) -> str | None:
    return None if evidence.any_run.is_causal else "it attends both ways"


def absolute_positions(evidence: Evidence) -> str | None:
    found = kinds_of_positions(evidence.any_run) <= ADDED
    return None if found else f"its positions are {_positions(evidence)}, not added to the embeddings"


def learned_positions(evidence: Evidence) -> str | None:
    found = kinds_of_positions(evidence.any_run) == {"learned"}
    return None if found else f"its positions are {_positions(evidence)}"


def some_positions(kind: str) -> Callable[[Evidence], str | None]:
    """Require layers whose positions are of one kind."""
    return lambda evidence: (
        None if kind in kinds_of_positions(evidence.any_run) else f"its positions are {_positions(evidence)}"
    )


def equal_tokens_stay_equal(evidence: Evidence) -> str | None:
    """Require that only attention mixes tokens, that its weights sum to 1, and that no other part of
    the model distinguishes equal tokens (WSE §3.3).
    """
    run = evidence.any_run
    for reason, of in unequal(run).items():
        if of:
            return UNEQUAL[reason].format(of[0])
    found = kinds_of_positions(run) <= WITHIN_ATTENTION
    return None if found else f"its positions are {_positions(evidence)}"


def query_bias(evidence: Evidence) -> str | None:
    return evidence.any_run.manifest.get("not_measured", {}).get("query-bias")


def gated(evidence: Evidence) -> str | None:
    return None if "gate" in evidence.any_run.tables else "nothing gates its values or heads' outputs"


def in_float32(evidence: Evidence) -> str | None:
    dtype = evidence.any_run.manifest["dtype"]
    return None if dtype in ("float32", "float64") else f"it computes in {dtype}"


def small(evidence: Evidence) -> str | None:
    count = evidence.any_run.manifest["model"].get("parameters") or 0
    return None if count < SMALL else f"it has {count / 1e6:,.0f} M parameters, more than {SMALL / 1e6:.0f} M"


def several_attention_layers(evidence: Evidence) -> str | None:
    attention = evidence.any_run.tables.get("attention")
    return "it has one attention layer" if attention is not None and attention["layer"].nunique() == 1 else None


def with_tokenizer(evidence: Evidence) -> str | None:
    """Require a tokenizer, which texts of other domains need."""
    sampled = evidence.any_run.condition == "sampled"
    return "it has no tokenizer to read other texts" if sampled else None
