"""`retrofit`: a model trained with each method, and plainly, all measured by the same code on held-out text.

training_arms.py says what OUT/ holds.
"""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.training_arms import Plan, TrainingArms
from sinkscope.errors import InputError
from sinkscope.measuring.console import status, tell
from sinkscope.measuring.subject import ModelLike, config_of, family_of, loaded_model
from sinkscope.options.measuring import RunConfig
from sinkscope.options.training import TrainingConfig, make_training_config
from sinkscope.report.trained import Trained
from sinkscope.training.arms import Methods, one_each, parse_methods
from sinkscope.training.blocks import check_text, read_blocks
from sinkscope.training.sharding import launched

METHODS = ("vga", "none")  # VGA's table 3


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
    """Retrofit and train a model with each method, and measure all of them and the model itself on held-out text.

    Every method begins with the model as it is. Under `accelerate launch` this trains on all processes, and measures
    on the first. The same call again continues where it was interrupted.

    Args:
        model: a hub id, a folder, a .gguf file, or a model already loaded; None for the demo model.
        methods: "vga,none", "vga:placement=output", several such texts, or label → method.
        out: the folder to write.
        text: "natural", a file, or "sampled" by the model.
        dataset: a HuggingFace dataset in place of `text`.
        tokenizer: of a model already loaded.
        overwrite: begin anew, and replace what is in `out`.
        quiet: say nothing meanwhile.
        **options: of TrainingConfig, and those of `analyze` for loading and measuring.

    Returns:
        The runs, their comparison, tables and figures.

    Raises:
        InputError: wrong options, a method that does not apply, a text that is too short, or a folder made with other
            options; nothing has been trained.
        SinkscopeError: a training failed. What was reached stays in `out`.
    """
    wanted = parse_methods(methods)
    training, config = split_options("retrofit", model, options)
    launched(cpu=config.device_map == "cpu")
    text = os.fspath(text)
    check_text(text)
    plan = make_plan("retrofit", out, config, training, overwrite, quiet, text=text, dataset=dataset)
    plan.check_folder()
    with status(plan.console, "loading the model"):
        loaded = loaded_model(model, tokenizer, config.model_copy(update={"device_map": "cpu"}))
    family, notices = family_of(loaded.model)
    tell(plan.console, (*loaded.notices, *notices))
    plan.check_methods(wanted, loaded.model, family)
    count = training.blocks_wanted(PartialState().num_processes)
    with status(plan.console, "reading the text"):
        blocks = read_blocks(
            loaded, text, dataset, training.block_length, count, training.eval_share, seed=training.seed
        )
    arms = TrainingArms(plan, loaded, family, blocks, begin=lambda arm: copy.deepcopy(loaded.model))
    return arms.finish(one_each(wanted, training.seed), untouched=True)


def make_plan(
    command: str,
    out: str | os.PathLike[str],
    config: RunConfig,
    training: TrainingConfig,
    overwrite: bool,
    quiet: bool,
    **options: Any,
) -> Plan:
    """The plan of either command; `options` are those of its own."""
    state = PartialState()
    configs = {"config": config.model_dump(mode="json"), "training": training.model_dump(mode="json")}
    decisive = configs | options | {"processes": state.num_processes}
    console = Console(stderr=True, quiet=quiet or not state.is_main_process)
    return Plan(command, Path(out), decisive, training, config, overwrite, console)


def split_options(command: str, model: ModelLike, options: Mapping[str, Any]) -> tuple[TrainingConfig, RunConfig]:
    """Split a command's options into how to train, and how to load and measure.

    In float32: at a fine-tune's learning rate most steps are too small for the weights of bfloat16 to change.

    Raises:
        InputError: an option is wrong.
    """
    ours = {name: value for name, value in options.items() if name in TrainingConfig.model_fields}
    training = make_training_config(**ours)
    rest = {name: value for name, value in options.items() if name not in TrainingConfig.model_fields}
    for name in ("input", "seq_len", "bos"):
        if name in rest:
            raise InputError(f"--{name.replace('_', '-')} does not go with `{command}`: it measures on held-out text")
    config = config_of(model, {"dtype": "float32"} | rest | {"seq_len": training.block_length, "seed": training.seed})
    if config.dtype == "float16":
        raise InputError("--dtype float16: gradients overflow in it; take float32, with --bf16 for speed")
    if config.device_map == "auto":
        raise InputError("--device-map auto: a model that is trained stays on one GPU; take cuda or cpu")
    return training, config
