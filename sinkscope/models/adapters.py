"""Finds adapters that PEFT reads (LoRA and others), checks them, and merges them into a model's weights.

A merged model is an ordinary one: its weights can be edited, quantized and trained, and in float32 it computes the same
as the model with its adapter, up to round-off. In bfloat16 and float16 the merged weights are rounded to that dtype.
Quantized weights would be rounded again, so an adapter of a quantized model stays separate.
"""

import hashlib
import importlib.util
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError, SinkscopeError, explained, one_line
from sinkscope.models.family import embedding_weight, input_device
from sinkscope.models.files import ADAPTER_CONFIG, check_safetensors, fetch, is_path
from sinkscope.models.packed import PACKED_WEIGHTS, is_packed
from sinkscope.options.files import check_readable, kind_of, names_in, read_object, user_path

SAFE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
ADAPTER_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")  # models for other tasks have another head
ADAPTER_NAME = "default"  # PEFT's name for a model's only adapter
ORIGINALS = (".base_layer", ".original_module")  # names of the original layers in PEFT's modules
COMPARED_TOKENS = 16  # tokens on which the merged model is compared with the adapted one
# largest relative difference of an output by round-off, here of merged weights
MERGED_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter on disk."""

    folder: Path
    weights: str  # name of the weights file in the folder
    source: str  # the name that the user gave
    commit: str | None  # commit of the hub repository
    base: str | None  # the model that the adapter was trained on, according to its settings

    @property
    def name(self) -> str:
        return self.source if self.commit else self.folder.resolve().name


def find_adapter(adapter: str, allow_pickle: bool) -> AdapterFiles:
    """Find an adapter in a folder or on the hub; InputError if it is missing, incomplete, damaged or a pickle."""
    if importlib.util.find_spec("peft") is None:
        raise SinkscopeError("--adapter needs the package PEFT, which is not installed: pip install peft")
    path, commit = user_path(adapter), None
    if adapter and (kind := kind_of(path)) is not None:
        if kind == "file":
            raise InputError(f"--adapter {adapter} is a file: name the folder that it is in")
        present = set(names_in(path))
    elif is_path(adapter):
        raise InputError(f"--adapter {adapter}: no such folder (and a hub id looks like org/name)")
    else:
        path, present = fetch(adapter, None, [ADAPTER_CONFIG, SAFE, *([PICKLED] if allow_pickle else [])])
        commit = path.name
    if ADAPTER_CONFIG not in present:
        raise InputError(f"--adapter {adapter} is not an adapter: it has no {ADAPTER_CONFIG}")
    weights = next((name for name in (SAFE, PICKLED) if name in present), None)
    if weights is None:
        raise InputError(f"--adapter {adapter} has no weights to read: neither {SAFE} nor {PICKLED}")
    if weights == PICKLED and not allow_pickle:
        raise InputError(
            f"--adapter {adapter} has its weights as a pickle only, which can run code when read: "
            "if you trust its maker, add --allow-pickle"
        )
    check_readable(path / weights)
    if weights == SAFE:
        check_safetensors(adapter, path / weights)
    settings = read_object(path / ADAPTER_CONFIG)
    if settings.get("task_type") not in ADAPTER_TASKS:
        raise InputError(f"--adapter {adapter} is for another task ({one_line(settings['task_type'], 40)})")
    return AdapterFiles(path, weights, adapter, commit, settings.get("base_model_name_or_path"))


def with_adapter(
    model: PreTrainedModel, files: AdapterFiles
) -> tuple[PreTrainedModel, dict[str, Any], tuple[str, ...]]:
    """Apply the adapter to the model, if it fits, and return it with its entry in run.json and notices for the user."""
    import peft  # optional, and its import takes seconds

    source, name = f"--adapter {files.source}", str(model.config.name_or_path)
    with explained(f"{source}: PEFT cannot use its {ADAPTER_CONFIG}"):
        config = peft.PeftConfig.from_pretrained(str(files.folder))
    method, merging = str(getattr(config.peft_type, "value", config.peft_type)), not is_packed(model)
    if config.is_prompt_learning:
        raise InputError(f"{source} adds prompts ({method}) and no weights: the model cannot be measured with it")
    with explained(f"{source} does not fit {name}"):
        wrapped: Any = peft.get_peft_model(model, config, ADAPTER_NAME)
        read = wrapped.load_adapter(files.folder, ADAPTER_NAME, torch_device=str(model.device))
    for what, names in (("lacks", read.missing_keys), ("has, and the model does not have,", read.unexpected_keys)):
        if names:
            raise InputError(f"{source} does not fit {name}: it {what} {names[0]} ({len(names)} in total)")
    network = merge_adapter(wrapped.eval(), source, method) if merging else wrapped.get_base_model()
    digest = hashlib.sha256((files.folder / files.weights).read_bytes()).hexdigest()
    record = {"source": files.source, "commit": files.commit, "method": method, "merged": merging, "sha256": digest}
    became = "merged into the model's weights" if merging else f"not merged, because the model's {PACKED_WEIGHTS}"
    notices: tuple[str, ...] = (f"adapter {files.source}: {became}",)
    if files.base and Path(files.base).name.casefold() != Path(name).name.casefold():
        base = one_line(files.base)
        notices += (f"the adapter says that it was trained on {base}, which may be another model than {name}",)
    return network, record, notices


@torch.no_grad()
def merge_adapter(wrapped: Any, source: str, method: str) -> PreTrainedModel:
    """Merge PEFT's adapter into a model's weights; InputError if the model then computes something else."""
    network: PreTrainedModel = wrapped.get_base_model()
    ids = torch.arange(COMPARED_TOKENS, device=input_device(network))[None] % len(embedding_weight(network))
    apart = network(ids, use_cache=False)[0]
    _untie(network)
    cannot = f"{source}: an adapter of its kind ({method}) cannot be merged"
    with explained(cannot):
        network = wrapped.merge_and_unload(safe_merge=True)
    head = network.get_output_embeddings()
    if head is not None and head.weight is not embedding_weight(network):  # otherwise loading would tie it again
        network.config.get_text_config().tie_word_embeddings = network.config.tie_word_embeddings = False
    together = network(ids, use_cache=False)[0]
    sizes = apart.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error = float(((together - apart).float().norm(dim=-1) / sizes).max())
    if not error <= MERGED_ROUNDING[together.dtype]:  # or NaN
        raise InputError(f"{cannot}: the model would compute something else (its output differs by {error:.1e})")
    return network


def _untie(model: nn.Module) -> None:
    """Untie weights that a layer with an adapter shares, because a merge would change both layers."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders[parameter].append((path, module, name))
    for parameter, holding in holders.items():
        if any(path.endswith(ORIGINALS[0]) for path, _, _ in holding):
            for _, module, name in holding[1:]:
                module._parameters[name] = nn.Parameter(parameter.clone(), parameter.requires_grad)


def check_no_adapter(model: PreTrainedModel, purpose: str) -> None:
    """Raise InputError if a model has an adapter that is not merged, which `purpose` would ignore."""
    adapted = next((path for path, _ in model.named_modules() if path.endswith(ORIGINALS)), None)
    if adapted is not None:
        raise InputError(f"{purpose} needs weights without a separate adapter ({adapted}): merge it first")
