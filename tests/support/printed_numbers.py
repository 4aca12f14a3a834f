"""Finds the numbers of a text among given numbers, up to the printed digits."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

FIXED = re.compile(  # parts of sentences whose numbers are not findings
    r"\bposition 0\b|positions 5–15|95 % interval|8-bit|proposition 4's|Sun et al\. (2024|\(2024\))|GS fig\. 3|GS-6|W-6"
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


class Printed(NamedTuple):
    value: float
    half: float  # a unit of its last digit
    percent: bool


def numbers_of(text: str) -> list[Printed]:
    printed = []
    for match in NUMBER.finditer(text):
        digits = match[0].rstrip(",").replace(",", "").replace("−", "-")
        mantissa, _, exponent = digits.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        end = match.start() + len(match[0].rstrip(","))
        printed.append(Printed(float(digits), 0.5 * unit, text[end : end + 2].lstrip().startswith("%")))
    return printed


def stands_in(number: Printed, values: Iterable[float]) -> bool:
    """Return whether a value is printed as this number, also in percent; the sign may be a word."""
    known = np.abs(np.asarray(list(values), float))
    known = np.concatenate([known, 100 * known]) if number.percent else known
    return bool((np.abs(known - abs(number.value)) <= number.half * (1 + 1e-6)).any())


def all_numbers(tables: Iterable[pd.DataFrame]) -> np.ndarray:
    """Return the absolute values of all numbers of tables, sorted."""
    columns = [table[name].to_numpy(float) for table in tables for name in table.select_dtypes("number")]
    known = np.unique(np.abs(np.concatenate(columns)))
    return known[np.isfinite(known)]
