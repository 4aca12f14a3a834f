"""Findings on states, super weights, over-mixing and pictures: their intervals are over sequences."""

import warnings

import numpy as np
import pandas as pd
import pytest
from support.made_up_runs import grid, run_manifest
from tiny import tiny_model

from sinkscope import Run, analyze
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.statistics import resamplings
from sinkscope.verdict.probes import findings

OBSERVABLES = ("entropy", "sink-tokens", "residual-sinks", "super-weight", "over-mixing")
# finding → table with a row for each sequence, its column, and how means by layer (draws,L) become one number
NUMBERS = {
    "state-entropy": ("entropy_by_sequence", "entropy", lambda means, layer: means.min(1)),
    "spike": ("spikes_by_sequence", "norm_ratio", lambda means, layer: means[:, layer]),
    "over-mixing": ("over_mixing_by_sequence", "change", lambda means, layer: means.mean(1)),
}


@pytest.fixture(scope="module")
def run() -> Run:
    return analyze(tiny_model("llama"), input="random", num_seqs=6, seq_len=12, observables=OBSERVABLES)


def by_name(run: Run) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings(run)}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_interval_is_that_of_resampled_sequences(name: str, run: Run) -> None:
    finding = by_name(run)[name]
    table, column, over_layers = NUMBERS[name]
    by_layer = run.tables[table].pivot(index="sequence", columns="layer", values=column).to_numpy(float)
    drawn = over_layers(resamplings(6) @ by_layer / 6, finding.numbers.get("layer"))
    assert finding.value == pytest.approx(drawn[0])
    assert (finding.low, finding.high) == pytest.approx(tuple(np.quantile(drawn[1:], [0.025, 0.975])))
    assert finding.low < finding.value < finding.high


def test_without_the_tables_by_sequence_the_numbers_are_the_same_without_intervals(run: Run) -> None:
    less = Run(run.manifest, {name: table for name, table in run.tables.items() if "_by_" not in name})
    whole = by_name(run)
    for name, finding in by_name(less).items():
        assert finding.value == pytest.approx(whole[name].value, rel=1e-6)
        assert name in {"secondary-sinks", "super-weight"} or np.isnan(finding.low)


def test_a_head_sees_a_picture_if_half_of_what_it_gives_it_is_not_on_sinks() -> None:
    patches = pd.DataFrame({"sequence": [0, 0], "layer": 2, "phi": [30.0, 1.0], "mass": 0.1, "random_share": 0.0})
    heads = pd.DataFrame({"sequence": 0, "layer": 2, "head": range(4), "first_mass": 0.1})
    masses = {"visual_mass": [0.8, 0.8, 0.3, 0.1], "sink_mass": [0.3, 0.5, 0.2, 0.0]}
    pictures = {"pictures": 1, "coordinates": [7], "is_massive": True}
    tables = {"visual_patch": patches, "visual_head": heads.assign(**masses)}
    finding = by_name(Run(run_manifest(pictures=pictures), tables))["visual-attention"]
    assert (finding.numbers["seeing"], finding.numbers["heads"]) == (1, 4)
    assert "1 of 4 heads see the picture: they give it at least 0.2" in finding.sentence


def test_only_tokens_that_join_the_sink_for_a_part_of_its_layers_are_secondary_sinks() -> None:
    sinks = pd.DataFrame({"layer": 0, "sequence": [0, 0, 1, 1, 2, 3], "position": [0, 5, 0, 7, 9, 3]})
    sinks["kind"] = ["first", "secondary", "first", "secondary", "lasting", "lasting"]
    sinks["token"] = ["<s>", " the", "<s>", " the", ".", "."]
    sinks = sinks.assign(attention=[30, 2, 40, 4, 9, 9], attention_elsewhere=[np.nan, 0.5, np.nan, 1.5, 3, 3])
    finding = by_name(Run(run_manifest(), {"sink_tokens": sinks}))["secondary-sinks"]
    assert finding.value == pytest.approx(2)
    assert "most often ' the'. They receive 3.0 times uniform attention, equal tokens that are no sinks 1.0 times" in (
        finding.sentence
    )


def test_the_controls_of_over_mixing_are_those_of_their_arm_alone() -> None:
    changes = {
        "before": 0.5,
        "x": 0.3,
        "x control 0": 0.2,
        "x control 1": 0.1,
        "x and y": 0.9,
        "x and y control 0": 0.8,
    }
    table = pd.concat(
        grid(layer=range(2), sequence=range(100)).assign(condition=condition, change=change)
        for condition, change in changes.items()
    )
    manifest = run_manifest(command="intervene", arms={"x": {}, "x and y": {}})
    finding = by_name(Run(manifest, {"over_mixing_by_sequence": table}))["over-mixing"]
    assert finding.numbers == pytest.approx({"x": 0.3, "x control": 0.15, "x and y": 0.9, "x and y control": 0.8})
    assert "by 50.0% of their norm" in finding.sentence
    assert "; under x by 30.0%, under its 2 controls by 10.0% to 20.0%; under x and y by 90.0%" in finding.sentence


def test_scores_of_dormant_heads_agree_if_a_small_norm_goes_with_much_attention_to_the_first_token() -> None:
    scores = grid(layer=range(5), head=range(5))
    scores = scores.assign(relative_norm=np.arange(25.0), first_mass=1 - np.arange(25) / 25)
    scores.loc[2, "first_mass"] = 0.0
    finding = by_name(Run(run_manifest(), {"head_scores": scores}))["dormant-heads"]
    assert finding.value > 0.7
    assert finding.numbers == {"heads": 25, "flagged": 3, "both": pytest.approx(2 / 3), "chance": 0.12} | {
        name: finding.numbers[name] for name in finding.numbers if name.endswith(("_low", "_high"))
    }
    assert "of the 3 heads that each of them flags, 67% are the same" in finding.sentence


# heads: a no-op, a broadcast, outputs of a higher rank, a no-op by its attention alone, and one without a sink
SINK_OUTPUT = {
    "at_half": [0.5, 0.95, 0.5, 0.95, 0.85],
    "value_ratio": [0.1, 0.6, 0.6, 0.15, 0.1],
    "stable_rank": [1.1, 1.4, 1.6, 3.0, 1.0],
    "share": [0.1, 0.9, 0.8, 0.2, 0.6],
    "uniform_share": [0.01, 0.02, 0.03, 0.04, 0.5],
}


def sink_outputs(**changed: list[float]) -> Run:
    """Return a run in which the first three heads have a sink by the run's rule."""
    heads = grid(layer=[0], head=range(5), sequence=range(100))
    columns = {name: np.array(values)[heads["head"]] for name, values in (SINK_OUTPUT | changed).items()}
    mass = np.array([0.5, 0.5, 0.5, 0.2, 0.2])[heads["head"]]
    tables = {
        "sink_output_by_sequence": heads.assign(**columns),
        "attention_heads_by_sequence": heads.assign(window_mass=mass, uniform_mass=0.05),
    }
    return Run(run_manifest(), tables)


def test_heads_with_a_sink_are_no_ops_or_broadcasts_by_the_norm_of_its_value_and_the_rank_of_their_outputs() -> None:
    run = sink_outputs()
    finding = by_name(run)["sink-output"]
    assert (finding.value, finding.null) == (pytest.approx(0.5), pytest.approx(0.025))
    counts = {name: finding.numbers[name] for name in ("heads", "total", "no_ops", "broadcasts", "neither")}
    assert counts == {"heads": 4, "total": 5, "no_ops": 2, "broadcasts": 1, "neither": 1}
    assert "In these heads its term has 50.0% of the norms" in finding.sentence
    assert "with uniform attention 2.5%" in finding.sentence
    counts_said = (
        "is 2; of broadcasts, with at least 0.5 times and outputs of stable rank 1.5 or less, 1; of neither, 1."
    )
    assert counts_said in finding.sentence
    # without the run's rule, a head has a sink by its attention alone
    del run.tables["attention_heads_by_sequence"]
    assert by_name(run)["sink-output"].numbers["heads"] == 2


def test_without_a_sink_no_head_is_a_no_op_or_a_broadcast() -> None:
    run = sink_outputs(at_half=[0.0] * 5)
    del run.tables["attention_heads_by_sequence"]
    finding = by_name(run)["sink-output"]
    assert finding.outcome == Outcome.ABSENT
    assert finding.sentence.startswith("0 of 5 heads have a sink at position 0")
    assert "no-op" not in finding.sentence


def test_a_count_of_heads_has_the_interval_of_resampled_sequences() -> None:
    run = sink_outputs()
    table = run.tables["sink_output_by_sequence"]
    is_large = (table["head"] == 0) & (table["sequence"] % 2 == 0)
    table["value_ratio"] = table["value_ratio"].where(~is_large, 0.29)  # a mean of 0.195: a no-op in some draws
    counts = by_name(run)["sink-output"].numbers
    ratios = table[table["head"] == 0].sort_values("sequence")["value_ratio"].to_numpy()
    drawn = (resamplings(100) @ ratios / resamplings(100).sum(1) <= 0.2) + 1  # another head is one in every draw
    assert counts["no_ops"] == 2
    assert (counts["no_ops_low"], counts["no_ops_high"]) == tuple(np.quantile(drawn[1:], [0.025, 0.975])) == (1, 2)


def test_a_head_that_has_a_sink_in_some_draws_counts_in_these() -> None:
    run = sink_outputs()
    table = run.tables["sink_output_by_sequence"]
    table["at_half"] = table["at_half"].where(table["head"] != 4, np.where(table["sequence"] % 2, 0.81, 1.0))
    counts = by_name(run)["sink-output"].numbers
    queries = table[table["head"] == 4].sort_values("sequence")["at_half"].to_numpy()
    drawn = (resamplings(100) @ queries / resamplings(100).sum(1) >= 0.9) + 2  # two others are no-ops in every draw
    assert counts["no_ops"] == 3
    assert (counts["no_ops_low"], counts["no_ops_high"]) == tuple(np.quantile(drawn[1:], [0.025, 0.975])) == (2, 3)


def decodings(steps: int, ends: dict[int, int], **columns: np.ndarray) -> Run:
    """Return a run whose 100 sequences decode this many tokens, or less: sequence → its number."""
    table = grid(layer=[0, 1], sequence=range(100), step=range(steps))
    table = table.assign(position=10 + table["sequence"] + table["step"], largest=1.0, headroom=9.0, sink_mass=0.0)
    table = table.assign(uniform=1 / (table["position"] + 1))
    for name, values in columns.items():  # (sequences, steps)
        table[name] = values[table["sequence"], table["step"]]
    return Run(run_manifest(), {"decoding": table[table["step"] < table["sequence"].map(ends).fillna(steps)]})


def test_the_change_while_decoding_has_the_interval_of_changes_within_sequences() -> None:
    random, steps = np.random.default_rng(0), 40
    level, change = random.random((100, 1)), random.normal(0.1, 0.02, (100, 1))
    mass = level + change * (np.arange(steps) >= steps // 2)
    finding = by_name(decodings(steps, {}, sink_mass=mass))["decoding"]
    drawn = resamplings(100) @ change[:, 0] / resamplings(100).sum(1)
    low, high = np.quantile(drawn[1:], [0.025, 0.975])
    assert [finding.numbers[name] for name in ("change", "change_low", "change_high")] == pytest.approx(
        [change.mean(), low, high]
    )
    said = f"changes by {100 * change.mean():+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
    assert said in finding.sentence
    assert high - low < 0.01 < level.std() / 10


def test_a_sequence_that_ends_early_counts_by_its_tokens_and_changes_nothing() -> None:
    """All sequences but five end after four steps, and give position 0 less."""
    steps, ends = 40, dict.fromkeys(range(5, 100), 4)
    mass = np.where(np.arange(100)[:, None] < 5, 0.6, 0.1) + 0.002 * np.arange(100)[:, None] + np.zeros(steps)
    mass[:5, 20:] += np.linspace(0.05, 0.06, 5)[:, None]
    run = decodings(steps, ends, sink_mass=mass)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no draw has an empty step
        finding = by_name(run)["decoding"]
    one_layer = run.tables["decoding"].query("layer == 0")
    assert finding.value == pytest.approx(one_layer["sink_mass"].mean())
    assert finding.null == pytest.approx(one_layer["uniform"].mean())
    assert finding.numbers["change"] == pytest.approx(0.055)
    assert (finding.numbers["change_low"], finding.numbers["change_high"]) == pytest.approx((0.05, 0.06), abs=0.003)
    assert ") in the 5 of 100 sequences that go on so long. The" in finding.sentence


def patches(*norms: float, layer: int = 1, sequence: int = 0) -> pd.DataFrame:
    """Return the patches with these norms, in a row of their picture, and a CLS token and a register."""
    table = pd.DataFrame({"layer": layer, "sequence": sequence, "row": 0, "column": range(len(norms)), "norm": norms})
    special = pd.DataFrame({"layer": layer, "sequence": sequence, "row": [-1, -2], "column": 0, "norm": 99.0})
    parts = table.assign(mass=np.where(np.array(norms) > 3, 0.2, 0.1)), special.assign(mass=[0.2, 0.05])
    return pd.concat(parts, ignore_index=True)


def test_outlier_patches_are_those_after_the_last_layer() -> None:
    early = [patches(1, 1, 1, 8, 8, layer=0, sequence=sequence) for sequence in range(2)]
    last = [patches(1, 1, 1, 1, 6, sequence=0), patches(1, 1, 1, 1, 1, sequence=1)]
    manifest = run_manifest()
    manifest["input"]["sequences"] = 2
    finding = by_name(Run(manifest, {"encoder_patch": pd.concat([*early, *last], ignore_index=True)}))[
        "outlier-patches"
    ]
    assert (finding.value, finding.outcome) == (pytest.approx(0.1), Outcome.UNDECIDED)  # one of two pictures has none
    numbers = {"pictures": 2, "largest": 6.0, "layer": 0, "most": 0.4, "special": 0.25, "ratio": 2.0}
    assert finding.numbers == pytest.approx(numbers)
    assert "the largest has 6.00 times. Most are after layer 0: 40.00%. 25.0% of the attention" in finding.sentence


@pytest.mark.parametrize(
    ("shares", "random", "outcome"),
    [
        ([0.5, 0.5, 0.5, 0.5], 0.1, Outcome.PRESENT),
        ([0.0, 0.0, 0.0, 1.0], 0.1, Outcome.UNDECIDED),  # one of four pictures has all of them
        ([0.0, 0.0, 0.0, 0.0], 0.1, Outcome.ABSENT),
    ],
)
def test_visual_sinks_are_there_if_the_interval_is_above_random_coordinates(
    shares: list[float], random: float, outcome: Outcome
) -> None:
    table = grid(layer=[2], sequence=range(4), column=range(10)).assign(mass=0.1, random_share=random)
    table["phi"] = np.where(table["column"] < 10 * table["sequence"].map(dict(enumerate(shares))), 20.1, 20.0)
    early = table.assign(layer=1, phi=99.0)  # before the layers that count
    heads = grid(layer=[2], sequence=range(4), head=range(2)).assign(first_mass=0.1, visual_mass=0.4, sink_mass=0.2)
    manifest = run_manifest(pictures={"pictures": 4, "coordinates": [7], "is_massive": True})
    tables = {"visual_patch": pd.concat([table, early], ignore_index=True), "visual_head": heads}
    finding = by_name(Run(manifest, tables))["visual-sinks"]
    assert (finding.value, finding.outcome) == (pytest.approx(np.mean(shares)), outcome)
    assert finding.numbers["random"] == pytest.approx(random)


@pytest.mark.parametrize(("value", "words"), [(800.0, "the same coordinate."), (1000.0, "another coordinate, 5.")])
def test_a_super_weight_may_write_the_largest_massive_activation_of_either_sign(value: float, words: str) -> None:
    weights = grid(layer=range(4), sequence=range(2)).assign(expert=-1, row=7, column=3, input=2.0, weight=-3.0)
    weights = weights.assign(written=[-50.0, -60.0, 5.0, 6.0, 7.0, 8.0, 99.0, 99.0], output=-40.0, share=0.5)
    massive = pd.DataFrame({"coordinate": [7, 5], "value": [-900.0, value], "is_massive": True})
    manifest = run_manifest()
    manifest["input"]["sequences"] = 2
    finding = by_name(Run(manifest, {"super_weights": weights, "massive": massive}))["super-weight"]
    assert (finding.value, finding.numbers["layer"], finding.numbers["written"]) == (0.5, 0, 55.0)
    assert finding.sentence.endswith(f"in 100% of the sequences; the largest massive activation is at {words}")


def test_residual_sinks_are_largest_in_one_layer_and_a_rotation_has_fewer_in_every_layer() -> None:
    spikes = pd.DataFrame({"layer": range(3), "largest_share": [0.2, 0.9, 0.1], "rotated_share": [0.01, 0.02, 0.04]})
    spikes = spikes.assign(norm_ratio=[3.0, 80.0, 70.0], cosine=1.0, cosine_of_others=0.5, step=["", "up", ""])
    findings = by_name(Run(run_manifest(), {"spikes": spikes}))
    assert (findings["residual-sinks"].value, findings["residual-sinks"].numbers) == (
        0.9,
        {"layer": 1, "rotated": 0.04},
    )
    assert (findings["spike"].value, findings["spike"].numbers["layer"]) == (80.0, 1)
