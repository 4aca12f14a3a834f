"""Every sentence of a verdict is supported by the numbers of its run."""

import numpy as np
import pandas as pd
import pytest
from support.figure_tables import gradient_tables
from support.summarized_runs import summarized
from tiny import tiny_model

import sinkscope
from sinkscope.measuring.summary import gradient_summary, uniform_gradient_ratio
from sinkscope.output.run import Run
from sinkscope.retrofits import retrofit_model
from sinkscope.training.tables import ROWS
from sinkscope.verdict import analysis


def sentences(run: Run) -> dict[str, str]:
    """Return name of a finding → its sentence."""
    return {finding.name: finding.sentence for finding in analysis.findings(run)}


def test_the_gradient_of_uniform_causal_attention() -> None:
    """The closed form agrees with randomly drawn upstream gradients."""
    length = 64
    drawn = np.random.default_rng(0).standard_normal((length - 1, 20_000))  # the last token predicts nothing
    weights = np.tril(np.ones((length - 1, length - 1))) / np.arange(1, length)[:, None]
    norms = np.linalg.norm(weights.T @ drawn, axis=1)
    assert uniform_gradient_ratio([length - 1]) == pytest.approx(norms[0] / norms[5:16].mean(), rel=0.03)
    assert uniform_gradient_ratio([length - 1] * 3) == pytest.approx(uniform_gradient_ratio([length - 1]))


def test_the_value_gradient_of_a_scale_is_read_before_it() -> None:
    """The claim of GS §5.1 is about the raw value state; V-scale with φ = 1/2 multiplies it by one half."""
    tables = gradient_tables(layers=2)
    value = tables["gradient"].query("pathway == 'value'")
    halved = value.assign(
        pathway="raw_value", grad_norm=np.where(value["position"] == 0, 0.5, 1.0) * value["grad_norm"]
    )
    plain = gradient_summary(tables)[1]
    tables["gradient"] = pd.concat([tables["gradient"], halved], ignore_index=True)
    per_layer, scaled = gradient_summary(tables)
    assert scaled["value_gradient_ratio"] == plain["value_gradient_ratio"]
    for name, before in (("raw_value_gradient_ratio", "value_gradient_ratio"), *[("value_over_key_gradient",) * 2]):
        assert scaled[name] == pytest.approx(plain[before] / 2)
    first = value.query("head == -1 and position == 0")["grad_norm"]
    assert per_layer["value_gradient_norm"].mean() == pytest.approx(first.mean() / 2)
    said = sentences(summarized(whole=scaled, tables=tables))
    assert said["value-gradient"].startswith(
        f"The value gradient at position 0 is {scaled['raw_value_gradient_ratio']:.1f} ×"
    )
    assert (
        f"after it, at what is attended to, the gradient is {plain['value_gradient_ratio']:.1f} ×"
        in said["gradient-behind"]
    )
    assert {"value_gradient_norm", "raw_value_gradient_ratio"} <= set(ROWS)


@pytest.mark.parametrize("condition", ["natural", "repeated"])
def test_repeated_tokens_that_are_all_massive_have_no_sentence_that_denies_it(condition: str) -> None:
    """In SmolLM2, the largest entry is 24,168 at every position of a repeated sequence, and the median is 48."""
    at = {"layer": 1, "sequence": 0, "coordinate": 7, "median": 48.0, "is_massive": False}
    massive = pd.DataFrame({"position": range(3), "value": 24_168.0} | at)
    massive["ratio"] = massive["value"] / massive["median"]
    norms = {"layer": [1], "site": "layer_out", "sequence": 0, "norm": 24_500.0, "norm_smallest": 24_400.0}
    tables = {"massive": massive, "activation_by_sequence": pd.DataFrame(norms)}
    said = sentences(summarized(whole={"massive_count": 0.0}, tables=tables, condition=condition))["massive"]
    if condition == "natural":
        assert said.startswith("No entry of the residual stream is a massive activation")
        return
    assert "No entry" not in said
    assert "is 24,168 (504 × the median); there the norm of position 0 is 24,500" in said
    small = summarized(tables={"massive": massive.assign(value=2.0)}, condition=condition)
    assert sentences(small)["massive"].startswith("No entry")  # below 100 an entry is not massive, for any median


@pytest.mark.parametrize("pathway", ["value", "key"])
def test_the_gradient_ratio_does_not_depend_on_the_positions_reported(pathway: str) -> None:
    name = f"{pathway}_gradient_ratio"
    tables = gradient_tables(positions=40)
    ratios = {}
    for positions in (8, 16, 40):
        cut = {key: table[table["position"] < positions] for key, table in tables.items()}
        per_layer, totals = gradient_summary(cut, longest=64)
        ratios[positions] = [*per_layer[name], totals[name], totals["bloat_later"]]
    assert ratios[16] == ratios[40]
    assert np.isfinite(ratios[16]).all()
    assert np.isnan(ratios[8]).all()


def test_position_0_is_a_register_where_registers_precede_the_text() -> None:
    """Position 0 is not the BOS, which follows the registers."""
    asked = {"input": "random", "num_seqs": 2, "seq_len": 12, "bos": "never", "observables": ("attention",)}
    plain, registers = tiny_model("llama"), retrofit_model(tiny_model("llama"), None, "register-tokens", count=2)
    run = sinkscope.analyze(plain, **asked)
    token = run.manifest["input"]["token_zero"]
    assert f"position 0 being {token}, in float32" in run.verdict
    said = sinkscope.analyze(registers, **asked).verdict
    assert f"position 0 being the first register token, the text's own first {token}, in float32" in said
