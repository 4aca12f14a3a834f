"""Summary tables as text, Markdown and LaTeX, compared with hand-written results."""

import pandas as pd
import pytest

from sinkscope import InputError
from sinkscope.verdict.table_formats import formatted

TABLE = pd.DataFrame({"model_name": ["my_org/a&b", "{x} 50%"], "‖v‖ ε": [0.123456, float("nan")], "n": ["1", "12"]})


def test_text_and_markdown() -> None:
    assert formatted(TABLE) == "model_name  ‖v‖ ε   n\nmy_org/a&b  0.1235  1\n{x} 50%     –       12"
    expected = "| model_name | ‖v‖ ε | n |\n| --- | --- | --- |\n| my_org/a&b | 0.1235 | 1 |\n| {x} 50% | – | 12 |"
    assert formatted(TABLE, "markdown") == expected
    assert formatted(TABLE, "markdown", "Title").startswith("### Title\n\n| model")
    with pytest.raises(InputError, match="'latec' is unknown; did you mean 'latex'"):
        formatted(TABLE, "latec")  # type: ignore[arg-type]


def test_latex_is_escaped_and_has_rules() -> None:
    assert formatted(TABLE, "latex", "A\ntitle").splitlines() == [
        "% A title",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"model\_name & $\|$v$\|$ $\varepsilon$ & n \\",
        r"\midrule",
        r"my\_org/a\&b & 0.1235 & 1 \\",
        r"\{x\} 50\% & -- & 12 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert r"\begin{tabular}{lp{6cm}}" in formatted(pd.DataFrame({"a": ["b"], "c": ["word " * 20]}), "latex")
