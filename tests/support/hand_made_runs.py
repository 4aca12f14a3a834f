"""Runs made by hand, with tables in which a claim's quantity is known."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sinkscope.commands.claims.claim import Judgment, judge
from sinkscope.commands.claims.evidence import MAIN, Evidence
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.results.findings import Outcome
from sinkscope.results.run import RunData
from support.made_up_runs import by_sequence

HOLDS, FAILS, INCONCLUSIVE = Outcome.HOLDS, Outcome.FAILS, Outcome.INCONCLUSIVE
NOT_APPLIES, UNMEASURED, FEW_SEEDS = Outcome.DOES_NOT_APPLY, Outcome.NOT_MEASURED, Outcome.NOT_ENOUGH_SEEDS
SEQUENCES = 40
TOKEN_ZERO = {"random": "random token", "repeated": "repeated token"}  # drawn without a BOS before them
# `input` of a text with a BOS, and of one without
BOS = {"sequences": SEQUENCES, "token_zero": "bos <s> (id 1)"}
NO_BOS = {"sequences": SEQUENCES, "token_zero": "first text token"}


def judged(claim: str, *runs: RunData) -> Judgment:
    return judge(CLAIMS[claim], Evidence.of(runs, [MAIN, *CLAIMS[claim].reads]))


def manifest(condition: str = "natural", command: str = "analyze", **entries: Any) -> dict[str, Any]:
    return {
        "command": command, "condition": condition, "dtype": "float32", "not_measured": {},
        "config": {"epsilon": 0.3, "seq_len": 64, "window": 64},
        "model": {"name": "made", "weights": "trained"}, "family": family("learned"),
        "input": {"sequences": SEQUENCES, "token_zero": TOKEN_ZERO.get(condition, "bos <s> (id 1)")},
    } | entries  # fmt: skip


def family(positions: str, **entries: Any) -> dict[str, Any]:
    return {"positions": positions, "causal": True, "layer_positions": None, "kinds": None} | entries


def analysis(tables: Mapping[str, pd.DataFrame], condition: str = "natural", **entries: Any) -> RunData:
    return RunData(manifest(condition, **entries), tables)


def experiment(rates: Mapping[str, Sequence[float]], name: str, condition: str = "natural", **entries: Any) -> RunData:
    """Return a run with an arm and the unchanged model.

    `rates`: "before", "after" and "control 0", … → sink rates at positions 0, 1, …, the same in all layers.
    """
    parts = []
    for condition_of, by_position in rates.items():
        table = by_sequence({"sink_rate": by_position}, noise=0.01, position=range(len(by_position)))
        label = {"before": "before", "after": name}.get(condition_of, f"{name} {condition_of}")
        parts.append(table.assign(condition=label))
    draws = [[name]] * sum(part.startswith("control") for part in rates)
    arms = {name: {"asked": [name], "do": [name], "watched": [0, 1], "controls": draws}}
    return RunData(
        manifest(condition, "intervene", arms=arms, **entries),
        {"attention_by_sequence": pd.concat(parts, ignore_index=True)},
    )
