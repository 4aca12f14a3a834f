"""Write the lists of reports/models/ and that of the README: what becomes of every type in transformers' mappings.

    python tests/sweep_models.py [LIST …]

A tiny random model of each is built from its configuration: causal language models for the list `models`, those that
predict masked tokens for `encoders`. All lists by default.

Of each that works, `agrees` says whether sink mass, gradients of queries, keys and values, and norms of the residual
stream are those of plain transformers and autograd, in float64 to 1e-6. A model that attends in code of its own gives
its weights out, but no gradients.
"""

import csv
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from support.every_model import LISTS, Row, differences, every_type, row_of

ROUND_OFF = 1e-6


def agreement(row: Row, file: Path, auto: Any) -> str:
    if row.outcome not in ("row", "wiring"):
        return ""
    if row.model_type in SCALED_AFTERWARDS:
        return "not comparable"
    found = differences(row.model_type, file, auto)
    return ("yes" if max(found.values()) < ROUND_OFF else "NO") if found else "not given out"


# Their eager attention returns the weights before it multiplies the mix by what a learned sink leaves of them.
SCALED_AFTERWARDS = ("granite_swa", "granitemoe_swa")


ROOT = Path(__file__).parents[1]
TABLES, README = ROOT / "reports" / "models", ROOT / "README.md"
BEGIN = "<!-- made by tests/sweep_models.py, up to the next empty line -->"
OUTCOMES = ("row", "wiring", "refused", "not built")


def written_rows(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def readme_list() -> str:
    """What the README has of the written lists."""
    return "\n".join([_causal_lines(written_rows("models")), *map(_line, list(LISTS)[1:])])


def _line(name: str) -> str:
    """Of a further list, the types that work."""
    rows = written_rows(name)
    counts = Counter(row["outcome"] for row in rows)
    work = [row["model_type"] for row in rows if row["outcome"] in ("row", "wiring")]
    return (
        f"- {name.replace('_', ' ')}, {len(rows)} types in [{name}.csv](reports/models/{name}.csv): {len(work)} work "
        f"({', '.join(work)}), {counts['refused']} refused with the reason, {counts['not built']} not to be had small."
    )


def _causal_lines(rows: list[dict[str, str]]) -> str:
    """Of all types, by what becomes of them; of those with layers of other kinds, their number."""
    by_outcome = {outcome: [row for row in rows if row["outcome"] == outcome] for outcome in OUTCOMES}
    mixed = [row["model_type"] for row in by_outcome["wiring"] if "," in row["layers"]]
    names = {outcome: [row["model_type"] for row in found] for outcome, found in by_outcome.items()}
    return "\n".join(
        (
            f"- {len(names['row'])} known by name: {', '.join(names['row'])};",
            f"- {len(names['wiring'])} found numerically, among them {len(mixed)} that attend in some layers only: "
            f"{', '.join(mixed)};",
            f"- {len(names['refused'])} refused with the reason, and {len(names['not built'])} without a small model "
            "to try;",
        )
    )


def write_list(name: str, auto: Any) -> None:
    counts: Counter[str] = Counter()
    path = TABLES / f"{name}.csv"
    with tempfile.TemporaryDirectory() as here, path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(field.name for field in fields(Row)), "agrees"], lineterminator="\n")
        table.writeheader()
        for model_type in every_type(auto):
            row = row_of(model_type, auto)
            agrees = agreement(row, Path(here, "ids.npy"), auto)
            table.writerow(asdict(row) | {"agrees": agrees})
            counts[row.outcome] += 1
            counts[f"agrees: {agrees or 'not measured'}"] += 1
    print(f"{name}, transformers {transformers.__version__}:", dict(counts))


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    TABLES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or LISTS:
        write_list(name, LISTS[name])
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition("\n\n")[2]
    README.write_text(f"{before}{BEGIN}\n{readme_list()}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
