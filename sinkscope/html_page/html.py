"""index.html: the data of a page, its style and its scripts, in one file that needs no network."""

import base64
import hashlib
import html
import os
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from sinkscope.html_page.compact import DIGITS, as_json, compact_maps, compact_tables
from sinkscope.html_page.contents import COLUMNS, Contents
from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.options.register import records
from sinkscope.results.command_line import command_lines
from sinkscope.results.findings import Finding
from sinkscope.results.manifest import PAGE
from sinkscope.results.metrics import METRICS, PAPERS
from sinkscope.results.papers import paper_of
from sinkscope.results.run import RunData
from sinkscope.results.swap import new_file
from sinkscope.verdict import at_a_glance
from sinkscope.verdict.report import published_lines

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (  # in running order: each after those that it uses; commands' scripts run before the last one
    "d3.min.js", "plot.umd.min.js", "data.js", "elements.js", "charts.js", "heatmap.js", "findings.js", "maps.js",
    "head.js", "text.js", "pictures.js", "layers.js", "topics.js", "training.js", "explore.js", "tables.js", "run.js",
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page, which a notebook displays."""

    html: str

    def _repr_html_(self) -> str:
        return (
            '<iframe title="sinkscope" style="width:100%;height:720px;border:0" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )


def page_of(contents: Contents) -> Page:
    """Return the page of a run, a series, a comparison, …"""
    places = [(record.folder, record.script) for record in records().values() if record.script]
    of_commands = [(resources.files(folder) / script).read_text("utf-8") for folder, script in places]
    scripts = [*map(_asset, SCRIPTS), *of_commands, _asset("page.js")]
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # whatever text the data contain, the browser runs only these scripts and uses no network
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return Page(
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>sinkscope</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        "<noscript>This page needs scripts, which are turned off in this browser.</noscript>\n"
        f'<script type="application/json" id="data">{page_data(contents)}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )


def write_page(contents: Contents, folder: Path) -> None:
    """Write FOLDER/index.html."""
    with new_file(folder / PAGE) as fresh:
        fresh.write_text(page_of(contents).html, encoding="utf-8")


def page_data(contents: Contents) -> str:
    """Return the JSON that the page's scripts read: values of tables, with the labels of `METRICS` and `Column`."""
    manifest, tables, folder, of_command = contents.manifest, contents.tables, contents.folder, contents.of_command
    glances: list[dict[str, str]] = []
    received, links = [], {}
    if manifest["command"] == "analyze" and "summary" in tables:  # what a reader sees first
        run = RunData(dict(manifest), dict(tables), folder)
        glances = [glance._asdict() for glance in at_a_glance.glances(run)]
    maps = tables.get("attention_maps", pd.DataFrame())
    if not maps.empty and "head" in maps:  # the mean weight of every key
        means = maps.groupby(["layer", "head", "sequence", "key"], sort=False)["weight"].mean()
        received = [(*map(int, key), float(f"{weight:.{DIGITS}g}")) for key, weight in means.items()]
    if folder is not None:  # pages of runs that exist, relative to this page
        pages = {str(label): place / PAGE for label, place in of_command.linked(folder, manifest).items()}
        links = {
            # begins with `./`, because a name may look like a URL's scheme
            label: "./" + quote(Path(os.path.relpath(page.absolute(), folder.absolute())).as_posix())
            for label, page in pages.items()
            if page.is_file()
        }
    leading = (of_command.named_by,) if contents.parts else ()
    columns = {name: (*leading, *of_table) for name, of_table in COLUMNS.items()}
    entries = {
        "version": version("sinkscope"),
        "digits": DIGITS,
        "manifest": _plain(manifest),
        "commands": command_lines(manifest, folder),
        "metrics": {
            name: {key: getattr(metric, key) for key in ("label", "short", "definition", "unit", "form", "source")}
            for name, metric in METRICS.items()
        },
        "findings": [_as_data(finding) for finding in contents.findings],
        "overviews": [
            {"title": title, "columns": list(table), "rows": table.astype(str).to_numpy().tolist()}
            for title, table in contents.overviews.items()
        ],
        "absent": list(contents.absent),
        "papers": PAPERS,
        "parts": [str(label) for label in contents.parts],
        "part": of_command.named_by.name,
        "glances": glances,
        "received": received,
        **of_command.data(contents),
        "maps": compact_maps(contents.activations),
        "links": links,
    }
    return f'{as_json(entries)[:-1]},"tables":{compact_tables(contents.all_tables, columns)}}}'


def _as_data(finding: Finding) -> dict[str, Any]:
    claim = RUN_CLAIMS.get(finding.claim)
    return {
        **{name: getattr(finding, name) for name in ("name", "section", "sentence", "claim")},
        "published": published_lines(finding.published),
        "outcome": str(finding.outcome),
        "headline": finding.is_headline,
        "statement": claim.statement if claim else "",
        "paper": f"{paper_of(finding.claim)}, {claim.reference}" if claim else "",
    }


def _plain(value: Any) -> Any:
    """Return a manifest's values for JSON: they may be NaN or infinite, for example a perplexity."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
