"""The page of a run folder: index.html, one file that shows the folder's tables in a browser, without a network.

contents.py   collects what a page shows: run.json, tables, findings, and runs side by side
compact.py    writes tables as JSON, by column
html.py       writes the JSON, the style and the scripts into one file
assets/       the style, the scripts of the page, and the libraries that they use
"""

from sinkscope.html_page.contents import STEP, Contents
from sinkscope.html_page.html import Page, page_of, write_page

__all__ = ["STEP", "Contents", "Page", "page_of", "write_page"]
