"""Plugins: the example package, installed as pip does it, and packages that cannot be loaded."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pandas as pd
import pytest
from tiny import tiny_model

import sinkscope
from sinkscope import InputError, SinkscopeError, plugins
from sinkscope.cli.ending import _message
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.summary import METRICS_OF, MeasuredTables, layerwise, summarize
from sinkscope.plugins import GROUP
from sinkscope.results.tables import POSITION, Column

EXAMPLE = Path(__file__).parent / "plugin_example"
POINTS = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]


def installed(folder: Path, package: str, points: dict[str, dict[str, str]]) -> Path:
    """Lay entry points, by group and name, into a folder, as an installation leaves them."""
    info = folder / f"{package}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {of[name]}\n" for name in of) for group, of in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run(script: str, *arguments: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that finds the example, and the packages in `path`."""
    places = os.pathsep.join(map(str, (path, EXAMPLE, Path(__file__).parents[1])))
    environment = os.environ | {"PYTHONPATH": places, "COLUMNS": "400"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


# several commands in one process, which imports torch once
COMMANDS = """
import sys
from sinkscope.cli.app import app

small = ["--num-seqs", "3", "--seq-len", "16", "--quiet", "--no-page"]
for line in (
    ["analyze", sys.argv[1], "--observables", "dominance", "--out", "run", *small],
    ["intervene", sys.argv[1], "--do", "halve-first-embedding", "--draws", "1", "--out", "do", *small],
    ["claims", "--from", "run", "--out", "claims", "--quiet", "--no-page"],
    ["list", "all"],
    ["dominance", sys.argv[1], "--at-least", "0.01", "--out", "own", *small],
    ["compare", "own"],
):
    try:
        app(line, prog_name="sinkscope")
    except SystemExit as end:
        assert not end.code, line

import torch
import sinkscope
import sinkscope.retrofits
from transformers import AutoModelForCausalLM

model = sinkscope.load(sys.argv[1]).model
ids = torch.arange(8)[None]
before = model(ids).logits
sinkscope.retrofit_model(model, None, "head-scale").save_pretrained("model")
again = AutoModelForCausalLM.from_pretrained("model")
assert torch.equal(model(ids).logits, before) and torch.equal(again(ids).logits, before)
assert sum(type(module).__name__ == "Scale" for module in again.modules()) == len(again.model.layers)
"""


@pytest.mark.slow
def test_the_example(tiny: Path, here: Path) -> None:
    """Its entries of every kind work as those of sinkscope; run.json and `list` name its package."""
    done = run(COMMANDS, tiny, path=installed(here / "site", "sinkscope-dominance", POINTS))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((here / "run" / "run.json").read_text(encoding="utf-8"))
    assert manifest["versions"]["sinkscope-dominance"] == "0.1.0"
    assert "figures/dominance-by-layer.png" in manifest["files"]
    table = pd.read_parquet(here / "run/tables/dominance.parquet")
    summary = pd.read_parquet(here / "run/tables/summary.parquet").query("metric == 'dominance_first'")
    shares = table.query("position == 0")["share"].tolist()
    assert summary["value"].tolist() == pytest.approx([*shares, sum(shares) / len(shares)])
    effect = pd.read_parquet(here / "do/tables/effect.parquet").query("layer == -1 and metric == 'loss'")
    assert set(effect["arm"]) == {"before", "after", "control"}
    claim = pd.read_parquet(here / "claims/tables/claim.parquet").query("claim == 'D-1'").iloc[0]
    assert (claim["paper"], claim["value"]) == ("an example", pytest.approx(max(shares)))
    assert "One entry has at least 1% of the norm at position 0 in layers 0" in (here / "own/verdict.md").read_text(
        encoding="utf-8"
    )
    pd.testing.assert_frame_equal(pd.read_parquet(here / "own/tables/dominance.parquet"), table)
    rows = [line for line in done.stdout.splitlines() if "sinkscope-dominance 0.1.0" in line]
    names = ("dominance", "halve-first-embedding", "head-scale", "dominance-by-layer", "dominance_first", "D-1")
    assert [row.split()[1] for row in rows] == list(names)


FIRST = """
from sinkscope.results.metrics import METRICS
OWN = {}
def register(plugin): plugin.add(OWN, 1, "one")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages on the path of this process, whose plugins are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.delitem(sys.modules, "first_plugin", raising=False)
    plugins.installed.cache_clear()
    yield tmp_path
    plugins.installed.cache_clear()


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (0, "import no_such_package", "[ModuleNotFoundError: No module named 'no_such_package']"),
        (1, "register = None", "[TypeError: 'NoneType' object is not callable]"),
        (2, "def register(plugin): plugin.add(METRICS, METRICS['loss'])", "the name 'loss' is taken by sinkscope]"),
        (3, "def register(plugin): plugin.add(OWN, 2, 'one')", "the name 'one' is taken by first 0.1.0]"),
    ],
)
def test_a_plugin_that_cannot_be_loaded(
    number: int, code: str, reason: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names it and says how to go on without it; nothing of it is added, and the other plugins work."""
    (site / f"broken_{number}.py").write_text(f"from first_plugin import *\n{code}\n")
    (site / "first_plugin.py").write_text(FIRST)
    installed(site, "second", {GROUP: {"second": f"broken_{number}:register"}})
    installed(site, "first", {GROUP: {"first": "first_plugin:register"}})
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            plugins.load_plugins()
        (line,) = str(refused.value).splitlines()
        assert line.startswith("plugin 'second' of second 0.1.0 failed [")
        assert reason in line
        assert "SINKSCOPE_PLUGINS" in line
    plugins.installed.cache_clear()
    monkeypatch.setenv("SINKSCOPE_PLUGINS", "first")
    plugins.load_plugins()
    assert sys.modules["first_plugin"].OWN == {"one": 1}
    assert plugins.plugin_versions() == {"first": "0.1.0"}


class _Broken(Observable):
    name = "broken"
    about = "an observable with a mistake"
    sites = ("layer_out",)
    columns: ClassVar = {"broken": (POSITION, Column("share", "of something"))}

    made: ClassVar[Any] = None  # its tables; an exception is raised

    def tables(self) -> dict[str, pd.DataFrame]:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


ROWS = pd.DataFrame({"layer": [0, 1], "position": [0, 0], "share": [0.5, 0.25]})


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (ZeroDivisionError("by\nnothing"), "ZeroDivisionError: by nothing"),
        (None, "object has no attribute 'items'"),
        ({"broken": ROWS.to_dict()}, "ValueError: the table 'broken' is a dict, not a DataFrame"),
        ({"other": ROWS}, "ValueError: its `columns` do not declare the table 'other'"),
        ({"broken": ROWS.drop(columns="layer")}, "ValueError: the table 'broken' has no column layer, or"),
        ({"broken": ROWS.assign(share="a")}, "ValueError: the table 'broken' has no column share, or one with other"),
        ({"broken": ROWS.assign(layer=10**9)}, "ValueError: the table 'broken': there is no layer 1000000000"),
        ({"broken": pd.concat([ROWS, ROWS])}, "ValueError: the table 'broken': it has rows twice"),
    ],
)
def test_a_plugin_that_makes_a_wrong_table(made: Any, reason: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names it, before anything is written."""
    monkeypatch.setattr(_Broken, "made", made)
    monkeypatch.setitem(OBSERVABLES, "broken", _Broken)
    monkeypatch.setitem(plugins._packages, (id(OBSERVABLES), "broken"), "broken 0.1.0")
    monkeypatch.setenv("SINKSCOPE_PLUGINS", "")
    with pytest.raises(SinkscopeError) as failed:
        sinkscope.analyze(tiny_model("llama"), input="random", num_seqs=1, seq_len=8, observables="broken", out="run")
    (line,) = str(failed.value).splitlines()
    assert line.startswith("'broken' of the plugin broken 0.1.0 failed [")
    assert reason in line
    assert not list(here.iterdir())


def test_an_observable_of_ones_own_is_given_as_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Observable):
        name, about, sites = "own", "the largest entry", ("layer_out",)
        columns: ClassVar = {"own": (POSITION, Column("largest", "largest entry", ""))}

        def see(self, layer: int, site: str, reading: Any, batch: Any) -> None:
            positions = self.settings.positions
            largest = batch.at_positions(reading.tensor.amax(-1), positions)
            self.statistics["own"].add({"largest": largest}, batch.present(positions), layer=layer)

    monkeypatch.setitem(OBSERVABLES, "own", Own)
    del OBSERVABLES["own"]
    model, options = tiny_model("llama"), {"input": "random", "num_seqs": 2, "seq_len": 8}
    run = sinkscope.analyze(model, observables=[Own], **options)
    assert len(run.tables["own"]) == 3 * 8
    assert run.manifest["config"]["observables"] == ["own"]
    assert "| --- |" not in run.verdict  # no metric of sinkscope's is measured
    assert "\ntables own, finding\n" in repr(run)
    again = type("Own", (Own,), {"sites": ("layer_in",)})  # a notebook's cell runs once more
    assert not sinkscope.analyze(model, observables=("own", again), **options).tables["own"].equals(run.tables["own"])
    with pytest.raises(InputError, match="massive is the name of an observable of sinkscope: choose another"):
        sinkscope.analyze(model, observables=[type("Other", (Own,), {"name": "massive"})], **options)


def test_a_plugin_that_raises(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metrics are named in Python; in a command, so is the package whose code was running, whatever it added."""
    (site / "raising_plugin.py").write_text("def register(plugin): pass\ndef fail(): return 1 / 0\n")
    installed(site, "raising", {GROUP: {"raising": "raising_plugin:register"}})
    plugins.load_plugins()
    with pytest.raises(ZeroDivisionError) as failed:
        sys.modules["raising_plugin"].fail()
    first, second = _message(failed.value).splitlines()
    assert first == "the plugin raising 0.1.0 failed [ZeroDivisionError: division by zero]"
    assert "SINKSCOPE_PLUGINS" in second
    with pytest.raises(ZeroDivisionError) as ours:
        _ = 1 / 0
    assert _message(ours.value).startswith("unexpected ZeroDivisionError")

    monkeypatch.setitem(METRICS_OF, "broken", {"broken_first": layerwise("broken", "no such column")})
    monkeypatch.setitem(plugins._packages, (id(METRICS_OF), "broken"), "broken 0.1.0")
    with pytest.raises(
        SinkscopeError, match=r"^'broken' of the plugin broken 0.1.0 failed \[KeyError: .*no such column"
    ):
        summarize(MeasuredTables({"broken": ROWS}, *(cast(Any, None),) * 3))
