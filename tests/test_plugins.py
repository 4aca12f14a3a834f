"""Plugins: the example package, installed as pip does it, and packages that cannot be loaded."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from sinkscope import InputError, plugins
from sinkscope.plugins import GROUP

EXAMPLE = Path(__file__).parent / "plugin_example"
(POINT,) = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"][GROUP].items()


def installed(folder: Path, package: str, name: str, function: str) -> Path:
    """Lay an entry point into a folder, as an installation leaves it."""
    info = folder / f"{package}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {function}\n")
    return folder


def run(script: str, *arguments: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that finds the example, and the packages in `path`."""
    places = os.pathsep.join(map(str, (path, EXAMPLE, Path(__file__).parents[1])))
    given = os.environ | {"PYTHONPATH": places, "COLUMNS": "400"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=given, check=False)


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


def test_the_example(tiny: Path, here: Path) -> None:
    """Its entries of every kind work as those of sinkscope; run.json and `list` name its package."""
    done = run(COMMANDS, tiny, path=installed(here / "site", "sinkscope-dominance", *POINT))
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
    plugins._installed.cache_clear()
    yield tmp_path
    plugins._installed.cache_clear()


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
    installed(site, "second", "second", f"broken_{number}:register")
    installed(site, "first", "first", "first_plugin:register")
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            plugins.load_plugins()
        (line,) = str(refused.value).splitlines()
        assert line.startswith("plugin 'second' of second 0.1.0 failed [")
        assert reason in line
        assert "SINKSCOPE_PLUGINS" in line
    plugins._installed.cache_clear()
    monkeypatch.setenv("SINKSCOPE_PLUGINS", "first")
    plugins.load_plugins()
    assert sys.modules["first_plugin"].OWN == {"one": 1}
    assert plugins.plugin_versions() == {"first": "0.1.0"}
