"""The findings of `scan`. A rank is called a candidate, never a super weight."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sinkscope.errors import counted
from sinkscope.html_page.contents import Contents, PageParts
from sinkscope.interventions.super_weight import EARLY
from sinkscope.models.feed_forward import NO_EXPERT
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.tables import WHOLE_MODEL

FLOAT16 = 65504.0  # its largest number


def overview(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the ten candidates with the largest gains, as text."""
    rows = tables["scan"].nlargest(10, "gain")
    rows = rows.assign(**{name: rows[name].map("{:,.4g}".format) for name in ("gain", "weight", "bound")})
    expert = ["expert"] * bool((rows["expert"] != NO_EXPERT).any())
    return rows[["layer", *expert, "coordinate", "neuron", "gain", "weight", "bound"]].astype(str)


def findings(manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> list[Finding]:
    table = tables["scan"]
    first = table[table["rank"] == 1]
    best = first.loc[first[first["layer"] < EARLY * (first["layer"].max() + 1)]["gain"].idxmax()]
    numbers: dict[str, Any] = {name: int(best[name]) for name in ("layer", "coordinate", "neuron")}
    sentence = f"In the first {EARLY:.0%} of the layers, neuron {best['neuron']} of layer {best['layer']} can write "
    sentence += f"most: {best['gain']:,.4g} into coordinate {best['coordinate']} for an input of norm 1. It is a "
    sentence += "candidate, because weights do not show which inputs occur."
    rows = [Finding("candidate", "Super weights", value=float(best["gain"]), numbers=numbers, sentence=sentence)]
    layers, same = len(first), first["coordinate"].value_counts()
    numbers = {"coordinate": int(same.index[0]), "layers": layers}
    sentence = f"The first neurons of {same.iloc[0]} of {counted(layers, 'layer')} write coordinate {same.index[0]}."
    rows.append(Finding("coordinate", "Super weights", value=float(same.iloc[0]), numbers=numbers, sentence=sentence))
    above = table[table["bound"] > FLOAT16]
    numbers = {"layers": above["layer"].nunique(), "largest": float(table["bound"].max()), "kept": len(table)}
    sentence = f"{len(above)} of {counted(len(table), 'listed neuron')}, in {counted(numbers['layers'], 'layer')}, can "
    sentence += f"write more than float16 holds ({FLOAT16:,.0f}) for an input of unit root mean square: the largest "
    sentence += f"bound is {numbers['largest']:,.4g}. `doctor --dtype float16` shows whether a text does it."
    about: dict[str, Any] = {"threshold": FLOAT16, "numbers": numbers, "sentence": sentence}
    outcome = Outcome.WEAK if len(above) else Outcome.ABSENT
    rows.append(Finding("float16-bound", "float16", outcome, float(len(above)), **about))
    if (norms := tables.get("scan_norms")) is not None:
        norm = norms.loc[norms["largest"].idxmax()]
        numbers = {"layer": int(norm["layer"]), "coordinate": int(norm["coordinate"]), "median": float(norm["median"])}
        sentence = (
            f"The largest gain of a norm next to a feed-forward network is {norm['largest']:,.4g}, at coordinate "
        )
        sentence += f"{norm['coordinate']} {norm['side']} that of layer {norm['layer']}, and its median "
        sentence += f"{norm['median']:,.3g}."
        rows.append(Finding("norm-gain", "Norms", value=float(norm["largest"]), numbers=numbers, sentence=sentence))
    if (biases := tables.get("scan_biases")) is not None:
        head = biases.loc[biases["logit"].idxmax()]
        numbers = {"layer": int(head["layer"]), "head": int(head["head"]), "bound": float(biases["bound"].max())}
        sentence = (
            f"Query and key biases alone give a logit of at most {head['logit']:.3g} (head {head['head']} of layer "
        )
        sentence += (
            f"{head['layer']}) without a rotation by positions, the same for all keys, which moves no attention; "
        )
        sentence += f"rotated, they give at most {numbers['bound']:.3g}, which differs by distance."
        rows.append(Finding("biases", "Biases", value=float(head["logit"]), numbers=numbers, sentence=sentence))
    if (matrices := tables.get("scan_matrices")) is not None:
        ratios = matrices["largest_norm"] / matrices["median_norm"]
        matrix, entry = matrices.loc[ratios.idxmax()], matrices.loc[matrices["largest"].idxmax()]
        numbers = {"layer": int(entry["layer"]), "ratio": float(ratios.max()), "layer_of_ratio": int(matrix["layer"])}
        sentence = (
            f"The largest weight is {entry['largest']:.4g}, in {_place(entry)}. The norm of a row is most outlying "
        )
        sentence += f"in {_place(matrix)}: {ratios.max():.3g} × the median of its rows."
        rows.append(Finding("matrices", "Matrices", value=float(entry["largest"]), numbers=numbers, sentence=sentence))
    sentence = "The output embedding is the input embedding, so that what is changed in one is changed in the other."
    if not manifest["tied_embeddings"]:
        sentence = "The output embedding is a matrix of its own."
    rows.append(Finding("tied", "Embeddings", value=float(manifest["tied_embeddings"]), sentence=sentence))
    return rows


def _place(row: pd.Series) -> str:
    return f"`{row['tensor']}`" + (f" of layer {row['layer']}" if row["layer"] != WHOLE_MODEL else "")


class ScanPage(PageParts):
    def findings(self, manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        return findings(manifest, tables)

    def overviews(self, contents: Contents) -> Mapping[str, pd.DataFrame]:
        return {"": overview(contents.tables)}
