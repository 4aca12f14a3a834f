"""A command can be taken out, by deleting its folder and its line, and the words of its subject stay in its folder."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import sinkscope
from sinkscope.commands import FOLDERS

PACKAGE = Path(sinkscope.__file__).parent
# word → the folder of its command, and the other files with the word
WORDS = {
    "kv_plan": ("kv_plan", {"commands/__init__.py"}),
    "sweep": ("sweep", {"commands/__init__.py", "options/keywords.py"}),
    "scorecard": ("claims", {"commands/card/output.py", "commands/compare/side_by_side.py"}),
    # an option of rich, gradients that overflow, and the finding that names `doctor`
    "overflow": ("doctor", {"cli/printing.py", "measuring/observables/gradient.py", "verdict/analysis.py"}),
    # also `sinkscope.quantized`, and names of transformers, metrics and findings
    "quantiz": ("quantize", {
        "__init__.py", "commands/__init__.py", "options/keywords.py", "models/packed.py", "results/metrics.py",
        "verdict/analysis.py",
    }),
}  # fmt: skip

# forks a child for each copy of the package, so that what it uses is imported once
SCRIPT = """
import json, os, sys, traceback
import accelerate, fontTools.subset, gguf, huggingface_hub, matplotlib.pyplot, nnsight, pandas, pyarrow.parquet
import pydantic, rich.console, rich.markdown, rich.progress, scipy.ndimage, scipy.stats, torch, transformers, typer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
LlamaForCausalLM.from_pretrained(sys.argv[1])
matplotlib.pyplot.figure().subplots()

def commands(copy):
    sys.path.insert(0, copy)
    os.chdir(copy)
    from sinkscope.cli.app import app
    from sinkscope.figures.style import Figure
    Figure.lay_out = Figure.savefig = lambda *_, **__: None  # drawn, but not saved, which takes longest
    small = ["--num-seqs", "2", "--seq-len", "8", "--observables", "attention,massive"]
    analyze = ["analyze", sys.argv[1], *small, "--out", "run"]
    for line in (["--help"], ["list"], ["list", "all"], analyze, ["show", "run", "--print", "--again"]):
        is_here = line == ["--help"] or os.path.isdir(f"sinkscope/commands/{line[0]}")
        if is_here and (line[0] != "show" or os.path.isdir("run")):
            try:
                app(line, prog_name="sinkscope")
            except SystemExit as end:
                assert not end.code, line

failed = {}
for copy in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        try:
            commands(copy)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed[os.path.basename(copy)] = "failed"
print(json.dumps(failed), file=sys.stderr)
sys.exit(len(failed))
"""


def without(folder: str, target: Path) -> Path:
    """Copy the package without one command."""
    shutil.copytree(PACKAGE, target / "sinkscope")  # also what is compiled
    shutil.rmtree(target / "sinkscope" / "commands" / folder)
    for shipped in ("recipes", "reports"):
        (target / "sinkscope" / shipped).symlink_to(PACKAGE.parent / shipped)
    register = target / "sinkscope" / "commands" / "__init__.py"
    lines = register.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines.count(f'    "{folder}",\n') == 1
    register.write_text("".join(line for line in lines if line != f'    "{folder}",\n'), encoding="utf-8")
    return target


@pytest.mark.slow
def test_each_folder_is_a_command_and_each_can_be_deleted(tiny: Path, tmp_path: Path) -> None:
    """The others are listed, and `analyze` and `show` of a tiny model work."""
    folders = [path.parent.name for path in PACKAGE.glob("commands/*/__init__.py")]
    assert sorted(folders) == sorted(FOLDERS)
    copies = [without(folder, tmp_path / folder) for folder in FOLDERS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(tiny), *map(str, copies)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    for folder, copy in zip(FOLDERS, copies, strict=True):
        if folder not in ("analyze", "show"):
            assert (copy / "run" / "index.html").is_file()
            tables = json.loads((copy / "run" / "run.json").read_text(encoding="utf-8"))["tables"]
            assert {"attention", "massive", "finding"} <= {*tables}


@pytest.mark.slow
def test_the_words_of_a_command_stay_in_its_folder() -> None:
    """A word elsewhere means that other code knows the command, whose record could bring what that code needs."""
    code = {path.relative_to(PACKAGE).as_posix(): code_of(path) for path in PACKAGE.rglob("*.py")}
    for word, (folder, elsewhere) in WORDS.items():
        with_word = {path for path, text in code.items() if word in text}
        rooms = (f"commands/{folder}/", "quantization/")
        assert {path for path in with_word if not path.startswith(rooms)} == elsewhere, word


def code_of(path: Path) -> str:
    """Return the tokens of a file in lower case, without comments, docstrings and imports, which have a contract."""
    source = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    unread = [node.body[0] for node in nodes if isinstance(node, owners) and ast.get_docstring(node)]
    unread += [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = {line for node in unread for line in range(node.lineno, node.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return " ".join(one.string for one in tokens if one.type != tokenize.COMMENT and one.start[0] not in lines).lower()
