"""Grids by channel and token, the KV cache, and `scheme=full`: against a Llama written out in torch, in float64."""

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from gradient_reference import in_double
from support.plain import only_float64
from support.written_llama import as_it_is, llama
from tiny import REPRESENTATIVE, tiny_model, tiny_tokens
from transformers import PreTrainedModel

from sinkscope import InputError
from sinkscope.commands.quantize import quantize
from sinkscope.figures.quantization import draw_quantization_cost as draw
from sinkscope.measuring.quantization_study import calibrate_ranges, measured_roundings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.family import Family, first_tensor
from sinkscope.quantization.grids import Precision, Range
from sinkscope.quantization.simulation import quantized
from sinkscope.quantization.sites import CACHED, INPUT, OUTPUT, SCORES, SOFTMAX, SUM, WEIGHT, Site

BITS = 4
ACTIVATIONS = (INPUT, OUTPUT)
AT_THE_INTERFACE = [name for name in REPRESENTATIVE if find_family(tiny_model(name)).door == "interface"]
SMALL: dict[str, Any] = {"input": "random", "num_seqs": 1, "seq_len": 12, "calibration": 1}
# What is quantized, by which grids, in how many bits. Not all with few bits at once: products of numbers on grids often
# lie half-way between two steps of the next grid, where round-off decides.
SCHEMES: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "full": ((WEIGHT, *ACTIVATIONS, SUM, SCORES, SOFTMAX), {}, BITS),
    "weights per channel": ((WEIGHT,), {"weights_per": "channel"}, BITS),
    "activations per token": (ACTIVATIONS, {"activations_per": "token"}, BITS),
    "KV cache per tensor": (CACHED, {"kv_cache_per": "tensor"}, BITS),
    "KV cache per channel": (CACHED, {"kv_cache_per": "channel"}, BITS),
    "KV cache per token": (CACHED, {"kv_cache_per": "token"}, BITS),
    "all at once": (
        (WEIGHT, *ACTIVATIONS, *CACHED),
        {"weights_per": "channel", "activations_per": "token", "kv_cache_per": "token"},
        16,
    ),
}


def symmetric(x: torch.Tensor, largest: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    step = largest / (2 ** (bits - 1) - 1)
    return (x / step).round() * step


def asymmetric(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    low, high, most = low.clamp(max=0.0), high.clamp(min=0.0), 2**bits - 1
    step = (high - low) / most
    zero = (-low / step).round()
    return ((x / step).round() + zero).clamp(0, most).sub(zero) * step


def by_token(x: torch.Tensor, bits: int) -> torch.Tensor:
    return asymmetric(x, x.min(-1, keepdim=True).values, x.max(-1, keepdim=True).values, bits)


class ByHand:
    """The quantization of the written Llama, with ranges of its tensors on the calibration texts."""

    def __init__(
        self, model: PreTrainedModel, texts: torch.Tensor, parts: tuple[str, ...], bits: int, **per: str
    ) -> None:
        self.parts, self.bits, self.is_full = parts, bits, SUM in parts
        self.per = {"weights_per": "tensor", "activations_per": "tensor", "kv_cache_per": "tensor"} | per
        self.seen: dict[str, list[torch.Tensor]] = {}
        for text in texts:
            llama(model, text[None], self.look, as_it_is, self.look)

    def look(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(name, []).append(x[0].transpose(0, -2).flatten(1) if x.dim() == 4 else x[0])
        return x

    def activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        is_linear = name.endswith(("_proj input", "_proj output")) and name.split()[-1] in self.parts
        if not is_linear and not self.is_full:
            return x
        return by_token(x, self.bits) if self.per["activations_per"] == "token" else self.static(name, x)

    def static(self, name: str, x: torch.Tensor) -> torch.Tensor:
        held = torch.cat(self.seen[name])
        return asymmetric(x, held.min(), held.max(), self.bits)

    def weight(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if WEIGHT not in self.parts or not (name.endswith("_proj") or self.is_full):
            return x
        by_channel = self.per["weights_per"] == "channel"
        return symmetric(x, x.abs().amax(1, keepdim=True) if by_channel else x.abs().max(), self.bits)

    def cached(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name.split()[-1] not in self.parts:
            return x
        if self.per["kv_cache_per"] == "token":
            return by_token(x, self.bits)
        if self.per["kv_cache_per"] == "channel":
            held = torch.cat(self.seen[name]).unflatten(1, (x.shape[1], x.shape[3]))  # (tokens,Hkv,D)
            return asymmetric(x, held.amin(0)[None, :, None], held.amax(0)[None, :, None], self.bits)
        return self.static(name, x)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64, spread=4.0)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_llama_as_written_out(model: PreTrainedModel, name: str) -> None:
    parts, per, bits = SCHEMES[name]
    texts, ids = tiny_tokens(3, 24, seed=7), tiny_tokens(2, 20)
    with in_double(model), only_float64():
        hand = ByHand(model, texts, parts, bits, **per)
        expected = llama(model, ids, hand.activation, hand.weight, hand.cached)
        scheme = "full" if name == "full" else "linear"
        ranges = calibrate_ranges(model, list(texts), scheme, has_cache="kv_cache_per" in per)
        before = model(ids).logits

        def found(without: tuple[str, ...] = (), **options: Any) -> torch.Tensor:
            kept = [site for site in ranges if site.part not in parts or site.part in without]
            few = {"bits_weights": bits, "bits_activations": bits, "bits_kv_cache": bits}
            with quantized(model, ranges, except_sites=kept, **few, **options):
                return model(ids).logits

        assert (found(**per) - expected).abs().max() < 1e-10
        least = 1e-3 if bits == BITS else 1e-7
        others = [before, *(found((part,), **per) for part in parts)]  # each part has an effect
        others += [found()] if any(value != "tensor" for value in per.values()) else []
        assert all((other - expected).abs().max() > least for other in others)
        assert torch.equal(model(ids).logits, before)


def test_a_weight_stored_the_other_way_has_grids_by_output() -> None:
    """GPT-2 keeps its weights (in, out)."""
    model, ids = tiny_model("gpt2"), tiny_tokens()
    twin = copy.deepcopy(model)
    ranges = calibrate_ranges(model, list(ids))
    for path in {site.path for site in ranges}:
        weight = twin.get_submodule(path).weight
        weight.data = symmetric(weight.data, weight.data.abs().amax(0, keepdim=True))
    with quantized(
        model, ranges, bits_weights=BITS, weights_per="channel", except_sites=[s for s in ranges if s.part != WEIGHT]
    ):
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-4, atol=1e-5)


def test_steps_are_the_mean_of_the_grids(model: PreTrainedModel) -> None:
    texts, precision = list(tiny_tokens(2, 16)), Precision(BITS, BITS, BITS, "channel", "token", "token")
    ranges = calibrate_ranges(model, texts, has_cache=True)
    with open_tracer(model, find_family(model)) as tracer:
        roundings = measured_roundings(tracer, texts, ranges, precision)
    for site, known in roundings.items():
        if site.part == WEIGHT:
            weight = model.get_parameter(f"{site.path}.weight")
            assert known.step == pytest.approx(float(weight.abs().amax(1).mean()) / (2 ** (BITS - 1) - 1))
        else:  # a token's range is within the tensor's
            assert 0 < known.step < Precision(BITS, BITS, BITS, kv_cache_per="tensor").grid(site, ranges[site]).step


@pytest.mark.parametrize("name", AT_THE_INTERFACE)
def test_a_quantized_sum_is_also_what_goes_past_the_branch(name: str) -> None:
    """If only h+½ is quantized, layer_out − mlp_out is on its grid; a quantized layer output is on its own grid."""
    model, family = tiny_model(name), find_family(tiny_model(name))
    ranges = calibrate_ranges(model, list(tiny_tokens(3, 24, seed=7)), "full")
    sums = {site: known for site, known in ranges.items() if site.part == SUM}
    assert {site.layer for site in sums if site.kind == "layer_out"} == {0, 1, 2}
    for kind in ("mid", "layer_out"):
        chosen = {site: known for site, known in sums.items() if site.kind == kind}
        assert bool(chosen) == (kind in family.sites)
        found = outputs(model, family, chosen)
        for site, known in chosen.items():
            x = found[site.layer, "layer_out"] - (found[site.layer, "mlp_out"] if kind == "mid" else 0.0)
            wholes = x / Precision(8, 6).grid(site, known).step
            if family.wiring != "post-norm":  # there the stream continues with the output of the next norm
                assert (wholes - wholes.round()).abs().max() < 1e-2


def outputs(model: PreTrainedModel, family: Family, ranges: dict[Site, Range]) -> dict[tuple[int, str], torch.Tensor]:
    """Return, by layer and site, the tensors that plain hooks record in the model with these sites in six bits."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    with quantized(model, ranges, bits_activations=6), ExitStack() as hooks:
        for at, layer in enumerate(family.layer_modules(model)):
            for site in ("mlp_out", "layer_out"):

                def keep(module: Any, args: Any, output: Any, place: tuple[int, str] = (at, site)) -> None:
                    found[place] = first_tensor(output).double().clone()

                module = layer.get_submodule(family.sites[site].rpartition(".")[0])
                hooks.callback(module.register_forward_hook(keep).remove)
        model(tiny_tokens())
    return {place: x.view(*tiny_tokens().shape, -1) for place, x in found.items()}


def test_what_cannot_be_reached_is_refused() -> None:
    for name, options, message in (
        ("bloom", {"has_cache": True}, "--kv-cache-per does not apply to .* its keys and values cannot be"),
        ("gptj", {"scheme": "full"}, "--scheme full does not apply to .* its attention code is its own"),
        ("llama", {"scheme": "ful"}, "scheme 'ful' is unknown; did you mean 'full'"),
    ):
        with pytest.raises(InputError, match=message):
            calibrate_ranges(tiny_model(name), list(tiny_tokens(1)), **options)


def test_the_command_says_what_it_quantized_and_by_which_grids() -> None:
    run = quantize(tiny_model("llama"), weights_per="channel", kv_cache_per="channel", bits_kv_cache=4, **SMALL)
    assert "simulated W8A8KV4" in run.verdict
    assert run.tables["quantization"].set_index("setting").loc["kv-cache", "quantized"] == 2 * 3
    assert set(CACHED) <= set(run.tables["quantization_sites"]["part"])
    full = quantize(tiny_model("llama"), scheme="full", bits_activations=4, **SMALL)
    assert "simulated W8A4 (full)" in full.verdict
    assert set(full.tables["quantization_sites"]["part"]) == {*SCHEMES["full"][0]}
    assert len(draw(full).axes) >= 2
    plain = quantize(tiny_model("llama"), **SMALL)
    assert "kv-cache" not in set(plain.tables["quantization"]["setting"])
    assert full.manifest["quantization"]["linear_layers"] == plain.manifest["quantization"]["linear_layers"] == 21
