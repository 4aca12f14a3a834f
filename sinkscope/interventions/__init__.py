"""Interventions: changes to a model within a block. To add one, write it here and register it below."""

from collections.abc import Iterable

from sinkscope.errors import InputError, unknown
from sinkscope.interventions.heads import AblateHeads, ScaleHeadOutputs
from sinkscope.interventions.intervention import Intervention, Known, Target, applied
from sinkscope.interventions.massive import MeanMassive, RescaleNorm, ZeroMassive
from sinkscope.interventions.nu import (
    NullifyFirstEmbedding,
    NullifyQueryBias,
    PerturbQueryBias,
    ReplaceEpe,
    TransplantEpe,
    ZeroKeyColumns,
)
from sinkscope.interventions.sink import Isolate, MaskSink, MeanSinkValue, ScaleSinkValue, StreamingWindow
from sinkscope.interventions.super_weight import ZeroSuperExpert, ZeroSuperWeight
from sinkscope.options.option import from_parameters
from sinkscope.options.spec import parse_spec
from sinkscope.plugins import load_plugins

# the order of `sinkscope list`
INTERVENTIONS: dict[str, type[Intervention]] = {
    intervention.name: intervention
    for intervention in (
        NullifyFirstEmbedding, ZeroKeyColumns, ZeroMassive, MeanMassive, ReplaceEpe, TransplantEpe, NullifyQueryBias,
        PerturbQueryBias, MaskSink, Isolate, ScaleSinkValue, MeanSinkValue, RescaleNorm, ZeroSuperWeight,
        ZeroSuperExpert, AblateHeads, ScaleHeadOutputs, StreamingWindow,
    )
}  # fmt: skip


def parse(text: str) -> Intervention:
    """Parse an intervention of the command line, NAME or NAME:key=value,…; raise InputError for an unknown name or key.

    A value may be a list: coordinates=138,447 or layers=1-3.
    """
    load_plugins()
    name = text.partition(":")[0].strip()
    if name not in INTERVENTIONS:
        raise InputError(f"intervention {unknown(name, INTERVENTIONS)}")
    _, parameters = parse_spec(text, "--do")
    return from_parameters(INTERVENTIONS[name], parameters, f"--do {text}", whole=name)


def parse_all(do: str | Intervention | Iterable[str | Intervention]) -> tuple[Intervention, ...]:
    """Parse one or several interventions, given as text or objects."""
    parts = [do] if isinstance(do, str | Intervention) else list(do)
    return tuple(parse(part) if isinstance(part, str) else part for part in parts)


__all__ = ["INTERVENTIONS", "Intervention", "Known", "Target", "applied", "parse", "parse_all"]
