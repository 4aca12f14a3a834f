"""The table `finding`: every number that the verdict on a run of `analyze` states, with its interval."""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import pandas as pd

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.findings import Finding
from sinkscope.results.run import RunData
from sinkscope.results.tables import Column, names_of
from sinkscope.verdict import analysis

TABLE = "finding"
COLUMNS = (
    Column("finding", "what it is about", kind="text"),
    Column("number", "which of its numbers: value, or another by name; of a list one row each", kind="text"),
    Column("value", "the number"),
    Column("low", "lower end of its 95 % interval; NaN where it has none"),
    Column("high", "upper end"),
    Column("threshold", "what decided the outcome; NaN where there is none"),
    Column("outcome", "what the finding's numbers amount to", kind="text"),
    Column("claim", "whose number it is (`sinkscope list claims`); empty where it is no claim's", kind="text"),
)  # fmt: skip


def finding_table(run: RunData) -> pd.DataFrame:
    """The table of one run."""
    rows = [row for finding in (*analysis.settings(run), *analysis.findings(run)) for row in _rows(finding)]
    table = pd.DataFrame(rows, columns=names_of(COLUMNS))
    table = table.astype({column.name: float for column in COLUMNS if column.kind == "number"})
    for name, value in (("layer", WHOLE_MODEL), ("condition", run.condition), ("model", run.model)):
        table.insert(0, name, value)
    return table


def _rows(finding: Finding) -> Iterator[tuple]:
    about = (finding.threshold, str(finding.outcome), finding.claim)
    if finding.value == finding.value:
        yield (finding.name, "value", finding.value, finding.low, finding.high, *about)
    numbers = _flat(finding.numbers)
    ends = {f"{name}_{end}" for name, _ in numbers for end in ("low", "high")}
    by_name = dict(numbers)
    for name, value in numbers:
        if name not in ends:
            low, high = (by_name.get(f"{name}_{end}", float("nan")) for end in ("low", "high"))
            yield (finding.name, name, value, low, high, *about)


def _flat(numbers: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Name and number, of lists each one."""
    return [(name, float(number)) for name, value in numbers.items() for number in _numbers(value)]


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, tuple | list):
        return [number for part in value for number in _numbers(part)]
    return [float(value)] if isinstance(value, Real) and value == value else []
