"""Arms of `retrofit` and `train`: each is trained, measured on held-out text, and compared with the others.

OUT/run.json                      all options, and the arms
OUT/held-out.npy                  the held-out blocks
OUT/vga/model/                    the trained model, which AutoModelForCausalLM loads after `import sinkscope.retrofits`
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

The same command resumes an interrupted one, and adds arms to the existing ones.
"""

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from sinkscope.commands.printout import Printout
from sinkscope.commands.quantize.study import w8a8
from sinkscope.commands.train.arms import Arm, Method, arms_of, parse_methods
from sinkscope.commands.train.blocks import Blocks, begun, limited, read_blocks
from sinkscope.commands.train.history import probe_of
from sinkscope.commands.train.options import ArmOptions
from sinkscope.commands.train.output import Trained, first_runs, retrofit_tables
from sinkscope.commands.train.sharding import launched
from sinkscope.commands.train.tasks import Task
from sinkscope.commands.train.trainer import check_trainable, checkpoints, failures, keep_models, no_bars, train
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import Messages, print_line, print_notices, print_part, spinner
from sinkscope.measuring.measure import make_manifest as run_manifest
from sinkscope.measuring.measure import measure, publish
from sinkscope.measuring.processes import Team
from sinkscope.measuring.subject import Subject, inputs_for, open_subject, with_masked, without_head_or_mask
from sinkscope.measuring.tables import all_tables
from sinkscope.models.family import Family
from sinkscope.models.in_memory import fingerprint
from sinkscope.models.loading import LoadedModel
from sinkscope.models.projections import known_positions
from sinkscope.options.files import user_path
from sinkscope.options.measuring import RunConfig, make_config
from sinkscope.options.output import OutputOptions
from sinkscope.output.comparison import compared
from sinkscope.output.result import draw, write_data
from sinkscope.output.run import Run
from sinkscope.results.folders import FileList, alone_in, check_resumable, claim, new_folder, resumable
from sinkscope.results.manifest import MANIFEST, files_in, is_undrawn, make_manifest, write_manifest
from sinkscope.results.swap import new_file
from sinkscope.results.tables import LEADING_COLUMNS, read_table, write_tables
from sinkscope.results.trainings import UNTOUCHED
from sinkscope.retrofits import gate_displacement
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.inputs import beginning

RENEWED = ("figures", "comparison")  # folders of all arms together, written again whenever the command resumes
OWN_TABLES = ("training", "gates")  # tables of every arm; a task has more
CALIBRATION = 16  # training blocks that the ranges of W8A8 come from, the same for all arms


def shown(done: Trained, output: OutputOptions) -> Printout:
    return Printout(done, done.verdict, notes=done.notes, folder=output.out, failure=done.failure)


class TrainingArms:
    """One call of `retrofit` or `train`, which finishes what its folder lacks.

    The command enters `own_folder`, loads its model, and then calls `finish`. The folder is resumed only with identical
    options and `facts` (further entries of run.json that affect results); methods may be added later.
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
        figures: bool,
        **facts: Any,
    ) -> None:
        self.start = time.time()
        launched(cpu=asked.device_map == "cpu")
        self.command, self.asked, self.folder, self.overwrite = command, asked, user_path(out), overwrite
        self.record, self.page, self.figures = record, page, figures
        self.training, self.measuring = asked.training, asked.measuring  # how arms are trained, and measured
        self.is_main = PartialState().is_main_process
        self.console = Messages(quiet or not self.is_main)
        config = asked.model_dump(mode="json", exclude={"method"})  # each method is recorded with its arm
        self.options = {"config": config, "processes": PartialState().num_processes, **facts}
        self.held_out = self.folder / "held-out.npy"
        self.arms: dict[str, Any] = {}  # label → its record in the manifest
        self.files = FileList(self.folder, [self.held_out.name], lambda: write_manifest(self.folder, self._manifest()))

    @contextmanager
    def own_folder(self, *reads: str | None) -> Iterator[None]:
        """Lock the folder for this command, which may be several processes; `reads` as for `check_output`."""
        with ExitStack() as stack:

            def take() -> None:
                stack.enter_context(alone_in(self.folder))
                check_resumable(self.folder, self.command, self.options, self.overwrite, reads, RENEWED)

            state = PartialState()
            Team(state.process_index, state.num_processes).of_the_first(take)
            yield

    def _check_methods(self, methods: Iterable[Method], loaded: LoadedModel, family: Family) -> None:
        """Raise InputError for a method that cannot be trained on this model, before another trains for hours."""
        model = loaded.model
        if (reason := without_head_or_mask(loaded, family)) is not None:
            raise InputError(f"{loaded.name} cannot be trained: {reason}")
        limit, length = known_positions(model, family), self.training.block_length
        for method in methods:
            trial = method.built_into(copy.deepcopy(model), family, self.training.seed)
            try:
                check_trainable(trial, self.training.only_new)
            except InputError as error:
                raise InputError(f"--method {method.label}: {error}") from None
            registers = registers_before(trial)
            if limit is not None and length + registers > limit:
                raise InputError(
                    f"--method {method.label}: blocks of {length} tokens and {registers} registers are beyond the "
                    f"model's {limit} positions: take a --block-length of at most {limit - registers}"
                )

    def finish(
        self,
        loaded: LoadedModel,
        family: Family,
        begin: Callable[[Arm], PreTrainedModel],
        task: Task | None = None,
    ) -> Trained:
        """Read the text, train and measure everything that is not done yet; arms of earlier calls stay.

        `loaded` is the unchanged model on the CPU, which `retrofit` measures, too. `begin` returns the model of an arm
        before the method is built in. `task` makes the blocks; None for a text.
        """
        self.loaded, self.family, self.begin, self.task = loaded, family, begin, task
        methods, wanted = parse_methods(self.asked.method), self.training.blocks_wanted(PartialState().num_processes)
        self._check_methods(methods, loaded, family)
        with spinner(self.console, "reading the text"):
            self.blocks = self._read(wanted)
        arms = arms_of(methods, self.training.seed, self.asked.seeds)
        self._claim(arms)
        print_line(self.console, f"read: {self._said}")
        print_notices(self.console, self.blocks.notices(wanted))
        if self.command == "retrofit" and self.is_main and not self._is_measured(UNTOUCHED):
            on_gpu = torch.cuda.is_available() and self.measuring.device_map != "cpu"
            loaded.model.to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
            config = self._config(self.measuring.model)
            self._measure(Subject(loaded, family, inputs_for(loaded, config, family)), config, UNTOUCHED)
            loaded.model.to("cpu")  # type: ignore[arg-type]
        for place, arm in enumerate(arms, 1):
            print_part(self.console, arm.label, place, len(arms))
            if not (self.folder / arm.label / "model" / "config.json").exists():
                self._train(arm)
            PartialState().wait_for_everyone()
            if self.is_main:
                self._measure_arm(arm.label)
            PartialState().wait_for_everyone()
        return self._conclude()

    def _read(self, wanted: int) -> Blocks:
        """Return the blocks of the task, or of the text with its first tokens replaced as the options say."""
        options, training = self.asked, self.training
        if self.task is not None:
            drawn = self.task.blocks(training.block_length, wanted, options.num_seqs, training.seed)
            return limited(drawn, options)
        source = (options.text, options.dataset, training.block_length, wanted, training.eval_share)
        read = read_blocks(self.loaded, *source, seed=training.seed, bos=options.bos, family=self.family)
        return limited(begun(read, self.loaded, options), options)

    # ------------------------------------------------------------------------------------------- the folder

    def _claim(self, wanted: Iterable[Arm]) -> None:
        """Claim the folder, and record its arms."""
        self.read = {"text_sha256": self.blocks.sha256, "weights_sha256": fingerprint(self.loaded.model)}
        found = None
        if not self.overwrite:
            found = resumable(self.folder, self.command, self.options | self.read)
        if found is not None:
            self.arms, self.files.names = found["arms"], found["files"]
        for arm in wanted:
            method, parameters = arm.method.name, dict(arm.method.parameters)
            record = {"method": method, "parameters": parameters, "label": arm.method.label, "seed": arm.seed}
            before = self.arms.get(arm.label, record)
            if (before["method"], before["parameters"]) != (method, parameters):
                raise InputError(f"--out {self.folder}: its {arm.label} is another method; name another folder")
            self.arms[arm.label] = before | record
        PartialState().wait_for_everyone()  # all processes have read the folder
        if self.is_main:
            begun = new_folder(self.folder) if found is None else nullcontext(self.folder)
            with failures(self.folder), begun as folder:
                claim(folder, self._manifest())
                with new_file(folder / self.held_out.name) as fresh, fresh.open("wb") as file:
                    np.save(file, self.blocks.held_out)
        PartialState().wait_for_everyone()

    @property
    def _said(self) -> str:
        """What was read to train on."""
        blocks, tokenizer = self.blocks.train, self.loaded.tokenizer
        return (
            f"{self.blocks.name}, {counted(len(blocks), 'block')}, the first begins `{beginning(blocks[0], tokenizer)}`"
        )

    def _manifest(self, tables: Iterable[str] = ()) -> dict[str, Any]:
        facts = self.options | self.read | {"text_blocks": len(self.blocks.train), "text_read": self._said}
        facts |= {"arms": self.arms, "files": self.files.names}
        if self.record is not None:
            facts |= {"recipe": self.record}
        return make_manifest(self.command, start=self.start, tables=tables, **facts)

    def _is_measured(self, label: str) -> bool:
        return (self.folder / label / "run" / MANIFEST).exists()

    def _save(self, model: PreTrainedModel, folder: Path) -> None:
        with self.files.new_folder(folder) as fresh:
            model.save_pretrained(fresh)
            self._save_tokenizer(fresh)

    def _save_tokenizer(self, folder: Path) -> None:
        if self.loaded.tokenizer is not None:
            self.loaded.tokenizer.save_pretrained(folder)

    # ------------------------------------------------------------------------------------------- arm by arm

    def _train(self, arm: Arm) -> None:
        folder, keeps_all = self.folder / arm.label, self.command == "train"  # for `analyze` over its steps
        model = arm.method.built_into(self.begin(arm), self.family, arm.seed)
        if self.is_main:
            self.files.add(f"{arm.label}/training/")
        if keeps_all and self.is_main:
            with failures(folder), no_bars():
                self._save(model, folder / "checkpoints" / "checkpoint-0")
        is_complete, begun = not (folder / "training").exists(), time.perf_counter()
        probed = (self.measuring.epsilon, self.asked.fixed_position or 0, self.asked.probe)
        probe = probe_of(self.task, self.family, self.blocks.held_out, *probed, self.blocks.masked_by)
        history = train(
            model,
            self.blocks,
            self.training.model_copy(update={"seed": arm.seed}),
            folder / "training",
            keep_all=keeps_all,
            cpu=self.measuring.device_map == "cpu",
            console=self.console,
            probe=probe if keeps_all or self.asked.probe else None,
        )
        seconds = time.perf_counter() - begun
        if not self.is_main:
            return
        gates = gate_displacement(model)
        raw = {"training": history.assign(seed=arm.seed), "gates": gates.assign(seed=arm.seed)}
        if self.task is not None:
            raw |= self.task.tables(model, self.family, self.blocks.held_out)
        self.arms[arm.label] |= {
            "moved": float(gates["displacement"].max()) if len(gates) else 0.0,
            "step_seconds": seconds / self.training.steps if is_complete else None,  # unknown for a resumed training
        }
        with failures(folder / "training"), no_bars():
            tables = publish(raw, self.loaded, arm.method.label)
            self.files.add(*(f"{arm.label}/tables/{name}.parquet" for name in tables))
            write_tables(tables, folder)
            write_manifest(self.folder, self._manifest())
            self._save(model, folder / "model")  # saved last, since it marks the arm as trained

    def _measure_arm(self, label: str) -> None:
        """Measure a trained arm if that is not done yet, and remove its files for resuming."""
        folder = self.folder / label
        if not self._is_measured(label):
            initial = {"revision": None, "gguf_file": None, "adapter": None}  # options of the initial model
            config = self._config(str(folder / "model"), trust_remote_code=False, allow_pickle=False, **initial)
            with open_subject(None, None, config, self.console) as subject:
                named = replace(subject, loaded=replace(subject.loaded, name=self.loaded.name))
                self._measure(named, config, label)
        self._draw(label)
        if self.command == "train" and (folder / "training").exists():
            for checkpoint in checkpoints(folder / "training"):
                self._save_tokenizer(checkpoint)
                kept = f"{label}/checkpoints/{checkpoint.name}"
                self.files.add(*(f"{kept}/{name}" for name in files_in(checkpoint)))
            keep_models(folder / "training", folder / "checkpoints")
        shutil.rmtree(folder / "training", ignore_errors=True)

    def _config(self, model: str | None, **others: Any) -> RunConfig:
        """Return the options to measure a model on the held-out blocks, which `analyze --from` can repeat.

        Its training took more memory, so that none is refused.
        """
        held_out = {"input": str(self.held_out), "bos": "auto", "force": True}
        options = self.measuring.model_dump() | {"model": model} | held_out
        count = min(self.measuring.num_seqs, len(self.blocks.held_out))
        return make_config(**options | others | {"num_seqs": count, "dataset": None})

    def _measure(self, subject: Subject, config: RunConfig, label: str) -> None:
        start = time.time()
        subject = replace(subject, inputs=replace(subject.inputs, condition=label))
        tables, facts = measure(subject, config, self.console)
        with spinner(self.console, "quantizing"):
            of_training = replace(subject.inputs, sequences=tuple(self.blocks.train), masked=None).part(0, CALIBRATION)
            calibration = with_masked(of_training, subject.loaded, subject.family, config.seed)
            costs = w8a8(subject, calibration, kernel=config.attn, batch_size=facts.batch_size)
        manifest = run_manifest(subject, config, facts, list(tables), start) | {"w8a8": costs}
        manifest["input"]["text"] = f"{self.blocks.name}, held out"
        target = self.folder / label / "run"
        with self.files.new_folder(target) as fresh:
            write_data(Run.of_analysis(manifest, tables, target), fresh)

    def _draw(self, label: str) -> None:
        """Draw the figures and the page of an arm's run that are not drawn yet."""
        with spinner(self.console, "drawing the figures"):
            run = Run.open(self.folder / label / "run")
            if is_undrawn(run.manifest):
                draw(run, None if self.figures else (), self.page)

    # ------------------------------------------------------------------------------------------- all arms together

    def _conclude(self) -> Trained:
        """Compare all measured arms, also the arms of earlier calls."""
        labels = [label for label in (UNTOUCHED, *self.arms) if self._is_measured(label)]
        if self.is_main:
            for label in labels:
                self._draw(label)
        runs = {label: Run.open(self.folder / label / "run") for label in labels}
        firsts = first_runs({"arms": self.arms}, runs)
        first_folders = [run.folder for run in firsts.values()]
        trained = [label for label in labels if label != UNTOUCHED]
        tables = {name: self._table_of_arms(name, trained) for name in OWN_TABLES}
        tables["retrofit"] = retrofit_tables({"arms": self.arms}, runs, tables["gates"])
        written = sorted(path.stem for path in (self.folder / trained[0] / "tables").glob("*.parquet"))
        for name in written:
            if name in all_tables() and name not in OWN_TABLES:
                those = [label for label in trained if runs[label].folder in first_folders]
                tables[name] = self._table_of_arms(name, those)
        comparison = compared(list(firsts.values()), time.time()) if len(firsts) > 1 else None
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
            return draw(done, None if self.figures else (), self.page, self.files)

    def _table_of_arms(self, name: str, labels: Iterable[str]) -> pd.DataFrame:
        paths = [self.folder / label / "tables" / f"{name}.parquet" for label in labels]
        columns = (*LEADING_COLUMNS, *all_tables()[name])
        return pd.concat([read_table(path, columns) for path in paths], ignore_index=True)
