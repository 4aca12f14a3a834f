"""Summary tables as plain text, Markdown, or LaTeX with booktabs."""

import re
from collections.abc import Callable, Mapping
from typing import Literal

import pandas as pd

from sinkscope.errors import InputError, unknown
from sinkscope.verdict.markdown import as_markdown

TableFormat = Literal["text", "markdown", "latex"]

LONG, WIDTH = 40, "6cm"  # a column with more letters than that in a cell is broken into lines of this width
MISSING = "–"
BOLD = re.compile(r"\*\*(.+)\*\*")

# fmt: off
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}",
    "–": "--", "—": "---", "−": "$-$", "…": r"\ldots{}", "·": r"$\cdot$", "±": r"$\pm$", "×": r"$\times$",
    "÷": r"$\div$", "→": r"$\to$", "≥": r"$\geq$", "≤": r"$\leq$", "≈": r"$\approx$", "≠": r"$\neq$", "∞": r"$\infty$",
    "‖": r"$\|$", "†": r"\dag{}", "‡": r"\ddag{}", "½": r"$\frac{1}{2}$", "²": "$^2$", "√": r"$\surd$",
    "Σ": r"$\Sigma$", "Δ": r"$\Delta$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$",
    "ε": r"$\varepsilon$", "η": r"$\eta$", "κ": r"$\kappa$", "λ": r"$\lambda$", "μ": r"$\mu$", "ρ": r"$\rho$",
    "σ": r"$\sigma$", "φ": r"$\varphi$", "∂": r"$\partial$", "∇": r"$\nabla$", "∈": r"$\in$",
    **{sign: f"$_{{{number}}}$" for number, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")},
}
# fmt: on


class Tabular:
    """What has summary tables: every cell text, or a number with four digits."""

    @property
    def summary_tables(self) -> Mapping[str, pd.DataFrame]:
        """By their titles; "" where one needs none."""
        raise NotImplementedError

    def formatted(self, format: TableFormat = "text") -> str:
        """All of them.

        Raises:
            InputError: no such format.
        """
        parts = [formatted(table, format, title) for title, table in self.summary_tables.items()]
        return "\n\n".join(parts)


def formatted(table: pd.DataFrame, format: TableFormat = "text", title: str = "") -> str:
    """A table, without its index, below its title.

    Args:
        table: Texts and numbers.
        format: "text"; "markdown"; "latex": a tabular that needs the package booktabs.

    Raises:
        InputError: no such format.
    """
    if format not in FORMATS:
        raise InputError(f"format {unknown(format, FORMATS)}")
    return FORMATS[format](table.map(_text), title)


def _as_text(table: pd.DataFrame, title: str) -> str:
    plain = table.map(lambda text: BOLD.sub(r"\1", text)).astype(object)
    widths = [max(map(len, [str(name), *plain[name]])) for name in plain]
    rows = [plain.columns, *plain.itertuples(index=False)]
    lines = [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([title, *lines] if title else lines)


def _as_markdown(table: pd.DataFrame, title: str) -> str:
    return f"### {title}\n\n{as_markdown(table)}" if title else as_markdown(table)


def _as_latex(table: pd.DataFrame, title: str) -> str:
    def row(cells: object) -> str:
        return " & ".join(_latex(str(cell)) for cell in cells) + r" \\"  # type: ignore[attr-defined]

    columns = "".join(_column(table[name], place) for place, name in enumerate(table))
    body = [row(cells) for cells in table.itertuples(index=False)]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", row(table.columns), r"\midrule", *body, r"\bottomrule"]
    lines.append(r"\end{tabular}")
    return "\n".join([f"% {' '.join(title.split())}", *lines] if title else lines)


FORMATS: Mapping[str, Callable[[pd.DataFrame, str], str]] = {
    "text": _as_text,
    "markdown": _as_markdown,
    "latex": _as_latex,
}


def _text(value: object) -> str:
    if isinstance(value, float):
        return MISSING if value != value else f"{value:.4g}"
    return str(value)


def _column(cells: pd.Series, place: int) -> str:
    """How a column stands: names to the left, long texts in lines, what begins as a number to the right."""
    if max(map(len, cells), default=0) > LONG:
        return f"p{{{WIDTH}}}"
    is_number = place and all(re.match(r"[−+-]?\d|–$|$|inf$", cell) for cell in cells)
    return "r" if is_number else "l"


def _latex(text: str) -> str:
    bold = BOLD.fullmatch(text)
    if bold:
        return rf"\textbf{{{_latex(bold[1])}}}"
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
