"""Cures of number formats: against plain PyTorch, and their controls."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.plain_formats import SMALL, TEXTS, plain_loss
from tiny import tiny_model

from sinkscope import Run, quantize
from sinkscope.commands.quantize import cures
from sinkscope.commands.quantize.cures import OutputErrors
from sinkscope.commands.quantize.prefixes import SparingText
from sinkscope.commands.quantize.served import RANDOM_DRAWS, ServedStudy
from sinkscope.measuring.observables.observable import deliver
from sinkscope.models.families import find_family
from sinkscope.models.norms import ModuleEnds, reparametrized, scaled_inputs
from sinkscope.models.rotation import random_rotation, rotated
from sinkscope.quantization import settings
from sinkscope.quantization.formats import PRESETS
from sinkscope.quantization.products import Matrix
from sinkscope.quantization.smoothing import NormOutputs, awq_factors, shuffled, smoothing_factors
from sinkscope.text.inputs import TokenInputs

W8A8 = PRESETS["W8A8"].weights, PRESETS["W8A8"].inputs


@pytest.fixture(scope="module")
def model() -> Any:
    model: Any = tiny_model("llama", spread=1.0)
    model.model.layers[1].input_layernorm.weight.data[3] = 40.0  # an outlier channel
    return model


@pytest.fixture(scope="module")
def run(model: Any) -> Run:
    return quantize(model, scheme="W8A8,FP8", alpha=0.6, **SMALL)


def cure(run: Run, name: str, scheme: str = "W8A8") -> pd.Series:
    table = run.tables["formats_cures"]
    return table[(table["scheme"] == scheme) & (table["cure"] == name)].iloc[0]


def scaled_loss(model: Any, encodings: tuple[Any, ...], name: str, shuffling: int | None = None) -> float:
    readers = ModuleEnds(model).readers_of_norms()
    readers.pop(model.model.norm)
    outputs = NormOutputs(readers, 3)
    with torch.no_grad(), outputs.recorded():
        for text in TEXTS[6:]:
            model(text[None])
    if name == "awq":
        factors = {
            norm: awq_factors(outputs.mean(norm), torch.cat(outputs.rows[norm]), layers, encodings[0])
            for norm, layers in readers.items()
        }
    else:
        factors = {norm: smoothing_factors(outputs.largest[norm], readers[norm], 0.6) for norm in readers}
    if shuffling is not None:
        factors = shuffled(factors, shuffling)
    with reparametrized(model, lambda: scaled_inputs(readers, factors), name):
        return plain_loss(model, *encodings)


def test_smoothquant_recovers_what_it_does_in_plain_pytorch(model: Any, run: Run) -> None:
    row = cure(run, "smoothquant")
    assert row["setting"] == "0.6"
    share = plain_loss(model, *W8A8) - scaled_loss(model, W8A8, "smoothquant")
    assert row["recovered"] == pytest.approx(share, abs=2e-6)
    random = [plain_loss(model, *W8A8) - scaled_loss(model, W8A8, "smoothquant", seed) for seed in range(3)]
    ends = [row[f"random_recovered{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([np.mean(random), min(random), max(random)], abs=2e-6)
    assert row["cost"] == pytest.approx(plain_loss(model, *W8A8) - plain_loss(model), abs=2e-6)
    assert row["ahead"] == pytest.approx(row["recovered"] - row["random_recovered"])


def test_another_seed_draws_other_random_tokens_and_another_rotation(model: Any, run: Run) -> None:
    another = quantize(model, scheme="W8A8", cure="rotation", seed=1, **SMALL)
    rows = [each.tables["formats"].set_index(["scheme", "part"]).loc[("W8A8", "all")] for each in (run, another)]
    assert rows[0]["cost"] == pytest.approx(rows[1]["cost"], abs=1e-6)
    assert abs(rows[0]["random_share_low"] - rows[1]["random_share_low"]) > 1e-5
    assert abs(cure(run, "rotation")["recovered"] - cure(another, "rotation")["recovered"]) > 1e-5


def test_ranges_are_those_of_the_cured_model(model: Any, run: Run) -> None:
    encodings = PRESETS["FP8"].weights, PRESETS["FP8"].inputs
    share = plain_loss(model, *encodings) - scaled_loss(model, encodings, "smoothquant")
    assert cure(run, "smoothquant", "FP8")["recovered"] == pytest.approx(share, abs=2e-6)


def test_a_rotation_recovers_what_it_does_in_plain_pytorch_next_to_folded_gains(model: Any, run: Run) -> None:
    width, shares = model.config.hidden_size, []
    for rotation in (random_rotation(width, 0), torch.eye(width, dtype=torch.float64)):
        with rotated(model, find_family(model), rotation):
            cured = plain_loss(model, *W8A8)
        shares.append(plain_loss(model, *W8A8) - cured)
    row = cure(run, "rotation")
    assert row["recovered"] == pytest.approx(shares[0], abs=2e-6)
    # a permutation changes no range of W8A8, but the gains of norms are in the weights then
    ends = [row["random_recovered_low"], row["random_recovered_high"]]
    assert ends == pytest.approx([shares[1]] * 2, abs=5e-5)  # sums in another order
    assert shares[1] > 1e-4


def test_the_controls_of_a_rotation_are_different_permutations() -> None:
    """Groups of 16 have other ranges after each permutation."""
    model = tiny_model("llama", spread=1.0)
    width, encodings = model.config.hidden_size, (PRESETS["NVFP4A16"].weights, None)
    shares = []
    for seed in range(RANDOM_DRAWS):
        permutation = torch.eye(width, dtype=torch.float64)[np.random.default_rng(seed).permutation(width)]
        with rotated(model, find_family(model), permutation):
            cured = plain_loss(model, *encodings)
        shares.append(plain_loss(model, *encodings) - cured)
    row = cure(quantize(model, scheme="NVFP4A16", cure="rotation", **SMALL), "rotation", "NVFP4A16")
    ends = [row["random_recovered_low"], row["random_recovered_high"]]
    assert ends == pytest.approx([min(shares), max(shares)], abs=1e-5)
    assert max(shares) - min(shares) > 1e-4


@pytest.mark.parametrize(
    ("scheme", "count"), [("FP8_DYNAMIC", 1), ("W8A8", 1), ("FP8", 2 + RANDOM_DRAWS), ("NVFP4A16", 2 + RANDOM_DRAWS)]
)
def test_ranges_are_measured_if_a_scale_uses_them(
    model: Any, scheme: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrations: list[TokenInputs] = []
    calibrated = ServedStudy.calibrated

    def counted(self: ServedStudy, calibration: TokenInputs) -> Any:
        calibrations.append(calibration)
        return calibrated(self, calibration)

    monkeypatch.setattr(ServedStudy, "calibrated", counted)
    quantize(model, scheme=scheme, cure="rotation", **SMALL)
    assert len(calibrations) == count


def test_a_prefix_is_held_against_full_precision_with_the_same_prefix(model: Any, run: Run) -> None:
    row = cure(run, "prefix")
    prefix = tuple(map(int, row["setting"].split()))
    assert prefix[-1] == model.config.bos_token_id
    assert row["random_recovered_low"] < row["random_recovered_high"]
    rise = plain_loss(model, *W8A8, prefix=prefix) - plain_loss(model, prefix=prefix)
    assert row["recovered"] == pytest.approx(plain_loss(model, *W8A8) - plain_loss(model) - rise, abs=2e-6)
    fp8 = PRESETS["FP8"].weights, PRESETS["FP8"].inputs
    share = plain_loss(model, *fp8) - plain_loss(model) + plain_loss(model, prefix=prefix)
    share -= plain_loss(model, *fp8, prefix=prefix)
    assert cure(run, "prefix", "FP8")["recovered"] == pytest.approx(share, abs=2e-6)


def test_a_predicted_rise_is_half_the_square_of_gradient_times_error_of_each_token() -> None:
    drawn, matrix = torch.Generator().manual_seed(0), Matrix("up", 0, "up")
    x, error, gradient = (torch.randn(2, 3, width, generator=drawn, dtype=torch.float64) for width in (4, 5, 5))
    weight = torch.randn(5, 4, generator=drawn, dtype=torch.float64).requires_grad_()

    def off_by_error(matrix: Matrix, product: Any, x: torch.Tensor, weight: torch.Tensor, tokens: None) -> torch.Tensor:
        return product(x, weight) + error

    factors: Any = off_by_error
    errors = OutputErrors(factors)
    errors(matrix, torch.nn.functional.linear, x, weight, None).backward(gradient)
    deliver([errors.rise])
    assert errors.rise[matrix] == pytest.approx(float((gradient * error).sum(-1).square().sum() / 2))


def test_predicted_rises_are_per_token_of_the_sequences_that_are_probed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "PROBED", 2)
    texts = list(TEXTS.numpy())
    how: list[dict[str, Any]] = [{}, {"input": [*texts[:2], *texts[6:]], "num_seqs": 2}, {"batch_size": 1}]
    runs = [quantize(model, scheme="W8A8", cure="spare", **SMALL | each) for each in how]
    of_six, of_two, one_by_one = (run.tables["formats_modules"].set_index("module")["predicted"] for run in runs)
    assert of_six.to_dict() == pytest.approx(of_two.to_dict(), rel=1e-4)
    assert of_six.to_dict() == pytest.approx(one_by_one.to_dict(), rel=1e-4)


@dataclass
class Texts:
    """As many texts as a study reads, with ten predicted tokens each."""

    inputs: Any = None
    count: int = 4

    def __len__(self) -> int:
        return self.count

    def part(self, first: int, last: int) -> "Texts":
        return Texts(count=last - first)

    @property
    def num_predicted(self) -> int:
        return 10 * self.count


@pytest.mark.parametrize(
    ("remaining", "count"),
    [
        ({16: 1.0, 15: 0.5, 14: 0.05}, 2),
        ({16: 1.0, 15: 0.5, 14: 0.2, 12: 0.2}, 4),  # a quarter of the modules at most
        ({16: 1.0, 15: 0.1}, 1),
    ],
)
def test_modules_are_spared_until_a_tenth_of_the_cost_of_the_probed_texts_remains(
    monkeypatch: pytest.MonkeyPatch, remaining: dict[int, float], count: int
) -> None:
    monkeypatch.setattr(settings, "PROBED", 2)
    matrices = [Matrix(f"m{layer}", layer, "m") for layer in range(16)]

    def losses(quantized: int) -> torch.Tensor:  # the texts that are not probed lose much more
        return torch.tensor([7 + remaining[quantized]] * 2 + [90.0] * 2)

    def run(measured: list[Any], subject: Any = None, backward: bool = False, **how: Any) -> list[Any]:
        if backward:  # later layers cost more
            measured[0].open.args[1].rise.update({matrix: matrix.layer + 1.0 for matrix in matrices})
        texts = 4 if subject is None else len(subject.inputs)
        return [SimpleNamespace(losses=losses(len(each.open.args[0]))[:texts, None]) for each in measured]

    study, preset = object.__new__(cures.CureStudy), PRESETS["W8A8"]
    served = SimpleNamespace(subject=Texts(Texts()), matrices=matrices, largest_inputs={}, largest_weights={}, run=run)
    vars(served).update(registers=0, opened=print, batch_size="auto")
    served.losses = {(preset.weights, preset.inputs): losses(16)[None].numpy()}
    vars(study).update(study=served, dense=np.full(4, 7.0), seed=0, modules=[])
    cured = study.spare("W8A8", preset)
    assert int(cured.setting) == count
    assert [row["module"] for row in study.modules if row["is_spared"]] == [f"m{15 - each}" for each in range(count)]
    assert cured.rise[0] == pytest.approx(remaining[16 - count], abs=1e-6)


def test_a_prefix_has_the_tokens_beyond_64_times_the_median_of_any_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    study = object.__new__(cures.CureStudy)
    first, second = [[1, 1, 1, 1, 65, 64], [2, 2, 2, 129, 2, 128]], [[1, 99, 99, 1, 1, 1], [1, 99, 1, 99, 1, 1]]
    reads = [[(text, None, np.array(each, float)) for text, each in enumerate(matrix)] for matrix in (first, second)]
    calibration = SimpleNamespace(sequences=(np.array([9, 8, 7, 6, 5, 4]), np.array([9, 8, 7, 5, 6, 4])))
    served = SimpleNamespace(subject=SimpleNamespace(inputs=()), calibration=calibration, opened=print)
    served.run = lambda settings: [SimpleNamespace(losses=torch.zeros(1)) for _ in settings]
    served.recorder = SimpleNamespace(of_inputs=dict(enumerate(reads)))
    prefixes = SimpleNamespace(
        bos=None, checked=lambda ids: ids, random=lambda length, drawn: (), before=lambda ids, inputs: SparingText(())
    )
    monkeypatch.setattr(cures, "Prefixes", lambda subject, calibration: prefixes)
    vars(study).update(study=served, seed=0, _losses_under=lambda preset, changed, text, calibration: np.zeros(1))
    assert study.prefix("W8A8", PRESETS["W8A8"]).setting == "5 8"


def test_awq_recovers_what_it_does_in_plain_pytorch(model: Any) -> None:
    weights = PRESETS["NVFP4A16"].weights
    run = quantize(model, scheme="NVFP4A16", cure="awq,prefix,smoothquant", **SMALL)
    share = plain_loss(model, weights) - scaled_loss(model, (weights,), "awq")
    assert cure(run, "awq", "NVFP4A16")["recovered"] == pytest.approx(share, abs=2e-6)
    assert run.manifest["served"]["absent_cures"] == {
        "NVFP4A16": dict.fromkeys(["prefix", "smoothquant"], "its inputs are not quantized")
    }
    assert "Not measured: smoothquant (its inputs are not quantized)." in run.verdict


def test_a_cure_that_does_not_apply_says_why() -> None:
    run = quantize(tiny_model("gpt2"), scheme="W8A8", cure="rotation,awq", **SMALL)
    absent = run.manifest["served"]["absent_cures"]["W8A8"]
    assert absent["rotation"] == "LayerNorm is not an RMSNorm"
    assert "formats_cures" not in run.tables


def test_which_cures_are_worth_it_is_said_for_each_scheme(run: Run) -> None:
    sentences = [each.sentence for each in run.findings if each.name == "worth"]
    table = run.tables["formats_cures"]
    worth = table[np.minimum(table["recovered_low"], table["ahead_low"]) > 0]
    for sentence, scheme in zip(sentences, ("W8A8", "FP8"), strict=True):
        names = worth["cure"][worth["scheme"] == scheme]
        assert f"{scheme}: of spare, smoothquant, rotation, prefix, " in sentence
        assert ", ".join(names) in sentence if len(names) else "none is shown" in sentence
        assert "Not measured: awq (it is for schemes that quantize weights alone)." in sentence
