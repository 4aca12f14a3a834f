"""The null model of learned weights: the same architecture with random weights, on the same input.

A part of each attention or gradient sink is an effect of the causal mask: with random weights, the value gradient at
position 0 is several times that at later positions. The factor depends on depth and on the scale of the weights: for
SmolLM2-135M (30 layers, T = 64) it is 9 with transformers' default initialization, 7 at the scale of its own weights,
and 4.3 for single layers under uniform attention. Each tensor is therefore drawn with its own mean and standard
deviation, so that nothing depends on the width of an initialization, which a GGUF file does not record.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory
from sinkscope.measuring.subject import Subject
from sinkscope.models.in_memory import drawing, undisturbed
from sinkscope.models.packed import ORDINARY, is_packed, without_packing
from sinkscope.retrofits import new_parameters

WEIGHTS_AT_RANDOM = "random"  # in the manifest, in place of the format of a checkpoint's weights
RANDOM_SUFFIX = " (random weights)"  # appended to the model's name


@contextmanager
def random_weights(subject: Subject, seed: int = 0) -> Iterator[Subject]:
    """Yield the subject with a second model of random weights (`randomized`); its own model is not changed."""
    try:
        network = randomized(subject.loaded.model, seed)
    except InputError as error:
        raise InputError(f"{subject.loaded.name} with random weights: {error}") from error
    named = replace(subject.loaded, name=subject.loaded.name + RANDOM_SUFFIX, weights=WEIGHTS_AT_RANDOM, adapter=None)
    with undisturbed(network):
        yield replace(subject, loaded=replace(named, model=network))


def randomized(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a frozen model of the same class and configuration with random weights, the same on every device.

    Each learned tensor is drawn from the normal distribution with its mean and standard deviation in `model`. A
    retrofit's parameters have their starting values; tensors that are not learned (sines of positions) are copied. For
    a quantized model the weights are those of transformers' initialization. Raises InputError if the model is on
    several devices or its configuration does not describe it, and SinkscopeError if memory runs out.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise InputError("it is spread over several devices: load it on one, without --device-map auto")
    config = copy.deepcopy(model.config)
    without_packing(config)
    dtype = next((x.dtype for x in model.parameters() if x.dtype in ORDINARY), torch.float32)
    try:
        with drawing(seed), torch.device("cpu"):
            network = type(model)._from_config(config, dtype=dtype)
        learned = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        network = network.to(model.device).eval().requires_grad_(False)
    except Exception as error:
        if is_out_of_memory(error):
            raise SinkscopeError("a second model with random weights does not fit into memory") from error
        raise InputError(f"it cannot be built from its configuration alone [{described(error)}]") from error
    if not is_packed(model):
        have, built = ({name: x.shape for name, x in each.named_parameters()} for each in (model, network))
        other = [name for name in {**have, **built} if have.get(name) != built.get(name)]
        if other:  # the model has been changed since it was built
            raise InputError(f"its configuration describes another model: {other[0]} differs ({len(other)} tensors)")
        # one tensor after the other in float32, identically on every device
        generator = torch.Generator().manual_seed(seed)
        parameters, starting = dict(model.named_parameters()), new_parameters(network).keys()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name in starting:
                    continue
                if name not in learned:
                    parameter.copy_(parameters[name])
                    continue
                std, mean = torch.std_mean(parameters[name].float(), correction=0)
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.copy_(drawn.mul_(std).add_(mean))
    return network
