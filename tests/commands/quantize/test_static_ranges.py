"""Simulated quantization against cases by hand, torch's fake quantization, plain hooks, and a Llama in plain torch."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_reference import in_double
from matplotlib.axes import Axes
from rich.console import Console
from support.everything import assert_as_before, state_of
from support.figures import rough_figures, skip_figures
from support.hooked import calls_of
from support.plain import only_float64
from support.retrofit_command import command_line
from support.retrofitted import METHODS, each_pair, retrofitted
from support.tables import assert_same_tables
from support.written_llama import as_it_is
from support.written_llama import llama as written_out
from tiny import REPRESENTATIVE, ragged_tokens, tiny_model, tiny_tokens, written
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import sinkscope
from sinkscope import InputError, Run, SinkscopeError, quantize, quantized
from sinkscope.commands.quantize import study
from sinkscope.commands.quantize.figures import MASSIVE_MARK, RING, draw_quantization_cost, draw_quantization_ranges
from sinkscope.commands.quantize.findings import whole
from sinkscope.commands.quantize.study import Simulation, calibrate_ranges, measured_roundings, w8a8
from sinkscope.measuring.subject import Subject, open_subject
from sinkscope.measuring.tables import column_names
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.family import Family
from sinkscope.models.loading import LoadedModel
from sinkscope.models.projections import projections
from sinkscope.options.measuring import make_config
from sinkscope.quantization.formats import Precision
from sinkscope.quantization.grids import Grid, Range, RowGrids, asymmetric_grid, site_grid, symmetric_grid
from sinkscope.quantization.settings import ALL, ALONE, COSTLIEST_KEPT, FULL, KEPT, MASSIVE_KEPT, WEIGHTS
from sinkscope.quantization.simulation import quantized_sites
from sinkscope.quantization.sites import CACHED, INPUT, OUTPUT, PARTS, SCORES, SOFTMAX, SUM, WEIGHT, Site, sites_of
from sinkscope.results.tables import LEADING
from sinkscope.retrofits import parts_of

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 20, "seq_len": 20, "calibration": 4}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def coarse(llama: PreTrainedModel) -> Run:
    return quantize(llama, scheme="static", bits_weights=4, bits_activations=4, **SMALL)


def ranges_of(model: PreTrainedModel, count: int = 3) -> dict[Site, Range]:
    return calibrate_ranges(model, list(tiny_tokens(count, 24, seed=7)))


@pytest.mark.parametrize(
    ("x", "grid", "expected"),
    [
        ([-3.0, -1.4, 0.0, 0.4, 1.6, 3.0], symmetric_grid(3.0, 3), [-3.0, -1.0, 0.0, 0.0, 2.0, 3.0]),  # steps of 1
        ([-2.0, 0.9, 1.1, 2.0], symmetric_grid(2.0, 2), [-2.0, 0.0, 2.0, 2.0]),  # −1, 0, 1 times 2
        ([0.5, 1.5, 2.5, 127.0], symmetric_grid(127.0, 8), [0.0, 2.0, 2.0, 127.0]),  # half to even
        ([0.0, 0.0], symmetric_grid(0.0, 8), [0.0, 0.0]),
        ([-1.0, -0.4, 0.6, 2.0, 9.0, -9.0], asymmetric_grid(-1.0, 2.0, 2), [-1.0, 0.0, 1.0, 2.0, 2.0, -1.0]),
        ([1.0, 2.0, 3.0], asymmetric_grid(1.0, 3.0, 2), [1.0, 2.0, 3.0]),  # widened to hold 0
        ([-3.0, -2.0, -0.4], asymmetric_grid(-3.0, -1.0, 2), [-3.0, -2.0, 0.0]),
        ([0.0, 0.2, NAN], asymmetric_grid(0.0, 0.0, 8), [0.0, 0.0, NAN]),  # calibration saw nothing but 0
        ([INF, -INF, NAN], asymmetric_grid(-1.0, 2.0, 2), [2.0, -1.0, NAN]),
    ],
)
def test_grids_by_hand(x: list[float], grid: Grid, expected: list[float]) -> None:
    for dtype in (torch.float64, torch.float16):
        numbers = torch.tensor(x, dtype=dtype)
        snapped = grid.snap(numbers)
        torch.testing.assert_close(snapped, torch.tensor(expected, dtype=dtype), equal_nan=True)
        torch.testing.assert_close(numbers, torch.tensor(x, dtype=dtype), equal_nan=True)  # not in place


def test_a_grid_of_many_is_each_of_them() -> None:
    """All have one range each: both signs, one sign alone, nothing but 0."""
    low, high = torch.tensor([-1.0, 1.0, -3.0, 0.0]), torch.tensor([2.0, 3.0, -1.0, 0.0])
    many = asymmetric_grid(low[:, None], high[:, None], 2)
    for row, (least, largest) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        one = asymmetric_grid(least, largest, 2)
        assert (float(many.step[row]), int(many.lowest[row]), int(many.highest[row])) == pytest.approx(
            (one.step, one.lowest, one.highest)
        )


def test_scores_and_weights_of_attention_have_one_grid_also_if_tokens_have_their_own() -> None:
    """They have a row for each query, which static schemes do not know."""
    precision, known = Precision(8, 8, 8, activations_per="token"), Range(-1.0, 2.0, 0.5, False)
    kinds = {part: type(site_grid(precision, Site("self_attn", part, 0, ""), known)) for part in
             (INPUT, SCORES, SOFTMAX)}  # fmt: skip
    assert kinds == {INPUT: RowGrids, SCORES: Grid, SOFTMAX: Grid}


def test_keys_and_values_have_bits_of_their_own(llama: PreTrainedModel) -> None:
    ids, ranges = tiny_tokens(2, 20), calibrate_ranges(llama, list(tiny_tokens(3, 24, seed=7)), has_cache=True)
    cached = [site for site in ranges if site.part in CACHED]
    others = [site for site in ranges if site not in cached]
    with quantized(llama, ranges, except_sites=others, bits_kv_cache=3):
        coarse = llama(ids).logits
    with quantized(llama, {site: ranges[site] for site in cached}, bits_activations=3, bits_kv_cache=3):
        assert torch.equal(llama(ids).logits, coarse)
    with quantized(llama, ranges, except_sites=others, bits_activations=3):
        assert not torch.equal(llama(ids).logits, coarse)


@each_pair([2, 4, 8, 16], [1e-30, 1e-3, 1.0, 3e4], ("bits", "scale"))
def test_as_torch_quantizes(bits: int, scale: float) -> None:
    torch.manual_seed(bits)
    x = scale * torch.randn(64, 33)
    low, high, largest = -0.7 * scale, 1.9 * scale, float(x.abs().max())
    most = 2 ** (bits - 1) - 1
    theirs = torch.fake_quantize_per_tensor_affine(x, largest / most, 0, -most, most)
    assert_same_but_for_ties(symmetric_grid(largest, bits).snap(x), theirs, largest / most)
    step = (high - low) / (2**bits - 1)
    theirs = torch.fake_quantize_per_tensor_affine(x, step, round(-low / step), 0, 2**bits - 1)
    assert_same_but_for_ties(asymmetric_grid(low, high, bits).snap(x), theirs, step)


def assert_same_but_for_ties(mine: torch.Tensor, theirs: torch.Tensor, step: float) -> None:
    """Compare except for ties: torch multiplies by 1 ÷ step in float32, which moves numbers half-way between steps."""
    difference = ((mine - theirs) / step).abs()
    assert difference.max() < 1.01
    assert (difference > 0.01).double().mean() < 2e-3


def linear_by_hand(model: PreTrainedModel) -> dict[str, nn.Module]:
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    linear.pop("lm_head")
    return linear


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_linear_layer_but_the_head_as_by_hand(family: str) -> None:
    """The reference is a copy with weights on grids, and with grids in hooks at inputs and outputs."""
    model, bits = tiny_model(family), 5
    before, ranges = state_of(model), ranges_of(model)
    twin = copy.deepcopy(model)
    linear = linear_by_hand(twin)
    assert [(site.path, site.part) for site in ranges] == [(path, part) for path in linear for part in PARTS]
    layers = find_family(model).layers
    assert all(site.path == f"{layers}.{site.layer}.{site.kind}" for site in ranges)
    seen = ranges_by_hand(model, list(tiny_tokens(3, 24, seed=7)))
    grids = {end: asymmetric_grid(*ends, bits) for end, ends in seen.items()}
    for path, module in linear.items():
        module.weight.data = symmetric_grid(float(module.weight.abs().max()), bits).snap(module.weight)
        module.register_forward_pre_hook(lambda m, args, grid=grids[path, "input"]: (grid.snap(args[0]),))
        module.register_forward_hook(lambda m, args, output, grid=grids[path, "output"]: grid.snap(output))
    ids = tiny_tokens()
    plain = model(ids).logits
    with quantized(model, ranges, bits_weights=bits, bits_activations=bits):
        mine = model(ids).logits
        assert model.get_parameter(f"{next(iter(linear))}.weight").unique().numel() <= 2**bits - 1
    torch.testing.assert_close(mine, twin(ids).logits, rtol=1e-3, atol=1e-3 * float(mine.abs().max()))
    assert (mine - plain).abs().max() > 0.01 * plain.abs().max()
    assert_as_before(model, before)
    assert torch.equal(model(ids).logits, plain)


def ranges_by_hand(model: PreTrainedModel, sequences: list[torch.Tensor]) -> dict[tuple[str, str], list[float]]:
    """Return the smallest and the largest entry of the inputs and outputs of linear layers, by path and end."""
    texts = (torch.as_tensor(ids)[None] for ids in sequences)
    entries = {}
    for path, calls in calls_of(model, linear_by_hand(model), *texts).items():
        entries[path, "input"] = torch.cat([args[0].flatten() for args, _ in calls])
        entries[path, "output"] = torch.cat([output.flatten() for _, output in calls])
    return {end: [float(x.min()), float(x.max())] for end, x in entries.items()}


def test_a_tied_head_stays_as_it_is() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    embeddings = model.lm_head.weight.clone()
    with quantized(model, ranges_of(model), bits_weights=2):
        assert torch.equal(model.lm_head.weight, embeddings)


def test_weights_and_models_that_cannot_be_quantized_are_refused() -> None:
    model = tiny_model("llama")
    module = model.model.layers[1].mlp.up_proj
    module.weight[0, 0] = NAN
    with pytest.raises(SinkscopeError, match=r"layer 1 mlp\.up_proj output: the model itself gives NaN"):
        ranges_of(model)
    for weight, message in (
        (torch.zeros(48, 32, dtype=torch.int8), "simulated quantization needs weights that are not quantized"),
        (torch.zeros(48, 32, device="meta"), "offloaded"),
    ):
        module.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(InputError, match=message):
            sites_of(model, find_family(model))


def test_ranges_medians_and_massive_activations_as_by_hand() -> None:
    model = tiny_model("opt")
    model.model.decoder.layers[1].fc2.weight[5] *= 300.0
    sequences = ragged_tokens((20, 9, 14))
    ranges = calibrate_ranges(model, sequences)
    expected = ranges_by_hand(model, sequences)
    for site, known in ranges.items():
        if site.part == WEIGHT:
            weight = model.get_parameter(f"{site.path}.weight")
            assert (known.low, known.high) == (float(weight.min()), float(weight.max()))
        else:
            assert [known.low, known.high] == pytest.approx(expected[site.path, site.part], rel=1e-5)
        assert known.max_abs == max(abs(known.low), abs(known.high))
    fc2 = next(site for site in ranges if str(site) == "layer 1 fc2 output")
    fc2_alone = {"fc2": model.model.decoder.layers[1].fc2}
    calls = calls_of(model, fc2_alone, *(torch.as_tensor(ids)[None] for ids in sequences))["fc2"]
    assert ranges[fc2].median_abs == pytest.approx(np.mean([float(x.abs().median()) for _, x in calls]), rel=1e-5)
    assert {str(site) for site in ranges if ranges[site].is_massive} == set()
    model.model.decoder.layers[1].fc2.weight[5] *= 300.0
    massive = {str(site) for site, known in calibrate_ranges(model, sequences).items() if known.is_massive}
    assert "layer 1 fc2 output" in massive
    assert not any("weight" in name for name in massive)


def test_rounding_as_by_hand(llama: PreTrainedModel) -> None:
    sequences, precision = list(tiny_tokens(2, 16)), Precision(4, 3)
    ranges = calibrate_ranges(llama, sequences)
    with open_tracer(llama, find_family(llama)) as tracer:
        roundings = measured_roundings(tracer, sequences, ranges, precision)
    site = next(site for site in ranges if str(site) == "layer 2 mlp.down_proj input")
    (((x,), _),) = calls_of(llama, {"down": llama.model.layers[2].mlp.down_proj}, torch.stack(sequences))["down"]
    x = x.double()
    snapped = asymmetric_grid(ranges[site].low, ranges[site].high, 3).snap(x)
    assert roundings[site].zeroed == pytest.approx(float((snapped == 0).double().mean()), abs=2e-3)
    noise = float((snapped - x).square().sum())
    assert roundings[site].sqnr == pytest.approx(10 * np.log10(float(x.square().sum()) / noise), abs=0.05)
    weight = llama.model.layers[2].mlp.down_proj.weight.double()
    error = symmetric(weight, weight.abs().max(), 4) - weight
    known = roundings[Site(site.path, WEIGHT, 2, "mlp.down_proj")]
    assert known.sqnr == pytest.approx(10 * np.log10(float(weight.square().sum() / error.square().sum())), abs=0.01)


def show(monkeypatch: pytest.MonkeyPatch, tensors: Sequence[tuple[Site, torch.Tensor]]) -> None:
    """Let a study see these tensors of sites in place of those of a model."""
    monkeypatch.setattr(study, "read", lambda tracer, sites, sequences, see, *spared: [see(*each) for each in tensors])


def test_a_hidden_state_is_massive_if_it_is_in_one_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.ones(4, 8), torch.ones(4, 8)
    large[0, 0] = 1500.0
    sites = [Site(f"{sign}", part, 0, "") for part in (INPUT, SUM, SCORES, WEIGHT) for sign in (1, -1)]
    show(monkeypatch, [(site, int(site.path) * x) for site in sites for x in (small, large)])
    ranges = study.measured_ranges(None, sites, [0, 1])  # type: ignore[arg-type]
    assert [site.part for site in sites if ranges[site].is_massive] == [INPUT, INPUT, SUM, SUM]


def test_roundings_of_few_numbers_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy, exact = Site("a", INPUT, 0, "a"), Site("b", INPUT, 0, "b")
    show(monkeypatch, [(lossy, torch.tensor([[0.0, 0.2], [3.0, 2.1]])), (exact, torch.tensor([[0.0, 1.0]]))])
    ranges = {site: Range(0.0, 3.0, 1.0, False) for site in (lossy, exact)}  # steps of 1 with two bits
    roundings = measured_roundings(None, [0], ranges, Precision(2, 2))  # type: ignore[arg-type]
    energy, noise = 0.2**2 + 3.0**2 + 2.1**2, 0.2**2 + 0.1**2
    assert (roundings[lossy].zeroed, roundings[lossy].sqnr) == pytest.approx((1 / 3, 10 * np.log10(energy / noise)))
    assert (roundings[exact].zeroed, roundings[exact].sqnr) == (0.0, INF)


def subject_of(model: PreTrainedModel | LoadedModel, **options: Any) -> Subject:
    with open_subject(model, None, make_config(**options), Console(quiet=True)) as subject:
        return subject


@pytest.mark.parametrize("named", ["mlp.down_proj", "layer 1 mlp.down_proj input", "model.layers.1.mlp.down_proj"])
def test_sites_left_out_by_name(llama: PreTrainedModel, named: str) -> None:
    ranges, ids = ranges_of(llama), tiny_tokens()
    left = {site for site in ranges if named in (site.kind, site.role, str(site), site.path)}
    assert len(left) == {"mlp.down_proj": 9, "mlp.down_proj input": 3, "model.layers.1.mlp.down_proj": 3}.get(named, 1)
    with quantized_sites(llama, {site: ranges[site] for site in ranges if site not in left}, Precision(4, 4)):
        expected = llama(ids).logits
    for chosen in (named, [named], left):
        with quantized(llama, ranges, except_sites=chosen, bits_weights=4, bits_activations=4):
            assert torch.equal(llama(ids).logits, expected)


def test_wrong_sites_bits_and_ranges_are_refused(llama: PreTrainedModel) -> None:
    before, ranges = state_of(llama), ranges_of(llama)
    for options, message in (
        ({"except_sites": ["mlp.dwn_proj"]}, r"site 'mlp\.dwn_proj' is unknown; did you mean 'mlp\.down_proj'"),
        *(({"bits_weights": bits}, "from 2 to 16") for bits in (1, 8.0, True, "8")),
        ({"bits_activations": 17}, "from 2 to 16"),
    ):
        with pytest.raises(InputError, match=message), quantized(llama, ranges, **options):
            pass
    assert_as_before(llama, before)
    for bad in (NAN, INF):
        with pytest.raises(InputError, match="cannot be quantized"):
            symmetric_grid(bad, 8)
        for low, high in ((0.0, bad), (bad, 0.0), (1.0, -1.0)):
            with pytest.raises(InputError, match="not a range"):
                asymmetric_grid(low, high, 8)
    with pytest.raises(InputError, match="at least one sequence to calibrate by"):
        calibrate_ranges(llama, [])


def test_under_an_intervention_and_around_one(llama: PreTrainedModel) -> None:
    ids, ranges = tiny_tokens(), ranges_of(llama)
    llama(ids, output_hidden_states=True)  # this leaves hooks of transformers
    before = state_of(llama)
    do = "zero-massive:layers=1,positions=0,coordinates=3"
    with quantized(llama, ranges, bits_activations=4), sinkscope.intervening(llama, do):
        outer = llama(ids, output_hidden_states=True).hidden_states[2]
    with sinkscope.intervening(llama, do), quantized(llama, ranges, bits_activations=4):
        inner = llama(ids, output_hidden_states=True).hidden_states[2]
    assert outer[:, 0, 3].eq(0).all()
    torch.testing.assert_close(inner, outer)
    assert_as_before(llama, before)


def test_the_tables_and_settings(coarse: Run) -> None:
    assert set(coarse.tables) == set(coarse.manifest["tables"]) == {"quantization", "quantization_sites"}
    for name, of_name in coarse.tables.items():
        assert tuple(of_name.columns) == (*LEADING, *column_names(name))
    sites = coarse.tables["quantization_sites"]
    assert len(sites) == 3 * 7 * 3
    assert sites["zeroed"].between(0, 1).all()
    span = sites["high"].clip(lower=0) - sites["low"].clip(upper=0)
    np.testing.assert_allclose(sites["step"], np.where(sites["part"] == WEIGHT, sites["max_abs"] / 7, span / 15))
    table, by_whole = coarse.tables["quantization"], whole(coarse)
    assert list(by_whole.index)[:4] == [FULL, ALL, WEIGHTS, "activations"]
    assert list(by_whole["quantized"])[:4] == [0, 63, 21, 42]
    assert by_whole.loc[[FULL, ALL], ["max_inf_norm", "kurtosis"]].notna().all(axis=None)
    assert MASSIVE_KEPT not in by_whole.index  # no massive activations
    alone = table[table["setting"] == ALONE]
    assert alone[alone["layer"] == -1]["quantized"].tolist() == [3] * 21
    assert alone[alone["layer"] >= 0]["quantized"].eq(1).all()
    assert set(table.loc[table["setting"] == KEPT, "quantized"]) == {60}
    assert set(table["sequences"]) == {16, 20}
    np.testing.assert_allclose(table["perplexity"], np.exp(table["loss"]))
    for _, rows in table.groupby("sequences"):
        np.testing.assert_allclose(rows["cost"], rows["loss"] - rows.loc[rows["setting"] == FULL, "loss"].iloc[0])
    assert (table["cost_low"] < table["cost_high"]).eq(table["setting"] != FULL).all()
    kept = table[table["setting"] == COSTLIEST_KEPT]["kept"].str.split(", ").str.len().to_list()
    assert kept[:3] == [1, 2, 4][: len(kept) - 1] or kept[-1] == kept[-2]
    assert kept[-1] == kept[-2]  # on the probes, then on all


def test_full_precision_is_the_model_and_all_is_quantized(llama: PreTrainedModel, coarse: Run) -> None:
    ids = torch.as_tensor(np.stack(subject_of(llama, input="random", num_seqs=24, seq_len=20).inputs.sequences))

    def perplexity() -> float:
        logits = llama(ids[:20]).logits[:, :-1].double()
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:20, 1:].flatten()).exp())

    settings = whole(coarse)["perplexity"]
    assert settings[FULL] == pytest.approx(perplexity(), rel=1e-5)
    ranges = calibrate_ranges(llama, ids[20:])
    weights = [site for site in ranges if site.part == WEIGHT]
    others = [site for site in ranges if site.part != WEIGHT]
    for setting, exact in ((ALL, ()), ("activations", weights), (WEIGHTS, others)):
        with quantized(llama, ranges, except_sites=exact, bits_weights=4, bits_activations=4):
            assert settings[setting] == pytest.approx(perplexity(), rel=1e-3)


@each_pair(["llama", "gpt2", "falcon-new"], list(METHODS))  # q, k and v apart, and fused in two ways
def test_a_retrofitted_model_is_quantized_as_the_plain_one(name: str, label: str) -> None:
    """It has the same sites, and 16 bits change almost nothing."""
    model = retrofitted(name, label, torch.float32)
    before = state_of(model)
    assert sites_of(model, find_family(model)) == sites_of(tiny_model(name), find_family(model))
    subject = subject_of(model, input="random", num_seqs=6, seq_len=20)
    numbers = w8a8(subject, subject.inputs, precision=Precision(16, 16))
    assert numbers["loss_quantized"] == pytest.approx(numbers["loss"], rel=1e-4)
    assert numbers["loss_quantized"] != numbers["loss"]
    analysed = sinkscope.analyze(model, input="random", num_seqs=6, seq_len=20, observables=("outlier", "gradient"))
    for metric in ("loss", "max_inf_norm", "kurtosis", "layer_inf_norm", "kurtosis_with_norms"):
        assert numbers[metric] == pytest.approx(analysed.metric(metric), rel=1e-5)
        assert numbers[f"{metric}_quantized"] == pytest.approx(numbers[metric], rel=1e-2)
    assert_as_before(model, before)


@each_pair(["llama", "gpt2", "falcon-new"], ["vga", "vga-output", "iga", "vscale", "vscale-fixed"])
def test_ranges_are_of_values_before_their_gates_and_of_mixes_after_them(name: str, label: str) -> None:
    model = retrofitted(name, label, torch.float32)
    with torch.no_grad():
        for part in parts_of(model).values():
            for parameter in part.parameters():
                parameter.mul_(8)  # far from 1
    family, sequences = find_family(model), tiny_tokens(3, 24, seed=7)
    ranges = {(site.path, site.part): known for site, known in calibrate_ranges(model, list(sequences)).items()}
    paths = {module: path for path, module in model.named_modules()}
    for layer, block in enumerate(family.layer_modules(model)):
        value = projections(model, family, layer)["value"].module
        output = block.get_submodule(family.attention).get_submodule(family.output)
        calls = calls_of(model, {"value": value, "output": output}, sequences)
        with torch.no_grad():
            raw, mix = type(value).forward(value, *calls["value"][0][0]), calls["output"][0][0][0]
        for known, x in ((ranges[paths[value], "output"], raw), (ranges[paths[output], "input"], mix)):
            assert (known.low, known.high) == pytest.approx(tuple(map(float, x.aminmax())), rel=1e-4)


OPTIONS = ("--input", "random", "--num-seqs", 4, "--seq-len", 16, "--calibration", 2, "--bits-activations", 3)


@pytest.fixture
def folder(tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    llama.save_pretrained(tmp_path / "llama")
    written(Path("few.jsonl"), tiny_tokens(4, 20))
    return tmp_path / "llama"


@pytest.mark.slow
def test_the_command_writes_a_run_folder_and_repeats_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rough_figures(monkeypatch)
    done = command_line("quantize", folder, "--scheme", "static", *OPTIONS)
    assert done.exit_code == 0, done.stderr
    assert "| static W8A3 |" in done.stdout
    assert done.stderr.endswith("written to runs/llama-random-static-W8A3\n")
    run = Run.open("runs/llama-random-static-W8A3")
    assert run.command == "quantize"
    assert done.stdout.strip() == run.verdict.strip()
    figures = {path.stem for path in Path("runs/llama-random-static-W8A3/figures").glob("*.png")}
    assert figures == {"quantization-cost", "quantization-ranges"}
    skip_figures(monkeypatch)
    again = command_line("quantize", "--from", "runs/llama-random-static-W8A3")
    assert again.exit_code == 0, again.stderr
    assert_same_tables(Run.open("runs/llama-random-static-W8A3-repeated").tables, run.tables)
    for arguments, message in (
        (("analyze", "--from", run.folder), "sinkscope quantize"),
        (("quantize", "--from", run.folder, "--bits-weights", 4), "--bits-weights cannot be given with it"),
        (
            ("quantize", folder, "--scheme", "static", *OPTIONS[2:-2], "--input", "few.jsonl"),
            "4 sequences, fewer than the 4 to evaluate and 2",
        ),
    ):
        refused = command_line(*arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr


@pytest.mark.slow
@pytest.mark.real_model
def test_what_w8a8_costs_smollm(smollm: LoadedModel) -> None:
    """On sequences of 64 tokens the loss in full precision is 3.949 nats per token; W8A8 adds 1.296, weights 0.052.

    With the sites of massive activations, all in down projections, in full precision, W8A8 adds 0.908. With all inputs
    and outputs of down projections in full precision, which are hundreds of times their median, it adds 0.138.
    """
    subject = subject_of(smollm, num_seqs=16, seq_len=32)
    inputs, calibration = subject.inputs.part(0, 8), subject.inputs.part(8, 16)
    simulation = Simulation(subject, Precision())
    ranges = simulation.ranges(calibration)

    def cost(kept: set[Site]) -> float:
        quantized = {site: ranges[site] for site in ranges if site not in kept}
        full, done = simulation.run([simulation.setting(each) for each in ({}, quantized)], inputs)
        return (done.loss - full.loss) / inputs.num_predicted

    massive = {site for site, known in ranges.items() if known.is_massive}
    activations = {site for site in ranges if site.part != WEIGHT}
    down = {site for site in activations if site.kind == "mlp.down_proj"}
    assert {"layer 11 mlp.down_proj input", "layer 11 mlp.down_proj output"} <= {str(site) for site in massive}
    assert massive <= down
    assert 0.6 < (of_all := cost(set())) < 3
    assert cost(activations) < 0.15
    assert 0.3 * of_all < cost(massive) < 0.9 * of_all
    assert cost(down) < 0.3 * of_all


BITS = 4
ACTIVATIONS = (INPUT, OUTPUT)
AT_THE_INTERFACE = [name for name in REPRESENTATIVE if find_family(tiny_model(name)).door == "interface"]
ONE_TEXT: dict[str, Any] = {"input": "random", "num_seqs": 1, "seq_len": 12, "calibration": 1}
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
            written_out(model, text[None], self.look, as_it_is, self.look)

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
        expected = written_out(model, ids, hand.activation, hand.weight, hand.cached)
        scheme = "full" if name == "full" else "static"
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
        assert all((unquantized - expected).abs().max() > least for unquantized in others)
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
            assert (
                0 < known.step < site_grid(Precision(BITS, BITS, BITS, kv_cache_per="tensor"), site, ranges[site]).step
            )


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
        tensors = outputs(model, family, chosen)
        for site, known in chosen.items():
            x = tensors[site.layer, "layer_out"] - (tensors[site.layer, "mlp_out"] if kind == "mid" else 0.0)
            wholes = x / site_grid(Precision(8, 6), site, known).step
            if family.wiring != "post-norm":  # there the stream continues with the output of the next norm
                assert (wholes - wholes.round()).abs().max() < 1e-2


def outputs(model: PreTrainedModel, family: Family, ranges: dict[Site, Range]) -> dict[tuple[int, str], torch.Tensor]:
    """Return, by layer and site, the tensors that plain hooks record in the model with these sites in six bits."""
    modules = {
        (at, site): layer.get_submodule(family.sites[site].rpartition(".")[0])
        for at, layer in enumerate(family.layer_modules(model))
        for site in ("mlp_out", "layer_out")
    }
    with quantized(model, ranges, bits_activations=6):
        calls = calls_of(model, modules, tiny_tokens())
    return {place: x.double().view(*tiny_tokens().shape, -1) for place, ((_, x),) in calls.items()}


def test_what_cannot_be_reached_is_refused() -> None:
    for name, options, message in (
        ("bloom", {"has_cache": True}, "--kv-cache-per does not apply to .* its keys and values cannot be"),
        ("gptj", {"scheme": "full"}, "--scheme full does not apply to .* its attention code is its own"),
        ("llama", {"scheme": "ful"}, "scheme 'ful' is unknown; did you mean 'full'"),
    ):
        with pytest.raises(InputError, match=message):
            calibrate_ranges(tiny_model(name), list(tiny_tokens(1)), **options)


def test_the_command_says_what_it_quantized_and_by_which_grids() -> None:
    run = quantize(
        tiny_model("llama"), scheme="static", weights_per="channel", kv_cache_per="channel", bits_kv_cache=4, **ONE_TEXT
    )
    assert "simulated static W8A8KV4" in run.verdict
    assert run.tables["quantization"].set_index("setting").loc["kv-cache", "quantized"] == 2 * 3
    assert set(CACHED) <= set(run.tables["quantization_sites"]["part"])
    full = quantize(tiny_model("llama"), scheme="full", bits_activations=4, **ONE_TEXT)
    assert "simulated static W8A4 (full)" in full.verdict
    assert set(full.tables["quantization_sites"]["part"]) == {*SCHEMES["full"][0]}
    assert len(draw_quantization_cost(full).axes) >= 2
    plain = quantize(tiny_model("llama"), scheme="static", **ONE_TEXT)
    assert "kv-cache" not in set(plain.tables["quantization"]["setting"])
    assert full.manifest["quantization"]["linear_layers"] == plain.manifest["quantization"]["linear_layers"] == 21


def points_at(ax: Axes, points: int) -> dict[float, np.ndarray]:
    """Return the places of a panel's rows, with the x of the lines there that have so many points."""
    lines = [line for line in ax.lines if len(line.get_xdata()) == points and len(set(line.get_ydata())) == 1]
    return {float(line.get_ydata()[0]): np.asarray(line.get_xdata(), float) for line in lines}


def test_costs_are_drawn_with_their_intervals_around_full_precision_of_the_same_sequences(coarse: Run) -> None:
    table = coarse.tables["quantization"]
    full = table[table["setting"] == FULL].set_index("sequences")["perplexity"]
    assert len(full) == 2
    for ax, sequences in zip(draw_quantization_cost(coarse).axes, (20, 16, 16), strict=True):
        rows, marks, intervals = table[table["sequences"] == sequences], points_at(ax, 1), points_at(ax, 2)
        assert marks.keys() == intervals.keys()
        names = [label.get_text() for label in ax.get_yticklabels()]
        (reference,) = {x for line in ax.lines if len(set(line.get_ydata())) > 1 for x in line.get_xdata()}
        assert reference == full[sequences]
        assert ax.get_xlabel().endswith(f", {sequences} sequences")
        for place, (perplexity,) in marks.items():
            (row,) = (
                rows[np.isclose(rows["perplexity"], perplexity, rtol=1e-12)].drop_duplicates("perplexity").itertuples()
            )
            ends = full[sequences] * np.exp([row.cost_low, row.cost_high])
            assert intervals[place] == pytest.approx(ends, rel=1e-9)
            assert names[round(place)].endswith(str(row.site))


def test_massive_sites_are_marked_and_have_a_ring_at_their_largest_entry(coarse: Run) -> None:
    table, sites = coarse.tables["quantization"], coarse.tables["quantization_sites"]
    activations = table[(table["setting"] == ALONE) & (table["layer"] >= 0) & (table["part"] != WEIGHT)]
    costliest = activations.loc[activations["cost"].idxmax(), ["layer", "site", "part"]]
    sites = sites.assign(is_massive=(sites[costliest.index] == costliest).all(axis=1))
    run = Run(coarse.manifest, coarse.tables | {"quantization_sites": sites})
    names = [label.get_text() for label in draw_quantization_cost(run).axes[2].get_yticklabels()]
    marked = f"{costliest['layer']} {costliest['site']} {MASSIVE_MARK}"
    assert [name for name in names if MASSIVE_MARK in name] == [marked]
    lines = [line for ax in draw_quantization_ranges(run).axes for line in ax.lines]
    rings = [line.get_xydata() for line in lines if line.get_markersize() == RING["markersize"]]
    assert np.concatenate(rings).tolist() == sites.loc[sites["is_massive"], ["layer", "max_abs"]].to_numpy().tolist()


def test_ranges_are_drawn_with_half_a_step(coarse: Run) -> None:
    sites = coarse.tables["quantization_sites"]
    panels = [ax for ax in draw_quantization_ranges(coarse).axes if ax.lines]
    assert len(panels) > 5
    for ax in panels:
        largest, median, half = (np.asarray(line.get_ydata(), float) for line in ax.lines[:3])
        (kind,) = {  # some linear layers read the same tensor
            tuple(rows["step"] / 2)
            for _, rows in sites.groupby(["site", "part"])
            if len(rows) == len(half)
            and np.allclose(rows["max_abs"], largest)
            and np.allclose(rows["median_abs"], median)
        }
        assert half == pytest.approx(kind)
