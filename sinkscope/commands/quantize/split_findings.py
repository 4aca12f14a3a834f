"""The findings of `quantize --prefix`: whether few tokens, coordinates, a prefix or a rotation take away the cost."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import counted
from sinkscope.quantization import settings
from sinkscope.quantization.prefix_cache import CACHE
from sinkscope.quantization.settings import ALL, BOTH, CARRIES, COORDINATES, COSTLY, FULL, NO_DRAW, TOKENS
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

TABLE = "quantization_split"
SPLIT, PREFIX, ROTATION = "Tokens or coordinates", "Prefix", "Rotation"
CHANCE = 0.05  # a prefix is better than random ones if at most this share of prefixes, itself included, is as good
NATS, PERPLEXITY = METRICS["cost"].text, METRICS["perplexity"].text


def measured(run: RunData) -> pd.DataFrame:
    """Return the settings without the random controls, by name."""
    table = run.tables[TABLE]
    return table[table["draw"] == NO_DRAW].set_index("setting")


def controls(run: RunData, setting: str) -> pd.DataFrame:
    table = run.tables[TABLE]
    return table[(table["setting"] == setting) & (table["draw"] != NO_DRAW)]


def findings(run: RunData) -> list[Finding]:
    """Return the findings; none for a run without --prefix."""
    if TABLE not in run.tables:
        return []
    return [_split(run), *_prefix(run), _rotation(run)]


def _split(run: RunData) -> Finding:
    table = measured(run)
    cost = table.loc[ALL]
    numbers = {name: table["share"][name] for name in (TOKENS, COORDINATES, BOTH)}
    about: dict[str, Any] = {"value": cost["cost"], "low": cost["cost_low"], "high": cost["cost_high"]}
    about |= {"threshold": CARRIES, "numbers": numbers, "is_headline": True}
    sentence = f"Quantizing everything costs {_interval(cost, 'cost', NATS)} nats per token"
    if cost["cost"] < COSTLY:
        return Finding("split", SPLIT, Outcome.ABSENT, sentence=f"{sentence}: too little to split.", **about)
    tokens, coordinates = counted(round(table["tokens"][TOKENS], 1), "token"), table["coordinates"][COORDINATES]
    parts = [
        f"sparing the outlier tokens ({tokens} of a sequence) takes away {_share(table, TOKENS)}, as many random "
        f"tokens {_range(run, TOKENS)}",
        f"sparing the {coordinates} largest coordinates of each tensor {_share(table, COORDINATES)}, random ones "
        f"{_range(run, COORDINATES)}",
        f"both together {_share(table, BOTH)}",
    ]
    outcome, answer = _answer(run)
    return Finding("split", SPLIT, outcome, sentence=f"{sentence}. {'; '.join(parts).capitalize()}: {answer}.", **about)


def _answer(run: RunData) -> tuple[Outcome, str]:
    """Return which entries carry most of the cost: an interval above CARRIES, and more than each random control."""
    table = measured(run)
    random = {name: controls(run, name)["share"].max() for name in (TOKENS, COORDINATES)}
    carries = {name: table["share_low"][name] >= CARRIES and table["share"][name] > random[name] for name in random}
    share = f"most of it (at least {CARRIES:.0%})"
    if all(carries.values()):
        return Outcome.PRESENT, f"either of them alone carries {share}"
    for name, entries in ((TOKENS, "tokens"), (COORDINATES, "coordinates")):
        if carries[name]:
            return Outcome.PRESENT, f"{share} is in few {entries}"
    if table["share_low"][BOTH] >= CARRIES:
        return Outcome.PARTLY, f"{share} is in both together, and not shown to be in one of them"
    if table["share_high"][BOTH] < CARRIES:
        return Outcome.ABSENT, "most of it is in neither"
    return Outcome.UNDECIDED, "these sequences do not decide where most of it is"


def _prefix(run: RunData) -> Iterator[Finding]:
    table, random = measured(run), controls(run, settings.PREFIX)
    found, given = table.loc[settings.PREFIX], run.manifest["quantization"]
    as_good = int((random["loss"] <= found["loss"]).sum())
    if found["share_low"] > 0:
        is_special = (1 + as_good) / (1 + len(random)) <= CHANCE
        as_much = f"random ones may help as much: {as_good} of {len(random)} have a perplexity as low"
        more = f"more than {len(random) - as_good} of {len(random)} random ones as long"
        outcome, verdict = (Outcome.CONFIRMED, more) if is_special else (Outcome.PARTLY, as_much)
        verdict = f"helps, {'and ' if is_special else 'but '}{verdict}"
    else:
        outcome, verdict = Outcome.ABSENT, "does not help" if found["share_high"] <= 0 else "is not shown to help"
    length = counted(len(given["prefix"]), "token")
    sentence = f"A prefix of {length}, {given['prefix_text']!r}, {verdict}. Perplexity with everything quantized: "
    sentence += f"{PERPLEXITY(table['perplexity'][ALL])} without it, {PERPLEXITY(found['perplexity'])} with it, "
    sentence += f"{np.exp(found['cost']):.3g} × full precision ({PERPLEXITY(table['perplexity'][FULL])}), with random "
    low, middle, high = (PERPLEXITY(random["perplexity"].quantile(at)) for at in (0.0, 0.5, 1.0))
    sentence += f"ones {low} to {high} (median {middle}); full precision with the same prefix "
    sentence += f"{PERPLEXITY(np.exp(found['full_loss']))}."
    about: dict[str, Any] = {"value": found["share"], "low": found["share_low"], "high": found["share_high"]}
    about |= {"numbers": {"prefix": tuple(given["prefix"]), "as_good": as_good, "draws": len(random)}}
    yield Finding("prefix", PREFIX, outcome, is_headline=True, sentence=sentence, **about)
    reason = given["without_cache"]
    where = f"Its keys and values were not saved: {reason}." if reason else f"Its keys and values are in `{CACHE}`."
    yield Finding("prefix-cache", PREFIX, sentence=where)


def _rotation(run: RunData) -> Finding:
    table = measured(run)
    if settings.ROTATION not in table.index:
        reason = run.manifest["quantization"]["without_rotation"]
        return Finding("rotation", ROTATION, sentence=f"The residual stream was not rotated: {reason}.")
    found = table.loc[settings.ROTATION]
    sentence = "A random Hadamard rotation of the residual stream, folded into the weights, takes away "
    sentence += f"{_share(table, settings.ROTATION)} of the cost: perplexity {PERPLEXITY(found['perplexity'])}."
    about = {"value": found["share"], "low": found["share_low"], "high": found["share_high"]}
    return Finding("rotation", ROTATION, sentence=sentence, **about)


def _interval(row: pd.Series, name: str, text: Any) -> str:
    return f"{text(row[name])} (95 % interval {text(row[f'{name}_low'])} to {text(row[f'{name}_high'])})"


def _share(table: pd.DataFrame, setting: str) -> str:
    return _interval(table.loc[setting], "share", "{:.0%}".format)


def _range(run: RunData, setting: str) -> str:
    shares = controls(run, setting)["share"]
    return f"{shares.min():.0%} to {shares.max():.0%}"
