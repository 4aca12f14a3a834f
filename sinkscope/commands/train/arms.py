"""Arms of `retrofit` and `train`: each is trained, measured on held-out text, and compared with the others.

OUT/run.json                      all options, and the arms
OUT/held-out.npy                  the held-out blocks
OUT/vga/model/                    the trained model, which AutoModelForCausalLM loads after `import sinkscope.retrofits`
                                  (with `--save-models none` until it is measured)
OUT/vga/run/                      its run folder
OUT/vga/tables/training.parquet   loss and gates by step
OUT/vga/tables/gates.parquet      how far each head's gate has moved
OUT/vga/training/                 checkpoints to resume from, until the arm is finished
OUT/vga/checkpoints/              the model at regular steps, from step 0 on (`train`)
OUT/untouched/run/                a run folder of the unchanged model (`retrofit`)
OUT/tables/                       tables of all arms: training, gates, retrofit, and the task's own
OUT/retrofit.md                   the table `retrofit` as Markdown
OUT/figures/                      figures of all arms
OUT/comparison/                   the runs side by side

An arm is a method and a seed. Its name is also its folder: the method's label, and with several seeds the seed. The
same command resumes an interrupted one, and adds arms to the existing ones.
"""

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.commands.quantize.study import w8a8
from sinkscope.commands.train.blocks import limited, read_blocks, with_first_tokens
from sinkscope.commands.train.history import measure_at_log
from sinkscope.commands.train.options import ArmOptions
from sinkscope.commands.train.output import Trained
from sinkscope.commands.train.sharding import is_sharded, launched
from sinkscope.commands.train.tasks import TrainingTask
from sinkscope.commands.train.trainer import check_trainable, failures, hide_bars, keep_models, train_model
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import Messages, print_line, print_notices, print_part, spinner
from sinkscope.measuring.measure import measure, publish, run_manifest
from sinkscope.measuring.processes import Team
from sinkscope.measuring.subject import Subject, inputs_for, open_subject, with_masked, without_head_or_mask
from sinkscope.measuring.tables import all_tables
from sinkscope.models.family import Family
from sinkscope.models.in_memory import drawing, fingerprint
from sinkscope.models.loading import LoadedModel
from sinkscope.models.projections import known_positions
from sinkscope.options.files import user_path
from sinkscope.options.measuring import RunConfig, make_config
from sinkscope.options.option import as_folder_name, split_names
from sinkscope.options.spec import assignments
from sinkscope.output.comparison import compared
from sinkscope.output.result import draw, write_data
from sinkscope.output.run import Run
from sinkscope.results.folders import FileList, alone_in, check_resumable, claim, new_folder, resumable
from sinkscope.results.manifest import MANIFEST, files_in, is_undrawn, make_manifest, write_manifest
from sinkscope.results.swap import new_file
from sinkscope.results.tables import LEADING_COLUMNS, read_table, write_tables
from sinkscope.results.trainings import UNTOUCHED, retrofit_table, runs_by_seed
from sinkscope.retrofits import gate_displacement, make_retrofit, retrofit_model
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.inputs import beginning

Methods = str | Iterable[str] | Mapping[str, str]
NOT_LABELS = ("untouched", "comparison", "figures", "tables")  # folders next to the folders of the arms
MAY_GROW = ("seeds",)  # of the options, when the command resumes; the arms of one seed have other names
RENEWED = ("figures", "comparison")  # folders of all arms together, written again whenever the command resumes
OF_EVERY_ARM = ("training", "gates")  # tables of every arm and seed; those of a task are of the first seed
CALIBRATION = 16  # training blocks that the ranges of W8A8 come from, the same for all arms


def parse_methods(methods: Methods) -> dict[str, tuple[str, dict[str, str]]]:
    """Parse methods as typed: NAME[:key=value,…], several separated by commas, several texts, or label → method.

    Returns label → (name, parameters as text). The label is the `condition` in the tables, by default the name with its
    parameters. Raises InputError if a method, a parameter or a label is wrong, or a method is given twice.
    """
    labeled: list[tuple[str, str, dict[str, str]]] = []
    if isinstance(methods, Mapping):
        for label, text in methods.items():
            if len(parsed := _parse_texts([text])) != 1:
                raise InputError(f"method '{label}': it must be one method, such as vga:placement=output")
            if not label or as_folder_name(label) != label or label in NOT_LABELS:
                raise InputError(f"'{label}' cannot be the label of a method, which is also a folder: choose another")
            labeled.append((label, *parsed[0]))
    else:
        for name, parameters in _parse_texts([methods] if isinstance(methods, str) else methods):
            label = as_folder_name(name, *(f"{key}={value}" for key, value in parameters.items()))
            labeled.append((label, name, parameters))
    if not labeled:
        raise InputError("name a method: --method NAME[:key=value,…]; `sinkscope list retrofits` shows the names")
    by_label: dict[str, tuple[str, dict[str, str]]] = {}
    for label, name, parameters in labeled:
        make_retrofit(name, parameters)
        if label in by_label:
            raise InputError(f"--method {label} is given twice")
        by_label[label] = name, parameters
    return by_label


def _parse_texts(texts: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    parsed: list[tuple[str, dict[str, str]]] = []
    for text in texts:
        for part in split_names(text):
            name, colon, assigned = part.partition(":")
            if colon or "=" not in part:
                parsed.append((name.strip(), {}))
            else:  # one more parameter of the last method
                assigned = part
            for key, value in assignments(assigned):
                if value is None or not parsed:
                    raise InputError(f"--method {text}: '{assigned}' is no key=value of a method")
                parsed[-1][1][key] = value
    return parsed


class TrainingArms:
    """One call of `retrofit` or `train`, which finishes what its folder lacks.

    The command enters `locked_folder`, loads its model, and then calls `finish`. The folder is resumed only with
    identical options and `facts` (further entries of run.json that affect results); methods and, from two on, seeds
    may be added later.
    """

    def __init__(
        self,
        command: str,
        asked: ArmOptions,
        out: str | os.PathLike[str],
        overwrite: bool,
        quiet: bool,
        record: Mapping[str, Any] | None,
        page: bool,
        figures: bool | Iterable[str],
        **facts: Any,
    ) -> None:
        self.start = time.time()
        self.state = launched(cpu=asked.device_map == "cpu")
        self.command, self.asked, self.folder, self.overwrite = command, asked, user_path(out), overwrite
        self.record, self.page = record, page
        self.figures = None if figures is True else figures or ()  # None: all
        self.figures_of_arms = None if figures is True else ()
        self.measuring, self.is_main = asked.measuring, self.state.is_main_process
        self.console = Messages(quiet or not self.is_main)
        config = asked.model_dump(mode="json", exclude={"method"})  # each method is recorded with its arm
        self.options = {"config": config, "processes": self.state.num_processes, **facts}
        self.held_out = self.folder / "held-out.npy"
        self.arms: dict[str, dict[str, Any]] = {}  # name → its record in the manifest, a `TrainingArm`
        self.files = FileList(self.folder, [self.held_out.name], lambda: write_manifest(self.folder, self._manifest()))

    @contextmanager
    def locked_folder(self, *reads: str | None) -> Iterator[None]:
        """Lock the folder for this command, which may be several processes; `reads` as for `check_output`."""
        with ExitStack() as stack:

            def take() -> None:
                stack.enter_context(alone_in(self.folder))
                check_resumable(self.folder, self.command, self.options, self.overwrite, reads, RENEWED, MAY_GROW)

            Team(self.state.process_index, self.state.num_processes).of_the_first(take)
            yield

    def finish(
        self,
        loaded: LoadedModel,
        family: Family,
        begin: Callable[[int], PreTrainedModel],
        task: TrainingTask | None = None,
    ) -> Trained:
        """Read the text, train and measure everything that is not done yet; arms of earlier calls stay.

        `loaded` is the unchanged model on the CPU, which `retrofit` measures, too. `begin` returns the model of a seed
        before the method is built in. `task` makes the blocks; None for a text.
        """
        self.loaded, self.family, self.begin, self.task = loaded, family, begin, task
        options, methods = self.asked, parse_methods(self.asked.method)
        self._check_methods(methods)
        wanted = options.blocks_wanted(self.state.num_processes)
        with spinner(self.console, "reading the text"):
            if task is not None:
                blocks = task.blocks(options.block_length, wanted, options.num_seqs, options.seed)
            else:
                blocks = with_first_tokens(read_blocks(loaded, options, wanted, family), loaded, options)
            self.blocks = limited(blocks, options)
        first_block = f"the first begins `{beginning(self.blocks.train[0], loaded.tokenizer)}`"
        self.text_read = f"{self.blocks.name}, {counted(len(self.blocks.train), 'block')}, {first_block}"
        seeds = range(options.seed, options.seed + options.seeds)
        arms = {  # seed by seed, so that an interrupted training can be compared
            label if len(seeds) == 1 else f"{label}-seed{seed}": {
                "method": method, "parameters": parameters, "label": label, "seed": seed
            }
            for seed in seeds
            for label, (method, parameters) in methods.items()
        }  # fmt: skip
        self._claim(arms)
        print_line(self.console, f"read: {self.text_read}")
        print_notices(self.console, self.blocks.notices(wanted))
        if self.command == "retrofit" and self.is_main and not self._is_measured(UNTOUCHED):
            on_gpu = torch.cuda.is_available() and self.measuring.device_map != "cpu"
            loaded.model.to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
            config = self._config(self.measuring.model)
            self._measure(Subject(loaded, family, inputs_for(loaded, config, family)), config, UNTOUCHED)
            loaded.model.to("cpu")  # type: ignore[arg-type]
        for place, arm in enumerate(arms, 1):
            print_part(self.console, arm, place, len(arms))
            if not (self._is_measured(arm) or (self.folder / arm / "model" / "config.json").exists()):
                self._train(arm)
            self.state.wait_for_everyone()
            if self.is_main:
                self._measure_arm(arm)
            self.state.wait_for_everyone()
        return self._compare_arms()

    def _check_methods(self, methods: Mapping[str, tuple[str, dict[str, str]]]) -> None:
        """Raise InputError for a method that cannot be trained on this model, before another trains for hours."""
        model = self.loaded.model
        if (reason := without_head_or_mask(self.loaded, self.family)) is not None:
            raise InputError(f"{self.loaded.name} cannot be trained: {reason}")
        limit, length = known_positions(model, self.family), self.asked.block_length
        for label, (method, parameters) in methods.items():
            trial = self._build(copy.deepcopy(model), method, parameters, self.asked.seed)
            try:
                check_trainable(trial, self.asked.only_new)
            except InputError as error:
                raise InputError(f"--method {label}: {error}") from None
            registers = registers_before(trial)
            if limit is not None and length + registers > limit:
                raise InputError(
                    f"--method {label}: blocks of {length} tokens and {registers} registers are beyond the "
                    f"model's {limit} positions: take a --block-length of at most {limit - registers}"
                )

    def _build(self, model: PreTrainedModel, method: str, parameters: Mapping[str, Any], seed: int) -> PreTrainedModel:
        """Build a method into a model in place; the seed determines its random initial values."""
        with drawing(seed):
            return retrofit_model(model, self.family, method, **parameters)

    # ------------------------------------------------------------------------------------------- the folder

    def _claim(self, arms: Mapping[str, dict[str, Any]]) -> None:
        """Claim the folder, and record its arms."""
        self.read = {"text_sha256": self.blocks.sha256, "weights_sha256": fingerprint(self.loaded.model)}
        options = self.options | self.read
        earlier = None if self.overwrite else resumable(self.folder, self.command, options, MAY_GROW)
        if earlier is not None:
            self.arms, self.files.names = earlier["arms"], earlier["files"]
        for name, record in arms.items():
            before = self.arms.get(name, record)
            if any(before[key] != record[key] for key in ("method", "parameters")):
                raise InputError(f"--out {self.folder}: its {name} is another method; name another folder")
            self.arms[name] = before | record
        self.state.wait_for_everyone()  # all processes have read the folder
        if self.is_main:
            target = new_folder(self.folder) if earlier is None else nullcontext(self.folder)
            with failures(self.folder), target as folder:
                claim(folder, self._manifest())
                with new_file(folder / self.held_out.name) as fresh, fresh.open("wb") as file:
                    np.save(file, self.blocks.held_out)
        self.state.wait_for_everyone()

    def _manifest(self, tables: Iterable[str] = ()) -> dict[str, Any]:
        facts = self.options | self.read | {"text_blocks": len(self.blocks.train), "text_read": self.text_read}
        facts |= {"arms": self.arms, "files": self.files.names, "sequences": self.sequences}
        if self.record is not None:
            facts |= {"recipe": self.record}
        return make_manifest(self.command, start=self.start, tables=tables, **facts)

    @property
    def sequences(self) -> int:
        """The number of held-out blocks on which every arm is measured."""
        return min(self.measuring.num_seqs, len(self.blocks.held_out))

    def _is_measured(self, arm: str) -> bool:
        return (self.folder / arm / "run" / MANIFEST).exists()

    def _save(self, model: PreTrainedModel, folder: Path) -> None:
        with self.files.new_folder(folder) as fresh:
            model.save_pretrained(fresh)
            self._save_tokenizer(fresh)

    def _save_tokenizer(self, folder: Path) -> None:
        if self.loaded.tokenizer is not None:
            self.loaded.tokenizer.save_pretrained(folder)

    # ------------------------------------------------------------------------------------------- arm by arm

    def _train(self, arm: str) -> None:
        folder, is_fresh = self.folder / arm, self.command == "train"
        record, asked = self.arms[arm], self.asked
        seed = record["seed"]
        model = self._build(self.begin(seed), record["method"], record["parameters"], seed)
        if self.is_main:
            self.files.add(f"{arm}/training/")
        keeps_all = is_fresh and asked.save_models == "all"  # `analyze` can then measure the steps
        if keeps_all and self.is_main:
            with failures(folder), hide_bars():
                self._save(model, folder / "checkpoints" / "checkpoint-0")
        is_complete, start = not (folder / "training").exists(), time.perf_counter()
        probe = partial(
            measure_at_log,
            family=self.family,
            held_out=self.blocks.held_out,
            epsilon=self.measuring.epsilon,
            task=self.task,
            position=asked.fixed_position or 0,
            observables=asked.probe,
            masked_by=self.blocks.masked_by,
        )
        can_probe = self.task is not None or not is_sharded()  # with a task, FSDP is refused
        history = train_model(
            model,
            self.blocks,
            asked.model_copy(update={"seed": seed}),
            folder / "training",
            keep_all=keeps_all,
            cpu=self.measuring.device_map == "cpu",
            console=self.console,
            probe=probe if can_probe and (is_fresh or asked.probe) else None,
        )
        seconds = time.perf_counter() - start
        if not self.is_main:
            return
        gates = gate_displacement(model)
        raw = {"training": history.assign(seed=seed), "gates": gates.assign(seed=seed)}
        if self.task is not None:
            raw |= self.task.tables(model, self.family, self.blocks.held_out)
        record["moved"] = float(gates["displacement"].max()) if len(gates) else 0.0
        record["step_seconds"] = seconds / asked.steps if is_complete else None  # unknown if it was resumed
        with failures(folder / "training"), hide_bars():
            tables = publish(raw, self.loaded, record["label"])
            self.files.add(*(f"{arm}/tables/{name}.parquet" for name in tables))
            write_tables(tables, folder)
            write_manifest(self.folder, self._manifest())
            self._save(model, folder / "model")  # saved last, since it marks the arm as trained

    def _measure_arm(self, arm: str) -> None:
        """Measure a trained arm if that is not done yet, and remove its files for resuming."""
        folder = self.folder / arm
        if not self._is_measured(arm):
            initial = {"revision": None, "gguf_file": None, "adapter": None}  # options of the initial model
            config = self._config(str(folder / "model"), trust_remote_code=False, allow_pickle=False, **initial)
            with open_subject(None, None, config, self.console) as subject:
                named = replace(subject, loaded=replace(subject.loaded, name=self.loaded.name))
                self._measure(named, config, arm)
        self._draw(arm)
        if self.asked.save_models == "none":
            shutil.rmtree(folder / "model", ignore_errors=True)
        elif self.command == "train":
            for checkpoint in (folder / "training").glob("checkpoint-*"):
                self._save_tokenizer(checkpoint)
                target = f"{arm}/checkpoints/{checkpoint.name}"
                self.files.add(*(f"{target}/{name}" for name in files_in(checkpoint)))
            keep_models(folder / "training", folder / "checkpoints")
        shutil.rmtree(folder / "training", ignore_errors=True)

    def _config(self, model: str | None, **others: Any) -> RunConfig:
        """Return the options to measure a model on the held-out blocks, which `analyze --from` can repeat.

        Its training took more memory, so that none is refused.
        """
        held_out = {"input": str(self.held_out), "bos": "auto", "force": True}
        options = self.measuring.model_dump() | {"model": model} | held_out
        return make_config(**options | others | {"num_seqs": self.sequences, "dataset": None})

    def _measure(self, subject: Subject, config: RunConfig, arm: str) -> None:
        start = time.time()
        subject = replace(subject, inputs=replace(subject.inputs, condition=arm))
        tables, facts = measure(subject, config, self.console)
        with spinner(self.console, "measuring in W8A8"):
            first = tuple(self.blocks.train[:CALIBRATION].astype(np.int64))
            of_training = replace(subject.inputs, sequences=first, masked=None).part(0, CALIBRATION)
            calibration = with_masked(of_training, subject.loaded, subject.family, config.seed)
            costs = w8a8(subject, calibration, kernel=config.attn, batch_size=facts.batch_size)
        manifest = run_manifest(subject, config, facts, list(tables), start) | {"w8a8": costs}
        manifest["input"]["text"] = f"{self.blocks.name}, held out"
        target = self.folder / arm / "run"
        with self.files.new_folder(target) as fresh:
            write_data(Run.of_analysis(manifest, tables, target, drawn=self.figures_of_arms), fresh)

    def _draw(self, arm: str) -> None:
        """Draw the figures and the page of an arm's run that are not drawn yet."""
        with spinner(self.console, "drawing the figures"):
            run = Run.open(self.folder / arm / "run")
            if is_undrawn(run.manifest):
                draw(run, self.figures_of_arms, self.page)

    # ------------------------------------------------------------------------------------------- all arms together

    def _compare_arms(self) -> Trained:
        """Compare all measured arms, also the arms of earlier calls."""
        measured = [arm for arm in (UNTOUCHED, *self.arms) if self._is_measured(arm)]
        for arm in measured if self.is_main else ():
            self._draw(arm)
        runs = {arm: Run.open(self.folder / arm / "run") for arm in measured}
        trained = [arm for arm in runs if arm != UNTOUCHED]
        first_seed, first_runs = next(iter(runs_by_seed(self.arms, runs).items()))
        tables: dict[str, pd.DataFrame] = {}
        of_task = sorted(path.stem for path in (self.folder / trained[0] / "tables").glob("*.parquet"))
        for name in dict.fromkeys((*OF_EVERY_ARM, *of_task)):
            if name not in all_tables():
                continue
            arms = [arm for arm in trained if name in OF_EVERY_ARM or self.arms[arm]["seed"] == first_seed]
            columns = (*LEADING_COLUMNS, *all_tables()[name])
            parts = [read_table(self.folder / arm / "tables" / f"{name}.parquet", columns) for arm in arms]
            tables[name] = pd.concat(parts, ignore_index=True)
        for run in runs.values():
            if not run.manifest["w8a8"]:
                raise InputError(
                    f"{run.folder}/{MANIFEST} has no `w8a8`: delete the folder, and the command makes it again"
                )
        tables["retrofit"] = retrofit_table(self.arms, runs, tables["gates"])
        comparison = compared(list(first_runs.values()), time.time()) if len(first_runs) > 1 else None
        if comparison is not None and self.is_main:
            comparison = replace(comparison, folder=self.folder / "comparison")
        done = Trained(self._manifest(tables), tables, folder=self.folder, runs=runs, comparison=comparison)
        if not self.is_main:
            return done
        with failures(self.folder):
            self.files.add(*(f"tables/{name}.parquet" for name in tables), *done.texts)
            done.write_files(self.folder)
            if comparison is not None:
                with self.files.new_folder(self.folder / "comparison") as fresh:
                    write_data(comparison, fresh)
            write_manifest(self.folder, done.manifest | {"drawn": False, "files": self.files.names})
            if comparison is not None:
                done = replace(done, comparison=draw(comparison, page=self.page))
            return draw(done, self.figures, self.page, self.files)
