"""Texts that a model writes itself."""

from typing import Any

import pytest
import torch
from tiny import tiny_model

import sinkscope
from sinkscope.errors import InputError


def test_a_model_that_ends_its_texts_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    asked = []

    def ends_at_once(self: Any, first: torch.Tensor, **_: Any) -> torch.Tensor:
        asked.append(len(first))
        return torch.cat([first, torch.full_like(first, 2)], dim=1)

    monkeypatch.setattr(type(model), "generate", ends_at_once)
    with pytest.raises(InputError, match="only 0 of 100 texts reached 12 tokens"):
        sinkscope.analyze(model, input="sampled", seq_len=12, num_seqs=100)
    assert asked == [64]
