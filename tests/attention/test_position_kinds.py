"""The kinds of positions of models, found layer by layer from the results of their attention."""

from dataclasses import replace

import pytest
import torch
from support.every_model import tiny_of
from support.hooked import calls_of
from support.naming import naming
from tiny import TINY, tiny_model
from torch import nn

from sinkscope.attention import position_kinds
from sinkscope.attention.kernels import AttentionCall
from sinkscope.attention.position_kinds import bias_kind
from sinkscope.measuring.subject import family_of
from sinkscope.models.families import find_family
from sinkscope.models.family import NO_POSITIONS, UNKNOWN_POSITIONS
from sinkscope.models.projections import position_vectors

NOPE_LAST = ("rotary", "rotary", "rotary", "none")
FOUND = {
    **dict.fromkeys(("smollm3", "llama4_text"), NOPE_LAST),
    "jamba": ("", "none", "", "none"),
    "nemotron_h": ("", "", "none", ""),
    **dict.fromkeys(("xglm", "ctrl", "marian"), ("sinusoidal",) * 4),
    **dict.fromkeys(("biogpt", "openai-gpt"), ("learned",) * 4),
    **dict.fromkeys(("codegen", "deepseek_v3"), ("rotary",) * 4),
    "qwen3_next": ("", "rotary", "", "rotary"),
    "mpt": ("alibi",) * 4,
}


@pytest.mark.parametrize("model_type", FOUND)
def test_each_layers_kind(model_type: str) -> None:
    family, _ = family_of(tiny_of(model_type))
    assert family.layer_positions == FOUND[model_type]


def test_rows_say_what_is_found() -> None:
    for name in TINY:
        with naming(name):
            model = tiny_model(name)
            row, (family, _) = find_family(model), family_of(model)
            assert family.kinds_of_positions == {row.positions}
            assert (family.position_embedding, family.position_offset) == (row.position_embedding, row.position_offset)


@pytest.mark.parametrize("model_type", ["blenderbot", "bart", "whisper", "biogpt"])
def test_learned_vectors_are_those_that_are_added(model_type: str) -> None:
    """Some of these tables begin with two rows that belong to no position."""
    model = tiny_of(model_type)
    family, _ = family_of(model)
    calls = calls_of(model, {"table": model.get_submodule(family.position_embedding)}, torch.arange(3, 9)[None])
    ((_, added),) = calls["table"]
    assert torch.equal(position_vectors(model, family)[:6], added.flatten(0, -2)[-6:])


TURNED, SAME, SOME = torch.tensor([True, True]), torch.tensor([False, False]), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("query", "key", "kind"),
    [
        (TURNED, SAME, "rotary"),
        (SAME, TURNED, "rotary"),
        (SAME, SAME, NO_POSITIONS),
        (SOME, SAME, UNKNOWN_POSITIONS),
        (SAME, SOME, UNKNOWN_POSITIONS),
    ],
)
def test_queries_or_keys_that_turn(
    query: torch.Tensor, key: torch.Tensor, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    turns = {model.config.num_attention_heads: query, model.config.num_key_value_heads: key}
    monkeypatch.setattr(position_kinds, "_direction_changes", lambda x: turns[x.shape[1]])
    row = replace(find_family(model), positions=UNKNOWN_POSITIONS)
    assert position_kinds.with_positions(model, row).layer_positions == (kind,)


def test_only_the_state_is_repeated() -> None:
    """Attention may also take other tensors of the state's shape, such as the embeddings."""
    state, other = torch.arange(6.0).view(1, 3, 2), torch.ones(1, 3, 2)
    (repeated, again), kwargs = position_kinds._repeat_last_state(nn.Identity(), (state, state.clone()), {"x": other})
    assert torch.equal(repeated, torch.tensor([[[4.0, 5.0]] * 3]))
    assert torch.equal(again, repeated)
    assert kwargs["x"] is other


def test_a_bias_that_is_not_linear_is_relative() -> None:
    distance = (torch.arange(8)[:, None] - torch.arange(8)).float()
    unseen = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)
    kinds = [
        bias_kind(AttentionCall((bias + unseen)[None, None], scaling=1.0))
        for bias in (-0.1 * distance, -(distance.clamp(min=0) ** 0.5), torch.zeros(8, 8))
    ]
    assert kinds == ["alibi", "relative", "none"]
