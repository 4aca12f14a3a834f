"""How ranks from weights agree with measured activations: python recipes/scan/agreement.py FOLDER.

FOLDER has a folder of `scan` for each model below. Each model is measured (`analyze --observables super-weight`), and
FOLDER/agreement.md gets a row for it. A layer's measured place is that of most sequences: the coordinate of the largest
entry that its feed-forward network adds, and the neuron with the largest input at the same token.
"""

import sys
from pathlib import Path

import pandas as pd

import sinkscope
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.results.statistics import rank_correlation
from sinkscope.results.tables import read_table
from sinkscope.verdict.report import with_interval
from sinkscope.verdict.table_formats import as_markdown

MODELS = {
    "smollm2-135m": {"model": None},
    "gemma3-270m": {"model": ".models/gemma3-270m.gguf", "num_seqs": 16},
    "mgm": {"model": ".models/mgm", "allow_pickle": True, "input": "sampled"},
}
MASSIVE = 200.0  # a layer whose network adds a larger entry writes massive activations


def agreement(scanned: pd.DataFrame, super_weights: pd.DataFrame) -> dict[str, str]:
    """Return the row of one model: the places and the sizes that agree."""
    pairs = usual_pairs(super_weights).rename(columns={"row": "coordinate", "column": "neuron"})
    first = scanned[scanned["rank"] == 1]
    both = first.merge(pairs, on=["layer", "expert"], suffixes=("", "_measured"), validate="one_to_one")
    massive = both[both["written_measured"] > MASSIVE]

    def same(rows: pd.DataFrame, what: str) -> str:
        return f"{(rows[what] == rows[f'{what}_measured']).sum()} of {len(rows)}"

    found = pairs[pairs["is_early"]]
    found = found.loc[found["written"].idxmax()]
    place = scanned.query("layer == @found.layer and neuron == @found.neuron and coordinate == @found.coordinate")
    order = first["gain"].rank(ascending=False).astype(int).to_numpy()[first["layer"] == found["layer"]][0]
    rank = f"{place['rank'].iloc[0]} of its layer" if len(place) else "not among the first ten of its layer"
    correlation = rank_correlation(*(both[name].to_numpy(float) for name in ("gain", "written_measured", "layer")))
    return {
        "same coordinate": same(both, "coordinate"),
        "same neuron": same(both, "neuron"),
        f"same coordinate where more than {MASSIVE:g} are added": same(massive, "coordinate"),
        "same neuron there": same(massive, "neuron"),
        "rank correlation of gain and output over layers": with_interval(correlation, ".2f"),
        "measured super weight (layer, coordinate, neuron)": str(
            tuple(int(found[name]) for name in ("layer", "coordinate", "neuron"))
        ),
        "its rank": f"{rank}, which is {order} of {len(first)} layers",
    }


def main(folder: Path) -> None:
    rows = []
    for name, options in MODELS.items():
        scanned = read_table(folder / name / "tables" / "scan.parquet")
        run = sinkscope.analyze(**options, observables=["super-weight"])
        rows.append({"model": name} | agreement(scanned, run.tables["super_weights"]))
    table = pd.DataFrame(rows).set_index("model").T.rename_axis("agreement").reset_index()
    (folder / "agreement.md").write_text(as_markdown(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
