"""Observables, the measurements of a run. To add one, write its class in this folder and register it below."""

from collections.abc import Iterable

from sinkscope.errors import InputError, unknown
from sinkscope.measuring.observables.activation import Activation, Outlier
from sinkscope.measuring.observables.attention import Attention, HeadScores, WindowEdge
from sinkscope.measuring.observables.close_ups import AttentionMaps, MassiveMap, MeanMaps
from sinkscope.measuring.observables.entropy import Entropy
from sinkscope.measuring.observables.equal_tokens import EqualTokens
from sinkscope.measuring.observables.geometry import Gate, Geometry, LargestLogit
from sinkscope.measuring.observables.gradient import Gradient
from sinkscope.measuring.observables.gradient_identities import GradientIdentities
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.observables.over_mixing import OverMixing
from sinkscope.measuring.observables.query_bias import Epe, LogitTerms, QueryBias
from sinkscope.measuring.observables.sink_output import SinkOutput
from sinkscope.measuring.observables.spikes import ResidualSinks, SinkTokens
from sinkscope.measuring.observables.super_weight import SuperWeight

# the order of `sinkscope list` and of the tables
OBSERVABLES: dict[str, type[Observable]] = {
    observable.name: observable
    for observable in (
        Activation, Attention, EqualTokens, Gate, Geometry, LargestLogit, Gradient, GradientIdentities, Massive,
        Outlier, QueryBias, LogitTerms, Epe, WindowEdge, Entropy, SinkTokens, ResidualSinks, SuperWeight, HeadScores,
        SinkOutput, OverMixing, AttentionMaps, MassiveMap, MeanMaps,
    )
}  # fmt: skip


def registered(kind: type[Observable]) -> str:
    """Register an observable that a program has defined, in place of an earlier one of that name, and return its name.

    Raises InputError if the name is one of sinkscope's own.
    """
    if OBSERVABLES.get(kind.name, kind).__module__.startswith(f"{__package__}."):
        raise InputError(f"observables: {kind.name} is the name of an observable of sinkscope: choose another")
    OBSERVABLES[kind.name] = kind
    return kind.name


def check_names(names: Iterable[str] | None, option: str = "--observables") -> None:
    """Raise InputError if the name of an observable is unknown."""
    for name in names or ():
        if name not in OBSERVABLES:
            raise InputError(f"{option} {unknown(name, OBSERVABLES)}")
