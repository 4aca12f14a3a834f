"""Wrapped forwards: the module's output within the block, and that everything is restored."""

import pytest
import torch
from torch import nn

from sinkscope.models.edits import edited_output, wrapped_forward


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x, "weights"


def test_edited_outputs_nest_and_are_undone() -> None:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    before = module(x)
    with edited_output(module, lambda module, y: y + 1), edited_output(module, lambda module, y: y * 2):
        assert torch.equal(module(x), (before + 1) * 2)
    assert torch.equal(module(x), before)
    assert "forward" not in vars(module)


def test_of_a_tuple_the_first_tensor_is_edited() -> None:
    module = Pair()
    with edited_output(module, lambda module, x: -x):
        edited, rest = module(torch.ones(2))
    assert torch.equal(edited, -torch.ones(2))
    assert rest == "weights"


def test_a_forward_of_its_own_comes_back_also_after_an_error() -> None:
    """A forward that is set on the module itself, as accelerate does."""
    module = nn.Linear(2, 2)
    own = module.forward = module.forward
    with pytest.raises(RuntimeError), wrapped_forward(module, lambda forward, x: forward(x) + 1):
        raise RuntimeError
    assert vars(module)["forward"] is own
