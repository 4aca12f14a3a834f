"""Retrofits by the papers' formulas, as changes of a plain model at its taps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from sinkscope.attention.seam import open_seam
from sinkscope.attention.taps import Seam
from sinkscope.models.families import find_family


@contextmanager
def changed_by_hand(model: PreTrainedModel, label: str, trained: PreTrainedModel) -> Iterator[None]:
    """Change the taps of the plain model as the method does, with the parameters of `trained`."""
    read: list[torch.Tensor] = []  # the input of the current attention

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        read[:] = [args[0] if args else kwargs["hidden_states"]]

    attentions = find_family(model).attentions(model)
    with open_seam(model, find_family(model)) as seams, ExitStack() as stack:
        for layer, attention in find_family(trained).attentions(trained).items():
            stack.callback(attentions[layer].register_forward_pre_hook(note, with_kwargs=True).remove)
            BY_HAND[label](seams[layer], dict(attention.retrofit.named_parameters()), read, model)
        yield


def _vscale(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
    def edit(module: nn.Module, args: tuple, value: torch.Tensor) -> torch.Tensor:
        strength = parameters["theta"].exp()[None, :, None, None] if parameters else 3.0
        r = value.square().sum(-1, keepdim=True)
        return value * r / (r + (value.shape[-1] * 0.02) ** 2 * strength)

    seam.value.register_forward_hook(edit)


def _gate(from_input: bool, at_output: bool) -> Callable:
    def change(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
        seen: list[torch.Tensor] = []
        seam.value.register_forward_hook(lambda module, args, value: seen.append(value))

        def gates() -> torch.Tensor:  # (B,T,heads,1)
            features = read[0] if from_input else seen[-1].transpose(1, 2).flatten(-2)
            return 2 * torch.sigmoid(features @ parameters["weight"])[..., None]

        if at_output:
            seam.mix.register_forward_hook(lambda module, args, mix: mix * gates())
        else:
            seam.value.register_forward_hook(lambda module, args, value: value * gates().transpose(1, 2))

    return change


def _denominator(seam: Seam, parameters: dict, read: list, model: PreTrainedModel) -> None:
    """Return a · Z / (Z + exp(b)): a share of the row's weight is on no token."""
    seen: dict[str, torch.Tensor] = {}
    seam.query.register_forward_hook(lambda module, args, query: seen.update(query=query))
    seam.lse.register_forward_hook(lambda module, args, lse: seen.update(lse=lse))

    def edit(module: nn.Module, args: tuple, mix: torch.Tensor) -> torch.Tensor:
        sink = own_bias(model, mix.shape[1]) + term(seen["query"])
        kept = torch.sigmoid(seen["lse"] - sink)
        return mix * kept.transpose(1, 2)[..., None]

    def term(query: torch.Tensor) -> torch.Tensor:
        if "logit" in parameters:
            return parameters["logit"][None, :, None]
        unscaled = model.config.model_type in ("gpt_neo", "opt")  # OPT scales its queries earlier
        scaling = 1.0 if unscaled else query.shape[-1] ** -0.5
        if model.config.model_type.startswith("gemma"):
            scaling = model.config.query_pre_attn_scalar**-0.5
        dots = scaling * (query * parameters["key"][None, :, None]).sum(-1)
        cap = getattr(model.config, "attn_logit_softcapping", None)
        return dots if cap is None else cap * (dots / cap).tanh()

    seam.mix.register_forward_hook(edit)


def own_bias(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Return ALiBi's bias at (t,t), by transformers' own functions: (1,H,T)."""
    config, mask = model.config, torch.ones(1, length)
    if config.model_type == "bloom":
        return bloom_alibi(mask, 4, torch.float64).view(1, 4, length)
    if config.model_type == "falcon" and config.alibi:
        return falcon_alibi(mask, 4, torch.float64).view(1, 4, length) * 8**-0.5
    if config.model_type == "mpt":
        return build_mpt_alibi_tensor(4, length).view(1, 4, length).double()
    return torch.zeros(1, 4, length)


BY_HAND: dict[str, Callable] = {
    "vscale": _vscale,
    "vscale-fixed": _vscale,
    "vga": _gate(from_input=False, at_output=False),
    "iga": _gate(from_input=True, at_output=False),
    "vga-output": _gate(from_input=False, at_output=True),
    "iga-output": _gate(from_input=True, at_output=True),
    "learnable-sink": _denominator,
    "key-bias": _denominator,
}
