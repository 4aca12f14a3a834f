"""Where arms are trained and measured, on one text, and what came of each is put side by side.

OUT/retrofit.json                 the whole configuration, and how far each arm has got; of `train`: train.json
OUT/held-out.npy                  the blocks that nothing is trained on
OUT/vga/model/                    the trained model: AutoModelForCausalLM loads it where sinkscope is imported
OUT/vga/run/                      its run folder
OUT/vga/tables/training.parquet   loss and gates by step
OUT/vga/tables/gates.parquet      how far each head's gate is from its start
OUT/vga/training/                 checkpoints to resume from, until the arm is finished
OUT/vga/checkpoints/              of `train`: the model at every so many steps, from 0 on
OUT/tables/                       of all arms together: training, gates, retrofit
OUT/retrofit.md                   the last of these in the columns of VGA's tables
OUT/figures/                      of all arms together
OUT/comparison/                   the runs side by side

The same command again goes on where it was broken off, and adds arms to those that are there.
"""

import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.measuring.console import status, tell_place
from sinkscope.measuring.manifest import make_manifest
from sinkscope.measuring.measure import measure
from sinkscope.measuring.quantized import w8a8
from sinkscope.measuring.subject import Subject, inputs_for, subject_of
from sinkscope.measuring.tables import publish
from sinkscope.models.families import Family
from sinkscope.models.loading import LoadedModel
from sinkscope.models.positions import known_positions
from sinkscope.options.measuring import RunConfig, make_config
from sinkscope.options.training import TrainingConfig
from sinkscope.report.comparison import compare
from sinkscope.report.figures import save_figures
from sinkscope.report.retrofit_table import UNTOUCHED
from sinkscope.report.run import Run, write_run
from sinkscope.report.trained import Trained, first_runs, retrofit_tables
from sinkscope.results.folders import check_output, clear_unfinished, new_folder, write_json
from sinkscope.results.tables import read_table, write_table
from sinkscope.retrofits import gate_displacement, retrofit_model
from sinkscope.retrofits.registers import registers_before
from sinkscope.text.inputs import TokenInputs
from sinkscope.training.arms import Arm, Method
from sinkscope.training.blocks import Blocks
from sinkscope.training.tasks.lab import BackcopyLab
from sinkscope.training.trainer import CHECKPOINT, check_trainable, failures, no_bars, train

# what a checkpoint has beside the model: of one process, of several, of FSDP
RESUMED_FROM = (
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"),
    *("rng_state_*.pth", "optimizer.bin", "pytorch_model_fsdp.bin"),
)


@dataclass
class Workshop:
    """One model, fresh or pretrained, and one text.

    `begin` gives an arm its model before the method is built in; `loaded` is how it looks, on the CPU, with its
    tokenizer. `keeps_steps`: the model at every so many steps stays, for the view of training. `lab`: of the task,
    where the text is one.
    """

    folder: Path
    file: str  # the manifest's name
    loaded: LoadedModel
    family: Family
    blocks: Blocks
    training: TrainingConfig
    config: RunConfig
    console: Console
    begin: Callable[[Arm], PreTrainedModel]
    keeps_steps: bool = False
    lab: BackcopyLab | None = None
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def held_out(self) -> Path:
        return self.folder / "held-out.npy"

    @property
    def is_main(self) -> bool:
        return PartialState().is_main_process

    def finish(self, arms: Iterable[Arm], manifest: dict[str, Any], overwrite: bool, untouched: bool) -> Trained:
        """Everything that is not done yet. `untouched`: also the model as it was, measured."""
        arms = list(arms)
        self._claim(manifest, arms, overwrite)
        if untouched:
            self._measure_untouched()
        for place, arm in enumerate(arms, 1):
            tell_place(self.console, arm.label, place, len(arms))
            self._finish(arm)
        return self._conclude()

    # ------------------------------------------------------------------------------------------- the folder

    def _claim(self, manifest: dict[str, Any], wanted: Iterable[Arm], overwrite: bool) -> None:
        """The folder is this training's from now on. Errors: InputError where its text has changed, or an arm of this
        name is another one.
        """
        sha256 = self.blocks.sha256
        arms: dict[str, Any] = {}
        if (self.folder / self.file).exists() and not overwrite:
            found = read_manifest(self.folder / self.file)
            arms = found.get("arms", {})
            if found.get("text_sha256") != sha256:
                raise InputError(f"--out {self.folder}: its text has changed since; name another folder")
        for arm in wanted:
            method, parameters = arm.method.name, dict(arm.method.parameters)
            record = {"method": method, "parameters": parameters, "label": arm.method.label, "seed": arm.seed}
            before = arms.get(arm.label, record)
            if (before["method"], before["parameters"]) != (method, parameters):
                raise InputError(f"--out {self.folder}: its {arm.label} is another method; name another folder")
            arms[arm.label] = before | record
        self.manifest = manifest | {"text_sha256": sha256, "arms": arms}
        PartialState().wait_for_everyone()  # all have looked
        if self.is_main:
            with failures(self.folder):
                if overwrite and self.folder.exists():
                    shutil.rmtree(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                clear_unfinished(self.folder)
                self._note()  # first: by it the folder is known as ours
                np.save(self.held_out, self.blocks.held_out)
        PartialState().wait_for_everyone()

    def _note(self) -> None:
        write_json(self.folder / self.file, self.manifest)

    # ------------------------------------------------------------------------------------------- arm by arm

    def _finish(self, arm: Arm) -> None:
        """What is not done yet of an arm."""
        folder = self.folder / arm.label
        if not (folder / "model" / "config.json").exists():
            self._train(arm, folder)
        PartialState().wait_for_everyone()
        if self.is_main and not (folder / "run" / "run.json").exists():
            config = self._measuring(
                str(folder / "model"), revision=None, gguf_file=None, trust_remote_code=False, allow_pickle=False
            )
            subject = subject_of(None, None, config, self.console)
            subject = replace(subject, loaded=replace(subject.loaded, name=self.loaded.name))
            self._measure(subject, config, arm.label, folder / "run")
        if self.is_main:
            if self.keeps_steps:
                self._keep_steps(folder / "training", folder / "checkpoints")
            shutil.rmtree(folder / "training", ignore_errors=True)  # its checkpoints have done their work
        PartialState().wait_for_everyone()

    def _train(self, arm: Arm, folder: Path) -> None:
        model = retrofit_model(self.begin(arm), self.family, arm.method.name, **arm.method.parameters)
        if self.keeps_steps and self.is_main:
            with failures(folder), no_bars():
                self._save(model, folder / "checkpoints" / "checkpoint-0")
        history = train(
            model,
            self.blocks,
            self.training.model_copy(update={"seed": arm.seed}),
            folder / "training",
            keep_all=self.keeps_steps,
            cpu=self.config.device_map == "cpu",
            console=self.console,
            probe=None if self.lab is None else self._probe,
        )
        if not self.is_main:
            return
        gates = gate_displacement(model)
        raw = {"training": history.assign(seed=arm.seed), "gates": gates.assign(seed=arm.seed)}
        if self.lab is not None:
            raw |= self.lab.tables(model, self.family, self.blocks.held_out)
        self.manifest["arms"][arm.label]["moved"] = float(gates["displacement"].max()) if len(gates) else 0.0
        with failures(folder / "training"), no_bars():
            (folder / "tables").mkdir(exist_ok=True)
            for name, table in publish(raw, self.loaded, arm.method.label).items():
                write_table(table, folder / "tables" / f"{name}.parquet")
            self._note()
            self._save(model, folder / "model")  # last: what is there is whole

    def _probe(self, model: PreTrainedModel) -> pd.DataFrame:
        assert self.lab is not None
        return self.lab.probe(model, self.family, self.blocks.held_out)

    def _save(self, model: PreTrainedModel, folder: Path) -> None:
        with new_folder(folder) as fresh:
            model.save_pretrained(fresh)
            self._save_tokenizer(fresh)

    def _save_tokenizer(self, folder: Path) -> None:
        if self.loaded.tokenizer is not None:
            self.loaded.tokenizer.save_pretrained(folder)

    def _keep_steps(self, training: Path, kept: Path) -> None:
        """The checkpoints of a training as models only: what is there to resume from is three times their size."""
        for checkpoint in sorted(training.glob("checkpoint-*")):
            if CHECKPOINT.fullmatch(checkpoint.name) is None:
                continue
            for path in (path for name in RESUMED_FROM for path in checkpoint.glob(name)):
                path.unlink()
            self._save_tokenizer(checkpoint)
            os.replace(checkpoint, kept / checkpoint.name)

    # --------------------------------------------------------------------------------------------- measuring

    def _measure_untouched(self) -> None:
        target = self.folder / UNTOUCHED / "run"
        if not self.is_main or (target / "run.json").exists():
            return
        on_gpu = torch.cuda.is_available() and self.config.device_map != "cpu"
        self.loaded.model.to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
        config = self._measuring(self.config.model)
        subject = Subject(self.loaded, self.family, inputs_for(self.loaded, config))
        self._measure(subject, config, UNTOUCHED, target)
        self.loaded.model.to("cpu")  # type: ignore[arg-type]

    def _measuring(self, model: str | None, **others: Any) -> RunConfig:
        """Held-out blocks as they are: `analyze --from` repeats it."""
        options = self.config.model_dump() | {"model": model, "input": str(self.held_out), "bos": "auto"} | others
        count = min(self.config.num_seqs, len(self.blocks.held_out))
        return make_config(**options | {"num_seqs": count, "dataset": None})

    def _measure(self, subject: Subject, config: RunConfig, label: str, target: Path) -> None:
        start = time.time()
        subject = replace(subject, inputs=replace(subject.inputs, condition=label))
        tables, facts = measure(subject, config, self.console)
        with status(self.console, "quantizing"):
            costs = w8a8(subject, self._calibration(subject), kernel=config.attn, batch_size=facts.batch_size)
        manifest = make_manifest(subject, config, facts, list(tables), start) | {"w8a8": costs}
        manifest["input"]["text"] = f"{self.blocks.name}, held out"
        with status(self.console, "drawing the figures"), new_folder(target) as fresh:
            write_run(Run(manifest, tables, target), fresh)

    def _calibration(self, subject: Subject) -> TokenInputs:
        """For the ranges of W8A8: text that was trained on, the same for all arms."""
        everything = replace(subject.inputs, sequences=tuple(self.blocks.train))
        return everything.part(0, 16)

    # ------------------------------------------------------------------------------------------- the whole

    def _conclude(self) -> Trained:
        """Everything that is there, side by side."""
        labels = [label for label in (UNTOUCHED, *self.manifest["arms"]) if self._is_measured(label)]
        runs = {label: Run.open(self.folder / label / "run") for label in labels}
        tables = {name: self._all_arms(name, labels) for name in ("training", "gates")}
        tables["retrofit"] = retrofit_tables(self.manifest, runs, tables["gates"])
        firsts = first_runs(self.manifest, runs)
        if self.lab is not None:
            alike = [label for label in labels if runs[label] in firsts.values()]
            tables |= {name: self._all_arms(name, alike) for name in ("attention_maps", "value_norms")}
        beside = self.folder / "comparison" if self.is_main else None
        comparison = compare(*firsts.values(), out=beside, overwrite=True) if len(firsts) > 1 else None
        done = Trained(self.folder, self.manifest, runs, comparison, tables)
        if self.is_main:
            with failures(self.folder):
                self._write(done)
        return done

    def _write(self, done: Trained) -> None:
        (self.folder / "tables").mkdir(exist_ok=True)
        for name, table in done.tables.items():
            write_table(table, self.folder / "tables" / f"{name}.parquet")
        (self.folder / "retrofit.md").write_text(done.verdict, encoding="utf-8")
        with new_folder(self.folder / "figures") as fresh:
            save_figures(done.figures(), fresh)

    def _is_measured(self, label: str) -> bool:
        return (self.folder / label / "run" / "run.json").exists()

    def _all_arms(self, name: str, labels: Iterable[str]) -> pd.DataFrame:
        """A table that each arm has."""
        paths = [self.folder / label / "tables" / f"{name}.parquet" for label in labels if label != UNTOUCHED]
        return pd.concat([read_table(path) for path in paths], ignore_index=True)


# ---------------------------------------------------------------------------------- what is checked beforehand


def check_methods(methods: Iterable[Method], model: PreTrainedModel, family: Family, training: TrainingConfig) -> None:
    """Errors: InputError for a method that cannot be trained on this model, before hours of training another."""
    limit = known_positions(model, family)
    for method in methods:
        trial = retrofit_model(copy.deepcopy(model), family, method.name, **method.parameters)
        try:
            check_trainable(trial, training.only_new)
        except InputError as error:
            raise InputError(f"--method {method.label}: {error}") from None
        registers = registers_before(trial)
        if limit is not None and training.block_length + registers > limit:
            raise InputError(
                f"--method {method.label}: blocks of {training.block_length} tokens and {registers} registers are "
                f"beyond the model's {limit} positions: take a --block-length of at most {limit - registers}"
            )


def check_folder(path: Path, manifest: Mapping[str, Any], overwrite: bool) -> Path:
    """`path`: of the manifest. → its folder. Errors: InputError where it cannot be written, or is of other options."""
    folder = path.parent
    if overwrite or not path.exists():
        return check_output(folder, overwrite, path.name)
    before = _filled(read_manifest(path))
    differing = _flat(before).items() ^ _flat(manifest).items()
    names = sorted({name for name, _ in differing if not name.startswith(("sinkscope", "arms", "text_sha256"))})
    if names:
        told = ", ".join(f"{name} was {_flat(before).get(name, 'none')}" for name in names[:3])
        raise InputError(
            f"--out {folder} holds what `{path.stem}` made with other options ({told}): repeat them to go on with it, "
            "--overwrite replaces it, or name another folder"
        )
    return folder


def read_manifest(path: Path) -> dict[str, Any]:
    """OUT/retrofit.json or OUT/train.json. Errors: InputError."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("command") != path.stem:
        raise InputError(f"{path} is not the manifest of a {path.stem}: it is another JSON file")
    if not all(isinstance(manifest.get(name), dict) for name in ("config", "training", "arms")):
        raise InputError(f"{path} is damaged: --overwrite begins anew, or name another folder")
    return manifest


def _filled(manifest: dict[str, Any]) -> dict[str, Any]:
    """As today's sinkscope would have written it: options that an older one did not have are as they are by default."""
    defaults = {"config": RunConfig(), "training": TrainingConfig()}
    return manifest | {name: config.model_dump(mode="json") | manifest[name] for name, config in defaults.items()}


def _flat(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Name of an option → its value as text."""
    flat: dict[str, str] = {}
    for key, value in manifest.items():
        flat |= {name: str(part) for name, part in value.items()} if isinstance(value, dict) else {key: str(value)}
    return {name: value for name, value in flat.items() if name not in manifest.get("arms", {})}
