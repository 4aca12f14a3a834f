"""The table `retrofit` and its Markdown, from hand-made runs with known numbers; tables as text, Markdown and LaTeX."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sinkscope import InputError, Run
from sinkscope.commands.train.findings import (
    backcopy_markdown,
    equal_loss_markdown,
    gates_moved,
    methods_compared,
    retrofit_markdown,
    retrofit_summaries,
    without_start,
)
from sinkscope.measuring.tables import column_names
from sinkscope.results.findings import Outcome
from sinkscope.results.metrics import ARM_METRICS
from sinkscope.results.tables import LEADING
from sinkscope.results.trainings import UNTOUCHED, retrofit_table, tokens_a_step
from sinkscope.verdict.table_formats import formatted

GATES = pd.DataFrame({"condition": "vga", "seed": [0, 0, 1], "layer": [0, 1, 0], "displacement": [0.25, 0.75, 2.0]})
W8A8 = {
    "loss": math.log(17.03), "perplexity": 17.03, "max_inf_norm": 256.84, "kurtosis": 13412.71,
    "loss_quantized": math.log(617.32), "perplexity_quantized": 617.32, "max_inf_norm_quantized": 486.19,
    "kurtosis_quantized": 2508.21,
}  # fmt: skip
ARMS = {"vga": {"method": "vga", "label": "vga", "seed": 0}}


def run_of(arm: str, w8a8: dict[str, float] | None = None, **summary: float) -> Run:
    rows = [(-1, metric, value) for metric, value in summary.items()]
    table = pd.DataFrame([*rows, (0, "sink_rate", 0.125)], columns=["layer", "metric", "value"])  # a layer is not used
    manifest = {"model": {"name": "org/model"}, "condition": arm, "tables": ["summary"], "w8a8": w8a8}
    return Run(manifest, {"summary": table})


def table_with(**costs: float) -> pd.DataFrame:
    """Return the table of the untouched model, with the costs of W8A8 but for those given, and of VGA."""
    numbers = {"perplexity": 17.5, "sink_rate": 0.731, "value_drain": 0.25, "massive_count": 18.8}
    vga = {"perplexity": 16.94, "kurtosis": 32.47, "sink_rate": 0.5, "gate_first": 0.3, "gate_later": np.nan}
    runs = {UNTOUCHED: run_of(UNTOUCHED, W8A8 | costs, **numbers), "vga": run_of("vga", **vga)}
    return retrofit_table(ARMS, runs, GATES)


def values(table: pd.DataFrame, arm: str) -> dict[str, float]:
    return table[table["condition"] == arm].set_index("metric")["value"].to_dict()


def test_the_table_has_the_measured_numbers_and_no_others() -> None:
    table = table_with()
    assert list(table.columns) == [*LEADING, *column_names("retrofit")]
    assert (table["layer"] == -1).all()
    assert (table["model"] == "org/model").all()
    expected = {name: W8A8[name] for name in ARM_METRICS if name in W8A8}  # without the perplexity of the run
    expected |= {"perplexity_increase": 600.29, "sink_rate": 0.731, "value_drain": 0.25, "massive_count": 18.8}
    assert values(table, UNTOUCHED) == pytest.approx(expected)
    assert list(values(table, UNTOUCHED)) == [metric for metric in ARM_METRICS if metric in expected]
    assert values(table, "vga") == {
        "perplexity": 16.94, "kurtosis": 32.47, "sink_rate": 0.5, "gate_first": 0.3, "gate_displacement_max": 0.75,
    }  # fmt: skip
    table = retrofit_table(ARMS, {"vga": run_of("vga", perplexity=16.94)}, GATES.iloc[:0])
    assert values(table, "vga") == {"perplexity": 16.94}
    assert "W8A8" not in retrofit_markdown(table)


def test_methods_are_compared_with_plain_training_seed_by_seed() -> None:
    rates = {"plain": (0.5, 0.7, 0.6), "vga": (0.1, 0.4, 0.2)}
    perplexities = {"plain": (20.0, 21.0, 22.0), "vga": (22.0, 23.0, 24.0)}
    methods = {"plain": "none", "vga": "vga"}
    arms, runs = {}, {}
    for arm, at in product(methods, range(3)):
        arms[f"{arm}-seed{at}"] = {"method": methods[arm], "label": arm, "seed": at}
        runs[f"{arm}-seed{at}"] = run_of(arm, sink_rate=rates[arm][at], perplexity=perplexities[arm][at])
    table = retrofit_table(arms, runs, GATES)
    assert values(table[table["seed"] == 1], "vga") == {
        "perplexity": 23.0, "sink_rate": 0.4, "gate_displacement_max": 2.0,
    }  # fmt: skip
    assert values(table[table["seed"] == 2], "vga") == {"perplexity": 24.0, "sink_rate": 0.2}
    (finding,) = methods_compared(table, arms, sequences=32)
    changes = np.array([-40, -30, -40])
    reach = stats.t.ppf(0.975, 2) * changes.std(ddof=1) / np.sqrt(3)
    assert (finding.value, finding.low, finding.high) == pytest.approx(changes.mean() + np.array([0, -reach, reach]))
    assert finding.numbers["perplexity_ratio"] == pytest.approx((22 / 20 * 23 / 21 * 24 / 22) ** (1 / 3))
    for seed in (3, 4):  # seeds that were added to plain training alone
        arms[f"plain-seed{seed}"] = {"method": "none", "label": "plain", "seed": seed}
        runs[f"plain-seed{seed}"] = run_of("plain", sink_rate=0.9, perplexity=30.0)
    assert methods_compared(retrofit_table(arms, runs, GATES), arms, sequences=32) == [finding]
    is_first = (table["condition"] == "vga") & (table["metric"] == "perplexity") & (table["seed"] == 0)
    (ruined,) = methods_compared(table.assign(value=table["value"].mask(is_first, math.inf)), arms)
    assert ruined.value == finding.value
    assert "perplexity" not in ruined.sentence
    later = {label: arm for label, arm in arms.items() if arm["label"] == "vga" or arm["seed"] > 2}
    (uncompared,) = methods_compared(retrofit_table(later, {label: runs[label] for label in later}, GATES), later)
    assert uncompared.outcome == Outcome.UNDEFINED
    assert uncompared.sentence.startswith("vga has no seed in common with plain training")
    words = "vga, compared with plain training on 32 held-out sequences: sink rate -36.7 points (95 % interval -51.0 to"
    assert finding.sentence.startswith(words)
    start = f"# org/model\n\n- {finding.sentence}\n\nAll arms were measured on 32 held-out sequences.\n\n## "
    assert retrofit_markdown(table, [finding, *gates_moved(GATES)], 32).startswith(start)  # headlines alone


def test_methods_are_compared_where_sink_rates_or_plain_training_are_missing() -> None:
    runs = {arm: run_of(arm, sink_rate=float("nan"), perplexity=x) for arm, x in (("plain", 20.0), ("vga", 22.0))}
    arms = {arm: {"method": "none" if arm == "plain" else arm, "label": arm, "seed": 0} for arm in runs}
    (finding,) = methods_compared(retrofit_table(arms, runs, GATES), arms)
    assert "no sink rate, as uniform attention exceeds ε, perplexity × 1.100" in finding.sentence
    (finding,) = methods_compared(table_with(), ARMS)
    assert finding.sentence == (
        "vga, compared with the untouched model: sink rate -23.1 points, perplexity × 0.995; one seed has no interval."
    )
    assert methods_compared(retrofit_table(ARMS, {"vga": run_of("vga", sink_rate=0.5)}, GATES), ARMS) == []
    costs = {"plain": (20.0, 30.0), "vga": (22.0, 60.0)}
    runs = {
        arm: run_of(arm, W8A8 | dict(zip(("perplexity", "perplexity_quantized"), pair, strict=True)), sink_rate=0.5)
        for arm, pair in costs.items()
    }
    (finding,) = methods_compared(retrofit_table(arms, runs, GATES), arms)
    ratios = [finding.numbers[f"{name}_ratio"] for name in ("perplexity", "perplexity_quantized")]
    assert ratios == pytest.approx([1.1, 2.0])


def test_the_gates_that_moved_farthest() -> None:
    registers = pd.DataFrame({"condition": "registers", "seed": 0, "layer": -1, "displacement": [0.25, 0.75]})
    finding, without_layer = gates_moved(pd.concat([GATES, registers]))
    assert without_layer.numbers == {"arm": "registers", "mean": 0.5, "layer": None}
    assert without_layer.sentence == "registers: new parameters moved by 0.5 on average, by 0.75 at most"
    assert (finding.value, finding.numbers) == (2.0, {"arm": "vga", "mean": 1.0, "layer": 0})
    assert finding.sentence == "vga: new parameters moved by 1 on average, by 2 at most, in layer 0"


def test_markdown() -> None:
    text = retrofit_markdown(table_with())
    assert "| Method | Perplexity (↓) | Max infinity norm (↓) | Mean kurtosis (↓) |" in text
    assert "| untouched | 17.03 | 256.84 | 13,412.71 |\n| vga | 16.94 | – | 32.47 |" in text
    assert "| untouched | 617.32 | +600.29 | 486.19 | 2,508.21 |\n| vga | – | – | – | – |" in text
    assert "| untouched | 73.1% | 18.8 | 0.25 | – | – |\n| vga | 50.0% | – | – | 0.300 | 0.75 |" in text
    ruined = retrofit_markdown(table_with(perplexity_quantized=math.inf))  # infinitely worse
    assert "| untouched | inf | +inf | 486.19 | 2,508.21 |" in ruined


def test_arms_side_by_side_at_equal_loss() -> None:
    """`slow` ends at a loss of 3, which `fast` has half-way between two logs, at first; later losses do not count."""
    of = {"fast": ((5, 4, 2, 9), (0.0, 0.2, 0.4, 0.9)), "slow": ((5, 5, 4, 3), (0.0, 0.0, 0.0, 0.1))}
    rows = [
        (arm, -1, seed, 10 * at, metric, value * (1 + seed * (metric != "held_out_loss")))
        for arm, courses in of.items()
        for seed in (0, 1)
        for metric, course in zip(("held_out_loss", "sink_rate_by_weight"), courses, strict=True)
        for at, value in enumerate(course)
    ]
    table = pd.DataFrame(rows, columns=["condition", "layer", "seed", "step", "metric", "value"])
    reach = 12.706 * 0.1 * 100  # Student's t of two seeds × the standard error of −0.2 and −0.4
    assert equal_loss_markdown(table).splitlines()[-1] == (
        f"| fast | slow | 3.000 | 15 | 45.0 | 30 | 15.0 | -30.0 [{-30 - reach:.1f}, {-30 + reach:.1f}] | 2 |"
    )
    assert "-20.0 | 1 |" in equal_loss_markdown(table[table["seed"] == 0])
    assert not equal_loss_markdown(table[table["metric"] == "held_out_loss"])
    apart = (table["condition"] == "slow") & (table["metric"] == "held_out_loss")
    assert not equal_loss_markdown(table.assign(value=table["value"] + 9 * apart))  # no loss in common


def test_the_task_at_its_last_step_has_ratios_of_norms_seed_by_seed() -> None:
    last = dict.fromkeys(("attention_to_start", "early_attention_to_start", "attention_to_triggers"), 0.5)
    last |= {"delta_logit": 3.0, "start_attended_norm": 0.5, "other_value_norm": 4.0, "other_attended_norm": 2.0}
    last |= {"bigram_risk": 0.25, "backcopy_risk": 0.25}
    rows = [
        (arm, seed, -1 if metric.endswith("risk") else 0, 10, metric, value)
        for arm, seed in product("ba", (0, 1))
        for metric, value in (*last.items(), ("start_value_norm", 1.0 + seed))
    ]
    table = pd.DataFrame(rows, columns=["condition", "seed", "layer", "step", "metric", "value"])
    earlier, elsewhere = table.assign(step=0, value=9.0), table[table["layer"] == 0].assign(layer=1, value=0.1)
    with_bos, without_bos = (Run({"input": {"token_zero": token}}, {}) for token in ("bos <s> (id 0)", "'h' (id 4)"))
    assert without_start([with_bos]) == ""
    text = backcopy_markdown(pd.concat([earlier, table, elsewhere], ignore_index=True), without_start([without_bos]))
    note = "the first token takes the place of <s>"
    assert text.startswith(f"## Non-trigger queries at step 10 (VGA figures 4 to 6); {note}\n\n| Method | ")
    numbers = ["0.2500 ± 0.0000"] * 2 + ["0.500 ± 0.000"] * 3 + ["0.375 ± 0.177", "0.250 ± 0.000", "3.00 ± 0.00"]
    assert text.splitlines()[-2:] == [f"| {arm} | {' | '.join(numbers)} |" for arm in "ba"]


def test_tokens_a_step_are_those_of_all_batches_and_processes() -> None:
    options = {"batch_size": 2, "accumulation": 3, "block_length": 64}
    assert (tokens_a_step(options), tokens_a_step(options, processes=5)) == (384, 1920)


TABLE = pd.DataFrame({"model_name": ["my_org/a&b", "{x} 50%"], "‖v‖ ε": [0.123456, float("nan")], "n": ["1", "12"]})


def test_text_and_markdown() -> None:
    assert formatted(TABLE) == "model_name  ‖v‖ ε   n\nmy_org/a&b  0.1235  1\n{x} 50%     –       12"
    expected = "| model_name | ‖v‖ ε | n |\n| --- | --- | --- |\n| my_org/a&b | 0.1235 | 1 |\n| {x} 50% | – | 12 |"
    assert formatted(TABLE, "markdown") == expected
    assert formatted(TABLE, "markdown", "Title").startswith("### Title\n\n| model")
    with pytest.raises(InputError, match="'latec' is unknown; did you mean 'latex'"):
        formatted(TABLE, "latec")  # type: ignore[arg-type]


def test_latex_is_escaped_and_has_rules() -> None:
    assert formatted(TABLE, "latex", "A\ntitle").splitlines() == [
        "% A title",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"model\_name & $\|$v$\|$ $\varepsilon$ & n \\",
        r"\midrule",
        r"my\_org/a\&b & 0.1235 & 1 \\",
        r"\{x\} 50\% & -- & 12 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    mixed = pd.DataFrame({"a": ["b", "c"], "number": ["1", "−2.5"], "some": ["1", "two"]})
    assert r"\begin{tabular}{lrl}" in formatted(mixed, "latex")  # one word makes it a column of words
    assert r"\begin{tabular}{lp{6cm}}" in formatted(pd.DataFrame({"a": ["b"], "c": ["word " * 20]}), "latex")


def test_a_table_of_seeds_has_their_mean_and_standard_deviation() -> None:
    rows = [(arm, seed, "perplexity", x) for arm in ("vga", "none") for seed, x in enumerate((10.0, 12.0, 17.0))]
    table = pd.DataFrame(rows, columns=["condition", "seed", "metric", "value"])
    (summary,) = retrofit_summaries(table).values()
    assert summary.to_numpy().tolist() == [["vga", "13.00 ± 3.61"], ["none", "13.00 ± 3.61"]]
