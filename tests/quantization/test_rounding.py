"""The presets of compressed-tensors: equal arguments, and equal numbers as its own fake quantization, bit for bit."""

import itertools
from typing import get_args

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from torch import nn

from sinkscope.errors import InputError
from sinkscope.quantization.formats import PRESETS, Encoding, PresetName
from sinkscope.quantization.rounding import round_to_e2m1, snap

ENCODINGS = sorted(
    {encoding for preset in PRESETS.values() for encoding in (preset.weights, preset.inputs) if encoding}, key=str
)


def arguments(encoding: Encoding) -> QuantizationArgs:
    """Return the arguments of the preset that has this encoding."""
    for name, preset in PRESETS.items():
        for part, mine in (("weights", preset.weights), ("input_activations", preset.inputs)):
            if mine == encoding:
                return PRESET_SCHEMES[name][part]
    raise AssertionError(encoding)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_arguments_of_compressed_tensors(name: str) -> None:
    theirs = PRESET_SCHEMES[name]
    for part, encoding in (("weights", PRESETS[name].weights), ("input_activations", PRESETS[name].inputs)):
        assert (part in theirs) == (encoding is not None)
        if encoding is not None:
            names = ("type", "num_bits", "strategy", "group_size", "dynamic")
            assert [getattr(theirs[part], field) for field in names] == [getattr(encoding, field) for field in names]
            assert theirs[part].symmetric


def test_the_names_of_options_are_those_of_the_presets() -> None:
    assert get_args(PresetName) == tuple(PRESETS)


def test_groups_of_integers_are_the_largest_that_divide_all_inputs() -> None:
    for widths, size in (({128, 256}, 128), ({128, 192}, 64), ({96, 128}, 32)):
        assert PRESETS["W4A16"].fitted(widths).weights.group_size == size
    for name, widths, message in (
        ("W4A16", {48, 128}, "128 or 64 or 32"),
        ("MXFP4", {48}, "32"),
        ("NVFP4", {24}, "16"),
    ):
        with pytest.raises(InputError, match=f"groups of {message} do not divide"):
            PRESETS[name].fitted(widths)
    assert PRESETS["W8A8"].fitted({7}) == PRESETS["W8A8"]
    assert PRESETS["NVFP4"].fitted({48}) == PRESETS["NVFP4"]


def tensors() -> list[torch.Tensor]:
    """Return ordinary numbers, numbers of many magnitudes, ties, zeros in whole groups, and outliers."""
    torch.manual_seed(0)
    usual = torch.randn(3, 8, 256)
    wide = usual * torch.logspace(-8, 3, 256)
    ties = (torch.arange(3 * 8 * 256) % 97).reshape(3, 8, 256) / 8 - 6
    zeros = usual.clone()
    zeros[:, ::2, :128] = 0
    outliers = usual.clone()
    outliers[1, 0, 5] = 3000.0
    return [usual, wide, ties, zeros, outliers]


def theirs(x: torch.Tensor, encoding: Encoding, largest: torch.Tensor | None) -> torch.Tensor:
    args = arguments(encoding)
    whole = x.abs().max() if largest is None else largest
    total = generate_gparam(-whole, whole) if encoding.strategy == "tensor_group" else None
    if encoding.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Identity(), total)
    elif encoding.strategy == "tensor":
        scale, zero = calculate_qparams(-whole, whole, args)
    else:
        rows = x.unflatten(-1, (-1, encoding.group_size)) if encoding.group_size else x
        low, high = rows.aminmax(dim=-1, keepdim=not encoding.group_size)
        scale, zero = calculate_qparams(low, high, args, total)
    return fake_quantize(x, scale, zero, args, total)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("number", range(5))
def test_numbers_are_those_of_compressed_tensors_bit_for_bit(encoding: Encoding, number: int) -> None:
    x = tensors()[number]
    x = x if encoding.dynamic else x[0]  # a weight is (out,in)
    mine, reference = snap(encoding, x), theirs(x, encoding, None)
    assert torch.equal(mine + 0.0, reference + 0.0), (mine - reference).abs().max()
    if encoding.strategy in ("tensor", "tensor_group"):
        half = x.abs().max() / 2  # entries beyond a static range are clamped
        assert torch.equal(snap(encoding, x, half) + 0.0, theirs(x, encoding, half) + 0.0)


@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_a_row_is_rounded_in_the_range_of_its_tensor(name: str) -> None:
    encoding = PRESETS[name].inputs
    assert encoding is not None
    x, largest = torch.randn(5, 64), [3.0, 0.5, 3.0, 9.0, 1.0]
    one_by_one = [snap(encoding, row[None], most) for row, most in zip(x, largest, strict=True)]
    assert torch.equal(snap(encoding, x, torch.tensor(largest)[:, None]), torch.cat(one_by_one))


def test_eight_bit_floats_are_torchs() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    x = torch.cat([every, every * 1.03, every * 0.97]).clamp(-448, 448)
    x = torch.cat([x, torch.tensor([448.0])])
    assert torch.equal(snap(Encoding("float", 8, "tensor"), x), x.to(torch.float8_e4m3fn).float())


def test_four_bit_floats_round_to_the_nearest_and_ties_to_even() -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    x = torch.linspace(-7, 7, 5001, dtype=torch.float64)
    values = torch.tensor(sorted({sign * number for number in numbers for sign in (-1, 1)}), dtype=torch.float64)
    assert torch.equal((x - round_to_e2m1(x)).abs(), (x[:, None] - values).abs().amin(1))
    for code, (low, high) in enumerate(itertools.pairwise(numbers)):
        assert round_to_e2m1(torch.tensor((low + high) / 2)) == (low if code % 2 == 0 else high)
