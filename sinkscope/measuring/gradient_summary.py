"""The gradient metrics of the table `summary` (names: summary.py): GS figures 2 and 3 as numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sinkscope.measuring.observables.gradient import ALL_HEADS
from sinkscope.measuring.observables.observable import LATER
from sinkscope.results.metrics import TOKEN_GROUPS


def gradient_summary(
    tables: Mapping[str, pd.DataFrame], longest: int = LATER.stop
) -> tuple[dict[str, pd.Series], dict[str, float]]:
    """Metrics by layer, and the whole model's where they are not the means over layers.

    Args:
        tables: Of one run, by name.
        longest: Tokens of the longest sequence. Where tables report fewer of the positions `LATER` than it has, what
            is held against these is NaN.
    """
    per_layer: dict[str, pd.Series] = {}
    totals: dict[str, float] = {}
    if "gradient" in tables:
        by_layer, whole = _pathways(tables["gradient"], longest)
        per_layer |= by_layer
        totals |= whole
    if "gradient_ratio" in tables:
        ratios_by_layer, ratio_totals = _ratios(tables, longest)
        per_layer |= ratios_by_layer
        totals |= ratio_totals
    if "gradient_check" in tables:
        check = tables["gradient_check"]
        per_layer["identity_residual"] = check.groupby("layer")["identity_residual"].max()
        totals["identity_residual"] = float(per_layer["identity_residual"].max())
        per_layer["theorem1_holds"] = check.groupby("layer")["holds"].mean()
    if len(tables["norm_bound"]):
        by_layer = tables["norm_bound"].groupby("layer")
        per_layer["theorem2_holds"] = by_layer["holds"].mean()
        per_layer["theorem2_tightness"] = by_layer["tightness"].mean()
    return per_layer, totals


def _pathways(gradient: pd.DataFrame, longest: int) -> tuple[dict[str, pd.Series], dict[str, float]]:
    """GS fig. 2, which averages the norms over layers before it divides."""
    norms = {pathway: pathway_norms(gradient, pathway) for pathway in ("value", "key", "raw_value")}
    value = norms["raw_value"].combine_first(norms["value"])[0]  # in front of a gate or scale, where there is one
    key = norms["key"][0]
    per_layer = {"value_gradient_norm": value, "value_over_key_gradient": value / key}
    with np.errstate(invalid="ignore", divide="ignore"):  # no gradient at all: 0 ÷ 0
        totals = {"value_over_key_gradient": float(value.mean() / key.mean())}
    for pathway, by_position in norms.items():
        if len(by_position):
            ratio = f"{pathway}_gradient_ratio"
            per_layer[ratio] = _against_later(by_position, longest)
            totals[ratio] = float(_against_later(by_position.mean().to_frame().T, longest).iloc[0])
    return per_layer, totals


def _ratios(tables: Mapping[str, pd.DataFrame], longest: int) -> tuple[dict[str, pd.Series], dict[str, float]]:
    """Of GS eq. 3 for the branch that mixes tokens; nothing where no layer has one."""
    per_layer: dict[str, pd.Series] = {}
    totals: dict[str, float] = {}
    ratios = tables["gradient_ratio"].query("branch == 'attn'")
    if ratios.empty:
        return {}, {}
    for name in ("bloat", "compress", "change"):
        by_position = ratios.pivot(index="layer", columns="position", values=name)
        per_layer[name] = by_position[0]
        per_layer[f"{name}_later"] = _later(by_position, longest).median(axis=1)
        totals |= {metric: float(per_layer[metric].median()) for metric in (name, f"{name}_later")}
    return per_layer, totals | compress_fits(ratios)


def pathway_norms(gradient: pd.DataFrame, pathway: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Gradient norms of all heads together: layers × positions; `by`: columns whose values go in front of layers."""
    chosen = gradient[(gradient["pathway"] == pathway) & (gradient["head"] == ALL_HEADS)]
    return chosen.pivot(index=[*by, "layer"] if by else "layer", columns="position", values="grad_norm")


def fit_points(ratios: pd.DataFrame, first: int = 0, last: int | None = None) -> pd.DataFrame:
    """The points of GS figure 3 that a line is fitted to: one for each layer ≥ 1 and position, with a finite ratio.

    Layer 0 is left out as in the paper: it reads the bare embeddings, which are all of one scale.
    """
    last = int(ratios["position"].max()) if last is None else last
    points = ratios[(ratios["layer"] >= 1) & ratios["position"].between(first, last)]
    return points[(points["compress"] > 0) & (points["input_norm"] > 0)]


def compress_fits(ratios: pd.DataFrame) -> dict[str, float]:
    """Slope and correlation of log₁₀ compress on log₁₀‖x‖, over all positions and by token group."""
    fits: dict[str, float] = {}
    for name, first, last in (("", 0, None), *((f"_{name}", first, last) for name, first, last in TOKEN_GROUPS)):
        points = fit_points(ratios, first, last)
        x, y = np.log10(points["input_norm"]), np.log10(points["compress"])
        if len(points) >= 3 and x.std() > 0 and y.std() > 0:
            fits[f"compress_slope{name}"] = float(np.polyfit(x, y, 1)[0])
            fits[f"compress_correlation{name}"] = float(np.corrcoef(x, y)[0, 1])
    return fits


def _later(by_position: pd.DataFrame, longest: int) -> pd.DataFrame:
    """The columns of the positions LATER; NaN where fewer are reported than sequences have."""
    wanted = range(*LATER.indices(longest))
    known = set(wanted) <= set(by_position.columns)
    return by_position[list(wanted) if known else []]


def _against_later(norms: pd.DataFrame, longest: int) -> pd.Series:
    return norms[0] / _later(norms, longest).mean(axis=1)
