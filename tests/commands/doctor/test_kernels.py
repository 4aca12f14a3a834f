"""Kernels and logits that lack a feature of the model, against eager attention."""

from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokens
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from sinkscope.attention.kernels import repeat_heads
from sinkscope.commands.doctor import kernels as compared_kernels
from sinkscope.commands.doctor.kernels import ComparedKernel, compare_kernels, compare_logits
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

TOLERANCE = 1e-4
USED = {"gpt_oss": "learned sinks", "gemma2": "softcap", "mistral": "sliding window"}


def attend(
    features: set[str], module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor, scaling: float, softcap: float | None = None, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """A plain kernel of transformers that supports some of the features."""
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    logits = scaling * query @ key.transpose(2, 3)
    logits = logits if softcap is None or "softcap" not in features else softcap * (logits / softcap).tanh()
    if "sliding window" in features:
        logits = logits + mask
    else:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    sinks = named.get("s_aux")
    if sinks is not None and "learned sinks" in features:
        sinks = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Register kernels with all features and without one of them, each with eager attention's mask."""
    everything = {*USED.values()}
    for name in ("nothing", "everything", *everything):
        lacking = everything - {name} if name != "everything" else set()
        AttentionInterface.register(
            f"without {name}", lambda *args, lacking=lacking, **named: attend(lacking, *args, **named)
        )
        AttentionMaskInterface.register(f"without {name}", eager_mask)


def compared(model: PreTrainedModel) -> dict[str, ComparedKernel]:
    ids = tiny_tokens(1)
    comparisons = compare_kernels(model, find_family(model), Batch(ids, torch.ones_like(ids)), TOLERANCE)
    return {one.name: one for one in comparisons}


@pytest.mark.parametrize("name", USED)
def test_a_kernel_that_drops_what_the_model_needs_is_named(name: str) -> None:
    model, feature = tiny_model(name), USED[name]
    assert all(one.layer is None for one in compared(model).values())  # the intact model's
    model.set_attn_implementation("without nothing")
    assert compared(model)["without nothing"].layer is None
    model.set_attn_implementation(f"without {feature}")
    comparison = compared(model)[f"without {feature}"]
    assert (comparison.layer, comparison.dropped) == (0, (feature,))
    wrong = last_layer(model)
    model.set_attn_implementation("eager")
    right = last_layer(model)
    difference = (wrong - right).norm(dim=-1) / right.norm(dim=-1)
    assert comparison.difference == pytest.approx(float(difference.max()), rel=1e-3)


def test_a_kernel_that_drops_two_features_is_explained_by_both() -> None:
    model = tiny_model("gpt_oss", layer_types=["full_attention", "sliding_attention", "full_attention"])
    model.set_attn_implementation("without everything")
    assert compared(model)["without everything"].dropped == ("learned sinks", "sliding window")


def test_a_kernel_that_gives_nan_departs_in_its_first_layer() -> None:
    AttentionInterface.register("nan", lambda *args, **named: (torch.nan * attend(set(), *args, **named)[0], None))
    AttentionMaskInterface.register("nan", eager_mask)
    model = tiny_model("llama")
    model.set_attn_implementation("nan")
    assert compared(model)["nan"].layer == 0


def last_layer(model: PreTrainedModel) -> torch.Tensor:
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    with find_family(model).layer_modules(model)[-1].register_forward_hook(keep), torch.no_grad():
        model(tiny_tokens(1), use_cache=False)
    return outputs[0]


@pytest.mark.parametrize(("window", "tokens"), [(None, 64), (100, 116), (240, 256), (2000, 64)])
def test_the_compared_text_is_longer_than_the_window_if_that_is_possible(window: int | None, tokens: int) -> None:
    model = tiny_model("mistral")
    model.config.sliding_window = window
    assert compared_kernels.tokens_to_compare(model, find_family(model)) == tokens


def test_the_kernel_that_torch_compiles_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(compared_kernels, "_why_unavailable", lambda name, device: tried.append(name) or "not here")
    compared(tiny_model("llama"))
    assert tried[-1] == "flex_attention"
    assert len(tried) > 1


def test_logits_from_elsewhere_depart_where_a_feature_is_missing() -> None:
    model, ids = tiny_model("gpt_oss"), tiny_tokens(2)
    own = model(ids).logits
    rounded = model.to(torch.bfloat16)(ids).logits
    model = tiny_model("gpt_oss")
    family = find_family(model)
    log_probabilities = own.log_softmax(-1)
    same = compare_logits(model, family, ids, log_probabilities, torch.float32)
    assert (same.departing, same.excess <= 1) == (0, True)
    assert compare_logits(model, family, ids, rounded, torch.bfloat16).departing == 0
    assert compare_logits(model, family, ids, rounded, torch.float32).departing > 0
    model.set_attn_implementation("without learned sinks")
    wrong = model(ids).logits
    model.set_attn_implementation("eager")
    comparison = compare_logits(model, family, ids, wrong, torch.float32)
    assert comparison.dropped == ("learned sinks",)
    assert (comparison.sequence, comparison.position) == (0, 0)
    own[1, 5] += torch.linspace(0, 1, own.shape[-1])
    comparison = compare_logits(model, family, ids, own, torch.float32)
    assert (comparison.departing, comparison.sequence, comparison.position, comparison.dropped) == (1, 1, 5, ())
    assert comparison.excess > 1


def test_differences_of_logits_are_by_token_and_without_a_common_constant() -> None:
    expected = torch.tensor([[3.0, -3.0, 0.0], [1.0, 2.0, 3.0], [0.0, 4.0, 2.0]])
    logits = expected.clone()
    logits[0] += 7.0  # a constant changes no probability
    logits[1] += torch.tensor([0.5, -0.5, 0.0])
    differences = compared_kernels._token_differences(logits, expected)
    torch.testing.assert_close(differences, torch.tensor([0.0, 0.5, 0.0]))


def test_tokens_to_compare_reach_beyond_the_window_and_not_beyond_the_positions() -> None:
    checked = compared_kernels.CHECKED_TOKENS
    model = tiny_model("mistral")
    for window, positions, expected in (
        (checked, 4096, checked + checked // 4),
        (None, 4096, checked),
        (6, 4096, checked),
        (compared_kernels.LONGEST_WINDOW, 4096, checked),  # too long
    ):
        model.config.sliding_window, model.config.max_position_embeddings = window, positions
        assert compared_kernels.tokens_to_compare(model, find_family(model)) == expected
    model.config.sliding_window, model.config.max_position_embeddings = None, checked - 4
    assert compared_kernels.tokens_to_compare(model, find_family(model)) == checked - 4


def test_a_window_is_dropped_on_both_sides_of_an_encoders_queries() -> None:
    apart = torch.arange(4)[:, None] - torch.arange(4)
    for both, window in ((apart < 9, apart.abs() < 2), (apart >= 0, (apart >= 0) & (apart < 2))):
        assert compared_kernels._without_window(apart, both[None, None], {}) is None
        dropped = compared_kernels._without_window(apart, window[None, None], {})
        assert dropped is not None
        assert torch.equal(dropped[0], both[None, None])


def test_only_an_unusual_scaling_can_be_dropped() -> None:
    query, mask = torch.zeros(1, 2, 3, 16), torch.ones(1)
    without = compared_kernels._without_scaling
    assert without(query, mask, {}) is None
    assert without(query, mask, {"scaling": 0.25}) is None  # 16 ** -0.5
    assert without(query, mask, {"scaling": 0.5, "more": 1}) == (mask, {"scaling": 0.25, "more": 1})
