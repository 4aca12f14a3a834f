"""Tables as plain text, Markdown, or LaTeX with booktabs."""

import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Literal

import pandas as pd

from sinkscope.errors import InputError, unknown
from sinkscope.results.metrics import METRICS, MISSING

TableFormat = Literal["text", "markdown", "latex"]

LONG, WIDTH = 40, "6cm"  # a LaTeX column with more than LONG characters in a cell has this width, and breaks lines
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


def formatted(table: pd.DataFrame, format: TableFormat = "text", title: str = "") -> str:
    """Return a table as text, without its index, below its title. Raises InputError for an unknown format."""
    if format not in TABLE_FORMATS:
        raise InputError(f"format {unknown(format, TABLE_FORMATS)}")

    def text(value: object) -> str:
        if isinstance(value, float):
            return MISSING if value != value else f"{value:.4g}"
        return str(value)

    return TABLE_FORMATS[format](table.map(text), title)


def _as_text(table: pd.DataFrame, title: str) -> str:
    plain = table.map(lambda text: BOLD.sub(r"\1", text)).astype(object)
    widths = [max(map(len, [str(name), *plain[name]])) for name in plain]
    rows = [plain.columns, *plain.itertuples(index=False)]
    lines = [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([title, *lines] if title else lines)


def as_markdown(table: pd.DataFrame, title: str = "", numbers: bool = False) -> str:
    """Return a Markdown table; `numbers` aligns all columns except the first to the right."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(table.columns) - 1)
    cells = (table.columns, *table.itertuples(index=False))
    names, *rows = ([str(value).replace("|", "\\|") for value in row] for row in cells)
    text = "\n".join(f"| {' | '.join(row)} |" for row in (names, rule, *rows))
    return f"### {title}\n\n{text}" if title else text


def _as_latex(table: pd.DataFrame, title: str) -> str:
    columns = ""
    for name in table:
        if max(map(len, table[name]), default=0) > LONG:  # long texts break into lines
            columns += f"p{{{WIDTH}}}"
        else:  # numbers are right-aligned, others left-aligned
            is_number = columns and all(re.match(r"[−+-]?\d|–$|$|inf$", cell) for cell in table[name])
            columns += "r" if is_number else "l"
    heading, *body = (
        " & ".join(_latex(str(cell)) for cell in row) + r" \\"
        for row in (table.columns, *table.itertuples(index=False))
    )
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *body, r"\bottomrule"]
    lines.append(r"\end{tabular}")
    return "\n".join([f"% {' '.join(title.split())}", *lines] if title else lines)


class EstimateTable(pd.DataFrame):
    """Estimates of metrics (`results/metric_estimates.py`)."""

    @property
    def _constructor(self) -> "type[EstimateTable]":
        return EstimateTable

    def to_latex(self) -> str:
        """Return the table as papers print it, with booktabs: a column of values with their intervals for each ε."""
        labels = ["metric", *(name for name in ("layer", "head") if name in self)]
        texts = self[labels].assign(sequences=self["sequences"].map(str))
        texts["heading"] = [f"ε = {epsilon:g}" for epsilon in self["epsilon"]] if "epsilon" in self else "value"
        for index, row in self.iterrows():
            text = METRICS[row["metric"]].text
            ends = f" [{text(row['low'])}, {text(row['high'])}]" if isfinite(row["low"]) else ""
            texts.loc[index, ["cell", "null"]] = text(row["value"]) + ends, text(row["null"])
        cells = texts.pivot(index=labels, columns="heading", values="cell")[texts["heading"].unique()]
        rest = texts.groupby(labels)[["null", "sequences"]].agg(lambda column: ", ".join(dict.fromkeys(column)))
        table = cells.join(rest).reset_index()
        table["metric"] = [METRICS[name].short for name in table["metric"]]
        return formatted(table, "latex", "values [95 % interval over texts]")


TABLE_FORMATS: Mapping[str, Callable[[pd.DataFrame, str], str]] = {
    "text": _as_text,
    "markdown": as_markdown,
    "latex": _as_latex,
}


def _latex(text: str) -> str:
    bold = BOLD.fullmatch(text)
    if bold:
        return rf"\textbf{{{_latex(bold[1])}}}"
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))


def table_with_spread(mean: pd.DataFrame, spread: pd.DataFrame, metrics: Iterable[str]) -> pd.DataFrame:
    """Return means and standard deviations (rows methods, columns metrics) as texts, under the headings of metrics."""
    table = pd.DataFrame({"Method": mean.index})
    for name in metrics:
        metric, cells = METRICS[name], zip(mean[name], spread[name], strict=True)
        table[metric.heading] = [metric.text_with_spread(value, deviation) for value, deviation in cells]
    return table
