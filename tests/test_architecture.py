"""The shape of the package, computed from its source: rooms in one direction, no circles, short files and functions.

Every import counts: also inside a function, under TYPE_CHECKING, and `import_module("…")` with a literal name.
The rules are themselves tested on small packages that break them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the top down: a room imports from itself and from the rooms below it.
ROOMS = (
    "cli",
    "commands",
    "report",
    "training",
    "measuring",
    "results",
    "interventions",
    "retrofits",
    "quantization",
    "attention",
    "models",
    "text",
    "options",
    "errors",
)
MOST_ENTRIES = 16
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
NO_ROOMS = {"benchmarks", "support", "torture"}  # folders of tests/ without tests


@dataclass
class Module:
    """One source file."""

    lines: int
    imports: set[str] = field(default_factory=set)  # modules of the same package
    functions: list[tuple[str, int]] = field(default_factory=list)  # name, lines


def read_package(package: Path) -> dict[str, Module]:
    """Dotted name → module, for every Python file of the package."""
    paths = {dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    return {name: read_module(name, path, set(paths)) for name, path in paths.items()}


def dotted(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_module(name: str, path: Path, known: set[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    module = Module(len(text.splitlines()))
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        module.imports |= set(imported(node, parent, known)) & known - {name}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
    return module


def imported(node: ast.AST, parent: str, known: set[str]) -> Iterator[str]:
    """What a statement imports: of `from a.b import c` it is a.b.c if that is a module, else a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = parent.split(".")[: len(parent.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))


def rank(name: str) -> int:
    """Of the room that a module stands in; the package itself, which names what users import, is above them all."""
    return ROOMS.index(name.split(".")[1]) if "." in name else -1


def upward(modules: dict[str, Module]) -> list[str]:
    return [
        f"{name} imports {target}, which stands above it"
        for name, module in modules.items()
        for target in sorted(module.imports)
        if rank(target) < rank(name)
    ]


def circles(modules: dict[str, Module]) -> list[str]:
    """The modules that reach themselves by imports, grouped by circle."""
    reached = {name: reachable(name, modules) for name in modules}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in modules}
    return [f"circle: {', '.join(sorted(circle))}" for circle in found if circle]


def reachable(name: str, modules: dict[str, Module]) -> set[str]:
    seen: set[str] = set()
    waiting = list(modules[name].imports)
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += modules[other].imports
    return seen


def too_long(modules: dict[str, Module]) -> list[str]:
    files = [f"{name} has {module.lines} lines" for name, module in modules.items() if module.lines > LONGEST_FILE]
    return files + [
        f"{name}: {function} has {lines} lines"
        for name, module in modules.items()
        for function, lines in module.functions
        if lines > LONGEST_FUNCTION
    ]


def entries(package: Path) -> list[str]:
    return sorted(path.name for path in package.iterdir() if path.name != "__pycache__")


def strangers(package: Path) -> list[str]:
    """Entries at the top of the package that are no room."""
    rooms = {*ROOMS, *(f"{room}.py" for room in ROOMS), "__init__.py", "__main__.py", "py.typed"}
    return [name for name in entries(package) if name not in rooms]


# ------------------------------------------------------------------------------------------- the package


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_package(ROOT / "sinkscope")


def test_every_top_level_entry_is_a_room_and_there_are_few() -> None:
    assert strangers(ROOT / "sinkscope") == []
    assert len(entries(ROOT / "sinkscope")) <= MOST_ENTRIES


def test_imports_go_from_upper_rooms_to_lower_ones(modules: dict[str, Module]) -> None:
    assert len(modules) > 50  # the source was found
    assert sum(len(module.imports) for module in modules.values()) > 100
    assert upward(modules) == []


def test_no_modules_import_each_other_in_a_circle(modules: dict[str, Module]) -> None:
    assert circles(modules) == []


def test_files_and_functions_are_short(modules: dict[str, Module]) -> None:
    assert too_long(modules) == []


def test_the_folders_of_tests_are_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders - NO_ROOMS <= set(ROOMS)


def test_test_modules_do_not_import_each_other() -> None:
    """What they share stands in tests/support."""
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in imported(node, "", set())
        if name.rpartition(".")[2] in names
    ]
    assert found == []


# --------------------------------------------------------------------------------------------- the rules


def package_of(folder: Path, **files: str) -> Path:
    """A package `house` with these files: `measuring__tracer` is measuring/tracer.py."""
    package = folder / "house"
    for name, text in {"": "", **files}.items():
        path = package.joinpath(*name.split("__")).with_suffix(".py") if name else package / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return package


GOOD = {
    "errors": "",
    "models__families": "from house.errors import InputError\n",
    "measuring__tracer": "def trace():\n    from house.models import families\n    return families\n",
    "measuring__passes": "from .tracer import trace\nfrom ..models.families import FAMILIES\n",
    "commands__analyze": "import house.measuring.passes\n",
}


def test_a_good_package_passes(tmp_path: Path) -> None:
    package = package_of(tmp_path, **GOOD)
    modules = read_package(package)
    assert modules["house.errors"].imports == set()
    assert modules["house.models.families"].imports == {"house.errors"}
    assert modules["house.measuring.tracer"].imports == {"house.models.families"}
    assert modules["house.measuring.passes"].imports == {"house.measuring.tracer", "house.models.families"}
    assert modules["house.commands.analyze"].imports == {"house.measuring.passes"}
    assert [*upward(modules), *circles(modules), *too_long(modules), *strangers(package)] == []


@pytest.mark.parametrize(
    "text",
    [
        "from house.measuring.tracer import trace\n",
        "from house.measuring import tracer\n",
        "import house.measuring.tracer as t\n",
        "from ..measuring.tracer import trace\n",
        "def late():\n    from house.measuring.tracer import trace\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.measuring.tracer import trace\n",
        "import importlib\nt = importlib.import_module('house.measuring.tracer')\n",
    ],
)
def test_an_upward_import_is_found(text: str, tmp_path: Path) -> None:
    modules = read_package(package_of(tmp_path, **GOOD, models__wiring=text))
    assert upward(modules) == ["house.models.wiring imports house.measuring.tracer, which stands above it"]
    assert circles(modules) == []


def test_importing_the_package_itself_is_upward(tmp_path: Path) -> None:
    modules = read_package(package_of(tmp_path, **GOOD, commands__list="import house\n"))
    assert upward(modules) == ["house.commands.list imports house, which stands above it"]


def test_a_circle_through_an_import_inside_a_function_is_found(tmp_path: Path) -> None:
    links = {
        "text__a": "from house.text.b import x\n",
        "text__b": "from house.text.c import x\n",
        "text__c": "def late():\n    from house.text.a import x\n    return x\n",
        "text__d": "from house.text.a import x\n",  # imports the circle and stands outside it
    }
    modules = read_package(package_of(tmp_path, **GOOD, **links))
    assert circles(modules) == ["circle: house.text.a, house.text.b, house.text.c"]
    assert upward(modules) == []


def test_a_circle_through_a_packages_own_file_is_found(tmp_path: Path) -> None:
    package = package_of(tmp_path, **GOOD, retrofits__vga="from house.retrofits import RETROFITS\n")
    (package / "retrofits" / "__init__.py").write_text("from house.retrofits.vga import VGA\n")
    assert circles(read_package(package)) == ["circle: house.retrofits, house.retrofits.vga"]


@pytest.mark.parametrize("head", ["def long", "async def long", "class A:\n    def long"])
def test_a_long_function_is_found(head: str, tmp_path: Path) -> None:
    indent = " " * (8 if "class" in head else 4)
    for lines in (LONGEST_FUNCTION, LONGEST_FUNCTION + 1):
        text = f"{head}():\n" + f"{indent}x = 1\n" * (lines - 1)
        found = too_long(read_package(package_of(tmp_path, **GOOD, text__long=text)))
        assert found == ([] if lines == LONGEST_FUNCTION else [f"house.text.long: long has {lines} lines"])


def test_a_long_file_is_found(tmp_path: Path) -> None:
    for lines in (LONGEST_FILE, LONGEST_FILE + 1):
        found = too_long(read_package(package_of(tmp_path, **GOOD, text__long="x = 1\n" * lines)))
        assert found == ([] if lines == LONGEST_FILE else [f"house.text.long has {lines} lines"])


def test_a_file_beside_the_rooms_is_found(tmp_path: Path) -> None:
    assert strangers(package_of(tmp_path, **GOOD, helpers="")) == ["helpers.py"]
