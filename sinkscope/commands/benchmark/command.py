"""The command `benchmark`: scores a model on tasks of lm-evaluation-harness (WSE figure 10), through its Python API."""

import importlib.metadata
import importlib.util
import os
import random
import time
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.benchmark.options import BenchmarkOptions
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory
from sinkscope.measuring.console import print_notices, spinner
from sinkscope.measuring.processes import together
from sinkscope.measuring.subject import ModelLike, is_in_memory, load_model, options_of
from sinkscope.models.files import quiet as silent
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.loading import LoadedModel
from sinkscope.options.files import kind_of, user_path
from sinkscope.options.keywords import BenchmarkKeywords
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.result import Result, figure_failure, written
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import make_manifest
from sinkscope.results.scores import BENCHMARK, SCORE_COLUMNS, SCORE_TABLE, main_scores
from sinkscope.results.tables import LEADING, names_of

PACKAGE = "lm_eval"
KEPT_RESULTS = ("results", "groups", "group_subtasks", "n-shot", "versions", "n-samples")  # without the answers
DIFFERING = -1  # shots of a group whose tasks differ in them


class Scores(Result):
    """The result of `benchmark`."""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each task (its `condition`), metric and filter."""
        return self.tables[SCORE_TABLE]

    @property
    def main(self) -> pd.DataFrame:
        """One row for each task that was named."""
        return main_scores(self.table)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": self.main[["condition", "metric", "score", "error", "questions"]]}


def command(options: BenchmarkOptions, output: OutputOptions) -> Printout:
    scores = benchmark(options.model, config=options, **output.where)
    table = scores.summary_tables[""]
    table = table.rename(columns={"condition": "task"}).set_index("task")
    as_text = table.assign(**{name: table[name].map("{:.3f}".format) for name in ("score", "error")})
    failure = figure_failure(scores.manifest)
    return Printout(scores, tables={SCORE_TABLE: as_text.reset_index()}, folder=output.out, failure=failure)


def check(options: BenchmarkOptions) -> None:
    """Raise InputError if something is missing, before a model is loaded."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError("benchmarks need lm-evaluation-harness: pip install 'sinkscope[lm-eval]'")
    if options.task_path is not None and kind_of(user_path(options.task_path)) != "folder":
        raise InputError(f"--task-path {options.task_path}: there is no such folder")


@with_options(BenchmarkOptions)
def benchmark(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: BenchmarkOptions | None = None,
    page: bool = True,
    **options: Unpack[BenchmarkKeywords],
) -> Scores:
    """Score a model on tasks of lm-evaluation-harness.

    Args:
        model, tokenizer, out, overwrite, quiet, config, page: as for `analyze`.
        **options: those of the command line, which are listed below.

    Raises:
        InputError: an option is wrong, the harness is not installed, or it lacks a task; nothing was written.
        SinkscopeError: the harness fails.
    """
    start = time.time()
    config = config or options_of(BenchmarkOptions, model, options)
    check(config)
    with (
        together(config.device_map, is_in_memory(model)) as members,
        own_folder(members.only_first(out), overwrite, (BENCHMARK,), (config.model, config.adapter)) as folder,
    ):
        console = members.console(quiet)
        with spinner(console, "looking for the tasks"), silent():
            tasks = _known_tasks(config)
        with spinner(console, "loading the model"):
            loaded = load_model(model, tokenizer, config)  # type: ignore[arg-type]  # all that loading reads
        print_notices(console, loaded.notices)
        with spinner(console, "asking"), undisturbed(loaded.model):
            results = members.of_the_first(lambda: _evaluated(loaded, config, tasks))
        facts = {
            "model": loaded.origin | {"parameters": sum(each.numel() for each in loaded.model.parameters())},
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "harness": importlib.metadata.version(PACKAGE),
        }
        manifest = make_manifest(BENCHMARK, config.model_dump(mode="json"), start, [SCORE_TABLE], **facts)
        scores = Scores(manifest, {SCORE_TABLE: scores_table(results, loaded.name, config.tasks)}, folder)
        return written(scores, page, figures=())


def _known_tasks(config: BenchmarkOptions) -> Any:
    """Return the user's tasks, with the harness's tasks if needed; InputError for an unknown task."""
    from lm_eval.tasks import TaskManager

    path = None if config.task_path is None else str(user_path(config.task_path))
    for defaults in (False, True) if path else (True,):
        manager = TaskManager(include_path=path, include_defaults=defaults)
        unknown = [name for name in config.tasks if name not in manager.all_tasks]
        if not unknown:
            return manager
    raise InputError(f"lm-evaluation-harness has no task '{unknown[0]}': `lm-eval ls tasks` shows the names")


def _evaluated(loaded: LoadedModel, config: BenchmarkOptions, tasks: Any) -> dict[str, Any]:
    """Return the results of the harness: scores, without the answers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} has no tokenizer, and tasks are texts")
    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    seeds = dict.fromkeys(kinds, config.seed % 2**32)  # numpy's seeds are below 2**32
    plain, of_numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002  # the harness seeds them
    try:
        with silent(), torch.random.fork_rng():
            network = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=config.batch_size)
            results = lm_eval.simple_evaluate(
                model=network,
                tasks=list(config.tasks),
                task_manager=tasks,
                num_fewshot=config.shots,
                limit=config.limit,
                log_samples=False,
                **seeds,
            )
    except SinkscopeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise SinkscopeError(f"lm-evaluation-harness fails [{described(error)}]") from error
    finally:
        random.setstate(plain)
        np.random.set_state(of_numpy)  # noqa: NPY002
    return {name: dict(results.get(name) or {}) for name in KEPT_RESULTS}


def scores_table(results: Mapping[str, Any], model: str, asked: tuple[str, ...]) -> pd.DataFrame:
    """Return the table `benchmark`; for each task, the harness's `results` have "METRIC,FILTER" → score."""
    rows, scored = [], {**results["results"], **results["groups"]}
    of_groups = list(asked)
    for group in of_groups:  # which grows: a group may have groups
        of_groups += [task for task in results["group_subtasks"].get(group, ()) if task not in of_groups]
    has_tags = not scored.keys() >= set(asked)  # the harness reports the tasks of a tag, and not the tag
    for task, scores in scored.items():
        is_asked = task in asked or (has_tags and task not in of_groups)
        questions = int(results["n-samples"].get(task, {}).get("effective", 0))
        shots = results["n-shot"].get(task)
        version = str(results["versions"].get(task, ""))
        for name, score in scores.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(score, str):
                continue
            error = scores.get(f"{metric}_stderr,{kind}")
            standard_error = np.nan if isinstance(error, str) or error is None else float(error)
            count = DIFFERING if shots is None else int(shots)
            rows.append((task, metric, kind, float(score), standard_error, questions, count, version, is_asked))
    table = pd.DataFrame(rows, columns=["condition", *names_of(SCORE_COLUMNS)])
    return table.assign(model=model, layer=-1)[[*LEADING, *names_of(SCORE_COLUMNS)]]
