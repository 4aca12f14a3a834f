"""The package uses no module or call that Windows lacks, and no default encoding."""

import ast
import sys
import types
from pathlib import Path, PureWindowsPath

import psutil
import pytest
import torch
from pydantic import ValidationError

from sinkscope.models.files import is_path
from sinkscope.results import manifest, schema

PACKAGE = Path(__file__).parents[1] / "sinkscope"
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
CALLS = {
    "os": {"chown", "fork", "forkpty", "geteuid", "getgid", "getloadavg", "getuid", "killpg", "mkfifo", "nice", "pread"}
    | {"sched_getaffinity", "setsid", "statvfs", "uname", "wait"},
    "signal": {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm"},
    "time": {"tzset"},
}
TEXT = {"open", "read_text", "write_text", "fdopen", "TextIOWrapper"}  # need an encoding


def test_memory_is_measured_without_unix_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(peak_wset=3 * 2**20))
    monkeypatch.setattr(psutil, "Process", lambda: resident)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert manifest._peak_memory_mb() == 3


def test_no_module_or_call_that_windows_lacks() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert faults(path.read_text(encoding="utf-8")) == [], path.name
    for wrong in (
        "import resource",
        "from fcntl import flock",
        "os.fork()",
        "os.kill(1, signal.SIGKILL)",
        "open(p)",
        "p.open('w')",
        "p.open()",
        "p.write_text(x)",
    ):
        assert len(faults(wrong)) == 1
    for right in ("p.open('rb')", "open(p, 'wb')", "p.write_text(x, encoding='utf-8')", "os.open(p, os.O_RDWR)"):
        assert faults(right) == []


def faults(source: str) -> list[tuple[int, str]]:
    """Return the lines that need a module or call that Windows lacks, or the default encoding of the machine."""
    places, tree = [], ast.parse(source)
    alternatives = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Try) for part in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in alternatives:
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            places += [(node.lineno, name) for name in names if name.partition(".")[0] in MODULES]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in CALLS.get(node.value.id, ()):
                places.append((node.lineno, f"{node.value.id}.{node.attr}"))
        elif isinstance(node, ast.Call) and not any(keyword.arg == "encoding" for keyword in node.keywords):
            name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            is_text = name in TEXT and (name != "read_text" or not node.args)
            if name == "open":  # the mode is the first argument of a path's method, the second one of the function
                modes = [*node.args[isinstance(node.func, ast.Name) :], ast.Constant("r")]
                is_text = isinstance(modes[0], ast.Constant) and set(str(modes[0].value)) <= set("rwax+t")
            if is_text:
                places.append((node.lineno, f"{name} without an encoding"))
    return places


def test_paths_of_windows_are_no_hub_ids_and_a_manifest_lists_none_out_of_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(is_path(name) for name in (r"C:\models\gpt2", "C:/models", r"models\gpt2", r"..\gpt2"))
    assert not is_path("org/name")
    monkeypatch.setattr(schema, "PurePath", PureWindowsPath)
    entries = {"sinkscope": "1", "format": 4, "command": "analyze", "config": {}, "tables": [], "files": []}
    schema.Manifest.model_validate(entries | {"files": ["tables/a.parquet", "figures/"]})
    for name in (r"tables\a", r"..\a", "../a", "a/../../b", "/a", "C:/a", "C:a", "//server/share/a", "./a", "."):
        with pytest.raises(ValidationError, match="leads out of the folder"):
            schema.Manifest.model_validate(entries | {"files": [name]})
