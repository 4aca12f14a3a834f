"""Lists what the trainings of reports/ do not decide, and the seeds that would decide it, in reports/undecided.md.

    python recipes/docs/undecided.py

The numbers are those of each report's claims.md; the time of a seed is that of its steps, on the machine of the report.
The parts of when-sinks-emerge are listed with the claims of their paper: VGA's claims on the lab model are judged there
only because the model is the same.
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

`python recipes/docs/undecided.py` → this list. A claim is undecided if the 95 % interval of one of its numbers contains
the threshold and no other number fails. *Would decide*: the seeds with which the interval excludes it in 80 % of
studies, if effect and spread are as seen. The direction is the one seen, so that many claims would then fail. *Hours*:
of the steps alone on one core. *Fits*: whether these seeds take at most four hours of two cores. A training is extended
to the largest number that fits; those of VGA and GS were extended twice. Then what is still undecided is left, also if
it would fit: seeds added until a claim is decided would decide too many.

| report | claim | number | value [95 %] | test | seeds | would decide | hours | fits |
| --- | --- | --- | ---: | --- | ---: | ---: | ---: | --- |
"""
# when-sinks-emerge: part → minutes of one core for a seed of all its levels, from what its README says of five seeds;
# where it says nothing, a training takes 0.2 minutes in one layer and 0.43 in three, as its operations do
MINUTES = {
    "batches": 4 * 0.2, "blocks": 11 * 0.2, "learning-rate": 6 * 0.2, "mixed-operations": 104 / 5,
    "mixed-positions": 24 / 5, "operations": 21 * 0.63, "positions": 7 * 0.63, "text-data": 80, "text-operations": 80,
    "weight-decay": 74 / 5,
}  # fmt: skip


def test_of(words: str) -> Test:
    sign, value = re.match(rf"([<>≤≥]) ({NUMBER})", words).groups()  # type: ignore[union-attr]
    limit = {"least": float(value)} if sign in ">≥" else {"most": float(value)}
    return Test(**limit, strict=sign in "<>")


def minutes_of_seed(report: Path) -> float:
    if not (report / "run.json").exists():
        return MINUTES[report.name]
    manifest = json.loads((report / "run.json").read_text(encoding="utf-8"))
    # the fastest seed of each method, because others waited for other processes; a resumed arm has no time
    seconds: dict[str, float] = {}
    for name, arm in manifest["arms"].items():
        method = name.removesuffix(f"-seed{arm['seed']}")
        seconds[method] = min(seconds.get(method, math.inf), arm.get("step_seconds") or math.inf)
    return sum(seconds.values()) * manifest["config"]["steps"] / 60


def rows_of(report: Path) -> list[str]:
    rows, claim, outcome, minutes = [], "", "", minutes_of_seed(report)
    is_part = report.parent != REPORTS
    heading = ""  # the model, or what is added to it: variants of a method are judged apart
    for line in (report / "claims.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            added = re.search(r"^### (bigram\S+(?:, bigram\S+)*)" if is_part else r" (\([^()]+\))$", line)
            heading = added[1] if added else ""
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 6:
            continue
        claim, outcome = (cells[0], cells[5]) if cells[0] else (claim, outcome)
        interval = re.match(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]", cells[2])
        seeds = re.search(r"(\d+) seeds", cells[1])
        limits = re.match(rf"[<>≤≥] {NUMBER}", cells[4])
        if outcome not in UNDECIDED or not (interval and seeds and limits) or (is_part and not claim.startswith("W-")):
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
        place = report.relative_to(REPORTS).as_posix()
        rows.append(f"| {' | '.join((place, f'{claim} {heading}'.strip(), quantity, *numbers))} |")
    return rows


def main() -> None:
    reports = sorted(path.parent for path in REPORTS.rglob("claims.md"))
    trained = [report for report in reports if (report / "run.json").exists() or report.name in MINUTES]
    rows = [row for report in trained for row in rows_of(report)]
    (REPORTS / "undecided.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
