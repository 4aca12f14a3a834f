"""How ranks from weights agree with measured activations: python recipes/scan/agreement.py FOLDER.

FOLDER has a folder of `scan` for each model below. Each model is measured (`analyze --observables super-weight`);
FOLDER/agreement.md gets a column and FOLDER/agreement.png a panel for it. A layer's measured place is that of most
sequences: the coordinate of the largest entry that its feed-forward network adds, and the neuron with the largest input
at the same token.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

import sinkscope
from sinkscope.figures import plot, style
from sinkscope.figures.style import DOT, Figure, Look, new_figure
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.output.drawing import save_figures
from sinkscope.results.statistics import rank_correlation
from sinkscope.results.tables import read_table
from sinkscope.verdict.report import with_interval
from sinkscope.verdict.table_formats import as_markdown

MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2": {"model": None},
    "Gemma3": {"model": ".models/gemma3-270m.gguf", "num_seqs": 16},
    "MGM": {"model": ".models/mgm", "allow_pickle": True, "input": "sampled"},
}
FOLDERS = {"SmolLM2": "smollm2-135m", "Gemma3": "gemma3-270m", "MGM": "mgm"}
MASSIVE = 200.0  # a layer whose network adds a larger entry writes massive activations
LOOKS: dict[str, Look] = {
    "coordinate and neuron agree": DOT | {"color": style.NAVY, "marker": "o", "markersize": 3.5},
    "coordinate alone": DOT | {"color": style.NAVY, "marker": "o", "markersize": 3.5, "markerfacecolor": "white"},
    "neither": DOT | {"color": style.VERMILION, "marker": "x", "markersize": 4},
}


def agreement(scanned: pd.DataFrame, pairs: pd.DataFrame) -> dict[str, str]:
    """Return the row of one model: the places and the sizes that agree."""
    first = scanned[scanned["rank"] == 1]
    both = first.merge(pairs, on=["layer", "expert"], suffixes=("", "_measured"), validate="one_to_one")
    massive = both[both["written"] > MASSIVE]

    def same(rows: pd.DataFrame, what: str) -> str:
        return f"{(rows[what] == rows[f'{what}_measured']).sum()} of {len(rows)}"

    largest = pairs[pairs["is_early"]]
    largest = largest.loc[largest["written"].idxmax()]
    place = scanned.query("layer == @largest.layer and neuron == @largest.neuron")
    order = first["gain"].rank(ascending=False).astype(int).to_numpy()[first["layer"] == largest["layer"]][0]
    rank = f"{place['rank'].iloc[0]} of its layer" if len(place) else "not among the first ten of its layer"
    correlation = rank_correlation(*(both[name].to_numpy(float) for name in ("gain", "written", "layer")))
    return {
        "same coordinate": same(both, "coordinate"),
        "same neuron": same(both, "neuron"),
        f"same coordinate where more than {MASSIVE:g} are added": same(massive, "coordinate"),
        "same neuron there": same(massive, "neuron"),
        "rank correlation of gain and output over layers": with_interval(correlation, ".2f"),
        "measured super weight (layer, coordinate, neuron)": str(
            tuple(int(largest[name]) for name in ("layer", "coordinate", "neuron"))
        ),
        "its rank": f"{rank}, which is {order} of {len(first)} layers",
    }


def draw(ax: Axes, name: str, scanned: pd.DataFrame, pairs: pd.DataFrame) -> None:
    """Draw each layer by the largest gain of its neurons and by the largest entry that it adds."""
    both = scanned[scanned["rank"] == 1].merge(pairs, on=["layer", "expert"], suffixes=("", "_measured"))
    same = (both["coordinate"] == both["coordinate_measured"]).astype(int)
    same += same * (both["neuron"] == both["neuron_measured"])
    for look, number in zip(LOOKS.values(), (2, 1, 0), strict=True):
        ax.plot(*both.loc[same == number, ["gain", "written"]].to_numpy().T, **look)
    for row in both.nlargest(3, "written").itertuples():
        ax.annotate(f"{row.layer}", (row.gain, row.written), xytext=(-3, 2), textcoords="offset points", ha="right")
    plot.value_axis(ax, "largest entry added" if name == "SmolLM2" else "", log=True)
    ax.set(xscale="log", xlabel="largest gain in the layer", title=name)
    ax.xaxis.set_minor_formatter(NullFormatter())


def figure_of(tables: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]]) -> Figure:
    figure = new_figure(style.WIDE, 2.4)
    for ax, (name, both) in zip(figure.subplots(1, len(tables)), tables.items(), strict=True):
        draw(ax, name, *both)
    return figure.finish("Each layer: gain from weights, and output measured on text", LOOKS, ncols=3)


def main(folder: Path) -> None:
    tables = {}
    for name, options in MODELS.items():
        measured = sinkscope.analyze(**options, observables=["super-weight"]).tables["super_weights"]
        pairs = usual_pairs(measured).rename(columns={"row": "coordinate", "column": "neuron"})
        tables[name] = read_table(folder / FOLDERS[name] / "tables" / "scan.parquet"), pairs
    with style.in_style():
        save_figures({"agreement": partial(figure_of, tables)}, folder)
    (folder / "agreement.pdf").unlink()
    rows = [{"model": name} | agreement(*both) for name, both in tables.items()]
    table = pd.DataFrame(rows).set_index("model").T.rename_axis("agreement").reset_index()
    (folder / "agreement.md").write_text(as_markdown(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
