"""Texts that the model generates."""

from typing import Any

import pytest
import torch
from tiny import tiny_model

import sinkscope
from sinkscope.errors import InputError

END = 2


def test_a_model_that_ends_its_texts_early_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation stops when all texts except one have ended."""
    model = tiny_model("llama")
    asked: list[int] = []

    def ending(self: Any, first: torch.Tensor, stopping_criteria: list, **_: Any) -> torch.Tensor:
        ids = torch.cat([first, torch.full_like(first, END)], dim=1)
        ids[:2, 1] = 5  # two go on …
        asked.append(len(first))
        assert not stopping_criteria[0](ids, None).any()
        ids[1, 1] = END  # … and then one
        assert stopping_criteria[0](ids, None).all()
        return ids

    monkeypatch.setattr(type(model), "generate", ending)
    with pytest.raises(InputError, match="only 0 of 100 texts reached 12 tokens"):
        sinkscope.analyze(model, input="sampled", seq_len=12, num_seqs=100)
    assert asked == [64]
