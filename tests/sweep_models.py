"""Write the lists in reports/models/ with the outcome of every type in transformers' mappings, and their summaries.

The types by outcome are in recipes/docs/models.md, and their numbers in the README.

    python tests/sweep_models.py [LIST[:TYPE] …]

With types, the other rows of a list stay as they are.

A tiny random model of each type is built from its configuration, and measured by `sinkscope.analyze`. `agrees` says
whether every column of the tables `attention`, `attention_heads`, `sink_positions`, `activation`, `massive` and
`gradient` and the logits equal those of plain transformers and autograd, in float64 to 1e-10, alone and padded on
either side, and whether the model is unchanged afterwards. `sites` are the sites of the table `activation`.
"""

import csv
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from support.agreement import UNDEFINED, Row, differences, is_equal, padded_differences, row_of
from support.every_model import LISTS, every_type, tiny_of

from sinkscope.measuring.observables.activation import STREAM_SITES
from sinkscope.measuring.subject import family_of
from sinkscope.models.family import UNREAD
from sinkscope.models.in_memory import undisturbed


def agreement(row: Row, auto: Any, file: Path) -> dict[str, str]:
    if row.outcome not in ("row", "wiring"):
        return {"sites": "", "agrees": ""}
    model = tiny_of(row.model_type, auto=auto)
    with undisturbed(model):
        family, _ = family_of(model)
    sites = {site for at in range(len(family.layer_modules(model))) for site in family.block(at).sites}
    compared = [*(site for site in STREAM_SITES if site in sites), *(("value",) if family.has_attention else ())]
    by_side = {"alone": differences(row.model_type, file, auto)}
    by_side |= padded_differences(model.double(), family, whole=True)
    undefined = [side for side, columns in by_side.items() if columns[UNDEFINED]]
    but = f", but transformers itself gives NaN with padding on the {' and '.join(undefined)}" if undefined else ""
    agrees = f"yes{but}" if all(is_equal(row.model_type, columns) for columns in by_side.values()) else "NO"
    return {"sites": " ".join(compared), "agrees": agrees}


ROOT = Path(__file__).parents[1]
TABLES, README, PAGE = ROOT / "reports" / "models", ROOT / "README.md", ROOT / "recipes" / "docs" / "models.md"
BEGIN = "<!-- made by tests/sweep_models.py, up to the next empty line -->"
OUTCOMES = ("row", "wiring", "refused", "not built")


def written_rows(name: str) -> list[dict[str, str]]:
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


HEADS = {
    "models": "Of the causal types, each in [models.csv](../../reports/models/models.csv):",
    "encoders": "Of those that predict masked tokens, each in [encoders.csv](../../reports/models/encoders.csv):",
    "image_text": "Of those that also read pictures or sound, measured where they read text alone, each in "
    "[image_text.csv](../../reports/models/image_text.csv):",
}


KINDS = {"models": "causal", "encoders": "masked", "image_text": "with pictures or sound"}


def readme_text() -> str:
    """Return a table of how many types are measured, equal to plain transformers, of those that could be tried."""
    counts = []
    for name in LISTS:
        rows = [row for row in written_rows(name) if row["outcome"] != "not built"]
        counts.append(f"{sum(row['agrees'].startswith('yes') for row in rows)} of {len(rows)}")
    lines = ([KINDS[name] for name in LISTS], ["---:"] * len(LISTS), counts)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page_text() -> str:
    return "\n".join(f"- {HEADS[name]} {page_list(written_rows(name))}" for name in LISTS)


def page_list(rows: list[dict[str, str]]) -> str:
    """Return the types by outcome, and the number of types with layers of other kinds."""
    by_outcome = {outcome: [row for row in rows if row["outcome"] == outcome] for outcome in OUTCOMES}
    attending = [row for row in by_outcome["wiring"] if "attention" in _kinds(row["layers"])]
    unread = [row["model_type"] for row in by_outcome["wiring"] if UNREAD in _kinds(row["layers"])]
    without = (row for row in by_outcome["wiring"] if row not in attending)
    others = [row["model_type"] for row in without if row["model_type"] not in unread]
    mixed = [row["model_type"] for row in attending if len(_kinds(row["layers"])) > 1]
    names = {outcome: [row["model_type"] for row in listed] for outcome, listed in by_outcome.items()}
    among = f" ({len(mixed)} attend in some layers only: {', '.join(mixed)})" if mixed else ""
    without = f"; {len(others)} without attention, of which the residual stream is measured ({', '.join(others)})"
    read = f"; {len(unread)} with attention whose weights are not read, in some or all layers ({', '.join(unread)})"
    parts = (
        f"{len(names['row'])} known by name ({', '.join(names['row'])})" if names["row"] else "",
        f"{len(names['wiring'])} found numerically{among}{without if others else ''}{read if unread else ''}",
        f"{len(names['refused'])} refused with the reason",
        f"{len(names['not built'])} without a small model to try",
    )
    return ", ".join(part for part in parts if part) + "."


def _kinds(layers: str) -> list[str]:
    """Return the kinds of layers: "2 mamba, 2 attention" → mamba, attention."""
    return [kind.partition(" ")[2] for kind in layers.split(", ")]


def write_table(name: str, types: Collection[str], file_of_ids: Path) -> None:
    """Write the rows of these types, or of all."""
    auto = LISTS[name]
    rows = {row["model_type"]: row for row in written_rows(name)} if types else {}
    for model_type in types or every_type(auto):
        row = row_of(model_type, auto)
        rows[model_type] = asdict(row) | agreement(row, auto, file_of_ids)
    with (TABLES / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*(field.name for field in fields(Row)), "sites", "agrees"], lineterminator="\n")
        table.writeheader()
        table.writerows(rows[model_type] for model_type in every_type(auto))
    counts = Counter(row["outcome"] for row in rows.values())
    counts += Counter(f"agrees: {row['agrees'] or 'not measured'}" for row in rows.values())
    print(f"transformers {transformers.__version__}, {name}:", dict(counts))


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    TABLES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as here:
        asked = [word.partition(":") for word in sys.argv[1:] or LISTS]
        for name in dict.fromkeys(name for name, _, _ in asked):
            write_table(name, [each for of, _, each in asked if of == name and each], Path(here, "ids.npy"))
    for document, text in ((README, readme_text()), (PAGE, page_text())):
        before, _, end = document.read_text(encoding="utf-8").partition(BEGIN)
        after = end.partition("\n\n")[2]
        document.write_text(f"{before}{BEGIN}\n{text}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
