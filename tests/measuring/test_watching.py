"""`watch` gives the tables of a traced pass, and the model computes what it computes without it, bit for bit."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.hooked import hook_all
from support.retrofitted import retrofitted
from support.tables import assert_same_tables
from tiny import measured, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import sinkscope
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.passes import tables_of
from sinkscope.measuring.tracer import model_inputs
from sinkscope.measuring.watching import CHUNKED, Watched
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

LENGTHS = (24, 17, 5)
IDS = tiny_tokens()
assert_near = partial(assert_same_tables, rtol=1e-4, atol=1e-6)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    # transformers' attention functions, and code of their own: eager, fused, with copies of key heads, with logits in
    # float32; dropout in GPT-2; sink logits; gates and a further term, also in a model with code of its own
    **{name: partial(tiny_model, name) for name in ("llama", "gpt2", "gpt_oss", "bloom", "falcon-new", "gptj", "phi3")},
    "llama-vga": lambda: retrofitted("llama", "vga", torch.float32),
    "llama-sigmoid": lambda: retrofitted("llama", "sigmoid", torch.float32),
    "phi3-hooked": lambda: hook_all(tiny_model("phi3")),
    "bloom-key-bias": lambda: retrofitted("bloom", "key-bias", torch.float32),
}


def step(
    model: PreTrainedModel, inputs: dict[str, Any], block: Callable[[], AbstractContextManager]
) -> list[torch.Tensor | None]:
    """Return logits, gradients and the state of the random numbers of a call in training mode."""
    model.train().requires_grad_(True).zero_grad()
    torch.manual_seed(0)
    with block():
        logits = model(**inputs).logits
    logits.float().square().mean().backward()
    return [logits, *(p.grad for p in model.parameters()), torch.get_rng_state()]


def attributes(model: nn.Module) -> list[Any]:
    return [dict(value) if isinstance(value, dict) else value for m in model.modules() for value in vars(m).values()]


def assert_unnoticed(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    plain, before = step(model, inputs, nullcontext), [repr(one) for one in attributes(model)]
    watched = step(model, inputs, partial(sinkscope.watch, model))
    assert [repr(one) for one in attributes(model)] == before
    for value, seen in zip(plain, watched, strict=True):
        assert value is seen if value is None or seen is None else torch.equal(value, seen)


@pytest.mark.parametrize("name", MODELS)
def test_tables_are_those_of_a_trace_and_a_training_step_does_not_notice(name: str) -> None:
    model = MODELS[name]().eval()
    batch = padded(ragged_tokens(LENGTHS), "right" if name == "gpt_oss" else "left")
    inputs = model_inputs(model, batch, True, find_family(model).first_position)
    with sinkscope.watch(model) as seen, torch.no_grad():
        model(**inputs)
    assert (seen.calls, dict(seen.skipped)) == (1, {})
    expected = measured(model, [batch], Settings(positions=16, window=64), seen._names)
    assert_near(expected, tables_of(seen._observables))
    assert seen.sink_rate == pytest.approx(seen.tables["attention"].query("position == 0")["sink_rate"].mean())
    assert abs(seen.massive.value) == seen.tables["massive"]["value"].abs().max()
    assert_unnoticed(model, inputs)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])  # the last two: masks by kind of layer
def test_the_prompt_in_a_static_cache_is_measured(name: str, is_padded: bool) -> None:
    """Its slots for later tokens are empty: they are left out of keys and values."""
    model, mask = tiny_model(name).eval(), torch.ones_like(IDS[:2])
    mask[1, :5] -= int(is_padded)

    def watched(**options: Any) -> Watched:
        with sinkscope.watch(model) as seen:
            model.generate(IDS[:2], attention_mask=mask, max_new_tokens=4, do_sample=False, **options)
        return seen

    static = watched(cache_implementation="static", disable_compile=True)
    assert static.calls == 1
    assert_near(static.tables, watched().tables)


def test_its_repr_has_the_numbers_of_complete_calls() -> None:
    model = tiny_model("llama").eval()
    with sinkscope.watch(model) as seen:
        assert repr(seen) == "Watched LlamaForCausalLM: 0 measured calls"
        model(IDS, use_cache=False)
        model(IDS[:, :1])
    rate = f"{100 * seen.sink_rate:.1f}%"
    assert repr(seen).startswith(f"Watched LlamaForCausalLM: 1 measured call, sink rate {rate}, ")
    assert repr(seen).endswith("\nnot measured: a single token (1 ×)")


def test_why_a_short_prompt_has_no_sink_rate_is_said() -> None:
    model = tiny_model("llama").eval()
    with sinkscope.watch(model) as seen:
        model(IDS[:1, :4])
    with pytest.warns(UserWarning, match="no sink rate of position 0: uniform attention alone gives it 52.1%") as said:
        assert seen.tables["attention"].query("position == 0")["sink_rate"].isna().all()
    assert said[0].filename == __file__
    assert np.isnan(seen.sink_rate)


@pytest.mark.parametrize("kinds", [("full_attention", "sliding_attention"), ("sliding_attention", "full_attention")])
def test_masks_by_kind_of_layer_are_read_in_any_order(kinds: tuple[str, str]) -> None:
    """Their order is that of a set, and layers that see all earlier tokens need no mask."""
    model, ids = tiny_model("gemma3").eval(), IDS[:2]
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    window = model.config.sliding_window
    masks = {"full_attention": None, "sliding_attention": ((distance >= 0) & (distance < window)).expand(2, 1, -1, -1)}
    with sinkscope.watch(model) as seen:
        model(ids, attention_mask={kind: masks[kind] for kind in kinds})
    with sinkscope.watch(model) as expected:
        model(ids)
    assert_near(seen.tables, expected.tables)


def test_a_mask_of_several_sequences_is_skipped() -> None:
    model, ids = tiny_model("llama").eval(), IDS[:1, :12]
    apart = torch.block_diag(*[torch.ones(6, 6).tril()] * 2).bool()[None, None]
    with sinkscope.watch(model) as seen:
        model(ids, attention_mask=apart)
        model(ids, attention_mask=torch.ones(12, 12).tril().bool()[None, None])
    assert (seen.calls, [*seen.skipped.values()]) == (1, [1])


def test_calls_add_up_and_decoding_is_skipped_by_name() -> None:
    model = tiny_model("llama").eval()
    with sinkscope.watch(model, epsilon=0.1) as seen:
        model.generate(IDS[:2], attention_mask=torch.ones_like(IDS[:2]), max_new_tokens=4, do_sample=False)
        model(IDS[2:, :9])
        model(inputs_embeds=torch.zeros(1, 5, 32))
        model(IDS[:1], position_ids=torch.arange(24)[None] % 8)
    assert seen.calls == 2
    (decoding, three), (without, one), (packed, single) = seen.skipped.items()
    assert ("decoding" in decoding, three) == (True, 3)
    assert ("input_ids" in without, one, "several sequences" in packed, single) == (True, 1, True, 1)
    batches = [Batch(IDS[:2], torch.ones_like(IDS[:2])), Batch(IDS[2:, :9], torch.ones_like(IDS[2:, :9]), 2)]
    settings = Settings(positions=16, window=64, epsilon=0.1)
    assert_near(measured(model, batches, settings, seen._names), tables_of(seen._observables))
    with sinkscope.watch(model) as nothing:
        pass
    with pytest.raises(SinkscopeError, match="no call"):
        _ = nothing.sink_rate
    with pytest.raises(InputError, match="more than the forward pass"), sinkscope.watch(model, observables="gradient"):
        pass


@pytest.mark.parametrize("positions", [[0, 1, 2, 9, 10, 11], [0, 1, 2, 2, 3, 4], [3, 4, 5, 0, 1, 2]])
def test_positions_that_jump_or_restart_are_not_one_sequence(positions: list[int]) -> None:
    model = tiny_model("llama").eval()
    with sinkscope.watch(model) as seen, torch.no_grad():
        model(IDS[:1, :6], position_ids=torch.tensor([positions]))
        model(IDS[:1, :6], position_ids=torch.arange(6)[None])
    assert (seen.calls, list(seen.skipped)) == (1, ["several sequences in one row, or none"])


def test_a_prompt_in_chunks_is_not_measured_by_its_first_chunk() -> None:
    """A complete prompt before or after it is, and its sequences are numbered without gaps."""
    model = tiny_model("llama").eval()
    with torch.no_grad():
        with sinkscope.watch(model) as seen:
            caches = [DynamicCache(), DynamicCache(), DynamicCache()]
            model(IDS[:1], past_key_values=caches[0])
            model(IDS[1:2, :9], past_key_values=caches[1])
            model(IDS[1:2, 9:18], past_key_values=caches[1])
            model(IDS[2:3], past_key_values=caches[2])
            model(IDS[:1, :1], past_key_values=caches[2])  # decoding
            assert seen.calls == 2
        assert seen.skipped == {CHUNKED: 1, next(name for name in seen.skipped if "decoding" in name): 2}
        with sinkscope.watch(model) as whole:
            model(IDS[:3:2])
        assert_near(whole.tables, seen.tables)
        with sinkscope.watch(model) as generated:
            mask = torch.ones_like(IDS[:2])
            model.generate(IDS[:2], attention_mask=mask, max_new_tokens=3, do_sample=False, prefill_chunk_size=10)
        assert (generated.calls, generated.skipped[CHUNKED]) == (0, 1)


def test_autocast_gradient_checkpointing_and_inference_mode() -> None:
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert_unnoticed(model, {"input_ids": IDS})
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_unnoticed(model, {"input_ids": IDS})
    with torch.inference_mode(), sinkscope.watch(model.eval()) as seen:
        model(IDS)
    assert 0 < seen.metric("window_mass") < 1


def test_a_compiled_model_runs_uncompiled_in_the_block_and_compiled_after_it() -> None:
    model, graphs = tiny_model("llama").eval(), list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        before, count = compiled(IDS).logits, len(graphs)
        with sinkscope.watch(compiled) as seen:
            within = compiled(IDS).logits
        after = compiled(IDS).logits
    assert seen.calls == 1
    assert count == len(graphs) > 0
    assert torch.equal(before, after)
    torch.testing.assert_close(before, within)


def test_an_intervention_is_watched_and_other_threads_are_left_alone() -> None:
    model = tiny_model("llama").eval()
    zeroed = sinkscope.intervening(model, "nullify-first-embedding")
    with zeroed, sinkscope.watch(model) as changed, sinkscope.watch(model) as inner:
        model(IDS)
    with sinkscope.watch(model) as plain:
        model(IDS)
    assert changed.tables["summary"].equals(inner.tables["summary"])
    assert not changed.tables["summary"].equals(plain.tables["summary"])

    outputs, started, released = [model(IDS).logits], threading.Event(), threading.Event()
    blocked = model.model.layers[1].register_forward_hook(lambda *_: started.set() or (released.wait(60) and None))
    with sinkscope.watch(model) as seen:
        first = threading.Thread(target=lambda: outputs.append(model(IDS).logits))
        first.start()
        assert started.wait(60)
        blocked.remove()
        outputs.append(model(IDS).logits)
        released.set()
        first.join()
    assert (seen.calls, sum(seen.skipped.values())) == (1, 1)
    assert all(torch.equal(outputs[0], one) for one in outputs)
    assert seen.sink_rate == plain.sink_rate


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_call_that_fails_or_gives_nan_is_skipped_with_the_reason() -> None:
    model = tiny_model("llama").eval()
    with sinkscope.watch(model) as seen:
        model(IDS)
        with pytest.raises(IndexError):
            model(IDS + 1000)
    assert (seen.calls, sum(seen.skipped.values())) == (1, 1)
    before = [repr(one) for one in attributes(model)]
    with pytest.raises(KeyboardInterrupt), sinkscope.watch(model), model.lm_head.register_forward_hook(interrupt):
        model(IDS)
    assert [repr(one) for one in attributes(model)] == before
    with sinkscope.watch(model) as seen:
        model(IDS)
        model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.nan)
        model(IDS)
    assert seen.calls == 1
    assert any("NaN" in reason for reason in seen.skipped)
    model.config._attn_implementation = "flash_attention_2"
    with sinkscope.watch(model) as seen:
        seen._begin(model, (IDS,), {})
    assert "flash_attention_2" in next(iter(seen.skipped))
