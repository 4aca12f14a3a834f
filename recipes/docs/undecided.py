"""Lists what the trainings of reports/ do not decide, and the seeds that would decide it, in reports/undecided.md.

    python recipes/docs/undecided.py

The numbers are those of each report's claims.md; the time of a seed is that of its steps, on the machine of the report.
"""

import json
import math
import re
from pathlib import Path

from sinkscope.results.findings import Outcome
from sinkscope.results.judgment import MOST_SEEDS, Test
from sinkscope.results.statistics import Estimate

REPORTS = Path(__file__).parents[2] / "reports"
UNDECIDED = {Outcome.NOT_ENOUGH_SEEDS, Outcome.INCONCLUSIVE}
NUMBER = r"-?[\d.]+(?:e[-+]\d+)?"
CORE_HOURS = 8  # four hours of two cores
HEAD = """# What the trainings do not decide

`python recipes/docs/undecided.py` → this list. A claim is undecided if a number's 95 % interval contains its threshold.
*Would decide*: the seeds with which the interval excludes it in 80 % of studies, if effect and spread are as seen. The
direction is the one seen, so that many claims would then fail. *Hours*: of the steps alone on one core. *Fits*: whether
these seeds take at most four hours of two cores. Each training is extended once, to the largest number of the first
list that fits, and what is still undecided is left: seeds added until a claim is decided would decide too many.

| report | claim | number | value [95 %] | test | seeds | would decide | hours | fits |
| --- | --- | --- | ---: | --- | ---: | ---: | ---: | --- |
"""


def test_of(words: str) -> Test:
    sign, value = re.match(rf"([<>≤≥]) ({NUMBER})", words).groups()  # type: ignore[union-attr]
    limit = {"least": float(value)} if sign in ">≥" else {"most": float(value)}
    return Test(**limit, strict=sign in "<>")


def minutes_of_seed(report: Path) -> float:
    manifest = json.loads((report / "run.json").read_text(encoding="utf-8"))
    # the fastest seed of each method, because others waited for other processes; a resumed arm has no time
    seconds: dict[str, float] = {}
    for name, arm in manifest["arms"].items():
        method = name.removesuffix(f"-seed{arm['seed']}")
        seconds[method] = min(seconds.get(method, math.inf), arm.get("step_seconds") or math.inf)
    return sum(seconds.values()) * manifest["config"]["steps"] / 60


def rows_of(report: Path) -> list[str]:
    rows, claim, minutes = [], "", minutes_of_seed(report)
    variant = ""  # what the heading adds to the model: the arms of a method's variant are judged apart
    for line in (report / "claims.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            variant = (re.search(r" (\([^()]+\))$", line) or ["", ""])[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        interval = re.match(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]", cells[2]) if len(cells) == 6 else None
        if interval is None:
            continue
        claim = cells[0] or claim
        seeds = re.search(r"(\d+) seeds", cells[1])
        limits = re.match(rf"[<>≤≥] {NUMBER}", cells[4])
        if not (seeds and limits):
            continue
        value, low, high = map(float, interval.groups())
        estimate, test = Estimate(value, low, high, seeds=int(seeds[1])), test_of(cells[4])
        if test.outcome(estimate) not in UNDECIDED:
            continue
        # recent reports state it; from the rounded numbers of the others it follows only roughly
        stated = re.search(r"(more than )?(\d+) seeds would decide", cells[4])
        wanted = math.inf if stated and stated[1] else float(stated[2]) if stated else test.seeds_to_decide(estimate)
        hours = wanted * minutes / 60
        quantity = re.sub(r" \([^()]*seeds[^()]*\)$", "", cells[1].removeprefix("… "))
        many = f"> {MOST_SEEDS:,}" if wanted > MOST_SEEDS else f"{wanted:.0f}"
        time = f"{hours:.1f}" if hours < 1e4 else "–"
        fits = "yes" if hours <= CORE_HOURS else "no"
        numbers = (cells[2], limits[0], seeds[1], many, time, fits)
        judged = f"{claim} {variant}".strip()
        rows.append(f"| {' | '.join((report.name, judged, quantity, *numbers))} |")
    return rows


def main() -> None:
    reports = sorted(path.parent for path in REPORTS.glob("*/claims.md") if (path.parent / "run.json").exists())
    rows = [row for report in reports for row in rows_of(report)]
    (REPORTS / "undecided.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
