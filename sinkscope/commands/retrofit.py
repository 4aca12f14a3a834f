"""`retrofit`: a model trained with each method, and plainly, and all measured by the same code on held-out text.

OUT/ is a workshop's folder (workshop.py), and has

OUT/untouched/run/    a run folder of the model as it is
"""

import copy
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.result import Result
from sinkscope.commands.workshop import Workshop, check_folder, check_methods
from sinkscope.errors import InputError
from sinkscope.measuring.console import status, tell
from sinkscope.measuring.subject import ModelLike, family_of, loaded_model, options_of
from sinkscope.options.measuring import RunConfig
from sinkscope.options.output import OutputOptions
from sinkscope.options.training import RetrofitOptions, TrainingConfig, make_training_config
from sinkscope.report.trained import Trained
from sinkscope.training.arms import Methods, one_each, parse_methods
from sinkscope.training.blocks import check_text, read_blocks
from sinkscope.training.trainer import launched

MANIFEST = "retrofit.json"
METHODS = ("vga", "none")  # VGA's table 3


def command(options: RetrofitOptions, output: OutputOptions) -> Result:
    given = {name: getattr(options, name) for name in options.model_fields_set - {"model", "method"}}
    assert output.out is not None
    done = retrofit(options.model, options.method, **output.where, **given)
    return Result(done, done.verdict, notes=done.notes, folder=output.out) if done.is_main else Result(done)


def check(options: RetrofitOptions) -> None:
    """What can be wrong with the options of a recipe, before a model is loaded. Raises: InputError."""
    parse_methods(options.method)
    check_text(options.text)


def retrofit(
    model: ModelLike = None,
    methods: Methods = METHODS,
    *,
    out: str | os.PathLike[str],
    text: str | os.PathLike[str] = "natural",
    dataset: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    **options: Any,
) -> Trained:
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
    training, config = split_options("retrofit", model, options)
    launched(cpu=config.device_map == "cpu")
    text = os.fspath(text)
    check_text(text)
    manifest = manifest_of("retrofit", config, training, text, dataset)
    folder = check_folder(Path(out) / MANIFEST, manifest, overwrite)
    console = Console(stderr=True, quiet=quiet or not PartialState().is_main_process)
    with status(console, "loading the model"):
        loaded = loaded_model(model, tokenizer, config.model_copy(update={"device_map": "cpu"}))
    family, notices = family_of(loaded.model)
    tell(console, (*loaded.notices, *notices))
    check_methods(wanted, loaded.model, family, training)
    count = training.blocks_wanted(PartialState().num_processes)
    with status(console, "reading the text"):
        blocks = read_blocks(
            loaded, text, dataset, training.block_length, count, training.eval_share, seed=training.seed
        )
    workshop = Workshop(
        folder, MANIFEST, loaded, family, blocks, training, config, console, lambda arm: copy.deepcopy(loaded.model)
    )
    return workshop.finish(one_each(wanted, training.seed), manifest, overwrite, untouched=True)


def split_options(command: str, model: ModelLike, options: Mapping[str, Any]) -> tuple[TrainingConfig, RunConfig]:
    """How to train, and how to load and measure. In float32: at a fine-tune's learning rate most steps are too small
    for the weights of bfloat16 to change at all.

    Errors: InputError for wrong options.
    """
    ours = {name: value for name, value in options.items() if name in TrainingConfig.model_fields}
    training = make_training_config(**ours)
    rest = {name: value for name, value in options.items() if name not in TrainingConfig.model_fields}
    for name in ("input", "seq_len", "bos"):
        if name in rest:
            raise InputError(f"--{name.replace('_', '-')} does not go with `{command}`: it measures on held-out text")
    config = options_of(
        RunConfig, model, {"dtype": "float32"} | rest | {"seq_len": training.block_length, "seed": training.seed}
    )
    if config.dtype == "float16":
        raise InputError("--dtype float16: gradients overflow in it; take float32, with --bf16 for speed")
    if config.device_map == "auto":
        raise InputError("--device-map auto: a model that is trained stays on one GPU; take cuda or cpu")
    return training, config


def manifest_of(
    command: str, config: RunConfig, training: TrainingConfig, text: str, dataset: str | None
) -> dict[str, Any]:
    """All that decides the numbers of either command."""
    return {
        "sinkscope": version("sinkscope"),
        "command": command,
        "config": config.model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "text": text,
        "dataset": dataset,
        "processes": PartialState().num_processes,
    }
