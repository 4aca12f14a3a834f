"""Builds the documentation: `python recipes/docs/make_site.py OUT` (`make docs`) writes OUT/html.

OUT/source gets the pages of this folder and the other documents of the repository. Sphinx writes the Python API from
docstrings, and figures that no report has are drawn. A link between documents of the repository becomes one between
pages of the site; a link to a file that is no page, such as a table, becomes a download. A link that leads nowhere is
an error, and so is any warning of Sphinx.
"""

import base64
import json
import re
import shutil
import sys
from pathlib import Path
from posixpath import normpath, relpath

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from generated import api_directives, current, gallery  # noqa: E402
from sphinx.cmd.build import main as sphinx  # noqa: E402

TOUR = "recipes/tour.ipynb"
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
# document of the repository → page of the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/sweeps/README.md": "sweeps.md",
    "tests/benchmarks/README.md": "benchmarks.md",
    TOUR: "tour.md",
    **{
        path.relative_to(ROOT).as_posix(): path.relative_to(HERE).as_posix()
        for path in HERE.rglob("*.md")
        if path.name != "site.md"
    },
    **{(place := path.relative_to(ROOT).as_posix()): place for path in ROOT.glob("reports/**/*.md")},
}
# document → the tables of contents below it
CONTENTS = {
    "README.md": (HERE / "site.md").read_text(encoding="utf-8"),
    "reports/README.md": "\n```{toctree}\n:hidden:\n:glob:\n\npapers\n*/README\n```\n",
}


class BrokenLink(Exception):
    """A link to a file that does not exist."""


def moved(text: str, document: str, source: Path) -> str:
    """Return a document's text with its links as they are on the site; files that are no pages are copied there."""

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = found[1].partition("#")
        if "://" in target or not target:
            return found[1]
        place = normpath(f"{Path(document).parent.as_posix()}/{target}")
        if (ROOT / place / "README.md").exists():
            place += "/README.md"
        page = PAGES.get(place)
        if page is None:
            if (source / Path(PAGES[document]).parent / target).is_file():
                return found[1]  # a picture that was made for the page
            if not (ROOT / place).is_file():
                raise BrokenLink(f"{document}: {found[1]}")
            page = place
            (source / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / place, source / page)
        return relpath(page, Path(PAGES[document]).parent.as_posix() or ".") + hash_ + anchor

    parts = CODE.split(text)  # every second one is code
    # a link whose text is code is split, too: its target is in the part after it
    return "".join(part if at % 2 else LINK.sub(link, part) for at, part in enumerate(parts))


def of_notebook(path: Path, source: Path) -> str:
    """Return a notebook as Markdown, with its outputs."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(parts)}.png"
                (source / name).write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![A figure of the tour]({name})")
            elif "text/plain" in data:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
            else:
                parts.append("".join(data["text/markdown"]))
    return "\n\n".join(parts) + "\n"


def assemble(source: Path) -> None:
    """Write the sources of the site."""
    for document, page in PAGES.items():
        path = source / page
        path.parent.mkdir(parents=True, exist_ok=True)
        text = of_notebook(ROOT / document, source) if document == TOUR else (ROOT / document).read_text("utf-8")
        if document == "recipes/docs/api.md":
            text = current(text, {"api": lambda _: api_directives()})
        elif document == "recipes/docs/gallery.md":
            text = current(text, {"gallery": lambda _: gallery(folder=source)})
        if document.startswith("reports/") and not document.endswith(("README.md", "papers.md")):
            text = f"---\norphan: true\n---\n{text}"  # linked from the report's page
        path.write_text(moved(text, document, source) + CONTENTS.get(document, ""), encoding="utf-8")
    shutil.copytree(HERE / "_static", source / "_static")
    shutil.copyfile(HERE / "conf.py", source / "conf.py")


def build(out: Path) -> int:
    """Write the site into OUT/html. Returns Sphinx's exit status."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "source").mkdir(parents=True)
    assemble(out / "source")
    return sphinx(["-q", "-W", "--keep-going", "-n", "-b", "html", str(out / "source"), str(out / "html")])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
