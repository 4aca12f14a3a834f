"""The parts of the documentation that are made from registers and docstrings, as Markdown.

    python recipes/docs/generated.py  # writes them into the pages of this folder; a test checks that they are current

What is between `<!-- generated: NAME ARGUMENT -->` and `<!-- end -->` is what the function NAME of GENERATED returns.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import sinkscope
from sinkscope.commands.claims.scorecard import Scorecard
from sinkscope.commands.list.command import kinds
from sinkscope.figures import KINDS as FIGURES
from sinkscope.options.option import flag
from sinkscope.options.recipe import known_recipes, read_recipe
from sinkscope.options.register import options_by_command
from sinkscope.results.command_line import command_lines
from sinkscope.results.metrics import METRICS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = re.compile(r"^<!-- generated: (\S+) ?(\S*) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
REPORTS = ROOT / "reports"
CLAIMS = REPORTS / "claims" / "smollm2-135m"
# classes that public functions return, beside those that are public themselves
RETURNED = (
    "measuring.watching.Watched", "models.loading.LoadedModel", "output.comparison.Comparison",
    "commands.compare.curves.Curves", "commands.claims.routes.Routes", "commands.train.output.Trained",
    "measuring.callback.Onset",
)  # fmt: skip


def escaped(cell: object) -> str:
    """Return a cell of a table as text in which Markdown finds no markup but code."""
    parts = re.split(r"(`[^`]+`)", " ".join(str(cell).split()))
    text = "".join(part if at % 2 else re.sub(r"([\\`*_\[\]<>$~#])", r"\\\1", part) for at, part in enumerate(parts))
    return text.replace("|", "\\|")


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], code: int = 1) -> str:
    """Return a table whose first `code` columns are names, as code."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = [str(cell) for cell in row]
        names = [f"`{cell}`".replace("|", "\\|") if cell else "" for cell in cells[:code]]
        lines.append([*names, *map(escaped, cells[code:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(kind: str) -> str:
    """Return what `sinkscope list KIND` shows."""
    found = sinkscope.list(kind)
    return table(found.columns, found.itertuples(index=False), code=2 if kind == "tables" else 1)


def reference() -> dict[str, str]:
    """Return a page for each kind of names."""
    pages = {}
    for kind, (about, where, *_) in kinds().items():
        head = f"# {kind.capitalize()}\n\n{about.capitalize()}, for `{where}`: `sinkscope list {kind}`."
        pages[kind] = f"{head}\n\n{listed(kind)}\n"
    return pages


def commands(_: str = "") -> str:
    """Return every command with its options."""
    parts = []
    for name, kind in options_by_command().items():
        arguments = " ".join(word.upper() for word in kind.arguments if word in kind.offered())
        parts += [f"## {name}", f"```text\nsinkscope {name} {arguments} [OPTIONS]\n```", inspect.getdoc(kind) or ""]
        rows = []
        for option, field in sorted(kind.offered().items(), key=lambda one: _panel(one[1])):
            extra: Any = field.json_schema_extra
            default = kind.shown.get(option, extra["shown"])
            if default is None:
                plain = "" if field.is_required() or field.default is None else field.default
                default = ", ".join(map(str, plain)) if isinstance(plain, tuple) else plain
            typed = option.upper() if option in kind.arguments else f"{flag(option)} {extra['metavar']}".strip()
            rows.append((typed, _panel(field), field.description, "" if default is False else default))
        parts.append(table(("option", "group", "what it does", "default"), rows))
    return "\n\n".join(parts)


def _panel(field: Any) -> str:
    return str(field.json_schema_extra["panel"])


def metric(name: str) -> str:
    """Return the definition of a metric, from the register."""
    one = METRICS[name]
    facts = [f"unit: {one.unit}"] * bool(one.unit) + [f"source: {one.source}"] * bool(one.source)
    facts += [f"only: {one.scope}"] * bool(one.scope)
    return f"`{name}`, {escaped(one.label)}\n: {escaped(one.definition)}{escaped('; '.join(['', *facts]))}."


def kinds_of_names(_: str = "") -> str:
    """Return a link to the page of each kind of names."""
    return "\n".join(f"- [{kind}](reference/{kind}.md): {about}" for kind, (about, *_) in kinds().items())


def public_names() -> dict[str, list[str]]:
    """Return heading → public names."""
    names = [*sinkscope.__all__, "list"]
    classes = [name for name in names if inspect.isclass(getattr(sinkscope, name))]
    named_as_commands = {name.replace("-", "_") for name in options_by_command()}
    return {
        "Commands": sorted(name for name in names if name in named_as_commands),
        "Your own models and loops": sorted(n for n in names if n not in classes and n not in named_as_commands),
        "Classes": sorted(classes),
    }


def api(_: str = "") -> str:
    """Return every public name with the first sentence of its docstring, by kind."""
    parts = []
    for head, names in public_names().items():
        abouts = [
            " ".join((inspect.getdoc(getattr(sinkscope, name)) or "").partition("\n\n")[0].split()) for name in names
        ]
        parts += [
            f"## {head}",
            table(("name", "what it is"), zip([f"sinkscope.{n}" for n in names], abouts, strict=True)),
        ]
    return "\n\n".join(parts)


def api_directives() -> str:
    """Return autodoc's directives for every public name, by kind."""
    parts = []
    for head, names in public_names().items():
        kind = "class" if head == "Classes" else "function"
        parts += [f"## {head}", *(_directive(kind, f"sinkscope.{name}") for name in names)]
    parts += ["## What they return", *(_directive("class", f"sinkscope.{name}") for name in RETURNED)]
    return "\n\n".join(parts)


def _directive(kind: str, name: str) -> str:
    members = "   :members:\n" if kind == "class" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{members}```"


def gallery(_: str = "", folder: Path | None = None) -> str:
    """Return every figure with what it shows, a command, and a picture: of a report, else drawn into `folder`."""
    parts = []
    for kind, figures in FIGURES.items():
        parts.append(f"## Of {kind}")
        for name, spec in figures.items():
            picture, command = _of_a_report(name)
            note, path = "", None
            if picture is not None:
                note, path = f" From [{picture.parents[1].name}](../../{_report_page(picture)}).", _link(picture)
            else:
                command = _making(name, spec.command)
                if folder is not None:
                    path = f"{name}.png"
                    note = _draw(name, folder / path)
            parts.append(f"### {name}\n\n{escaped(spec.about)}.{note}\n\n```text\n{command}\n```")
            parts += [f"![{name}]({path})"] * (path is not None)
    return "\n\n".join(parts)


def _link(path: Path) -> str:
    return f"../../{path.relative_to(ROOT).as_posix()}"


def _report_page(picture: Path) -> str:
    folder = next(parent for parent in picture.parents if (parent / "README.md").exists())
    return (folder / "README.md").relative_to(ROOT).as_posix()


def _of_a_report(name: str) -> tuple[Path | None, str]:
    """Return the figure and the command of the first report that has it: of the demo model, if there is one."""
    found = sorted(REPORTS.rglob(f"{name}.png"), key=lambda path: ("smollm2-135m" not in path.parts, path))
    for path in found:
        folder = path.parent.parent if path.parent.name == "figures" else path.parent
        if (folder / "run.json").exists():
            manifest = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            lines = command_lines(manifest, None) or [f"sinkscope {manifest['command']} …"]
            return path, lines[0]
    return None, ""


def _making(name: str, command: str) -> str:
    """Return a command that draws a figure: of the first recipe that names it, else the one that makes its tables."""
    for recipe, figures in _recipe_figures().items():
        if name in figures:
            return f"sinkscope run {recipe}"
    return f"sinkscope {command} …"


@cache
def _recipe_figures() -> dict[str, tuple[str, ...]]:
    """Return each recipe → the figures that it names."""
    return {name: tuple(read_recipe(path).content.figures or ()) for name, path in known_recipes().items()}


def _draw(name: str, path: Path) -> str:
    """Draw a figure that no report shows, and return what it is drawn from."""
    if name in FIGURES["claims"]:
        FIGURES["claims"][name](Scorecard.open(CLAIMS)).savefig(path, dpi=100)
        return f" From [{CLAIMS.name}](../../reports/claims/README.md)."
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.append(tests)
    from support.drawn_figures import drawn

    drawn(name).savefig(path, dpi=100)
    return " *Drawn from made-up numbers.*"


GENERATED: dict[str, Callable[[str], str]] = {
    "api": api, "commands": commands, "gallery": gallery, "kinds": kinds_of_names, "list": listed, "metric": metric,
}  # fmt: skip


def current(text: str, generated: dict[str, Callable[[str], str]] = GENERATED) -> str:
    """Return a page's text with what is generated of it made again; names that are not in `generated` stay."""

    def made(block: re.Match[str]) -> str:
        name, argument = block[1], block[2]
        if name not in generated:
            return block[0]
        return f"{block[0].partition(chr(10))[0]}\n\n{generated[name](argument)}\n\n<!-- end -->"

    return PLACE.sub(made, text)


def pages() -> dict[Path, str]:
    """Return every page of this folder that holds something generated → its current text."""
    texts = {path: current(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("*.md"))}
    return texts | {HERE / "reference" / f"{kind}.md": text for kind, text in reference().items()}


if __name__ == "__main__":
    for page, content in pages().items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(content, encoding="utf-8")
