"""The text tower: the part of a model for pictures or sound that reads the token embeddings.

It is found by structure: among the nested transformers models that contain the token embeddings, it is the outermost
with the same configuration as the innermost. For a plain language model it is the model itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError, described

PREFIX = "sinkscope_"  # prefix of the model types of retrofitted models

# Model types with text towers that may be of a family with a row: their retrofitted models can be loaded again
WITH_TOWERS = (
    *("got_ocr2", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava", "voxtral"),
)

# Arguments that a model needs so that text is read causally: model type → argument → its value for every token.
# PaliGemma attends both ways in a prompt (0) and causally after it (1). Without the argument it attends both ways under
# SDPA, but causally under eager or in a padded batch.
TEXT: Mapping[str, Mapping[str, int]] = {"paligemma": {"token_type_ids": 1}}


def base_type(model_type: str) -> str:
    """Return `llama` for `sinkscope_llama`, and any other model type unchanged."""
    return model_type.removeprefix(PREFIX)


def is_retrofitted(config: Any) -> bool:
    return str(getattr(config, "model_type", "")).startswith(PREFIX)


def text_tower(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """Return path and module of the text tower; "" and the model if the tower is the whole model."""
    parts = embedding_path(model).split(".")
    outer = [".".join(parts[:count]) for count in range(len(parts))]
    modules = [(path, module) for path in outer if isinstance(module := model.get_submodule(path), PreTrainedModel)]
    return next((path, module) for path, module in modules if module.config is modules[-1][1].config)


def token_embedding(model: PreTrainedModel) -> nn.Module:
    """Return the module that embeds the tokens; raise InputError if transformers cannot find it."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError) as error:
        raise InputError(f"{type(model).__name__} has no token embeddings that transformers knows") from error


def vocabulary(model: PreTrainedModel) -> int:
    """Return how many token ids a model both reads and predicts; some also embed placeholders of pictures."""
    tables: Any = (token_embedding(model), model.get_output_embeddings())
    return min(len(table.weight) for table in tables if table is not None and hasattr(table, "weight"))


def placeholders(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids of placeholders or marks of pictures or sound, which are not text."""
    if not text_tower(model)[0]:
        return ()
    entries = model.config.to_dict().items()
    return tuple(x for name, x in entries if name.endswith(("_token_id", "_token_index")) and isinstance(x, int))


def embedding_path(model: PreTrainedModel) -> str:
    """Return the path of the token embeddings; raise InputError if transformers cannot find them."""
    embedding = token_embedding(model)
    path = next((path for path, module in model.named_modules() if module is embedding), None)
    if path is None:
        raise InputError(f"{type(model).__name__} has no module that embeds its tokens")
    return path


def tower_notice(model: PreTrainedModel) -> tuple[str, ...]:
    path, tower = text_tower(model)
    kind, part = type(model).__name__, type(tower).__name__
    return (f"{kind}: its text tower is measured ({part} at '{path}'), on text only",) if path else ()


@torch.no_grad()
def read_a_token(model: PreTrainedModel) -> tuple[set[str], Any]:
    """Run the model on one token of text, and return the paths of the modules that run, and the model's output."""
    reached: set[str] = set()
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda module, args, path=path: reached.add(path)))
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return reached, output


def check_reads_text(model: PreTrainedModel, layers: str) -> None:
    """Raise InputError unless text alone runs through the text tower's layers, and the model predicts next tokens."""
    if not text_tower(model)[0]:
        return
    try:
        reached, output = read_a_token(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"{type(model).__name__} does not read text alone [{described(error)}]") from error
    if not any(path.startswith(f"{layers}.") for path in reached):
        raise InputError(f"{type(model).__name__}: text does not pass the layers at '{layers}'")
    logits = getattr(output, "logits", None)
    if logits is None or logits.shape[:2] != (1, 1):
        raise InputError(f"{type(model).__name__} does not predict the token after each that it reads")


def text_arguments(model: nn.Module) -> Mapping[str, int]:
    """Return this model's entry of TEXT, or {}, as for most models."""
    return TEXT.get(base_type(str(getattr(getattr(model, "config", None), "model_type", ""))), {})


@contextmanager
def reading_text(model: nn.Module) -> Iterator[None]:
    """Add the arguments of TEXT to calls of the model that lack them, for the length of the block."""
    arguments = text_arguments(model)

    def add_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return args, kwargs
        return args, {name: torch.full_like(ids, value) for name, value in arguments.items()} | kwargs

    with model.register_forward_pre_hook(add_arguments, with_kwargs=True) if arguments else nullcontext():
        yield
