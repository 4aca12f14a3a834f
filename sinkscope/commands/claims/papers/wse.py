"""Claims of When Attention Sink Emerges in Language Models (WSE)."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np

from sinkscope.commands.claims import arms, over_seeds, scopes, studies
from sinkscope.commands.claims.arms import LARGE_NORM, NO_COST, falls, had_a_sink, leaves
from sinkscope.commands.claims.claim import HAS_SINK_HEADS, Claim, Part, of_run, of_sink_heads, run_claim
from sinkscope.commands.claims.evidence import MAIN, NATURAL, POLICY_KINDS, RANDOM, REPEATED, Evidence, Need, Null
from sinkscope.commands.claims.over_seeds import (
    HAS_SINK,
    PERCENT,
    SINK_RATE,
    difference,
    metric,
    of_one,
    of_study,
    over_levels,
    study_claim,
)
from sinkscope.commands.claims.scopes import causal, equal_tokens_stay_equal, requires, some_positions
from sinkscope.commands.claims.studies import PLAIN, ClaimStudy, StudyArm
from sinkscope.errors import counted
from sinkscope.measuring import estimates
from sinkscope.measuring.estimates import RUN_CLAIMS, equal_tokens, massive_layers, norm_ratios, sink_rates
from sinkscope.measuring.observables.equal_tokens import CLOSED_FORMS
from sinkscope.measuring.observables.massive import THRESHOLD
from sinkscope.measuring.summary import clear_sinks
from sinkscope.models.varied_llama import MODEL_TYPE
from sinkscope.results import statistics
from sinkscope.results.findings import SINK, Published
from sinkscope.results.judgment import NotDefined, above, at_least, at_most, below, between
from sinkscope.results.metrics import is_sink, lacks_rate
from sinkscope.results.papers import SINK_RATES, WSE_TABLE_1, published, published_rates
from sinkscope.results.run import WITH, WITHOUT, RunData
from sinkscope.results.sequences import Lacks, Sequences, table_of_run
from sinkscope.results.statistics import Estimate, bootstrap, exact, least_of, mean_of_runs, rank_correlation
from sinkscope.results.trainings import UNTOUCHED
from sinkscope.retrofits import make_retrofit
from sinkscope.retrofits.register_tokens import RegisterTokens

OTHER_LENGTHS = {length: Need("length", str(length)) for length in (16, 32, 128)}  # and the length of the run
EPSILON, AROUND = 0.3, (0.2, 0.4)
OTHER_DOMAINS = tuple(Need("domain", name) for name in ("code", "documentation"))  # in addition to natural text

ON_REPEATED = tuple(rate for rate in published_rates("repeated") if rate.value > 0)
NONE_ON_REPEATED = tuple(rate for rate in published_rates("repeated") if rate.value == 0)


# --- sink rates on several inputs: all inputs of a comparison have the same BOS policy


def _policy_roles(inputs: tuple[str, ...], policies: Iterable[str] = POLICY_KINDS) -> tuple[Need, ...]:
    return tuple(Need(POLICY_KINDS[policy], name) for policy in policies for name in inputs)


def _both_policies(evidence: Evidence, *inputs: str) -> str:
    """Return «with a BOS text 79.9, random 79.2 %; without text 0.0, random 0.0 %», for policies with all inputs."""
    parts = []
    for policy, words in ((WITH, "with a BOS"), (WITHOUT, "without")):
        roles = _policy_roles(inputs, (policy,))
        if all(evidence.has(role) for role in roles):
            rates = (f"{sink_rates(evidence.sequences(role))[0]:.1f}" for role in roles)
            names = ("text" if name == NATURAL else name for name in inputs)
            parts.append(f"{words} {', '.join(map(' '.join, zip(names, rates, strict=True)))} %")
    return "; ".join(parts)


_AT_FIRST = replace(
    of_run(RUN_CLAIMS["W-1"].parts[0]),
    measure=lambda evidence: estimates.sink_rate(evidence.natural).over(_both_policies(evidence, NATURAL)),
)


def _on_drawn(drawn: str, evidence: Evidence, policy: str = "", as_share: bool = True) -> Estimate:
    """Return the sink rate on drawn tokens, as a share of that on text unless told otherwise, under one BOS policy.

    The default policy is that of the model's own text. Raises NotDefined if there is no sink on text.
    """
    policy = policy or evidence.runs[MAIN].bos
    text, other = _policy_roles((NATURAL, drawn), (policy,))
    for role in (text, other):
        if not evidence.has(role):
            raise NotDefined(reason) if (reason := evidence.inapplicable(role)) else Lacks(evidence.command(role))
    words, before = _both_policies(evidence, NATURAL, drawn), estimates.sink_rate(evidence.sequences(text))
    if before.value <= SINK:
        raise NotDefined(f"its text has no sink {policy} a BOS, which this claim is about ({words})")
    after = bootstrap(sink_rates(evidence.sequences(other)))
    return (after / before if as_share else after).over(words)


# --- the geometry of a sink (figure 2)


def _norm_in_massive_layers(evidence: Evidence) -> Estimate:
    ratios, layers = norm_ratios(evidence.natural, "layer_out"), massive_layers(evidence.natural)
    if not len(layers):
        raise NotDefined("no layer has massive activations at position 0")
    return bootstrap(np.median(ratios[:, layers], axis=1)).over(f"{len(layers)} layers")


def _angle(evidence: Evidence) -> Estimate:
    chosen, note = estimates.sink_heads(evidence.natural)
    of_heads = partial(estimates.by_head, evidence.natural, "geometry_by_sequence")
    return bootstrap((of_heads("qk_cosine") > of_heads("qk_cosine_later"))[:, chosen].mean(1)).over(note)


def _early_blocks(evidence: Evidence) -> Estimate:
    estimates.sink_rate(evidence.natural)  # raises NotDefined
    by_layer = 100 * estimates.attention(evidence.natural, "sink_rate")[..., 0]
    early = max(1, by_layer.shape[1] // 4)
    return bootstrap(by_layer[:, :early].mean(1) - by_layer[:, early:].mean(1))


# --- domains and lengths of texts


def _domains(evidence: Evidence) -> Estimate:
    roles = (MAIN, *OTHER_DOMAINS)
    rates = [bootstrap(sink_rates(evidence.sequences(role))) for role in roles]
    note = ", ".join(f"{role.of or NATURAL} {rate.value:.1f}" for role, rate in zip(roles, rates, strict=True))
    over_seeds.with_a_sink(np.array([[rate.value for rate in rates]]))
    return statistics.range_of([first - second for first, second in combinations(rates, 2)]).over(note)


def _by_length(evidence: Evidence, *epsilons: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log₂ T (lengths,), and the sink rate in percent (R, ε, lengths), with windows of T tokens.

    It is NaN where uniform attention alone exceeds ε.
    """
    config, rates = evidence.natural.run.manifest["config"], []
    roles = ({config["seq_len"]: MAIN} if config["window"] == config["seq_len"] else {}) | OTHER_LENGTHS
    for sequences in map(evidence.sequences, roles.values()):
        read = partial(sequences.values, "attention_heads_by_sequence", by=("layer", "head"))
        mass, uniform = read("window_mass"), read("uniform_mass")
        has_rate = np.stack([np.isfinite(mass) & ~lacks_rate(uniform, epsilon) for epsilon in epsilons], axis=-1)
        sinks = np.stack([is_sink(mass, epsilon) for epsilon in epsilons], axis=-1) & has_rate
        with np.errstate(invalid="ignore"):
            shares = sinks.sum((1, 2)) / has_rate.sum((1, 2))
        rates.append(100 * statistics.weighted_means(shares, sequences.weights))
    return np.log2(list(roles)), np.stack(rates, axis=-1)


def _slope(evidence: Evidence) -> Estimate:
    x, rates = _by_length(evidence, EPSILON)
    has_rate = np.isfinite(rates[0, 0])
    if has_rate.sum() < 2 or rates[0, 0, has_rate].max() <= SINK:
        raise NotDefined(f"at no length is a sink rate above {SINK:g} %")
    return bootstrap(over_seeds.slope_on(x[has_rate], rates[:, 0, has_rate]))


def _steeper(evidence: Evidence) -> Estimate:
    """Return the slope of log₂ sink rate at the larger ε − at the smaller, over lengths with a sink at both."""
    # The scale is logarithmic because, in points, a smaller rate could lose less only because it is smaller.
    x, rates = _by_length(evidence, *AROUND)
    has_sink = (rates[0] > SINK).all(axis=0)
    words = "; ".join(f"ε = {epsilon:g}: {', '.join('–' if np.isnan(rate) else f'{rate:.1f}' for rate in by_length)} %"
                      for epsilon, by_length in zip(AROUND, rates[0][:, np.argsort(x)], strict=True))  # fmt: skip
    if has_sink.sum() < 2:
        raise NotDefined(f"at fewer than two lengths a sink is left at both ε, which is a floor ({words})")
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = over_seeds.slope_on(x[has_sink], np.log2(rates[..., has_sink]))
    return bootstrap(slopes[:, 1] - slopes[:, 0]).over(words)


# --- repeated tokens: the propositions, and table 7

NO_POSITIONS, RELATIVE, ALIBI = CLOSED_FORMS
REPLACED, EXCHANGED = Need("repeated-do", "replace-epe"), Need("repeated-do", "transplant-epe")
TEXT, ALONE = _policy_roles((NATURAL, REPEATED), (WITHOUT,))  # equal tokens must not have a BOS before them
REPEATED_TOKENS = "T = 64 and ε = 0.3, repeated tokens"


def _largest_of(column: str, evidence: Evidence, kind: str | None = None) -> Estimate:
    """Return the largest entry of a column over layers (if given, with one kind of positions). Raises NotDefined."""
    table = equal_tokens(evidence.sequences(ALONE))
    rows = (table if kind is None else table[table["positions"] == kind]).dropna(subset=[column])
    if not len(rows):
        raise NotDefined("a further term in its softmax's denominator takes part of the weight")
    return exact(rows[column].max()).over(counted(rows["layer"].nunique(), "layer"))


def _all_massive(evidence: Evidence) -> Estimate:
    equal_tokens(evidence.sequences(ALONE))
    rate = sink_rates(evidence.sequences(TEXT))[0]
    if rate <= SINK:
        raise NotDefined(f"its text has no sink without a BOS that could be dispersed ({rate:.1f} %)")
    layers = massive_layers(evidence.sequences(TEXT))
    if not len(layers):
        raise NotDefined(f"no layer has massive activations (above {THRESHOLD:.0f}) at position 0 without a BOS")
    repeated = estimates.norms(evidence.sequences(ALONE), "layer_out", "norm_smallest")
    natural = estimates.norms(evidence.sequences(TEXT), "layer_out")
    ratios = {layer: bootstrap(repeated[:, layer]) / bootstrap(natural[:, layer]) for layer in layers}
    weakest = min(ratios, key=lambda layer: ratios[layer].value)
    median = float(np.median([ratio.value for ratio in ratios.values()]))
    token = evidence.run(TEXT).manifest["input"]["token_zero"]
    note = f"layer {weakest}; median over {len(layers)} layers {median:.3g}; h_0 is of {token}"
    return least_of(list(ratios.values())).over(note)


_DIFFERENCE = "largest |a[t,s] − {0}| over layers, heads, queries and keys"


# --- models whose norms follow the residual sum (§7.2)


_post_norm = requires(
    lambda run: run.manifest["family"].get("wiring"),
    "its norms do not follow the residual sum: its wiring is {}",
    lambda wiring: wiring == "post-norm",
)


# --- related models: sizes of a family, a chat model and its base

ALIKE_RATES = 5.0  # points, as for domains of text (W-19); one of the four pairs of the paper differs by more
BASES = ("Mistral-7B", "LLaMA2-7B", "LLaMA2-13B", "LLaMA3-8B")


def _with_size(study: ClaimStudy, on_task: bool = False) -> Estimate:
    form = "{:.3g} M {:.3f}" if on_task else "{:.3g} M {:.1f} %"
    counts = np.array([studies.parameters(run) for run in study.runs.values()])
    rates = [sink_rates(Sequences(run))[0] for run in study.runs.values()]
    numbers = np.array(list(study.scores.values()) if on_task else rates)
    words = ", ".join(form.format(count / 1e6, number) for count, number in zip(counts, numbers, strict=True))
    return rank_correlation(counts, numbers).over(f"{words}; interval over models")


def _against_base(study: ClaimStudy) -> Estimate:
    base, chat = study.runs.values()
    before, after = sink_rates(Sequences(base)), sink_rates(Sequences(chat))
    over_seeds.with_a_sink(np.array([[before[0], after[0]]]))
    same = base.manifest["input"].get("sha256") == chat.manifest["input"].get("sha256")
    change = bootstrap(after - before) if same else bootstrap(after) - bootstrap(before)
    return change.over(f"{before[0]:.1f} → {after[0]:.1f} %")


_tuned_to_chat = requires(lambda run: studies.base_of(run.model), "its name does not say that it was tuned for chat")


# --- models with other masks or positions (§6, §7.1)

FAR_BELOW = 0.1  # a third of ε = 0.3: uniform attention over 16 tokens gives 0.0625
WSE_SCHEMES = ("none", "absolute", "learned", "relative", "alibi", "rotary")  # WSE table 3


def _least_of_all(schemes: np.ndarray, rates: np.ndarray) -> Estimate:
    lacking = [scheme for scheme in WSE_SCHEMES if scheme not in schemes]
    if lacking:
        raise Lacks(f"no training has position_scheme={lacking[0]}")
    return least_of([over_seeds.mean_over_seeds(each, PERCENT) for each in rates[:, np.isin(schemes, WSE_SCHEMES)].T])


_prefix_lm = requires(lambda run: run.manifest["family"].get("prefix"), f"it is no prefix LM ({MODEL_TYPE} can be one)")
_windowed = requires(lambda run: run.manifest["model"].get("sliding_window"), "it has no sliding window")


def _within_prefix(evidence: Evidence) -> Estimate:
    """Return the share of sinks in the prefix, among keys with enough queries; resampled by sequence."""
    prefix = evidence.any_run.manifest["family"]["prefix"]
    sequences, sinks = evidence.natural, clear_sinks(evidence.natural.table("sink_positions"))
    if sinks.empty:
        raise NotDefined("it has no sink at any position with enough queries")
    count = sequences.weights.shape[1]
    within = sinks[sinks["position"] < prefix]
    every, inside = (np.bincount(rows["sequence"], minlength=count) for rows in (sinks, within))
    return bootstrap((sequences.weights @ inside) / (sequences.weights @ every))


# --- trainings with other beginnings of blocks (§5)

RANDOM_TOKENS = Need("factor", "random-tokens")


def _rate_at(run: RunData, position: int) -> float:
    table = table_of_run(run, "attention_by_sequence")
    rows = table[table["position"] == position]
    if rows.empty:
        raise Lacks(f"a run reports {position} positions or fewer: --positions {position + 1}")
    return 100 * float(rows["sink_rate"].mean())


@of_study
def _rise_within(study: ClaimStudy, *places: tuple[int, int], names: tuple[studies.Level, ...]) -> Estimate:
    """Return the second − the first of two rates, each for a number of random tokens and a position. Raises Lacks."""
    for count, _ in places:
        if count not in study.by_level:
            raise Lacks(f"no training has {count} random tokens at the beginning of its blocks")
    seeds = over_seeds.common_seeds(study)
    by_seed = [[_rate_at(study.by_level[count][seed], position) for count, position in places] for seed in seeds]
    rates = over_seeds.with_a_sink(np.array(by_seed))
    return mean_of_runs(rates[:, 1] - rates[:, 0]).over(over_seeds.by_level(study, names, rates))


@of_study
def _at_fixed(study: ClaimStudy, of: Callable[[RunData, int], float], ends: over_seeds.Ends = None) -> Estimate:
    """Return the smallest, over levels, of a number computed from each run and the position k of its fixed token."""
    seeds, levels = over_seeds.common_seeds(study), study.by_level
    numbers = np.array([[of(runs[seed], int(level)) for level, runs in levels.items()] for seed in seeds])
    smallest = least_of([over_seeds.mean_over_seeds(each, ends) for each in numbers.T])
    return smallest.over(over_seeds.by_level(study, levels, numbers))


def _above_others(run: RunData, position: int) -> float:
    table = table_of_run(run, "attention_by_sequence")
    others = table[table["position"] != position].groupby("position")["sink_rate"].mean()
    return _rate_at(run, position) - 100 * float(others.max())


# --- plain trainings that differ in one setting (§4 to §7)

RATE = Need("factor", "learning-rate")
GOOD_DECAYS, LARGE_DECAY = (0.1, 2.0), 5.0


def _among(chosen: np.ndarray, rates: np.ndarray, what: str) -> np.ndarray:
    if not chosen.any():
        raise Lacks(f"no training has {what}: sinkscope train --weight-decay W")
    return rates[:, chosen]


def _at_large_decay(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    large = _among(levels >= LARGE_DECAY, rates, f"weight decays of {LARGE_DECAY:g} or more")
    return over_seeds.largest_rate(levels, large)


def _best_decay(levels: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """(seeds,): the highest sink rate at the weight decays that were best in the paper − at all others."""
    # The decay with the highest rate is chosen on the other seeds (on the same seed if there is one): the largest of
    # several levels of one seed would exceed the largest of fewer levels by chance.
    good = (levels >= GOOD_DECAYS[0]) & (levels <= GOOD_DECAYS[1])
    inside = _among(good, rates, f"weight decays from {GOOD_DECAYS[0]:g} to {GOOD_DECAYS[1]:g}")
    highest = []
    for part in (inside, _among(~good, rates, "other weight decays")):
        others = part.sum(0) - part if len(part) > 1 else part
        highest.append(np.take_along_axis(part, others.argmax(1)[:, None], 1)[:, 0])
    return highest[0] - highest[1]


def _check_windows(study: ClaimStudy) -> None:
    """Raise Lacks if a window is shorter than the average of the sink rate: some queries cannot see the first token."""
    smallest = min(map(float, study.by_level))
    counted = max(run.manifest["config"]["window"] for runs in study.by_level.values() for run in runs.values())
    if smallest < counted:
        raise Lacks(
            f"the sink rate is an average over {counted} queries, of which a sliding window of {smallest:g} tokens "
            f"lets only the first {smallest:g} see the first token: --window {smallest:g}"
        )


POINTS = "slope of the sink rate on log₂ of the learning rate, in points"
RANGE_OF_RATES = "largest difference of two levels, in points"


# --- the steps of a training

NONE = 1.0  # percent: a lower rate does not count as a sink


def _rise_over_steps(steps: list[int], rates: np.ndarray) -> tuple[np.ndarray, str]:
    first = arms.onset(rates)
    words = f"first above {SINK:g} % at step {steps[first]}" if first is not None else f"never above {SINK:g} %"
    return rates[:, -1] - rates[:, 0], words


# steps and sink rates (R, steps) → (R,) and words
OfSteps = Callable[[list[int], np.ndarray], tuple[np.ndarray, str]]


@of_study
def _over_steps(study: ClaimStudy, of: OfSteps, ends: over_seeds.Ends = None) -> Estimate:
    """Return a number over seeds, or over sequences if a single training was measured, as for any model."""
    numbers = [of(*arms.rates_over_steps(runs)) for runs in study.steps]
    numbers += [of(list(rates), np.array([list(rates.values())])) for rates in study.logged]
    counts = Counter(words for _, words in numbers)
    words = ", ".join(f"{each} ({n} of {len(numbers)})" if len(counts) > 1 else each for each, n in counts.items())
    if len(study.steps) == 1:
        return bootstrap(numbers[0][0]).over(f"{words}; one training, interval over its sequences")
    seeds = over_seeds.with_setting(study, over_seeds.words_for(len(numbers)))
    return over_seeds.mean_over_seeds(np.array([values[0] for values, _ in numbers]), ends).over(f"{words}; {seeds}")


# --- trained sink tokens and biases, to which the sink moves or not (§7)

TOKEN, BIAS, BIASES, VALUE = RegisterTokens.name, "key-bias:value=zero", "key-bias:value=learned", "value-bias"
WITH_TOKEN, WITH_BIAS, WITH_BIASES, WITH_VALUE = (
    Need("train", f"{PLAIN},{arm}") for arm in (TOKEN, BIAS, BIASES, VALUE)
)
# v* = m·e₁ of table 5, by m
FIXED = {0.0: BIAS} | {float(norm): f"key-bias:value=axis,norm={norm}" for norm in (1, 5, 20)}


def _points_moved(arm: StudyArm) -> float:
    """Return S* − S₀ in points. S₀ is the rate of the text's first token, which follows the register tokens."""
    registers = int(getattr(make_retrofit(arm.method, arm.parameters), "count", 0))
    table = table_of_run(arm.run, "attention_by_sequence")
    first = table[table["position"] == registers]["sink_rate"]
    if first.empty:
        raise Lacks(f"the run of {arm.label} reports {registers} positions or fewer: --positions {registers + 1}")
    outside = metric("sink_rate_outside")(arm) if "attention_outside" in arm.run.tables else 0.0
    return 100 * (outside - float(first.mean()))


def norm_ratio(arm: StudyArm) -> float:
    table = arm.run.tables["summary"]
    return float(table[(table["metric"] == "norm_ratio") & (table["layer"] >= 0)]["value"].max())


LARGE_NORMS = ("token of a large norm: that of position 0 ÷ others", norm_ratio, LARGE_NORM)
_takes_sink = partial(of_one, of=_points_moved, null=PLAIN, where=HAS_SINK)


# --- other attention operations than softmax (§7.4); their sink rates are of the proxy |sim| ÷ Σ|sim|

OPERATION = "operation:kind="
SIGMOID = f"{OPERATION}sigmoid"
WITHOUT_SUM = {"sigmoid": SIGMOID, "ELU + 1": f"{OPERATION}elu", "identity": f"{OPERATION}identity",
               "MLP kernel": f"{OPERATION}mlp-kernel"}  # fmt: skip
WITH_SUM = {"sigmoid": f"{OPERATION}sigmoid-normalized", "ELU kernel": f"{OPERATION}elu-kernel"}
# Z = Σ/α of table 14, by α
BY_ALPHA = {1.0: PLAIN} | {alpha: f"{OPERATION}softmax,factor={alpha:g}" for alpha in (2.0, 0.2, 0.1, 0.05)}
ONE = Need("train", f"{PLAIN},{SIGMOID}")
RATES, DECAYS = (Need("factor", f"{name},{SIGMOID}") for name in ("learning-rate", "weight-decay"))


def _largest_without(evidence: Evidence) -> Estimate:
    """Return the largest sink rate over learning rates. Raises NotDefined if softmax has no sink at any of them."""
    over_seeds.with_a_sink(over_seeds.level_rates(evidence.studies[RATE]))
    return over_levels(over_seeds.largest_rate)(evidence.studies[RATES])


CLAIMS = (
    Claim("W-1", "table 1", RUN_CLAIMS["W-1"].statement, (_AT_FIRST,), scope=(causal,), published=SINK_RATES,
        also_reads=_policy_roles((NATURAL,))),
    Claim("W-2", "table 1", "The sink stays on random tokens.",
        (Part("sink rate on random tokens ÷ on text, with a BOS on both or on none", partial(_on_drawn, RANDOM),
            at_least(0.5)),),
        (MAIN,), (causal,), published_rates("random"), also_reads=_policy_roles((NATURAL, RANDOM))),
    Claim("W-3", "table 1", "On repeated tokens the sink vanishes (positions that leave equal tokens equal).",
        (Part("sink rate on repeated tokens in %, no BOS in front",  # equal tokens from position 0 on
            partial(_on_drawn, REPEATED, policy=WITHOUT, as_share=False), at_most(1.0)),),
        (TEXT, ALONE), (causal, equal_tokens_stay_equal), NONE_ON_REPEATED,
        also_reads=_policy_roles((NATURAL, REPEATED), (WITH,))),
    Claim("W-4", "tables 1 and 7", "On repeated tokens the sink stays (positions added to the embeddings).",
        (Part("sink rate on repeated tokens ÷ on text, no BOS on either",
            partial(_on_drawn, REPEATED, policy=WITHOUT), at_least(0.5)),),
        (TEXT, ALONE), (causal, scopes.absolute_positions), ON_REPEATED,
        also_reads=_policy_roles((NATURAL, REPEATED), (WITH,))),
    Claim("W-13", "fig. 2", "The sink's hidden norm is larger.",
        (Part("norm at 0 ÷ later, median over layers with massive activations", _norm_in_massive_layers, above(1.0)),),
        is_ours=False),
    Claim("W-14", "fig. 2", "The sink's key norm is smaller.", of_sink_heads("key norm", "key_norm", below(1.0)),
        is_ours=False),
    Claim("W-15", "fig. 2", "The sink's value norm is smaller.", of_sink_heads("value norm", "value_norm", below(1.0)),
        is_ours=False),
    Claim("W-16", "fig. 2", "The angle makes the sink.",
        (Part("share of sink heads whose query-key cosine is larger at 0 than later", _angle, at_least(0.9)),
         HAS_SINK_HEADS)),
    Claim("W-17", "fig. 2", "The product of norms does not make the sink.",
        of_sink_heads("‖q‖‖k‖", "qk_norm_product", below(1.0)), is_ours=False),
    Claim("W-18", "appendix", "The sink is weaker in early blocks.",
        (Part("sink rate of the first quarter of layers − of the rest, in points", _early_blocks, below(0.0)),),
        scope=(causal, scopes.several_attention_layers), is_ours=False),
    Claim("W-19", "fig. 9", "The domain of the text hardly matters.",
        (Part("range of sink rates over domains, in points", _domains, at_most(5.0)),),
        (MAIN, *OTHER_DOMAINS), (causal, scopes.with_tokenizer)),
    Claim("W-20", "fig. 3", "The sink rate falls with the length of the text, more at larger ε (window = length).",
        (Part("slope on log₂ T at ε = 0.3, in points", _slope, below(0.0)),
         Part("slope of log₂ sink rate at ε = 0.4 − at ε = 0.2, over lengths with a sink at both", _steeper,
            below(0.0))), (MAIN, *OTHER_LENGTHS.values()), (causal,), is_ours=False),
    Claim("W-21", "fig. 4", "Small models also have a sink.",
        (_AT_FIRST,), scope=(causal, scopes.small)),
    Claim("W-5", "eq. 10–17", "Equal tokens have equal states in every layer (positions not added to the embeddings).",
        (Part("largest ‖h_t − h_0‖ ÷ ‖h_0‖ over layers, tokens and sequences", partial(_largest_of, "state_difference"),
            below(1e-3), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal,), (Published("any", 0.0, "in exact arithmetic", "WSE eq. 10–17"),),
        set_against=Null.THEOREM),
    Claim("W-6", "§3.3", "All repeated tokens are massive, which disperses the sink.",
        (Part("smallest ‖h_t‖ on repeated ÷ ‖h_0‖ on natural tokens, over layers with massive activations",
            _all_massive, at_least(0.5)),), (TEXT, ALONE), (equal_tokens_stay_equal,)),
    Claim("W-7", "proposition 1", "Without positions, attention on repeated tokens is uniform.",
        (Part(_DIFFERENCE.format("1/(t + 1)"), partial(_largest_of, "weight_difference", kind=NO_POSITIONS),
            below(1e-4), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal, some_positions(NO_POSITIONS)), set_against=Null.THEOREM),
    Claim("W-61", "proposition 2", "With relative positions, attention on repeated tokens depends on distances alone.",
        (Part(_DIFFERENCE.format("e^g ÷ Σ e^g"), partial(_largest_of, "weight_difference", kind=RELATIVE),
            below(1e-4), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal, some_positions(RELATIVE)), set_against=Null.THEOREM),
    Claim("W-8", "proposition 3", "With ALiBi, attention on repeated tokens is that of its biases alone.",
        (Part(_DIFFERENCE.format("e^g ÷ Σ e^g"), partial(_largest_of, "weight_difference", kind=ALIBI),
            below(1e-4), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal, some_positions(ALIBI)), set_against=Null.THEOREM),
    run_claim("W-9", role=ALONE, needs=(ALONE,), scope=(equal_tokens_stay_equal, some_positions("rotary")),
        is_ours=False, set_against=Null.THEOREM),
    Claim("W-10", "table 7", "Another vector in place of position 0's removes the sink on repeated tokens.",
        (leaves(REPLACED, at_most(0.5)), had_a_sink(REPLACED)), (REPLACED,), (causal, scopes.learned_positions),
        (Published("GPT2-XL", 62.28, f"sink rate before, {REPEATED_TOKENS}", "WSE table 7", "†"),
         Published("GPT2-XL", 0.20, f"lowest sink rate after, {REPEATED_TOKENS}", "WSE table 7", "†"),
         Published("GPT2-XL", 10.97, f"highest sink rate after, {REPEATED_TOKENS}", "WSE table 7", "†"))),
    Claim("W-11", "table 7", "Exchanged with position t's, the vector takes the sink to t.",
        (leaves(EXCHANGED, at_least(0.5), position=1), falls(EXCHANGED), had_a_sink(EXCHANGED)),
        (EXCHANGED,), (causal, scopes.learned_positions),
        (Published("GPT2-XL", 50.22, f"lowest sink rate at t, {REPEATED_TOKENS}", "WSE table 7", "†"),
         Published("GPT2-XL", 57.63, f"highest sink rate at t, {REPEATED_TOKENS}", "WSE table 7", "†"))),
    Claim("W-43", "§7.2", "Post-norm models also have a sink.",
        (of_run(RUN_CLAIMS["W-1"].parts[0]),), scope=(causal, _post_norm),
        published=published("WSE §7.2", {"post-norm": 13.54})),
    Claim("W-44", "fig. 7", "In post-norm models, states are massive before the norm and not after it.",
        (Part("norm at 0 ÷ later in the sums before the norms, layer with the largest",
            lambda e: bootstrap(np.maximum(*(norm_ratios(e.natural, site).max(1) for site in ("mid", "out_sum")))),
            at_least(LARGE_NORM)),
         Part("norm at 0 ÷ later after the norm",
            lambda e: bootstrap(norm_ratios(e.natural, "layer_out").max(1)), below(LARGE_NORM))),
        scope=(causal, _post_norm)),
    study_claim("W-12", "C7", "Chat models have the sink of their base.", Need("base"),
        ("sink rate, chat model − base, in points", _against_base, between(-ALIKE_RATES, ALIKE_RATES)),
        scope=(causal, _tuned_to_chat), published=published("WSE table 1", {name: round(
            WSE_TABLE_1[f"{name} chat"]["natural"].value - WSE_TABLE_1[name]["natural"].value, 2)
            for name in BASES}, "chat model − base, in points")),
    study_claim("W-22", "fig. 4", "The sink grows with size within a family.", Need("sizes"),
        ("rank correlation of the sink rate and the number of parameters", _with_size, above(0.0)),
        scope=(causal,), is_ours=False),
    study_claim("W-23", "fig. 10", "Size raises the sink and HellaSwag within a family.", Need("scores", "hellaswag"),
        ("rank correlation of the sink rate and the number of parameters", _with_size, above(0.0)),
        ("rank correlation of the score on HellaSwag and the number of parameters", partial(_with_size, on_task=True),
            above(0.0)), scope=(causal,), is_ours=False),
    Claim("W-39", "fig. 5", "The sink of a prefix LM is in the prefix.",
        (Part("share of sinks within the prefix", _within_prefix, at_least(0.9)),), scope=(causal, _prefix_lm)),
    Claim("W-41", "fig. 6", "The sink is the first token of the text, not of the window.",
        (Part("mean weight on the window's first token",
            lambda e: bootstrap(e.natural.means("window_edge_by_sequence", "edge_mass").mean(1)), below(FAR_BELOW)),
         replace(_AT_FIRST, is_evidence=False)),
        scope=(causal, _windowed)),
    study_claim("W-42", "table 3", "Every positional scheme has a sink.", Need("factor", "positions"),
        ("sink rate in %, scheme with the least", over_levels(_least_of_all), above(SINK)),
        published=published("WSE table 3", {"NoPE": 20.35, "absolute": 32.73, "learned": 33.13, "relative": 35.53,
            "ALiBi": 20.78, "rotary": 18.18}, "60M model; its released code's relative bias is the number of T5's "
            "bucket, `bucket-number` here")),
    study_claim("W-35", "§5", "With a random first token there is more sink.", RANDOM_TOKENS,
        ("sink rate, first token random − plain, in points", _rise_within((0, 0), (1, 0), names=(0, 1)), above(0.0)),
        published=published("WSE §5", {"difference": 8.85}, "60M model: 27.03 against 18.18 %"), is_ours=False),
    study_claim("W-36", "§5", "Two random first tokens move the sink to the second.", RANDOM_TOKENS,
        ("S₁ − S₀ in points, two tokens random", _rise_within((2, 0), (2, 1), names=("S₀", "S₁")), above(0.0)),
        published=published("WSE §5", {"difference": 12.10}, "60M model: S₀ 1.98, S₁ 14.08 %"), is_ours=False),
    study_claim("W-37", "table 10", "A fixed token at position k makes k the sink.", Need("factor", "fixed-position"),
        ("S_k in %, k with the least", _at_fixed(_rate_at, PERCENT), above(SINK)),
        ("S_k − the largest elsewhere in points, k with the least", _at_fixed(_above_others), above(0.0)),
        published=published("WSE table 10", {"k = 0": 74.11, "k = 1": 69.03, "k = 2": 69.64})),
    study_claim("W-31", "table 9", "A larger learning rate gives more sink (equal steps).", RATE,
        (POINTS, over_levels(over_seeds.slope), above(0.0)), is_ours=False,
        published=published("WSE table 9", {"slope": 9.50},
            "60M model: 2.90, 11.21, 18.18, 32.23 % at 1e-4, 2e-4, 4e-4, 8e-4")),
    study_claim("W-32", "table 9", "A larger learning rate gives more sink (equal rate × steps).",
        Need("factor", "learning-rate-and-steps"), (POINTS, over_levels(over_seeds.slope), above(0.0)), is_ours=False,
        published=published("WSE table 9", {"slope": 5.28},
            "60M model: 6.29, 16.81, 18.18, 23.44 % at 1e-4, 2e-4, 4e-4, 8e-4")),
    study_claim("W-33", "table 10", "The batch size hardly matters.", Need("factor", "batch-size"),
        (f"{RANGE_OF_RATES}, equal steps", over_levels(over_seeds.range_of_rates), at_most(3.0)),
        published=published("WSE table 10", {"range": 1.99},
            "60M model: 16.45, 17.19, 18.18, 16.19 % at 0.25, 0.5, 1, 2 M tokens", "†")),
    study_claim("W-34", "fig. 28", "With little data there is no sink.", Need("factor", "data"),
        ("sink rate in %, least data", over_levels(lambda levels, rates: rates[:, 0], PERCENT), below(1.0)),
        ("most data", over_levels(lambda levels, rates: rates[:, -1], PERCENT), above(SINK))),
    study_claim("W-38", "table 2", "The sink is largest at a weight decay of 0.1 to 2, and absent at 5.",
        Need("factor", "weight-decay"), ("sink rate in % at 5 and more", over_levels(_at_large_decay), below(1.0)),
        ("best from 0.1 to 2 − best of all others, in points", over_levels(_best_decay), above(0.0)),
        published=published("WSE table 2", {"at 5": 0.01},
            "60M model: 15.20, 15.39, 15.23, 18.18, 41.08, 37.71, 6.13 % at 0, 0.001, 0.01, 0.1, 0.5, 1, 2")),
    study_claim("W-40", "fig. 6", "With a small window there is no sink, with a large window there is.",
        Need("factor", "window"), ("sink rate in %, smallest window",
            over_levels(lambda levels, rates: rates[:, 0], PERCENT, _check_windows), below(1.0)),
        ("rise to the largest, in points",
            over_levels(lambda levels, rates: rates[:, -1] - rates[:, 0], check=_check_windows), above(SINK))),
    study_claim("W-45", "table 11", "The feed-forward design hardly matters.", Need("factor", "feed-forward"),
        (RANGE_OF_RATES, over_levels(over_seeds.range_of_rates), at_most(5.0)),
        published=published("WSE table 11", {"range": 4.30},
            "60M model: SwiGLU 18.18, GeGLU 17.86, ReGLU 13.88, ReLU 16.90, GeLU 14.76, Swish 17.89 %", "†")),
    study_claim("W-46", "table 12", "The number of heads hardly matters.", Need("factor", "heads"),
        (RANGE_OF_RATES, over_levels(over_seeds.range_of_rates), at_most(10.0)),
        published=published("WSE table 12", {"range": 8.82},
            "60M model: 18.18, 10.68, 12.95, 19.50 % with 8, 4, 2, 1 heads, 21.76 % with 8 that are summed", "†")),
    study_claim("W-30", "fig. 4", "The sink appears in training.", Need("course"),
        ("rise of the sink rate over steps, in points", _over_steps(_rise_over_steps), above(SINK)),
        ("sink rate at the first step, in %",
            _over_steps(lambda steps, rates: (rates[:, 0], f"step {steps[0]}"), PERCENT), below(NONE))),
    study_claim("W-47", "table 4", "A sink token takes the sink.", WITH_TOKEN,
        ("S* − S₀ in points", _takes_sink(method=TOKEN), above(SINK)),
        published=published("WSE table 4", {"difference": 74.12}, "60M model: S* 74.12, S₀ 0.00† %")),
    study_claim("W-48", "table 4", "Key biases take the sink, at no cost.", WITH_BIAS,
        ("S* − S₀ in points", _takes_sink(method=BIAS), above(SINK)),
        ("held-out loss, key biases − plain", difference(metric("loss"), BIAS), at_most(NO_COST)),
        published=published("WSE table 4", {"difference": 73.34}, "60M model: S* 73.34, S₀ 0.00 %")),
    Claim("W-52", "fig. 7", "Key and key-value biases end massive activations, value biases and a sink token do not.",
        (*(over_seeds.study_part(role, f"norm at 0 ÷ others, layer with the largest, {name}",
            of_one(norm_ratio, arm, PLAIN, where=LARGE_NORMS), test)
            for name, role, arm, test in (("key biases", WITH_BIAS, BIAS, below(LARGE_NORM)),
                ("key-value biases", WITH_BIASES, BIASES, below(LARGE_NORM)),
                ("value biases", WITH_VALUE, VALUE, at_least(LARGE_NORM)),
                ("sink token", WITH_TOKEN, TOKEN, at_least(LARGE_NORM)))),
         over_seeds.study_part(WITH_BIAS, "of plain training", of_one(norm_ratio, PLAIN), at_least(LARGE_NORM))),
        (WITH_BIAS, WITH_BIASES, WITH_VALUE, WITH_TOKEN)),
    study_claim("W-49", "table 4", "Key-value biases take the sink.", WITH_BIASES,
        ("S* − S₀ in points", _takes_sink(method=BIASES), above(SINK)),
        published=published("WSE table 4", {"difference": 72.72}, "60M model: S* 72.76, S₀ 0.04 %; shared by heads "
            "56.61, 12.44 %", "†")),
    study_claim("W-50", "table 4", "Value biases do not take the sink.", WITH_VALUE,
        ("sink rate in %", of_one(SINK_RATE, VALUE, PLAIN, PERCENT, HAS_SINK), above(SINK)),
        published=published("WSE table 4", {"S₀": 17.53}, "60M model: 18.18 % without")),
    study_claim("W-51", "table 5", "With a fixed value of the bias, S* falls and S₀ rises with its norm.",
        Need("train", ",".join(FIXED.values())),
        ("rank correlation of S₀ and m", over_seeds.ranked(metric("sink_rate"), FIXED), above(0.0)),
        ("rank correlation of S* and m", over_seeds.ranked(metric("sink_rate_outside"), FIXED), below(0.0)),
        is_ours=False, published=published("WSE table 5", {"S₀ and m": 1.0, "S* and m": -1.0},
            "60M model: S* 73.34, 70.03, 44.43, 1.51 % and S₀ 0, 0.06, 3.71, 25.88 % with m = 0, 1, 5, 20")),
    study_claim("W-54", "table 6", "Without normalization there is no sink, at no cost.",
        Need("train", ",".join((PLAIN, *WITHOUT_SUM.values()))),
        *((f"sink rate of the proxy in %, {name}", of_one(SINK_RATE, arm, PLAIN, PERCENT, HAS_SINK), below(NONE))
            for name, arm in WITHOUT_SUM.items()),
        ("softmax", of_one(SINK_RATE, PLAIN, ends=PERCENT), above(SINK)),
        ("held-out loss, sigmoid − softmax", difference(metric("loss"), SIGMOID), at_most(NO_COST)),
        ("sink rate at equal loss, sigmoid − softmax, in points", over_seeds.rates_at_equal_loss(SIGMOID), below(0.0)),
        published=published("WSE table 6", {"sigmoid": 0.44, "ELU+1": 0.80, "identity": 0.0, "MLP kernel": 0.74,
            "loss, sigmoid − softmax": -0.03}, "60M model: softmax 18.18 %")),
    study_claim("W-55", "table 6", "With sum normalization there is a sink.",
        Need("train", ",".join((PLAIN, *WITH_SUM.values(), SIGMOID))),
        *((f"sink rate of the proxy in %, {name}", of_one(SINK_RATE, arm, PLAIN, PERCENT, HAS_SINK), above(SINK))
            for name, arm in WITH_SUM.items()),
        ("sink rate at equal loss, normalized sigmoid − sigmoid, in points",
            over_seeds.rates_at_equal_loss(WITH_SUM["sigmoid"], SIGMOID), above(0.0)),
        published=published("WSE table 6", {"sigmoid": 30.24, "ELU kernel": 53.65, "MLP kernel": 0.19},
            "60M model: softmax 18.18 %")),
    study_claim("W-56", "fig. 8", "Without normalization there are no massive activations either.", ONE,
        ("norm at 0 ÷ others, layer with the largest, sigmoid", of_one(norm_ratio, SIGMOID, PLAIN, where=LARGE_NORMS),
            below(LARGE_NORM))),
    study_claim("W-57", "table 14", "Scaling the normalizer down weakens the sink.",
        Need("train", ",".join(BY_ALPHA.values())),
        ("rank correlation of the sink rate and α", over_seeds.ranked(SINK_RATE, BY_ALPHA), above(0.0)), is_ours=False,
        published=published("WSE table 14", {"correlation": 0.9},
            "60M model: 29.10, 18.18, 9.41, 3.59, 4.53 % at α = 2, 1, 0.2, 0.1, 0.05", "†")),
    Claim("W-58", "table 14", "Sigmoid attention has no sink at any learning rate or weight decay.",
        (Part("sink rate of the proxy in %, rate with the most", _largest_without, below(NONE)),
         over_seeds.study_part(DECAYS, "weight decay with the most", over_levels(over_seeds.largest_rate),
            below(NONE))),
        (RATES, DECAYS, RATE), published=published("WSE table 14", {"lowest": 0.18, "highest": 0.81})),
    study_claim("W-59", "§7.4", "Sigmoid attention has no sink at 1 B.", ONE,
        ("sink rate of the proxy, sigmoid − softmax, in points", difference(SINK_RATE, SIGMOID), below(-SINK)),
        ("sink rate of the proxy in %, sigmoid", of_one(SINK_RATE, SIGMOID, PLAIN, PERCENT, HAS_SINK), below(SINK)),
        scope=(scopes.of_a_billion,),
        published=published("WSE §7.4", {"sigmoid": 2.46, "softmax": 45.11}, "1 B model, sink rate in %")),
    study_claim("W-60", "fig. 30", "Fine-tuning stays stable.", Need("retrofit", f"{PLAIN},{UNTOUCHED}"),
        ("held-out loss, after − before", difference(metric("loss"), PLAIN, UNTOUCHED), below(0.0)),
        set_against=Null.NONE,
        published=published("WSE fig. 30", {"about": 1.8 - 2.6}, "1 B, loss in training")),
)  # fmt: skip
