"""What papers print, as claims carry it."""

from collections.abc import Mapping

from sinkscope.results.findings import Published

SCRATCH = "60M model, 5 B tokens, sink rate at position 0 in %"


def published(
    source: str, values: Mapping[str, float], setting: str = SCRATCH, mark: str = ""
) -> tuple[Published, ...]:
    """The numbers of one table, by the names of models or settings."""
    return tuple(Published(name, value, setting, source, mark) for name, value in values.items())
