"""Folders of older versions are read, or refused with the command that repeats the measurement."""

import json
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
from sinkscope.errors import InputError
from sinkscope.output.run import Run
from sinkscope.results import scorecard
from sinkscope.results.manifest import FORMAT, read_manifest
from sinkscope.results.tables import Column
from sinkscope.verdict.scorecard import Scorecard

REPORTS = Path(__file__).parents[2] / "reports"
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
            assert result.exit_code == 0, result.output
            assert len(result.stdout.splitlines()) > 2
            older = f"{folder} is of an older sinkscope (format 1, this one writes {FORMAT})"
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
    since = [column.name for column in scorecard.TABLES["claim"] if column.since == FORMAT]
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
