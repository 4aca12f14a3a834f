"""Write reports/models/models.csv: what becomes of a tiny random model of every causal type that transformers has.

    python tests/sweep_models.py reports/models

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

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from support.every_model import Row, differences, every_type, row_of, tiny_of

from sinkscope.measuring.subject import family_of

ROUND_OFF = 1e-6


def agreement(row: Row, file: Path) -> str:
    if row.outcome not in ("row", "wiring"):
        return ""
    if family_of(tiny_of(row.model_type))[0].door != "interface":
        return "own code"
    if row.model_type in SCALED_AFTERWARDS:
        return "not comparable"
    return "yes" if max(differences(row.model_type, file).values()) < ROUND_OFF else "NO"


# Their eager attention returns the weights before it multiplies the mix by what a learned sink leaves of them.
SCALED_AFTERWARDS = ("granite_swa", "granitemoe_swa")


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as here, (folder / "models.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(field.name for field in fields(Row)), "agrees"], lineterminator="\n")
        table.writeheader()
        for model_type in every_type():
            row = row_of(model_type)
            agrees = agreement(row, Path(here, "ids.npy"))
            table.writerow(asdict(row) | {"agrees": agrees})
            counts[row.outcome] += 1
            counts[f"agrees: {agrees or 'not measured'}"] += 1
    print(f"transformers {transformers.__version__}:", dict(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
