"""What stands in the folders that are given to be judged: of any command that measures or trains, of `claims` or
`sweep`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sinkscope.commands.evidence import Collection
from sinkscope.errors import InputError
from sinkscope.options.option import checked
from sinkscope.options.recipe import COMPARISON
from sinkscope.output.run import Run
from sinkscope.output.series import COMMAND as STEPS
from sinkscope.output.series import Series
from sinkscope.output.trained import COMMANDS as TRAININGS
from sinkscope.output.trained import Trained
from sinkscope.paper_claims.table import COMMAND
from sinkscope.paper_claims.trainings import OPTIONS, Steps, Training
from sinkscope.results.cells import CELLS
from sinkscope.results.cells import COMMAND as SWEEP
from sinkscope.results.manifest import MANIFEST, RUNS, read_manifest
from sinkscope.results.scores import COLUMNS as SCORES_COLUMNS
from sinkscope.results.scores import COMMAND as SCORES
from sinkscope.results.scores import TABLE as SCORES_TABLE
from sinkscope.results.scores import Scores
from sinkscope.results.tables import LEADING_COLUMNS, read_table

JUDGED = (*RUNS, *TRAININGS, STEPS, COMMAND, SCORES)
GIVEN = (*JUDGED, SWEEP)


def collected(runs: Iterable[Run], folders: Iterable[Path]) -> Collection:
    """What stands in folders of any command that measures, and what is handed over."""
    found: dict[type, list[Any]] = {Run: list(runs), Training: [], Steps: [], Scores: []}
    for folder in folders:
        for kind, one in _runs_in(folder):
            found[kind].append(one)
    return Collection(found[Run], tuple(found[Training]), tuple(found[Steps]), tuple(found[Scores]))


def judged_folders(folders: Iterable[Path]) -> list[Path]:
    """The folders, each once; of a sweep those of its cells that are done and can be judged.

    Raises:
        InputError: a folder is of another command, or a sweep has no such cell.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        manifest = read_manifest(folder, GIVEN)
        if manifest["command"] != SWEEP:
            found[folder] = None
            continue
        comparison = folder / COMPARISON
        compared = read_manifest(comparison, (SWEEP,)) if (comparison / MANIFEST).is_file() else manifest
        # the comparison leaves out cells that have to be measured again
        cells = [folder / CELLS / name for name in manifest["cells"] if name in compared.get("cells", ())]
        done = [cell for cell in cells if (cell / MANIFEST).is_file() and _is_done(read_manifest(cell, None))]
        if not done:
            raise InputError(f"--from {folder}: none of its cells is done that claims could judge")
        found |= dict.fromkeys(done)
    return list(found)


def _is_done(manifest: Mapping[str, Any]) -> bool:
    """Of a cell; commands that go on where they were write their tables last."""
    return manifest["command"] in JUDGED and bool(manifest["tables"])


def _runs_in(folder: Path) -> Iterator[tuple[type, Any]]:
    """A run, or all that are in a folder of `claims`; the arms of a training, its steps, or scores on tasks."""
    command = read_manifest(folder, JUDGED)["command"]
    if command in TRAININGS:
        yield Training, _training(folder)
    elif command == SCORES:
        table = read_table(folder / "tables" / f"{SCORES_TABLE}.parquet", (*LEADING_COLUMNS, *SCORES_COLUMNS))
        yield Scores, Scores(read_manifest(folder, JUDGED), table, folder)
    elif command == STEPS:
        series = Series.open(folder)
        yield Steps, Steps(series.manifest, series.runs, series.folder)
    elif command != COMMAND:
        yield Run, Run.open(folder)
    elif (folder / "runs").is_dir():
        yield from ((Run, Run.open(each)) for each in sorted((folder / "runs").iterdir()))
    else:
        raise InputError(f"--from {folder} judged runs that stand elsewhere: name those")


def _training(folder: Path) -> Training:
    """What `retrofit` or `train` left, with all its options: an older folder may lack some."""
    trained = Trained.open(folder)
    try:
        options = checked(OPTIONS[trained.manifest["command"]], trained.manifest["config"])
    except InputError as error:
        raise InputError(f"{folder} is of another sinkscope, or damaged: {error}") from None
    config = options.model_dump(mode="json", exclude={"method"})
    return Training(trained.manifest | {"config": config}, trained.runs, trained.tables, trained.folder)


def skipped_in(folders: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Model → role → why it does not apply, as folders of `claims` have it."""
    return merged(*(read_manifest(folder, JUDGED).get("skipped_roles", {}) for folder in folders))


def merged(*found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Model → role → why it does not apply, of several such."""
    models = dict.fromkeys(model for one in found for model in one)
    return {model: {role: why for one in found for role, why in one.get(model, {}).items()} for model in models}
