"""Claims of When Attention Sink Emerges in Language Models (WSE) on any model; what training decides: `register.py`."""

from collections.abc import Callable
from itertools import combinations

import numpy as np

from sinkscope.report.claims.arms import SINK
from sinkscope.report.claims.claim import Claim, Part, above, at_least, at_most, below
from sinkscope.report.claims.estimates import Estimate, bootstrap, range_of, weighted_means
from sinkscope.report.claims.evidence import Evidence
from sinkscope.report.claims.quantities import (
    HAS_SINK_HEADS,
    MASSIVE_LAYERS,
    attention,
    by_head,
    in_sink_heads,
    massive_layers,
    norm_ratios,
    sink_heads,
    sink_rates,
)
from sinkscope.report.claims.scopes import (
    absolute_positions,
    causal,
    equal_tokens_stay_equal,
    several_attention_layers,
    small,
    with_tokenizer,
)
from sinkscope.report.wse_table_1 import published_rates
from sinkscope.results.findings import Published
from sinkscope.results.metrics import is_sink

LENGTHS = (16, 32, 128)  # of the sequences, besides the run's own
EPSILONS = (0.2, 0.3, 0.4)
DOMAINS = ("code", "documentation")  # besides natural text

SCRATCH = "T = 64 and ε = 0.3, trained from scratch"
SINK_RATES = (
    *published_rates("natural"),
    Published("Llama 60M", 18.18, SCRATCH, "WSE §4"),
    Published("Llama 1B", 45.11, SCRATCH, "WSE §7.4"),
)
ON_REPEATED = tuple(rate for rate in published_rates("repeated") if rate.value > 0)
NONE_ON_REPEATED = tuple(rate for rate in published_rates("repeated") if rate.value == 0)


def _sink_rate(evidence: Evidence) -> Estimate:
    return bootstrap(sink_rates(evidence))


def _against_natural(role: str) -> Callable[[Evidence], Estimate]:
    def measure(evidence: Evidence) -> Estimate:
        return bootstrap(sink_rates(evidence, role)) / bootstrap(sink_rates(evidence))

    return measure


def _on_repeated(evidence: Evidence) -> Estimate:
    return bootstrap(sink_rates(evidence, "repeated"))


# --- the geometry of a sink (figure 2)


def _norm_in_massive_layers(evidence: Evidence) -> Estimate:
    ratios = norm_ratios(evidence, "layer_out")
    layers = massive_layers(evidence)
    if not len(layers):
        return bootstrap(np.median(ratios, axis=1)).over("all layers")
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


def _slopes(evidence: Evidence) -> np.ndarray:
    """(R, ε): of the sink rate in percent on log₂ T, window = T."""
    own = evidence.runs["natural"].manifest["config"]["seq_len"]
    roles = {own: "natural"} | {length: f"length:{length}" for length in LENGTHS}
    rates = []
    for role in roles.values():
        sequences = evidence.sequences(role)
        mass = sequences.values("attention_heads_by_sequence", "window_mass", ("layer", "head"))
        sinks = np.stack([np.where(np.isfinite(mass), is_sink(mass, epsilon), np.nan) for epsilon in EPSILONS], axis=-1)
        rates.append(100 * weighted_means(np.nanmean(sinks, axis=(1, 2)), sequences.weights))
    x = np.log2(list(roles))
    x = x - x.mean()
    return np.tensordot(np.stack(rates, axis=-1), x, axes=1) / (x**2).sum()


CLAIMS = (
    Claim("W-1", "table 1", "There is a sink at the first token.",
        (Part("sink rate at position 0 in %", _sink_rate, above(SINK)),), scope=(causal,), published=SINK_RATES),
    Claim("W-2", "table 1", "The sink stays on random tokens.",
        (Part("sink rate on random ÷ on natural tokens", _against_natural("random"), at_least(0.5)),
         Part("sink rate on natural tokens in %", _sink_rate, above(SINK))),
        ("natural", "random"), (causal,), published_rates("random")),
    Claim("W-3", "table 1", "On repeated tokens the sink vanishes (positions that leave equal tokens equal).",
        (Part("sink rate on repeated tokens in %", _on_repeated, at_most(1.0)),),
        ("repeated",), (causal, equal_tokens_stay_equal), NONE_ON_REPEATED),
    Claim("W-4", "tables 1 and 7", "On repeated tokens the sink stays (positions added to the embeddings).",
        (Part("sink rate on repeated ÷ on natural tokens", _against_natural("repeated"), at_least(0.5)),
         Part("sink rate on natural tokens in %", _sink_rate, above(SINK))),
        ("natural", "repeated"), (causal, absolute_positions), ON_REPEATED),
    Claim("W-13", "fig. 2", "The sink's hidden norm is larger.",
        (Part("norm at 0 ÷ later, median over these layers", _norm_in_massive_layers, above(1.0)),
         MASSIVE_LAYERS), is_ours=False),
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
        (Part("slope on log₂ T at ε = 0.3, in points", lambda e: bootstrap(_slopes(e)[:, 1]), below(0.0)),
         Part("slope at ε = 0.4 − at ε = 0.2", lambda e: bootstrap(_slopes(e)[:, 2] - _slopes(e)[:, 0]), below(0.0))),
        ("natural", *(f"length:{length}" for length in LENGTHS)), (causal,), is_ours=False),
    Claim("W-21", "fig. 4", "Small models have a sink, too.",
        (Part("sink rate at position 0 in %", _sink_rate, above(SINK)),), scope=(causal, small)),
)  # fmt: skip
