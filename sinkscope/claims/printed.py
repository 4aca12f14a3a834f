"""How the numbers of a claim are printed: its value with the interval, and its null."""

from typing import Any

import pandas as pd

from sinkscope.claims.claim import Part
from sinkscope.claims.register import CLAIMS
from sinkscope.results.metrics import MISSING


def value_text(claim: str, part: int, value: float, low: float, high: float) -> str:
    """«0.73 [0.70, 0.76]»; the value alone where nothing was drawn."""
    form = _form(claim, part)
    text = MISSING if pd.isna(value) else form.format(value)
    return text if low == high or pd.isna(low) else f"{text} [{form.format(low)}, {form.format(high)}]"


def null_text(row: Any, with_share: bool) -> str:
    """«0.73 (0.70 to 0.76)»: the mean and the extremes of the draws.

    Args:
        row: of the table `claim`.
        with_share: whether to add how the null does where the claim does not tell the model from it.
    """
    share = ""
    if with_share and row.tells == "no":
        share = f"; {row.null_passes:.0%} pass" if row.null_passes else "; gives as much"
    elif with_share and row.tells == "theorem":
        share = " (theorem)"
    if pd.isna(row.null):
        return MISSING + share
    form = _form(row.claim, row.part).format
    mean, least, most = (form(end) for end in (row.null, row.null_low, row.null_high))
    return (mean if pd.isna(row.null_low) or mean == least == most else f"{mean} ({least} to {most})") + share


def _form(claim: str, part: int) -> str:
    """The format string of a number; a scorecard of an older version may have other numbers."""
    known = CLAIMS[claim].parts if claim in CLAIMS else ()
    return known[part].form if part < len(known) else Part.form
