"""Each decoding step gives what the same row of one full pass gives, computed by plain transformers."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.encoders import encoder
from tiny import ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

import sinkscope
from sinkscope.errors import InputError
from sinkscope.measuring.decoding import ends_of, thought_of, tokens_of_thought
from sinkscope.measuring.watching import Watched
from sinkscope.models.families import find_family
from sinkscope.results.findings import FEWEST_QUERIES
from sinkscope.retrofits import retrofit_model

IDS, PADDED, STEPS, EPSILON, END = tiny_tokens(2), 5, 24, 0.02, 2
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

    def of_sequence(table: str, number: int) -> pd.DataFrame:
        return seen.tables[table].query(f"sequence == {number}")

    assert_near = partial(np.testing.assert_allclose, rtol=1e-6 if name in IN_FLOAT32 else 1e-10)
    for number, ids in enumerate(tokens):
        attention, outputs = full_pass(model, ids)
        length = ids.shape[1] - STEPS
        table = of_sequence("decoding", number).sort_values(["layer", "step"])
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
        rows = of_sequence("decoding_sinks", number)[names].sort_values(names, ignore_index=True)
        assert len(expected)
        pd.testing.assert_frame_equal(rows, pd.DataFrame(expected, columns=names), check_dtype=False, rtol=1e-6)


def test_a_thought_reaches_from_its_opening_token_to_the_closing_one() -> None:
    ids = torch.tensor([[5, 1, 5, 5, 2, 5, 1, 5], [2, 5, 5, 1, 1, 5, 2, 2]])
    within = [[0, 1, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0]]
    assert tokens_of_thought(ids, (1, 2)).long().tolist() == within
    assert not tokens_of_thought(ids, None).any()


def test_a_thought_that_the_prompt_has_begun_goes_on_until_a_decoded_token_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (opens, closes) = tiny_model("llama"), (90, 91)
    monkeypatch.setattr("sinkscope.measuring.watching.thought_of", lambda tokenizer: (opens, closes))
    cache = DynamicCache(config=model.config)
    with sinkscope.watch(model, decoding=True) as seen:
        model(torch.tensor([[5, closes, 6, opens], [opens, 5, closes, 6]]), past_key_values=cache)
        decoded(model, cache, torch.tensor([[7, 8, closes, 9], [7, opens, 8, 9]]))
    within = seen.tables["decoding"].query("layer == 1").groupby("sequence")["is_thought"].agg(list)
    assert within.tolist() == [[True, True, False, False], [False, True, True, True]]


def decoded(model: PreTrainedModel, cache: DynamicCache, ids: torch.Tensor) -> None:
    for token in ids.T:
        model(token[:, None], past_key_values=cache)


def test_steps_of_several_caches_are_told_apart_and_follow_their_prompts() -> None:
    """The second cache has a prompt from before the block: its sequences come last."""
    model = tiny_model("llama")
    caches = [DynamicCache(config=model.config) for _ in range(3)]
    model(IDS[:1, :9], past_key_values=caches[1])
    with sinkscope.watch(model, decoding=True) as seen:
        model(IDS[:1], past_key_values=caches[0])
        decoded(model, caches[1], IDS[1:, :3])
        model(IDS, past_key_values=caches[2])
        decoded(model, caches[0], IDS[1:, 3:7])
        assert repr(seen) == "Watched LlamaForCausalLM: 2 measured calls, 7 decoding steps"
        decoded(model, caches[2], IDS[:, :2])
    assert (seen.calls, seen.steps, dict(seen.skipped)) == (2, 9, {})
    first_layer = seen.tables["decoding"].query("layer == 0")
    positions = first_layer.groupby("sequence")["position"].agg(list).to_dict()
    assert positions == {0: [24, 25, 26, 27], 1: [24, 25], 2: [24, 25], 3: [9, 10, 11]}
    tokens = first_layer.groupby("sequence")["token_id"].agg(list)
    assert (tokens[0], tokens[1], tokens[2]) == (IDS[1, 3:7].tolist(), IDS[0, :2].tolist(), IDS[1, :2].tolist())
    assert seen.tables["massive"]["sequence"].nunique() == 3
    with sinkscope.watch(model, decoding=True) as steps_alone:
        decoded(model, caches[1], IDS[1:, :3])
    assert list(steps_alone.tables) == ["decoding", "decoding_sinks"]


def test_a_cache_that_was_emptied_begins_other_sequences() -> None:
    """Also where the next prompt is a single token, whose call is not measured."""
    model = tiny_model("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with sinkscope.watch(model, decoding=True) as seen:
        for prompt, steps in ((IDS[:1], IDS[:1, :3]), (IDS[1:], IDS[:1, 3:5]), (IDS[:1, :1], IDS[:1, 1:5])):
            cache.reset()
            model(prompt, past_key_values=cache)
            decoded(model, cache, steps)
    assert dict(seen.skipped) == {"a single token": 1}
    table = seen.tables["decoding"].query("layer == 0").groupby("sequence")["position"].agg(list)
    assert table.tolist() == [[24, 25, 26], [24, 25], [1, 2, 3, 4]]


def test_a_sequence_ends_with_its_end_token_while_others_go_on() -> None:
    model, text = tiny_model("llama"), torch.cat([IDS, IDS[:, :6]], 1)
    end = FEWEST_QUERIES + 2
    text[1, end] = END

    def watched(tokens: torch.Tensor) -> Watched:
        with sinkscope.watch(model, decoding=True, epsilon=0.0) as seen:
            cache = DynamicCache(config=model.config)
            model(IDS, past_key_values=cache)
            decoded(model, cache, tokens)
        return seen

    seen = watched(text)
    table = seen.tables["decoding"].query("layer == 1")
    assert table.groupby("sequence")["step"].max().to_dict() == {0: 29, 1: end - 1}
    of_second = [one.tables["decoding_sinks"].query("sequence == 1") for one in (seen, watched(text[:, :end]))]
    assert of_second[0].query("layer == 1 and head == 0")["queries"].tolist() == [end, end - 1, end - 2]
    pd.testing.assert_frame_equal(*(rows.reset_index(drop=True) for rows in of_second))


def test_analyze_decodes_after_its_text_and_says_what_it_saw(tmp_path: Path) -> None:
    model = tiny_model("llama", spread=3.0)
    text = {"input": [ids.tolist() for ids in ragged_tokens((12, 9, 12))], "seq_len": 12, "quiet": True}
    run = sinkscope.analyze(
        model, generate=40, epsilon=0.03, figures=["decoding"], page=False, out=tmp_path / "run", **text
    )
    table = run.tables["decoding"]
    model.generation_config.eos_token_id = None
    continued = model.generate(torch.tensor(text["input"][1])[None], max_new_tokens=40, do_sample=False)
    tokens = table.query("sequence == 1 and layer == 0")["token_id"].tolist()
    assert tokens == continued[0, 9 : 9 + len(tokens)].tolist()
    (finding,) = (one for one in run.findings if one.name == "decoding")
    assert finding.value == pytest.approx(table["sink_mass"].mean())
    by_step = table.groupby(["sequence", "step"])["sink_mass"].mean().unstack().dropna()  # those that go on
    change = (by_step.iloc[:, -FEWEST_QUERIES:].mean(axis=1) - by_step.iloc[:, :FEWEST_QUERIES].mean(axis=1)).mean()
    assert finding.numbers["change"] == pytest.approx(change)
    pairs = run.tables["decoding_sinks"].drop_duplicates(["layer", "head", "sequence"])
    assert 0 < len(pairs) < len(run.tables["decoding_sinks"])
    assert finding.numbers["new_sinks"] == pytest.approx(len(pairs) / (3 * 4 * 3))
    assert finding.numbers["largest"] == table["largest"].max()
    assert finding.null == pytest.approx((1 / (table["position"] + 1)).mean())
    assert (tmp_path / "run" / "figures" / "decoding.png").exists()
    with pytest.raises(InputError, match="has 256 positions, and the text 12"):
        sinkscope.analyze(model, generate=245, **text)


def test_analyze_decodes_greedily_whatever_the_model_says_of_its_generation() -> None:
    model = tiny_model("llama", spread=3.0)
    text = ragged_tokens((12, 12))
    options = {"eos_token_id": None, "do_sample": False, "max_new_tokens": 12}
    expected = model.generate(torch.from_numpy(np.stack(text)), **options)[:, 12:]
    own = GenerationConfig(
        repetition_penalty=1.9, num_beams=3, use_cache=False, no_repeat_ngram_size=2, do_sample=True, temperature=9.0
    )
    model.generation_config = own
    run = sinkscope.analyze(model, input=[ids.tolist() for ids in text], seq_len=12, generate=12)
    tokens = run.tables["decoding"].query("layer == 0").groupby("sequence")["token_id"].agg(list)
    assert tokens.tolist() == expected.tolist()
    assert model.generation_config is own
    assert len(np.unique(expected)) < expected.numel()  # the penalty would have changed them


@pytest.mark.parametrize("padded", [0, PADDED])
def test_registers_are_the_first_positions_of_decoding_too(padded: int) -> None:
    plain = tiny_model("llama", dtype=torch.float64)
    model = retrofit_model(plain, None, "register-tokens", count=2, deviation=1.0).requires_grad_(False)
    seen, tokens = generated(model, padded)
    assert (seen.steps, dict(seen.skipped)) == (STEPS, {})
    cache = DynamicCache(config=model.config)
    with sinkscope.watch(model, decoding=True) as without_mask:
        model(tokens[0][:, :-STEPS], past_key_values=cache)
        decoded(model, cache, tokens[0][:, -STEPS:])
    for number, ids in enumerate(tokens):
        attention, _ = full_pass(model, ids)
        length = ids.shape[1] - STEPS + 2
        table = seen.tables["decoding"].query(f"sequence == {number}").sort_values(["layer", "step"])
        assert table["position"].tolist() == list(range(length, length + STEPS)) * len(attention)
        np.testing.assert_allclose(table["sink_mass"], attention[:, :, length:, 0].mean(1).ravel(), rtol=1e-10)
        assert table["token_id"].tolist() == ids[0, -STEPS:].tolist() * len(attention)
    same = ["position", "sink_mass", "largest"]
    first = seen.tables["decoding"].query("sequence == 0")[same].reset_index(drop=True)
    pd.testing.assert_frame_equal(first, without_mask.tables["decoding"][same], rtol=1e-10)
    with pytest.raises(InputError, match="has 254 positions, and the text 12"):
        sinkscope.analyze(model, input=IDS[:, :12].tolist(), seq_len=12, generate=243)


def test_a_sequence_ends_with_any_of_several_end_tokens() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [END, 90]
    assert ends_of(model) == {END, 90}
    with sinkscope.watch(model, decoding=True) as seen:
        cache = DynamicCache(config=model.config)
        model(IDS, past_key_values=cache)
        decoded(model, cache, torch.tensor([[5, 6, 7, 8], [5, 90, 7, 8]]))
    assert seen.tables["decoding"].query("layer == 0")["sequence"].tolist() == [0] * 4 + [1]


@pytest.mark.parametrize(
    ("template", "added", "expected"),
    [
        ("… <think> …", {"<think>": 7, "</think>": 8}, (7, 8)),
        ("no thoughts", {"<think>": 7, "</think>": 8}, None),  # tokens of the vocabulary that nothing writes
        ("… <think> …", {"<think>": 7}, None),
        ("[THINK]", {"<think>": 7, "</think>": 8, "[THINK]": 5, "[/THINK]": 6}, (5, 6)),
        (None, {"<think>": 7, "</think>": 8}, None),
    ],
)
def test_thoughts_are_those_of_the_chat_template(
    template: str | None, added: dict[str, int], expected: tuple[int, int] | None
) -> None:
    assert thought_of(SimpleNamespace(chat_template=template, get_added_vocab=lambda: added)) == expected


def test_models_that_cannot_be_measured_while_they_decode_are_refused_beforehand() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=96)
    for model in (AutoModelForCausalLM.from_config(config), encoder("bert", torch.float32, 1.0)):
        with pytest.raises(InputError, match=r"^generate=4: "):
            sinkscope.analyze(model, input=IDS.tolist(), seq_len=24, generate=4)
