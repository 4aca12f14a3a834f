"""Whether what a paper found is to be expected of a model: an expectation has the paper's scope."""

from collections.abc import Callable

from sinkscope.interventions.intervention import Expectation, Intervention, Target


def _learned_positions_and_query_bias(target: Target) -> bool:
    if target.family.kinds_of_positions != {"learned"} or target.without_weights("query"):
        return False
    return any(target.projection(layer, "query").bias is not None for layer in target.attending())


# short name of a paper → of which models it speaks; of all where it is not here
SCOPES: dict[str, Callable[[Target], bool]] = {"NU": _learned_positions_and_query_bias}


def expectation(intervention: Intervention, target: Target) -> Expectation | None:
    """What the paper found, if it speaks of such a model."""
    in_scope = SCOPES.get(intervention.paper.partition(" ")[0])
    return intervention.expects if in_scope is None or in_scope(target) else None
