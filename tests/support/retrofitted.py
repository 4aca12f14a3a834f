"""Tiny models with retrofits, their parameters moved away from their start."""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import gradient_reference
import numpy as np
import pandas as pd
import pytest
import torch
from tiny import REPRESENTATIVE, batched, measured, tiny_model, tiny_tokens
from transformers import PreTrainedModel

from sinkscope.measuring.observables.observable import Settings
from sinkscope.retrofits import new_parameters, retrofit_model
from sinkscope.retrofits.operation import OPERATION_KINDS

# label → method and parameters
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "vscale": ("vscale", {}),
    "vscale-fixed": ("vscale", {"learned": False, "strength": 3.0}),
    "vga": ("vga", {}),
    "vga-output": ("vga", {"placement": "output"}),
    "iga": ("iga", {}),
    "iga-output": ("iga", {"placement": "output"}),
    "learnable-sink": ("learnable-sink", {}),
    "key-bias": ("key-bias", {}),
    "register-tokens": ("register-tokens", {"count": 3}),
}


# other attention operations and biases, for models without attention code of their own
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("operation", {"kind": kind}) for kind in OPERATION_KINDS},
    "scaled": ("operation", {"kind": "softmax", "factor": 0.1}),
    "scaled-sigmoid": ("operation", {"kind": "sigmoid", "factor": 0.1}),
    "p-norm": ("operation", {"kind": "softmax", "power": 2.0}),
    "off-by-one": ("off-by-one", {}),
    "kv-bias": ("key-bias", {"value": "learned", "deviation": 0.02}),
    "kv-bias-shared": ("key-bias", {"value": "learned", "shared": True}),
    "key-bias-axis": ("key-bias", {"value": "axis", "norm": 5.0}),
    "key-bias-uniform": ("key-bias", {"value": "uniform", "norm": 2.0}),
    "key-bias-some-dimensions": ("key-bias", {"dimensions": 3}),
    "value-bias": ("value-bias", {"deviation": 0.02}),
    "value-bias-shared": ("value-bias", {"shared": True}),
}


def each_pair(
    names: Sequence[str],
    labels: Sequence[Any],
    arguments: tuple[str, str] = ("name", "label"),
    whole: Collection[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test by every method in the first family, and by one method in every other family, in turn.

    Methods and families interact only in the seam: a fault is either in the method, and visible in the first family, or
    in the family, and visible with any method. The same is true for sides of padding, commands and ways to end.
    Families in `whole` are tested with every method, because they differ in this interaction.
    """
    return pytest.mark.parametrize(arguments, pairs(names, labels, whole))


def pairs(names: Sequence[str], labels: Sequence[Any], whole: Collection[str] = ()) -> list[tuple[str, Any]]:
    """Return the pairs of `each_pair`, and pairs that also interact outside of the seam.

    Registers are tokens of the model, and a further term of the denominator is added to logits that some families
    change.
    """
    met_by_all = [name for name in names if name == names[0] or name in whole]
    turns = ((name, labels[place % len(labels)]) for place, name in enumerate(names[1:]))
    elsewhere = [("register-tokens", names), *((label, OWN_LOGITS) for label in ("learnable-sink", "key-bias"))]
    more = ((name, label) for label, met in elsewhere if label in labels for name in met if name in names)
    return list(dict.fromkeys([*((name, label) for name in met_by_all for label in labels), *turns, *more]))


AT_TAPS = [label for label in METHODS if label != "register-tokens"]

OWN_LOGITS = ("gemma2", "gpt_oss", "bloom", "falcon-alibi", "mpt")  # a softcap, sink logits, ALiBi

OWN_SINKS = "gpt_oss"  # has learnable sinks already

# the families of tests of retrofits: one of each kind, and Falcon's own attention code for ALiBi
NAMES = [*REPRESENTATIVE, "falcon-alibi"]

# every method in the first family, one in every other family, and the further ones
EVERYWHERE = pytest.mark.parametrize(
    ("name", "label"), [*pairs(NAMES, list(METHODS)), *(("llama", label) for label in FURTHER)]
)

IDS = tiny_tokens(2, 9)

SETTINGS = Settings(positions=8, window=8, epsilon=0.3)


def plain_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(name, dtype=dtype)


def retrofitted(name: str, label: str, dtype: torch.dtype = torch.float64, trained: bool = True) -> PreTrainedModel:
    """Return a tiny model with the method; `trained` moves its parameters away from their start."""
    if name == OWN_SINKS and label == "learnable-sink":
        pytest.skip("has learnable sinks of its own")
    method, parameters = (METHODS | FURTHER)[label]
    torch.manual_seed(3)  # some starts are drawn
    model = retrofit_model(plain_model(name, dtype), None, method, **parameters)
    if trained:
        train(model)
    return model


@cache
def shared(name: str, label: str) -> PreTrainedModel:
    """Return a model of `retrofitted` that tests share and must not change."""
    return retrofitted(name, label)


@cache
def shared_plain(name: str) -> PreTrainedModel:
    return plain_model(name)


@torch.no_grad()
def train(model: PreTrainedModel) -> None:
    """Move every new parameter, differently for each head."""
    generator = torch.Generator().manual_seed(1)
    for parameter in new_parameters(model).values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_((0.5 * noise).to(parameter.dtype))


def in_double(model: PreTrainedModel) -> Any:
    """Use the modeling code of the class below the retrofitted one."""
    return gradient_reference.in_double(model.base_model)


def assert_close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def gradient_tables(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> dict[str, pd.DataFrame]:
    with in_double(model):
        names = ("gradient", "gradient-identities")
        return measured(model, batched(sequences, 2), SETTINGS, names, backward=True)
