"""The cost of formats that are served: against plain PyTorch with compressed-tensors' numbers, and its rules."""

import copy
import re
from collections import defaultdict
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.encoders import encoder, word_tokenizer
from support.made_up_runs import run_manifest
from support.plain_formats import SMALL, TEXTS, plain_loss
from support.ranks import on_two_ranks
from support.retrofitted import retrofitted
from support.tables import assert_same_tables
from tiny import ragged_tokens, tiny_model
from torch import nn

from sinkscope import Run, quantize
from sinkscope.commands.card.tables import values_of
from sinkscope.commands.quantize import served_findings
from sinkscope.commands.quantize.figures import COST_INTERVAL, FORMAT_MARKS, draw_formats_cost
from sinkscope.commands.quantize.manifest import EncodingEntry, Served
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.commands.quantize.served import (
    ALL,
    INPUTS,
    RANDOM_DRAWS,
    WEIGHTS,
    Factors,
    LargestFactors,
    ServedStudy,
    StoredInputs,
)
from sinkscope.commands.sweep.figures import draw_formats_models
from sinkscope.commands.sweep.tables import FORMATS, SweepTables
from sinkscope.errors import InputError
from sinkscope.models.families import find_family
from sinkscope.options.option import checked
from sinkscope.quantization.formats import PRESETS, CureName, Encoding
from sinkscope.quantization.products import Matrix, all_experts_read, changed_products, matrices_of
from sinkscope.quantization.rounding import snap
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.statistics import resamplings
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import masked

FITTING = ("W8A8", "FP8", "FP8_DYNAMIC", "NVFP4", "NVFP4A16")  # whose groups divide the inputs of a tiny Llama


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", spread=1.0)


@pytest.fixture(scope="module")
def run(model: Any) -> Run:
    return quantize(model, **SMALL)


@pytest.fixture(scope="module")
def spared_run(model: Any) -> Run:
    return quantize(model, scheme="W8A8", cure="spare", batch_size=1, **SMALL)


def row_of(run: Run, scheme: str, part: str) -> pd.Series:
    table = run.tables["formats"]
    return table[(table["scheme"] == scheme) & (table["part"] == part)].iloc[0]


@pytest.mark.parametrize("scheme", FITTING)
def test_costs_are_those_of_plain_pytorch(model: Any, run: Run, scheme: str) -> None:
    preset, dense = PRESETS[scheme], plain_loss(model)
    for part, encodings in ((ALL, (preset.weights, preset.inputs)), (WEIGHTS, (preset.weights, None))):
        assert row_of(run, scheme, part)["cost"] == pytest.approx(plain_loss(model, *encodings) - dense, abs=2e-6)
    if preset.inputs is not None:
        cost = plain_loss(model, None, preset.inputs) - dense
        assert row_of(run, scheme, INPUTS)["cost"] == pytest.approx(cost, abs=2e-6)


def test_losses_by_sequence_add_up_to_those_of_the_table(model: Any, run: Run) -> None:
    table = run.tables["formats_losses"]
    with torch.no_grad():
        logits = model(TEXTS[:6]).logits[:, :-1].double()
    dense = F.cross_entropy(logits.transpose(1, 2), TEXTS[:6, 1:], reduction="none").sum(1)
    of_row = table[(table["scheme"] == "NVFP4") & (table["part"] == INPUTS)].set_index("sequence")
    assert (of_row["loss"] - of_row["cost"]).to_dict() == pytest.approx(dict(enumerate(dense.tolist())), abs=1e-4)
    assert set(table["predicted"]) == {23}
    sums = table.groupby(["scheme", "part"], sort=False)[["loss", "cost"]].sum() / (6 * 23)
    formats = run.tables["formats"].set_index(["scheme", "part"])
    pd.testing.assert_frame_equal(formats[["loss", "cost"]], sums)
    np.testing.assert_allclose(formats["ratio"], np.exp(formats["cost"]))


@pytest.mark.parametrize("scheme", ["W8A8", "FP8"])
def test_the_sinks_share_is_what_their_inputs_in_full_precision_recover(model: Any, run: Run, scheme: str) -> None:
    encodings, first = (PRESETS[scheme].weights, PRESETS[scheme].inputs), torch.arange(24).expand(9, -1) < 4
    share = plain_loss(model, *encodings) - plain_loss(model, *encodings, first)  # it has no massive activations
    assert run.manifest["served"]["sink_layer"] == -1
    row = row_of(run, scheme, ALL)
    assert row["sink_share"] == pytest.approx(share, abs=2e-6)
    drawn, shares = np.random.default_rng(0), []
    for _ in range(RANDOM_DRAWS):
        random = torch.zeros(9, 24, dtype=torch.bool)
        for mask in random:
            mask[drawn.choice(np.arange(4, 24), 4, replace=False)] = True
        shares.append(plain_loss(model, *encodings) - plain_loss(model, *encodings, random))
    assert row["random_share"] == pytest.approx(np.mean(shares), abs=2e-6)
    assert (row["random_share_low"], row["random_share_high"]) == pytest.approx((min(shares), max(shares)), abs=2e-6)
    assert row["ahead"] == pytest.approx(share - np.mean(shares), abs=2e-6)
    assert row["ahead_low"] < row["ahead"] < row["ahead_high"]


def test_sinks_are_predicted_by_the_massive_activations_of_the_texts_that_calibrate() -> None:
    model, texts = tiny_model("llama", spread=1.0), torch.full((9, 24), 7)
    model.get_input_embeddings().weight[5, 3] = model.get_input_embeddings().weight[6, 4] = 1e6
    texts[:3, 9] = texts[:, 17] = 5
    texts[:6, 20] = 6  # massive, but at no coordinate of the texts that calibrate
    run = quantize(model, scheme="W8A8", cure="awq", **SMALL | {"input": list(texts.numpy())})
    served = run.manifest["served"]
    assert (served["sink_layer"], served["sinks"]) == (0, 1.5)  # two of three texts, one of the others


def test_what_is_recovered_is_compared_with_the_mean_of_random_draws_text_by_text() -> None:
    study, noise = object.__new__(ServedStudy), np.array([9.0, -40.0, 300.0, 2.0])  # by text: it affects all settings
    inputs = SimpleNamespace(predicted=np.full(4, 10), texts=[0, 1, 2, 3])
    vars(study).update(subject=SimpleNamespace(inputs=inputs))
    draws = [noise + each for each in (6.0, 7.0, 11.0)]
    row = study.recovery(("gain", "chance"), np.full(4, 9.0) + noise, np.full(4, 3.0) + noise, draws)
    assert {name: row[name] for name in ("gain", "chance", "chance_low", "chance_high")} == pytest.approx(
        {"gain": 0.6, "chance": 0.1, "chance_low": -0.2, "chance_high": 0.3}
    )
    assert [row["ahead"], row["ahead_low"], row["ahead_high"]] == pytest.approx([0.5] * 3)
    uneven = study.recovery(("gain", "chance"), noise, noise, [noise + np.array([8.0, 4.0, -6.0, -2.0])])
    spread = np.quantile(resamplings(4)[1:] @ [0.2, 0.1, -0.15, -0.05], [0.025, 0.975])
    assert [uneven["ahead"], uneven["ahead_low"], uneven["ahead_high"]] == pytest.approx([0.1, *spread])


def test_a_static_range_leaves_out_spared_tokens() -> None:
    recorder, matrix = LargestFactors(registers=1), Matrix("a", 0, "a")
    recorder.sequence = 0
    x, weight = torch.tensor([[[50.0], [9.0], [-7.0], [2.0]]]), torch.ones(1, 1)  # a register comes first
    recorder(matrix, F.linear, x, weight, None)
    expert = Matrix("b", 0, "b", "up", 3)
    recorder(expert, F.linear, x[0, [1, 3]], weight, torch.tensor([1, 3]))
    first = [np.array([True, False, False])]
    assert recorder.inputs() == {matrix: 50.0, expert: 9.0}
    assert recorder.inputs(first) == {matrix: 50.0, expert: 2.0}


def test_weights_next_to_each_other_that_read_the_same_input_share_a_scale() -> None:
    recorder, x = LargestFactors(registers=0), torch.tensor([[1.0], [2.0]])
    for size, (path, read) in enumerate({"a.q": x, "a.k": x, "b.gate": x, "a.o": 2 * x}.items(), 1):
        recorder(Matrix(path, 0, path), F.linear, read, torch.full((1, 1), float(size)), None)
    assert {matrix.path: size for matrix, size in recorder.fused_weights().items()} == {
        "a.q": 2.0, "a.k": 2.0, "b.gate": 3.0, "a.o": 4.0,
    }  # fmt: skip
    experts = [Matrix("a.experts", 0, "a.experts", "up", number) for number in range(2)]
    for size, expert in enumerate(experts, 5):
        recorder(expert, F.linear, x, torch.full((1, 1), float(size)), torch.arange(2))
    assert [recorder.fused_weights()[expert] for expert in experts] == [5.0, 6.0]


def test_spared_tokens_are_counted_after_registers() -> None:
    factors = Factors(None, [StoredInputs(), StoredInputs(None, [np.array([True, False, True])])], {}, registers=2)
    factors.begin(Batch(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)))
    assert factors.spared_on(torch.device("cpu")).view(2, 6).int().tolist() == [[0] * 6, [0, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize("tokens", [None, torch.tensor([11, 2, 4, 15, 8, 9])], ids=["all", "an expert's"])
@pytest.mark.parametrize("scheme", ["W8A8", "FP8", "NVFP4"])
def test_settings_side_by_side_are_rounded_as_each_alone(scheme: str, tokens: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    matrix, encoding = Matrix("a", 0, "a"), PRESETS[scheme].inputs
    spared = [np.array([True, False, False, True])]
    settings = [
        StoredInputs(encoding, (), {matrix: 9.0}),
        StoredInputs(encoding, spared, {matrix: 1.5}),
        StoredInputs(encoding, spared, {matrix: 0.7}),
        StoredInputs(),
    ]
    batch = Batch(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    every_x = torch.randn(16, 32)

    def rounded(settings: list[StoredInputs], x: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        factors = Factors(None, settings, {}, registers=0)
        factors.begin(batch)
        return factors(matrix, lambda x, weight: x, x, torch.eye(32), tokens)

    for count in (2, len(settings)):
        places = torch.arange(4 * count) if tokens is None else tokens[tokens < 4 * count]
        x = every_x[places]
        together = rounded(settings[:count], x, None if tokens is None else places)
        for number, setting in enumerate(settings[:count]):
            own = places // 4 == number
            alone = rounded([setting], x[own], None if tokens is None else places[own] - 4 * number)
            assert own.any()
            assert torch.equal(together[own], alone)


def test_results_do_not_depend_on_the_batch_or_on_the_other_schemes(run: Run, spared_run: Run) -> None:
    of_all = run.tables["formats"].query("scheme == 'W8A8'").reset_index(drop=True)
    pd.testing.assert_frame_equal(spared_run.tables["formats"], of_all, atol=1e-5, rtol=1e-5)


def test_texts_of_different_lengths_are_weighed_by_their_tokens_in_any_batch(model: Any) -> None:
    texts = ragged_tokens((20, 9, 14, 24, 7, 11, 16, 24, 10))
    options = SMALL | {"input": texts, "scheme": "W8A8", "cure": "awq"}
    one_by_one, together = (quantize(model, batch_size=size, **options).tables for size in (1, 6))
    pd.testing.assert_frame_equal(one_by_one["formats"], together["formats"], atol=1e-5, rtol=1e-5)
    losses = together["formats_losses"].query("part == 'all'")
    assert losses["predicted"].tolist() == [len(ids) - 1 for ids in texts[:6]]
    row = together["formats"].query("part == 'all'").iloc[0]
    assert row["loss"] == pytest.approx(losses["loss"].sum() / losses["predicted"].sum())


def test_sink_tokens_after_registers_are_spared() -> None:
    model = retrofitted("llama", "register-tokens", torch.float32)
    assert abs(row_of(quantize(model, scheme="W8A8", cure="awq", **SMALL), "W8A8", ALL)["sink_share"]) > 1e-4


@pytest.mark.parametrize("is_encoder", [False, True])
def test_the_default_table_takes_as_many_passes_as_it_says_beforehand(
    model: Any, capsys: pytest.CaptureFixture[str], is_encoder: bool
) -> None:
    tokens, tokenizer = 0, None
    if is_encoder:
        model, tokenizer = encoder("bert", torch.float32), word_tokenizer()

    def count(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal tokens
        tokens += kwargs["input_ids"].numel()

    with model.register_forward_pre_hook(count, with_kwargs=True):
        quantize(model, tokenizer=tokenizer, quiet=False, **SMALL)
    (announced,) = re.findall(r"(\d+) passes over the texts, at least \d+ s", capsys.readouterr().err)
    # the unchanged model and the texts that calibrate, and checks of the first sequences; as they are, and masked
    read_before = 6 if is_encoder else 4
    assert int(announced) <= tokens / TEXTS[:6].numel() <= int(announced) + read_before <= 40


@pytest.mark.parametrize("scheme", ["W8A8", "FP8"])
def test_an_encoders_cost_is_that_of_masked_tokens_in_plain_transformers(scheme: str) -> None:
    model, tokenizer = encoder("bert", torch.float32, 3.0), word_tokenizer()
    run, preset = quantize(model, tokenizer=tokenizer, **SMALL), PRESETS[scheme]
    parts = zip(*masked(list(TEXTS.numpy()), tokenizer, model.config.vocab_size, seed=0), strict=True)
    hidden, labels = (torch.from_numpy(np.stack(each)) for each in parts)
    plain = partial(plain_loss, model, masked=(hidden, labels))
    dense, every = plain(), plain(preset.weights, preset.inputs)
    row, first = row_of(run, scheme, ALL), torch.arange(24).expand(9, -1) < 4  # the model has no massive activations
    assert row["cost"] == pytest.approx(every - dense, abs=2e-6)
    assert row_of(run, scheme, WEIGHTS)["cost"] == pytest.approx(plain(preset.weights) - dense, abs=2e-6)
    assert run.manifest["served"]["full_precision_modules"] == ["cls.predictions.decoder"]
    assert row["sink_share"] == pytest.approx(every - plain(preset.weights, preset.inputs, first), abs=2e-6)
    assert min(abs(row["cost"]), abs(row["sink_share"])) > 5e-6  # more than twice the tolerance


# --- experts


def test_an_experts_products_are_changed_one_by_one() -> None:
    model = tiny_model("qwen3_moe")
    matrices = matrices_of(model, find_family(model))
    experts = [matrix for matrix in matrices if matrix.expert is not None]
    layers = model.config.num_hidden_layers
    assert len(experts) == layers * 2 * model.config.num_experts
    assert [matrix.module for matrix in experts[:2]] == [
        f"model.layers.0.mlp.experts.{expert}.gate_up_proj" for expert in range(2)
    ]
    seen: dict[Matrix, list[torch.Tensor]] = defaultdict(list)

    def halved(matrix: Matrix, product: Any, x: torch.Tensor, weight: torch.Tensor, rows: Any) -> torch.Tensor:
        parameter = model.get_submodule(matrix.path).get_parameter(matrix.parameter)[matrix.expert]
        assert torch.equal(weight, parameter)
        seen[matrix].append(rows)
        return product(x, weight / 2)

    halves = copy.deepcopy(model)
    for matrix in experts:
        halves.get_submodule(matrix.path).get_parameter(matrix.parameter).data[matrix.expert] /= 2
    with torch.no_grad(), changed_products(model, experts, halved):
        torch.testing.assert_close(model(TEXTS[:2]).logits, halves(TEXTS[:2]).logits)
    for layer in range(layers):  # every token goes to as many experts as the model says
        first = [rows for matrix, parts in seen.items() for rows in parts
                 if matrix.layer == layer and matrix.parameter == "gate_up_proj"]  # fmt: skip
        counts = torch.cat(first).bincount(minlength=TEXTS[:2].numel())
        assert counts.tolist() == [model.config.num_experts_per_tok] * TEXTS[:2].numel()


def test_ranges_of_experts_are_those_of_all_tokens_also_of_experts_that_get_none() -> None:
    model: Any = tiny_model("qwen3_moe", spread=1.0)
    for layer in model.model.layers:  # all tokens go to the first two experts
        layer.mlp.gate.register_forward_hook(
            lambda module, args, output: (*output[:2], torch.tensor([0, 1]).expand_as(output[2]))
        )
    recorder, matrices = LargestFactors(registers=0), matrices_of(model, find_family(model))
    inputs: dict[str, torch.Tensor] = {}
    experts = {path: module for path, module in model.named_modules() if path.endswith("mlp.experts")}
    for path, module in experts.items():
        module.register_forward_pre_hook(lambda module, args, path=path: inputs.update({path: args[0]}))
    with torch.no_grad():
        plain = model(TEXTS[:1]).logits
        with all_experts_read(model, matrices), changed_products(model, matrices, recorder):
            assert torch.equal(model(TEXTS[:1]).logits, plain)
    largest = recorder.inputs()
    for path, module in experts.items():
        for expert, gate_up in enumerate(module.gate_up_proj):
            gate, up = F.linear(inputs[path], gate_up).chunk(2, -1)
            read = {"gate_up_proj": inputs[path], "down_proj": F.silu(gate) * up}
            for name, x in read.items():
                (matrix,) = (each for each in matrices if each.module == f"{path}.{expert}.{name}")
                assert largest[matrix] == pytest.approx(float(x.abs().max()), rel=1e-6)
    run = quantize(model, scheme="FP8", cure="awq", **SMALL)
    assert run.manifest["served"]["matrices"] == len(matrices)
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    paths = {matrix.parameter_path for matrix in matrices}
    assert run.manifest["served"]["share"] == sum(sizes[path] for path in paths) / sum(sizes.values())


def test_experts_are_quantized_like_linear_layers_and_the_rest_is_named() -> None:
    model = tiny_model("qwen3_moe", spread=1.0)
    run, both = (quantize(model, scheme=scheme, cure="awq", **SMALL) for scheme in ("W8A8", "W8A8,FP8"))
    assert row_of(both, "W8A8", INPUTS)["cost"] == pytest.approx(row_of(run, "W8A8", INPUTS)["cost"], abs=1e-6)
    served, preset = run.manifest["served"], PRESETS["W8A8"]
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    share = sum(size for path, size in sizes.items() if path.endswith("mlp.gate.weight")) / sum(sizes.values())
    assert served["not_quantized"] == pytest.approx({"mlp.gate.weight": share})
    rounded = copy.deepcopy(model)
    for matrix in matrices_of(model, find_family(model)):
        parameter = rounded.get_submodule(matrix.path).get_parameter(matrix.parameter)
        part = parameter.data if matrix.expert is None else parameter.data[matrix.expert]
        part.copy_(snap(preset.weights, part))
    assert row_of(run, "W8A8", WEIGHTS)["cost"] == pytest.approx(plain_loss(rounded) - plain_loss(model), abs=2e-6)


# --- modules to spare


def test_the_predicted_rise_is_of_second_order_in_the_outputs_error(model: Any, spared_run: Run) -> None:
    module, outputs = "model.layers.1.mlp.up_proj", list[tuple[torch.Tensor, torch.Tensor]]()
    plain = copy.deepcopy(model).requires_grad_(True)
    linear = plain.get_submodule(module)
    linear.register_forward_hook(lambda module, args, output: outputs.append((args[0], output)))
    logits = plain(TEXTS[:6]).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), TEXTS[:6, 1:].flatten(), reduction="sum")
    ((x, y),), preset = outputs, PRESETS["W8A8"]
    assert preset.inputs is not None
    (gradient,) = torch.autograd.grad(loss, y)
    error = F.linear(snap(preset.inputs, x), snap(preset.weights, linear.weight)) - y
    rise = float((gradient * error.detach()).sum(-1).square().sum() / 2) / TEXTS[:6, 1:].numel()
    table = spared_run.tables["formats_modules"].set_index("module")
    assert table.loc[module, "predicted"] == pytest.approx(rise, rel=1e-3)
    assert table["predicted"].is_monotonic_decreasing
    assert table["layer"].tolist() == table.index.str.split(".").str[2].astype(int).tolist()
    assert len(table) == 21
    assert table["is_spared"].sum() == spared_run.tables["formats_cures"]["setting"].astype(int).iloc[0]


def test_spared_modules_recover_what_plain_pytorch_recovers(model: Any, spared_run: Run) -> None:
    modules, row = spared_run.tables["formats_modules"], spared_run.tables["formats_cures"].iloc[0]
    spared, preset = set(modules["module"][modules["is_spared"]]), PRESETS["W8A8"]
    recovered = plain_loss(model, preset.weights, preset.inputs)
    recovered -= plain_loss(model, preset.weights, preset.inputs, exact=spared)
    assert row["recovered"] == pytest.approx(recovered, abs=2e-6)
    assert row["cost"] == row_of(spared_run, "W8A8", ALL)["cost"]
    assert row["ahead"] == pytest.approx(row["recovered"] - row["random_recovered"])


def test_the_model_is_as_before(model: Any) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    quantize(model, scheme="FP8", **SMALL)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


# --- findings and recipes


def run_of(cost: tuple[float, ...], share: tuple[float, ...] = (), recovered: tuple[float, ...] = ()) -> Run:
    """Make a run of W8A8: its cost and the sinks' share with their intervals, and what spared modules recover."""
    share = share or (0.0,) * 9
    names = [
        f"{name}{end}" for name in ("cost", "sink_share", "random_share", "ahead") for end in ("", "_low", "_high")
    ]
    row = dict(zip(names, (*cost, *share), strict=True)) | {"scheme": "W8A8", "part": ALL, "ratio": np.exp(cost[0])}
    alone = {name: row[name] for name in ("scheme", "cost_low", "cost_high", "ratio")}
    rows = [row, alone | {"part": WEIGHTS, "cost": 0.25 * cost[0]}, alone | {"part": INPUTS, "cost": 0.5 * cost[0]}]
    tables = {"formats": pd.DataFrame(rows)}
    if recovered:
        columns = [
            f"{name}{end}"
            for name in ("cost", "recovered", "random_recovered", "ahead")
            for end in ("", "_low", "_high")
        ]
        spared = dict(zip(columns, (*cost, *recovered), strict=True)) | {
            "scheme": "W8A8",
            "cure": "spare",
            "setting": "2",
        }
        modules = {"scheme": "W8A8", "module": ["a", "b", "c"], "is_spared": [True, True, False]}
        tables |= {"formats_cures": pd.DataFrame([spared]), "formats_modules": pd.DataFrame(modules)}
    served = {
        "schemes": {"W8A8": asdict(PRESETS["W8A8"])}, "absent": {}, "alpha": 0.5, "absent_cures": {}, "calibration": 3,
        "matrices": 4, "share": 0.8, "not_quantized": {}, "full_precision_modules": ["lm_head"],
        "sink_layer": 0, "sinks": 1.5,
    }  # fmt: skip
    Served.model_validate(served)
    assert list(EncodingEntry.model_fields) == [each.name for each in fields(Encoding)]
    return Run(run_manifest(command="quantize", served=served), tables)


def modifier_of(run: Run, scheme: str) -> dict[str, Any]:
    """Return the only modifier of a recipe of llm-compressor."""
    return served_findings.recipe(run, scheme)["quant_stage"]["quant_modifiers"]["QuantizationModifier"]


def finding(run: Run, name: str) -> Finding:
    return next(each for each in served_findings.findings(run) if each.name == name)


@pytest.mark.parametrize(
    ("cost", "outcome"),
    [
        ((0.02, 0.010, 0.03), Outcome.PRESENT),
        ((0.02, 0.009, 0.03), Outcome.UNDECIDED),
        ((0.005, 0.001, 0.010), Outcome.UNDECIDED),
        ((0.005, 0.001, 0.0099), Outcome.ABSENT),
    ],
)
def test_a_cost_is_decided_by_its_interval(cost: tuple[float, ...], outcome: Outcome) -> None:
    run = run_of(cost)
    assert finding(run, "cost").outcome == outcome
    numbers = finding(run, "cost").numbers
    assert (numbers["weights"], numbers["inputs"]) == (0.25 * cost[0], 0.5 * cost[0])


@pytest.mark.parametrize(
    ("share", "ahead", "outcome", "words"),
    [
        ((0.02, 0.001, 0.03), (0.01, 0.001, 0.02), Outcome.PRESENT, "recovers more than as many random tokens: 0.020"),
        ((0.02, 0.001, 0.03), (0.01, 0.000, 0.02), Outcome.UNDECIDED, "not shown to recover more than as many random"),
        ((0.01, 0.000, 0.02), (0.02, 0.010, 0.03), Outcome.UNDECIDED, "is not shown to recover cost: 0.010"),
        ((0.02, 0.010, 0.03), (-0.02, -0.03, -0.01), Outcome.ABSENT, "recovers less than as many random tokens: 0.020"),
        ((0.02, 0.010, 0.03), (-0.02, -0.03, 0.0), Outcome.UNDECIDED, "not shown to recover more than as many random"),
        ((-0.01, -0.02, -0.001), (0.02, 0.01, 0.03), Outcome.ABSENT, "adds cost: it recovers -0.010"),
    ],
)
def test_sinks_have_a_share_if_they_recover_more_than_random_tokens_of_the_same_texts(
    share: tuple[float, ...], ahead: tuple[float, ...], outcome: Outcome, words: str
) -> None:
    numbers = (*share, 0.0, -0.5, 0.5, *ahead)  # the range of draws decides nothing
    one = finding(run_of((0.1, 0.05, 0.2), numbers), "sink-share")
    assert (one.outcome, words in one.sentence) == (outcome, True)
    assert f"against -0.500 to 0.500; paired by text, the difference is {ahead[0]:.3f} (" in one.sentence
    assert "for the inputs of sink tokens (1.5 of a sequence)" in one.sentence
    assert (one.numbers["ahead_low"], one.low) == (ahead[1], share[1])
    nothing = finding(run_of((0.1, 0.0, 0.2), numbers), "sink-share")
    assert (nothing.outcome, "not above 0" in nothing.sentence) == (Outcome.UNDECIDED, True)


@pytest.mark.parametrize(
    ("recovered", "ignored"),
    [
        ((0.02, 0.011, 0.03, 0.0, -0.01, 0.01, 0.02, 0.001, 0.03), ["a", "b"]),
        ((0.02, 0.011, 0.03, 0.0, -0.01, 0.01, 0.02, 0.0, 0.03), []),
        ((0.02, 0.0, 0.03, -0.02, -0.03, -0.01, 0.04, 0.02, 0.05), []),
    ],
)
def test_a_recipe_ignores_modules_that_recover_more_than_random_ones(
    recovered: tuple[float, ...], ignored: list[str]
) -> None:
    run = run_of((0.1, 0.05, 0.2), recovered=recovered)
    of_another = pd.DataFrame({"scheme": "FP8", "module": ["c"], "is_spared": True})
    run.tables["formats_modules"] = pd.concat([run.tables["formats_modules"], of_another])
    modifier = modifier_of(run, "W8A8")
    assert modifier["ignore"] == ["lm_head", *ignored]
    assert ("ignores none" in finding(run, "cure").sentence) == (not ignored)
    ends, spare = dict.fromkeys(["recovered_low", "ahead_low"], -1.0 if ignored else 1.0), run.tables["formats_cures"]
    others = [spare.assign(**ends, **{name: other}) for name, other in (("scheme", "FP8"), ("cure", "rotation"))]
    run.tables["formats_cures"] = pd.concat([*others, spare])
    assert modifier_of(run, "W8A8") == modifier


def test_the_cure_that_recovers_most_is_best_and_one_that_adds_cost_is_not_worth_it() -> None:
    run = run_of((0.1, 0.05, 0.2), recovered=(0.02, 0.011, 0.03, 0.0, -0.01, 0.01, 0.02, 0.001, 0.03))
    (spare,) = run.tables["formats_cures"].to_dict("records")
    rotation = spare | {"cure": "rotation", "setting": "", "recovered": 0.04}
    prefix = spare | {"cure": "prefix", "recovered": -0.2, "recovered_low": -0.3, "recovered_high": -0.01}
    run.tables["formats_cures"] = pd.DataFrame([spare, rotation, prefix])
    worth, *each = [one for one in served_findings.findings(run) if one.name in ("worth", "cure")]
    assert worth.numbers["worth"] == ("spare", "rotation")
    assert "worth it is spare, rotation; rotation recovers most" in worth.sentence
    assert [one.outcome for one in each] == [Outcome.PRESENT, Outcome.PRESENT, Outcome.ABSENT]
    assert "adds cost" in each[2].sentence


@pytest.mark.parametrize(("high", "outcome"), [(-0.01, Outcome.ABSENT), (0.0, Outcome.UNDECIDED)])
def test_a_cure_adds_cost_only_if_its_interval_is_below_0(high: float, outcome: Outcome) -> None:
    run = run_of((0.1, 0.05, 0.2), recovered=(-0.02, -0.03, high, 0.0, -0.01, 0.01, -0.02, -0.03, high))
    one = finding(run, "cure")
    assert (one.outcome, "adds cost" in one.sentence) == (outcome, outcome == Outcome.ABSENT)


def test_marks_of_spared_tokens_are_at_the_cost_that_is_left() -> None:
    figure = draw_formats_cost(run_of((0.1, 0.05, 0.2), (0.03, 0.02, 0.05, 0.01, -0.01, 0.04, 0.02, 0.01, 0.03)))
    drawn: dict[tuple, set[tuple]] = defaultdict(set)
    for line in figure.axes[0].lines:
        drawn[line.get_marker(), line.get_color()].add(tuple(np.round(line.get_xdata(), 12)))
    marks = {name: drawn[look["marker"], look["color"]] for name, look in FORMAT_MARKS.items()}
    places = [(0.1,), (0.025,), (0.05,), (0.07,), (0.06, 0.11)]  # all, weights, inputs, without sinks or random tokens
    assert marks == {name: {place} for name, place in zip(FORMAT_MARKS, places, strict=True)}
    assert drawn["None", COST_INTERVAL["color"]] == {(0.05, 0.2)}


def test_the_overview_has_costs_of_parts_and_a_finding_the_share_that_is_not_quantized() -> None:
    run = run_of((0.1, 0.05, 0.2), (0.03, 0.02, 0.05, 0.01, -0.01, 0.04, 0.02, 0.01, 0.03))
    (row,) = served_findings.overview(run).to_dict("records")
    assert (row["weights alone"], row["inputs alone"], row["sinks' share"]) == ("0.025", "0.050", "0.030")
    run.manifest["served"]["not_quantized"] = {"conv": 0.02, "router": 0.01}
    assert finding(run, "not-quantized").value == pytest.approx(0.03)


def test_a_recipe_names_experts_as_llm_compressor_does() -> None:
    run = run_of((0.1, 0.05, 0.2), recovered=(0.02, 0.011, 0.03, 0.0, -0.01, 0.01, 0.02, 0.001, 0.03))
    run.tables["formats_modules"]["module"] = [
        "mlp.experts.3.gate_up_proj",
        "mlp.gate_up_proj",
        "mlp.experts.0.down_proj",
    ]
    run.tables["formats_modules"]["is_spared"] = True
    names = ["mlp.experts.3.gate_proj", "mlp.experts.3.up_proj", "mlp.gate_up_proj", "mlp.experts.0.down_proj"]
    assert served_findings.ignored(run, "W8A8") == names


def test_recipes_are_those_that_compressed_tensors_reads(run: Run) -> None:
    texts = served_findings.files(run)
    assert set(texts) == {f"llm-compressor-{scheme}.yaml" for scheme in FITTING}
    assert set(run.manifest["served"]["absent"]) == {*PRESETS} - {*FITTING}
    gpt2 = quantize(tiny_model("gpt2"), scheme="W4A16", cure="smoothquant", **SMALL)
    assert served_findings.files(gpt2) == {}  # its layers are no torch.nn.Linear
    assert gpt2.manifest["served"]["schemes"]["W4A16"]["weights"]["group_size"] == 32
    llama = quantize(tiny_model("llama", intermediate_size=64), scheme="W4A16", cure="smoothquant", **SMALL)
    grouped = modifier_of(llama, "W4A16")
    assert grouped["config_groups"]["group_0"]["weights"]["group_size"] == 32
    modifier = modifier_of(run, "FP8")
    assert modifier == {"ignore": ["lm_head"], "targets": ["Linear"], "scheme": "FP8"}


def test_costs_of_many_models_are_side_by_side_in_text_and_figure() -> None:
    numbers = {"a": {"W8A8": 0.5, "FP8": -0.01, "MXFP4": 0.9}, "b": {"W8A8": 0.02, "FP8": 0.1}}
    rows = [
        {"model": model, "cell": f"{model}-1", "scheme": scheme, "part": part, "cost": cost + 5 * (part == INPUTS),
         "cost_low": cost - 0.1, "cost_high": cost + 0.2}
        for model, costs in numbers.items() for scheme, cost in costs.items() for part in (ALL, INPUTS)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    (text,) = served_findings.cells_as_text({"formats": table}).values()
    assert text.to_dict("list") == {
        "scheme": ["W8A8", "FP8", "MXFP4"],
        "a": ["0.500 (0.400 to 0.700)", "-0.010 (-0.110 to 0.190)", "0.900 (0.800 to 1.100)"],
        "b": ["0.020 (-0.080 to 0.220)", "0.100 (0.000 to 0.300)", "does not apply"],
    }
    assert served_findings.cells_as_text({}) == {}
    (ax,) = draw_formats_models(SweepTables({FORMATS: table}, {})).axes
    cells = {each.get_position(): each.get_text() for each in ax.texts}
    assert cells == {
        (0, 0): "+64.9 %\n49.2 to 101.4", (0, 1): "-1.0 %\n-10.4 to 20.9", (0, 2): "+146 %\n123 to 200",
        (1, 0): "+2.0 %\n-7.7 to 24.6", (1, 1): "+10.5 %\n0.0 to 35.0",
    }  # fmt: skip
    assert [each.get_text() for each in ax.get_yticklabels()] == ["W8A8", "FP8", "MXFP4"]
    (ax,) = draw_formats_models(SweepTables({FORMATS: table.assign(model="a")}, {})).axes  # two cells of one model
    assert {each.get_position(): each.get_text() for each in ax.texts} == cells
    assert [each.get_text() for each in ax.get_xticklabels()] == ["a-1", "b-1"]


def test_a_card_has_the_cost_of_every_scheme(run: Run) -> None:
    values = values_of(run)
    costs = values[values["metric"] == "cost"].set_index("setting")["value"]
    assert list(costs.index) == list(FITTING)
    assert costs["FP8"] == row_of(run, "FP8", ALL)["cost"]


def test_a_layer_that_multiplies_by_its_transposed_weight_is_quantized() -> None:
    run = quantize(tiny_model("falcon"), scheme="W8A8", **SMALL)
    assert run.manifest["served"]["matrices"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "W8A8,static"}, "measured alone"),
        ({"scheme": "static", "cure": "spare"}, "cure=… is a setting of presets"),
        ({"scheme": "W8A8", "bits_weights": 4}, "bits_weights=… is a setting of scheme=static or full"),
        ({"prefix": "auto"}, "prefix=… is a setting of scheme=static or full"),
        ({"alpha": 0.9}, "alpha=… is a setting of the cure smoothquant, which is not measured"),
        ({"scheme": "static", "alpha": 0.9}, "alpha=… is a setting of the cure smoothquant, which is not measured"),
        ({"scheme": "FP8", "cure": "awq", "alpha": 0.9}, "alpha=… is a setting of the cure smoothquant"),
        ({"scheme": "static", "bits_kv_cache": 4}, "bits_kv_cache=… is a setting of kv_cache_per=…, which is not"),
        ({"scheme": "static", "prefix_draws": 50}, "prefix_draws=… is a setting of prefix=…, which is not measured"),
        ({"scheme": "W8A9"}, "scheme="),
        ({"scheme": "MXFP4"}, "groups of 32 do not divide inputs of 32, 48"),
    ],
)
def test_wrong_schemes_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize(model, **SMALL | options)


def test_cures_are_those_that_are_named_else_all_of_named_schemes() -> None:
    for options, cures in (({}, ()), ({"scheme": "FP8"}, get_args(CureName)), ({"cure": "awq"}, ("awq",))):
        assert checked(QuantizeOptions, options).cures == cures


def test_a_folder_is_named_by_what_is_measured() -> None:
    names: dict[str, dict[str, Any]] = {
        "formats": {},
        "W8A8-FP8": {"scheme": "W8A8,FP8"},
        "static-W8A8KV4": {"scheme": "static", "bits_kv_cache": 4, "kv_cache_per": "tensor"},
        "full-W8A8-weights-per-channel-prefix": {"scheme": "full", "weights_per": "channel", "prefix": "5"},
    }
    for name, options in names.items():
        assert checked(QuantizeOptions, {"model": "org/m"} | options).folder() == Path(f"runs/m-natural-{name}")


def test_ranges_and_cures_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """Each process reads the calibration texts, and the gradients of the modules, completely."""
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")

    def measured(out: Path) -> Run:
        options: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 12, "calibration": 3}
        options |= {"scheme": "FP8", "cure": "spare,smoothquant", "page": False, "figures": ()}
        return quantize(tmp_path / "gpt2", out=out, **options)

    assert on_two_ranks(lambda: measured(tmp_path / "two"), tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    two, one = Run.open(tmp_path / "two"), measured(tmp_path / "one")
    assert two.manifest["processes"] == 2
    assert_same_tables(two.tables, one.tables, rtol=1e-6)
