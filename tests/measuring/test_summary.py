"""The table `summary` from tables made by hand, and the bound of WSE's proposition 4 and measured attention."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
from support import made_up_runs
from tiny import tiny_model

import sinkscope
from sinkscope.measuring.summary import MeasuredTables, gradient_summary, summarize
from sinkscope.models.families import find_family
from sinkscope.options.measuring import ObservableOptions
from sinkscope.output.run import Run
from sinkscope.results.findings import FEWEST_QUERIES
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.text.inputs import TokenInputs

LLAMA = find_family(tiny_model("llama"))
LAYERS, HEADS, POSITIONS, LENGTH = 2, 2, 3, 40


def inputs_of(sequences: Sequence[Sequence[int]], condition: str = "natural") -> TokenInputs:
    arrays = tuple(np.array(ids) for ids in sequences)
    return TokenInputs(condition, arrays, "first text token", "0" * 64, ())


TWO = inputs_of([range(LENGTH), range(LENGTH)])


def grid(**columns: Any) -> pd.DataFrame:
    return made_up_runs.grid(layer=range(LAYERS), head=range(HEADS), position=range(POSITIONS)).assign(**columns)


def attention_tables(sinks: Sequence[tuple] = ()) -> dict[str, pd.DataFrame]:
    table = grid(window_mass=0.0, sink_rate=0.0, sink_mass=0.0, uniform_mass=0.05)
    first = table["position"] == 0
    table.loc[first, "sink_rate"] = [0.5, 1.0, 0.0, 0.25]  # (layer, head) in order
    table.loc[first, "window_mass"] = [0.3, 0.5, 0.1, 0.2]
    table.loc[first, "sink_mass"] = [0.2, 0.4, 0.1, 0.1]
    table.loc[~first, ["sink_rate", "window_mass", "sink_mass"]] = 0.9  # other positions must not count
    heads = table.groupby(["layer", "head"]).size().reset_index()[["layer", "head"]]
    return {
        "attention": table,
        "attention_heads": heads.assign(attention_entropy=[1.0, 2.0, 3.0, 5.0], missing_mass=[0.0, 0.2, 0.0, 0.4]),
        "attention_heads_by_sequence": heads.assign(
            window_mass=[0.3, 0.5, 0.1, 0.31], uniform_mass=[0.1, 0.1, 0.1, 0.3]
        ),
        "sink_positions": pd.DataFrame(sinks, columns=["layer", "head", "sequence", "position", "queries"])
        .astype(int)
        .assign(window_mass=0.9, uniform_mass=0.05),
    }


def metrics(tables: dict[str, pd.DataFrame], inputs: TokenInputs = TWO, **more: Any) -> dict[tuple[str, int], float]:
    summary = summarize(MeasuredTables(tables, inputs, LLAMA, (0.5,) * LAYERS, **more))
    assert not summary.duplicated(["layer", "metric"]).any()
    return {(row.metric, row.layer): row.value for row in summary.itertuples()}


def test_attention_is_summarized_at_position_0() -> None:
    assert metrics({}) == {}
    summary = metrics(attention_tables())
    expected = {
        "sink_rate": [0.75, 0.125],
        "window_mass": [0.4, 0.15],
        "sink_mass": [0.3, 0.1],
        "attention_entropy": [1.5, 4.0],
        "missing_mass": [0.1, 0.2],
        "sink_rate_later": [0.0, 0.0],
        "sink_rate_clear": [0.5, 0.0],  # the last head has no rate
        "uniform_mass": [0.05, 0.05],
    }
    assert {metric for metric, _ in summary} == set(expected)
    for metric, values in expected.items():
        for layer, value in enumerate(values):
            assert summary[metric, layer] == pytest.approx(value)
        assert summary[metric, WHOLE_MODEL] == pytest.approx(np.mean(values))


def test_later_sinks_are_pairs_of_head_and_sequence_with_queries_enough() -> None:
    last = LENGTH - FEWEST_QUERIES  # the last position with enough queries from it on
    sinks = [
        (0, 0, 0, 5, LENGTH - 5), (0, 0, 0, 9, LENGTH - 9),  # one pair, however many positions
        (0, 0, 1, last, FEWEST_QUERIES),
        (0, 1, 0, last + 1, FEWEST_QUERIES - 1),  # too late: its queries are few
        (0, 1, 1, 0, LENGTH),  # position 0 is not later
    ]  # fmt: skip
    summary = metrics(attention_tables(sinks))
    assert summary["sink_rate_later", 0] == 2 / (HEADS * 2)
    assert summary["sink_rate_later", 1] == 0.0
    assert summary["sink_rate_later", WHOLE_MODEL] == 0.25
    for window, has_rate in ((FEWEST_QUERIES, True), (FEWEST_QUERIES - 1, False)):
        summary = metrics(attention_tables(sinks), settings=ObservableOptions(window=window))
        assert (summary["sink_rate_later", 0] == summary["sink_rate_later", 0]) == has_rate


def test_gradients_are_averaged_over_layers_before_they_are_divided_and_gains_are_medians() -> None:
    tables = made_up_runs.gradient_tables()
    by_layer, whole = gradient_summary(tables, longest=64)
    together = tables["gradient"].query("head == -1")
    value, key = (together[together["pathway"] == name].pivot_table("grad_norm", "layer", "position")
                  for name in ("value", "key"))  # fmt: skip
    assert whole["value_over_key_gradient"] == pytest.approx(value[0].mean() / key[0].mean())
    assert whole["key_gradient_ratio"] == pytest.approx(key.mean()[0] / key.mean()[5:16].mean())
    np.testing.assert_allclose(by_layer["key_gradient_ratio"], key[0] / key.loc[:, 5:].mean(axis=1))
    compress = tables["gradient_ratio"].query("branch == 'attn'").pivot_table("compress", "layer", "position")
    np.testing.assert_allclose(by_layer["compress_later"], compress.loc[:, 5:].median(axis=1))
    assert whole["compress_later"] == pytest.approx(compress.loc[:, 5:].median(axis=1).median())
    assert whole["compress"] == pytest.approx(compress[0].median())
    largest = tables["gradient_check"].groupby("layer")["identity_residual"].max()
    np.testing.assert_allclose(by_layer["identity_residual"], largest)
    assert whole["identity_residual"] == largest.max()


def test_geometry_is_summarized() -> None:
    """Each head's value is divided by the mean, not the sum, of its other positions; then heads are averaged."""
    table = grid(query_norm=1.0, key_norm=1.0, value_norm=4.0, qk_cosine=0.9, sink_logit_gap=0.0)
    first = table["position"] == 0
    table.loc[first, "value_norm"] = [1.0, 3.0, 4.0, 8.0]
    table.loc[table["position"] == 2, "value_norm"] = 12.0
    table.loc[first, "qk_cosine"] = [0.1, 0.3, -0.2, 0.0]
    table.loc[first, "sink_logit_gap"] = [5.0, 7.0, 1.0, 2.0]
    summary = metrics({"geometry": table})
    assert summary["value_drain", 0] == pytest.approx((1 / 8 + 3 / 8) / 2)
    assert summary["value_drain", 1] == pytest.approx((4 / 8 + 8 / 8) / 2)
    assert summary["qk_cosine", 0] == pytest.approx(0.2)
    assert summary["sink_logit_gap", WHOLE_MODEL] == pytest.approx((6 + 1.5) / 2)


def test_norms_massive_activations_and_outliers_are_summarized() -> None:
    norms = pd.DataFrame(
        [(layer, site, position, norm) for layer in range(2) for site, scale in (("layer_out", 1), ("mid", 99))
         for position, norm in enumerate((scale * (50 + 50 * layer), scale * 1.0, scale * 3.0))],
        columns=["layer", "site", "position", "norm_mean"],
    )  # fmt: skip
    massive = pd.DataFrame({"layer": [0, 0, 1, 1, 1], "is_massive": [True, False, True, True, True]})
    outlier = pd.DataFrame({
        "layer": [0, 0, 1, 1], "site": ["mid", "layer_out"] * 2,
        "max_inf_norm": [3.0, 9.0, 4.0, 2.0], "kurtosis": [3.0, 5.0, 10.0, 20.0],
    })  # fmt: skip
    of_norms = pd.DataFrame({"layer": [0, 1], "site": "mlp_norm", "max_inf_norm": 99.0, "kurtosis": [7.0, 40.0]})
    summary = metrics({"activation": norms, "massive": massive, "outlier": outlier, "outlier_norms": of_norms})
    assert summary["norm_ratio", 0] == pytest.approx(25.0)
    assert summary["norm_ratio", 1] == pytest.approx(50.0)
    assert summary["massive_count", 0] == 0.5  # per sequence
    assert summary["massive_count", WHOLE_MODEL] == 2.0  # all layers together
    assert [summary["max_inf_norm", layer] for layer in (0, 1, WHOLE_MODEL)] == [9.0, 4.0, 9.0]
    assert [summary["layer_inf_norm", layer] for layer in (0, 1, WHOLE_MODEL)] == [9.0, 2.0, 9.0]
    assert [summary["kurtosis", layer] for layer in (0, 1, WHOLE_MODEL)] == [4.0, 15.0, 9.5]
    assert [summary["kurtosis_with_norms", layer] for layer in (0, 1, WHOLE_MODEL)] == [6.0, 30.0, 18.0]


def test_outliers_of_post_norm_models_are_read_at_bondarenkos_sites() -> None:
    """The sum before the last norm, and the kurtosis of the MLP's output and the layer's."""
    sites = ["attn_out", "mid", "mlp_out", "out_sum", "layer_out"]
    outlier = pd.DataFrame({
        "layer": [0] * 5 + [1] * 5, "site": sites * 2, "max_inf_norm": [90.0, 80.0, 3.0, 7.0, 4.0] + [1.0] * 5,
        "kurtosis": [99.0, 98.0, 10.0, 97.0, 20.0] + [2.0] * 5,
    })  # fmt: skip
    summary = metrics({"outlier": outlier, "outlier_norms": outlier[:0]})
    assert [summary["layer_inf_norm", layer] for layer in (0, 1, WHOLE_MODEL)] == [7.0, 1.0, 7.0]
    assert [summary["kurtosis_with_norms", layer] for layer in (0, 1, WHOLE_MODEL)] == [15.0, 2.0, 8.5]
    assert summary["max_inf_norm", WHOLE_MODEL] == 90.0


def test_gates_and_the_drain_before_them() -> None:
    """Gates are averaged over heads; the drain is computed for each head first."""
    table = grid(gate=1.0, raw_value_norm=2.0)
    first, head_0 = table["position"] == 0, table["head"] == 0
    table.loc[first & head_0, ["gate", "raw_value_norm"]] = [0.2, 1.0]
    table.loc[~first & ~head_0, ["gate", "raw_value_norm"]] = [0.8, 4.0]
    summary = metrics({"gate": table})
    for layer in (0, 1, WHOLE_MODEL):
        assert summary["gate_first", layer] == pytest.approx(0.6)
        assert summary["gate_later", layer] == pytest.approx(0.9)
        assert summary["raw_value_drain", layer] == pytest.approx(0.5)  # 1 ÷ 2 and 2 ÷ 4


def bound(run: Run) -> pd.Series:
    summary = run.tables["summary"]
    return summary[summary["metric"] == "repeated_bound"].set_index("layer")["value"]


def repeated(name: str, **options: Any) -> Run:
    options = {"num_seqs": 1, "seq_len": 24} | options
    return sinkscope.analyze(tiny_model(name), input="repeated", observables=("attention", "geometry"), **options)


def test_the_bound_is_the_propositions() -> None:
    """It is the mean over heads and queries of e^{2ξ}/(e^{2ξ} + t) with ξ = ‖q‖‖k‖/√d, here from plain transformers."""
    run = repeated("llama")
    model = tiny_model("llama")
    (token,) = set(sinkscope.analyze(model, input="repeated", num_seqs=1, seq_len=24).tables["massive"]["token_id"])
    recorded = reference.record(model, np.full(24, token))
    for number, layer in enumerate(recorded.layers):
        terms = []
        for head in range(4):
            xi = np.linalg.norm(layer.query[head, 0]) * np.linalg.norm(layer.key[head // 2, 0]) / np.sqrt(8)
            terms += [np.exp(2 * xi) / (np.exp(2 * xi) + t) for t in range(24)]
        assert bound(run)[number] == pytest.approx(np.mean(terms), rel=1e-5)


def test_the_bound_is_only_for_rotary_models_on_repeated_tokens_of_text() -> None:
    """Anything else that takes weight makes equal tokens differ, and the proposition assumes equal tokens."""
    assert len(bound(repeated("llama"))) == 4
    assert bound(repeated("llama", bos="always")).empty  # a BOS before them is another token
    for name in ("gpt2", "bloom", "gpt_oss"):
        assert bound(repeated(name, bos="never")).empty
    assert bound(sinkscope.analyze(tiny_model("llama"), input="random", num_seqs=1, seq_len=24)).empty
    table = grid(query_norm=1.0, key_norm=5.0, value_norm=1.0, qk_cosine=0.0, sink_logit_gap=0.0)
    inputs = inputs_of([[7] * LENGTH], "repeated")
    assert ("repeated_bound", 0) in metrics({"geometry": table}, inputs)
    assert ("repeated_bound", 0) not in metrics({"geometry": table}, inputs, outside=("register tokens",))
