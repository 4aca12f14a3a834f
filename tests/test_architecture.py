"""Tests mirror the package. How its rooms may import each other is a contract of import-linter in pyproject.toml."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
ROOMS = next(contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
NO_ROOMS = {"benchmarks", "support", "torture"}  # folders of tests/ without tests


def test_the_folders_of_tests_are_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - NO_ROOMS <= set(ROOMS)


def test_test_modules_do_not_import_each_other() -> None:
    """Common code is in tests/support."""
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.rpartition(".")[2] in names
    ]
    assert found == []
