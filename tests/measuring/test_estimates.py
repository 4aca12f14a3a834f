"""Numbers of one run on tables made by hand, in which they are known."""

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import SEQUENCES, analysis
from support.made_up_runs import by_sequence, grid

from sinkscope.measuring import estimates
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Sequences

MASSES = [[0.9, 0.1], [0.9, 0.9]]  # by layer and head: three heads have a sink


def sequences(**tables: pd.DataFrame) -> Sequences:
    return Sequences(analysis(tables))


def heads(masses: list[list[float]]) -> pd.DataFrame:
    return by_sequence({"window_mass": masses, "uniform_mass": 0.05}, layers=2, head=range(2))


def test_a_number_of_sink_heads_is_the_median_of_their_ratios() -> None:
    ratios = {"value_norm": [[0.2, 70.0], [0.3, 8.0]], "value_norm_later": [[2.0, 1.0], [1.0, 1.0]]}
    geometry = by_sequence(ratios, layers=2, head=range(2))
    estimate = estimates.in_sink_heads(
        sequences(attention_heads_by_sequence=heads(MASSES), geometry_by_sequence=geometry), "value_norm"
    )
    assert estimate.value == pytest.approx(0.3)  # of 0.1, 0.3 and 8
    assert estimate.note == "3 of 4 heads, those with a sink"


def test_the_clear_sink_rate_counts_the_heads_that_a_layer_has() -> None:
    table = heads(MASSES)
    table = table[(table["layer"] == 0) | (table["head"] == 0)]  # the second layer has one head
    assert estimates.clear_sink_rate(sequences(attention_heads_by_sequence=table)).value == pytest.approx(75)


def test_massive_activations_are_counted_in_the_layer_with_the_most_and_its_layers_have_them_at_position_0() -> None:
    rows = grid(layer=range(4), sequence=range(SEQUENCES), position=[0, 3], entry=range(2))
    at_first, half = rows["position"] == 0, rows["sequence"] < SEQUENCES // 2
    layer, entry = rows["layer"], rows["entry"]
    is_massive = ((layer == 1) & at_first & half) | ((layer == 2) & ~at_first)
    is_massive |= (layer == 3) & at_first & (rows["sequence"] < SEQUENCES // 2 - 1) & (entry == 0)
    run = sequences(massive=rows.assign(is_massive=is_massive))
    assert estimates.massive_layers(run).tolist() == [1]
    assert estimates.massive_count(run).value == 2.0


def test_the_second_half_of_an_odd_number_of_layers_has_the_middle_one() -> None:
    assert estimates.second_half(np.arange(5)).tolist() == [2, 3, 4]
    assert estimates.second_half(np.arange(4)).tolist() == [2, 3]


def test_alignment_of_later_positions_is_that_of_their_magnitudes() -> None:
    table = grid(layer=range(4), head=[-1, 0], position=range(16))
    signs = np.where(table["position"] % 2, 0.4, -0.2)
    aligned = table.assign(key_alignment=np.where(table["position"] == 0, 0.1 * table["layer"], signs))
    aligned.loc[aligned["head"] == 0, "key_alignment"] = 9.0
    first, later = (part.measure(sequences(query_bias=aligned)) for part in estimates.RUN_CLAIMS["N-2"].parts)
    assert first.value == pytest.approx((0.2 + 0.3) / 2)
    assert later.value == pytest.approx((6 * 0.4 + 5 * 0.2) / 11)


def test_the_slope_of_compression_is_also_given_without_position_0() -> None:
    norms = np.tile([1000.0, 1, 2, 4, 8], (4, 1)) * np.array([1, 3, 5, 7])[:, None]
    compress = np.where(np.arange(5) == 0, 1.0, 1 / norms)
    ratios = by_sequence({"input_norm": norms, "compress": compress}, position=range(5)).assign(branch="attn")
    (slope, _) = estimates.RUN_CLAIMS["GS-17"].parts
    estimate = slope.measure(sequences(gradient_ratio_by_sequence=ratios))
    x, y = np.log10(norms).ravel(), np.log10(compress).ravel()
    assert estimate.value == pytest.approx(np.polyfit(x, y, 1)[0])
    assert estimate.note.startswith("without position 0 -1.000")


def test_the_smallest_share_within_the_bound_decides() -> None:
    table = pd.DataFrame({"layer": [0, 0, 1], "sequence": [0, 1, 0], "bound_share": [1.0, 0.5, np.nan]})
    estimate = estimates.share_within_bound(sequences(equal_tokens=table.assign(bound_ratio=[0.2, 1.5, np.nan])))
    assert estimate.value == 0.5
    assert estimate.note == "2 pairs of layer and sequence; a ÷ bound ≤ 1.5"


def test_gradients_of_values_are_read_before_gates_only_in_layers_that_have_them() -> None:
    rows = [(0, "value", 1.0), (0, "raw_value", 2.0), (1, "value", 3.0), (1, "key", 4.0)]
    norms = estimates.before_valves(pd.DataFrame(rows, columns=["layer", "pathway", "grad_norm"]))
    assert [*zip(norms["layer"], norms["pathway"], norms["grad_norm"], strict=True)] == [
        (0, "value", 2.0), (1, "value", 3.0), (1, "key", 4.0),
    ]  # fmt: skip


def test_the_super_weight_is_of_an_early_layer() -> None:
    rows = grid(layer=range(4), sequence=range(SEQUENCES)).assign(expert=-1, row=7, column=3, input=1.0, output=1.0)
    rows = rows.assign(written=rows["layer"].map({0: 1.0, 1: 5.0, 2: 2.0, 3: 99.0}), weight=1.0)
    chosen, share = estimates.super_weight(sequences(super_weights=rows.assign(share=0.1 * rows["layer"])))
    assert (chosen["layer"], share.value) == (1, pytest.approx(0.1))


def test_outliers_are_counted_after_the_last_layer_and_copies_of_a_picture_once() -> None:
    last, before = [1.0, 1, 1, 9, 1, 1, 1, 1], [9.0, 9, 1, 1, 1, 1, 1, 1]
    pictures = pd.DataFrame({"sequence": np.repeat([0, 1], 4), "row": 0})
    table = pd.concat([pictures.assign(layer=0, norm=before), pictures.assign(layer=1, norm=last)])
    apart = estimates.outlier_share(RunData({}, {"encoder_patch": table}))
    assert (apart.value, apart.low, apart.high) == (0.125, 0.0, 0.25)
    looks = pd.DataFrame({"sequence": [0, 1], "thumbnail": "same"})
    alike = estimates.outlier_share(RunData({}, {"encoder_patch": table, "picture": looks}))
    assert (alike.value, alike.low, alike.high) == (0.125, -np.inf, np.inf)  # a single picture has no interval
