"""The folder of `claims`: every run is written as soon as it is measured, and the scorecard at the end.

The same command again goes on where it was broken off, and judges anew where all was measured.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sinkscope.output.outputs import write_run
from sinkscope.output.result import FIGURES, draw
from sinkscope.output.run import Run
from sinkscope.output.scorecard import DrawnScorecard
from sinkscope.results.folders import FileList, alone_in, check_resumable, claim, new_folder, resumable
from sinkscope.results.manifest import MANIFEST, make_manifest, write_manifest
from sinkscope.results.run import RunData
from sinkscope.results.scorecard import COMMAND
from sinkscope.verdict.scorecard import Scorecard


@dataclass
class ScorecardFolder:
    """Where a scorecard is written.

    Attributes:
        folder: this command's own.
        config: the options; the folder is gone on with only by the same ones.
        start: when the command began.
        overwrite: begin anew.
        page: write index.html.
        runs: measured by an earlier session.
        skipped: model → role → why it does not apply, as an earlier session found, and this one.
    """

    folder: Path
    config: Mapping[str, Any]
    start: float
    overwrite: bool
    page: bool = True
    runs: list[Run] = field(default_factory=list)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)

    def begin(self, **facts: str) -> None:
        """Make the folder this command's, and find what is there.

        Args:
            **facts: what decides the numbers besides options.

        Raises:
            InputError: what is there was measured of another model or text.
        """
        self._facts = facts
        self._files = FileList(self.folder, [], lambda: write_manifest(self.folder, self._manifest()))
        options = {"config": dict(self.config), **facts}
        found = None if self.overwrite else resumable(self.folder, COMMAND, options)
        if found is not None:
            self._files.names, self.skipped = found["files"], found["skipped_roles"]
        with new_folder(self.folder) if found is None else nullcontext(self.folder) as folder:
            claim(folder, self._manifest())
        self.runs = [Run.open(path.parent) for path in sorted(self.folder.glob(f"runs/*/{MANIFEST}"))]

    def keep(self, run: RunData, role: str) -> Run:
        """Write a run that plays a role."""
        target = self.folder / "runs" / role.replace(":", "-")
        with self._files.new_folder(target) as fresh:
            write_run(Run(run.manifest, run.tables), fresh, is_drawn=False)
        return Run(run.manifest, run.tables, target)

    def skip(self, model: str, reasons: Mapping[str, str]) -> None:
        """Note the roles of a model that do not apply."""
        self.skipped.setdefault(model, {}).update(reasons)
        write_manifest(self.folder, self._manifest())

    def finish(self, card: Scorecard) -> Scorecard:
        """Write the scorecard, and the runs that were handed over. run.json comes last."""
        for role, run in card.measured.items():
            self.keep(run, role)
        card = replace(card, manifest={**card.manifest, **self._facts}, folder=self.folder)
        drawn = DrawnScorecard.of(card)
        self._files.add(*(f"tables/{name}.parquet" for name in drawn.tables), *drawn.texts)
        drawn.write_files(self.folder)
        write_manifest(self.folder, {**card.manifest, "drawn": False, "files": self._files.names})
        return draw(drawn, page=self.page, files=self._files)

    def _manifest(self) -> dict[str, Any]:
        facts: dict[str, Any] = {**self._facts, "skipped_roles": self.skipped, "files": self._files.names}
        return make_manifest(COMMAND, self.config, self.start, (), **facts)


@contextmanager
def scorecard_folder(
    folder: str | os.PathLike[str] | None,
    config: Mapping[str, Any],
    start: float,
    overwrite: bool,
    reads: Iterable[str | os.PathLike[str] | None],
    page: bool = True,
) -> Iterator[ScorecardFolder | None]:
    """Have a folder to oneself, checked before anything is computed; None: a scorecard is kept in memory alone.

    Raises:
        InputError: it cannot be written, or was made with other options.
    """
    if folder is None:
        yield None
        return
    with alone_in(folder) as path:
        check_resumable(path, COMMAND, {"config": dict(config)}, overwrite, reads=reads, renewed=(FIGURES,))
        yield ScorecardFolder(path, config, start, overwrite, page)
