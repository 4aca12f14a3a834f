"""Settings of Sphinx. `make_site.py` calls it; everything is static and works without a network."""

import re
from importlib import metadata
from typing import Any

from docutils.nodes import SkipNode, Text
from latex2mathml.converter import convert

project = "sinkscope"
author = "the sinkscope authors"
release = metadata.version("sinkscope")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"sinkscope {release}"
html_show_copyright = False
html_copy_source = html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
smartquotes = False  # they would change --option

myst_enable_extensions = ["deflist"]
myst_fence_as_directive = ["math"]  # as the forges render it
myst_heading_anchors = 4
myst_links_external_new_tab = False
# verdicts and scorecards, which commands write, begin at the second level
suppress_warnings = ["myst.header"]

autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings are written as Markdown: see `as_restructured`
nitpicky = True
# types of other libraries, and of modules that are not public, have no page here
nitpick_ignore_regex = [("py:.*", r"(?!sinkscope\.\w+$).*")]

SIGNS = re.compile(r"(`[^`]*`)|(\*\*|\|)")  # code, or a sign that reStructuredText would read


def mathml(self: Any, node: Any) -> None:
    """Browsers draw MathML: no script and no picture is needed."""
    display = "block" if node.tagname == "math_block" else "inline"
    self.body.append(convert(node.astext(), display=display))
    raise SkipNode


def as_restructured(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark the code in a docstring, which is only indented, and escape signs that reStructuredText would read.

    The options of a command, which `options/signatures.py` lists last, join the other arguments.
    """
    if "Options:" in lines and "Args:" in lines:
        at, start = lines.index("Options:"), lines.index("Args:")
        end = lines.index("", start)
        lines[:] = [*lines[:end], *filter(None, lines[at + 1 :]), *lines[end:at]]
    found = lines.copy()
    lines.clear()
    last, is_code = "", False  # the last line that is not empty
    for before, line in zip(["", *found], found, strict=False):
        is_indented = line.startswith("    ")
        if is_indented and not before and last and not last.startswith(" ") and not last.endswith(":"):
            is_code = True
            lines += ["::", ""]
        is_code = is_code and (is_indented or not line)
        lines.append(line if is_code else SIGNS.sub(lambda sign: sign[1] or "\\" + "\\".join(sign[2]), line))
        last = line or last


def dashes(app: Any, tree: Any) -> None:
    """Put a dash between a parameter and its description, as smartquotes would."""
    for text in [text for text in tree.findall(Text) if text == " -- "]:
        text.parent.replace(text, Text(" – "))


def setup(app: Any) -> None:
    app.connect("doctree-read", dashes)
    app.connect("autodoc-process-docstring", as_restructured, priority=100)  # before napoleon
    app.add_html_math_renderer("mathml", inline_renderers=(mathml, None), block_renderers=(mathml, None))


html_math_renderer = "mathml"
