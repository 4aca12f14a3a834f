"""The options for output, and the options of commands that do not measure."""

from typing import Any, ClassVar

from sinkscope.options.files import UserPath
from sinkscope.options.option import Options, option


class OutputOptions(Options):
    """Options that do not affect results and are not saved in run.json."""

    panel: ClassVar = "Output"

    out: UserPath | None = option(None, "Folder to write.", metavar="DIR")
    overwrite: bool = option(False, "Replace what an earlier run wrote to --out.")
    from_: UserPath | None = option(
        None,
        "Repeat a run, by its folder or run.json, with all its options except permissions to run code.",
        metavar="RUN",
    )
    quiet: bool = option(False, "Print nothing but errors.")
    json_: bool = option(False, "Print the result, or the error, as one JSON object on standard output.")
    no_page: bool = option(False, "Write no index.html, the page to look at in a browser.")
    record: dict[str, Any] | None = option(None, "The recipe that runs the command, for its run.json.")

    @property
    def where(self) -> dict[str, Any]:
        """The options with the names that the Python functions of the commands have."""
        return {"out": self.out, "overwrite": self.overwrite, "quiet": self.quiet, "page": not self.no_page}
