"""Conditions on models: each function of one of its runs returns why a claim does not apply to a model, or None."""

from collections.abc import Callable
from typing import Any

from sinkscope.results.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, unequal
from sinkscope.results.run import WITH, RunData

Scope = Callable[[RunData], str | None]
UNEQUAL = {  # name in `unequal` → reason why equal tokens do not stay equal
    "outside": "attention also goes to {}, which get more attention if a query sees fewer tokens",
    "operations": "its attention is {}, whose weights do not sum to 1",
    "others": "{} layers also mix tokens",
}


def requires(read: Callable[[RunData], Any], reason: str, fits: Callable[[Any], object] = bool) -> Scope:
    """Return a condition on a value of a run, which `reason` may contain as {}."""

    def scope(run: RunData) -> str | None:
        value = read(run)
        return None if fits(value) else reason.format(value)

    return scope


def _millions(run: RunData) -> float:
    return (run.manifest["model"].get("parameters") or 0) / 1e6


causal = requires(lambda run: run.is_causal, "it attends both ways")
gated = requires(lambda run: "gate" in run.tables, "its values and heads' outputs have no gate")
several_attention_layers = requires(
    lambda run: "attention" not in run.tables or run.tables["attention"]["layer"].nunique() != 1,
    "it has one attention layer",
)
with_tokenizer = requires(lambda run: run.condition != "sampled", "it has no tokenizer to read other texts")
in_float32 = requires(
    lambda run: run.manifest["dtype"], "it computes in {}", lambda dtype: dtype in ("float32", "float64")
)
small = requires(_millions, "it has {:,.0f} M parameters, not below 200 M", lambda count: count < 200)
of_a_billion = requires(_millions, "it has {:,.0f} M parameters, fewer than a billion", lambda count: count >= 900)
# with one causal state of the first token, what is measured there is the same in every sequence
varied_first_token = requires(
    lambda run: run.bos != WITH or not run.is_causal, "the BOS before all sequences has one state"
)


def requires_positions(fit: Callable[[set[str]], bool], words: str = "") -> Scope:
    def scope(run: RunData) -> str | None:
        kinds = kinds_of_positions(run)
        return None if fit(kinds) else f"its positions are {' and '.join(sorted(kinds))}{words}"

    return scope


absolute_positions = requires_positions(lambda kinds: kinds <= ADDED, ", not added to the embeddings")
learned_positions = requires_positions(lambda kinds: kinds == {"learned"})
within_attention = requires_positions(lambda kinds: kinds <= WITHIN_ATTENTION)


def some_positions(kind: str) -> Scope:
    return requires_positions(lambda kinds: kind in kinds)


def equal_tokens_stay_equal(run: RunData) -> str | None:
    """Require that only attention mixes tokens, with weights that sum to 1, and equal tokens stay equal (WSE §3.3)."""
    reasons = [UNEQUAL[reason].format(of[0]) for reason, of in unequal(run).items() if of]
    return reasons[0] if reasons else within_attention(run)


def query_bias(run: RunData) -> str | None:
    return run.manifest.get("not_measured", {}).get("query-bias")
