"""`scheme=full` against a Llama written out in torch, in float64, and against the wiring of every family."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from gradient_reference import in_double
from rich.console import Console
from support.plain import only_float64
from support.written_llama import as_it_is, llama
from tiny import REPRESENTATIVE, tiny_model, tiny_tokens
from transformers import PreTrainedModel

from sinkscope import InputError
from sinkscope.commands.quantize import quantize
from sinkscope.figures.quantization import draw_quantization_cost as draw
from sinkscope.measuring.quantization_study import Bench, calibrate_ranges
from sinkscope.measuring.subject import open_subject
from sinkscope.models.families import find_family
from sinkscope.models.family import Family, first_tensor
from sinkscope.options.measuring import make_config
from sinkscope.quantization.grids import Precision, Range, symmetric_grid
from sinkscope.quantization.simulation import quantized
from sinkscope.quantization.sites import SCORES, SOFTMAX, SUM, Site

BITS = 4
AT_THE_INTERFACE = [name for name in REPRESENTATIVE if find_family(tiny_model(name)).door == "interface"]


def name_of(site: Site) -> str:
    """Return the name of a site in `support.written_llama`."""
    if site.part in (SCORES, SOFTMAX):
        return f"layer {site.layer} {site.part.split()[0]}"
    return f"layer {site.layer} {site.kind}" if site.part == SUM else f"{site.path} {site.part}"


def snapped(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    low, high, most = min(low, 0.0), max(high, 0.0), 2**BITS - 1
    step = (high - low) / most
    zero = round(-low / step)
    return ((x / step).round() + zero).clamp(0, most).sub(zero) * step


def test_a_llama_as_written_out() -> None:
    model = tiny_model("llama", dtype=torch.float64, spread=4.0)
    texts, ids = tiny_tokens(3, 24, seed=7), tiny_tokens(2, 20)
    with in_double(model), only_float64():
        assert (llama(model, ids, as_it_is, as_it_is) - model(ids).logits).abs().max() < 1e-10
        seen: dict[str, tuple[float, float]] = {}

        def look(name: str, x: torch.Tensor) -> torch.Tensor:
            low, high = seen.get(name, (0.0, 0.0))
            seen[name] = min(low, float(x.min())), max(high, float(x.max()))
            return x

        for text in texts:
            llama(model, text[None], look, as_it_is)
        ranges = calibrate_ranges(model, list(texts), "full")
        activations = {name_of(site): known for site, known in ranges.items() if site.part != "weight"}
        assert activations.keys() == seen.keys()
        for name, known in activations.items():
            assert (min(known.low, 0.0), max(known.high, 0.0)) == pytest.approx(seen[name], rel=1e-10), name
        expected = llama(
            model,
            ids,
            lambda name, x: snapped(x, *seen[name]),
            lambda name, x: symmetric_grid(float(x.abs().max()), BITS).snap(x),
        )
        plain = model(ids).logits
        with quantized(model, ranges, bits_weights=BITS, bits_activations=BITS):
            mine = model(ids).logits
        assert (mine - expected).abs().max() < 1e-10
        assert torch.equal(model(ids).logits, plain)
        for part in (SUM, SCORES, SOFTMAX):  # each part has an effect
            kept = [site for site in ranges if site.part == part]
            with quantized(model, ranges, except_sites=kept, bits_weights=BITS, bits_activations=BITS):
                assert (model(ids).logits - expected).abs().max() > 1e-3


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


def test_a_scheme_that_does_not_exist_is_not_the_linear_one() -> None:
    with pytest.raises(InputError, match="scheme 'ful' is unknown; did you mean 'full'"):
        calibrate_ranges(tiny_model("llama"), list(tiny_tokens(1)), "ful")


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_attention_code_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"--scheme full does not apply to .* its attention code is its own"):
        calibrate_ranges(tiny_model(name), list(tiny_tokens(1)), "full")


@pytest.mark.parametrize("name", ["gpt_oss", "opt-post-norm"])
def test_sixteen_bits_change_almost_nothing(name: str) -> None:
    """The models have softcap, windows, learned sink logits, and positions that are added."""
    model = tiny_model(name)
    ranges = calibrate_ranges(model, list(tiny_tokens()), "full")
    plain = model(tiny_tokens()).logits
    with quantized(model, ranges, bits_weights=16, bits_activations=16):
        fine = model(tiny_tokens()).logits
    with quantized(model, ranges, bits_weights=4, bits_activations=4):
        coarse = model(tiny_tokens()).logits
    assert (fine - plain).abs().max() < 0.02 * plain.abs().max()
    assert (coarse - plain).abs().max() > 0.05 * plain.abs().max()


def test_a_measured_setting_is_the_quantized_model() -> None:
    model, texts = tiny_model("llama"), list(tiny_tokens(3, 24, seed=7))
    with open_subject(model, None, make_config(input="random", num_seqs=5, seq_len=20), Console(quiet=True)) as subject:
        bench = Bench(subject, Precision(5, 5), scheme="full", batch_size=2)
        ranges = calibrate_ranges(model, texts, "full")
        measured = bench.measure(ranges, subject.inputs).loss
        with quantized(model, ranges, bits_weights=5, bits_activations=5):
            texts = [torch.tensor(ids)[None] for ids in subject.inputs.sequences]
            losses = [model(ids, labels=ids).loss for ids in texts]
    assert measured == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def test_the_command_says_what_it_quantized() -> None:
    options: dict[str, Any] = {"input": "random", "num_seqs": 1, "seq_len": 12, "calibration": 1, "bits_activations": 4}
    run = quantize(tiny_model("llama"), scheme="full", **options)
    linear = quantize(tiny_model("llama"), **options)
    assert run.manifest["quantization"]["scheme"] == "full"
    assert run.manifest["quantization"]["linear_layers"] == linear.manifest["quantization"]["linear_layers"] == 21
    parts = set(run.tables["quantization_sites"]["part"])
    assert parts == {"input", "weight", "output", SUM, SCORES, SOFTMAX}
    assert "simulated W8A4 (full)" in run.verdict
    assert "also the weights and outputs of embeddings, residual sums" in run.verdict
    assert "residual sums" not in linear.verdict
    assert len(draw(run).axes) >= 2
