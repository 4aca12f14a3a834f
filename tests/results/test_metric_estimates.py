"""Intervals of metrics: from a run's tables at every ε and level, equal to other bootstraps, and with their level."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.made_up_runs import by_sequence, made_up
from tiny import tiny_model

import sinkscope
from sinkscope import InputError, Run
from sinkscope.results.head_differences import head_differences
from sinkscope.results.metric_estimates import BY_HEAD, OF_LOSS, SOURCES, difference, reads_the_same
from sinkscope.results.sequences import Sequences
from sinkscope.results.tables import WHOLE_MODEL

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 6, "seq_len": 24, "bos": "never"}
OBSERVABLES = ("attention", "geometry", "activation", "massive", "gradient", "entropy", "residual-sinks", "query-bias")
MASS = "attention_heads_by_sequence"


@pytest.fixture(scope="module")
def run() -> Run:
    model = tiny_model("gpt2")
    model.transformer.wpe.weight[0, 7] = 60.0  # a sink, and massive activations
    return sinkscope.analyze(model, observables=OBSERVABLES, epsilon=0.2, **SMALL)


def run_of(masses: np.ndarray, sha: str = "a", uniform: float = 0.05, **read: Any) -> Run:
    """Return a run with these window masses of position 0, (layers, heads, sequences)."""
    table = by_sequence({"window_mass": 0.0, "uniform_mass": uniform}, len(masses), sequences=masses.shape[2],
                        head=range(masses.shape[1]))  # fmt: skip
    table["window_mass"] = masses.transpose(0, 2, 1).ravel()
    made = made_up(input={"sequences": masses.shape[2], "sha256": sha, **read})
    return Run(made.manifest, {**made.tables, MASS: table})


# --- the values are those of the run's tables


@pytest.mark.parametrize("metric", [*SOURCES, *OF_LOSS])
def test_values_are_those_of_the_summary(metric: str, run: Run) -> None:
    (row,) = run.estimate(metric).itertuples()
    # entropies and losses of sequences are stored in float32
    rel = 1e-6 if metric in OF_LOSS or "entropy" in metric else 1e-12
    assert row.value == pytest.approx(run.metric(metric), rel=rel)
    assert row.low <= row.value <= row.high
    assert row.sequences == 6
    if metric in OF_LOSS:
        return
    summary = run.tables["summary"].query(f"metric == '{metric}' and layer != {WHOLE_MODEL}")
    by_layer = run.estimate(metric, by="layer")
    pd.testing.assert_series_equal(
        by_layer.set_index("layer")["value"], summary.set_index("layer")["value"], rtol=rel, check_names=False
    )


@pytest.mark.parametrize("metric", ["sink_rate", "window_mass", "sink_mass"])
def test_values_by_head_are_those_of_the_table_of_heads(metric: str, run: Run) -> None:
    first = run.tables["attention"].query("position == 0").set_index(["layer", "head"])[metric].sort_index()
    by_head = run.estimate(metric, by=["layer", "head"]).set_index(["layer", "head"])["value"]
    pd.testing.assert_series_equal(by_head, first, rtol=1e-12, check_names=False)
    assert run.metric(metric, layer=1, head=2) == pytest.approx(by_head[1, 2], rel=1e-12)
    assert run.metric("qk_cosine", 1, 2) == run.tables["geometry"].query("layer == 1 & head == 2")["qk_cosine"].iloc[0]
    with pytest.raises(InputError, match="there is no head 99 in layer 1 of this run"):
        run.metric(metric, 1, 99)
    with pytest.raises(InputError, match="first_norm has no values by head in this run"):
        run.metric("first_norm", 1, 2)


def test_rates_at_another_threshold_are_those_of_a_run_with_it(run: Run) -> None:
    model = tiny_model("gpt2")
    model.transformer.wpe.weight[0, 7] = 60.0
    other = sinkscope.analyze(model, observables=OBSERVABLES[:1], epsilon=0.4, **SMALL)
    both = run.estimate("sink_rate", by="layer", epsilon=[0.2, 0.4])
    assert both["epsilon"].tolist() == [0.2] * (len(both) // 2) + [0.4] * (len(both) // 2)
    pd.testing.assert_frame_equal(
        both.query("epsilon == 0.4").reset_index(drop=True), other.estimate("sink_rate", by="layer")
    )
    assert both["value"].nunique() > 2
    assert (both["null"] == 0).all()
    assert run.estimate("window_mass")["null"].tolist() == [pytest.approx(run.metric("uniform_mass"), rel=1e-12)]


def test_the_null_of_another_run_is_its_values_at_the_same_threshold_layers_and_heads(run: Run) -> None:
    null = sinkscope.analyze(
        tiny_model("gpt2"), observables=OBSERVABLES, epsilon=0.3, random_weights=True, seed=3, **SMALL
    )
    for metric, by, epsilon in (
        ("sink_rate", "layer", [0.2, 0.3]), ("window_mass", BY_HEAD, ()), ("first_norm", "layer", ()),
        ("loss", (), ()), ("massive_count", (), ()),
    ):  # fmt: skip
        values, plain = null.estimate(metric, by, epsilon)["value"], run.estimate(metric, by, epsilon)
        estimated = run.estimate(metric, by, epsilon, null=null)
        pd.testing.assert_series_equal(estimated["null"], values, check_names=False)
        assert estimated.drop(columns="null").equals(plain.drop(columns="null"))
        assert metric == "sink_rate" or not estimated["null"].equals(plain["null"])
    to_itself = run.estimate("sink_rate", "layer", [0.2, 0.4], null=run)
    assert to_itself["value"].nunique() > 2
    pd.testing.assert_series_equal(to_itself["null"], to_itself["value"], check_names=False)
    other = sinkscope.analyze(tiny_model("llama", num_hidden_layers=2), observables=OBSERVABLES[:1], **SMALL)
    with pytest.raises(InputError, match="the run of the null has other layers or heads"):
        run.estimate("sink_rate", "layer", null=other)


def test_a_position_that_uniform_attention_makes_a_sink_has_no_rate() -> None:
    table = run_of(np.full((1, 2, 4), 0.9), uniform=0.5).estimate("sink_rate", by="head", epsilon=[0.4, 0.6])
    assert table["value"].tolist() == pytest.approx([np.nan, np.nan, 1, 1], nan_ok=True)
    assert table["sequences"].tolist() == [0, 0, 4, 4]
    made = run_of(np.stack([np.full((2, 4), 0.9), np.full((2, 4), 0.1)]))
    made.tables[MASS].drop(index=made.tables[MASS].query("layer == 1 and head == 1").index, inplace=True)
    lacking = made.estimate("sink_rate", by="layer")  # the second layer has one head
    assert lacking[["value", "sequences"]].to_numpy().tolist() == [[1.0, 4], [0.0, 4]]
    assert len(made.estimate("sink_rate", by=BY_HEAD)) == 3


def test_a_sequence_without_massive_activations_counts_as_none() -> None:
    made = run_of(np.full((2, 1, 4), 0.5))
    rows = {"layer": [0, 0, 0, 1], "sequence": [0, 0, 2, 2], "is_massive": [True, True, True, False]}
    made = Run(made.manifest, {**made.tables, "massive": pd.DataFrame(rows)})
    assert made.estimate("massive_count")["value"].tolist() == [0.75]
    by_layer = made.estimate("massive_count", by="layer")
    assert by_layer[["value", "sequences"]].to_numpy().tolist() == [[0.75, 4], [0.0, 4]]


# --- intervals


def test_intervals_are_those_of_another_bootstrap_and_of_student() -> None:
    random, texts = np.random.default_rng(5), 24
    masses = random.gamma(3, 0.1, (2, 3, texts))
    (row,) = run_of(masses).estimate("window_mass").itertuples()
    means = masses.mean((0, 1))
    drawn = random.choice(means, (20_000, texts)).mean(1)
    t = stats.t.ppf(0.975, texts - 1)
    level = stats.norm.cdf(-t * np.sqrt(texts / (texts - 1)))  # Hesterberg's expanded percentiles
    error = means.std(ddof=1) / np.sqrt(texts)
    # the standard error of a quantile of 1,000 draws, √(p (1 − p) ÷ n) ÷ density, is 0.08 of the deviation of the draws
    for ends in (np.quantile(drawn, [level, 1 - level]), means.mean() + error * np.array([-t, t])):
        assert (row.low, row.high) == pytest.approx(tuple(ends), abs=4 * 0.085 * error)
    assert row.high - row.low < 2 * t * error * 1.15


@pytest.mark.parametrize("texts", [8, 16, 32])
def test_intervals_cover_the_truth(texts: int) -> None:
    random = np.random.default_rng(texts)
    means = run_of(random.normal(0.4, 0.05, (1, 2000, texts))).estimate("window_mass", by="head")
    assert 0.92 < means.eval("low <= 0.4 <= high").mean() < 0.98
    for rate in (0.6, 0.9, 0.97):
        sinks = random.random((1, 2000, texts)) < rate
        rates = run_of(np.where(sinks, 0.9, 0.1)).estimate("sink_rate", by="head")
        assert rates.eval(f"low <= {rate} <= high").mean() > (
            0.88 if texts == 8 else 0.92
        )  # rates come in steps of 1/8


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("texts", [16, 100])
def test_a_difference_of_nothing_has_an_interval_with_zero(is_paired: bool, texts: int) -> None:
    random = np.random.default_rng(texts)
    shared, other = random.normal(0.4, 0.1, (2, 1, 1500, texts))
    texts_of_second = shared if is_paired else other
    runs = [
        run_of(of_text + random.normal(0, 0.05, shared.shape), sha)
        for of_text, sha in ((shared, "a"), (texts_of_second, "a" if is_paired else "b"))
    ]
    table, counts = head_differences(runs, "window_mass")
    assert counts["is_paired"] == is_paired
    assert 0.92 < ((table["difference_low"] <= 0) & (table["difference_high"] >= 0)).mean() < 0.98
    assert table["differs"].sum() <= 1
    assert (table["p"] < 0.05).mean() == pytest.approx(0.05, abs=0.02)
    single = [run_of(masses[:, :1], sha) for masses, sha in zip((shared, shared + 0.01), "aa", strict=True)]
    paired = difference(*map(Sequences, single), "window_mass")
    assert (paired.low, paired.value, paired.high) == pytest.approx((0.01, 0.01, 0.01))
    apart = difference(Sequences(single[0]), Sequences(run_of(shared[:, :1] + 0.01, "b")), "window_mass")
    assert apart.high - apart.low > 2 * 1.96 * 0.1 / np.sqrt(texts)


def test_a_difference_of_losses_has_students_interval() -> None:
    """The jackknife of a mean is Student's interval, here of paired differences."""
    runs = [sinkscope.analyze(tiny_model("llama", rms_norm_eps=each), **SMALL) for each in (1e-6, 0.5)]
    before, after = (run.tables["loss_by_sequence"]["loss"].to_numpy(float) for run in runs)
    changes, count = after - before, len(before)
    reach = stats.t.ppf(0.975, count - 1) * changes.std(ddof=1) / np.sqrt(count)
    estimate = difference(*map(Sequences, runs), "loss")
    ends = changes.mean() - reach, changes.mean() + reach
    assert (estimate.low, estimate.high) == pytest.approx(ends, rel=1e-4)


def test_equal_texts_bound_a_rate_and_copies_of_a_text_narrow_nothing() -> None:
    sinks = np.full((1, 1, 16), 0.9)
    (row,) = run_of(sinks).estimate("sink_rate", by="head").itertuples()
    assert (row.low, row.high) == pytest.approx((0.05 ** (1 / 16), 1.0))  # of 16 texts none has another value
    masses = np.random.default_rng(0).random((1, 3, 8))
    once, twice = run_of(masses), run_of(np.repeat(masses, 2, axis=2), texts=np.repeat(range(8), 2).tolist())
    columns = ["value", "low", "high"]
    for metric in ("sink_rate", "window_mass"):
        pd.testing.assert_frame_equal(once.estimate(metric, BY_HEAD)[columns], twice.estimate(metric, BY_HEAD)[columns])
    numbers = [head_differences([each, each], "window_mass")[1]["first_texts"] for each in (once, twice)]
    assert numbers == [8, 8]


def test_texts_without_a_value_bound_no_rate() -> None:
    sinks = np.full((1, 1, 16), 0.9)
    sinks[..., 5:] = np.nan
    (row,) = run_of(sinks).estimate("sink_rate", by="head").itertuples()
    assert (row.low, row.high, row.sequences) == pytest.approx((0.05 ** (1 / 5), 1.0, 5))
    copies = run_of(np.repeat(sinks, 2, axis=2), texts=np.repeat(range(16), 2).tolist()).estimate("sink_rate")
    assert copies[["low", "high", "sequences"]].to_numpy().tolist() == [[pytest.approx(0.05 ** (1 / 5)), 1.0, 10]]


def test_each_run_of_a_difference_has_its_own_threshold() -> None:
    masses = np.random.default_rng(0).random((1, 4, 40))
    runs = [run_of(masses) for _ in range(2)]
    for run, epsilon in zip(runs, (0.25, 0.5), strict=True):
        run.manifest["config"] = run.manifest["config"] | {"epsilon": epsilon}
    apart = difference(*map(Sequences, runs), "sink_rate")
    assert apart.value == pytest.approx(-((masses > 0.25) & (masses <= 0.5)).mean())
    assert apart.low < apart.value < apart.high < 0


# --- heads that differ


def test_runs_of_which_one_knows_copies_of_a_text_are_not_paired() -> None:
    masses = np.random.default_rng(0).random((1, 2, 8))
    runs = [run_of(masses), run_of(masses, texts=np.repeat(range(4), 2).tolist())]
    assert not reads_the_same(*map(Sequences, runs))
    counts = head_differences(runs, "window_mass")[1]
    assert (counts["is_paired"], counts["first_texts"], counts["second_texts"]) == (False, 8, 4)


def test_texts_in_which_a_head_has_no_value_are_not_counted() -> None:
    masses = np.random.default_rng(0).random((2, 1, 3, 24))
    masses[0, 0, 0, :4] = np.nan
    masses[1, 0, 2, 10:] = np.nan
    for sha, texts in (("a", [6, 6]), ("b", [20, 10])):
        counts = head_differences([run_of(masses[0]), run_of(masses[1], sha)], "window_mass")[1]
        assert [counts["first_texts"], counts["second_texts"]] == texts


def test_the_halves_of_each_run_are_of_its_own_texts() -> None:
    """All heads of a run are alike: in some halves of random texts all of them differ."""
    alike = np.broadcast_to(np.random.default_rng(0).random(40), (1, 6, 40))
    runs = [run_of(np.full((1, 6, 40), 0.5)), run_of(alike, "b")]
    order = [np.random.default_rng(0)] * 20
    halves = [np.split(alike[0, 0, random.permutation(40)], 2) for random in order]
    named = [6 * (stats.mannwhitneyu(*each).pvalue <= 0.05) for each in halves]
    assert max(named) == 6
    for first, second in (("first", "second"), ("second", "first")):
        counts = head_differences(runs, "window_mass")[1]
        assert (counts[f"{first}_halves"], counts[f"{first}_halves_most"]) == (0, 0)
        assert (counts[f"{second}_halves"], counts[f"{second}_halves_most"]) == (np.mean(named), 6)
        runs = runs[::-1]


def test_few_of_the_named_heads_are_named_falsely() -> None:
    random, shares, power = np.random.default_rng(3), [], []
    for study in range(20):
        masses = random.normal(0.4, 0.05, (2, 10, 20, 16))
        masses[1, :2] += 0.1  # 40 of 200 heads
        table, counts = head_differences(
            [run_of(each, sha) for each, sha in zip(masses, "ab", strict=True)], "window_mass"
        )
        false, right = table.query("differs and layer >= 2"), table.query("differs and layer < 2")
        shares.append(len(false) / max(table["differs"].sum(), 1))
        power.append(len(right) / 40)
        assert counts["differing"] == table["differs"].sum()
        assert max(counts["first_halves_most"], counts["second_halves_most"]) <= 10, study
    assert 0.01 < np.mean(shares) < 0.07
    assert np.mean(power) > 0.95


def test_p_values_by_head_are_those_of_scipy_and_q_those_of_benjamini_and_hochberg() -> None:
    random = np.random.default_rng(4)
    masses = random.random((2, 1, 30, 30))
    masses[1] += np.linspace(0, 0.6, 30)[:, None]
    unpaired, paired = (head_differences([run_of(masses[0]), run_of(masses[1], sha)], "window_mass")[0] for sha in "ba")
    x, y = masses[:, 0]
    assert unpaired["p"].to_numpy() == pytest.approx(
        [stats.mannwhitneyu(*pair).pvalue for pair in zip(x, y, strict=True)]
    )
    signed = [stats.wilcoxon(b - a, method="asymptotic").pvalue for a, b in zip(x, y, strict=True)]
    assert paired["p"].to_numpy() == pytest.approx(signed)
    order = np.argsort(unpaired["p"].to_numpy())
    below = unpaired["p"].to_numpy()[order] <= 0.05 * np.arange(1, 31) / 30
    last = np.flatnonzero(below).max()
    assert set(np.flatnonzero(unpaired["differs"])) == set(order[: last + 1])
    assert paired["difference"].to_numpy() == pytest.approx((y - x).mean(1))


# --- refusals and LaTeX


@pytest.mark.parametrize(
    ("metric", "options", "message"),
    [
        ("sink_rat", {}, "metric 'sink_rat' is unknown; did you mean 'sink_rate'"),
        ("kurtosis", {}, "kurtosis has no interval, as runs keep no values by sequence of it"),
        ("entropy", {}, "metric 'entropy' is unknown"),
        ("first_norm", {"by": "head"}, "first_norm has no values by head"),
        ("loss", {"by": ["layer"]}, "loss has no values by layer"),
        ("sink_rate", {"by": "position"}, "by 'position' is unknown"),
        ("window_mass", {"epsilon": 0.2}, "window_mass does not depend on ε"),
        ("qk_cosine", {}, "qk_cosine has no values by sequence in this run: .*lacks the table 'geometry_by_sequence'"),
    ],
)
def test_refusals(metric: str, options: dict[str, Any], message: str) -> None:
    made = run_of(np.full((1, 2, 4), 0.5))
    with pytest.raises(InputError, match=message):
        made.estimate(metric, **options)
    with pytest.raises(InputError, match="has several arms"):
        Run(made.manifest | {"command": "intervene"}, made.tables).estimate("sink_rate")
    with pytest.raises(InputError, match="has several arms"):
        made.estimate("sink_rate", null=Run(made.manifest | {"command": "intervene"}, made.tables))
    with pytest.raises(InputError, match="the same layers and heads"):
        head_differences([made, run_of(np.full((1, 3, 4), 0.5))], "sink_rate")


def test_latex_has_no_interval_of_a_single_text() -> None:
    table = run_of(np.full((1, 1, 1), 0.25)).estimate("window_mass")
    assert np.isinf(table["low"]).all()
    row = table.to_latex().splitlines()[5]
    assert row == r"window mass & 0.250 & 0.050 & 1 \\"


def test_latex_has_a_column_for_each_threshold() -> None:
    table = run_of(np.random.default_rng(0).random((2, 4, 12))).estimate("sink_rate", by="layer", epsilon=[0.25, 0.5])
    lines = table.query("layer == 1").to_latex().splitlines()
    assert lines[1:4] == [
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
        r"metric & layer & $\varepsilon$ = 0.25 & $\varepsilon$ = 0.5 & null & sequences \\",
    ]
    first, second = (table.query(f"layer == 1 and epsilon == {epsilon}").iloc[0] for epsilon in (0.25, 0.5))
    cells = [
        f"{row['value']:.1%} {{[}}{row['low']:.1%}, {row['high']:.1%}{{]}}".replace("%", r"\%")
        for row in (first, second)
    ]
    assert lines[5] == rf"sink rate & 1 & {cells[0]} & {cells[1]} & 0.0\% & 12 \\"
    assert lines[6:] == [r"\bottomrule", r"\end{tabular}"]
    nulls = table.query("layer == 1").assign(null=[0.2, 0.1], sequences=[12, 11]).to_latex().splitlines()
    assert nulls[5] == rf"sink rate & 1 & {cells[0]} & {cells[1]} & 20.0\%, 10.0\% & 12, 11 \\"
