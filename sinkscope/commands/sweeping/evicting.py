"""`sweep --evict`: a model leaves the hub's cache when no cell of the sweep needs it any more."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from rich.console import Console

from sinkscope.commands.sweeping.plan import state_of
from sinkscope.commands.sweeping.reads import Reads
from sinkscope.commands.sweeping.worker import State
from sinkscope.measuring.console import print_line
from sinkscope.models.files import evict, gigabytes, is_on_hub
from sinkscope.options.sweep_file import Cell
from sinkscope.results.cells import CellFolders

Source = tuple[str, str | None]  # repository and revision


class Leaving:
    """The models that may leave, and the cells that keep them here.

    Args:
        cells: all of the sweep, also those of other shards, which may read the same files.
        folders: where it is written.
        todo: names of the cells that are measured now.
        reads: what the cells read.
    """

    def __init__(self, cells: Iterable[Cell], folders: CellFolders, todo: Collection[str], reads: Reads) -> None:
        self._folders, self._todo, self._reads = folders, set(todo), reads
        self._waiting: dict[Source, list[Cell]] = defaultdict(list)  # cells that were not settled when last seen
        self._sources: dict[str, Source] = {}
        for cell in cells:
            model, revision = cell.source
            if model is not None and is_on_hub(model):
                self._sources[cell.name] = (model, revision)
                self._waiting[model, revision].append(cell)

    def look(self, name: str, console: Console) -> None:
        """A cell has ended: remove its model, if none of its cells is still to be measured."""
        self._todo.discard(name)
        source = self._sources.get(name)
        if source is None:
            return
        self._waiting[source] = left = [cell for cell in self._waiting[source] if self._is_waiting(cell)]
        if left:
            return
        freed = evict(*source)
        if freed:
            print_line(console, f"{source[0]}: {gigabytes(freed)} removed from the hub's cache")

    def _is_waiting(self, cell: Cell) -> bool:
        return cell.name in self._todo or state_of(cell, self._folders, self._reads)[0] == State.WAITING
