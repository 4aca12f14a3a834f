"""Claims of which no command makes the models yet, each with what they would have to differ in."""

from typing import Any, Never

from sinkscope.report.claims.claim import Claim, Part, Test, above, at_least, below
from sinkscope.report.claims.evidence import Evidence
from sinkscope.report.claims.published import SCRATCH, published


def _unread(evidence: Evidence) -> Never:
    raise NotImplementedError("no run plays this role")


def _claim(
    id: str, reference: str, statement: str, quantity: str, test: Test, factor: str, values: Any = (), **more: Any
) -> Claim:
    """`values`: name → published value, all of one table."""
    paper = "WSE " if id.startswith("W") else ""
    printed = published(f"{paper}{reference}", dict(values), more.get("setting", SCRATCH), more.get("mark", ""))
    return Claim(id, reference, statement, (Part(quantity, _unread, test),), (f"unvaried:{factor}",), (), printed)


RATE = "sink rate at position 0 in %"

# fmt: off
CLAIMS = (
    _claim("W-23", "fig. 10", "Size raises the sink and HellaSwag within a family.", "rank correlations", above(0.0),
        "HellaSwag of several sizes of a family"),
    _claim("W-35", "§5", "A random first token gives more sink.", "sink rate, random first − plain", above(0.0),
        "blocks whose first token is random", {"first random": 27.03}),
    _claim("W-36", "§5", "Two random first tokens move the sink to the second.", "S₁ − S₀", above(0.0),
        "blocks whose first two tokens are random", {"S₀": 1.98, "S₁": 14.08}),
    _claim("W-37", "table 10", "A fixed token at position k makes k the sink.", "S_k", above(10.0),
        "blocks with a fixed token at position k", {"k = 0": 74.11, "k = 1": 69.03, "k = 2": 69.64}),
    _claim("W-39", "fig. 5", "A prefix LM's sink is among the prefix.", "share of sinks within the prefix",
        at_least(0.9), "a prefix LM"),
    _claim("W-41", "fig. 6", "The sink is the absolute first token, not the window's.", "mean a[t, t−w+1]",
        below(0.03), "the weight on the first token of a window"),
    _claim("W-42", "table 3", "Every positional scheme has a sink.", "smallest sink rate in %", above(10.0),
        "models that differ in the positional scheme alone", {"NoPE": 20.35, "absolute": 32.73, "learned": 33.13,
            "relative": 35.53, "ALiBi": 20.78, "rotary": 18.18}),
    _claim("W-58", "table 14", "Sigmoid attention has none at any learning rate and weight decay.", RATE, below(1.0),
        "sigmoid attention", {"lowest": 0.18, "highest": 0.81}),
    _claim("W-59", "§7.4", "Nor has it at 1 B.", "sink rate, sigmoid − softmax", below(-10.0),
        "sigmoid attention", {"sigmoid": 2.46, "softmax": 45.11}),
)
# fmt: on
