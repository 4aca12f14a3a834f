"""The null of what weights have learned: the same architecture with random weights, on the same input.

Some of what looks like an attention or gradient sink comes from the causal mask alone: with random weights the value
gradient at position 0 is several times that of later positions.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory
from sinkscope.measuring.subject import Subject
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.quantized import ORDINARY, is_quantized

WEIGHTS_AT_RANDOM = "random"  # of the manifest: where a checkpoint has the format of its weights
AT_RANDOM = " (random weights)"  # behind the model's name
QUANTIZATION = "quantization_config"  # of a model's configuration


@contextmanager
def random_weights(subject: Subject, seed: int = 0) -> Iterator[Subject]:
    """Give the subject with a model whose weights are drawn anew, as transformers initializes them from its
    configuration, until the end of the block.

    A retrofit is built in and at its start; quantized weights become ordinary ones. The configuration says how wide
    weights are drawn; that of a GGUF file does not, and transformers' default is taken. The model is on the same device
    beside the subject's own, which stays as it was; torch's random numbers go on as if nothing had been drawn.

    Args:
        seed: of the weights, which are the same on every device.

    Raises:
        InputError: the model cannot be built from its configuration alone.
        SinkscopeError: the second model does not fit into memory.
    """
    try:
        network = initialized(subject.loaded.model, seed)
    except InputError as error:
        raise InputError(f"{subject.loaded.name} with random weights: {error}") from error
    named = replace(subject.loaded, name=subject.loaded.name + AT_RANDOM, weights=WEIGHTS_AT_RANDOM, adapter=None)
    with undisturbed(network):
        yield replace(subject, loaded=replace(named, model=network))


def initialized(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A model of the same class and configuration, with weights as transformers initializes them, frozen."""
    device = _one_device(model)
    config = copy.deepcopy(model.config)
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)
    dtype = next((x.dtype for x in model.parameters() if x.dtype in ORDINARY), torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            network = type(model)._from_config(config, dtype=dtype)
        network = network.to(device).eval().requires_grad_(False)
    except Exception as error:
        if is_out_of_memory(error):
            raise SinkscopeError("the same model with random weights does not fit into memory beside it") from error
        raise InputError(f"it cannot be built from its configuration alone [{described(error)}]") from error
    if not is_quantized(model):
        _check_same_parameters(model, network)
    return network


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
