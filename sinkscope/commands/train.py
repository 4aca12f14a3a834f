"""`train`: a small model from scratch, plainly and with each method, as in GS's and VGA's comparisons of pretraining.

OUT/ is a workshop's folder (workshop.py). Each arm keeps the model at every so many steps in OUT/ARM/checkpoints/,
which `sinkscope analyze OUT/ARM/checkpoints` reads one after another. With several seeds an arm is none-seed0,
none-seed1, …; all methods start from the same weights of each seed, and read the same text.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from sinkscope.commands.result import Result
from sinkscope.commands.retrofit import manifest_of, split_options
from sinkscope.commands.workshop import Workshop, check_folder, check_methods
from sinkscope.errors import InputError
from sinkscope.measuring.console import status, tell
from sinkscope.measuring.subject import family_of
from sinkscope.models.loading import LoadedModel, load_tokenizer
from sinkscope.options.output import OutputOptions
from sinkscope.options.training import TrainOptions
from sinkscope.report.trained import Trained
from sinkscope.text.sources import documents
from sinkscope.training.architectures import ARCHITECTURES, architecture, fresh_model
from sinkscope.training.arms import Methods, one_each, parse_methods, with_seeds
from sinkscope.training.blocks import check_text, is_written, read_blocks
from sinkscope.training.tasks.lab import BackcopyLab
from sinkscope.training.tokenizer import tokenizer_of
from sinkscope.training.trainer import launched

MANIFEST = "train.json"
METHODS = ("none", "vscale")  # GS's figure 5
NOT_OPTIONS = ("model", "revision", "gguf_file", "trust_remote_code", "allow_pickle", "only_new")


def command(options: TrainOptions, output: OutputOptions) -> Result:
    given = {name: getattr(options, name) for name in options.model_fields_set - {"config", "method"}}
    assert output.out is not None
    done = train(options.config, options.method, **output.where, **given)
    return Result(done, done.verdict, notes=done.notes, folder=output.out) if done.is_main else Result(done)


def check(options: TrainOptions) -> None:
    """What can be wrong with the options of a recipe, before a model is loaded. Raises: InputError."""
    parse_methods(options.method)
    check_source(options.text)
    architecture(options.config)


def train(
    config: str | os.PathLike[str] = "tiny-llama",
    methods: Methods = METHODS,
    *,
    out: str | os.PathLike[str],
    text: str | os.PathLike[str] = "natural",
    dataset: str | None = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    seeds: int = 1,
    overwrite: bool = False,
    quiet: bool = True,
    **options: Any,
) -> Trained:
    """Train a model from random weights with each of the `methods`, and measure all of them on held-out text.

    `config` is a name of `ARCHITECTURES` or a config.json. `text` and `dataset` are as for `retrofit`, and `text` may
    be "bigram-backcopy", the lab's task. The tokenizer is one of the hub's or a folder's, or else made from the text,
    with as many tokens as the configuration has. `seeds`: how often everything is repeated, from `seed` on. `options`
    are those of TrainingConfig, with the defaults of PRETRAINING, and those of `analyze` for measuring. New parameters
    learn as fast as all others unless `new_learning_rate` is given.

    Errors: as for `retrofit`; also InputError for a configuration or tokenizer that does not exist.
    """
    wanted = parse_methods(methods)
    _check_options(options, seeds)
    training, measuring = split_options("train", None, with_defaults(options))
    launched(cpu=measuring.device_map == "cpu")
    text = os.fspath(text)
    check_source(text)
    lab = _lab(text, dataset, tokenizer)
    shape = architecture(config)
    name = config if config in ARCHITECTURES else Path(config).expanduser().resolve().stem
    manifest = manifest_of("train", measuring, training, text, dataset) | {
        "architecture": shape.to_diff_dict(),
        "tokenizer": getattr(tokenizer, "name_or_path", tokenizer and os.fspath(tokenizer)),
        "seeds": seeds,
    }
    folder = check_folder(Path(out) / MANIFEST, manifest, overwrite)
    console = Console(stderr=True, quiet=quiet or not PartialState().is_main_process)
    with status(console, "making the tokenizer"):
        tokens = lab.tokenizer if lab else _tokenizer(tokenizer, text, dataset, shape.vocab_size)
    _fit(shape, tokens)
    loaded = LoadedModel(fresh_model(shape, training.seed), tokens, str(name), str(config), None, None, ())
    family, notices = family_of(loaded.model)
    tell(console, notices)
    check_methods(wanted, loaded.model, family, training)
    count = training.blocks_wanted(PartialState().num_processes)
    with status(console, "reading the text"):
        blocks = (
            lab.blocks(training.block_length, count, measuring.num_seqs, training.seed)
            if lab
            else read_blocks(loaded, text, dataset, training.block_length, count, training.eval_share)
        )
    workshop = Workshop(
        folder,
        MANIFEST,
        loaded,
        family,
        blocks,
        training,
        measuring,
        console,
        lambda arm: fresh_model(shape, arm.seed),
        keeps_steps=True,
        lab=lab,
    )
    drawn = range(training.seed, training.seed + seeds)
    arms = with_seeds(wanted, drawn) if seeds > 1 else one_each(wanted, training.seed)
    return workshop.finish(arms, manifest, overwrite, untouched=False)


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of training from scratch, where they are not given."""
    rate = options.get("learning_rate", TrainOptions.defaults["learning_rate"])
    return (
        {k: v for k, v in TrainOptions.defaults.items() if k != "method"} | {"new_learning_rate": rate} | dict(options)
    )


def check_source(text: str) -> None:
    """Cheap, before anything is made. Errors: InputError for a text that `train` cannot read."""
    if text == "sampled":
        raise InputError("--text sampled: a model with random weights has nothing to say; name a text file")
    if text != BackcopyLab.name:
        check_text(text)


def _check_options(options: dict[str, Any], seeds: int) -> None:
    for name in NOT_OPTIONS:
        if name in options:
            raise InputError(f"--{name.replace('_', '-')} does not go with `train`, which begins with random weights")
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: it must be at least 1")


def _lab(text: str, dataset: str | None, tokenizer: object) -> BackcopyLab | None:
    """Where the text is a task. Errors: InputError for what it has of its own."""
    if text != BackcopyLab.name:
        return None
    for name, given in (("dataset", dataset), ("tokenizer", tokenizer)):
        if given is not None:
            raise InputError(f"--text {text} has its own {name}: leave --{name} out")
    return BackcopyLab()


def _tokenizer(
    wanted: str | os.PathLike[str] | PreTrainedTokenizerBase | None, text: str, dataset: str | None, vocab_size: int
) -> PreTrainedTokenizerBase | None:
    """As named, or made from the text; None where the text is token ids."""
    if isinstance(wanted, PreTrainedTokenizerBase):
        return wanted
    if wanted is not None:
        return load_tokenizer(os.fspath(wanted))
    return tokenizer_of(documents(text, dataset)[1], vocab_size) if is_written(text, dataset) else None


def _fit(shape: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """The vocabulary and its special tokens are the tokenizer's."""
    if tokenizer is None:
        return
    shape.vocab_size = len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(shape, name, getattr(tokenizer, name))
