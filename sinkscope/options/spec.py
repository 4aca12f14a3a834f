"""The spelling NAME:key=value,… of interventions, retrofits and architectures."""

from sinkscope.errors import InputError
from sinkscope.options.option import split_names


def assignments(text: str) -> list[tuple[str, str | None]]:
    """Split `key=value,…` into pairs (key, value), or (part, None) for a part without =; keys get underscores."""
    pairs: list[tuple[str, str | None]] = []
    for part in split_names(text):
        key, equals, value = part.partition("=")
        pairs.append((key.strip().replace("-", "_"), value.strip()) if equals else (part, None))
    return pairs


def parse_spec(text: str, option: str) -> tuple[str, dict[str, str]]:
    """Split NAME:key=value,… into the name and its parameters, whose values may be lists (`coordinates=138,447`).

    InputError, whose message begins with `option`, if a parameter is given twice or a part is not key=value.
    """
    name, _, rest = text.partition(":")
    parameters: dict[str, str] = {}
    for key, value in assignments(rest):
        if value is None:
            if not parameters:
                raise InputError(f"{option} {text}: '{key}' is no key=value")
            parameters[next(reversed(parameters))] += f",{key}"  # the next value of a list
        elif key in parameters:
            raise InputError(f"{option} {text}: '{key}' is given twice")
        else:
            parameters[key] = value
    return name.strip(), parameters
