"""A run in Python: saved later, in three lines, in a notebook, and its figures with options."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest
from support.figures import skip_figures
from support.made_up_runs import made_up
from support.tables import assert_same_tables
from tiny import tiny_model

import sinkscope
from sinkscope import InputError, Run, SinkscopeError
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.measured import options_of_run
from sinkscope.figures import FIGURES
from sinkscope.output.result import draw
from sinkscope.results.command_line import command_lines

REPORTS = Path(__file__).parents[2] / "reports"
SMALL: dict[str, Any] = {"input": "random", "num_seqs": 3, "seq_len": 10}


@pytest.fixture(scope="module")
def run() -> Run:
    return sinkscope.analyze(tiny_model("llama"), **SMALL)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_saved_run_is_the_folder_that_out_writes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    sinkscope.analyze(tiny_model("llama"), out=tmp_path / "out", **SMALL)
    saved = run.save(tmp_path / "saved")
    assert saved.folder == tmp_path / "saved"
    assert run.folder is None
    assert files(tmp_path / "saved") == files(tmp_path / "out")
    again = Run.open(tmp_path / "saved")
    assert_same_tables(again.tables, run.tables)
    assert again.verdict.replace("saved", "out") == Run.open(tmp_path / "out").verdict
    with pytest.raises(InputError, match="already holds a run: --overwrite replaces it"):
        run.save(tmp_path / "saved")
    with pytest.raises(InputError, match="figure 'sinks' is unknown"):
        run.save(tmp_path / "other", figures=["sinks"])
    assert not (tmp_path / "other").exists()
    run.save(tmp_path / "saved", overwrite=True, page=False)
    assert "index.html" not in files(tmp_path / "saved")
    chosen = [*FIGURES][:5]  # four names are on a line
    of_recipe = replace(saved, manifest=saved.manifest | {"recipe": {"content": {"figures": chosen}}})
    assert of_recipe.verdict.partition("figures/ (each as .png and .pdf)")[2].split() == [*chosen, "```"]


def test_of_a_folder_that_is_drawn_again_figures_stay_unless_they_are_named_and_a_page_goes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_figures(monkeypatch)
    saved = run.save(tmp_path / "run", figures=["sink-map"])
    before = files(tmp_path / "run")
    assert (tmp_path / "run" / "verdict.md").read_text().partition(".pdf)")[2].split() == ["sink-map", "```"]
    draw(saved, figures=())
    assert files(tmp_path / "run") == before
    draw(saved, figures=(), page=False)
    assert {*before} - {*files(tmp_path / "run")} == {"index.html"}
    without = run.save(tmp_path / "without", figures=(), page=False)
    assert "figures/" not in (tmp_path / "without" / "verdict.md").read_text()
    (tmp_path / "without" / "index.html").touch()
    draw(without, figures=(), page=False)
    with pytest.raises(SinkscopeError, match="another process wrote"):
        draw(without, figures=())


def test_a_run_on_objects_says_what_they_were_and_is_not_repeated_from_its_file(tiny: Path, tmp_path: Path) -> None:
    run = sinkscope.analyze(tiny, input=[[5, 6, 7], [8, 9]], observables="massive")
    saved = run.save(tmp_path / "run", figures=[], page=False)
    config, read = run.manifest["config"], run.manifest["input"]
    assert (config["input"], run.condition, config["num_seqs"], config["seq_len"]) == ("token-ids", "token-ids", 2, 3)
    assert (read["sequences"], read["tokens"], len(read["sha256"])) == (2, 5, 64)
    assert command_lines(saved.manifest, saved.folder) == []
    with pytest.raises(InputError, match=r"its input \(token-ids\) was passed as an object in Python, not by name"):
        options_of_run(tmp_path / "run", "analyze", AnalyzeOptions)


def test_a_run_shows_itself_in_three_lines_and_in_a_notebook(run: Run) -> None:
    first, second, third = repr(run).split("\n")
    assert first == "Run of `analyze` on LlamaForCausalLM, float32: 3 sequences of 10 tokens (random)"
    assert second.startswith(f"sink rate {run.metric('sink_rate'):.1%}, massive activations per sequence 0.0, ")
    assert third == "in memory; run.save(folder) writes it"
    shown = run._repr_html_()
    assert "<b>Sink:</b> " in shown
    assert "of the heads give the first token more than 30% of their attention" in shown
    assert shown.count("data:image/png;base64,") == 1
    assert shown.count("<li>") == sum(finding.is_headline for finding in run.findings) < len(run.findings)
    assert "100 sequences of 5 to 64 tokens" in repr(made_up(input={"shortest": 5}))
    arms = sinkscope.intervene(tiny_model("llama"), "mask-sink", draws=2, **SMALL)
    assert repr(arms).split("\n")[1] == f"sink rate @0: before {run.metric('sink_rate'):.1%}, mask-sink 0.0%"
    assert repr(arms.at("mask-sink")).split("\n")[1].startswith("tables attention, ")
    with pytest.raises(InputError, match="mask-sink is one arm of an experiment: save the run of `intervene`"):
        arms.at("mask-sink").save("arm")
    assert all("mask-sink" in one._repr_html_() for one in (arms, arms.at("mask-sink")))


def test_a_notebook_shows_the_first_figure_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    picture = SimpleNamespace(_repr_png_=lambda: b"")
    monkeypatch.setattr(Run, "figure", lambda run, name: drawn.append(name) or picture)
    for folder in ("mgm", "mgm-interventions", "smollm2-135m-w8a8"):
        Run.open(REPORTS / folder)._repr_html_()
    assert drawn == ["sinks-by-layer", "effects", "quantization-cost"]


def test_a_figure_goes_on_in_matplotlib_and_takes_its_options(run: Run) -> None:
    figure = run.figure("sink-map", position=1, figsize=(4, 3))
    assert tuple(figure.get_size_inches()) == (4, 3)
    attention = run.tables["attention"].query("position == 1")
    expected = attention.pivot(index="layer", columns="head", values="window_mass").to_numpy()
    assert (figure.axes[0].images[0].get_array() == expected).all()
    assert plt.get_fignums() == []  # a notebook shows it once, as the value of its cell
    layer, head = run.tables["attention_maps"][["layer", "head"]].iloc[-1]
    (ax, _) = run.figure("attention-maps", heads=[(layer, head)]).axes  # and the color bar
    assert ax.get_title() == f"layer {layer}, head {head}"
    for name, options, message in (
        ("sink-map", {"positon": 1}, "figure 'sink-map': option 'positon' is unknown; did you mean 'position'"),
        ("sink-map", {"position": 99}, "there is no position 99: the table attention has 0 to 9"),
        ("attention-maps", {"heads": [(0, 99)]}, "the map of head 99 of layer 0 is not stored; stored: "),
    ):
        with pytest.raises(InputError, match=message):
            run.figure(name, **options)
