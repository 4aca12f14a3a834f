"""The register of metrics, and unknown names in a result, which raise InputError with the closest known name."""

from pathlib import Path

import numpy as np
import pytest
from support.made_up_runs import made_up, save
from tiny import tiny_model

import sinkscope
from sinkscope import InputError, Run
from sinkscope.measuring.summary import arm_metrics
from sinkscope.results.metrics import (
    ARM_METRICS,
    EFFECT,
    HEADLINE_METRICS,
    METRICS,
    SUMMARY,
    Metric,
    notice_without_rate,
)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_metric_of_a_run_is_in_the_register(name: str) -> None:
    run = sinkscope.analyze(tiny_model(name), input="random", num_seqs=2, seq_len=16, positions=16)
    for metric in run.tables["summary"]["metric"].unique():
        assert SUMMARY in METRICS[metric].tables
    for metric in arm_metrics(run.tables, [0], 2.0)["metric"].unique():
        assert EFFECT in METRICS[metric].tables


def test_each_metric_is_distinct_and_defined() -> None:
    assert all(SUMMARY in METRICS[name].tables for name in HEADLINE_METRICS)
    assert set(ARM_METRICS) <= METRICS.keys()
    for field in ("label", "short", "definition"):
        texts = [getattr(metric, field) for metric in METRICS.values()]
        assert all(texts)
        if field != "definition":
            assert len(set(texts)) == len(texts)
    assert all(name == metric.name for name, metric in METRICS.items())
    assert list(sinkscope.list("metrics")["metric"]) == list(METRICS)


def test_values_are_printed_in_the_metrics_format() -> None:
    for form, value, text in (
        ("{:.1%}", 0.7289, "72.9%"),
        ("{:,.2f}", 13412.714, "13,412.71"),
        ("{:+,.2f}", float("inf"), "+inf"),
        ("{:.3f}", float("nan"), "–"),
    ):
        assert Metric("x", "x", "x", "x", form=form).text(value) == text
    metric = Metric("x", "x", "x", "x", form="{:+.2f}")
    assert metric.text_with_spread(16.94, 0.014) == "+16.94 ± 0.01"
    assert metric.text_with_spread(16.94, float("nan")) == "+16.94"
    assert metric.text_with_spread(float("nan"), 1.0) == "–"


def test_a_missing_rate_has_a_reason_only_where_uniform_attention_would_be_a_sink() -> None:
    missing, uniform = {"sink_rate": float("nan")}, {"uniform_mass": 0.34}
    assert notice_without_rate(missing | uniform, 0.3) == (
        "no sink rate of position 0: uniform attention alone gives it 34.0% of the attention of the queries that see "
        "it, more than ε = 0.3"
    )
    assert notice_without_rate({"sink_rate": 0.5, "uniform_mass": 0.1}, 0.3) is None
    assert notice_without_rate(missing, 0.3) is notice_without_rate({}, 0.3) is None  # no attention was measured


@pytest.fixture(params=["in memory", "opened"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    made = made_up(layers=2)
    return made if request.param == "in memory" else Run.open(save(made, tmp_path / "run"))


def test_names_in_a_run(run: Run) -> None:
    for ask, message in (
        (lambda: run.metric("sinkrate"), "metric 'sinkrate' is unknown; did you mean 'sink_rate'"),
        (lambda: run.metric("sink_rate", 99), "no layer 99: this run has 0 to 1, and -1 for the whole model"),
        (lambda: run.metric("sink_rate", -2), "no layer -2"),
        (lambda: run.tables["sumary"], "table 'sumary' is unknown; did you mean 'summary'"),
        (lambda: run.at("naturel"), "arm 'naturel' is unknown; did you mean 'natural'"),
    ):
        with pytest.raises(InputError, match=message):
            ask()
    assert run.metric("sink_rate", 1) == run.metric("sink_rate", np.int64(1))
    assert np.isnan(run.metric("compress_slope"))  # the metric was not measured
    assert run.tables.get("sumary") is None
    assert "sumary" not in run.tables
    with pytest.raises(KeyError):
        run.tables["sumary"]
