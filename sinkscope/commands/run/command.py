"""The command `run`: runs a recipe (options/recipe.py) on any model.

OUT/ is the folder of the recipe's command, with the recipe in its run.json. A recipe with several `runs` writes a
folder for each, their comparison, and its own run.json.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from sinkscope.commands.printout import Printout
from sinkscope.commands.run.options import RunOptions
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.figures import figure_spec, observable_of
from sinkscope.measuring.console import Messages, print_line, print_part
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.models.in_memory import text_of
from sinkscope.options.files import named_file, user_path
from sinkscope.options.keywords import RunKeywords
from sinkscope.options.option import as_folder_name
from sinkscope.options.output import OutputOptions
from sinkscope.options.recipe import COMPARISON, Recipe, find_recipe, read_recipe
from sinkscope.options.register import options_by_command, records
from sinkscope.options.signatures import with_options
from sinkscope.output.comparison import Comparison, compared
from sinkscope.output.result import both, draw, figure_failure, write_data
from sinkscope.output.run import Run
from sinkscope.results.folders import new_folder, own_folder
from sinkscope.results.manifest import RUNS, make_manifest, write_manifest


@dataclass(frozen=True)
class RecipeRun:
    """The result of a recipe."""

    recipe: Recipe  # as read from its file
    runs: Mapping[str, Run]  # by name, if its command measures runs; the name of a single run is ""
    comparison: Comparison | None  # if there are several runs
    folder: Path
    result: Printout | None = None  # the command's result, if it measures no runs, or the steps of a training
    failure: str = ""  # the parts of the runs that failed, although the runs were written


def command(options: RunOptions, output: OutputOptions) -> Printout:
    typed = {name: getattr(options, name) for name in options.model_fields_set - {"recipe"}}
    kind = options_by_command()[read_recipe(find_recipe(options.recipe)).content.command]
    try:
        done = run_recipe(options.recipe, **output.where, **typed)
    except KeyboardInterrupt as interrupt:
        if kind.resumable:
            raise
        raise SinkscopeError(f"interrupted: {str(interrupt) or 'nothing was written'}") from None
    if done.result is not None:
        return done.result
    if done.comparison is not None:
        shared = {"numbers": done.comparison.table, "notes": done.comparison.notes}
        return Printout(done.comparison, **shared, folder=done.folder, failure=done.failure)
    run = done.runs[""]
    return Printout(run, markdown=run.verdict, folder=done.folder, failure=done.failure)


@with_options(RunOptions)
def run_recipe(
    recipe: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    page: bool = True,
    **options: Unpack[RunKeywords],
) -> RecipeRun:
    """Run a recipe and write its results.

    Args:
        recipe: a YAML file, or the name of a recipe.
        model: the model, in place of the recipe's model.
        out: the folder; runs/RECIPE-MODEL if None and the recipe names no folder.
        overwrite: replace an earlier run.
        quiet: print no progress.
        page: also write index.html.
        **options: options of the recipe's command, which replace the recipe's options.

    Raises:
        InputError: the recipe does not exist or is faulty, or an option is wrong.
        SinkscopeError: a run failed.
    """
    start = time.time()
    read = read_recipe(find_recipe(recipe))
    runs = read.options(options if model is None else options | {"model": text_of(model)})
    module = records()[read.content.command].imported()
    check = getattr(module, "check", None)  # only long commands have this check
    first = next(iter(runs.values()))
    has_steps = not read.content.runs and getattr(first, "has_steps", False)
    with named_file(read.path):
        for asked in runs.values():
            if check is not None and not has_steps:
                check(asked)
            check_figures(read.content.figures, read.content.command, getattr(asked, "observables", None))
    source = getattr(first, "folder_name", "") or getattr(first, "config", "")
    try:  # recipes may come from anywhere
        is_below = read.content.out is None or Path.cwd() in user_path(read.content.out).resolve().parents
    except (OSError, RuntimeError, ValueError):  # a loop of links, or an invalid path
        is_below = False
    if not (out or is_below):
        where = f"{read.path}: `out: {read.content.out}` does not lie below the working directory"
        raise InputError(f"{where}: to write there, give it as --out")
    folder = user_path(out or read.content.out or Path("runs", as_folder_name(read.name, source)))
    console = Messages(quiet)
    title = f"{read.name}: {read.content.title}"
    if has_steps or not options_by_command()[read.content.command].in_memory:  # the command writes its own folder
        print_line(console, title)
        output = OutputOptions(out=folder, overwrite=overwrite, quiet=quiet, no_page=not page, record=read.record)
        return RecipeRun(read, {}, None, folder, module.command(first, output))
    is_several = bool(read.content.runs)
    sources = [getattr(asked, name, None) for asked in runs.values() for name in ("model", "input")]
    with own_folder(folder, overwrite, ("run",) if is_several else RUNS, sources):
        print_line(console, title)
        measured, failures = {}, []
        for place, (name, asked) in enumerate(runs.items(), 1):
            if name:
                print_part(console, f"run {name}", place, len(runs))
            result = module.command(asked, OutputOptions(quiet=console.quiet))
            record = {"recipe": read.record}
            made: Run = result.value
            measured[name] = replace(made, manifest=made.manifest | record, folder=folder / name)
            if result.failure:
                failures.append(f"run {name}: {result.failure}" if name else result.failure)
        comparison = None
        with new_folder(folder) as fresh:
            for name, run in measured.items():  # the name of a single run is ""
                (fresh / name).mkdir(exist_ok=True)
                write_data(run, fresh / name)
            if is_several:  # run.json comes last
                comparison = replace(compared(list(measured.values()), time.time()), folder=folder / COMPARISON)
                (fresh / COMPARISON).mkdir()
                write_data(comparison, fresh / COMPARISON)
                facts = {"recipe": read.record, "runs": list(measured)}
                write_manifest(fresh, make_manifest("run", read.content.options, start, **facts))
        measured = {name: draw(run, read.content.figures, page) for name, run in measured.items()}
        undrawn = [run.manifest for run in measured.values()]
        if comparison is not None:
            comparison = draw(comparison, page=page)
            undrawn.append(comparison.manifest)
    return RecipeRun(read, measured, comparison, folder, failure=both(*failures, figure_failure(*undrawn)))


def check_figures(figures: Iterable[str], command: str, observables: tuple[str, ...] | None) -> None:
    """Raise InputError unless the figures exist, and the command and its observables give the tables for them."""
    for name in figures:
        spec = figure_spec(name)
        if spec.command != command:
            raise InputError(f"figure '{name}' is of `sinkscope {spec.command}`, not of `{command}`")
        needed = [observable_of(table) or table for table in spec.tables]
        missing = [item for item in needed if item in OBSERVABLES and item not in (observables or OBSERVABLES)]
        if missing:
            raise InputError(f"figure '{name}' needs the observable '{missing[0]}', which `observables` leaves out")
