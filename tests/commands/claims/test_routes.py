"""The table `route`, from hand-made runs of `intervene`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.hand_made_runs import experiment

from sinkscope.commands.claims.arms import beyond_controls
from sinkscope.commands.claims.evidence import Evidence, Need
from sinkscope.commands.claims.routes import ROUTE_ROLES, RouteEffect, Routes, routes_of, routes_text
from sinkscope.commands.compare.side_by_side import compare
from sinkscope.output.run import Run
from sinkscope.results.run import RunData

NAME = "nullify-query-bias"
CONTROLS = {f"control {draw}": [0.6 + 0.002 * draw, 0.05] for draw in range(3)}


def cut(after: float, before: float = 0.6, name: str = NAME, controls: Mapping[str, Any] = CONTROLS) -> RunData:
    return experiment({"before": [before, 0.05], "after": [after, 0.05]} | dict(controls), name)


def routes(*runs: RunData) -> pd.DataFrame:
    return routes_of(Evidence.of(runs, ROUTE_ROLES)).set_index("route")


def named(run: RunData, model: str, **manifest: Any) -> Run:
    return Run(run.manifest | {"model": run.manifest["model"] | {"name": model}} | manifest, run.tables)


@pytest.mark.parametrize(
    ("run", "effect"),
    [
        (cut(0.4), RouteEffect.FALLS),
        (cut(0.2), RouteEffect.GOES),
        (cut(0.3), RouteEffect.FALLS),  # the interval of what is left spans a half
        (cut(0.6), RouteEffect.STAYS),
        (cut(0.9), RouteEffect.RISES),
        (cut(0.3, controls={"control 0": [0.6, 0.05]}), RouteEffect.UNDECIDED),
        (cut(0.3, controls={f"control {draw}": [0.2 * draw, 0.0] for draw in range(4)}), RouteEffect.STAYS),
        (cut(0.0, before=0.05), RouteEffect.NO_SINK),
    ],
)
def test_the_whole_interval_decides_against_the_spread_of_the_controls(run: RunData, effect: RouteEffect) -> None:
    assert routes(run).loc["query bias", "effect"] == effect


def test_the_numbers_are_those_of_the_claims() -> None:
    run = cut(0.3)
    row = routes(run).loc["query bias"]
    beyond = beyond_controls(Evidence.of([run], ROUTE_ROLES), Need("do", NAME))
    assert (row["beyond"], row["beyond_low"], row["beyond_high"]) == (beyond.value, beyond.low, beyond.high)
    assert row["beyond"] == pytest.approx(-30.2, abs=0.5)
    assert row["before"] == pytest.approx(60, abs=0.5)
    assert row["after_low"] < row["after"] < row["after_high"]
    assert row["control_low"] < 60 < row["control"] < row["control_high"]  # 60.0, 60.2 and 60.4
    assert row["draws"] == 3


def test_one_control_has_no_interval() -> None:
    controls = {draws: {name: CONTROLS[name] for name in list(CONTROLS)[:draws]} for draws in range(3)}
    said = [
        routes_text(routes_of(Evidence.of([cut(0.3, controls=own)], ROUTE_ROLES)))["query bias"].iloc[1]
        for own in controls.values()
    ]
    assert said[0].endswith(", no random controls")
    assert re.search(r", random controls \d\d\.\d$", said[1])
    assert re.search(r", random controls \d\d\.\d \[\d\d\.\d, \d\d\.\d\]$", said[2])


def test_the_note_of_a_route_is_the_reason_or_the_command() -> None:
    run = cut(0.3)
    table = routes(RunData(run.manifest | {"skipped": {"replace-epe": "its positions are rotary"}}, run.tables))
    assert tuple(table.loc["position vector", ["effect", "note"]]) == ("does not apply", "its positions are rotary")
    command = "sinkscope intervene MODEL --do zero-massive"
    assert tuple(table.loc["massive activation", ["effect", "note"]]) == ("not measured", command)


def test_each_edit_is_its_own_route() -> None:
    """Cutting a part of a route does not count as the route; p₀, which the first attention layer reads, is not EPE₀."""
    assert (routes(cut(0.3, name=f"{NAME}:layers=2"))["effect"] == RouteEffect.NOT_MEASURED).all()
    together = cut(0.3)
    together.manifest["arms"][NAME]["asked"].append("mask-sink")
    assert (routes(together)["effect"] == RouteEffect.NOT_MEASURED).all()
    epe, vector = cut(0.5, name="replace-epe:at=epe"), cut(0.3, name="replace-epe")
    assert routes(epe).loc["position vector", "effect"] == "not measured"
    rates = routes(epe, vector)["after"]
    assert rates[["position vector", "effective position"]].tolist() == pytest.approx([30, 50], abs=0.5)


def test_models_are_shown_side_by_side(tmp_path: Path) -> None:
    rotary = {"skipped": {NAME: "its queries have no bias: none at all"}}
    pair = named(cut(0.4), "org/learned"), named(cut(0.0, name="zero-massive"), "rotary", **rotary)
    compared = compare(*pair, out=tmp_path / "both")
    assert isinstance(compared, Routes)
    assert compared.table["model"].unique().tolist() == ["org/learned", "rotary"]
    assert {path.name for path in (tmp_path / "both").rglob("*.*")} == {
        "run.json", "routes.md", "route.parquet", "routes.png", "routes.pdf", "index.html",
    }  # fmt: skip
    written = pd.read_parquet(tmp_path / "both/tables/route.parquet")
    pd.testing.assert_frame_equal(written, compared.table)
    assert "diminishes (fig. 3b)" in (tmp_path / "both/routes.md").read_text()
