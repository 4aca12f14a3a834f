"""Claims of When Attention Sink Emerges in Language Models (WSE) on any model; what training decides: `register.py`."""

from collections.abc import Callable, Iterable
from itertools import combinations

import numpy as np

from sinkscope.paper_claims.arms import SINK
from sinkscope.paper_claims.claim import Claim, NotDefined, Part, above, at_least, at_most, below
from sinkscope.paper_claims.evidence import MAIN, POLICIES, RANDOM, REPEATED, Evidence, Lacks
from sinkscope.paper_claims.quantities import (
    HAS_SINK_HEADS,
    attention,
    by_head,
    in_sink_heads,
    massive_layers,
    norm_ratios,
    sink_heads,
    sink_rates,
)
from sinkscope.paper_claims.scopes import (
    absolute_positions,
    causal,
    equal_tokens_stay_equal,
    several_attention_layers,
    small,
    with_tokenizer,
)
from sinkscope.results.bos import WITH, WITHOUT
from sinkscope.results.findings import Published
from sinkscope.results.metrics import is_sink
from sinkscope.results.papers import published_rates
from sinkscope.results.statistics import Estimate, bootstrap, range_of, weighted_means

LENGTHS = (16, 32, 128)  # of the sequences, besides the run's own
EPSILON, AROUND = 0.3, (0.2, 0.4)
DOMAINS = ("code", "documentation")  # besides natural text

SCRATCH = "T = 64 and ε = 0.3, trained from scratch"
SINK_RATES = (
    *published_rates("natural"),
    Published("Llama 60M", 18.18, SCRATCH, "WSE §4"),
    Published("Llama 1B", 45.11, SCRATCH, "WSE §7.4"),
)
ON_REPEATED = tuple(rate for rate in published_rates("repeated") if rate.value > 0)
NONE_ON_REPEATED = tuple(rate for rate in published_rates("repeated") if rate.value == 0)


# --- what inputs begin with: a comparison has one policy for all of them


def _policy_roles(inputs: tuple[str, ...], policies: Iterable[str] = POLICIES) -> tuple[str, ...]:
    return tuple(f"{POLICIES[policy]}:{name}" for policy in policies for name in inputs)


def _both_policies(evidence: Evidence, *inputs: str) -> str:
    """«with a BOS text 79.9, random 79.2 %; without text 0.0, random 0.0 %»: each policy under which all were read."""
    said = []
    for policy, words in ((WITH, "with a BOS"), (WITHOUT, "without")):
        roles = _policy_roles(inputs, (policy,))
        if all(evidence.has(role) for role in roles):
            rates = [f"{'text' if name == MAIN else name} {sink_rates(evidence, role)[0]:.1f}"
                     for name, role in zip(inputs, roles, strict=True)]  # fmt: skip
            said.append(f"{words} {', '.join(rates)} %")
    return "; ".join(said)


def _sink_rate(evidence: Evidence) -> Estimate:
    return bootstrap(sink_rates(evidence)).over(_both_policies(evidence, MAIN))


def _on_drawn(evidence: Evidence, drawn: str, policy: str) -> tuple[Estimate, Estimate, str]:
    """The sink rates on drawn tokens and on the text, both under one policy, and what they are under each.

    Raises:
        NotDefined: the text has no sink under this policy, so that there is none to keep or to lose.
        Lacks: one of the runs is not there.
    """
    text, other = _policy_roles((MAIN, drawn), (policy,))
    for role in (text, other):
        if not evidence.has(role):
            raise NotDefined(reason) if (reason := evidence.inapplicable(role)) else Lacks(evidence.command(role))
    words, before = _both_policies(evidence, MAIN, drawn), bootstrap(sink_rates(evidence, text))
    if before.value <= SINK:
        raise NotDefined(f"its text has no sink {policy} a BOS, which is what counts here ({words})")
    return bootstrap(sink_rates(evidence, other)), before, words


def _against_text(drawn: str, policy: str = "") -> Callable[[Evidence], Estimate]:
    """Drawn tokens ÷ text, by default under the policy of the text that the model was measured on."""

    def measure(evidence: Evidence) -> Estimate:
        after, before, words = _on_drawn(evidence, drawn, policy or evidence.runs[MAIN].bos)
        return (after / before).over(words)

    return measure


def _on_repeated(evidence: Evidence) -> Estimate:
    """Without a BOS: the propositions are about equal tokens from position 0 on."""
    after, _, words = _on_drawn(evidence, REPEATED, WITHOUT)
    return after.over(words)


# --- the geometry of a sink (figure 2)


def _norm_in_massive_layers(evidence: Evidence) -> Estimate:
    """Raises NotDefined."""
    ratios = norm_ratios(evidence, "layer_out")
    layers = massive_layers(evidence)
    if not len(layers):
        raise NotDefined("no layer has massive activations at position 0")
    return bootstrap(np.median(ratios[:, layers], axis=1)).over(f"{len(layers)} layers")


def _angle(evidence: Evidence) -> Estimate:
    chosen, note = sink_heads(evidence)
    first, later = (by_head(evidence, "geometry_by_sequence", name) for name in ("qk_cosine", "qk_cosine_later"))
    return bootstrap((first > later)[:, chosen].mean(1)).over(note)


def _early_blocks(evidence: Evidence) -> Estimate:
    by_layer = 100 * attention(evidence, "sink_rate")[..., 0]
    early = max(1, by_layer.shape[1] // 4)
    return bootstrap(by_layer[:, :early].mean(1) - by_layer[:, early:].mean(1))


# --- over texts and lengths


def _domains(evidence: Evidence) -> Estimate:
    """The range of the domains' rates, each resampled by itself."""
    roles = ("natural", *(f"domain:{name}" for name in DOMAINS))
    rates = [bootstrap(sink_rates(evidence, role)) for role in roles]
    note = ", ".join(f"{role.rpartition(':')[2]} {rate.value:.1f}" for role, rate in zip(roles, rates, strict=True))
    return range_of([first - second for first, second in combinations(rates, 2)]).over(note)


def _by_length(evidence: Evidence, *epsilons: float) -> tuple[np.ndarray, np.ndarray]:
    """log₂ T (lengths,), and the sink rate in percent (R, ε, lengths), window = T."""
    own = evidence.runs["natural"].manifest["config"]["seq_len"]
    roles = {own: "natural"} | {length: f"length:{length}" for length in LENGTHS}
    rates = []
    for role in roles.values():
        sequences = evidence.sequences(role)
        mass = sequences.values("attention_heads_by_sequence", "window_mass", ("layer", "head"))
        sinks = np.stack([np.where(np.isfinite(mass), is_sink(mass, epsilon), np.nan) for epsilon in epsilons], axis=-1)
        rates.append(100 * weighted_means(np.nanmean(sinks, axis=(1, 2)), sequences.weights))
    return np.log2(list(roles)), np.stack(rates, axis=-1)


def _slope_on(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(…,): least-squares slopes of y (…, lengths) on x (lengths,)."""
    x = x - x.mean()
    return y @ x / (x**2).sum()


def _slope(evidence: Evidence) -> Estimate:
    """Raises NotDefined where no length has a sink that a longer text could lose."""
    x, rates = _by_length(evidence, EPSILON)
    if rates[0].max() <= SINK:
        raise NotDefined(f"at no length is a sink rate above {SINK:g} %")
    return bootstrap(_slope_on(x, rates[:, 0]))


def _steeper(evidence: Evidence) -> Estimate:
    """How much more of the rate is lost with each doubling of the length, over lengths with a sink at both ε. In points
    a rate at a larger ε could lose less for no other reason than that it is smaller.

    Raises:
        NotDefined: fewer than two lengths have a sink at both.
    """
    x, rates = _by_length(evidence, *AROUND)
    has_sink = (rates[0] > SINK).all(axis=0)
    words = "; ".join(f"ε = {epsilon:g}: {', '.join(f'{rate:.1f}' for rate in own)} %"
                      for epsilon, own in zip(AROUND, rates[0][:, np.argsort(x)], strict=True))  # fmt: skip
    if has_sink.sum() < 2:
        raise NotDefined(f"at fewer than two lengths a sink is left at both, which is a floor ({words})")
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = _slope_on(x[has_sink], np.log2(rates[..., has_sink]))
    return bootstrap(slopes[:, 1] - slopes[:, 0]).over(words)


CLAIMS = (
    Claim("W-1", "table 1", "There is a sink at the first token.",
        (Part("sink rate at position 0 in %", _sink_rate, above(SINK)),), scope=(causal,), published=SINK_RATES,
        beside=_policy_roles((MAIN,))),
    Claim("W-2", "table 1", "The sink stays on random tokens.",
        (Part("sink rate on random tokens ÷ on text, with a BOS on both or on none", _against_text(RANDOM),
            at_least(0.5)),),
        (MAIN,), (causal,), published_rates("random"), beside=_policy_roles((MAIN, RANDOM))),
    Claim("W-3", "table 1", "On repeated tokens the sink vanishes (positions that leave equal tokens equal).",
        (Part("sink rate on repeated tokens in %, no BOS in front", _on_repeated, at_most(1.0)),),
        _policy_roles((MAIN, REPEATED), (WITHOUT,)), (causal, equal_tokens_stay_equal), NONE_ON_REPEATED,
        beside=_policy_roles((MAIN, REPEATED), (WITH,))),
    Claim("W-4", "tables 1 and 7", "On repeated tokens the sink stays (positions added to the embeddings).",
        (Part("sink rate on repeated tokens ÷ on text, no BOS on either", _against_text(REPEATED, WITHOUT),
            at_least(0.5)),),
        _policy_roles((MAIN, REPEATED), (WITHOUT,)), (causal, absolute_positions), ON_REPEATED,
        beside=_policy_roles((MAIN, REPEATED), (WITH,))),
    Claim("W-13", "fig. 2", "The sink's hidden norm is larger.",
        (Part("norm at 0 ÷ later, median over layers with massive activations", _norm_in_massive_layers, above(1.0)),),
        is_ours=False),
    Claim("W-14", "fig. 2", "The sink's key norm is smaller.",
        (Part("key norm at 0 ÷ later, median over sink heads", lambda e: in_sink_heads(e, "key_norm"), below(1.0)),
         HAS_SINK_HEADS),
        is_ours=False),
    Claim("W-15", "fig. 2", "The sink's value norm is smaller.",
        (Part("value norm at 0 ÷ later, median over sink heads", lambda e: in_sink_heads(e, "value_norm"),
            below(1.0)),
         HAS_SINK_HEADS), is_ours=False),
    Claim("W-16", "fig. 2", "The angle makes the sink.",
        (Part("share of sink heads whose query-key cosine is larger at 0 than later", _angle, at_least(0.9)),
         HAS_SINK_HEADS)),
    Claim("W-17", "fig. 2", "The product of norms does not.",
        (Part("‖q‖‖k‖ at 0 ÷ later, median over sink heads", lambda e: in_sink_heads(e, "qk_norm_product"),
            below(1.0)),
         HAS_SINK_HEADS), is_ours=False),
    Claim("W-18", "appendix", "Early blocks have less of a sink.",
        (Part("sink rate of the first quarter of layers − of the rest, in points", _early_blocks, below(0.0)),),
        scope=(causal, several_attention_layers), is_ours=False),
    Claim("W-19", "fig. 9", "The domain of the text hardly matters.",
        (Part("range of sink rates over domains, in points", _domains, at_most(5.0)),),
        ("natural", *(f"domain:{name}" for name in DOMAINS)), (causal, with_tokenizer)),
    Claim("W-20", "fig. 3", "The sink rate falls with the length of the text, more at larger ε (window = length).",
        (Part("slope on log₂ T at ε = 0.3, in points", _slope, below(0.0)),
         Part("slope of log₂ sink rate at ε = 0.4 − at ε = 0.2, over lengths with a sink at both", _steeper,
            below(0.0))),
        ("natural", *(f"length:{length}" for length in LENGTHS)), (causal,), is_ours=False),
    Claim("W-21", "fig. 4", "Small models have a sink, too.",
        (Part("sink rate at position 0 in %", _sink_rate, above(SINK)),), scope=(causal, small)),
)  # fmt: skip
