"""Intervals of what an arm does: of sequences in pairs, as a bootstrap written out by hand gives them."""

import numpy as np
import pandas as pd
import pytest
from support.figure_tables import grid, make_run

from sinkscope.figures import draw
from sinkscope.output.run import Run
from sinkscope.results.statistics import resamplings
from sinkscope.verdict.effects import interval, interval_by_layer

SEQUENCES, LAYERS = 20, 3


@pytest.fixture(scope="module")
def run() -> Run:
    """An arm that takes 0.2 of every sink rate, doubles every perplexity, and leaves the entries."""
    random = np.random.default_rng(0)
    before = grid(condition=["before"], layer=range(LAYERS), sequence=range(SEQUENCES), position=[0])
    before = before.assign(sink_rate=random.uniform(0.3, 1, len(before)), window_mass=0.5)
    after = before.assign(condition="arm", sink_rate=before["sink_rate"] - 0.2)
    loss = grid(condition=["before"], layer=[-1], sequence=range(SEQUENCES)).assign(predicted=7)
    loss["loss"] = random.uniform(2, 5, SEQUENCES)
    doubled = loss.assign(condition="arm", loss=loss["loss"] + np.log(2))
    massive = grid(condition=["before", "arm"], layer=range(LAYERS), sequence=range(SEQUENCES), position=[0])
    massive["value"] = -10.0 * massive["sequence"]
    arms = pd.DataFrame({"arm": ["before", "after"], "draw": -1})
    effect = grid(condition=["arm"], name=["arm"], layer=range(-1, LAYERS), metric=["sink_rate"], position=[0])
    effect = effect.merge(arms, how="cross").assign(value=0.5)
    tables = {"attention_by_sequence": [before, after], "loss_by_sequence": [loss, doubled], "massive": [massive]}
    plain = make_run(sequences=SEQUENCES)
    manifest = plain.manifest | {"command": "intervene", "arms": {"arm": {"watched": [0]}}, "draws": 0}
    return Run(manifest, {name: pd.concat(parts) for name, parts in tables.items()} | {"effect": effect})


def test_what_every_sequence_does_alike_is_known_exactly(run: Run) -> None:
    rate = run.tables["attention_by_sequence"].groupby("condition")["sink_rate"].mean()
    assert interval(run, "arm", "sink_rate", 0) == pytest.approx([rate["arm"]] * 2)
    loss = run.tables["loss_by_sequence"].groupby("condition")["loss"].mean()
    assert interval(run, "arm", "perplexity") == pytest.approx([np.exp(loss["arm"])] * 2)
    assert interval(run, "arm", "massive_magnitude") == pytest.approx([95.0, 95.0])


def test_what_differs_between_sequences_is_resampled(run: Run) -> None:
    table = run.tables["attention_by_sequence"].copy()
    arm = table["condition"] == "arm"
    table.loc[arm, "sink_rate"] = 0.1
    changed = Run(run.manifest, {"attention_by_sequence": table})
    before = table[~arm].pivot(index="sequence", columns="layer", values="sink_rate").to_numpy()
    means = resamplings(SEQUENCES) @ (0.1 - before) / SEQUENCES
    ends = np.quantile(means[1:].mean(1), [0.025, 0.975])
    assert interval(changed, "arm", "sink_rate", 0) == pytest.approx(before.mean() + ends)
    by_layer = interval_by_layer(changed, "arm", "sink_rate", 0)
    for layer in range(LAYERS):
        ends = before[:, layer].mean() + np.quantile(means[1:, layer], [0.025, 0.975])
        assert by_layer.loc[layer].tolist() == pytest.approx(ends)


def test_without_tables_by_sequence_there_is_none(run: Run) -> None:
    bare = Run(run.manifest, {"effect": run.tables["effect"]})
    assert interval(bare, "arm", "sink_rate", 0) is None
    assert interval(run, "another", "sink_rate", 0) is None
    assert interval(run, "arm", "sink_rate", 5) is None
    assert interval_by_layer(bare, "arm", "sink_rate", 0).empty


@pytest.mark.parametrize("name", ["effects", "effects-by-layer"])
def test_figures_say_what_their_bars_are(name: str, run: Run) -> None:
    (legend,) = draw(name, run).legends
    assert "change, 95 % over sequences" in [text.get_text() for text in legend.get_texts()]
