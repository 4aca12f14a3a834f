"""The null of what weights have learned: the same architecture with random weights, on the same input.

Some of what looks like an attention or gradient sink comes from the causal mask alone: with random weights the value
gradient at position 0 is several times that of later positions.

How many times depends on depth and on the scale of the weights. What flows back through token 0's values joins the
gradient of its residual stream, of which the layer below makes as much again: the larger a branch is beside the
residual stream, the more; and weights so large that attention is far from uniform give less. SmolLM2-135M (30 layers,
T = 64) has 9 as transformers initializes it by default, 7 at the scale of its own weights, and 4.3 if each layer stood
alone under uniform attention. So each tensor is drawn with the mean and the standard deviation that it has in the
model: nothing rests on the width of an initialization, which the configuration of a GGUF file does not say.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory
from sinkscope.measuring.subject import Subject
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.process import drawing
from sinkscope.models.quantized import ORDINARY, is_quantized
from sinkscope.retrofits import new_parameters

WEIGHTS_AT_RANDOM = "random"  # of the manifest: where a checkpoint has the format of its weights
AT_RANDOM = " (random weights)"  # behind the model's name
QUANTIZATION = "quantization_config"  # of a model's configuration


@contextmanager
def random_weights(subject: Subject, seed: int = 0) -> Iterator[Subject]:
    """Give the subject with a model whose weights are drawn anew, until the end of the block.

    A retrofit is built in and at its start. The model is on the same device beside the subject's own, which stays as it
    was; torch's random numbers go on as if nothing had been drawn.

    Args:
        seed: of the weights, which are the same on every device.

    Raises:
        InputError: the model cannot be built from its configuration alone.
        SinkscopeError: the second model does not fit into memory.
    """
    try:
        network = redrawn(subject.loaded.model, seed)
    except InputError as error:
        raise InputError(f"{subject.loaded.name} with random weights: {error}") from error
    named = replace(subject.loaded, name=subject.loaded.name + AT_RANDOM, weights=WEIGHTS_AT_RANDOM, adapter=None)
    with undisturbed(network):
        yield replace(subject, loaded=replace(named, model=network))


def redrawn(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A model of the same class and configuration, frozen, each of whose tensors is drawn from the normal distribution
    with the mean and the standard deviation that it has in `model`.

    What a retrofit has added begins as its method says, and what is not learned (sines of positions) stays. Of a model
    that computes on quantized weights nothing but the configuration is taken: its weights are as transformers
    initializes them.
    """
    device = _one_device(model)
    config = copy.deepcopy(model.config)
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)
    dtype = next((x.dtype for x in model.parameters() if x.dtype in ORDINARY), torch.float32)
    try:
        with drawing(seed), torch.device("cpu"):
            network = type(model)._from_config(config, dtype=dtype)
        learned = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        network = network.to(device).eval().requires_grad_(False)
    except Exception as error:
        if is_out_of_memory(error):
            raise SinkscopeError("the same model with random weights does not fit into memory beside it") from error
        raise InputError(f"it cannot be built from its configuration alone [{described(error)}]") from error
    if not is_quantized(model):
        _check_same_parameters(model, network)
        _draw(network, model, learned, seed)
    return network


@torch.no_grad()
def _draw(network: PreTrainedModel, model: PreTrainedModel, learned: Collection[str], seed: int) -> None:
    """Draw what is learned, the same on every device, one tensor after the other in float32."""
    generator = torch.Generator().manual_seed(seed)
    own, at_start = dict(model.named_parameters()), new_parameters(network).keys()
    for name, parameter in network.named_parameters():
        if name in at_start:
            continue
        if name not in learned:
            parameter.copy_(own[name])
            continue
        std, mean = torch.std_mean(own[name].float(), correction=0)
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.copy_(drawn.mul_(std).add_(mean))


def _one_device(model: PreTrainedModel) -> torch.device:
    """Raise InputError where there are several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise InputError("it is spread over several devices: load it on one, without --device-map auto")
    return model.device


def _check_same_parameters(model: PreTrainedModel, network: PreTrainedModel) -> None:
    """Raise InputError where a model has been changed since it was built: its configuration then describes another."""
    have, built = ({name: x.shape for name, x in each.named_parameters()} for each in (model, network))
    other = [name for name in {**have, **built} if have.get(name) != built.get(name)]
    if other:
        raise InputError(f"its configuration describes another model: {other[0]} differs ({len(other)} such)")
