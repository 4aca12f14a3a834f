"""The report on a run as Markdown (title, table and findings), and words that sentences of findings share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, isclose, isfinite
from types import MappingProxyType
from typing import Any

import pandas as pd

from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.options.register import records
from sinkscope.results.findings import Finding, Outcome, Published
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.verdict.table_formats import as_markdown

EMPTY: Mapping[str, Any] = MappingProxyType({})  # a finding without further numbers
# outcome of a claim's number → outcome of the finding
OUTCOMES = {
    Outcome.HOLDS: Outcome.PRESENT,
    Outcome.FAILS: Outcome.ABSENT,
    Outcome.INCONCLUSIVE: Outcome.UNDECIDED,
    Outcome.NOT_ENOUGH_SEEDS: Outcome.UNDECIDED,
}


@dataclass(frozen=True)
class Report:
    """The findings of a run, with the title and table of their page."""

    title: str
    settings: Sequence[Finding]  # how the run was measured
    table: pd.DataFrame  # an overview; every cell is text
    findings: Sequence[Finding]  # all other findings


def report_of(run: RunData) -> Report:
    """Return the report of the command that made a run."""
    record = records()[run.command]
    return record.imported(record.report)(run)


def report_markdown(report: Report) -> str:
    """Return the summary, and then the other findings under the headings of their sections."""
    parts = [summary_markdown(report)]
    for section in dict.fromkeys(finding.section for finding in report.findings):
        lines: list[str] = []
        for finding in report.findings:
            if finding.section == section:
                lines += ([] if finding.is_headline else [finding.sentence]) + published_lines(finding.published)
        if lines:
            parts += [f"### {section}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(part for part in parts if part)


def summary_markdown(report: Report) -> str:
    """Return title, headlines, table and settings."""
    headlines = [f"- **{finding.section}:** {finding.sentence}" for finding in report.findings if finding.is_headline]
    settings = " ".join(finding.sentence for finding in report.settings)
    table = "" if report.table.empty else as_markdown(report.table, numbers=True)
    parts = (f"## {report.title}", "\n".join(headlines), table, settings)
    return "\n\n".join(part for part in parts if part)


def published_lines(published: Sequence[Published]) -> list[str]:
    lines = []
    for (setting, source), some in groupby(published, lambda value: (value.setting, value.source)):
        listed = ", ".join(f"{value.name} {value.value:.2f}%{value.mark}" for value in some)
        note = " († from a transcription of the paper)" if "†" in listed else ""
        lines.append(f"Published, {setting} ({source}): {listed}{note}.")
    return lines


def interval(estimate: Estimate, name: str = "") -> dict[str, Any]:
    """Return `low` and `high` of an estimate, after a prefix; empty if nothing was resampled or they are not finite."""
    if isclose(estimate.low, estimate.high, rel_tol=1e-9) or not (isfinite(estimate.low) and isfinite(estimate.high)):
        return {}
    return {f"{name}low": estimate.low, f"{name}high": estimate.high}


def judgment_of(claim: str, estimate: Estimate) -> dict[str, Any]:
    """Return the outcome, threshold and id of a claim whose first number has this estimate, as fields of a finding."""
    test = RUN_CLAIMS[claim].parts[0].test
    threshold = test.most if test.least == -inf else test.least
    return {"outcome": OUTCOMES[test.outcome(estimate)], "threshold": threshold, "claim": claim}


def finding(
    name: str, section: str, value: Estimate | float, sentence: str, numbers: Mapping[str, Any] = EMPTY, **fields: Any
) -> Finding:
    """Return a finding. The interval of an estimate, as `value` or among the numbers, is added.

    With `claim`, outcome and threshold are those of the claim, unless `fields` has others.
    """
    flat: dict[str, Any] = {}
    for key, number in numbers.items():
        is_estimate = isinstance(number, Estimate)
        flat |= {key: number.value, **interval(number, f"{key}_")} if is_estimate else {key: number}
    if isinstance(value, Estimate):
        fields = (judgment_of(fields["claim"], value) if "claim" in fields else {}) | fields | interval(value)
        value = value.value
    return Finding(name, section, value=value, numbers=flat, sentence=sentence, **fields)


def with_interval(estimate: Estimate, form: str, unit: str = "", label: str = "95 % interval ") -> str:
    """Return an estimate as text, with its interval if it has one that is wider than the digits shown."""
    texts = [f"{value:{form}}" for value in (estimate.value, *interval(estimate).values())]
    ends = f" ({label}{texts[1]} to {texts[2]})" if len(set(texts)) > 1 else ""
    return f"{texts[0]}{unit}{ends}"


def layers_text(layers: Iterable[int]) -> str:
    layers = list(layers)
    return f"layer{'s' * (len(layers) > 1)} {spans(layers)}"


def coordinates_text(coordinates: Sequence[int]) -> str:
    return f"coordinate{'s' * (len(coordinates) > 1)} {', '.join(map(str, coordinates))}"


def spans(numbers: Iterable[int]) -> str:
    """Return for example "0–2, 5" for (5, 0, 1, 2)."""
    runs = groupby(enumerate(sorted(map(int, numbers))), lambda pair: pair[1] - pair[0])  # constant in a run
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in ends)
