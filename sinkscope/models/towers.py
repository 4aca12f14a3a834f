"""The text tower: of a model that also reads pictures or sound, the part that the token embeddings feed.

It is looked for by its structure: of all models of transformers inside the model, those around the token embeddings
that share one configuration. Of a plain language model this is the model itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedModel

# What a model has to be told so that each token of a text sees those before it: model type → argument → its value for
# every token. PaliGemma reads a prompt both ways (0) and what follows as any decoder does (1). Told neither, it attends
# both ways under SDPA, but causally under eager or where a batch is padded.
TEXT: Mapping[str, Mapping[str, int]] = {"paligemma": {"token_type_ids": 1}}


def text_tower(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """The path and the module of the text tower; "" and the model where that is the whole model."""
    around = _models_around(model, embedding_path(model))
    innermost = around[-1][1]
    return next((path, module) for path, module in around if module.config is innermost.config)


def embedding_path(model: PreTrainedModel) -> str:
    """Where the token embeddings are."""
    embedding = model.get_input_embeddings()
    return next(path for path, module in model.named_modules() if module is embedding)


def _models_around(model: PreTrainedModel, path: str) -> list[tuple[str, Any]]:
    """The models of transformers that hold a module, from outside."""
    parts = path.split(".")
    outer = [".".join(parts[:count]) for count in range(len(parts))]
    found = [(path, model.get_submodule(path)) for path in outer]
    return [(path, module) for path, module in found if isinstance(module, PreTrainedModel)]


def within(tower: nn.Module, at: str, path: str) -> str:
    """A path from the root of a language model with its head, of a tower that may be without its head and at `at`."""
    if not path:
        return ""
    head, _, rest = path.partition(".")
    return f"{at}.{path if head in tower._modules else rest}"


def is_own(tower: PreTrainedModel) -> bool:
    """Whether a tower is the language model that transformers has for its configuration."""
    known: Any = MODEL_MAPPING.get(type(tower.config), None)
    return known is not None and type(tower).__module__ == known.__module__


def tower_notice(model: PreTrainedModel) -> tuple[str, ...]:
    """What the user should know of a model of which a part is measured."""
    path, tower = text_tower(model)
    if not path:
        return ()
    return (f"{type(model).__name__}: its text tower is measured ({type(tower).__name__} at '{path}'), by text alone",)


@torch.no_grad()
def reached_by_text(model: PreTrainedModel) -> set[str]:
    """The paths of the modules that run when the model reads text alone."""
    reached: set[str] = set()
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(_note, reached, path)))
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return reached


def _note(reached: set[str], path: str, module: nn.Module, args: tuple) -> None:
    reached.add(path)


@contextmanager
def reading_text(model: nn.Module) -> Iterator[None]:
    """The model is told by TEXT what its input is, where the caller does not say, until the end of the block."""
    told = TEXT.get(getattr(getattr(model, "config", None), "model_type", "").removeprefix("sinkscope_"), {})
    if not told:
        yield
        return
    with model.register_forward_pre_hook(partial(_tell, told), with_kwargs=True):
        yield


def _tell(told: Mapping[str, int], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        return args, kwargs
    return args, {name: torch.full_like(ids, value) for name, value in told.items()} | kwargs
