"""`compare` on made-up runs: its arithmetic, warnings and files; folders of older versions are read, or refused."""

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
from sinkscope import InputError, Run, Scorecard, compare
from sinkscope.commands.claims import columns as scorecard
from sinkscope.results.manifest import FORMAT, read_manifest
from sinkscope.results.tables import Column


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
    for few in ((), (run,)):
        with pytest.raises(InputError, match="needs at least two runs"):
            compare(*few)
    with pytest.raises(InputError, match=r"is not a run folder: it has no run\.json"):
        compare(run, tmp_path)
    folder = save(run, tmp_path / "run")
    assert compare(run, folder / "run.json").table["ratio"]["sink_rate"] == 1.0
    with pytest.raises(InputError, match=r"a run, .* this is a int"):
        compare([run, 3])
    pictures = Run(run.manifest, {"finding": run.tables["summary"].head(0)})
    with pytest.raises(InputError, match="has no metrics to compare: it measured only pictures"):
        compare(run, pictures)
    (folder / "tables" / "summary.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"summary\.parquet is damaged"):
        compare(run, folder)
    (folder / "tables" / "summary.parquet").unlink()
    with pytest.raises(InputError, match=r"incomplete: .*summary\.parquet is missing"):
        compare(run, folder)


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
            older = f"{folder} is of an older sinkscope (format {manifest.get('format', 1)}, this one writes {FORMAT})"
            assert (older in result.stderr) == (manifest.get("format", 1) < FORMAT)


def of_format(number: int | None, folder: Path, **changes: Any) -> Path:
    """Save a made-up run of a format; None: a run of a version without formats."""
    save(made_up(**changes), folder)
    content = json.loads((folder / "run.json").read_text())
    content.pop("format", None)
    (folder / "run.json").write_text(json.dumps(content | ({} if number is None else {"format": number})))
    return folder


def without(folder: Path, part: str, entry: str) -> None:
    content = json.loads((folder / "run.json").read_text())
    del content[part][entry]
    (folder / "run.json").write_text(json.dumps(content))


@pytest.mark.parametrize("number", [None, 1, FORMAT, FORMAT + 1])
def test_an_entry_that_is_missing_is_damage_in_this_format_alone(number: int | None, tmp_path: Path) -> None:
    folder = of_format(number, tmp_path / "run", config={"model": "org/model", "num_seqs": 7})
    without(folder, "input", "token_zero")
    if number == FORMAT + 1:  # it is not read even if nothing is missing
        with pytest.raises(InputError, match="is of a newer sinkscope"):
            Run.open(of_format(number, tmp_path / "newer"))
    with pytest.raises(InputError) as caught:
        Run.open(folder)
    told = str(caught.value)
    assert ("damaged" in told) == (number == FORMAT)
    if number == FORMAT + 1:
        assert f"run.json is of a newer sinkscope (format {number}, this one reads up to {FORMAT}): update it" in told
    elif number != FORMAT:
        again = "measure again with `sinkscope analyze org/model --num-seqs 7"
        assert f"run.json is of an older sinkscope (format 1, this one writes {FORMAT}): {again}" in told


def test_newer_columns_of_an_older_scorecard_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = (Column("kind", "", kind="text", since=FORMAT), Column("is_identity", "", kind="truth", since=FORMAT))
    folder = Path(shutil.copytree(REPORTS / "claims" / "mgm", tmp_path / "mgm"))
    path = folder / "tables" / "claim.parquet"
    since = [column.name for column in scorecard.TABLES["claim"] if column.since > 1]
    pd.read_parquet(path).drop(columns=since).to_parquet(path)
    monkeypatch.setitem(scorecard.TABLES, "claim", (*scorecard.TABLES["claim"], *newer))
    content = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({name: value for name, value in content.items() if name != "format"}))
    table = Scorecard.open(folder).table
    assert table["power"].isna().all()
    assert set(table["kind"]) == {""}
    assert not table["is_identity"].any()
    (folder / "run.json").write_text(json.dumps(content | {"format": FORMAT}))
    with pytest.raises(InputError, match="it has no column null_low"):
        Scorecard.open(folder)
