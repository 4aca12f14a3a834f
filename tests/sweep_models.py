"""Write reports/models/models.csv and the README's list of models: what becomes of every causal type of transformers.

    python tests/sweep_models.py

A tiny random model of each is built from its configuration.

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

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from support.every_model import ROUND_OFF, Row, differences, every_type, precision, row_of


def agreement(row: Row, file: Path) -> str:
    if row.outcome not in ("row", "wiring"):
        return ""
    if row.model_type in SCALED_AFTERWARDS:
        return "not comparable"
    found = differences(row.model_type, file)
    return ("yes" if max(found.values()) < ROUND_OFF[precision(row.model_type)] else "NO") if found else "not given out"


# Their eager attention returns the weights before it multiplies the mix by what a learned sink leaves of them.
SCALED_AFTERWARDS = ("granite_swa", "granitemoe_swa")


ROOT = Path(__file__).parents[1]
TABLE, README = ROOT / "reports" / "models" / "models.csv", ROOT / "README.md"
BEGIN = "<!-- made by tests/sweep_models.py, up to the next empty line -->"
OUTCOMES = ("row", "wiring", "refused", "not built")


def written_rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def readme_list(rows: list[dict[str, str]]) -> str:
    """Of all types, by what becomes of them; of those with layers of other kinds, their number."""
    by_outcome = {outcome: [row for row in rows if row["outcome"] == outcome] for outcome in OUTCOMES}
    attending = [row for row in by_outcome["wiring"] if "attention" in _kinds(row)]
    others = [row["model_type"] for row in by_outcome["wiring"] if row not in attending]
    mixed = [row["model_type"] for row in attending if len(_kinds(row)) > 1]
    names = {outcome: [row["model_type"] for row in found] for outcome, found in by_outcome.items()}
    return "\n".join(
        (
            f"- {len(names['row'])} known by name: {', '.join(names['row'])};",
            f"- {len(names['wiring'])} found numerically, among them {len(mixed)} that attend in some layers only: "
            f"{', '.join(mixed)}; and {len(others)} without attention, of which the residual stream is measured: "
            f"{', '.join(others)};",
            f"- {len(names['refused'])} refused with the reason, and {len(names['not built'])} without a small model "
            "to try.",
        )
    )


def _kinds(row: dict[str, str]) -> list[str]:
    """Of its layers: "2 mamba, 2 attention" → mamba, attention."""
    return [kind.partition(" ")[2] for kind in row["layers"].split(", ")]


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as here, TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(field.name for field in fields(Row)), "agrees"], lineterminator="\n")
        table.writeheader()
        for model_type in every_type():
            row = row_of(model_type)
            agrees = agreement(row, Path(here, "ids.npy"))
            table.writerow(asdict(row) | {"agrees": agrees})
            counts[row.outcome] += 1
            counts[f"agrees: {agrees or 'not measured'}"] += 1
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition("\n\n")[2]
    README.write_text(f"{before}{BEGIN}\n{readme_list(written_rows())}\n\n{after}", encoding="utf-8")
    print(f"transformers {transformers.__version__}:", dict(counts))


if __name__ == "__main__":
    main()
