"""`compare` on made-up runs: its arithmetic, warnings and files; folders of other formats are refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.made_up_runs import made_up, save
from support.naming import naming
from support.pages import data_of
from support.retrofit_command import command_line

import sinkscope
from sinkscope import InputError, Run, compare
from sinkscope.figures import KINDS
from sinkscope.results.manifest import FORMAT, read_manifest


def test_two_runs_side_by_side() -> None:
    table = compare(made_up(sink_rate=0.5), made_up("random", sink_rate=0.2)).table
    assert list(table.columns) == ["natural", "random", "difference", "ratio"]
    assert list(table.index) == ["sink_rate", "kurtosis"]
    assert table.loc["sink_rate"].tolist() == pytest.approx([0.5, 0.2, -0.3, 0.4])
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
    assert compare(made_up(), lacking).table.loc["kurtosis"].isna().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("setting", "changes", "values"),
    [
        ("seq-len", {"input": {"shortest": 32}}, ["64", "32 to 64"]),
        ("window", {"config": {"window": 32}}, ["64", "32"]),
        ("epsilon", {"config": {"epsilon": 0.2}}, ["0.3", "0.2"]),
        ("dtype", {"dtype": "bfloat16"}, ["float32", "bfloat16"]),
        ("token 0", {"input": {"token_zero": "bos </s> (id 2)"}}, ["bos", "bos </s> (id 2)"]),
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


def test_the_curves_of_trainings_are_those_of_the_whole_model() -> None:
    rows = [
        ("made", name, layer, step, "sink_rate", (step + place) / 8 - layer)
        for place, name in enumerate(("plain", "gated"))
        for layer in (-1, 0, 1)
        for step in (0, 2)
    ]
    table = pd.DataFrame(rows, columns=["model", "condition", "layer", "step", "metric", "value"])
    (axes,) = KINDS["trainings of your own"]["training-curves"](table).axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert drawn == [[[0, 1 + place / 8], [2, 1.25 + place / 8]] for place in range(2)]


REPORTS = Path(__file__).parents[3] / "reports"
FOLDERS = sorted(path.parent.relative_to(REPORTS).as_posix() for path in REPORTS.rglob("run.json"))


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
