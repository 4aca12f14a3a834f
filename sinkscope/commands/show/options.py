"""The options of `show`."""

from typing import ClassVar

from sinkscope.options.files import UserPath
from sinkscope.options.option import Options, option


class ShowOptions(Options):
    """Open the page of a folder in the browser: index.html, which commands write into their folders.

    If it is missing, it is made from the folder's tables. --print names the file and opens nothing."""

    arguments: ClassVar = ("run",)

    run: UserPath = option(..., "The folder of any command, or its run.json.", metavar="RUN")
    print: bool = option(False, "Print the path of the page and open no browser.", panel="Output")
    again: bool = option(False, "Write the page again if it exists.", panel="Output")
