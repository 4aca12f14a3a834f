"""Claims of Attention Sink Mechanisms Are Not Universal (NU). The paper counts layers and tokens from 1."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from sinkscope.commands.claims import arms
from sinkscope.commands.claims.arms import falls, had_a_sink, leaves
from sinkscope.commands.claims.claim import Claim, Part, of_run, run_claim
from sinkscope.commands.claims.evidence import Evidence, Need
from sinkscope.commands.claims.scopes import causal, learned_positions, query_bias, requires
from sinkscope.measuring.estimates import RUN_CLAIMS, second_half, sink_rates
from sinkscope.measuring.observables.query_bias import DELTA, NO_QUERY_BIAS
from sinkscope.results.findings import SINK, Published
from sinkscope.results.judgment import NotDefined, above, at_least, at_most, below, between
from sinkscope.results.papers import GPT2_MASSIVE, PRINTED
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.statistics import Estimate, bootstrap, exact, jackknife, mean_of_controls

NULLIFIED, COLUMNS = Need("do", "nullify-query-bias"), Need("do", "zero-key-columns")
NO_EMBEDDING = Need("do", "nullify-first-embedding")
# edits of the EPE after the first MLP, as NU defines it, rather than of the position vectors
REPLACED, EXCHANGED = Need("do", "replace-epe:at=epe"), Need("do", "transplant-epe:at=epe")
SCOPE = (causal, query_bias, learned_positions)


# --- scopes


def _without_its_mechanism(run: RunData) -> str | None:
    """Require a model without a query bias or without learned positions, unlike NU's own model."""
    reason = query_bias(run)
    if learned_positions(run) or reason == NO_QUERY_BIAS:
        return None
    unknown = f"whether its queries have a bias is not known: {reason}"
    return unknown if reason else "it has a query bias and learned positions"


_with_a_bos = requires(
    lambda run: run.manifest["input"]["token_zero"],
    "position 0 is no BOS but {}",
    lambda token: token.startswith("bos"),
)


# --- γ and the effective positional encodings


def _gamma_at_massive(evidence: Evidence) -> pd.DataFrame:
    """Return γ at massive coordinates of EPE_0, with its rank and width, and mean + 2 std of the layer."""
    table = evidence.natural.table("gamma")
    by_layer = table["gamma"].abs().groupby(table["layer"])
    usual = by_layer.transform("mean") + 2 * by_layer.transform("std", ddof=0)
    table = table.assign(is_large=table["gamma"].abs() > usual, rank=by_layer.rank(ascending=False))
    return table[table["is_massive_epe"]]


def _at_massive(of: Callable[[pd.DataFrame], float], evidence: Evidence, words: str = "") -> Estimate:
    rows = _gamma_at_massive(evidence)
    if rows.empty:
        raise NotDefined("EPE_0 has no massive coordinate")
    massive = sorted(rows["coordinate"].unique())
    return exact(of(rows)).over(f"coordinate{'s' * (len(massive) > 1)} {', '.join(map(str, massive))}{words}")


def _massive_coordinates(evidence: Evidence) -> Estimate:
    if _gamma_at_massive(evidence).empty:
        return exact(0).over("no gap among its entries")
    return _at_massive(lambda rows: rows["coordinate"].nunique(), evidence)


def _rank(evidence: Evidence) -> Estimate:
    width = evidence.natural.table("gamma")["coordinate"].nunique()
    return _at_massive(lambda rows: 100 * rows["rank"].median() / width, evidence, f" of {width}")


# --- the logit's four terms


def _share_of_delta(evidence: Evidence) -> Estimate:
    if "logit_terms_by_sequence" not in evidence.natural.run.tables:
        raise NotDefined("its queries and keys are not what its projections give, or its attention has a window")
    means, columns = partial(evidence.natural.means, "logit_terms_by_sequence"), ("at_first", "at_others")
    first, others = (means(column, ("layer", "term"))[:, 1:] for column in columns)
    delta = np.subtract(*(means(column, term=DELTA)[:, 1:] for column in columns))
    gap = (first - others).sum(-1)
    if not gap.shape[1]:
        raise NotDefined("it has one layer, which reads no EPE")
    if gap[0].mean() <= 0:
        return Estimate(np.nan).over(f"the logit of position 0 is no larger than others: gap {gap[0].mean():.2g}")
    by_layer = ", ".join(f"{100 * share:.0f}" for share in delta[0] / gap[0])
    return bootstrap(delta.mean(1) / gap.mean(1)).over(f"by layer, without the first: {by_layer} %")


# --- interventions


def _rate_after(evidence: Evidence) -> Estimate:
    before, after = arms.before_and_after(evidence, REPLACED)
    return bootstrap(after).over(f"before: {before[0]:.1f} %")


def _random_columns(evidence: Evidence) -> Estimate:
    before = sink_rates(evidence.sequences(COLUMNS, BEFORE))[0]
    rates = arms.control_rates(evidence, COLUMNS)
    if not len(rates) or not before:
        return Estimate(np.nan).over("no random controls" if before else "no sink before")
    return mean_of_controls(rates / before)


# --- open questions of the paper


def _first_order(evidence: Evidence) -> Estimate:
    table = evidence.natural.table("epe_by_group")
    by_position = table.pivot(index="group", columns="position", values="cosine").sort_index()
    at_first, others = by_position.iloc[0, 0], by_position.iloc[0, 1:].mean()
    return jackknife(by_position.mean(axis=1).to_numpy()).over(f"{at_first:.2f} at position 0, {others:.2f} at others")


def _rest_alignment(evidence: Evidence) -> Estimate:
    sequences = evidence.natural
    whole = second_half(sequences.means("epe_rest_by_sequence", "cosine_whole"))[0].mean()
    rest = second_half(sequences.means("epe_rest_by_sequence", "cosine")).mean(1)
    return bootstrap(rest).over(f"of h₀ itself {whole:.2f}")


def _rate_elsewhere(evidence: Evidence) -> Estimate:
    reasons = filter(None, (learned_positions(evidence.any_run), query_bias(evidence.any_run)))
    return bootstrap(sink_rates(evidence.natural)).over("; ".join(reasons))


def _gpt2(source: str, *values: tuple[float, str]) -> tuple[Published, ...]:
    return tuple(Published("GPT-2", value, setting, source) for value, setting in values)


CLAIMS = (
    run_claim("N-1", scope=SCOPE,
        published=_gpt2("NU fig. 1", (100.0, "Δ of its token 1, its layer 10, about"),
            (-140.0, "Δ of other tokens, its layer 10, about"))),
    run_claim("N-2", scope=SCOPE, published=_gpt2("NU fig. 2", (0.7, "its token 1, its layer 10, about"),
            (0.0, "other tokens, its layer 10, about"))),
    Claim("N-3", "fig. 6", "EPE₀ is massive at a few coordinates.",
        (Part("coordinates isolated by a gap", _massive_coordinates, at_least(1.0), "{:.0f}"),), scope=SCOPE,
        published=_gpt2("NU fig. 6", (2, "coordinates 138 and 447")), is_ours=False),
    Claim("N-4", "tables 1, 2", "γ is large where EPE₀ is massive.",
        (Part("share of layers and massive coordinates with |γ| above its layer's mean + 2 standard deviations",
            lambda e: _at_massive(lambda rows: rows["is_large"].mean(), e), at_least(0.5)),), scope=SCOPE,
        published=_gpt2("NU tables 1 and 2", (20 / 24, "12 layers, coordinates 138 and 447"),
            *((entry, f"|γ| at {coordinate}, its layer 7, against {PRINTED[7][0]}")
              for coordinate, entry in zip(GPT2_MASSIVE, PRINTED[7][1:], strict=True)))),
    Claim("N-5", "§4.1", "EPE₀ is massive exactly where γ has its largest entries.",
        (Part("rank of |γ| in its layer, in % of the coordinates, median over layers and massive coordinates",
            _rank, at_most(1.0)),), scope=SCOPE),
    Claim("N-6", "intervention 1", "Without b_Q the sink falls.",
        (falls(NULLIFIED), had_a_sink(NULLIFIED)), (NULLIFIED,), SCOPE),
    Claim("N-7", "intervention 2", "With the EPE of another position at position 0, the sink is gone.",
        (Part("sink rate at position 0 after, in %", _rate_after, below(1.0)), had_a_sink(REPLACED)),
        (REPLACED,), SCOPE),
    Claim("N-8", "intervention 3", "EPE₀ makes a sink of the position that it is moved to.",
        (leaves(EXCHANGED, at_least(0.5), position=1), had_a_sink(EXCHANGED)), (EXCHANGED,), SCOPE),
    Claim("N-9", "intervention 4", "The sink stays without the embedding of the BOS.",
        (leaves(NO_EMBEDDING, at_least(0.5)), had_a_sink(NO_EMBEDDING)), (NO_EMBEDDING,), (*SCOPE, _with_a_bos)),
    Claim("N-10", "intervention 5", "The sink falls without W_k's columns where EPE₀ is massive, not without others.",
        (falls(COLUMNS),
         Part("sink rate at position 0 without random columns ÷ before, mean over draws", _random_columns,
            at_least(0.5)),
         had_a_sink(COLUMNS)), (COLUMNS,), SCOPE),
    Claim("N-11", "§4.1", "Δ is the reason why the logits of position 0 are above the others.",
        (Part("Δ's part of the logit gap at position 0, means over all layers except the first", _share_of_delta,
            above(0.5)),), scope=SCOPE),
    Claim("N-12", "title", "There are sinks without a query bias or learned positions.",
        (Part("sink rate at position 0 in %", _rate_elsewhere, above(SINK)),), scope=(causal, _without_its_mechanism)),
    Claim("N-13", "§3.2", "EPE is the first-order effect of a position after the first layer.",
        (Part("cosine of EPE with the mean state after the first layer, mean over positions", _first_order,
            at_least(0.5)),), scope=SCOPE),
    Claim("N-14", "§4.2.2", "W_k EPE₀ is parallel to b_Q, and the rest of the state of position 0 is not.",
        (Part("cos(W_k(h₀ − EPE₀), b_Q), mean over the second half of layers", _rest_alignment, between(-0.2, 0.2)),
         of_run(RUN_CLAIMS["N-2"].parts[0])), scope=SCOPE),
)  # fmt: skip
