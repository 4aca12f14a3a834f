"""README, reports and CONTRIBUTING: links exist and code works; recipes/tour.ipynb runs, and finds what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rehearse import RECIPES, SWEEPS
from tiny import tiny_model
from user_script import notebook

import sinkscope
from sinkscope.measuring.observables import OBSERVABLES, attention
from sinkscope.models.loading import LoadedModel
from sinkscope.options.register import options_by_command
from sinkscope.output.run import OUTPUTS

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 12, "bos": "never"}


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/docs/*.md", "reports/*.md", "reports/*/README.md"]


@pytest.mark.parametrize("document", [path for pattern in DOCUMENTS for path in ROOT.glob(pattern)], ids=str)
def test_links_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def test_modules_and_files_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:sinkscope/|tests/|recipes/)?[\w/]+/[\w/]+\.(?:py|ipynb|yaml))`", text))
    new = {"sinkscope/measuring/observables/dominance.py", "sinkscope/output/latex.py"}
    missing = {name for name in named - new if not ((ROOT / name).exists() or (ROOT / "sinkscope" / name).exists())}
    assert missing == set()
    assert new <= named


def shown(start: str) -> dict[str, Any]:
    """Return the names that the block of code with this line in CONTRIBUTING.md defines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if re.search(f"^{re.escape(start)}", block, re.MULTILINE)]
    names: dict[str, Any] = {"Any": Any}
    exec(block, names)
    return names


def test_the_observable_of_contributing_makes_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBSERVABLES, "dominance", shown("class Dominance")["Dominance"])
    table = sinkscope.analyze(tiny_model("llama"), observables="dominance", **OPTIONS).tables["dominance"]
    assert list(table.columns) == ["model", "condition", "layer", "position", "share"]
    assert len(table) == 3 * 12
    assert table["share"].between(1 / 32, 1).all()  # of 32 entries


def test_the_definition_of_contributing_changes_the_sink_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**OPTIONS, "observables": "attention", "epsilon": 0.2, "seq_len": 24}
    before = sinkscope.analyze(tiny_model("llama"), **asked)
    monkeypatch.setattr(attention, "is_sink", shown("def is_sink")["is_sink"])
    after = sinkscope.analyze(tiny_model("llama"), **asked)
    assert after.metric("sink_rate") > before.metric("sink_rate")
    assert len(after.tables["sink_positions"]) > len(before.tables["sink_positions"])


@pytest.mark.usefixtures("no_figures")
def test_the_output_of_contributing_is_in_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(OUTPUTS, "latex", shown("def write")["write"])
    run = sinkscope.analyze(tiny_model("llama"), observables="attention", out=tmp_path / "run", **OPTIONS)
    text = (tmp_path / "run" / "summary.tex").read_text(encoding="utf-8")
    assert rf"sink rate at position 0 & {100 * run.metric('sink_rate'):.1f}\% \\" in text
    sinkscope.intervene(tiny_model("llama"), do="mask-sink", draws=0, out=tmp_path / "arms", **OPTIONS)
    assert not (tmp_path / "arms" / "summary.tex").exists()


def test_the_sink_rate_is_defined_once() -> None:
    """No other function compares a mass with ε."""
    sources = (ROOT / "sinkscope").rglob("*.py")
    lines = [(path.name, line) for path in sources for line in path.read_text("utf-8").splitlines()]
    assert [name for name, line in lines if re.search(r"[<>]=? *\S*epsilon", line)] == ["metrics.py"]


# the figures and tables of each paper that the register in reports/papers.md must list
OF_PAPERS = {
    "GS": {"figure": range(1, 6), "theorem": (1, 2)},
    "WSE": {"figure": (*range(1, 11), *range(19, 22), 28, 30), "table": (*range(1, 8), *range(9, 15))},
    "NU": {"figure": range(1, 14), "table": (1, 2)},
    "VGA": {"figure": range(1, 7), "table": (1, 2, 3)},
    "S2M": {"§": (1, 2, 3)},
}


def test_the_register_of_figures_is_complete_and_its_commands_exist() -> None:
    text, _ = (ROOT / "reports" / "papers.md").read_text(encoding="utf-8").split("\n## ", 1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][2:]
    listed: dict[str, set[tuple[str, int]]] = {paper: set() for paper in OF_PAPERS}
    for paper, what, _, command, extent, changed, rehearsed, hours in rows:
        kind = ""
        for word, first, last in re.findall(r"([a-z§]+)? ?(\d+)(?: to (\d+))?", what):
            kind = word.removesuffix("s") or kind
            listed[paper] |= {(kind, number) for number in range(int(first), int(last or first) + 1)}
        assert re.match(r"here|in part|needs|a diagram|see ", extent)
        assert changed
        assert hours == "below" or re.fullmatch(r"–|not estimated|(< )?[\d.]+( a model)?", hours)
        recipes = {*re.findall(r"`sinkscope (?:run|sweep) (\S+)`", f"{command} {extent}")}
        assert (rehearsed == "yes") == bool(recipes & {*SWEEPS, *RECIPES})
        named = re.findall(r"`sinkscope ([^ `]+)(?: ([^`]+))?`", f"{command} {extent}")
        assert named or extent == "a diagram"
        for name, argument in named:
            assert name in options_by_command()
            folder = {"run": "recipes", "sweep": "recipes/sweeps"}.get(name)
            assert folder is None or (ROOT / folder / f"{argument}.yaml").exists(), argument
    assert listed == {
        paper: {(kind, n) for kind, numbers in of.items() for n in numbers} for paper, of in OF_PAPERS.items()
    }


TOUR = ROOT / "recipes" / "tour.ipynb"


def code_cells() -> list[dict[str, Any]]:
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_committed_tour_was_executed_without_errors() -> None:
    cells = code_cells()
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for output in outputs} <= {"execute_result", "stream"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert TOUR.stat().st_size < 400_000


@pytest.mark.slow
@pytest.mark.real_model
def test_the_tour_finds_what_it_says(smollm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkscope, "load", lambda: smollm)  # `load` has given the same model
    for name, fewer in (("analyze", 2), ("intervene", 1)):  # fewer sequences show the same; parity is another test's
        own, options = getattr(sinkscope, name), {"num_seqs": fewer, "skip_parity": True}
        monkeypatch.setattr(sinkscope, name, lambda *args, own=own, few=options, **more: own(*args, **more | few))
    names: dict[str, Any] = {}
    for index, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"{TOUR.name}, code cell {index}", "exec"), names)

    assert (names["layer"], names["coordinate"]) == (11, 507)
    perplexity = names["whole_model"].query("metric == 'perplexity'").groupby(["condition", "arm"])["value"].first()
    before, zero, mean = perplexity["zero", "before"], perplexity["zero", "after"], perplexity["mean", "after"]
    assert zero > 100 * before
    assert mean == pytest.approx(before, rel=0.02)
    assert names["before"] == names["after"] != names["during"]
    natural, random, repeated = names["comparison"].table.loc["sink_rate"]
    assert random == pytest.approx(natural, abs=0.1)
    assert natural > 0.5
    assert repeated == 0
    rates = names["whole_model"].query("metric == 'sink_rate'").groupby(["condition", "arm"])["value"].first()
    assert rates["no embedding", "after"] < 0.25 * rates["no embedding", "before"]
    full, all_sites, spared = names["cost"].values()
    assert all_sites > 1.5 * full
    assert full < spared < 0.8 * all_sites
    by_method = names["streaming"].set_index("method")["perplexity"]
    assert by_method["window"] > 2 * by_method["sinks kept"]


@pytest.mark.real_model
def test_the_notebook_of_a_user_runs(smollm: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sinkscope, "load", lambda: smollm)
    notebook(tmp_path)
