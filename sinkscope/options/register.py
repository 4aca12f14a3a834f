"""The register of commands: what the rest of the package knows of each.

A command is a folder of `sinkscope/commands/` whose `__init__.py` has its records, `COMMANDS`, or an entry point of
another package, of the group `sinkscope.commands`, which names one record. Whatever imports torch is named as
MODULE:NAME and imported when it is used, so that `--help` answers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from sinkscope.errors import InputError, described
from sinkscope.options.option import Options
from sinkscope.plugins import WITHOUT, installed

COMMANDS = "sinkscope.commands"  # the package of the folders, and the group of entry points


@dataclass(frozen=True)
class Command:
    """The record of a command."""

    name: str  # as it is typed, and in run.json
    folder: str  # its package; a MODULE below that begins with a dot is in it
    options: type[Options] | None = None  # None: a function of Python alone
    module: str = ".command"  # has `command(options, output)`; also `check(options)` if what it checks takes no model
    public: Mapping[str, str] = field(default_factory=dict)  # name in `sinkscope` → MODULE:NAME
    manifest: str = "sinkscope.results.schema:Manifest"  # MODULE:CLASS of the entries of its run.json
    report: str = ""  # MODULE:FUNCTION, which makes the Report of a run; "": its folder is not one run
    tables: Sequence[str] = ()  # MODULE:NAME of mappings, table → columns after the leading ones
    # data of the figures, whose functions are in figures.py → a row for each: its name, its description, its tables
    figures: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict)
    of_arms: Sequence[str] = ()  # tables of which a figure shows all arms of one of its runs together
    of_cells: Sequence[str] = ()  # tables that are put together for many of its folders; (): it cannot be such a cell
    cells_as_text: str = ""  # MODULE:FUNCTION, which returns title → table as text from `of_cells` of all
    whole_model: str = ""  # MODULE:FUNCTION, which returns `setting`, `metric`, `value` of a run, for model cards
    files: str = ""  # MODULE:FUNCTION, which returns further files of the folder of a run (output/run.py)
    summaries: str = ""  # MODULE:FUNCTION, which returns the tables that `compare` prints of one folder, by title
    # command → MODULE:FUNCTION with which `compare` sets several of its folders or results side by side
    compared: Mapping[str, str] = field(default_factory=dict)
    # if it reads a YAML file: what that is called, and the folder of such files in recipes/
    recipes: tuple[str, str] | None = None
    runs_in: str = ""  # the folder of the runs that it makes, and the entry of run.json with their names
    page: str = ""  # MODULE:CLASS, what its folders have on their page (html_page/contents.py)
    script: str = ""  # a file in its folder, which adds its sections to a page
    # kinds of names for `sinkscope list` → what they are, where they are used, MODULE:NAME of a register or a function
    # that returns rows, names of columns
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def entries(self) -> type[BaseModel]:
        """The entries of its run.json."""
        return self.imported(self.manifest)

    def imported(self, place: str = "") -> Any:
        """Return the object MODULE:NAME, or the module of the command."""
        module, _, name = (place or self.module).partition(":")
        there = import_module(module, self.folder)
        return getattr(there, name) if name else there


@cache
def records() -> dict[str, Command]:
    """Return all commands by name, in the order of `sinkscope --help`.

    Raises InputError, which names the package, if the command of another package cannot be loaded.
    """
    folders = import_module(COMMANDS).FOLDERS
    known = {one.name: one for folder in folders for one in import_module(f"{COMMANDS}.{folder}").COMMANDS}
    for point in installed(COMMANDS):
        package = point.dist.name if point.dist else point.value
        try:
            record = point.load()
        except Exception as error:
            raise InputError(f"command '{point.name}' of {package} failed [{described(error)}]: {WITHOUT}") from error
        if record.name in known:
            raise InputError(f"command '{record.name}' of {package} has a name that is taken: {WITHOUT}")
        known[record.name] = record
    return known


def options_by_command() -> dict[str, type[Options]]:
    """Return the options of every command that can be typed."""
    return {name: record.options for name, record in records().items() if record.options is not None}
