"""Checks that a model is unchanged after something was put into it and taken out again."""

from typing import Any

import torch
from tiny import tiny_tokens
from transformers import PreTrainedModel

from support.everything import differences, snapshot


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(tiny_tokens(2, 9), use_cache=False).logits


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    return snapshot(model) | {"logits": logits(model)}


def assert_as_before(model: PreTrainedModel, before: dict[str, Any]) -> None:
    assert differences(before, state_of(model)) == []
