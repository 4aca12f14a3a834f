"""Claims of Attention Sinks Induce Gradient Sinks (GS)."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd

from sinkscope.commands.claims import over_seeds
from sinkscope.commands.claims.arms import NO_COST, onset, perplexity_ratio, rates_over_steps
from sinkscope.commands.claims.claim import Claim, Part, run_claim
from sinkscope.commands.claims.evidence import IDENTITIES, MAIN, NULL, Evidence, Need, Null
from sinkscope.commands.claims.over_seeds import (
    PERCENT,
    RESIDUAL,
    SINK_RATE,
    difference,
    metric,
    of_one,
    of_several,
    ratio,
    raw_residual,
    study_claim,
)  # fmt: skip
from sinkscope.commands.claims.scopes import causal, in_float32
from sinkscope.commands.claims.studies import PLAIN, StudyArm
from sinkscope.measuring import estimates
from sinkscope.measuring.estimates import SPIKE, before_valves, branch_ratios, gradients, later_positions
from sinkscope.measuring.observables.reductions import AFTER_FIRST, ALL_HEADS, LATER
from sinkscope.measuring.summary import uniform_mass
from sinkscope.results import statistics
from sinkscope.results.findings import SINK
from sinkscope.results.judgment import NotDefined, Test, above, at_least, at_most, below, between
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.sequences import Lacks, Sequences, table_of_run
from sinkscope.results.statistics import Estimate, bootstrap, exact, positive_jackknife, rank_correlation

MASKED, RESCALED = Need("gradient-do", "mask-sink"), Need("gradient-do-alone", "rescale-norm")
APART = 2.0  # times the sink mass of uniform attention


# --- the sink and its norm (figure 1)


def _more_at_first(by_layer: np.ndarray, least: float = 0.0) -> Estimate:
    """Return the share of layers with more at position 0 than at 1–15, and than `least`."""
    return bootstrap((by_layer[..., 0] > by_layer[..., AFTER_FIRST].max(-1).clip(least)).mean(1))


def _more_mass(evidence: Evidence) -> Estimate:
    """Compare in units of uniform causal attention, which favors position 0."""
    by_layer = estimates.attention(evidence.natural, "sink_mass")
    uniform = uniform_mass(evidence.natural.run.manifest["input"]["shortest"], by_layer.shape[-1])
    return _more_at_first(by_layer / uniform, least=APART)


def _higher_rate(evidence: Evidence) -> Estimate:
    estimates.sink_rate(evidence.natural)  # raises NotDefined
    return _more_at_first(estimates.attention(evidence.natural, "sink_rate"))


def _elevated(evidence: Evidence) -> Estimate:
    first, others = (estimates.norms(evidence.natural, "layer_in", column) for column in ("norm", "norm_after_first"))
    return bootstrap((first > others).mean(1))


def _top_two_layers(evidence: Evidence) -> Estimate:
    by_layer = np.sort(estimates.norms(evidence.natural, "mlp_out"), axis=1)
    if by_layer.shape[1] <= 4:
        raise NotDefined(f"two of {by_layer.shape[1]} layers have at least half of any sum")
    return bootstrap(by_layer[:, -2:].sum(1) / by_layer.sum(1))


def _co_occurrence(evidence: Evidence) -> Estimate:
    rates = estimates.attention(evidence.natural, "sink_rate")[0, :, 0]
    return rank_correlation(rates, estimates.norms(evidence.natural, "layer_in")[0], np.arange(len(rates)))


# --- gradients (figure 2)


def _of_gradients(pathway: str, number: Callable[[np.ndarray], np.ndarray]) -> Callable[[Evidence], Estimate]:
    """Return the measure of a number of the norms of gradients, which are means over layers, (R, positions)."""
    return lambda evidence: positive_jackknife(number(gradients(evidence.natural, pathway).mean(1)))


def _against_null(measure: Callable[[Sequences], Estimate], evidence: Evidence, role: Need, floor: float) -> Estimate:
    """Return a number ÷ the interval for one more draw of random weights, or ÷ `floor` if that is larger."""
    # The model is a single network, so it is compared with a single draw: the mean over draws becomes more precise with
    # their number, and any model would differ from it.
    estimate = measure(evidence.sequences(role))
    values = np.array([measure(draw.natural).value for draw in evidence.nulls])
    if not len(values):
        raise Lacks(f"a run on random weights: sinkscope claims {evidence.model}")
    null = statistics.one_more_factor(values)
    drawn = " to ".join(dict.fromkeys(f"{end:.1f}" for end in (values.min(), values.max())))
    note = f"{estimate.value:.1f} against {drawn} on random weights"
    if null.value < floor:  # attention of random weights may be far from uniform
        note, null = f"{note} and {floor:.1f} of uniform attention", exact(floor)
    return (estimate / null).against(1.0).over(note)


def _spike(pathway: str, evidence: Evidence, role: Need = MAIN) -> Estimate:
    uniform = evidence.natural.run.metric("uniform_gradient_ratio") if pathway == "value" else 0.0
    return _against_null(lambda run: estimates.gradient_ratio(run, pathway), evidence, role, uniform)


def _first_query(evidence: Evidence) -> Estimate:
    table = evidence.natural.table("gradient")
    measured = table[table["pathway"] == "query_measured"]["grad_norm"].mean()
    return exact(measured / np.median(gradients(evidence.natural, "query")[0].mean(0)[AFTER_FIRST]))


# --- theorems


def _share_that_holds(rows: pd.DataFrame, words: str) -> Estimate:
    """Return a share of heads or tokens, which are resampled."""
    if rows.empty:
        raise NotDefined("the bound applies to no layer of this model")
    means = statistics.weighted_means(rows["holds"].to_numpy(float), statistics.resamplings(len(rows)))
    return bootstrap(means).over(words)


def _theorem_one(evidence: Evidence) -> Estimate:
    rows = evidence.natural.table("gradient_check").query("position == 0")
    tight = (rows["measured"] / rows["upper_bound"]).median()
    return _share_that_holds(rows, f"median of measured ÷ upper bound {tight:.2g}")


def _theorem_two(evidence: Evidence) -> Estimate:
    rows = evidence.natural.table("norm_bound").dropna(subset=["holds"])
    return _share_that_holds(rows, f"measured ÷ bound {rows['tightness'].mean():.2g}")


def _column_strength(evidence: Evidence) -> Estimate:
    mass = evidence.natural.table("attention").query("position == 0").groupby(["layer", "kv_head"])["sink_mass"].mean()
    value = before_valves(evidence.natural.table("gradient")).query("pathway == 'value' and head >= 0")
    by_head = value.pivot(index=["layer", "head"], columns="position", values="grad_norm")
    ratio = by_head[0] / by_head.iloc[:, LATER].mean(axis=1)
    both = ratio.rename_axis(["layer", "kv_head"]).to_frame("ratio").join(mass)
    layers = both.index.get_level_values("layer").to_numpy()
    return rank_correlation(both["sink_mass"].to_numpy(), both["ratio"].to_numpy(), layers)


def _residual(pathway: str, evidence: Evidence) -> Estimate:
    """Return the median: where a head attends to one key alone, the gradient is a small difference of large numbers."""
    table = evidence.sequences(IDENTITIES).table("gradient_identity")
    residuals = table[table["pathway"] == pathway]["residual"].dropna()
    if residuals.empty:
        raise NotDefined("the model computes its logits in its own code, or has no softmax")
    return exact(float(residuals.median())).over(f"largest {residuals.max():.1e}")


# --- how a branch reshapes gradients (figure 3)


def _bloat_by_branch(evidence: Evidence) -> Estimate:
    attn, mlp = (branch_ratios(evidence.natural, "bloat", branch) for branch in ("attn", "mlp"))
    ratios = [np.nanmedian(x[..., 0] / np.nanmedian(later_positions(x), axis=-1), axis=1) for x in (attn, mlp)]
    return bootstrap(ratios[0] / ratios[1])


def _bloat_share_of_first(evidence: Evidence) -> Estimate:
    """Return position 0's share of the L largest points of L layers, so that the share can reach 1."""
    bloat = branch_ratios(evidence.natural, "bloat")
    replicates, layers, positions = bloat.shape
    order = np.argsort(-np.nan_to_num(bloat).reshape(replicates, -1), axis=1)[:, :layers]
    return bootstrap((order % positions == 0).mean(1)).against(1 / positions)


def _net_change(evidence: Evidence) -> Estimate:
    change = branch_ratios(evidence.natural, "change")[:, 1:]
    inside = np.where(np.isfinite(change), (change > 0.5) & (change < 2), np.nan)
    return bootstrap(np.nanmean(inside, axis=(1, 2)))


# --- under interventions


def _masked_ratios(evidence: Evidence, position: int) -> pd.Series:
    """Return the value-gradient ratio of a position by condition: before, masked, and its controls."""
    table = before_valves(table_of_run(evidence.run(MASKED), "gradient"))
    rows = table[(table["pathway"] == "value") & (table["head"] == ALL_HEADS)]
    norms = rows.groupby(["condition", "position"])["grad_norm"].mean().unstack()
    return norms[position] / norms.iloc[:, LATER].mean(axis=1)


def _with_first_masked(evidence: Evidence) -> Estimate:
    """Note what position 1 gets, since the sink may move there."""
    estimate, second = _spike("value", evidence, MASKED), _masked_ratios(evidence, position=1)
    return estimate.over(f"{estimate.note}; at position 1 {second[BEFORE]:.2g} → {second[evidence.label(MASKED)]:.2g}")


def _with_another_masked(evidence: Evidence) -> Estimate:
    ratios = _masked_ratios(evidence, position=0)
    drawn = ratios.reindex(evidence.controls(MASKED)).dropna().to_numpy()
    if not len(drawn):
        raise NotDefined(f"{evidence.label(MASKED)} has no random control on this model")
    return statistics.mean_of_controls(drawn / ratios[BEFORE])


def _inverse(evidence: Evidence) -> Estimate:
    (do,) = evidence.run(RESCALED).manifest["arms"][evidence.label(RESCALED)]["do"]
    options = dict(part.split("=") for part in do.partition(":")[2].split(","))
    layer, factor = int(options["layers"]), float(options.get("factor", 0.5))
    arms = [evidence.sequences(RESCALED, condition) for condition in (None, BEFORE)]
    after, before = (branch_ratios(arm, "compress")[:, layer, 0] for arm in arms)
    return bootstrap(factor * after / before).over(f"layer {layer}, factor {factor:g}")


# --- V-scale: an arm compared with a plain training or fine-tuning

VALVE = "vscale"
WITH_VSCALE = Need("arms", f"{PLAIN},{VALVE}")


def _largest_norm(site: str, arm: StudyArm) -> float:
    table = table_of_run(arm.run, "activation")
    return float(table[(table["site"] == site) & (table["position"] == 0)]["norm_mean"].max())


def _beside_others(site: str, arm: StudyArm) -> float:
    """Return the largest norm of position 0 ÷ the mean norm of positions 1–15 of that layer (GS figure 5)."""
    table = table_of_run(arm.run, "activation").query("site == @site")
    by_position = table.pivot(index="layer", columns="position", values="norm_mean")
    largest = by_position.loc[by_position[0].idxmax()]
    return float(largest[0] / largest.iloc[AFTER_FIRST].mean())


def _gradient_beside_others(arm: StudyArm) -> float:
    raw = arm.metric("raw_value_gradient_ratio")
    return metric("value_gradient_ratio")(arm) if np.isnan(raw) else raw


def _falls_more(arms: Mapping[str, StudyArm]) -> float:
    left = [_largest_norm(site, arms[VALVE]) / _largest_norm(site, arms[PLAIN]) for site in ("mlp_out", "attn_out")]
    return (1 - left[0]) - (1 - left[1])


# --- The two effects of V-scale: a valve on the gradient of position 0's values alone, and on the values alone

AT_FIRST, AMPLIFIED = "gradient-valve:position=0", "gradient-valve:position=0,factor=2"
ON_VALUES, FIXED_SCALE = "gradient-valve:acts=values", "vscale:learned=false"
AS_CONTROL = ",control=true"  # a valve's control, which changes the gradients of all other positions by as much
EFFECT = 0.05  # the smallest change of the growth that counts, as stated in the recipe before it was run


def _growth(arm: StudyArm) -> float:
    """Return the largest ‖h_out,0‖ at the end ÷ at step 0, since a valve on values changes it before any step."""
    norms = arm.by_step("first_norm")
    if not len(norms):
        raise Lacks("the norm by step: train with --probe activation")
    return float(norms.iloc[-1] / norms.iloc[0])


def _grows(
    id: str, reference: str, statement: str, role: Need, test: Test, arm: str, against: Mapping[str, str]
) -> Claim:
    """Return a claim on the growth of the norm with an arm ÷ with others. `against`: words → the other arm."""
    numbers = [
        (f"largest ‖h_out,0‖, end ÷ start, {words}", ratio(_growth, arm, other), test)
        for words, other in against.items()
    ]
    return study_claim(id, reference, statement, role, *numbers)


# --- the steps of a training: the gradient spike from the onset of the sink on

MEASURED_STEPS = Need("steps")


def _least_spike(evidence: Evidence) -> Estimate:
    """Return the smallest ratio over the steps from the onset on; the null is step 0, or else random weights."""

    def ratios_of(run: RunData) -> np.ndarray:
        return estimates.gradient_ratios(Sequences(run), "value")

    ratios = []
    for runs in evidence.studies[MEASURED_STEPS].steps:
        steps, rates = rates_over_steps(runs)
        if (first_sink := onset(rates)) is None:
            raise NotDefined(f"at no step is the sink rate above {SINK:g} %")
        first = runs[0] if steps[0] == 0 and first_sink > 0 else evidence.runs.get(NULL)
        if first is None:
            raise Lacks(f"step 0, or a run on random weights: sinkscope claims {evidence.model}")
        null = ratios_of(first)[0]
        ratios.append({step: ratios_of(runs[step]) / null for step in steps[first_sink:]})
    common = [step for step in ratios[0] if all(step in each for each in ratios)]
    if not common:
        raise Lacks("the seeds have no step in common from the onset on")
    if len(ratios) > 1:
        words = over_seeds.words_for(len(ratios))
        by_step = [over_seeds.mean_of_ratios(np.array([each[step][0] for each in ratios])) for step in common]
    else:
        words = "one training, interval over its sequences"
        by_step = [positive_jackknife(ratios[0][step]) for step in common]
    return statistics.least_of(by_step).over(f"steps from the onset on: {len(common)}; {words}")


_BOTH = (MAIN, NULL)
_OTHERS = "÷ that of positions 1–15"
_RATIO = "‖∇{0}₀‖ ÷ mean of positions 5–15 of all sequences together, ÷ the same on random weights{1}"
_OR_UNIFORM = " or under uniform attention, whichever is larger"

CLAIMS = (
    Claim("GS-1", "fig. 1", "Position 0 has a distinctly larger sink mass.",
        (Part("share of layers with sink mass ÷ uniform attention > 2 at position 0, and less at each of 1–15",
            _more_mass, at_least(0.5)),), scope=(causal,)),
    Claim("GS-2", "fig. 1", "Position 0 has a distinctly larger sink rate.",
        (Part("share of layers in which position 0 has a higher sink rate than any of 1–15",
            _higher_rate, at_least(0.5)),)),
    Claim("GS-3", "fig. 1", "The residual norm of position 0 is elevated.",
        (Part("share of layers whose input has a larger norm at position 0 than at positions 1–15",
            _elevated, at_least(0.5)),)),
    Claim("GS-4", "fig. 1", "Few MLP blocks write position 0's norm.",
        (Part("the top two layers' share of the sum of ‖mlp_out₀‖ over layers", _top_two_layers, at_least(0.5)),)),
    Claim("GS-5", "§3.1", "Sinks and massive activations co-occur.",
        (Part("rank correlation over layers of sink rate and ‖h₀‖", _co_occurrence, above(0.0)),), is_ours=False),
    Claim("GS-6", "fig. 2", "The value gradient spikes at position 0.",
        (Part(_RATIO.format("v", _OR_UNIFORM), partial(_spike, "value"), at_least(SPIKE)),), _BOTH, (causal,)),
    Claim("GS-7", "fig. 2", "The key gradient spikes at position 0.",
        (Part(_RATIO.format("k", ""), partial(_spike, "key"), at_least(SPIKE)),), _BOTH, (causal,)),
    run_claim("GS-8", Part("÷ the same on random weights",
            lambda e: _against_null(estimates.value_over_key, e, MAIN, 0.0), above(1.0)), needs=_BOTH),
    Claim("GS-9", "fig. 2", "Query gradients are flat.",
        (Part("max ÷ median of ‖∇q‖ over positions 1–15",
            _of_gradients("query", lambda x: x[:, AFTER_FIRST].max(1) / np.median(x[:, AFTER_FIRST], axis=1)),
            at_most(2.0)),)),
    Claim("GS-10", "fig. 2", "The query gradient at position 0 vanishes.",
        (Part("‖∇q₀‖ as autograd gives it ÷ median of positions 1–15", _first_query, at_most(1e-5), "{:.1e}"),),
        scope=(causal, in_float32), is_ours=False, set_against=Null.THEOREM),
    Claim("GS-11", "fig. 2", "Value gradients drop after position 0.",
        (Part("‖∇v₁‖ ÷ ‖∇v₀‖, means over layers",
            _of_gradients("value", lambda norms: norms[:, 1] / norms[:, 0]), at_most(0.5)),)),
    Claim("GS-12", "§3.2", "∇v_s = Σ_t a[t,s] g_t.",
        (Part("largest relative residual",
            lambda e: exact(e.natural.table("gradient_check")["identity_residual"].max()), at_most(1e-5), "{:.1e}"),),
        scope=(in_float32,), is_ours=False, set_against=Null.THEOREM),
    Claim("GS-33", "§3.2", "∇k_s = scaling · Σ_t a[t,s] g_t·(v_s − y_t) q_t.",
        (Part("relative residual, median over heads and positions", partial(_residual, "key"),
            at_most(RESIDUAL), "{:.1e}"),), (IDENTITIES,),
        scope=(in_float32,), is_ours=False, set_against=Null.THEOREM),
    Claim("GS-34", "§3.2", "∇q_t = scaling · Σ_s a[t,s] g_t·(v_s − y_t) k_s.",
        (Part("relative residual, median over heads and positions", partial(_residual, "query"),
            at_most(RESIDUAL), "{:.1e}"),), (IDENTITIES,),
        scope=(in_float32,), is_ours=False, set_against=Null.THEOREM),
    Claim("GS-13", "theorem 1", "The value gradient at position 0 is within theorem 1's bounds.",
        (Part("share of heads", _theorem_one, at_least(0.95)),), set_against=Null.THEOREM),
    Claim("GS-14", "theorem 1", "The stronger the sink column, the larger its value gradient.",
        (Part("rank correlation over heads of sink mass and ‖∇v₀‖ ÷ later", _column_strength, at_least(0.5)),)),
    Claim("GS-15", "§1, §4", "The gradient pressure is in the attention block.",
        (Part("bloat at 0 ÷ later of the attention branch ÷ the same of the MLP", _bloat_by_branch, above(1.0)),),
        is_ours=False),
    Claim("GS-16", "fig. 3", "The points with high bloat are position 0's.",
        (Part("position 0's share of the largest points (layer, position), as many as layers", _bloat_share_of_first,
            at_least(0.8)),), holds_untrained=True),
    run_claim("GS-17", holds_untrained=True),
    Claim("GS-18", "fig. 3", "The net change of gradients stays near 1.",
        (Part("share of (layer ≥ 1, position) with ½ < change < 2", _net_change, at_least(0.95)),)),
    Claim("GS-19", "theorem 2", "The norm's gradient gain is within theorem 2's bound.",
        (Part("share of tokens", _theorem_two, at_least(0.999), "{:.4g}"),), is_ours=False, set_against=Null.THEOREM),
    run_claim("GS-20"),
    Claim("GS-28", "title", "Without a sink there is no gradient sink.",
        (Part(f"value-gradient ratio with position 0 masked ÷ that on random weights{_OR_UNIFORM}",
            _with_first_masked, below(2.0)),
         Part("the same ratio without a mask", partial(_spike, "value"), at_least(SPIKE)),
         Part("the ratio with another position masked ÷ without a mask", _with_another_masked, at_least(0.5))),
        (*_BOTH, MASKED), (causal,)),
    Claim("GS-29", "§4", "The norm alone regulates gradients.",
        (Part("compress at 0 × the factor of the norm, after ÷ before, which RMSNorm itself keeps at 1", _inverse,
            between(0.9, 1.1), is_evidence=False),
         Part("perplexity ÷ before", lambda e: perplexity_ratio(e, RESCALED), between(0.95, 1.05))), (MAIN, RESCALED)),
    study_claim("GS-21", "fig. 5", "V-scale keeps the sink.", WITH_VSCALE,
        ("sink rate, V-scale − plain", difference(metric("sink_rate"), VALVE), at_least(-0.05)),
        ("sink rate of plain training in %", of_one(SINK_RATE, PLAIN, ends=PERCENT), above(SINK))),
    study_claim("GS-22", "fig. 5", "V-scale lowers position 0's norm, more than others'.", WITH_VSCALE,
        ("largest ‖h_out,0‖, V-scale ÷ plain", ratio(partial(_largest_norm, "layer_out"), VALVE), below(1.0)),
        (f"the same of ‖h_out,0‖ {_OTHERS}", ratio(partial(_beside_others, "layer_out"), VALVE), below(1.0)),
        is_ours=False),
    study_claim("GS-23", "fig. 5", "V-scale lowers position 0's MLP outputs, more than others'.", WITH_VSCALE,
        ("largest ‖mlp_out₀‖, V-scale ÷ plain", ratio(partial(_largest_norm, "mlp_out"), VALVE), below(1.0)),
        (f"the same of ‖mlp_out₀‖ {_OTHERS}", ratio(partial(_beside_others, "mlp_out"), VALVE), below(1.0)),
        is_ours=False),
    study_claim("GS-24", "§5.2", "MLP outputs fall more than attention outputs.", WITH_VSCALE,
        ("(1 − ratio) of mlp_out − of attn_out", of_several(_falls_more, PLAIN, VALVE), above(0.0)), is_ours=False),
    study_claim("GS-25", "§5.2", "V-scale costs nothing.", WITH_VSCALE,
        ("held-out loss, V-scale − plain", difference(metric("loss"), VALVE), at_most(NO_COST))),
    study_claim("GS-35", "§5.2", "V-scale's validation loss is slightly lower.", WITH_VSCALE,
        ("held-out loss, V-scale − plain", difference(metric("loss"), VALVE), below(0.0)), is_ours=False),
    study_claim("GS-36", "§5.1", "The gradient before V-scale is φ(r) u + 2C ÷ (r + C)² (v·u) v.", WITH_VSCALE,
        ("relative residual, median over heads and positions", of_one(raw_residual, VALVE), at_most(RESIDUAL)),
        is_ours=False, set_against=Null.THEOREM),
    study_claim("GS-26", "§5.1", "V-scale lowers the value gradient of position 0, more than others'.", WITH_VSCALE,
        ("raw value gradient at 0, V-scale ÷ plain", ratio(metric("value_gradient_norm"), VALVE), below(1.0)),
        ("the same ÷ that of positions 5–15", ratio(_gradient_beside_others, VALVE), below(1.0)), is_ours=False),
    _grows("GS-30", "title", "Less gradient at position 0's values makes its norm grow less.",
        Need("arms", f"{PLAIN},{AT_FIRST},{AT_FIRST + AS_CONTROL}"), below(1 - EFFECT), AT_FIRST,
        {"valve on the gradient ÷ plain": PLAIN, "the same ÷ its control": AT_FIRST + AS_CONTROL}),
    _grows("GS-31", "title", "More gradient at position 0's values makes its norm grow more.",
        Need("arms", f"{PLAIN},{AMPLIFIED},{AMPLIFIED + AS_CONTROL}"), above(1 + EFFECT), AMPLIFIED,
        {"doubled gradient ÷ plain": PLAIN, "the same ÷ its control": AMPLIFIED + AS_CONTROL}),
    _grows("GS-32", "§5", "V-scale acts by the gradient, more than by the values.",
        Need("arms", f"{PLAIN},{ON_VALUES},{FIXED_SCALE}"), below(1 - EFFECT), FIXED_SCALE,
        {"V-scale ÷ plain": PLAIN, "V-scale ÷ a valve on the values alone": ON_VALUES}),
    Claim("GS-27", "fig. 2", "The spike is there at every checkpoint.",
        (Part("value-gradient ratio ÷ null, smallest over steps from the onset on", _least_spike, at_least(SPIKE)),),
        (MEASURED_STEPS,)),
)  # fmt: skip
