"""The papers' equations for gradients against autograd, in float64; a wrong equation does not pass."""

from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from gradient_reference import in_double
from support.retrofitted import METHODS, each_pair
from tiny import TINY, batched, measured, ragged_tokens, tiny_model

from sinkscope import retrofit_model
from sinkscope.attention.weights import row_chunks
from sinkscope.measuring.observables import gradient_identities
from sinkscope.measuring.observables.observable import Settings

LENGTHS, POSITIONS = (20, 20, 9, 3), 12
OWN_LOGITS = ("bloom", "mpt", "gptj", "gpt_neo")  # in the model's own code


def residuals(model: Any, side: str = "right", size: int = 2) -> pd.Series:
    with in_double(model.base_model):
        settings, batches = Settings(positions=POSITIONS, window=8), batched(ragged_tokens(LENGTHS), size, side)
        tables = measured(model, batches, settings, ("gradient-identities",), backward=True)
    table = tables.get("gradient_identity", pd.DataFrame(columns=["pathway", "head", "position", "residual"]))
    return table.set_index(["pathway", "head", "position"])["residual"].dropna()


@each_pair(list(TINY), ["right", "left"], ("name", "side"), whole=("gpt2", "gpt_oss", "falcon"))
def test_gradients_of_queries_and_keys_follow_from_those_of_the_logits(name: str, side: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    measured_residuals = residuals(model, side)
    if name in OWN_LOGITS:
        assert measured_residuals.empty
        return
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    assert len(measured_residuals["query"]) % (heads * (POSITIONS - 1)) == 0  # not the query that sees one key
    assert {position for _, position in measured_residuals["key"].index} == set(range(POSITIONS))
    assert measured_residuals.max() < 1e-9


@pytest.mark.parametrize("label", ["vga", "iga", "vscale", "vscale-fixed", "vga-output", "register-tokens"])
def test_gradients_before_a_gate_follow_from_those_after_it(label: str) -> None:
    """Gates on heads' outputs and register tokens change no values."""
    method, parameters = METHODS[label]
    model = retrofit_model(tiny_model("llama", dtype=torch.float64), None, method, **parameters)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "retrofit" in name:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    measured_residuals = residuals(model.requires_grad_(False))
    assert ("raw_value" in measured_residuals) == (label in ("vga", "iga", "vscale", "vscale-fixed"))
    assert measured_residuals.max() < 1e-8


def test_wrong_equations_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without y, with keys in place of queries, and without the path through the gate itself."""
    right = gradient_identities.gradients_through_logits
    model = retrofit_model(tiny_model("llama", dtype=torch.float64), None, "vga").requires_grad_(False)

    def without_output(read: Any, mix: torch.Tensor, *others: Any) -> dict[str, torch.Tensor]:
        return right(read, torch.zeros_like(mix), *others)

    monkeypatch.setattr(gradient_identities, "gradients_through_logits", without_output)
    measured_residuals = residuals(model)
    assert measured_residuals["key"].median() > 0.1
    assert measured_residuals["query"].median() > 0.1
    part = type(model.model.layers[0].self_attn.retrofit)
    monkeypatch.setattr(part, "pullback", lambda self, x, value, upstream: upstream)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "retrofit" in name:
                parameter.add_(0.5)
    assert residuals(model)["raw_value"].median() > 0.01


def test_queries_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_identities, "row_chunks", partial(row_chunks, chunk=7))
    assert residuals(tiny_model("llama", dtype=torch.float64)).max() < 1e-9
