"""The folder of a sweep: a run folder for each cell that is done, a small file for each that failed.

OUT/run.json             the sweep, and the names of its cells
OUT/cells/NAME/          the run folder of the cell
OUT/failed/NAME.json     the error with which the cell ended
OUT/comparison/          the comparison of all cells that are done

A cell is done if its run folder exists, because the folder appears when it is complete. Several processes may work on
different cells at once; files that all of them write are written under the lock of OUT.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.options.files import read_json
from sinkscope.options.recipe import CELLS, COMPARISON
from sinkscope.options.recipe import SWEEP as COMMAND
from sinkscope.results.folders import alone_in, check_no_link, check_output, new_folder
from sinkscope.results.manifest import MANIFEST, read_manifest, write_manifest
from sinkscope.results.swap import PREFIX, locked, new_file, parts_of, remove, repair

FAILED = "failed"
PATIENCE = 60.0  # seconds that one process waits for another to finish a short piece of writing
MOMENT = 2.0  # seconds that the workers of a killed sweep take to end


class Failure(BaseModel):
    """The error of a cell that has no run folder."""

    error: str
    attempts: int = 1


@dataclass(frozen=True)
class CellFolders:
    """The paths in the folder of a sweep, and the methods that write them."""

    folder: Path

    def run(self, name: str) -> Path:
        return self.folder / CELLS / name

    def failure_file(self, name: str) -> Path:
        return self.folder / FAILED / f"{name}.json"

    @property
    def comparison(self) -> Path:
        return self.folder / COMPARISON

    @contextmanager
    def begun(self, manifest: Mapping[str, Any], overwrite: bool, part: tuple[int, int] = (1, 1)) -> Iterator[None]:
        """Start or resume the sweep in its folder, and lock the i-th of n parts (i, n) of its cells.

        Raises InputError if the folder contains another result, cannot be written, or another process works on the same
        part.
        """
        real = self.folder.resolve()
        own_part = real.with_name(f"{real.name}-part-{part[0]}-{part[1]}")
        listed = {**manifest, "files": [f"{name}/" for name in (CELLS, COMPARISON, FAILED)]}
        with ExitStack() as stack:
            with self.shared():
                is_new = overwrite or not (self.folder / MANIFEST).exists()
                if is_new:
                    check_output(self.folder, overwrite, (COMMAND,))
                else:
                    read_manifest(self.folder, (COMMAND,))
                    check_no_link(self.folder)
                stack.enter_context(alone_in(own_part, patience=MOMENT))
                try:
                    with new_folder(self.folder) if is_new else nullcontext(self.folder) as folder:
                        write_manifest(folder, listed)
                    for name in (CELLS, FAILED):
                        (self.folder / name).mkdir(exist_ok=True)
                except OSError as error:
                    raise SinkscopeError(f"writing {self.folder} failed: {one_line(error)}") from error
            yield

    def shared(self) -> AbstractContextManager[Path]:
        """Lock the complete folder for a moment. Raises InputError if another process keeps the lock."""
        return alone_in(self.folder, patience=PATIENCE)

    def repair(self, names: Collection[str]) -> None:
        """Finish or undo the half-written files of these cells after the last worker of a killed sweep has ended."""
        for path in list((self.folder / CELLS).glob(f"{PREFIX}*")):
            name, _ = parts_of(path)
            if name in names:
                with locked(self.run(name), PATIENCE):
                    repair(self.run(name))
        for path in list((self.folder / FAILED).glob(f"{PREFIX}*")):
            if parts_of(path)[0].removesuffix(".json") in names:
                remove(path)

    def manifest(self, name: str, command: str, config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """Return the manifest of a cell, and the reason why the cell is measured again in spite of it, or "".

        The manifest is None if there is none or it cannot be read. It lists no tables until a resumable command has
        finished.
        """
        try:
            found = read_manifest(self.run(name), (command,))
        except InputError:
            return None, "its folder cannot be read" if (self.run(name) / MANIFEST).exists() else ""
        recorded = found["config"]
        # a manifest of an older version may lack options
        same = all(recorded[option] == value for option, value in config.items() if option in recorded)
        return found, "" if same else "it was measured with other options"

    def failure(self, name: str) -> Failure | None:
        """Return the failure of a cell; None if it did not fail or the file is damaged."""
        try:
            return Failure.model_validate(read_json(self.failure_file(name)))
        except (InputError, ValidationError):
            return None

    def fail(self, name: str, error: str) -> None:
        before = self.failure(name)
        failure = Failure(error=error, attempts=1 + (before.attempts if before else 0))
        path = self.failure_file(name)
        path.parent.mkdir(exist_ok=True)
        with new_file(path) as fresh:
            fresh.write_text(json.dumps(failure.model_dump(), indent=2) + "\n", encoding="utf-8")

    def forget(self, name: str) -> None:
        """Delete the record of a failure, because the cell is done or is tried again."""
        remove(self.failure_file(name))
