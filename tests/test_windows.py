"""Nothing that Windows lacks: no module, no call, no encoding of the machine's own, no path with the other slash."""

import ast
import builtins
import importlib
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter, ValidationError
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
    """In a process of its own: import every module of the package again, where none of `MODULES` is to be had."""
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
    assert faults(PACKAGE) == []


def faults(folder: Path) -> list[tuple[str, str]]:
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.attr in CALLS.get(node.value.id, ()):
                    found.append((place, f"{node.value.id}.{node.attr}"))
            elif isinstance(node, ast.Call) and _is_text_in_the_machines_encoding(node):
                found.append((place, f"{_name(node)} without an encoding"))
    return found


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_text_in_the_machines_encoding(call: ast.Call) -> bool:
    if _name(call) not in TEXT or any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if _name(call) != "open":
        return _name(call) != "read_text" or not call.args
    if isinstance(call.func, ast.Attribute):  # of a path, if its first argument is a mode, or there is none
        mode = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else "r" * (not call.args)
    else:
        mode = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else "r"
    return isinstance(mode, str) and mode != "" and set(mode) <= set("rwax+t")


@pytest.mark.parametrize(
    "line", ["os.fork()", "os.kill(1, signal.SIGKILL)", "open(p)", "p.open('w')", "p.open()", "p.write_text(x)"]
)
def test_each_of_them_would_be_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(line, encoding="utf-8")
    assert len(faults(tmp_path)) == 1
    for right in ("p.open('rb')", "open(p, 'wb')", "p.write_text(x, encoding='utf-8')", "os.open(p, os.O_RDWR)"):
        (tmp_path / "some.py").write_text(right, encoding="utf-8")
        assert faults(tmp_path) == []


@pytest.mark.parametrize("name", [r"C:\models\gpt2", "C:/models", r"models\gpt2", r"..\gpt2"])
def test_paths_of_windows_are_no_hub_ids(name: str) -> None:
    assert is_path(name)
    assert not is_path("org/name")


@pytest.mark.parametrize("name", [r"tables\a", r"..\a", "C:/a", "C:a", "//server/share/a", "a//b", "./a", "."])
def test_a_manifest_lists_no_path_out_of_its_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import PureWindowsPath

    monkeypatch.setattr(schema, "PurePath", PureWindowsPath)
    listed = TypeAdapter(schema.Manifest)
    entries = {"sinkscope": "1", "command": "analyze", "config": {}, "tables": []}
    listed.validate_python(entries | {"files": ["tables/a.parquet", "figures/"]})
    with pytest.raises(ValidationError, match="leads out of the folder"):
        listed.validate_python(entries | {"files": [name]})
