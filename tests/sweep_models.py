"""Write reports/models/models.csv and the README's list of models: what becomes of every causal type of transformers.

    python tests/sweep_models.py

A tiny random model of each is built from its configuration.

Of each that works `padded` says whether, of a batch that is padded on either side, sink mass and norms of the residual
stream are those of plain transformers, in float64 to 1e-10; of models with attention code of their own, the norms. Of
those on transformers' attention interface, `agrees` says the same of a sequence alone, and of the gradients of queries,
keys and values.
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
from support.every_model import (
    ALONE,
    ROUND_OFF,
    Row,
    differences,
    every_type,
    is_equal,
    padded_differences,
    row_of,
    tiny_of,
)

from sinkscope.measuring.subject import family_of


def agreement(row: Row, file: Path) -> str:
    """Whether what is measured is what plain transformers compute, of a sequence alone and of a padded batch."""
    if row.outcome not in ("row", "wiring"):
        return ""
    model = tiny_of(row.model_type)
    family, _ = family_of(model)
    if family.door != "interface":
        return "own code"
    padded = padded_differences(model.double(), family, backward=True).values()
    # where padding changes the bare model, what padding tokens attend to reaches others, and is not defined
    meant = [found for found in padded if found[ALONE] < ROUND_OFF]
    found = (differences(row.model_type, file), *meant)
    return "yes" if all(is_equal(row.model_type, each) for each in found) else "NO"


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
    mixed = [row["model_type"] for row in by_outcome["wiring"] if "," in row["layers"]]
    names = {outcome: [row["model_type"] for row in found] for outcome, found in by_outcome.items()}
    return "\n".join(
        (
            f"- {len(names['row'])} known by name: {', '.join(names['row'])};",
            f"- {len(names['wiring'])} found numerically, among them {len(mixed)} that attend in some layers only: "
            f"{', '.join(mixed)};",
            f"- {len(names['refused'])} refused with the reason, and {len(names['not built'])} without a small model "
            "to try.",
        )
    )


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
