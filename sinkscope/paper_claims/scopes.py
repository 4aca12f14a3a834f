"""Conditions on models: each function returns the reason why a claim does not apply to a model, or None."""

from collections.abc import Callable

from sinkscope.paper_claims.evidence import Evidence
from sinkscope.results.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, unequal

UNEQUAL = {  # name in `unequal` → reason why equal tokens do not stay equal
    "outside": "attention also goes to {}, which get more attention if a query sees fewer tokens",
    "operations": "its attention is {}, whose weights do not sum to 1",
    "others": "{} layers also mix tokens",
}
SMALL = 200e6  # number of parameters


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
    """Return a condition that requires layers whose positions are of one kind."""
    return lambda evidence: (
        None if kind in kinds_of_positions(evidence.any_run) else f"its positions are {_positions(evidence)}"
    )


def equal_tokens_stay_equal(evidence: Evidence) -> str | None:
    """Require that only attention mixes tokens, and that equal tokens stay equal (WSE §3.3).

    Its weights must sum to 1, and no other part of the model may distinguish equal tokens.
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
    return None if "gate" in evidence.any_run.tables else "its values and heads' outputs have no gate"


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
    """Require a tokenizer, because texts of other domains need one."""
    sampled = evidence.any_run.condition == "sampled"
    return "it has no tokenizer to read other texts" if sampled else None
