"""Grids by channel and by token, and the KV cache: against a Llama written out in torch, in float64."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_reference import in_double
from support.plain import only_float64
from support.written_llama import as_it_is, llama
from tiny import ragged_tokens, tiny_model, tiny_tokens
from transformers import PreTrainedModel

from sinkscope import InputError
from sinkscope.commands.quantize import quantize
from sinkscope.measuring.quantization_study import calibrate_ranges, measured_roundings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.quantization.grids import Precision
from sinkscope.quantization.simulation import quantized
from sinkscope.quantization.sites import CACHED, INPUT, OUTPUT, WEIGHT
from sinkscope.verdict.quantization import whole

BITS = 4
ACTIVATIONS = (INPUT, OUTPUT)
# What is quantized, by which grids, in how many bits. Not all with few bits at once: products of numbers on grids often
# lie half-way between two steps of the next grid, where round-off decides.
SCHEMES: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
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
        self.parts, self.bits = parts, bits
        self.per = {"weights_per": "tensor", "activations_per": "tensor", "kv_cache_per": "tensor"} | per
        self.seen: dict[str, list[torch.Tensor]] = {}
        for text in texts:
            llama(model, text[None], self.look, as_it_is, self.look)

    def look(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(name, []).append(x[0].transpose(0, -2).flatten(1) if x.dim() == 4 else x[0])
        return x

    def activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not name.endswith(("_proj input", "_proj output")) or name.split()[-1] not in self.parts:
            return x  # the scheme `linear` has only linear layers
        return by_token(x, self.bits) if self.per["activations_per"] == "token" else self.static(name, x)

    def static(self, name: str, x: torch.Tensor) -> torch.Tensor:
        held = torch.cat(self.seen[name])
        return asymmetric(x, held.min(), held.max(), self.bits)

    def weight(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not name.endswith("_proj") or WEIGHT not in self.parts:
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
        ranges = calibrate_ranges(model, list(texts), has_cache="kv_cache_per" in per)
        assert any(site.part in CACHED for site in ranges) == ("kv_cache_per" in per)
        before = model(ids).logits
        found = {}
        for grids, options in {"these": per, "one a tensor": {}}.items():
            with quantized(
                model,
                ranges,
                except_sites=[site for site in ranges if site.part not in parts],
                **{"bits_weights": bits, "bits_activations": bits, "bits_kv_cache": bits},
                **options,
            ):
                found[grids] = model(ids).logits
        least = 1e-3 if bits == BITS else 1e-7
        assert (found["these"] - expected).abs().max() < 1e-10
        assert (before - expected).abs().max() > least
        if name != "KV cache per tensor":
            assert (found["one a tensor"] - expected).abs().max() > least
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


def test_padding_changes_no_grid_of_a_token(tmp_path: Path) -> None:
    lines = [json.dumps({"input_ids": ids.tolist()}) for ids in ragged_tokens((20, 9, 14, 7, 18, 12))]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {"num_seqs": 4, "seq_len": 20, "calibration": 2, "input": str(tmp_path / "texts.jsonl")}
    options |= {"activations_per": "token", "kv_cache_per": "token"}
    runs = [quantize(tiny_model("llama"), batch_size=size, **options) for size in (1, 4)]
    losses = [whole(run)["loss"] for run in runs]
    assert losses[0].to_dict() == pytest.approx(losses[1].to_dict(), rel=1e-3)


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_a_cache_that_cannot_be_reached_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"--kv-cache-per does not apply to .* its keys and values cannot be"):
        calibrate_ranges(tiny_model(name), list(tiny_tokens(1)), has_cache=True)


def test_the_command_says_which_grids() -> None:
    options: dict[str, Any] = {"input": "random", "num_seqs": 1, "seq_len": 12, "calibration": 1}
    run = quantize(tiny_model("llama"), weights_per="channel", kv_cache_per="channel", bits_kv_cache=4, **options)
    assert "simulated W8A8KV4" in run.verdict
    assert "weights have a grid for each output channel; keys and values are quantized, with a static" in run.verdict
    table = run.tables["quantization"].set_index("setting")
    assert table.loc["kv-cache", "quantized"] == 2 * 3
    assert "keys and values only (4 bits)" in run.verdict
    assert set(CACHED) <= set(run.tables["quantization_sites"]["part"])
    plain = quantize(tiny_model("llama"), **options)
    assert "grid for" not in plain.verdict
    assert "kv-cache" not in set(plain.tables["quantization"]["setting"])
