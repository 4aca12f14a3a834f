"""What every command measures: a model, its family, and the tokens that it reads."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sinkscope.attention.position_kinds import with_positions
from sinkscope.errors import InputError
from sinkscope.measuring.console import print_notices, spinner
from sinkscope.measuring.observables import check_names
from sinkscope.models import loading
from sinkscope.models.families import Family, embedding_weight, find_family
from sinkscope.models.in_memory import undisturbed, unwrapped
from sinkscope.models.loading import LoadedModel
from sinkscope.models.wiring import calibrate
from sinkscope.options.measuring import ObservableOptions, RunConfig
from sinkscope.options.option import checked
from sinkscope.retrofits.registers import registers_before
from sinkscope.text.inputs import TokenInputs, build_inputs
from sinkscope.text.sources import check_source

SAMPLED_AT_ONCE = 64  # texts
MOST_SAMPLES = 20  # drawn for each text that is needed

# How users name a model: hub id, folder, .gguf file, or a model that is loaded (also behind a wrapper that
# models/in_memory.py knows); None is the demo model.
ModelLike = str | os.PathLike[str] | nn.Module | LoadedModel | None

Asked = TypeVar("Asked", bound=ObservableOptions)


@dataclass(frozen=True)
class Subject:
    """A model, its row in the table of families, and its inputs."""

    loaded: LoadedModel
    family: Family
    inputs: TokenInputs


def options_of(kind: type[Asked], model: ModelLike, given: Mapping[str, Any]) -> Asked:
    """The options of a command from those given in Python.

    Raises:
        InputError: an option does not exist, or its value is not allowed.
    """
    named = model if isinstance(model, str | os.PathLike) else None
    return checked(kind, {"model": named and os.fspath(named)} | dict(given))


def check_config(config: RunConfig) -> None:
    """Find what is wrong with the options before minutes of loading. Raises: InputError."""
    check_names(config.observables)
    check_source(config.input)


@contextmanager
def open_subject(
    model: ModelLike, tokenizer: PreTrainedTokenizerBase | None, config: RunConfig, console: Console
) -> Iterator[Subject]:
    """Load the model and make its inputs; notices of both go to the console. A model that was loaded already is as it
    was at the end of the block.

    Raises:
        InputError: the model, its architecture or the input cannot be used.
        SinkscopeError: network, memory or a package fails.
    """
    with spinner(console, "loading the model"):
        loaded = load_model(model, tokenizer, config)
    with undisturbed(loaded.model):
        family, notices = family_of(loaded.model)
        inputs = inputs_for(loaded, config)
        print_notices(console, (*loaded.notices, *notices, *inputs.notices))
        yield Subject(loaded, family, inputs)


def load_model(model: ModelLike, tokenizer: PreTrainedTokenizerBase | None, config: RunConfig) -> LoadedModel:
    """A model that is loaded already, or the one that the configuration names. Raises as `loading.load` does."""
    if isinstance(model, LoadedModel):
        return replace(model, model=unwrapped(model.model))
    if model is not None and not isinstance(model, str | os.PathLike):
        network = unwrapped(model)
        name = network.config.name_or_path or type(network).__name__
        return LoadedModel(network, tokenizer, name, name, None, None, ())
    return loading.load(
        config.model,
        revision=config.revision,
        gguf_file=config.gguf_file,
        dtype=config.dtype,
        device_map=config.device_map,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )


def family_of(model: PreTrainedModel) -> tuple[Family, list[str]]:
    """The model's row in the table of families, or a row calibrated for it, with a notice that says so."""
    try:
        return with_positions(model, find_family(model)), []
    except InputError as missing:
        try:
            vocabulary = len(embedding_weight(model))
            if vocabulary == 0:
                raise InputError("it has no token embeddings")
            few = torch.arange(3, 11, device=model.device)[None] % vocabulary
            family = with_positions(model, calibrate(model, few))
        except InputError as error:
            raise InputError(f"{missing}\n{error}") from None
        note = f"'{family.name}' has no row in the table of families: wired numerically as {family.wiring}"
        return family, [note]


def inputs_for(loaded: LoadedModel, config: RunConfig) -> TokenInputs:
    """The run's token sequences, which fit the model's vocabulary and positions."""
    text = loaded.model.config.get_text_config()
    end = getattr(text, "eos_token_id", None)
    ends = end if isinstance(end, list) else [end]
    return build_inputs(
        config.input,
        vocab_size=embedding_weight(loaded.model).shape[0],
        tokenizer=loaded.tokenizer,
        dataset=config.dataset,
        prompt=config.prompt,
        max_positions=position_limit(loaded.model),
        num_seqs=config.num_seqs,
        seq_len=config.seq_len,
        bos=config.bos,
        bos_token_id=getattr(text, "bos_token_id", None),
        special_ids=(getattr(text, "pad_token_id", None), *ends),
        seed=config.seed,
        sampler=partial(_sample, loaded.model),
    )


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest sequence that a model's configuration allows, without its registers; None where it names none."""
    text = model.config.get_text_config()
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((limit - registers_before(model) for limit in limits if limit), None)


@torch.no_grad()
def _sample(model: PreTrainedModel, first: int, count: int, length: int, seed: int) -> np.ndarray:
    """Texts (count, length) drawn from the model's own distribution after the token `first`.

    Texts that end sooner are left out: to forbid the end instead gives text that the model finds most unlikely.
    """
    ends = model.generation_config.eos_token_id
    # a checkpoint's own settings (top-k, temperature) would draw from another distribution
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length - 1, pad_token_id=first, eos_token_id=ends
    )  # fmt: skip
    start = torch.full((SAMPLED_AT_ONCE, 1), first, device=model.device)
    end_ids = torch.as_tensor(ends if ends is not None else [], device=model.device)
    texts: list[np.ndarray] = []
    with torch.random.fork_rng(), _without_settings(model):
        torch.manual_seed(seed)
        for _ in range(MOST_SAMPLES * count // SAMPLED_AT_ONCE + 1):
            mask = torch.ones_like(start)
            drawn = model.generate(start, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
            if drawn.shape[1] == length:
                ended = torch.isin(drawn[:, 1:-1], end_ids)
                texts += list(drawn[~ended.any(1)].cpu().numpy())
            if len(texts) >= count:
                return np.stack(texts[:count])
    raise InputError(
        f"--input sampled: only {len(texts)} of {count} texts reached {length} tokens: take a shorter --seq-len"
    )


@contextmanager
def _without_settings(model: PreTrainedModel) -> Iterator[None]:
    """No settings of its own, from which `generate` takes what is not given to it, until the end of the block."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
