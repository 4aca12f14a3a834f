"""The wheel and the sdist: complete, described without broken links, and usable in an environment of their own."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import sinkscope

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# two commands in one process, which imports torch once
COMMANDS = """
import sys
from sinkscope.cli.app import app, main

try:
    app(["list", "recipes"], prog_name="sinkscope")
except SystemExit as end:
    assert not end.code
sys.argv[1:1] = ["analyze"]
main()
"""


def run(*command: object, cwd: Path, **more: str) -> str:
    """Return what a command prints; its own environment leaves out the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    tracked = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    clone = tmp_path_factory.mktemp("clone")  # without what the working folder holds besides
    for name in tracked:
        is_read = name.startswith("reports/claims/tables/") or name.endswith("/tables/summary.parquet")
        if (is_read or not name.startswith("reports/")) and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    libraries = os.pathsep.join(path for path in sys.path if path and Path(path) != ROOT)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, clone, cwd=out, PYTHONPATH=libraries)
    return out


def test_the_distributions_pass_twine_and_hold_what_they_need(distributions: Path) -> None:
    libraries = os.pathsep.join(path for path in sys.path if path and Path(path) != ROOT)
    files = sorted(distributions.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distributions, PYTHONPATH=libraries)
    sdist, wheel = (next(distributions.glob(f"*.{ending}")) for ending in ("tar.gz", "whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        description = message_from_bytes(archive.read(metadata)).get_payload()
    assert {"sinkscope/py.typed", "sinkscope/recipes/gradient-sinks-figure-2.yaml"} <= names
    assert {"sinkscope/reports/claims/tables/claim.parquet", "sinkscope/reports/mgm/tables/summary.parquet"} <= names
    assert not [name for name in names if name.startswith("tests")]
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "recipes/docs/make_site.py", "tests/conftest.py"} <= held
    links = re.findall(r"\]\(([^)]+)\)", str(description))
    assert [link for link in links if not link.startswith("http")] == []
    assert "![" not in description
    assert "sinkscope analyze" in description


def test_the_wheel_works_in_an_environment_of_its_own(distributions: Path, tmp_path: Path, tiny: Path) -> None:
    """The libraries are those of the tests, so that nothing is downloaded; sinkscope is the wheel's."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        wheel.extractall(site)  # a wheel of Python alone needs nothing else
    # a .pth in a folder that a .pth names is not read: the editable sinkscope of the tests is not seen
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries), encoding="utf-8")
    python, here = folder / "bin" / "python", tmp_path / "here"
    here.mkdir()
    origin = run(python, "-c", "import sinkscope; print(sinkscope.__file__, sinkscope.__version__)", cwd=here)
    assert origin.split() == [str(site / "sinkscope" / "__init__.py"), sinkscope.__version__]
    entry = next(site.glob("sinkscope-*.dist-info")) / "entry_points.txt"
    assert "sinkscope = sinkscope.cli.app:main" in entry.read_text("utf-8")
    options = ("--num-seqs", "2", "--seq-len", "16", "--observables", "attention")
    said = run(python, "-c", COMMANDS, tiny, *options, "--out", "run", cwd=here)
    assert "gradient-sinks-figure-2" in said
    assert "**Sink:**" in said
    assert (here / "run" / "index.html").exists()
