"""Models that the caller has already loaded are unwrapped, measured and restored, and so is torch's global state."""

import copy
import hashlib
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory, was_interrupted
from sinkscope.models.edits import ACCELERATE, HOOKS, ChangeRecorder, hook_of_user, name_of
from sinkscope.models.family import fresh_rotary_frequencies, with_text_arguments
from sinkscope.models.packed import unpacks_when_run
from sinkscope.plugins import package_with

WRAPPERS = (
    "torch.compile", "DataParallel", "DistributedDataParallel", "PEFT", "nnsight", "nnterp", "a TransformerBridge"
)  # fmt: skip
COMPILED = "_compiled_call_impl"  # module attribute of the `__call__` that `module.compile()` makes
BEFORE_AUTOCAST = "_original_forward"  # attribute of a model that accelerate has prepared: its forward
BRIDGED = "_original_component"  # TransformerLens: the transformers module that a bridge has replaced
MOST_PARTS, LONG_LIST = 10_000, 100  # objects, and entries of a list, in which generators are sought

one_thread = threading.RLock()  # for state that is global to the process, such as torch's random numbers


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Let torch draw random numbers from the seed within the block, and restore its state afterwards."""
    with one_thread, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def same_random_numbers(*holders: Any) -> Iterator[None]:
    """Restore, after the block, the global random numbers of torch (on the accelerators, too), numpy and Python, and
    the generators that objects such as datasets hold.
    """
    accelerator = torch.accelerator.current_accelerator()
    device: Any = None if accelerator is None else torch.get_device_module(accelerator)
    every = "_all" if hasattr(device, "get_rng_state_all") else ""  # MPS has one device
    with one_thread, ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        stack.callback(random.setstate, random.getstate())
        # reading the numbers of an accelerator that was not used would take memory there
        is_used = device is not None and getattr(device, "is_initialized", lambda: True)()
        if is_used and hasattr(device, f"get_rng_state{every}"):
            stack.callback(getattr(device, f"set_rng_state{every}"), getattr(device, f"get_rng_state{every}")())
        # generators that the objects and their parts hold, in attributes or in short lists
        waiting, seen = list(holders), set[int]()
        while waiting and len(seen) < MOST_PARTS:
            part = waiting.pop()
            if id(part) in seen or isinstance(part, type | torch.Tensor | np.ndarray):
                continue
            seen.add(id(part))
            if isinstance(part, np.random.Generator):
                stack.callback(setattr, part.bit_generator, "state", part.bit_generator.state)
            elif isinstance(part, random.Random):
                stack.callback(part.setstate, part.getstate())
            elif isinstance(part, torch.Generator | np.random.RandomState):
                set_state: Any = part.set_state
                stack.callback(set_state, part.get_state())
            elif isinstance(part, list | tuple | dict):
                waiting += [*(part.values() if isinstance(part, dict) else part)] if len(part) <= LONG_LIST else []
            else:
                waiting += getattr(part, "__dict__", {}).values()
        yield


def text_of(name: Any) -> str:
    """Return a name or path as text; raise InputError for any other object."""
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"a name or a path is needed, and this is a {_type_name(name)}")
    return os.fspath(name)


def unwrapped(model: Any, changed: bool = False) -> PreTrainedModel:
    """Return the transformers model in an object of the caller; InputError if it cannot be measured or `changed`."""
    kind = _type_name(model)
    parts: Iterator[Any] = chain(model.modules(), model.parameters()) if isinstance(model, nn.Module) else iter(())
    if any(isinstance(part, FullyShardedDataParallel | DTensor) for part in parts):
        raise InputError(
            "the weights of this model are sharded over several processes (tp_plan or FSDP), so that each has only "
            "parts of them: save the model and name its folder, or load it with device_map, on the GPUs of one process"
        )
    while not isinstance(model, PreTrainedModel):
        if changed and isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise InputError(
                "DataParallel on several devices calls copies of the model, which cannot be changed: pass its `module`"
            )
        if changed and hasattr(model, "original_model"):
            raise InputError(f"{kind} calls parts of its own, which cannot be changed: pass the model of transformers")
        if hasattr(model, "hook_dict") and not hasattr(model, "original_model"):
            raise InputError(
                f"{kind} has weights in a layout of its own: pass the model of transformers, or a TransformerBridge"
            )
        _check_wrapper(model)
        outer, model = model, _inner(model)
        if model is None:
            inside = "" if not isinstance(getattr(outer, "model", None), nn.Module) else " (pass its `model`)"
            raise InputError(
                f"{kind} is not a model{inside}: give a hub id, a folder, a .gguf file, or a model of transformers "
                f"(also wrapped by {', '.join(WRAPPERS)})"
            )
    modules, name = list(model.modules()), type(model).__name__
    if any(type(module).__module__.startswith("peft.tuners.adaption_prompt") for module in modules):
        raise InputError(
            "PEFT's AdaptionPrompt adds a second attention to the model's own, which is not measured: give the model "
            "without it"
        )
    if unpacks_when_run(model):
        raise InputError(f"the weights of {name} are unpacked in its first run: run it once before")
    if not any(ACCELERATE in vars(module) for module in modules):  # else it may have offloaded weights
        tensors = (*model.named_parameters(), *model.named_buffers())
        if (empty := next((path for path, tensor in tensors if tensor.is_meta), None)) is not None:
            raise InputError(f"{empty} of {name} is on the meta device, without numbers: load its weights")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InputError(f"the weights of {name} were made in torch.inference_mode: load it outside")
    return model


def _check_wrapper(wrapper: Any) -> None:
    """Raise InputError if a wrapper changes the model's computation; the model is measured without the wrapper."""
    kind = _type_name(wrapper)
    if getattr(wrapper, "__dict__", {}).get("_edits"):  # nnsight's, and those of its subclasses
        raise InputError(
            f"{kind} has edits (edit(inplace=True)), which are not in the model: register them as forward hooks of the "
            "model's modules, or take them back with clear_edits()"
        )
    if not isinstance(wrapper, nn.Module):
        return
    if any(getattr(part, "fwd_hooks", None) for part in wrapper.modules()):
        raise InputError(
            f"{kind} has hooks (add_hook), which are not in the model: register them on the modules of the model of "
            "transformers, or remove them with reset_hooks()"
        )
    inside = [wrapper.base_model] if hasattr(wrapper, "get_base_model") else []  # PEFT has two wrappers
    for part in (wrapper, *inside):
        hooks = vars(part)["_forward_pre_hooks"] | vars(part)["_forward_hooks"]
        if hook := next(filter(None, map(hook_of_user, hooks.values())), None):
            raise InputError(
                f"{kind} has a forward hook, {name_of(hook)}, which the model in it does not call: register it on the "
                "model of transformers"
            )


def _type_name(thing: Any) -> str:
    return f"{type(thing).__module__.partition('.')[0]}.{type(thing).__qualname__}"


def _inner(model: Any) -> Any:
    """Return the content of a wrapper; None if the object is not a wrapper."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return model.module
    if isinstance(model, nn.Module) and hasattr(model, "get_base_model"):  # PEFT: adapters are modules of that model
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise InputError("a model with PEFT's prompts cannot be measured with them: give the model itself")
        return model.get_base_model()  # type: ignore[operator]
    if isinstance(model, nn.Module) and isinstance(getattr(model, "original_model", None), nn.Module):
        return _without_bridges(model.original_model)  # type: ignore[arg-type]
    if getattr(model, "dispatched", True) is False:
        raise InputError(f"{_type_name(model)} has not loaded its weights yet: make it with dispatch=True")
    held = getattr(model, "__dict__", {})  # nnsight's own attributes: others name parts of the model
    return getattr(model, "_orig_mod", None) if isinstance(model, nn.Module) else held.get("_module")


def _without_bridges(module: nn.Module) -> nn.Module:
    """Return a copy of a model, with shared weights, without TransformerLens bridges, which replace its attention."""
    while BRIDGED in module._modules:
        module = module.get_submodule(BRIDGED)
    bare = copy.copy(module)
    bare._modules = {name: part and _without_bridges(part) for name, part in module._modules.items()}
    return bare


def weight_in_memory(module: Any) -> torch.Tensor:
    """Return the weight of a module, or a copy of it if accelerate has offloaded it."""
    if not module.weight.is_meta:
        return module.weight
    with align_module_device(module):
        return module.weight.detach().clone()


def error_origin(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """Return the innermost module of the model, or the function of a plugin, in which an error arose, and what to do.

    Both are "" if there is none in its traceback.
    """
    names = {module: name for name, module in model.named_modules()}
    place, advice = "", ""
    for frame, _ in walk_tb(error.__traceback__):
        holder, code = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        if package := package_with(code):
            place = f"{frame.f_code.co_qualname} of the plugin {package}"
            advice = "raised an error: repair or uninstall it"
        elif frame.f_code.co_name == "_call_impl" and holder in names:  # torch's function in which a module runs
            place = f"{names[holder] or 'the model'} ({type(holder).__name__})"
            advice = "raised an error: does the model run without sinkscope?"
        elif place and code.startswith("sinkscope."):
            advice = "cannot be measured: please report it"
    return place, advice


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let the model compute as in deployment within the block: eval mode, not compiled, and outputs by name.

    The caller's autocast, inference mode and default device have no effect, and the model is restored afterwards. An
    error of the model's code, or of a plugin, becomes a SinkscopeError that names the module or the plugin; an
    interrupt and a lack of memory pass through.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(on_cpu_by_default())
            stack.enter_context(torch.random.fork_rng(devices=[]))  # for a short text, BigBird makes new modules
            stack.enter_context(unchanged_after(model))
            for module in model.modules():
                module.training = False
                vars(module).update(_uncompiled(module), **{COMPILED: None})
                if BEFORE_AUTOCAST in vars(module):
                    vars(module)["forward"] = vars(module)[BEFORE_AUTOCAST]
            networks = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
            if not all(network.config.return_dict for network in networks):
                stack.enter_context(own_configurations(model))
                for network in networks:
                    network.config.return_dict = True
            stack.enter_context(with_text_arguments(model))
            stack.enter_context(fresh_rotary_frequencies(model))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(outside_autocast())
            yield
    except Exception as error:
        passes = isinstance(error, SinkscopeError) or was_interrupted(error) or is_out_of_memory(error)
        place, advice = ("", "") if passes else error_origin(error, model)
        if not place:
            raise
        raise SinkscopeError(f"{place} {advice} [{described(error)}]") from error


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Turn the caller's autocast off within the block, on the CPU and on the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in ("cpu", *([] if accelerator is None else [accelerator.type])):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def on_cpu_by_default() -> AbstractContextManager[Any]:
    """Create new tensors on the CPU within the block, regardless of torch's default."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def own_configurations(model: nn.Module) -> Iterator[None]:
    """Give the modules copies of their configurations, which other models may share, within the block."""
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    copies: dict[int, Any] = {}  # one copy each, also of nested configurations
    try:
        for module, name, value in held:
            vars(module)[name] = copy.deepcopy(value, copies)
        yield
    finally:
        for module, name, value in held:
            vars(module)[name] = value


@contextmanager
def called_uncompiled(model: PreTrainedModel) -> Iterator[None]:
    """Let every call of the model run its Python code in the block: compiled code would ignore some of its changes."""
    with ExitStack() as stack:
        for module in model.modules():
            changed = _uncompiled(module)
            if isinstance(module, PreTrainedModel) or vars(module).get(COMPILED) is not None:
                changed[COMPILED] = torch.compiler.disable(module._call_impl)
            stack.callback(vars(module).update, {name: vars(module)[name] for name in changed.keys() & vars(module)})
            for name in changed:
                stack.callback(vars(module).pop, name, None)
            vars(module).update(changed)
        yield


def _uncompiled(module: nn.Module) -> dict[str, Any]:
    """Return a module's forward from before torch.compile replaced it; {} if it is not compiled."""
    before = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    return {} if before is None else {"forward": before}


@contextmanager
def unchanged_after(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of every module at the end of the block, except those that a user's hook sets.

    The values of weights are not copied.
    """
    # name, value, and a copy if it is a dict, such as hooks and parameters; most of the thousands of dicts are empty
    # and need no copy
    before = [
        (vars(module), [(name, x, dict(x) if isinstance(x, dict) and x else None) for name, x in vars(module).items()])
        for module in model.modules()
    ]
    with _recorded_hooks(model) as changes:
        try:
            yield
        finally:
            for now, attributes in before:
                for name in now.keys() - {name for name, _, _ in attributes}:
                    if (id(now), name) not in changes:
                        del now[name]
                for name, value, entries in attributes:
                    if (id(now), name) in changes:
                        continue
                    now[name] = value
                    if isinstance(value, dict) and (value or entries):  # the same dict: handles of hooks refer to it
                        value.clear()
                        value.update(entries or {})


@contextmanager
def _recorded_hooks(model: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Yield what `ChangeRecorder` records of the user's hooks in the block, or in the outermost of nested blocks."""
    changes = set[tuple[int, str]]()
    changed: list[tuple[dict, int, Any, str]] = []
    for path, module in model.named_modules():
        for hooks in (vars(module)[name] for name in HOOKS if vars(module).get(name)):
            for key, hook in hooks.items():
                if isinstance(hook, ChangeRecorder):
                    changes = hook.changes
                elif hook_of_user(hook) is not None:
                    changed.append((hooks, key, hook, path))
    for hooks, key, hook, path in changed:
        # not all modules: to look at them around each call would take long if each has a hook
        names = path.split(".")
        holding = dict.fromkeys(model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1))
        hooks[key] = ChangeRecorder(hook, list(holding), changes)
    try:
        yield changes
    finally:
        for hooks, key, hook, _ in changed:
            if key in hooks:  # it may have removed itself
                hooks[key] = hook


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of a model's configuration, parameters (of offloaded ones only name and shape) and buffers."""
    settings = model.config.to_dict()  # type: ignore[union-attr,operator]
    decisive = {name: x for name, x in settings.items() if name not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta:
            digest.update(tensor.detach().flatten().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
