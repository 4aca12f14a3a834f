"""The fingerprint of a model changes with any value that affects what it computes, and with nothing else."""

from collections.abc import Callable

import pytest
import torch
from tiny import tiny_model
from torch import nn

from sinkscope.models.in_memory import fingerprint


def one_entry(model: nn.Module) -> None:
    """An entry that no sample of a few, evenly spaced ones would hold."""
    with torch.no_grad():
        model.get_input_embeddings().weight[1, 1] += 1e-3


def a_setting(model: nn.Module) -> None:
    model.config.rms_norm_eps *= 2


def a_buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq[-1] *= 2


@pytest.mark.parametrize("change", [one_entry, a_setting, a_buffer])
def test_it_changes_with_what_is_computed(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before


def test_it_is_the_same_wherever_a_model_is_loaded_from(tmp_path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert fingerprint(type(model).from_pretrained(tmp_path / "a")) == fingerprint(
        type(model).from_pretrained(tmp_path / "b")
    )


def test_of_halves_too() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    before = fingerprint(model)
    assert fingerprint(model.to(torch.float32)) != before
