"""The traced model against plain transformers (reference.py): every table of every family, logits and losses."""

from functools import cache
from typing import Any, Literal

import pandas as pd
import pytest
import reference
import torch
import torch.nn.functional as F
from support.hooked import hook_all
from support.retrofitted import each_pair
from support.tables import assert_same_tables
from tiny import FORWARD, TINY, measured, padded, ragged_tokens, tiny_model

from sinkscope.attention import weights as attention_weights
from sinkscope.attention.kernels import AttentionCall
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.losses import loss_and_gradient, loss_in_chunks
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.tracer import _without_empty_slots, model_inputs, open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import IGNORED, Batch

POSITIONS, WINDOW, LENGTH = 12, 8, 24
RAGGED = (LENGTH, 17, 5, 11)  # one shorter than WINDOW and POSITIONS
# Their own code takes the softmax (and GPT-J and GPT-Neo the logits) in float32 whatever the model's dtype.
FLOAT32_INSIDE = ("bloom", "mpt", "gptj", "gpt_neo")


model_of = cache(lambda name, dtype: tiny_model(name, dtype=dtype))


def settings_and_tables(recorded: list[reference.Sequence]) -> tuple[Settings, dict[str, pd.DataFrame]]:
    settings = Settings(positions=POSITIONS, window=WINDOW, epsilon=reference.clear_threshold(recorded, WINDOW))
    return settings, reference.tables(recorded, POSITIONS, WINDOW, settings.epsilon)


@cache
def expected(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> tuple[Settings, dict[str, pd.DataFrame]]:
    return settings_and_tables(reference.record_each(model_of(name, dtype), ragged_tokens(lengths)))


PADDINGS: dict[str, tuple[tuple[int, ...], str]] = {
    "unpadded": ((LENGTH,) * 3, "right"),
    "right": (RAGGED, "right"),
    "left": (RAGGED, "left"),
}
# learned positions, sink logits, one key head, ALiBi: padding could change their results
MEET_PADDING = ("gpt2", "gpt_oss", "falcon", "falcon-alibi", "bloom")


@each_pair(list(TINY), list(PADDINGS), ("name", "padding"), whole=(*FLOAT32_INSIDE, *MEET_PADDING))
def test_every_table_is_the_references(name: str, padding: str) -> None:
    """In float64 if the model's own code computes in it; some of the tests below are in float32."""
    dtype, tolerance = (torch.float32, 1e-5) if name in FLOAT32_INSIDE else (torch.float64, 1e-9)
    lengths, side = PADDINGS[padding]
    settings, tables = expected(name, dtype, lengths)
    batch = padded(ragged_tokens(lengths), side)
    reference.assert_same(measured(model_of(name, dtype), [batch], settings), tables, tolerance)


@each_pair(["llama", "gemma2", "bloom", "falcon", "gptj"], ["replaced", "in place"], ("name", "how"))
def test_what_leaves_a_module_is_read_after_the_users_hooks(name: str, how: str) -> None:
    """Hooks of an attention, an MLP, two layers and the last norm: steering, and a coordinate that is zeroed."""
    dtype, tolerance = (torch.float32, 1e-5) if name in FLOAT32_INSIDE else (torch.float64, 1e-9)
    model = tiny_model(name, dtype=dtype)
    hook_all(model, is_in_place=how == "in place")
    recorded = reference.record_each(model, ragged_tokens(RAGGED))
    settings, tables = settings_and_tables(recorded)
    batch = padded(ragged_tokens(RAGGED))
    reference.assert_same(measured(model, [batch], settings), tables, tolerance)
    with open_tracer(model, find_family(model)) as tracer:
        traced = tracer.logits(batch)[0, : RAGGED[0]]
    torch.testing.assert_close(traced, recorded[0].logits, rtol=0, atol=tolerance * float(traced.abs().max()))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_autocast_around_the_tracer_changes_nothing(name: str) -> None:
    asked = (tiny_model(name), [padded(ragged_tokens(RAGGED))], Settings(positions=POSITIONS, window=WINDOW))
    plain = measured(*asked, (*FORWARD, "gradient"), backward=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = measured(*asked, (*FORWARD, "gradient"), backward=True)
    assert_same_tables(ours, plain, check_exact=True)


# The fused kernel has no softcap and no sink logit: ours goes in row chunks, the bare model's is eager. Falcon's
# one key head is repeated by the bare model's kernel and not by ours.
ROUNDED = {"gemma2": 1e-5, "gpt_oss": 1e-5, "falcon": 1e-6}


@each_pair(list(TINY), list(PADDINGS), ("name", "padding"), whole=MEET_PADDING)
def test_traced_logits_are_the_bare_models(name: str, padding: str) -> None:
    (lengths, side), model = PADDINGS[padding], model_of(name, torch.float32)
    batch = padded(ragged_tokens(lengths), side)
    with open_tracer(model, find_family(model)) as tracer:
        traced = tracer.logits(batch)
        inputs = model_inputs(tracer.model, batch)
    with torch.no_grad():
        bare = model(**inputs).logits
    real = batch.attention_mask.bool()  # the output for a padding query, which sees no key, depends on the kernel
    if name in ROUNDED:
        torch.testing.assert_close(traced[real], bare[real], rtol=0, atol=ROUNDED[name] * float(bare.abs().max()))
    else:
        assert torch.equal(traced[real], bare[real])


LONG = 300  # more than one row chunk, and more than is always read whole


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "falcon-alibi"])
def test_long_sequences_are_read_by_first_columns_and_diagonal_band(name: str) -> None:
    """T = 300: positions=16 reads 16 columns and a band of 64, positions=300 all; both are the reference's."""
    model, sequences = model_of(name, torch.float64), ragged_tokens((LONG, 270))
    recorded = reference.record_each(model, sequences)
    epsilon = reference.clear_threshold(recorded, 64)
    for positions in (16, LONG):
        truth = {
            "attention": reference.attention(recorded, positions, 64, epsilon),
            "attention_heads": reference.attention_heads(recorded),
            "sink_positions": reference.sink_positions(recorded, 64, epsilon),
        }
        for side in ("right", "left"):
            settings = Settings(positions=positions, window=64, epsilon=epsilon)
            ours = measured(model, [padded(sequences, side)], settings, ("attention",))
            if positions == 16:  # not all columns were read
                assert ours["attention_heads"].pop("attention_entropy").isna().all()
                truth["attention_heads"] = truth["attention_heads"].drop(columns="attention_entropy", errors="ignore")
            reference.assert_same(ours, truth, 1e-9)


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_long_sequences_have_the_same_geometry(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    batch = padded(ragged_tokens((LONG, LONG)))
    few, many = (
        measured(model, [batch], Settings(positions=n, window=64), ("geometry",))["geometry"] for n in (16, 290)
    )
    first = many[many["position"] < 16].reset_index(drop=True)
    assert max(reference.errors(few, first).values()) < 1e-9


class Seen(Observable):
    name = "seen"
    about = "a test's own"
    sites = ()

    def __init__(self, *sites: str) -> None:
        super().__init__(Settings())
        self.sites = sites
        self.calls: list[tuple[int, str]] = []
        self.readings: list[Reading] = []

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self.calls.append((layer, site))
        self.readings.append(reading)

    def see_attention(self, layer: int, read: attention_weights.AttentionRead, batch: Batch) -> None:
        self.calls.append((layer, "attention"))


def test_an_observable_sees_its_sites_of_every_layer_in_order_and_no_other() -> None:
    model = tiny_model("llama")
    first, second = Seen("layer_in", "attention", "mlp_out"), Seen("mid", "attn_norm")
    stream = Seen("layer_in", "layer_out")
    with open_tracer(model, find_family(model)) as tracer:
        tracer.forward(padded(ragged_tokens((5, 5))), [first, second, stream])
    assert stream.readings[1] is stream.readings[2]  # layer 0's output is layer 1's input, and is reduced once
    assert stream.readings[0] is not stream.readings[1]
    assert first.calls == [(layer, site) for layer in range(3) for site in ("layer_in", "attention", "mlp_out")]
    assert second.calls == [(layer, site) for layer in range(3) for site in ("attn_norm", "mid")]


@pytest.mark.parametrize("kind", ["bool", "additive", "scores", "causal", "encoder"])
def test_keys_past_the_tokens_are_cut_only_if_no_query_sees_them(kind: str) -> None:
    """Four tokens and two more keys, which may be empty slots of a static cache."""
    visible = torch.ones(1, 1, 4, 6).tril().bool()
    additive = torch.zeros(1, 1, 4, 6).masked_fill(~visible, torch.finfo(torch.float32).min)
    mask = {"bool": visible, "additive": additive}.get(kind)
    call = AttentionCall(mask, 1.0, scores=additive if kind == "scores" else None, causal=kind != "encoder")
    seen = {name: torch.zeros(1, 1, 6, 2) for name in ("key", "value")}
    cut = _without_empty_slots(call, kept := dict(seen), 4)
    length = 6 if kind == "encoder" else 4
    assert {x.shape[2] for x in kept.values()} == {length}
    for masked in (cut.mask, cut.scores):
        assert masked is None or masked.shape == (1, 1, 4, length)
    if kind in ("bool", "additive", "scores"):
        visible[..., 1, 5], additive[..., 1, 5] = True, -3.0
        assert _without_empty_slots(call, seen, 4) is call
        assert {x.shape[2] for x in seen.values()} == {6}


def test_positions_are_given_to_a_padded_model_and_only_to_one_that_takes_them() -> None:
    batch = padded(ragged_tokens((5, 3)), "left")
    with open_tracer(tiny_model("llama"), find_family(tiny_model("llama"))) as tracer:
        assert model_inputs(tracer.model, batch)["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
        assert model_inputs(tracer.model, padded(ragged_tokens((5, 5)))).keys() == {"input_ids", "use_cache"}
    with open_tracer(tiny_model("bloom"), find_family(tiny_model("bloom"))) as tracer:
        assert model_inputs(tracer.model, batch).keys() == {"input_ids", "use_cache", "attention_mask"}


@each_pair(["llama", "bloom", "falcon"], ["attention", "massive", "activation"], ("family", "name"))
def test_a_model_that_gives_nan_is_refused(family: str, name: str) -> None:
    """NaN > ε is false, so without an error the head would be counted as a head without a sink."""
    model = tiny_model(family)
    layers = find_family(model).layers

    def overflow(module: Any, args: tuple, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        first[1, 2] = torch.inf
        return output

    model.get_submodule(layers)[1].register_forward_hook(overflow)
    observable = OBSERVABLES[name](Settings(positions=4, window=4))
    with (
        open_tracer(model, find_family(model)) as tracer,
        pytest.raises(SinkscopeError, match=r"layer [12]: the model itself gives NaN or infinite numbers; check its"),
    ):
        tracer.forward(padded(ragged_tokens((5, 5))), [observable])


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_padding_gives_does_not_matter(side: str) -> None:
    model = tiny_model("llama")
    batch = padded(ragged_tokens((5, 3)), side)
    before = measured(model, [batch], Settings(positions=4, window=4))
    row, column = 1, 0 if side == "left" else 4

    def spoil(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[row, column] = torch.nan
        return output

    model.model.layers[2].register_forward_hook(spoil)
    assert_same_tables(measured(model, [batch], Settings(positions=4, window=4)), before)


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
            computed, gradient = loss_and_gradient(logits, batch, chunk)
            torch.testing.assert_close(computed, losses.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(gradient, expected.to(dtype), rtol=tolerance, atol=tolerance)
