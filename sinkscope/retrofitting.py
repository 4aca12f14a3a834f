"""`retrofit`: a model trained with each method, and plainly, and all measured by the same code on held-out text.

OUT/retrofit.json                 the whole configuration, and how far each arm has got
OUT/held-out.npy                  the blocks that nothing is trained on
OUT/untouched/run/                a run folder of the model as it is
OUT/vga/model/                    the trained model: AutoModelForCausalLM loads it where sinkscope is imported
OUT/vga/run/                      its run folder
OUT/vga/tables/training.parquet   loss and gates by step
OUT/vga/tables/gates.parquet      how far each head's gate is from its start
OUT/vga/training/                 checkpoints, until the arm is finished
OUT/comparison/                   the runs side by side
OUT/figures/retrofit-training.*   loss and gates by step, all arms

The same command again goes on where it was broken off, and adds methods to those that are there.
"""

import copy
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinkscope.analysis import measure
from sinkscope.blocks import Blocks, check_text, read_blocks
from sinkscope.comparison import Comparison, compare
from sinkscope.config import RunConfig, as_folder_name, make_config
from sinkscope.errors import InputError
from sinkscope.families import Family
from sinkscope.loading import LoadedModel
from sinkscope.manifest import make_manifest
from sinkscope.retrofits import gate_displacement, make_retrofit, retrofit_model
from sinkscope.run import Run, check_output, new_folder, save_figures, write_run
from sinkscope.subject import (
    ModelLike,
    Subject,
    config_of,
    family_of,
    inputs_for,
    loaded_model,
    status,
    subject_of,
    tell,
    tell_place,
)
from sinkscope.tables import read_table, shape_table, write_table
from sinkscope.training import check_trainable, failures, launched, no_bars, train
from sinkscope.training_config import TrainingConfig, make_training_config

if TYPE_CHECKING:
    from sinkscope.figures.style import Figure

MANIFEST = "retrofit.json"
UNTOUCHED = "untouched"
METHODS = ("vga", "none")  # VGA's table 3


@dataclass(frozen=True)
class Method:
    """A retrofit as it was asked for: `vga:placement=output`."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its folder's name, and its condition in the tables."""
        return as_folder_name(self.name, *(f"{key}={value}" for key, value in self.parameters.items()))


@dataclass(frozen=True)
class Retrofitting:
    """What came of `retrofit`.

    runs         "untouched", and a run a method
    comparison   of these, on held-out text
    training     model, condition (the method), layer (-1: the whole model), step, metric, value
    gates        how far each head's new parameters have moved
    """

    folder: Path
    manifest: dict[str, Any]
    runs: dict[str, Run] = field(repr=False)
    comparison: Comparison
    training: pd.DataFrame = field(repr=False)
    gates: pd.DataFrame = field(repr=False)

    @property
    def notes(self) -> list[str]:
        """How far each arm's gates have moved, a line each."""
        return [_moved(label, self.gates) for label in self.manifest["arms"] if label in set(self.gates["condition"])]

    def figures(self) -> "dict[str, Figure]":
        """By name: loss and gates by step."""
        return _figures(self.training)

    @property
    def is_main(self) -> bool:
        """Of several processes, the one that prints."""
        return PartialState().is_main_process

    def model(self, label: str) -> Path:
        """The folder of a trained model."""
        return self.folder / label / "model"


def _figures(training: pd.DataFrame) -> "dict[str, Figure]":
    from sinkscope.figures.retrofit_training import draw_retrofit_training

    return {} if training.empty else {"retrofit-training": draw_retrofit_training(training)}


def _moved(label: str, gates: pd.DataFrame) -> str:
    mine = gates[gates["condition"] == label]
    most = mine.loc[mine["displacement"].idxmax()]
    where = "" if most["layer"] < 0 else f", in layer {most['layer']}"
    mean = mine["displacement"].mean()
    return f"{label}: new parameters moved by {mean:.3g} on average, by {most['displacement']:.3g} at most{where}"


def retrofit(
    model: ModelLike = None,
    methods: str | Iterable[str] = METHODS,
    *,
    out: str | os.PathLike[str],
    text: str | os.PathLike[str] = "natural",
    dataset: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    **options: Any,
) -> Retrofitting:
    """Retrofit and train a model with each of the `methods` ("vga,none", "vga:placement=output"), every time from the
    model as it is, and measure all of them and the model itself on held-out text.

    `model` as for `analyze`; `text` is "natural", a file, or "sampled" by the model, and `dataset` takes its place.
    `options` are those of TrainingConfig, and those of `analyze` for loading and measuring. Under `accelerate launch`
    it trains on all processes, and measures on the first.

    Errors: InputError for wrong options, methods that do not apply, a text that is too short, or a folder with other
    options, before anything is trained; SinkscopeError for a training that failed. What was reached stays in `out`,
    and the same call goes on from there.
    """
    wanted = parse_methods(methods)
    training, config = _configs(model, options)
    launched(cpu=config.device_map == "cpu")
    text = os.fspath(text)
    check_text(text)
    manifest = _manifest(config, training, text, dataset)
    folder = _check_folder(Path(out), manifest, overwrite)
    console = Console(stderr=True, quiet=quiet or not PartialState().is_main_process)
    with status(console, "loading the model"):
        loaded = loaded_model(model, tokenizer, config.model_copy(update={"device_map": "cpu"}))
    family, notices = family_of(loaded.model)
    tell(console, (*loaded.notices, *notices))
    _check_methods(wanted, loaded.model, family, training.only_new)
    count = training.blocks_wanted(PartialState().num_processes)
    with status(console, "reading the text"):
        blocks = read_blocks(
            loaded, text, dataset, training.block_length, count, training.eval_share, seed=training.seed
        )
    bench = _Bench(folder, loaded, family, blocks, training, config, console)
    bench.claim(manifest, wanted, overwrite)
    bench.measure_untouched()
    for place, method in enumerate(wanted, 1):
        tell_place(console, method.label, place, len(wanted))
        bench.finish(method)
    return bench.conclude()


# -------------------------------------------------------------------------------------------- what is checked


def parse_methods(methods: str | Iterable[str]) -> list[Method]:
    """NAME[:key=value,…], several behind commas, or several such texts. Errors: InputError."""
    found: list[tuple[str, dict[str, str]]] = []
    for text in [methods] if isinstance(methods, str) else methods:
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, colon, assigned = part.partition(":")
            if colon or "=" not in part:
                found.append((name.strip(), {}))
            else:  # the method's parameters go on
                assigned = part
            if not assigned:
                continue
            key, equals, value = assigned.partition("=")
            if not equals or not found:
                raise InputError(f"--method {text}: '{assigned}' is no key=value of a method")
            found[-1][1][key.strip().replace("-", "_")] = value.strip()
    wanted = [Method(name, parameters) for name, parameters in found]
    if not wanted:
        raise InputError("name a method: --method NAME[:key=value,…]; `sinkscope list retrofits` shows the names")
    for method in wanted:
        make_retrofit(method.name, method.parameters)
    labels = [method.label for method in wanted]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"--method {label} is given twice")
    return wanted


def _configs(model: ModelLike, options: Mapping[str, Any]) -> tuple[TrainingConfig, RunConfig]:
    """How to train, and how to load and measure. In float32: at a fine-tune's learning rate most steps are too small
    for the weights of bfloat16 to change at all.
    """
    ours = {name: value for name, value in options.items() if name in TrainingConfig.model_fields}
    training = make_training_config(**ours)
    rest = {name: value for name, value in options.items() if name not in TrainingConfig.model_fields}
    for name in ("input", "seq_len", "bos"):
        if name in rest:
            raise InputError(f"--{name.replace('_', '-')} does not go with `retrofit`: it measures on held-out text")
    config = config_of(model, {"dtype": "float32"} | rest | {"seq_len": training.block_length, "seed": training.seed})
    if config.dtype == "float16":
        raise InputError("--dtype float16: gradients overflow in it; take float32, with --bf16 for speed")
    if config.device_map == "auto":
        raise InputError("--device-map auto: a model that is trained stays on one GPU; take cuda or cpu")
    return training, config


def _check_methods(wanted: Iterable[Method], model: PreTrainedModel, family: Family, only_new: bool) -> None:
    """Errors: InputError for a method that cannot be trained on this model, before hours of training another."""
    for method in wanted:
        trial = retrofit_model(copy.deepcopy(model), family, method.name, **method.parameters)
        try:
            check_trainable(trial, only_new)
        except InputError as error:
            raise InputError(f"--method {method.label}: {error}") from None


def _manifest(config: RunConfig, training: TrainingConfig, text: str, dataset: str | None) -> dict[str, Any]:
    """All that decides the numbers."""
    return {
        "sinkscope": version("sinkscope"),
        "command": "retrofit",
        "config": config.model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "text": text,
        "dataset": dataset,
        "processes": PartialState().num_processes,
    }


def _check_folder(folder: Path, manifest: Mapping[str, Any], overwrite: bool) -> Path:
    """Errors: InputError where it cannot be written, or holds a retrofit with other options."""
    if overwrite or not (folder / MANIFEST).exists():
        return check_output(folder, overwrite, MANIFEST)
    before = read_manifest(folder)
    differing = _flat(before).items() ^ _flat(manifest).items()
    names = sorted({name for name, _ in differing if not name.startswith(("sinkscope", "arms", "text_sha256"))})
    if names:
        told = ", ".join(f"{name} was {_flat(before).get(name, 'none')}" for name in names[:3])
        raise InputError(
            f"--out {folder} holds a retrofit with other options ({told}): repeat them to go on with it, --overwrite "
            "replaces it, or name another folder"
        )
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """OUT/retrofit.json. Errors: InputError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("command") != "retrofit":
        raise InputError(f"{folder / MANIFEST} is not the manifest of a retrofit: it is another JSON file")
    return manifest


def _flat(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Name of an option → its value as text."""
    flat: dict[str, str] = {}
    for key, value in manifest.items():
        flat |= {name: str(part) for name, part in value.items()} if isinstance(value, dict) else {key: str(value)}
    return {name: value for name, value in flat.items() if name not in manifest.get("arms", {})}


# ------------------------------------------------------------------------------------------------ arm by arm


@dataclass
class _Bench:
    """One model and one text, where arm after arm is trained and measured."""

    folder: Path
    loaded: LoadedModel  # as it is, on the CPU
    family: Family
    blocks: Blocks
    training: TrainingConfig
    config: RunConfig
    console: Console
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def held_out(self) -> Path:
        return self.folder / "held-out.npy"

    @property
    def is_main(self) -> bool:
        return PartialState().is_main_process

    def claim(self, manifest: dict[str, Any], wanted: Iterable[Method], overwrite: bool) -> None:
        """The folder is this retrofit's from now on. Errors: InputError where its text has changed."""
        sha256 = self.blocks.sha256
        arms: dict[str, Any] = {}
        if (self.folder / MANIFEST).exists() and not overwrite:
            before = read_manifest(self.folder)
            arms = before.get("arms", {})
            if before.get("text_sha256") != sha256:
                raise InputError(f"--out {self.folder}: its text has changed since; name another folder")
        for method in wanted:
            arms.setdefault(method.label, {"method": method.name, "parameters": dict(method.parameters)})
        self.manifest = manifest | {"text_sha256": sha256, "arms": arms}
        PartialState().wait_for_everyone()  # all have looked
        if self.is_main:
            with failures(self.folder):
                if overwrite and self.folder.exists():
                    shutil.rmtree(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                self.note()  # first: by it the folder is known as ours
                np.save(self.held_out, self.blocks.held_out)
        PartialState().wait_for_everyone()

    def note(self) -> None:
        path = self.folder / MANIFEST
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.manifest, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def measure_untouched(self) -> None:
        target = self.folder / UNTOUCHED / "run"
        if not self.is_main or (target / "run.json").exists():
            return
        on_gpu = torch.cuda.is_available() and self.config.device_map != "cpu"
        self.loaded.model.to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
        config = self._measuring(self.config.model)
        subject = Subject(self.loaded, self.family, inputs_for(self.loaded, config))
        self._measure(subject, config, UNTOUCHED, target)
        self.loaded.model.to("cpu")  # type: ignore[arg-type]

    def finish(self, method: Method) -> None:
        """What is not done yet of an arm."""
        folder = self.folder / method.label
        if not (folder / "model" / "config.json").exists():
            self._train(method, folder)
        PartialState().wait_for_everyone()
        if self.is_main and not (folder / "run" / "run.json").exists():
            config = self._measuring(
                str(folder / "model"), revision=None, gguf_file=None, trust_remote_code=False, allow_pickle=False
            )
            subject = subject_of(None, None, config, self.console)
            subject = replace(subject, loaded=replace(subject.loaded, name=self.loaded.name))
            self._measure(subject, config, method.label, folder / "run")
        if self.is_main:
            shutil.rmtree(folder / "training", ignore_errors=True)  # its checkpoints have done their work
        PartialState().wait_for_everyone()

    def _train(self, method: Method, folder: Path) -> None:
        model = retrofit_model(copy.deepcopy(self.loaded.model), self.family, method.name, **method.parameters)
        on_cpu = self.config.device_map == "cpu"
        history = train(model, self.blocks, self.training, folder / "training", cpu=on_cpu, console=self.console)
        if not self.is_main:
            return
        gates = gate_displacement(model)
        self.manifest["arms"][method.label]["moved"] = float(gates["displacement"].max()) if len(gates) else 0.0
        with failures(folder / "training"), no_bars():
            (folder / "tables").mkdir(exist_ok=True)
            for name, table in (("training", history), ("gates", gates)):
                shaped = shape_table(name, table, self.loaded.name, method.label, {})
                write_table(shaped, folder / "tables" / f"{name}.parquet")
            with new_folder(folder / "model") as fresh:  # last: what is there is whole
                model.save_pretrained(fresh)
                if self.loaded.tokenizer is not None:
                    self.loaded.tokenizer.save_pretrained(fresh)
            self.note()

    def _measuring(self, model: str | None, **others: Any) -> RunConfig:
        """Held-out blocks as they are: `analyze --from` repeats it."""
        options = self.config.model_dump() | {"model": model, "input": str(self.held_out), "bos": "auto"} | others
        count = min(self.config.num_seqs, len(self.blocks.held_out))
        return make_config(**options | {"num_seqs": count, "dataset": None})

    def _measure(self, subject: Subject, config: RunConfig, label: str, target: Path) -> None:
        start = time.time()
        subject = replace(subject, inputs=replace(subject.inputs, condition=label))
        tables, facts = measure(subject, config, self.console)
        manifest = make_manifest(subject, config, facts, list(tables), start)
        manifest["input"]["text"] = f"{self.blocks.name}, held out"
        with status(self.console, "drawing the figures"), new_folder(target) as fresh:
            write_run(Run(manifest, tables, target), fresh)

    def conclude(self) -> Retrofitting:
        """Everything that is there, side by side."""
        finished = [label for label in self.manifest["arms"] if (self.folder / label / "run" / "run.json").exists()]
        runs = {label: Run.open(self.folder / label / "run") for label in (UNTOUCHED, *finished)}
        training, gates = (
            pd.concat(
                [read_table(self.folder / label / "tables" / f"{name}.parquet") for label in finished],
                ignore_index=True,
            )
            for name in ("training", "gates")
        )
        comparison = compare(*runs.values())
        if self.is_main:
            compare(*runs.values(), out=self.folder / "comparison", overwrite=True)
            (self.folder / "figures").mkdir(exist_ok=True)
            save_figures(_figures(training), self.folder / "figures")
        return Retrofitting(self.folder, self.manifest, runs, comparison, training, gates)
