"""Each decoding step gives what the same row of one full pass gives, computed by plain transformers."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel

import sinkscope
from sinkscope.measuring.decoding import tokens_of_thought
from sinkscope.measuring.watching import Watched
from sinkscope.models.families import find_family
from sinkscope.results.findings import FEWEST_QUERIES

IDS, PADDED, STEPS, EPSILON = tiny_tokens(2), 5, 24, 0.02
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
# attention functions of transformers and code of their own; learned, rotary and ALiBi positions; sink logits. The last
# three have sliding windows, whose caches drop position 0.
FAMILIES = ("llama", "qwen3", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "gptj", "mistral", "gemma3", "gpt_oss")
IN_FLOAT32 = ("bloom", "gptj")  # their own code has parts in float32


def generated(model: PreTrainedModel, padded: int, **options: Any) -> tuple[Watched, list[torch.Tensor]]:
    """Return what was seen while two sequences were continued, the second padded; and the tokens of each, (1,T)."""
    mask = torch.ones_like(IDS)
    mask[1, :padded] = 0
    with sinkscope.watch(model, decoding=True, epsilon=EPSILON) as seen:
        length = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1}  # the last one is not read
        tokens = model.generate(IDS, attention_mask=mask, do_sample=False, **length, **options)
    return seen, [tokens[:1, :-1], tokens[1:, padded:-1]]


def full_pass(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention (L,H,T,T) and the outputs of layers (L,T,D) of one full pass of plain transformers.

    Its softmax is in float32 in many families, and here in the model's dtype.
    """
    model.set_attn_implementation("eager")
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "softmax", lambda x, dim=-1, **ignored: x.softmax(dim))
        for layer in find_family(model).layer_modules(model):
            stack.enter_context(layer.register_forward_hook(keep))
        attentions = model(tokens, output_attentions=True, use_cache=False).attentions
    return torch.cat(attentions).numpy(), torch.cat(outputs).numpy()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_step_is_the_row_of_a_full_pass(name: str, cache: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    # in float64, BLOOM itself gives NaN where a query is padding
    seen, tokens = generated(model, PADDED * (name != "bloom"), **CACHES[cache])
    assert (seen.steps, dict(seen.skipped)) == (STEPS, {})
    sinks = seen.tables["decoding_sinks"]
    assert_near = partial(np.testing.assert_allclose, rtol=1e-6 if name in IN_FLOAT32 else 1e-10)
    for sequence, ids in enumerate(tokens):
        attention, outputs = full_pass(model, ids)
        length = ids.shape[1] - STEPS
        table = seen.tables["decoding"].query("sequence == @sequence").sort_values(["layer", "step"])
        assert table["position"].tolist() == list(range(length, length + STEPS)) * len(attention)
        assert table["token_id"].tolist() == ids[0, length:].tolist() * len(attention)
        assert_near(table["uniform"], 1 / (table["position"] + 1))
        to_first = attention[:, :, length:, 0]
        assert_near(table["sink_mass"], to_first.mean(1).ravel())
        assert_near(table["sink_heads"], (to_first > EPSILON).mean(1).ravel())
        magnitudes = np.abs(outputs[:, length:]).reshape(len(table), -1)
        largest = magnitudes.max(1)
        assert_near(table["largest"], largest)
        assert (table["coordinate"] == magnitudes.argmax(1)).all()
        assert_near(table["headroom"], 65504 / largest)
        assert_near(table["ratio"], largest / np.sort(magnitudes)[:, (magnitudes.shape[1] - 1) // 2])
        expected = [
            (layer, head, key, ids[0, key].item(), length + STEPS - key, received)
            for layer, head, key in np.ndindex(*attention.shape[:2], length + STEPS - FEWEST_QUERIES + 1)
            if key >= length and (received := attention[layer, head, key:, key].mean()) > EPSILON
        ]
        names = ["layer", "head", "position", "token_id", "queries", "received"]
        rows = sinks.query("sequence == @sequence")[names].sort_values(names, ignore_index=True)
        assert len(expected)
        pd.testing.assert_frame_equal(rows, pd.DataFrame(expected, columns=names), check_dtype=False, rtol=1e-6)


def test_a_thought_reaches_from_its_opening_token_to_the_closing_one() -> None:
    ids = torch.tensor([[5, 1, 5, 5, 2, 5, 1, 5], [2, 5, 5, 1, 1, 5, 2, 2]])
    within = [[0, 1, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0]]
    assert tokens_of_thought(ids, (1, 2)).long().tolist() == within
    assert not tokens_of_thought(ids, None).any()
