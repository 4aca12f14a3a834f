"""Interventions: changes of a model for the length of a block. To add one, write it here and register it below."""

from collections.abc import Iterable

from sinkscope.errors import InputError, unknown
from sinkscope.interventions.first_embedding import NullifyFirstEmbedding
from sinkscope.interventions.intervention import Intervention, Known, Target, applied
from sinkscope.interventions.massive import MeanMassive, RescaleNorm, ZeroMassive
from sinkscope.interventions.positional_encoding import ReplaceEpe, TransplantEpe
from sinkscope.interventions.query_bias import NullifyQueryBias, PerturbQueryBias, ZeroKeyColumns
from sinkscope.interventions.sink_mask import MaskSink
from sinkscope.interventions.sink_value import MeanSinkValue, ScaleSinkValue
from sinkscope.interventions.streaming_window import StreamingWindow
from sinkscope.options.option import filled_in

INTERVENTIONS: dict[str, type[Intervention]] = {
    intervention.name: intervention
    for intervention in (
        NullifyFirstEmbedding,
        ZeroKeyColumns,
        ZeroMassive,
        MeanMassive,
        ReplaceEpe,
        TransplantEpe,
        NullifyQueryBias,
        PerturbQueryBias,
        MaskSink,
        ScaleSinkValue,
        MeanSinkValue,
        RescaleNorm,
        StreamingWindow,
    )
}


def parse(text: str) -> Intervention:
    """Parse an intervention of the command line: NAME or NAME:key=value,key=value.

    A value may be a list: coordinates=138,447 or layers=1-3.

    Raises:
        InputError: A name, parameter or value does not exist.
    """
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in INTERVENTIONS:
        raise InputError(f"intervention {unknown(name, INTERVENTIONS)}")
    parameters: dict[str, str] = {}
    last = None
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if equals:
            last = key.strip().replace("-", "_")
            if last in parameters:
                raise InputError(f"--do {text}: '{last}' is given twice")
            parameters[last] = value.strip()
        elif last is None:
            raise InputError(f"--do {text}: '{part}' is no key=value")
        else:  # the next value of a list
            parameters[last] += f",{part}"
    return filled_in(INTERVENTIONS[name], parameters, f"--do {text}", whole=name)


def parse_all(do: str | Intervention | Iterable[str | Intervention]) -> tuple[Intervention, ...]:
    """Parse one or several interventions, given as text or objects."""
    parts = [do] if isinstance(do, str | Intervention) else list(do)
    return tuple(parse(part) if isinstance(part, str) else part for part in parts)


__all__ = ["INTERVENTIONS", "Intervention", "Known", "Target", "applied", "parse", "parse_all"]
