"""Write the lists in reports/models/ and the README's: what becomes of every type in transformers' mappings.

    python tests/sweep_models.py [LIST …]

models.csv: the causal types; image_text.csv: those that also read pictures or sound, of which the text tower is
measured. A tiny random model of each is built from its configuration.

Of each that works and is on transformers' attention interface, `agrees` says whether sink mass, gradients of queries,
keys and values, and norms of the residual stream are those of plain transformers and autograd, in float64 to 1e-6.
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
from support.every_model import LISTS, Row, differences, every_type, row_of, tiny_of

from sinkscope.measuring.subject import family_of
from sinkscope.models.in_memory import undisturbed

ROUND_OFF = 1e-6


def agreement(row: Row, auto: Any, file: Path) -> str:
    if row.outcome not in ("row", "wiring"):
        return ""
    model = tiny_of(row.model_type, auto=auto)
    with undisturbed(model):
        if family_of(model)[0].door != "interface":
            return "own code"
    if row.model_type in SCALED_AFTERWARDS:
        return "not comparable"
    return "yes" if max(differences(row.model_type, file, auto).values()) < ROUND_OFF else "NO"


# Their eager attention returns the weights before it multiplies the mix by what a learned sink leaves of them.
SCALED_AFTERWARDS = ("granite_swa", "granitemoe_swa")


ROOT = Path(__file__).parents[1]
TABLES, README = ROOT / "reports" / "models", ROOT / "README.md"
BEGIN = "<!-- made by tests/sweep_models.py, up to the next empty line -->"
OUTCOMES = ("row", "wiring", "refused", "not built")


def written_rows(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


HEADS = {
    "models": "Of the causal types, each in [models.csv](reports/models/models.csv):",
    "image_text": "Of those that also read pictures or sound, measured where they read text alone, each in "
    "[image_text.csv](reports/models/image_text.csv):",
}


def readme_text() -> str:
    return "\n".join(f"- {HEADS[name]} {readme_list(written_rows(name))}" for name in LISTS)


def readme_list(rows: list[dict[str, str]]) -> str:
    """Of all types, by what becomes of them; of those with layers of other kinds, their number."""
    by_outcome = {outcome: [row for row in rows if row["outcome"] == outcome] for outcome in OUTCOMES}
    mixed = [row["model_type"] for row in by_outcome["wiring"] if "," in row["layers"]]
    names = {outcome: [row["model_type"] for row in found] for outcome, found in by_outcome.items()}
    among = f" ({len(mixed)} attend in some layers only: {', '.join(mixed)})" if mixed else ""
    parts = (
        f"{len(names['row'])} known by name ({', '.join(names['row'])})",
        f"{len(names['wiring'])} found numerically{among}",
        f"{len(names['refused'])} refused with the reason",
        f"{len(names['not built'])} without a small model to try",
    )
    return ", ".join(parts) + "."


def write_table(name: str, file_of_ids: Path) -> None:
    auto = LISTS[name]
    counts: Counter[str] = Counter()
    with (TABLES / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(field.name for field in fields(Row)), "agrees"], lineterminator="\n")
        table.writeheader()
        for model_type in every_type(auto):
            row = row_of(model_type, auto)
            agrees = agreement(row, auto, file_of_ids)
            table.writerow(asdict(row) | {"agrees": agrees})
            counts[row.outcome] += 1
            counts[f"agrees: {agrees or 'not measured'}"] += 1
    print(f"transformers {transformers.__version__}, {name}:", dict(counts))


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    TABLES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as here:
        for name in sys.argv[1:] or LISTS:
            write_table(name, Path(here, "ids.npy"))
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition("\n\n")[2]
    README.write_text(f"{before}{BEGIN}\n{readme_text()}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
