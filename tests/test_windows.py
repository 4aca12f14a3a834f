"""The package uses no module or call that Windows lacks, and no default encoding."""

import ast
import builtins
import importlib
import pkgutil
import sys
import types
from pathlib import Path, PureWindowsPath
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from support.forked import forked

from sinkscope.models.files import is_path
from sinkscope.results import schema

PACKAGE = Path(__file__).parents[1] / "sinkscope"
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
CALLS = {
    "os": {"chown", "fork", "forkpty", "geteuid", "getgid", "getloadavg", "getuid", "killpg", "mkfifo", "nice", "pread"}
    | {"sched_getaffinity", "setsid", "statvfs", "uname", "wait"},
    "signal": {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm"},
    "time": {"tzset"},
}
TEXT = {"open", "read_text", "write_text", "fdopen", "TextIOWrapper"}  # need an encoding


def import_all_without_unix() -> None:
    """Import every module of the package again without `MODULES`, in a forked process."""
    own = builtins.__import__

    def importing(name: str, namespace: Any = None, *rest: Any, **named: Any) -> Any:
        by = (namespace or {}).get("__name__", "")
        if by.partition(".")[0] == "sinkscope" and name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(name)
        return own(name, namespace, *rest, **named)

    builtins.__import__ = importing  # type: ignore[assignment]
    for name in [name for name in sys.modules if name.partition(".")[0] == "sinkscope"]:
        del sys.modules[name]
    package = importlib.import_module("sinkscope")
    for module in pkgutil.walk_packages(package.__path__, "sinkscope."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    resident = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(peak_wset=3 * 2**20))
    psutil.Process = lambda: resident  # type: ignore[assignment, misc]
    assert importlib.import_module("sinkscope.results.manifest")._largest_resident() == 3 * 2**20


def test_every_module_is_imported_without_unix_modules() -> None:
    with forked(import_all_without_unix) as process:
        assert process.wait() == 0


def test_no_call_that_windows_lacks() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert faults(path.read_text(encoding="utf-8")) == [], path.name
    for wrong in ("os.fork()", "os.kill(1, signal.SIGKILL)", "open(p)", "p.open('w')", "p.open()", "p.write_text(x)"):
        assert len(faults(wrong)) == 1
    for right in ("p.open('rb')", "open(p, 'wb')", "p.write_text(x, encoding='utf-8')", "os.open(p, os.O_RDWR)"):
        assert faults(right) == []


def faults(source: str) -> list[tuple[int, str]]:
    """Return the lines with a call that Windows lacks, or with text in the default encoding of the machine."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in CALLS.get(node.value.id, ()):
                found.append((node.lineno, f"{node.value.id}.{node.attr}"))
        elif isinstance(node, ast.Call) and not any(keyword.arg == "encoding" for keyword in node.keywords):
            name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            is_text = name in TEXT and (name != "read_text" or not node.args)
            if name == "open":  # the mode is the first argument of a path's method, the second one of the function
                modes = [*node.args[isinstance(node.func, ast.Name) :], ast.Constant("r")]
                is_text = isinstance(modes[0], ast.Constant) and set(str(modes[0].value)) <= set("rwax+t")
            if is_text:
                found.append((node.lineno, f"{name} without an encoding"))
    return found


def test_paths_of_windows_are_no_hub_ids() -> None:
    assert all(is_path(name) for name in (r"C:\models\gpt2", "C:/models", r"models\gpt2", r"..\gpt2"))
    assert not is_path("org/name")


def test_a_manifest_lists_no_path_out_of_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "PurePath", PureWindowsPath)
    entries = {"sinkscope": "1", "command": "analyze", "config": {}, "tables": []}
    schema.Manifest.model_validate(entries | {"files": ["tables/a.parquet", "figures/"]})
    for name in (r"tables\a", r"..\a", "../a", "a/../../b", "/a", "C:/a", "C:a", "//server/share/a", "./a", "."):
        with pytest.raises(ValidationError, match="leads out of the folder"):
            schema.Manifest.model_validate(entries | {"files": [name]})
