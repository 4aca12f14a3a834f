"""`compare` on made-up runs: its arithmetic, warnings and files; folders of other formats are refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.hand_made_runs import experiment
from support.made_up_runs import by_sequence, made_up, save
from support.naming import naming
from support.pages import data_of
from support.retrofit_command import command_line
from tiny import tiny_model

import sinkscope
from sinkscope import InputError, Run, compare
from sinkscope.commands.compare.page import ComparePage
from sinkscope.commands.quantize.compared import TABLE as FORMATS
from sinkscope.figures import KINDS
from sinkscope.measuring.callback import FOLDER
from sinkscope.results.findings import Outcome
from sinkscope.results.manifest import FORMAT, make_manifest, read_manifest, write_manifest
from sinkscope.results.tables import write_tables


def test_two_runs_side_by_side() -> None:
    table = compare(made_up(sink_rate=0.5), made_up("random", sink_rate=0.2)).table
    assert list(table.columns) == ["natural", "random", "difference", "difference_low", "difference_high", "ratio"]
    assert list(table.index) == ["sink_rate", "kurtosis"]
    # these runs have no values by sequence
    assert table.loc["sink_rate"].tolist() == pytest.approx([0.5, 0.2, -0.3, math.nan, math.nan, 0.4], nan_ok=True)
    assert table.loc["kurtosis", "difference"] == 0.0
    assert math.isnan(table.loc["kurtosis", "ratio"])  # 0 ÷ 0
    runs = [made_up(model={"name": name}) for name in ("a/one", "b/two", "b/three")]
    assert list(compare(*runs).table.columns) == ["one", "two", "three"]
    assert (compare(*runs[:2]).differing.empty, compare(*runs[:2]).warnings) == (True, [])
    by_layer = compare(made_up(), [made_up("random", layers=3)]).by_layer
    assert list(by_layer.columns) == ["model", "condition", "layer", "run", "metric", "value"]
    assert by_layer.groupby("run")["layer"].apply(list).to_dict() == {"natural": [0, 1], "random": [0, 1, 2]}
    lacking = made_up("random")
    lacking.tables["summary"].drop(index=lacking.tables["summary"].index[-1], inplace=True)
    assert compare(made_up(), lacking).table.loc["kurtosis"].isna().tolist() == [False, *[True] * 5]
    barely = compare(made_up(sink_rate=0.5), made_up(sink_rate=0.5 + 4e-6)).table.loc["sink_rate"]
    assert (barely["difference"], barely["ratio"]) == (0.0, 1.0)
    assert compare(made_up(), made_up(sink_rate=0.50001), metrics="sink_rate").table["difference"].tolist() != [0.0]


def test_runs_are_named_by_what_differs() -> None:
    for changes, names in (
        ({"dtype": "bfloat16"}, ["dtype float32", "dtype bfloat16"]),
        ({"config": {"epsilon": 0.2}, "kernel": "eager"}, ["epsilon 0.3 · kernel sdpa", "epsilon 0.2 · kernel eager"]),
        ({}, ["run 1", "run 2"]),
    ):
        assert list(compare(made_up(), made_up(**changes)).table.columns[:2]) == names
    three = compare(made_up(), made_up(dtype="bfloat16"), made_up("random"))
    assert list(three.table.columns) == [
        "natural · dtype float32",
        "natural · dtype bfloat16",
        "random · dtype float32",
    ]
    steps = [made_up(model={"name": "org/model", "revision": revision}) for revision in ("step1", "step2")]
    assert list(compare(*steps).table.columns[:2]) == ["step1", "step2"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of one model on the same tokens, before and after two of its heads are changed, and on other tokens."""
    models = [tiny_model("gpt2"), tiny_model("gpt2")]
    for model in models:
        model.transformer.wpe.weight[0, 7] = 60.0
    width = models[0].config.n_embd
    models[1].transformer.h[1].attn.c_attn.weight[:, : width // 2] *= 0.2  # the queries of half of its heads
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {
        "input": "random",
        "num_seqs": 16,
        "seq_len": 20,
        "observables": "attention",
        "page": False,
    }
    for name, model, seed in (("first", models[0], 0), ("second", models[1], 0), ("other", models[0], 1)):
        sinkscope.analyze(model, out=folder / name, seed=seed, figures=(), **options)
    return [folder / name for name in ("first", "second", "other")]


def test_differences_are_paired_where_both_runs_read_the_same_tokens(measured: list[Path]) -> None:
    first, second, other = map(Run.open, measured)
    paired = compare(first, second, metrics="window_mass").table.loc["window_mass"]
    means = [
        run.tables["attention_heads_by_sequence"].groupby("sequence")["window_mass"].mean() for run in (first, second)
    ]
    apart = means[1] - means[0]
    reach = stats.t.ppf(0.975, 15) * apart.std() / 4
    assert paired["difference"] == pytest.approx(apart.mean())
    ends = paired["difference_high"] - paired["difference"], paired["difference"] - paired["difference_low"]
    assert ends == pytest.approx((reach, reach), rel=0.3)
    unpaired = compare(first, other, metrics="window_mass").table.loc["window_mass"]
    assert unpaired["difference_low"] < 0 < unpaired["difference_high"]
    for runs, how in (
        (measured[:2], "paired: both runs read the same tokens"),
        (measured[::2], "unpaired: the runs read"),
    ):
        done = command_line("compare", *runs, "--metrics", "sink_rate,window_mass")
        assert [line.split()[1] for line in done.stdout.splitlines() if "│" in line] == ["sink_rate", "window_mass"]
        assert f"95 % intervals over texts, {how}" in " ".join(done.stderr.split())
        assert ("input tokens differs: " in done.stderr) == how.startswith("unpaired")
    done = command_line("compare", *measured[:2], "--metrics", "window_mass", "--format", "markdown")
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == ["| window_mass"]


def test_heads_that_differ_are_those_that_were_changed(measured: list[Path], tmp_path: Path) -> None:
    comparison = compare(*measured[:2], by="head", metrics="window_mass", out=tmp_path / "heads")
    heads = comparison.tables["comparison_by_head"]
    half = heads["head"].nunique() // 2
    changed = (heads["layer"] == 1) & (heads["head"] < half)
    assert heads["differs"][changed].all()
    assert not heads["differs"][heads["layer"] == 0].any()  # nothing differs before the change
    (counts,) = comparison.tables["differing_heads"].to_dict("records")
    assert counts["differing"] == heads["differs"].sum() == len(comparison.summary_tables[""]) < len(heads)
    assert counts["is_paired"]
    (finding,) = comparison.findings
    assert finding.sentence.startswith(
        f"{counts['differing']} of {len(heads)} heads differ in mean window mass at posi"
    )
    assert "(paired over 16 texts); between random halves of one run's texts, in the mean of 20 spl" in finding.sentence
    done = command_line("compare", *measured[:2], "--by", "head", "--metrics", "window_mass")
    assert " ".join(done.stdout.split()).startswith(f"- {finding.sentence}")
    (shown,) = data_of((tmp_path / "heads" / "index.html").read_text(encoding="utf-8"))["findings"]
    assert shown["sentence"] == finding.sentence
    same = compare(measured[0], measured[0], by="head")
    assert not same.tables["comparison_by_head"]["differs"].any()
    assert same.tables["comparison_by_head"]["metric"].unique().tolist() == ["sink_rate", "window_mass"]
    none = command_line("compare", measured[0], measured[0], "--by", "head", "--metrics", "sink_rate")
    assert none.stdout.startswith("- 0 of")
    with pytest.raises(InputError, match="heads are compared between two runs; 3 were given"):
        compare(*measured, by="head")
    with pytest.raises(InputError, match="metrics=…: 'sink_rat' is unknown"):
        compare(*measured, metrics="sink_rat")


def test_heads_have_the_second_runs_name_and_each_run_its_texts() -> None:
    def run(name: str, texts: int) -> Run:
        made = made_up(model={"name": f"org/{name}"}, input={"sequences": texts, "sha256": name})
        table = by_sequence({"window_mass": 0.2, "uniform_mass": 0.05}, 1, 0.1, texts, head=range(3))
        return Run(made.manifest, {**made.tables, "attention_heads_by_sequence": table})

    comparison = compare(run("one", 10), run("two", 14), by="head", metrics="window_mass")
    for name in ("comparison_by_head", "differing_heads"):
        assert comparison.tables[name]["model"].unique() == ["org/two"]
    assert "unpaired: the runs read other tokens" in comparison._repr_html_()
    (finding,) = comparison.findings
    assert "(unpaired, 10 and 14 texts)" in finding.sentence


@pytest.mark.parametrize("texts", [1, 10])
@pytest.mark.parametrize("sha256", ["same", "other"])
@pytest.mark.parametrize("without", ["no head", "one head", "every head"])
def test_heads_without_a_value_are_no_heads_that_do_not_differ(without: str, sha256: str, texts: int) -> None:
    def run(mass: float, sha256: str) -> Run:
        made = made_up(input={"sequences": texts, "sha256": sha256})
        table = by_sequence({"window_mass": mass, "uniform_mass": 0.05}, 1, 0.0, texts, head=range(3))
        lacking = {"no head": [], "one head": [1], "every head": [0, 1, 2]}[without]
        if mass < 0.5:  # in the first run alone
            table.loc[table["head"].isin(lacking), "uniform_mass"] = 0.5  # above ε: no sink rate
        return Run(made.manifest, {**made.tables, "attention_heads_by_sequence": table})

    comparison = compare(run(0.2, "same"), run(0.9, sha256), by="head", metrics="sink_rate")
    (finding,), heads = comparison.findings, comparison.tables["comparison_by_head"]
    tested = {"no head": 3, "one head": 2, "every head": 0}[without] if texts > 1 else 0
    assert (heads["differs"].sum(), np.isfinite(heads["p"]).sum(), np.isfinite(heads["q"]).sum()) == (tested,) * 3
    if tested:
        assert finding.sentence.startswith(f"{tested} of {tested} heads differ in ")
        assert finding.sentence.endswith("1 head without a value in both runs cannot be compared.") == (tested == 2)
    else:
        assert (finding.outcome, "is not known" in finding.sentence) == (Outcome.UNDEFINED, True)


@pytest.mark.parametrize(
    ("setting", "changes", "values"),
    [
        ("seq-len", {"input": {"shortest": 32}}, ["64", "32 to 64"]),
        ("window", {"config": {"window": 32}}, ["64", "32"]),
        ("epsilon", {"config": {"epsilon": 0.2}}, ["0.3", "0.2"]),
        ("dtype", {"dtype": "bfloat16"}, ["float32", "bfloat16"]),
        ("position 0", {"input": {"token_zero": "bos </s> (id 2)"}}, ["bos", "bos </s> (id 2)"]),
        ("input tokens", {"input": {"sha256": "fedcba9876543210"}}, ["0123456789ab", "fedcba987654"]),
        ("input", {"condition": "random", "input": {"sha256": "fedcba"}}, ["natural", "random"]),
    ],
)
def test_settings_that_differ(setting: str, changes: dict[str, Any], values: list[str]) -> None:
    comparison = compare(made_up(), made_up(**changes))
    assert comparison.differing.index.tolist() == [setting]
    assert comparison.differing.loc[setting].tolist() == values
    (warning,) = comparison.warnings
    assert warning.startswith(f"{setting} differs: {values[0]} (")


def test_it_writes_tables_figures_and_manifest(tmp_path: Path) -> None:
    folders = [save(made_up(), tmp_path / "a"), save(made_up("random"), tmp_path / "b")]
    comparison = compare(*folders, out=tmp_path / "both")
    written = {path.relative_to(tmp_path / "both").as_posix() for path in (tmp_path / "both").rglob("*.*")}
    figures = {f"figures/{name}.{kind}" for name in comparison.figures() for kind in ("png", "pdf")}
    tables = {f"tables/{name}.parquet" for name in ("comparison", "comparison_by_layer")}
    assert written == {"run.json", "index.html", *tables, *figures}
    table = pd.read_parquet(tmp_path / "both/tables/comparison.parquet").set_index("metric")
    pd.testing.assert_frame_equal(table, comparison.table, check_names=False)
    manifest = json.loads((tmp_path / "both/run.json").read_text(encoding="utf-8"))
    assert [run["label"] for run in manifest["runs"]] == ["natural", "random"]
    assert manifest["differing"] == {"input": {"natural": "natural", "random": "random"}}
    side_by_side = ComparePage().places(tmp_path / "both", manifest)
    assert side_by_side == {"natural": tmp_path / "a", "random": tmp_path / "b"}
    assert ComparePage().places(tmp_path / "both", manifest | {"tables": [FORMATS]}) == {}  # one run is shown
    with pytest.raises(InputError, match="already holds"):
        compare(*folders, out=tmp_path / "both")
    compare(*folders, out=tmp_path / "both", overwrite=True)
    assert (manifest["command"], manifest["tables"]) == ("compare", ["comparison", "comparison_by_layer"])
    with pytest.raises(InputError, match="holds what `analyze` wrote, and is not replaced"):
        compare(*folders, out=tmp_path / "a", overwrite=True)  # a run is no comparison
    with pytest.raises(InputError, match="is of `sinkscope compare`, not of `analyze`"):
        compare(folders[0], tmp_path / "both")


def test_refusals(tmp_path: Path) -> None:
    run = made_up()
    pictures = Run(run.manifest, {"finding": run.tables["summary"].head(0)})
    for runs, message in (
        ((), "needs at least two runs"),
        ((run,), "needs at least two runs"),
        ((run, tmp_path), r"is not a run folder: it has no run\.json"),
        (([run, 3],), r"a run, .* this is a int"),
        ((run, pictures), "has no metrics to compare: it measured only pictures"),
    ):
        with pytest.raises(InputError, match=message):
            compare(*runs)
    folder = save(run, tmp_path / "run")
    assert compare(run, folder / "run.json").table["ratio"]["sink_rate"] == 1.0
    (folder / "tables" / "summary.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"summary\.parquet is damaged"):
        compare(run, folder)
    (folder / "tables" / "summary.parquet").unlink()
    with pytest.raises(InputError, match=r"incomplete: .*summary\.parquet is missing"):
        compare(run, folder)


def test_the_curves_of_trainings_are_those_of_the_whole_model(tmp_path: Path) -> None:
    rows = [
        ("made", name, layer, 0, step, metric, scale * ((step + place) / 8 - layer - 1))
        for place, name in enumerate(("plain", "gated"))
        for layer in (-1, 0, 1)
        for step in (0, 2)
        for metric, scale in (("kurtosis", 100), ("sink_rate", 1))
    ]
    table = pd.DataFrame(rows, columns=["model", "condition", "layer", "seed", "step", "metric", "value"])
    axes = KINDS["trainings of your own"]["training-curves"](table).axes
    drawn = [[line.get_xydata().tolist() for line in ax.lines] for ax in axes]
    shares = [[[0, place / 8], [2, 0.25 + place / 8]] for place in range(2)]
    assert drawn == [shares, [[[step, 100 * share] for step, share in line] for line in shares]]
    folders = [tmp_path / name / FOLDER for name in ("plain", "gated")]  # each in the folder of a Trainer
    for folder in folders:
        of_one = table[table["condition"] == folder.parent.name].assign(condition="training")
        folder.mkdir(parents=True)
        write_tables({"training": of_one}, folder)
        write_manifest(folder, make_manifest("training", {}, 0.0, tables=["training"]))
    both = compare(*folders)
    assert both.by_step["sink_rate"].to_dict() == {
        ("plain", 0): 0, ("plain", 2): 0.25, ("gated", 0): 0.125, ("gated", 2): 0.375,
    }  # fmt: skip
    assert "| gated | 2 | 37.5% | 37.50 |" in both.markdown
    assert command_line("compare", folders[0], "--out", tmp_path / "out", "--no-page").exit_code == 0
    assert "plain" in (tmp_path / "out" / "curves.md").read_text()


REPORTS = Path(__file__).parents[3] / "reports"
FOLDERS = sorted(path.parent.relative_to(REPORTS).as_posix() for path in REPORTS.rglob("run.json"))


@pytest.mark.slow
def test_every_report_opens(tmp_path: Path) -> None:
    for name in FOLDERS:
        with naming(name):
            folder = tmp_path / f"report {name.replace('/', ' ')}"
            shutil.copytree(REPORTS / name, folder, ignore=shutil.ignore_patterns("*.png", "*.pdf"))
            page = data_of(sinkscope.show(folder).read_text(encoding="utf-8"))
            manifest = read_manifest(folder, None)
            assert set(manifest["tables"]) <= {table["name"] for table in page["tables"]}
            several = [folder, folder] if manifest["command"] == "analyze" else [folder]
            result = command_line("compare", *several)
            if manifest["command"] == "analyze" and "summary" not in manifest["tables"]:  # its page shows it
                assert result.exit_code == 2
                assert result.stderr.endswith(f"{folder} has no metrics to compare: it measured only pictures\n")
                continue
            assert result.exit_code == 0, result.output
            assert len(result.stdout.splitlines()) > 2


@pytest.mark.parametrize("number", [None, FORMAT - 1, FORMAT + 1])
def test_a_folder_of_another_format_is_refused(number: int | None, tmp_path: Path) -> None:
    save(made_up(), tmp_path / "run")
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(content | {"format": number}))
    which, advice = ("a newer", "update it") if number == FORMAT + 1 else ("another", "measure again")
    told = rf"run.json is of {which} sinkscope \(format {number}, this one reads {FORMAT}\): {advice}"
    with pytest.raises(InputError, match=told):
        Run.open(tmp_path / "run")


@pytest.mark.parametrize("option", [("--by", "head"), ("--metrics", "sink_rate")])
def test_options_of_analyses_are_refused_for_a_folder_with_tables_of_its_own(option: tuple[str, str]) -> None:
    folder = Path(__file__).parents[3] / "reports" / "claims" / "smollm2-135m"
    done = command_line("compare", folder, *option)
    assert (done.exit_code, "--metrics and --by are those of runs of `analyze`" in done.stderr) == (2, True)


@pytest.mark.parametrize("option", [{"by": "head"}, {"metrics": "sink_rate"}])
def test_options_of_analyses_are_refused_for_experiments(option: dict[str, Any]) -> None:
    run = experiment({"before": [0.6, 0.05], "after": [0.4, 0.05]}, "nullify-query-bias")
    pair = [Run(run.manifest | {"model": run.manifest["model"] | {"name": name}}, run.tables) for name in "ab"]
    with pytest.raises(InputError, match="those of runs of `analyze`"):
        compare(*pair, **option)
