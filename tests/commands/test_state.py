"""Every command restores the model, its configuration and the process, also after an error or an interrupt."""

from collections.abc import Callable
from typing import Any

import pytest
from support.everything import differences, snapshot
from support.figures import skip_figures
from support.retrofitted import each_pair
from tiny import TINY, tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import sinkscope
from sinkscope.commands.doctor import doctor
from sinkscope.models.families import find_family

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 10}
COMMANDS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "analyze": lambda model: sinkscope.analyze(model, **SMALL),
    "intervene": lambda model: sinkscope.intervene(model, ["mask-sink", "scale-sink-value"], draws=1, **SMALL),
    "quantize": lambda model: sinkscope.quantize(model, calibration=1, bits_weights=16, bits_activations=16, **SMALL),
    "doctor": doctor,
}
ENDINGS: dict[str, type[BaseException] | None] = {
    "normal": None,
    "exception": ZeroDivisionError,
    "interrupt": KeyboardInterrupt,
}


def break_down(model: PreTrainedModel, layer: int, error: type[BaseException], at: int = 2) -> None:
    """Raise an error at the second call of a linear module of the layer."""
    calls: list[int] = []

    def fail(module: nn.Module, args: tuple, output: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise error("made up")

    layers = find_family(model).layer_modules(model)
    next(module for module in layers[layer].modules() if isinstance(module, nn.Linear | Conv1D)).register_forward_hook(
        fail
    )


def used(name: str) -> PreTrainedModel:
    """A model in the middle of a training: with gradients and hooks, and partly frozen."""
    model = tiny_model(name).train()
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(True)
    model(tiny_tokens(1, 6), labels=tiny_tokens(1, 6)).loss.backward()
    layer = find_family(model).layer_modules(model)[1]
    layer.eval()
    layer.register_forward_hook(lambda module, args, output: None)
    model.register_forward_pre_hook(lambda module, args: None)
    model.config.use_cache = True
    return model


@each_pair(list(TINY), [f"{command}, {ending}" for ending in ENDINGS for command in COMMANDS])
def test_nothing_is_left(name: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    command, ending = label.split(", ")
    model, error = used(name), ENDINGS[ending]
    if error is not None:
        break_down(model, len(name) % 3, error)
    before = snapshot(model)
    if error is None:
        COMMANDS[command](model)
    else:
        with pytest.raises(error):
            COMMANDS[command](model)
    assert differences(before, snapshot(model)) == []
