"""Texts of a figure: titles, names, and tokens in printable form."""

import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd
from matplotlib import font_manager

from sinkscope.errors import counted
from sinkscope.figures.style import FONT, WIDE
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import model_name, shorten

INCHES_PER_CHARACTER = 0.068  # in an 8 pt title, an upper estimate
VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}
LONGEST_TOKEN = 12
Checkpoints = Sequence[tuple[int, RunData]]  # (training step, its run)


def title(run: RunData, width: float, *shown: str) -> str:
    """Return «model · condition · 100 × 64 tokens» for a figure `width` inches wide, in two lines if it is too long.

    `shown` replaces the number of tokens in figures of a part of the run.
    """
    read = run.manifest.get("input") or {}
    sequences, tokens = read.get("sequences"), read.get("tokens")
    if sequences and tokens and not shown:
        even = tokens % sequences == 0
        several = f"{counted(sequences, 'sequence')}, {tokens} tokens"
        size = f"{sequences} × {tokens // sequences} tokens" if even else several
        shown = (size,)
    return heading(model_name(run.model), run.condition, *shown, width=width)


def heading(*parts: str, width: float = WIDE) -> str:
    """Return a title for a figure `width` inches wide: the parts, the first in its own line if they are too long."""
    room = int(width / INCHES_PER_CHARACTER)
    first, *rest = [part for part in parts if part] or [""]
    text = " · ".join([first, *rest])
    lines = [text] if len(text) <= room else [first, " · ".join(rest)]
    return escape("\n".join(shorten(line, room) for line in lines if line))


def seeds_words(count: int, least: int | None = None) -> str:
    """Return the words for the seeds of means and bands: `count`, or `least` to `count` if some curves have fewer."""
    if count == 1:
        return "1 seed"
    return f"mean and range of {count if least in (None, count) else f'{least} to {count}'} seeds"


def steps_title(runs: Checkpoints, *more: str, width: float = WIDE) -> str:
    """Return «model · condition · steps 0–1000». Checkpoints in one folder are named by the folder."""
    names = {model_name(run.model) for _, run in runs}
    if len(names) > 1:
        names = {Path(str(run.manifest["model"].get("source", ""))).parent.name for _, run in runs}
    conditions = dict.fromkeys(run.condition for _, run in runs)
    first, last = runs[0][0], runs[-1][0]
    steps = f"step {first}" if first == last else f"steps {first}–{last}"
    return heading(names.pop() if len(names) == 1 else "", ", ".join(conditions), steps, *more, width=width)


def places(first: int, last: int) -> str:
    """Return «positions 1–15»."""
    return f"positions {first}–{last}" if last > first else f"position {first}"


def escape(text: str) -> str:
    """Escape dollar signs, because matplotlib reads the text between two of them as a formula."""
    return text.replace("$", r"\$")


def wrapped(label: str, letters: int, lines: int = 4) -> str:
    """Break an arm's label into lines at hyphens and plus signs."""
    parts = textwrap.wrap(label.replace("+", " + "), max(letters, 6), max_lines=lines, placeholder="…")
    return escape("\n".join(parts))


def token_label(token: object, token_id: float | None) -> str:
    """Return a token as visible text, or «id 123» if it has no text or the font cannot show it."""
    text = "".join(VISIBLE.get(sign, sign) for sign in token) if isinstance(token, str) else ""
    has_text = text and token != f"<id {token_id}>"  # the text that a model without a tokenizer has
    # the font cannot show some characters, and U+FFFD is part of a character
    if not has_text or not all(sign.isprintable() and sign != "\ufffd" and ord(sign) in glyphs() for sign in text):
        return "?" if token_id is None or pd.isna(token_id) else f"id {int(token_id)}"
    return escape(text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "…")


def token_labels(token_ids: Iterable[float], tokens: Iterable[object]) -> list[str]:
    return [token_label(token, token_id) for token_id, token in zip(token_ids, tokens, strict=True)]


@cache
def glyphs() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(FONT)).get_charmap())
