"""Texts of a figure: its title, and tokens made printable."""

import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

import pandas as pd
from matplotlib import font_manager

from sinkscope.report.figures.style import FONT
from sinkscope.results.run import RunData

INCHES_PER_CHARACTER = 0.068  # of an 8 pt title, on the wide side
VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}
LONGEST_TOKEN = 12


def title(run: RunData, width: float, *shown: str) -> str:
    """«model · condition · 100 × 64 tokens» for a figure `width` inches wide; in two lines if need be.

    `shown` is what a figure of a part of the run says in place of the whole's size.
    """
    room = int(width / INCHES_PER_CHARACTER)
    name = shorten(run.model.rstrip("/").split("/")[-1], room)
    rest = " · ".join([run.condition, *(shown or _size(run))])
    text = f"{name} · {rest}"
    return escape(text if len(text) <= room else f"{name}\n{shorten(rest, room)}")


def _size(run: RunData) -> list[str]:
    read = run.manifest.get("input") or {}
    sequences, tokens = read.get("sequences"), read.get("tokens")
    if not sequences or not tokens:
        return []
    if tokens % sequences == 0:
        return [f"{sequences} × {tokens // sequences} tokens"]
    return [f"{sequences} sequences, {tokens} tokens"]


def shorten(text: str, longest: int) -> str:
    """The middle goes: names differ at their ends."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def escape(text: str) -> str:
    """A pair of dollar signs is no formula."""
    return text.replace("$", r"\$")


def token_label(token: Any, token_id: Any, longest: int = LONGEST_TOKEN) -> str:
    """A token as text that can be seen; «id 123» where there is none, or none that the font can show."""
    text = "".join(VISIBLE.get(sign, sign) for sign in token) if isinstance(token, str) else ""
    has_text = text and token != f"<id {token_id}>"  # which a model without a tokenizer has for text
    if not has_text or not all(_printable(sign) for sign in text):
        return "?" if pd.isna(token_id) else f"id {int(token_id)}"
    return escape(text if len(text) <= longest else text[: longest - 1] + "…")


def token_labels(tokens: Iterable[Any], token_ids: Iterable[Any], longest: int = LONGEST_TOKEN) -> list[str]:
    return [token_label(token, token_id, longest) for token, token_id in zip(tokens, token_ids, strict=True)]


@cache
def _printable(sign: str) -> bool:
    """U+FFFD stands for a part of a character: it says nothing."""
    return sign.isprintable() and sign != "\ufffd" and ord(sign) in _glyphs()


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(FONT)).get_charmap())


def wrapped(label: str, letters: int, lines: int = 4) -> str:
    """An arm's label in lines, broken at hyphens and plus signs."""
    parts = textwrap.wrap(label.replace("+", " + "), max(letters, 6), max_lines=lines, placeholder="…")
    return escape("\n".join(parts))
