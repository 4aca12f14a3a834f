"""Two runs of `quantize` side by side: intervals against their definition, which runs are paired, and what is said."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import grid, run_manifest
from support.pages import data_of
from support.retrofit_command import command_line
from tiny import tiny_model, tiny_tokens

import sinkscope
from sinkscope import InputError, Run, compare, quantize
from sinkscope.commands.quantize import compared
from sinkscope.commands.quantize.format_comparison import FormatComparison
from sinkscope.results.findings import Outcome
from sinkscope.results.statistics import DRAWS, RESAMPLING_SEED

PREDICTED = np.array([7, 7, 7, 4, 7, 7])
TEXTS = [0, 1, 1, 2, 3, 4]  # the third sequence is a copy of the second
FIRST, SECOND = np.array([0.3, 1.0, 1.0, -0.2, 2.0, 0.9]), np.array([0.5, 1.3, 1.3, 0.0, 2.6, 0.7])


def run_of(
    costs: np.ndarray, scheme: str = "W8A8", sha: str = "a", ends: Sequence[float] = (-0.1, 0.2), losses: bool = True
) -> Run:
    """Make a run of one scheme from the costs of its sequences, summed over tokens; ends: of its interval."""
    cost = costs.sum() / PREDICTED.sum()
    rows = grid(scheme=[scheme], part=["all", "weights"]).assign(cost=cost, cost_low=cost + ends[0])
    tables = {"formats": rows.assign(cost_high=cost + ends[1], layer=-1)}
    if losses:
        by_sequence = pd.DataFrame({"sequence": range(len(costs)), "predicted": PREDICTED, "cost": costs})
        parts = [by_sequence.assign(scheme=scheme, part=part) for part in ("all", "weights")]
        tables["formats_losses"] = pd.concat(parts)[::-1]  # in any order
    read = run_manifest()["input"] | {"sha256": sha, "sequences": len(costs), "texts": TEXTS}
    return Run(run_manifest(command="quantize", input=read), tables)


def static_run(costs: dict[str, float], **grids: str) -> Run:
    rows = pd.DataFrame([("full", 0.0, 64), *((part, cost, 64) for part, cost in costs.items()), ("all", 9.0, 16)])
    rows.columns = ["setting", "cost", "sequences"]
    table = rows.assign(part="", cost_low=rows["cost"] - 0.1, cost_high=rows["cost"] + 0.1)
    entry = {
        "scheme": "static", "bits_weights": 8, "bits_activations": 8, "bits_kv_cache": 8, "weights_per": "tensor",
        "activations_per": "tensor", "kv_cache_per": None,
    }  # fmt: skip
    config = run_manifest()["config"] | entry | grids
    manifest = run_manifest(command="quantize", quantization=entry | grids, config=config)
    return Run(manifest, {"quantization": table})


def row_of(first: Run, second: Run) -> Any:
    return next(compared.differences(first, second).itertuples())


def test_paired_intervals_resample_texts() -> None:
    row = row_of(run_of(FIRST), run_of(SECOND))
    # 2 of 5 texts: their means spread like Student's interval of five numbers
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(2, np.full(5, 1 / 5), size=DRAWS)[:, TEXTS]
    costs = (drawn @ (SECOND - FIRST)) / (drawn @ PREDICTED)
    expected = [(SECOND - FIRST).sum() / PREDICTED.sum(), *np.quantile(costs, [0.025, 0.975])]
    assert [row.difference, row.difference_low, row.difference_high] == pytest.approx(expected, rel=1e-12)
    assert (row.first_cost, row.cost) == pytest.approx((FIRST.sum() / 39, SECOND.sum() / 39))
    assert (row.is_paired, row.layer, row.model, row.scheme, row.first_scheme) == (
        True,
        -1,
        "org/model",
        "W8A8",
        "W8A8",
    )


def test_a_run_differs_from_itself_by_exactly_nothing() -> None:
    row = row_of(run_of(FIRST), run_of(FIRST))
    assert (row.difference, row.difference_low, row.difference_high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "second", [run_of(SECOND, sha="b", ends=(-0.4, 0.1)), run_of(SECOND, losses=False, ends=(-0.4, 0.1))]
)
def test_errors_of_runs_without_losses_on_the_same_tokens_add_in_quadrature(second: Run) -> None:
    row = row_of(run_of(FIRST, ends=(-0.1, 0.3)), second)
    expected = (SECOND - FIRST).sum() / 39
    ends = (expected - np.hypot(0.4, 0.3), expected + np.hypot(0.1, 0.1))
    assert (row.difference, row.difference_low, row.difference_high) == pytest.approx((expected, *ends))
    assert not row.is_paired
    assert compared.findings(compared.differences(run_of(FIRST), second), "A", "B")[-1].sentence.startswith("Unpaired")


@pytest.mark.slow
def test_texts_of_another_seed_are_no_difference() -> None:
    """Null: the costs of two runs are drawn from one distribution, on other texts."""
    drawn, decided = np.random.default_rng(0), 0
    for _ in range(200):
        costs = drawn.normal(0.3, 1.0, (2, len(PREDICTED)))
        ends = 1.96 * costs.std(axis=1, ddof=1) * np.sqrt(6) / 39
        runs = [run_of(cost, sha=sha, ends=(-end, end)) for cost, sha, end in zip(costs, "ab", ends, strict=True)]
        decided += compared.findings(compared.differences(*runs), "a", "b")[0].outcome != Outcome.UNDECIDED
    assert 0 < decided < 20  # 5 %, and some more as six texts are few


def test_schemes_that_both_runs_have_are_compared_else_each_with_each() -> None:
    in_fp8 = run_of(SECOND, "FP8")
    in_fp8.manifest["condition"] = "code"
    table = compared.differences(run_of(FIRST), in_fp8)
    assert set(table["condition"]) == {"code"}
    assert set(compared.overview(table, "A", "B")["scheme"]) == {"FP8 − W8A8"}
    assert table[["scheme", "first_scheme", "part"]].to_numpy().tolist() == [
        ["FP8", "W8A8", "all"], ["FP8", "W8A8", "weights"],
    ]  # fmt: skip
    assert table["is_paired"].all()
    both = Run(in_fp8.manifest, {name: pd.concat([in_fp8.tables[name], run_of(FIRST).tables[name]])
                                for name in in_fp8.tables})  # fmt: skip
    table = compared.differences(run_of(FIRST), both)
    assert table[["scheme", "first_scheme"]].drop_duplicates().to_numpy().tolist() == [["W8A8", "W8A8"]]
    assert (table["difference"] == 0).all()


def test_static_schemes_are_compared_by_the_settings_of_the_whole_model() -> None:
    costs = {"all": 1.0, "weights": 0.2, "activations": 0.7, "kv-cache": 0.1, "massive-kept": 0.5}
    first, second = static_run(costs), static_run({**costs, "all": 1.5}, weights_per="channel")
    comparison = compare(first, second)
    assert isinstance(comparison, FormatComparison)
    table = comparison.table.set_index("part")
    assert table["difference"].to_dict() == pytest.approx({"all": 0.5} | dict.fromkeys(compared.PARTS[1:], 0.0))
    assert set(table["scheme"]) == {"static W8A8"}
    (whole, *_) = comparison.summary_tables[""].to_dict("records")
    assert (whole["run 1"], whole["run 2"], whole["difference"][:5]) == ("1.000", "1.500", "0.500")
    assert (table["difference_high"] - table["difference"]).tolist() == pytest.approx([np.hypot(0.1, 0.1)] * 4)
    assert comparison.manifest["differing"] == {
        "grids": {"run 1": "['tensor', 'tensor', None]", "run 2": "['channel', 'tensor', None]"}
    }
    against_presets = compared.differences(run_of(FIRST), second)
    assert against_presets["part"].tolist() == ["all", "weights"]


@pytest.mark.parametrize(
    ("difference", "outcome", "sentence"),
    [
        ((0.03, 0.01, 0.05), Outcome.RISES,
         "W8A8 costs 0.030 (95 % interval 0.010 to 0.050) nats per token more in B: 0.050 against 0.020."),
        ((-0.03, -0.05, -0.01), Outcome.FALLS,
         "W8A8 costs 0.030 (95 % interval 0.010 to 0.050) nats per token less in B: 0.050 against 0.020."),
        ((0.03, 0.0, 0.05), Outcome.UNDECIDED,
         "W8A8 is not shown to cost more or less in B; the difference is 0.030 (95 % interval 0.000 to 0.050) nats per "
         "token: 0.050 against 0.020."),
        ((0.03, -np.inf, np.inf), Outcome.UNDECIDED,
         "W8A8 is not shown to cost more or less in B; the difference is 0.030 nats per token: 0.050 against 0.020."),
        ((9e-6, 8e-6, 1e-5), Outcome.UNCHANGED,
         "W8A8 costs the same in B, up to round-off: 0.050 against 0.020."),
    ],
)  # fmt: skip
def test_a_difference_is_decided_by_its_interval(
    difference: tuple[float, ...], outcome: Outcome, sentence: str
) -> None:
    row = {"scheme": "W8A8", "first_scheme": "W8A8", "part": "all", "cost": 0.05, "first_cost": 0.02, "is_paired": True}
    row |= dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True))
    finding, _ = compared.findings(pd.DataFrame([row, row | {"part": "weights"}]), "A", "B")
    assert (finding.outcome, finding.sentence) == (outcome, sentence)
    against_fp8, _ = compared.findings(pd.DataFrame([row | {"first_scheme": "FP8"}]), "A", "B")
    assert against_fp8.sentence.endswith("0.050 against 0.020 for FP8 in A.")


def test_two_models_on_the_same_tokens(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "input": list(tiny_tokens(9, 24).numpy()), "num_seqs": 6, "seq_len": 24, "calibration": 3, "figures": (),
        "page": False, "scheme": "W8A8",
    }  # fmt: skip
    runs = [quantize(tiny_model("llama", spread=spread), out=tmp_path / f"{spread}", **options) for spread in (1, 2)]
    result = command_line("compare", *(run.folder for run in runs), "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    assert "Paired: both runs read the same tokens" in result.stdout
    assert (tmp_path / "both" / "formats.md").read_text(encoding="utf-8").strip() == result.stdout.strip()
    table = pd.read_parquet(tmp_path / "both" / "tables" / "comparison_by_scheme.parquet").set_index("part")
    for part, difference in table["difference"].items():
        costs = [run.tables["formats"].set_index("part")["cost"][part] for run in runs]
        assert difference == pytest.approx(costs[1] - costs[0], abs=1e-12)
    assert json.loads((tmp_path / "both" / "run.json").read_text())["differing"] == {}
    page, made_again = (
        data_of(sinkscope.show(tmp_path / "both", again=again).read_text(encoding="utf-8")) for again in (False, True)
    )
    assert made_again["findings"] == page["findings"]
    assert page["findings"][0]["sentence"] in result.stdout
    assert [table["name"] for table in page["tables"]] == ["comparison_by_scheme"]
    assert set(page["links"]) == set()  # the runs have no pages


def test_two_runs_are_needed() -> None:
    with pytest.raises(InputError, match="compared in pairs: name two of them; 3 were given"):
        compare(*[run_of(FIRST)] * 3)
