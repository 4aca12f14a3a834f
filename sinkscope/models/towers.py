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
from transformers import PreTrainedModel

from sinkscope.errors import InputError, described
from sinkscope.models.model_types import base_type

# Types whose text towers may be of a family with a row, so that a retrofitted one can be built again from its folder
WITH_TOWERS = (
    *("got_ocr2", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava", "voxtral"),
)

# What a model has to be told so that each token of a text sees those before it: model type → argument → its value for
# every token. PaliGemma reads a prompt both ways (0) and what follows as any decoder does (1). Told neither, it attends
# both ways under SDPA, but causally under eager or where a batch is padded.
TEXT: Mapping[str, Mapping[str, int]] = {"paligemma": {"token_type_ids": 1}}


def text_tower(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """The path and the module of the text tower; "" and the model where that is the whole model."""
    around = _models_around(model, embedding_path(model))
    innermost = around[-1][1]
    return next((path, module) for path, module in around if module.config is innermost.config)


def token_embedding(model: PreTrainedModel) -> nn.Module:
    """The module that embeds the tokens. Raises InputError where transformers does not know it."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError) as error:
        raise InputError(f"{type(model).__name__} has no token embeddings that transformers knows") from error


def vocabulary(model: PreTrainedModel) -> int:
    """How many token ids a model both reads and predicts: some have embeddings for placeholders of pictures besides."""
    tables: Any = (token_embedding(model), model.get_output_embeddings())
    return min(len(table.weight) for table in tables if table is not None and hasattr(table, "weight"))


def placeholders(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that are no text: in their places a model puts what it makes of pictures or sound, or marks where that is."""
    if not text_tower(model)[0]:
        return ()
    entries = model.config.to_dict().items()
    return tuple(x for name, x in entries if name.endswith(("_token_id", "_token_index")) and isinstance(x, int))


def embedding_path(model: PreTrainedModel) -> str:
    """Where the token embeddings are. Raises InputError where transformers does not know them."""
    embedding = token_embedding(model)
    path = next((path for path, module in model.named_modules() if module is embedding), None)
    if path is None:
        raise InputError(f"{type(model).__name__} has no module that embeds its tokens")
    return path


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
    """Whether a tower is a language model of transformers by itself, as its configuration is."""
    model, config = (type(thing).__module__.rpartition(".")[0] for thing in (tower, tower.config))
    return model == config


def tower_notice(model: PreTrainedModel) -> tuple[str, ...]:
    """What the user should know of a model of which a part is measured."""
    path, tower = text_tower(model)
    if not path:
        return ()
    return (f"{type(model).__name__}: its text tower is measured ({type(tower).__name__} at '{path}'), by text alone",)


def reached_by_text(model: PreTrainedModel) -> set[str]:
    """The paths of the modules that run when the model reads text alone."""
    return _read_a_token(model)[0]


@torch.no_grad()
def _read_a_token(model: PreTrainedModel) -> tuple[set[str], Any]:
    """The paths of the modules that run, and what the model gives."""
    reached: set[str] = set()
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(_note, reached, path)))
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return reached, output


def check_reads_text(model: PreTrainedModel, layers: str) -> None:
    """Raise InputError unless text alone passes the layers of a text tower, and has its next tokens predicted."""
    if not text_tower(model)[0]:
        return
    try:
        reached, output = _read_a_token(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"{type(model).__name__} does not read text alone [{described(error)}]") from error
    if not any(path.startswith(f"{layers}.") for path in reached):
        raise InputError(f"{type(model).__name__}: text does not pass the layers at '{layers}'")
    logits = getattr(output, "logits", None)
    if logits is None or logits.shape[:2] != (1, 1):
        raise InputError(f"{type(model).__name__} does not predict the token behind each that it reads")


def _note(reached: set[str], path: str, module: nn.Module, args: tuple) -> None:
    reached.add(path)


def told_of_text(model: nn.Module) -> Mapping[str, int]:
    """What TEXT says of this model; nothing of most."""
    return TEXT.get(base_type(str(getattr(getattr(model, "config", None), "model_type", ""))), {})


@contextmanager
def reading_text(model: nn.Module) -> Iterator[None]:
    """The model is told by TEXT what its input is, where the caller does not say, until the end of the block."""
    told = told_of_text(model)
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
