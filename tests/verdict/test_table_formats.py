"""Summary tables as text, Markdown and LaTeX, compared with hand-written results."""

from pathlib import Path

import pandas as pd
import pytest
from support.made_up_runs import made_up, save
from typer.testing import CliRunner

from sinkscope import InputError
from sinkscope.cli.app import app
from sinkscope.output.side_by_side import compare
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


def test_a_comparison_in_every_format(tmp_path: Path) -> None:
    runs = [made_up("my_input", sink_rate=0.25), made_up("random", sink_rate=0.5)]
    folders = [str(save(run, tmp_path / run.condition)) for run in runs]
    found = {format: compare(*runs).formatted(format) for format in ("text", "markdown", "latex")}
    assert r"sink\_rate & 0.25 & 0.5 & 0.25 & 2 \\" in found["latex"]
    assert r"metric & my\_input & random & difference & ratio \\" in found["latex"]
    assert "| sink_rate | 0.25 | 0.5 | 0.25 | 2 |" in found["markdown"]
    for format in ("markdown", "latex"):
        result = CliRunner().invoke(app, ["compare", *folders, "--format", format])
        assert result.exit_code == 0, result.output
        assert result.stdout.strip() == found[format]
    assert CliRunner().invoke(app, ["compare", *folders, "--format", "html"]).exit_code == 2
