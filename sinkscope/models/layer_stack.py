"""The list of layers through which the residual stream passes, found by running the model on a few tokens."""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.discovery import first_floats

Ends = dict[nn.Module, list[torch.Tensor]]  # module → what it takes and gives, each time that it runs


@torch.no_grad()
def layer_stack(model: Any, inputs: dict[str, Any], others: dict[str, Any]) -> str:
    """The path of the ModuleList through which the residual stream passes: each entry takes what the one before gave,
    and the first that runs takes what the tokens are.

    Args:
        model: with one such list or, where it reads pictures too, several.
        inputs: of the model.
        others: the same with other tokens.

    Raises:
        InputError: there is none.
    """
    lists = {path: list(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    entries = {entry for entries in lists.values() for entry in entries}
    ends = _ends(model, entries, inputs)
    given = [(x, others[name]) for name, x in inputs.items() if isinstance(x, torch.Tensor)]
    alike = all(torch.equal(x, other) for x, other in given)  # where there is one token in all
    ends_of_others = None if alike else _ends(model, entries, others)
    chains = [path for path, layers in lists.items() if _pass_tokens(layers, ends, ends_of_others)]
    if not chains:
        runs = [{len(ends.get(layer, ())) // 2 for layer in layers} for layers in lists.values()]
        loops = [run for run, *further in runs if run > 1 and not further]
        why = f" (layers that run {max(loops)} times, in a loop, are not measured)" if loops else ""
        raise InputError(
            f"'{model.config.model_type}': no list of layers through which the tokens pass one by one{why}"
        )
    return max(chains, key=lambda path: sum(parameter.numel() for parameter in model.get_submodule(path).parameters()))


def _ends(model: Any, entries: Iterable[nn.Module], inputs: dict[str, Any]) -> Ends:
    """What each of the modules takes and gives, of those that run."""
    ends: Ends = {}
    with ExitStack() as hooks:
        for module in entries:
            hooks.enter_context(module.register_forward_pre_hook(partial(_keep_end, ends), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(_keep_end, ends), with_kwargs=True))
        model(**inputs)
    return ends


def _keep_end(ends: Ends, module: nn.Module, args: tuple, kwargs: dict, *output: Any) -> None:
    """What a module takes, and then what it gives."""
    x = first_floats(output[0] if output else (*args, *kwargs.values()))
    if x is not None:
        ends.setdefault(module, []).append(x.detach().clone())


def _pass_tokens(layers: list[nn.Module], ends: Ends, ends_of_others: Ends | None) -> bool:
    """Whether most of these modules run, each on what the one before gave, and the first on what the tokens are.

    Some may not run: layers that read pictures stand aside without one. With no others to compare with, the first is
    taken to depend on the tokens.
    """
    ran = [layer for layer in layers if layer in ends and (ends_of_others is None or layer in ends_of_others)]
    if 2 * len(ran) <= len(layers) or not _is_chain([ends[layer] for layer in ran]):
        return False
    return ends_of_others is None or not _equal(ends[ran[0]][0], ends_of_others[ran[0]][0])


def _is_chain(ends: list[list[torch.Tensor]]) -> bool:
    """Whether all entries ran once, and each on what the one before gave."""
    if any(len(pair) != 2 for pair in ends):
        return False
    return all(_equal(before[1], after[0]) for before, after in pairwise(ends))


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit, where both may hold NaN."""
    return x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
