"""The types of interventions' parameters, as they are parsed from the command line."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

MOST_NUMBERS = 1_000_000  # longest range of numbers


def _parse_numbers(value: Any) -> Any:
    """Parse numbers as on the command line: `all`, `3`, `1-3`, `138,447`, `0-2,5`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, tuple | list):
        return tuple(dict.fromkeys(value))
    if not isinstance(value, str):
        return value
    if value.strip() == "all":
        return None
    numbers: list[int] = []
    for part in value.replace("+", ",").split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*|\s*(-\d+)\s*", part)
        if not match:
            raise ValueError(f"'{part.strip()}' is neither a number, nor a range such as 1-3, nor all")
        first = int(match[1] or match[3])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"the range {part.strip()} is empty")
        if last - first >= MOST_NUMBERS:
            raise ValueError(f"the range {part.strip()} has more than {MOST_NUMBERS} numbers")
        numbers += range(first, last + 1)
    return tuple(dict.fromkeys(numbers))


def _parse_named_numbers(value: Any) -> Any:
    if isinstance(value, str) and value.strip() == "all":
        raise ValueError("all cannot be used here: name some numbers")
    return _parse_numbers(value)


def _parse_reals(value: Any) -> Any:
    """Split numbers as on the command line: `0.5`, `0.5,-1e-3`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    return re.split(r"(?<!e)\+|,", value) if isinstance(value, str) else value


Index = Annotated[int, Field(ge=0, lt=2**62)]
Indices = Annotated[tuple[Index, ...], BeforeValidator(_parse_named_numbers), Field(min_length=1)]
_Some = Annotated[tuple[Index, ...], Field(min_length=1)] | None
Chosen = Annotated[_Some, BeforeValidator(_parse_numbers)]  # None: all
Open = Annotated[_Some, BeforeValidator(_parse_named_numbers)]  # None: to be decided by `resolved`
Place = Annotated[int, Field(ge=-(2**62), lt=2**62)]  # a position; below 0: counted from the end of each sequence
_Places = Annotated[tuple[Place, ...], Field(min_length=1)]
Places = Annotated[_Places, BeforeValidator(_parse_named_numbers)]
ChosenPlaces = Annotated[_Places | None, BeforeValidator(_parse_numbers)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Reals = Annotated[tuple[Real, ...], BeforeValidator(_parse_reals)]


def chosen(numbers: tuple[int, ...] | None, count: int) -> list[int]:
    return list(range(count)) if numbers is None else list(numbers)
