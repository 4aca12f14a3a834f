"""The documentation: its code and commands run on a tiny model, and the site is built without a warning."""

import inspect
import json
import re
import shlex
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import matplotlib.pyplot as plt
import pytest
import torch
from support.retrofit_command import succeeded, words_tokenizer
from tiny import tiny_model

import sinkscope
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.figures import KINDS as FIGURES
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.options.option import flag
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import options_by_command
from sinkscope.results.metrics import METRICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "recipes" / "docs"
PAGES = [path for path in (*sorted(DOCS.glob("*.md")), ROOT / "README.md") if "\n```python" in path.read_text("utf-8")]
MODEL = "HuggingFaceTB/SmolLM2-135M"  # in the documents; the tests use a tiny model in its place
# options that make a command small, where it has them and the document does not give them
SMALL = {
    "num_seqs": 2, "seq_len": 20, "draws": 1, "nulls": 1, "block_length": 16, "batch_size": 2, "calibration": 2,
    "positions": 8, "window": 16,
}  # fmt: skip


def small(line: str, tiny: Path) -> list[str]:
    """Return the words of a command of the documents, with the tiny model and small options."""
    line = line.replace("zero-massive:layers=11", "nullify-first-embedding")  # it has no massive activation
    _, name, *words = shlex.split(line, comments=True)
    kind = options_by_command()[name]
    if "MODEL" in words:
        words[words.index("MODEL")] = str(tiny)
    elif name in ("run", "sweep"):
        words[1:1] = [str(tiny)] * (name == "run")
    elif "model" in kind.arguments and "--from" not in words and not (words and not words[0].startswith("-")):
        words.insert(0, str(tiny))
    if name == "doctor" and "--dtype" not in words:  # it reads no text
        return [name, *words]
    for option, value in SMALL.items():
        if option in kind.offered() and flag(option) not in words and "--from" not in words and name != "run":
            words += [flag(option), "128" if (name, option) == ("kv-plan", "seq_len") else str(value)]
    return [name, *words]


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_code_and_commands_of_a_page_run(page: Path, tiny: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    monkeypatch.setitem(CLAIMS, "W-900", CLAIMS["W-1"])  # a page adds it: it is removed after the test
    del CLAIMS["W-900"]
    filtered = lambda *_, **__: lambda states, layer: states[..., 0] > 0  # noqa: E731  # the tiny model has no sink
    monkeypatch.setattr("sinkscope.commands.analyze.command.calibrated_filter", filtered)
    monkeypatch.setitem(OBSERVABLES, "largest-share", OBSERVABLES["massive"])  # likewise
    del OBSERVABLES["largest-share"]
    ids = torch.randint(3, 90, (8, 16), generator=torch.Generator().manual_seed(0))
    blocks = [{"input_ids": row, "labels": row} for row in ids]
    words = words_tokenizer()
    words.pad_token = "<pad>"
    names: dict[str, Any] = {
        "model": tiny_model("llama").requires_grad_(True),
        "tokenizer": words,
        "blocks": blocks,
        "batch": {"input_ids": ids, "labels": ids},
    }
    for language, block in re.findall(r"^```(python|sh)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        if language == "python":
            block = block.replace(MODEL, str(tiny)).replace("hidden_states[13]", "hidden_states[2]")  # of fewer layers
            exec(compile(block, page.name, "exec"), names)
        else:
            for line in block.splitlines():
                succeeded(*small(line, tiny))
    plt.close("all")


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), ROOT / "README.md"], ids=lambda path: path.stem)
def test_commands_within_sentences_exist(page: Path) -> None:
    for command in re.findall(r"`sinkscope ([a-z][^`]*)`", " ".join(page.read_text("utf-8").split())):
        name, *words = command.split()
        options = set().union(*(kind.model_fields for kind in (options_by_command()[name], OutputOptions)))
        flags = {flag(option) for option in options}
        assert {word for word in words if word.startswith("--")} <= flags, command


def test_every_question_of_the_readme_has_a_command() -> None:
    text = (ROOT / "README.md").read_text("utf-8").partition("## What do you want to know?")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 11
    assert all("sinkscope" in row.split("|")[2] for row in rows)


def test_every_public_name_has_types() -> None:
    for name in [*sinkscope.__all__, "list"]:
        thing = getattr(sinkscope, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            parameters = inspect.signature(thing).parameters.values()
            assert [one.name for one in parameters if one.annotation is one.empty] == [], name


class Links(HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if "src" in attributes or tag == "link":
            self.loaded.append(attributes.get("src", attributes.get("href", "")))


def test_generated_pages_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `python recipes/docs/generated.py` writes them."""
    monkeypatch.syspath_prepend(str(DOCS))
    pages = import_module("generated").pages()
    assert [path.name for path, text in pages.items() if path.read_text("utf-8") != text] == []
    assert set(DOCS.glob("reference/*.md")) <= set(pages)
    assert "sinkscope quantize MODEL [OPTIONS]" in pages[DOCS / "commands.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with small pictures in place of the figures that no report has, and of most reports only headings.

    All links are those of the whole pages, of which one report of every command has all of its own.
    """
    whole: dict[str, str] = {}
    for path in sorted((ROOT / "reports").rglob("run.json")):
        whole.setdefault(json.loads(path.read_text("utf-8"))["command"], path.relative_to(ROOT).parts[1])
    assert len(whole) == 10
    furo = import_module("furo")
    out = tmp_path_factory.mktemp("docs") / "docs"
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(DOCS))
        patched.setattr("generated._draw", lambda name, path: plt.imsave(path, [[0.0]]) or " *A pixel.*")
        make_site = import_module("make_site")
        moved = make_site.moved

        def shortened(text: str, document: str, source: Path) -> str:
            text = moved(text, document, source)  # with an error for a link that leads nowhere
            folder, _, name = document.removeprefix("reports/").partition("/")
            is_whole = not document.startswith("reports/") or not name or folder in whole.values()
            headings = re.findall(r"\A---.*?^---$|^#+ [^\n]*", text, re.DOTALL | re.MULTILINE)
            return text if is_whole else "\n\n".join(headings)

        patched.setattr(make_site, "moved", shortened)
        whole_tree, trees = furo._compute_navigation_tree, dict[tuple[str, int], str]()

        def navigation(context: dict[str, Any]) -> str:
            """Links are the same for all pages at one depth of a folder; they take half of the time of writing."""
            place = context["pagename"].partition("/")[0], context["pagename"].count("/")
            if place[1] == 0 or place not in trees:
                trees[place] = whole_tree(context)
            return trees[place]

        patched.setattr(furo, "_compute_navigation_tree", navigation)
        assert make_site.build(out) == 0  # any warning gives another status
    return out / "html"


@pytest.mark.slow
def test_the_site_has_no_broken_link_and_needs_no_network(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        assert [name for name in page.loaded if name.startswith(("http", "//"))] == []
        for link in (*page.links, *page.loaded):
            target, _, anchor = unquote(link).partition("#")
            if "://" in target or target.startswith(("mailto:", "data:")):
                continue
            destination = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert destination.exists(), f"{path.relative_to(site)}: {link}"
            if anchor and destination in pages:
                assert anchor in pages[destination].anchors, f"{path.relative_to(site)}: {link}"


@pytest.mark.slow
def test_the_site_has_every_name(site: Path) -> None:
    api = Links(site / "api.html").anchors
    assert {f"sinkscope.{name}" for name in [*sinkscope.__all__, "list"]} <= api
    anchors = Links(site / "gallery.html").anchors
    assert {name for figures in FIGURES.values() for name in figures} <= anchors
    for page, names in (("metrics", METRICS), ("claims", CLAIMS), ("tables", ("attention",))):
        text = (site / "reference" / f"{page}.html").read_text("utf-8")
        assert [name for name in names if name not in text] == []
    options = (site / "commands.html").read_text("utf-8")
    assert [name for name in options_by_command() if f'id="{name}"' not in options] == []


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    make_site = import_module("make_site")
    with pytest.raises(make_site.BrokenLink, match=r"README.md: no/such/file.md"):
        make_site.moved("[x](no/such/file.md)", "README.md", tmp_path)
    text = make_site.moved("[x](reports/README.md#top) `[x](no.md)`", "README.md", tmp_path)
    assert text == "[x](reports/README.md#top) `[x](no.md)`"


def test_the_citation_names_the_version() -> None:
    import yaml

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    assert cited["version"] == sinkscope.__version__
    assert f"## {cited['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_numbers_that_the_readme_quotes_are_those_of_the_reports() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for command, report in (("analyze", "smollm2-135m"), ("quantize --scheme static", "smollm2-135m-w8a8")):
        quoted = text.partition(f"`sinkscope {command}` ")[2].partition("\n\n")[2].partition("\n\n")[0]
        verdict = (ROOT / "reports" / report / "verdict.md").read_text("utf-8")
        numbers = re.findall(r"\d[\d,]*\.?\d+%?", quoted.replace("2024", ""))
        assert len(numbers) >= 5
        assert [number for number in numbers if number not in verdict] == []


def test_words_are_those_of_the_documents() -> None:
    """The README stays one screen and a half, and the results a gallery."""
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700
    assert len((ROOT / "reports" / "README.md").read_text("utf-8").split()) <= 1700
