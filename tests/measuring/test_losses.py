"""Losses and their gradient in chunks, against those of all tokens at once."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from tiny import padded, ragged_tokens

from sinkscope.measuring.losses import loss_and_gradient, loss_in_chunks
from sinkscope.text.batch import IGNORED, Batch


def losses_at_once(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch.targets, ignore_index=IGNORED, reduction="none").sum(1)


def test_the_loss_in_chunks_is_the_loss_at_once() -> None:
    batch = padded(ragged_tokens((20, 7, 13)))
    logits = torch.randn(3, 20, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for chunk in (1, 3, 8, 1000):
        torch.testing.assert_close(loss_in_chunks(logits, batch, chunk), losses_at_once(logits, batch))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_gradient_by_the_logits_is_that_of_autograd(side: Literal["left", "right"]) -> None:
    batch = padded(ragged_tokens((20, 7, 13)), side)
    drawn = 30 * torch.randn(3, 20, 96, generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        logits = drawn.to(dtype)
        exact = logits.double().requires_grad_()
        losses = losses_at_once(exact, batch)
        (expected,) = torch.autograd.grad(losses.sum(), exact)
        for chunk in (1, 8, 1000):
            found, gradient = loss_and_gradient(logits, batch, chunk)
            torch.testing.assert_close(found, losses.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(gradient, expected.to(dtype), rtol=tolerance, atol=tolerance)
