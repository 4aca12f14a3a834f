"""The subject of every command: a model, its family, and the tokens that it reads."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from sinkscope.attention.position_kinds import with_positions
from sinkscope.attention.seam import unread_attentions
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import print_line, print_notices, spinner
from sinkscope.measuring.memory import Memory, room
from sinkscope.measuring.observables import OBSERVABLES, check_names
from sinkscope.measuring.processes import team
from sinkscope.models import loading
from sinkscope.models.calibrate import calibrate
from sinkscope.models.edits import unknown_code
from sinkscope.models.families import find_family, row_mismatch
from sinkscope.models.family import (
    Family,
    check_reads_text,
    embedding_weight,
    input_device,
    number_of_positions,
    placeholders,
    rotary_limits,
    token_head,
    tower_notice,
    vocabulary,
)
from sinkscope.models.in_memory import drawing, same_random_numbers, unchanged_after, undisturbed, unwrapped
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import SEQ_LEN, DeviceOptions, RunConfig
from sinkscope.options.option import Options, checked
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.inputs import TokenInputs, build_inputs, masked
from sinkscope.text.sources import check_source

SAMPLED_AT_ONCE = 64  # texts
MOST_SAMPLES = 20  # texts drawn for each text that is needed

# How users name a model: hub id, folder, .gguf file, or a loaded model (also in a wrapper that models/in_memory.py
# supports); None is the demo model.
ModelLike = str | os.PathLike[str] | nn.Module | LoadedModel | None

Asked = TypeVar("Asked", bound=Options)


@dataclass(frozen=True)
class Subject:
    """A model, its row in the table of families, and its inputs."""

    loaded: LoadedModel
    family: Family
    inputs: TokenInputs
    memory: Memory | None = None  # what a run on it needs; None where no options of a command were given

    @property
    def without_loss(self) -> str | None:
        """Return the reason why this model has no loss on these inputs, or None if it has one."""
        reason = without_head_or_mask(self.loaded, self.family)
        if reason is not None or self.inputs.num_predicted or self.family.causal:
            return reason
        return "none of the tokens was drawn to be masked: take more or longer texts"

    def need_loss(self) -> None:
        """Raise InputError if this model has no loss on these inputs."""
        if self.without_loss is not None:
            raise InputError(f"{self.loaded.name} has no loss: {self.without_loss}")


def without_head_or_mask(loaded: LoadedModel, family: Family) -> str | None:
    """Return why a model cannot predict tokens, or an encoder masked ones; None if it can."""
    if token_head(loaded.model) is None:
        return f"it is {'a decoder' if family.causal else 'an encoder'} without a head that predicts tokens"
    if family.causal:
        return None
    if getattr(loaded.tokenizer, "mask_token", None) is None:
        return "an encoder's loss is of masked tokens, and it has no tokenizer that names a mask token"
    return None


def options_of(kind: type[Asked], model: ModelLike, arguments: Mapping[str, Any]) -> Asked:
    """Make the options of a command from the keyword arguments of its Python function. Raises InputError."""
    named = model if isinstance(model, str | os.PathLike) else None
    return checked(kind, {"model": named and os.fspath(named)} | dict(arguments))


def check_config(config: RunConfig) -> None:
    """Check options before the model is loaded, which may take minutes. Raises InputError."""
    check_names(config.observables)
    check_source(config.input)


@contextmanager
def open_subject(
    model: ModelLike, tokenizer: PreTrainedTokenizerBase | None, config: RunConfig, console: Console
) -> Iterator[Subject]:
    """Load the model, make its inputs and print the notices about them. A loaded model is restored after the block.

    Raises InputError if the model or the input is not usable, and SinkscopeError if network, memory or a package fails.
    """
    with spinner(console, "loading the model"):
        loaded = load_model(model, tokenizer, config, None if config.force else partial(check_memory, config=config))
    with undisturbed(loaded.model):
        family, notices = family_of(loaded.model)
        inputs = inputs_for(loaded, config, family)
        notices += [] if family.causal else ["it attends in both directions; its loss, if any, is of masked tokens"]
        print_line(console, f"read: {inputs.said}")
        print_notices(console, (*loaded.notices, *tower_notice(loaded.model), *notices, *inputs.notices))
        read = config.model_copy(update={"seq_len": inputs.longest})
        yield Subject(loaded, family, inputs, memory_of(loaded.model, read))


def is_in_memory(model: ModelLike) -> bool:
    """Return whether the user has loaded the model."""
    return model is not None and not isinstance(model, str | os.PathLike)


def load_model(
    model: ModelLike,
    tokenizer: PreTrainedTokenizerBase | None,
    config: RunConfig,
    check: Callable[[PreTrainedModel], None] | None = None,
) -> LoadedModel:
    """Return a loaded model as it is, or load the one that the configuration names. `check` and errors: see `load`."""
    if not is_in_memory(model):
        names = ("revision", "gguf_file", "adapter", "dtype", "device_map", "trust_remote_code", "allow_pickle")
        return loading.load(config.model, **{name: getattr(config, name) for name in names}, check=check)
    if config.adapter is not None:
        raise InputError(
            "an adapter was named for a model that is loaded already: load it with PEFT, or name the model"
        )
    if isinstance(model, LoadedModel):
        return replace(model, model=unwrapped(model.model))
    network = unwrapped(model)
    name = network.config.name_or_path or type(network).__name__
    of_wrapper = getattr(model, "tokenizer", None)  # nnsight and TransformerLens keep it
    tokenizer = of_wrapper if tokenizer is None and isinstance(of_wrapper, PreTrainedTokenizerBase) else tokenizer
    return LoadedModel(network, tokenizer, name, name, None, None, ())


def memory_of(model: PreTrainedModel, config: DeviceOptions) -> Memory:
    """Return the memory that a command needs with a model, which may be on the meta device."""
    names = getattr(config, "observables", None) or [name for name, kind in OBSERVABLES.items() if kind.by_default]
    backward = not config.forward_only and any(OBSERVABLES[name].backward for name in names)
    loaded = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return Memory(model, config, backward, room(config.device_map) + loaded)


def check_memory(model: PreTrainedModel, config: RunConfig) -> None:
    """Raise InputError if measuring a model, which may be on the meta device, does not fit into memory."""
    if config.reads_all:  # the lengths are not known yet
        config = config.model_copy(update={"seq_len": SEQ_LEN})
    memory_of(model, config).check()


def family_of(model: PreTrainedModel) -> tuple[Family, list[str]]:
    """Return the model's row in the table of families, or a calibrated row with a notice about it."""
    family, notices = row_or_calibrated(model)
    check_reads_text(model, family.layers)
    with unchanged_after(model):
        return with_positions(model, family), notices


def row_or_calibrated(model: PreTrainedModel) -> tuple[Family, list[str]]:
    """Return the row of `family_of` without the kinds of positions, for which a known model would have to run."""
    try:
        family = find_family(model)
        unlike = row_mismatch(model, family)
        if unlike is None:
            if unknown_code(family.attentions(model).values()) is None:
                return family, []
            return _without_unread(model, family, [])
        missing = said = f"this '{family.name}' is not built like others: {unlike}"
    except InputError as error:
        missing, said = str(error), f"'{model.config.model_type}' has no row in the table of families"
    try:
        rows = len(embedding_weight(model))
        if rows == 0:
            raise InputError("it has no token embeddings")
        few = torch.arange(3, 14, device=input_device(model))[None] % rows
        with unchanged_after(model):  # a short input permanently switches BigBird to another attention
            family = calibrate(model, few)
    except InputError as error:
        raise InputError(f"{missing}\n{error}") from None
    layers = family.layer_modules(model)
    notices = [f"{said}: wired numerically as {family.wiring}"]
    unknown = [str(layer) for layer in range(len(layers)) if family.block(layer).wiring == "unknown"]
    if unknown:
        which = "its layers add" if len(unknown) == len(layers) else f"layer {', '.join(unknown)} adds"
        notices.append(f"the tensors that {which} to the residual stream are unknown: only input and output are read")
    if family.copies is not None:
        notices.append(f"its residual stream is measured as the mean of the {family.copies.count} copies that it keeps")
    kinds = tuple({type(layer) for layer in layers})
    unmeasured = [  # further lists with layers of the same classes, such as a decoder's after an encoder
        path
        for path, stack in model.named_modules()
        if isinstance(stack, nn.ModuleList)
        and not path.startswith(f"{family.layers}.")
        and any(isinstance(entry, kinds) and entry not in layers for entry in stack)
    ]
    if unmeasured:
        notices.append(f"only {family.layers} is measured, not the layers of {' and '.join(unmeasured)}")
    return _without_unread(model, family, notices)


def _without_unread(model: PreTrainedModel, family: Family, notices: list[str]) -> tuple[Family, list[str]]:
    """Return a family, which is not known by name, without the attention that cannot be read, and the notices."""
    with unchanged_after(model):
        family = family.without(unread_attentions(model, family), model)
    return family, [*notices, *unread_notice(family)]


def unread_notice(family: Family) -> list[str]:
    """Return a line about layers whose attention cannot be read, if there are any."""
    unread = {layer: block.unread for layer, block in enumerate(family.blocks) if block.unread}
    if not unread:
        return []
    which, why = ", ".join(map(str, unread)), next(iter(unread.values()))
    return [f"attention weights are not read in {counted(len(unread), 'layer')} ({which}): {why}"]


def inputs_for(loaded: LoadedModel, config: RunConfig, family: Family | None = None) -> TokenInputs:
    """Build the run's token sequences, which fit the model's vocabulary and positions; for an encoder also masked.

    Without a family, the model is taken as causal. Raises InputError if the input is not readable or does not fit.
    """
    causal = family is None or family.causal
    if config.input == "sampled" and (not causal or token_head(loaded.model) is None):
        why = "has no head that predicts tokens" if causal else "attends both ways"
        raise InputError(f"--input sampled: this model {why}, and writes no text")
    text = loaded.model.config.get_text_config()
    end = getattr(text, "eos_token_id", None)
    ends = end if isinstance(end, list) else [end]
    limit = position_limit(loaded.model, family)
    build = partial(
        build_inputs,
        config.input,
        vocab_size=vocabulary(loaded.model),
        tokenizer=loaded.tokenizer,
        dataset=config.dataset,
        prompt=config.prompt,
        max_positions=limit,
        by_document=config.by_document,
        num_seqs=config.num_seqs,
        seq_len=limit if config.reads_all and limit else config.seq_len,
        bos=config.bos,
        closed=not causal,
        bos_token_id=getattr(text, "bos_token_id", None),
        special_ids=(getattr(text, "pad_token_id", None), *ends, *placeholders(loaded.model)),
        seed=config.seed,
        sampler=partial(_sample, loaded.model),
    )
    with same_random_numbers(config.input):  # a dataset may draw when it is read
        built = team().of_the_first(build)
    limits = rotary_limits(loaded.model.config).values()
    inputs = replace(
        built,
        first_predicted=max(1, family.prefix if family else 0),
        equal_past=min(limits) - registers_before(loaded.model) if limits else None,
    )
    return with_masked(inputs, loaded, family, config.seed)


def with_masked(inputs: TokenInputs, loaded: LoadedModel, family: Family | None, seed: int) -> TokenInputs:
    """Mask tokens of the inputs for an encoder whose tokenizer names a mask token."""
    tokenizer = loaded.tokenizer
    if family is None or family.causal or tokenizer is None or tokenizer.mask_token is None:
        return inputs
    return replace(inputs, masked=masked(inputs.sequences, tokenizer, vocabulary(loaded.model), seed))


def tokens_within_positions(wanted: int, model: PreTrainedModel, family: Family) -> int:
    """Return a number of tokens, or the model's number of positions if that is smaller."""
    return min(wanted, position_limit(model, family) or wanted)


def position_limit(model: PreTrainedModel, family: Family | None = None) -> int | None:
    """Return the longest sequence that the configuration allows, without registers; None if it sets no limit."""
    limit = number_of_positions(model, family)
    return None if limit is None else limit - registers_before(model)


@torch.no_grad()
def _sample(model: PreTrainedModel, first: int, count: int, length: int, seed: int) -> np.ndarray:
    """Draw texts (count, length) from the model's own distribution, starting with the token `first`.

    Texts that end early are dropped; forbidding the end token would give text that the model finds very unlikely.
    Generation stops when the share of texts that continue falls below 1 ÷ (2 · MOST_SAMPLES).
    """
    generation_config = model.generation_config
    ends = generation_config.eos_token_id
    # a checkpoint's own settings (top-k, temperature) would draw from another distribution
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length - 1, pad_token_id=first, eos_token_id=ends
    )
    start = torch.full((SAMPLED_AT_ONCE, 1), first, device=input_device(model))
    end_ids = torch.as_tensor(ends if ends is not None else [], device=input_device(model))
    texts: list[np.ndarray] = []
    begun = 0

    def too_few(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        unfinished = ~torch.isin(ids[:, 1:], end_ids).any(1)
        return (len(texts) + unfinished.sum() < begun / (2 * MOST_SAMPLES)).expand(len(ids))

    generate: Any = model.generate
    with drawing(seed), ExitStack() as stack:
        stack.callback(setattr, model, "generation_config", generation_config)
        model.generation_config = GenerationConfig()  # `generate` uses the model's own settings as defaults
        for _ in range(MOST_SAMPLES * count // SAMPLED_AT_ONCE + 1):
            begun += len(start)
            stops = StoppingCriteriaList([too_few])
            mask = torch.ones_like(start)
            drawn = generate(start, attention_mask=mask, generation_config=settings, stopping_criteria=stops)
            if drawn.shape[1] == length:
                ended = torch.isin(drawn[:, 1:-1], end_ids)
                texts += list(drawn[~ended.any(1)].cpu().numpy())
            if len(texts) >= count:
                return np.stack(texts[:count])
            if len(texts) < begun / (2 * MOST_SAMPLES):
                break
    raise InputError(
        f"--input sampled: only {len(texts)} of {count} texts reached {length} tokens: take a shorter --seq-len"
    )
