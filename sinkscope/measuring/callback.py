"""`SinkCallback`: sinks, massive activations and distances to overflow in the logs of transformers' Trainer.

OUTPUT_DIR/sinks/run.json                             opened by `sinkscope show` and `sinkscope compare`
OUTPUT_DIR/sinks/tables/training.parquet              every metric by layer and step
OUTPUT_DIR/sinks/tables/largest_activations.parquet   the largest activation of each step, with coordinate and token
OUTPUT_DIR/sinks/tables/largest_logits.parquet        the largest logit of each head and step
"""

import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from math import isnan, nan
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import pandas as pd
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback

from sinkscope.attention.seam import open_seam
from sinkscope.errors import InputError, SinkscopeError, explained
from sinkscope.measuring.measure import described_input
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.passes import first_size
from sinkscope.measuring.subject import Subject, inputs_for, load_model, row_or_calibrated
from sinkscope.measuring.tables import publish
from sinkscope.measuring.tracer import model_inputs
from sinkscope.measuring.watching import Watched
from sinkscope.models.family import Family
from sinkscope.models.in_memory import same_random_numbers, undisturbed
from sinkscope.models.loading import LoadedModel
from sinkscope.options.given import Given
from sinkscope.options.measuring import SEQ_LEN, ObservableOptions, RunConfig, make_config
from sinkscope.options.records import ENTRIES
from sinkscope.options.signatures import spelled_for_python
from sinkscope.results.findings import SINK, USUAL
from sinkscope.results.manifest import CALLBACK_TRAINING, make_manifest, write_manifest
from sinkscope.results.metrics import notice_without_rate
from sinkscope.results.tables import TRAINING_TABLES, WHOLE_MODEL, of_whole_model, read_table, write_tables
from sinkscope.text.inputs import TokenInputs

FOLDER = "sinks"  # in the Trainer's output_dir
HELD_OUT, TRAINED_ON, NATURAL = "held-out", "training-set", "natural"  # conditions in tables: what was measured
OBSERVED = ("attention", "geometry", "massive", "outlier", "largest-logit")
LOGGED = (
    "sink_rate",
    "uniform_mass",
    "value_drain",
    "kurtosis",
    "massive_share",
    "largest_activation",
    "largest_logit",
)
HEADROOMS = {"float16_headroom": torch.float16, "float8_headroom": torch.float8_e4m3fn}
# metric → message for its onset, and the condition on the metrics of a step
ONSETS: Mapping[str, tuple[str, Callable[[Mapping[str, float]], bool]]] = {
    "sink_rate": ("the model has a sink", lambda of: 100 * of["sink_rate_clear"] > SINK),
    "massive_share": ("the model has massive activations", lambda of: of["massive_share"] >= USUAL),
}
SEQUENCES = 32  # also of the probe of `train`
DEFAULT_EPSILON = RunConfig.model_fields["epsilon"].default
Found = TypeVar("Found")
Tables = dict[str, pd.DataFrame]


class Onset(NamedTuple):
    """A sink, or massive activations, that a training has got since the last measurement."""

    metric: str  # sink_rate, or massive_share
    step: int
    value: float
    message: str


def warn_onset(onset: Onset) -> None:
    warnings.warn(onset.message, stacklevel=2)


class SinkCallback(TrainerCallback):
    """Measures the model every N steps of transformers' Trainer, without influence on the training.

        trainer = Trainer(model, args, train_dataset=…, callbacks=[sinkscope.SinkCallback(every=100)])
        trainer.train()
        # sinkscope show OUTPUT_DIR/sinks

    Sink rate, value drain, kurtosis, the largest activation, the largest logit, and how far float16 and float8 are from
    overflow go into the Trainer's logs as `sinks/sink_rate`, …, and from there to TensorBoard, W&B and any other
    `report_to`; so does the step at which a sink or massive activations appear (`sinks/onset_sink_rate`, …). `curves`
    has the metrics by step. `OUTPUT_DIR/sinks` has every metric by layer, and the largest activation's layer,
    coordinate and token; `sinkscope.compare(OUTPUT_DIR/sinks, out=…)` draws the curves, also as PDF.
    Weights, optimizer, random numbers and the training mode of modules stay bit for bit as without it. A resumed
    training goes on with its curves. The first of several processes measures while the others wait at their next
    exchange; a model whose weights are sharded (FSDP) is not measured, which a warning says. Loops other than the
    Trainer's use `sinkscope.watch`.

    Args:
        every: Steps from one measurement to the next. The first and the last step are measured, too.
        texts: The texts to measure: strings, sequences of token ids, a dataset with `input_ids` or `text`, or as
            `--input` of the command line. None: the Trainer's eval_dataset or, without one, the first rows of its
            train_dataset, which is not used up. If these have no texts, a warning says so, and the text that comes
            with sinkscope is measured. run.json records what was read, with position 0.
        num_seqs: The number of texts.
        seq_len: Tokens of each.
        epsilon: A sink has a window mass above this.
        on_onset: Called with an `Onset` when a sink, or massive activations, are there and were not in the measurement
            before; by default a warning. The thresholds are those of the verdict: a sink rate above 10 %, clear of
            uniform attention, and massive activations in a layer in at least half of the texts.
    """

    def __init__(
        self,
        every: int = 100,
        texts: Any = None,
        *,
        num_seqs: int = SEQUENCES,
        seq_len: int = SEQ_LEN,
        epsilon: float = DEFAULT_EPSILON,
        on_onset: Callable[[Onset], object] = warn_onset,
    ) -> None:
        if every < 1:
            raise InputError(f"every={every}: at least 1 step is needed from one measurement to the next")
        self.every, self.texts, self.on_onset = every, texts, on_onset
        self.options: dict[str, Any] = {"num_seqs": num_seqs, "seq_len": seq_len, "epsilon": epsilon}
        with spelled_for_python(RunConfig):
            make_config(**self.options)
        self.tables: Tables = {}  # tables over all measured steps
        self._subject: Subject | None = None  # None: nothing is measured
        self._trainer: Trainer | None = None
        self._start = time.time()

    @property
    def curves(self) -> pd.DataFrame:
        """The metrics of the whole model: a row for each measured step, a column for each metric."""
        training = self.tables.get("training", pd.DataFrame(columns=["layer", "step", "metric", "value"]))
        return training[training["layer"] == WHOLE_MODEL].pivot(index="step", columns="metric", values="value")

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **_: Any
    ) -> None:
        self._trainer, self._subject = _calling_trainer(), None
        if not state.is_world_process_zero:
            return
        self.folder = Path(args.output_dir, FOLDER)
        paths = [self.folder / "tables" / f"{name}.parquet" for name in TRAINING_TABLES if state.global_step]
        earlier = {path.stem: read_table(path) for path in paths if path.is_file()}  # tables of a resumed training
        self.tables = {name: table[table["step"] <= state.global_step] for name, table in earlier.items()}
        try:
            loaded = load_model(model, getattr(processing_class, "tokenizer", processing_class), make_config())
            with undisturbed(loaded.model), same_random_numbers():
                family, notices = row_or_calibrated(loaded.model)
                check_beforehand(loaded.model, family, is_calibrated=bool(notices))
            self._subject = Subject(loaded, family, self._inputs_for(loaded, family))
        except SinkscopeError as error:
            warnings.warn(f"SinkCallback measures nothing: {error}", stacklevel=2)
        if not self.tables:
            self._measure(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps:
            self._measure(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer = self._subject = None

    def _inputs_for(self, loaded: LoadedModel, family: Family) -> TokenInputs:
        """Return the texts to measure, whose condition says where they are from. Raises InputError."""

        def read(texts: Any, what: str, condition: str) -> TokenInputs:
            inputs = inputs_for(loaded, make_config(**self.options, input=texts), family)
            return replace(inputs, condition=condition, said=f"{what}: {inputs.said}")

        count, trainer = self.options["num_seqs"], self._trainer
        if self.texts is not None:
            return read(_first(self.texts, count), "texts", HELD_OUT)
        if (held_out := getattr(trainer, "eval_dataset", None)) is not None:
            return read(_first(held_out, count, is_training=True), "evaluation set", HELD_OUT)
        if (trained_on := getattr(trainer, "train_dataset", None)) is not None:
            try:
                return read(_first(trained_on, count, is_training=True), "training set", TRAINED_ON)
            except SinkscopeError as error:
                message = f"SinkCallback measures sinkscope's own text, for want of another: the training set: {error}"
                warnings.warn(message, stacklevel=2)
        return read(NATURAL, "sinkscope's own text", NATURAL)

    def _measure(self, args: Any, state: Any, control: Any) -> None:
        """Measure the model, write all tables, and pass the step's numbers to the reporters, as `Trainer.log` does."""
        subject, step = self._subject, state.global_step
        if subject is None:
            return
        try:
            tables = run_probe(subject.loaded.model, lambda _: self._tables_of(subject))
        except SinkscopeError as error:  # such as NaN, which the Trainer itself reports
            warnings.warn(f"SinkCallback has not measured step {step}: {error}", stacklevel=2)
            return
        inputs = subject.inputs
        new = {name: table.assign(step=step, seed=args.seed) for name, table in tables.items()}
        new = publish(new, subject.loaded, inputs.condition)
        before = _whole(self.tables["training"]) if self.tables else {}
        self.tables = {name: pd.concat([self.tables[name], new[name]]) if self.tables else new[name] for name in new}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "index.html").unlink(missing_ok=True)  # the page lacks this step
        write_tables(self.tables, self.folder)
        facts = {"model": subject.loaded.name, "condition": inputs.condition, "sequences": len(inputs)}
        facts |= {"input": described_input(inputs)}
        config = self.options | {"every": self.every}
        write_manifest(self.folder, make_manifest(CALLBACK_TRAINING.name, config, self._start, self.tables, **facts))
        metrics = _whole(new["training"])
        if not before and (notice := notice_without_rate(metrics, self.options["epsilon"])):
            warnings.warn(f"SinkCallback logs {notice}", stacklevel=2)
        logs = {name: metrics[name] for name in (*LOGGED, *HEADROOMS) if not isnan(metrics.get(name, nan))}
        onsets = [
            Onset(
                name,
                step,
                metrics[name],
                f"{what} at step {step}: {name} is {metrics[name]:.3g}, and was {before[name]:.3g}",
            )
            for name, (what, is_there) in ONSETS.items()
            if name in before and name in metrics and is_there(metrics) and not is_there(before)
        ]
        logs |= {f"onset_{onset.metric}": step for onset in onsets}
        logs = {f"{FOLDER}/{name}": float(value) for name, value in logs.items()} | {"epoch": state.epoch or 0.0}
        state.log_history.append({**logs, "step": step})
        if self._trainer is not None:
            should_log = control.should_log  # a loss may be due at this step, too
            self._trainer.callback_handler.on_log(args, state, control, logs)
            control.should_log = should_log
        for onset in onsets:
            self.on_onset(onset)

    def _tables_of(self, subject: Subject) -> Tables:
        model, family = subject.loaded.model, subject.family
        names = tuple(name for name in OBSERVED if OBSERVABLES[name].inapplicable(model, family) is None)
        seen = Watched(subject.loaded, family, ObservableOptions(observables=names, epsilon=self.options["epsilon"]))
        with open_seam(model, family), seen.watching():
            for batch in subject.inputs.batches(first_size(subject.inputs, model, "auto")):
                model(**model_inputs(model, batch, False, family.first_position))
        if seen.skipped:
            raise SinkscopeError(next(iter(seen.skipped)))
        tables = seen.tables
        largest = seen.massive
        massive = tables["massive"].query("is_massive").groupby("layer")["sequence"].nunique()
        whole = {
            "largest_activation": abs(largest.value),
            "massive_share": massive.max() / len(subject.inputs) if len(massive) else 0.0,
            **{name: torch.finfo(dtype).max / max(abs(largest.value), 1e-30) for name, dtype in HEADROOMS.items()},
        }
        rows = pd.DataFrame({"layer": WHOLE_MODEL, "metric": list(whole), "value": list(whole.values())})
        made = {
            "training": pd.concat([tables["summary"][["layer", "metric", "value"]], rows], ignore_index=True),
            "largest_activations": pd.DataFrame([largest]),
        }
        logits = tables.get("largest_logit", pd.DataFrame())
        return made | ({"largest_logits": logits} if len(logits) else {})


def _first(texts: Any, count: int, is_training: bool = False) -> Any:
    """Return the first texts of a dataset, and leave it and all random numbers as they are; a name stays a name.

    InputError if a dataset of the training (`is_training`) can be read only once, or fails.
    """
    if isinstance(texts, str | Path):
        return texts
    if isinstance(texts, Mapping) and texts.keys().isdisjoint(ENTRIES):  # several evaluation sets by name
        texts = next(iter(texts.values()))
    if isinstance(texts, Mapping):  # the output of a tokenizer
        return texts
    with explained("the dataset cannot be read"), same_random_numbers(texts):
        if isinstance(texts, pd.DataFrame):
            return list(islice(Given(texts).rows(), count))
        is_stream = isinstance(texts, IterableDataset)  # its `__getitem__` fails, and it may have a length
        if hasattr(texts, "__getitem__") and hasattr(texts, "__len__") and not is_stream:
            rows = [texts[row] for row in range(min(count, len(texts)))]
            is_one = rows and (isinstance(rows[0], int) or getattr(rows[0], "ndim", 1) == 0)
            return texts if is_one else rows  # ids of one text
        if is_training:  # reading a copy takes nothing from the training: an iterator has none
            with explained("it can be read only once: give SinkCallback its texts"):
                texts = copy.deepcopy(texts)
        return list(islice(texts, count))


def _whole(training: pd.DataFrame) -> dict[str, float]:
    """Return the metrics of the whole model at the last step of the table `training`."""
    return of_whole_model(training[training["step"] == training["step"].max()])


def _calling_trainer() -> Trainer | None:
    """Return the Trainer that calls: callbacks are not given it, and reporters come before other callbacks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None


def run_probe(model: PreTrainedModel, probe: Callable[[PreTrainedModel], Found]) -> Found:
    """Run a probe without influence on the training: eval mode, not compiled, no autocast, separate random numbers."""
    with undisturbed(model), same_random_numbers(), torch.no_grad():
        return probe(model)
