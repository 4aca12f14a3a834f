"""The register of metrics: name, definition, unit, number format and paper of each.

Verdicts, tables, figures, comparisons and `sinkscope list metrics` read metrics from `METRICS`. Position 0 is the first
token of a sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

from sinkscope.results.findings import CLOSED

SUMMARY, EFFECT, QUANTIZATION = "summary", "effect", "quantization"
RETROFIT, TRAINING = "retrofit", "training"

PAPERS = {  # abbreviation → title
    "GS": "Attention Sinks Induce Gradient Sinks",
    "WSE": "When Attention Sink Emerges in Language Models",
    "NU": "Attention Sink Mechanisms Are Not Universal",
    "VGA": "Value-State Gated Attention",
    "S2M": "StreamingLLM; Massive Activations in Large Language Models (Sun et al. 2024)",
}
LARGE = 1e6  # numbers from this on are printed like 1.085e+06
SHORT_METRICS = ("sink_rate", "massive_count", "value_drain", "perplexity")  # metrics of one line about a run
MISSING = "–"  # printed in place of a number that was not measured
UNITS = {"nats": "nats per token", "attention": "share of attention", "entries": ""}  # unit → its text at an axis


@dataclass(frozen=True)
class Metric:
    """A metric, with its definition, unit and number format."""

    name: str  # in the column `metric` of the tables
    label: str  # in verdicts, with the tokens or layers that it is taken over
    short: str  # title of a panel or column, whose caption explains the rest
    definition: str
    unit: str = ""  # "share", "nats", "ratio", …; empty for a plain number
    form: str = "{:.2f}"  # format string of its values
    source: str = ""  # paper and equation; empty for a metric of sinkscope's own
    whole: str = "mean"  # reduction over layers to the value of the model; empty if there are no values by layer
    scope: str = ""  # the models and inputs with the metric; empty for all
    lower_is_better: bool = False  # True for metrics that a method should lower
    tables: tuple[str, ...] = (SUMMARY,)  # tables with the metric

    def text(self, value: float) -> str:
        if isnan(value):
            return MISSING
        sign = "+" if "+" in self.form else ""
        return f"{value:{sign}.4g}" if abs(value) >= LARGE else self.form.format(value)

    def text_with_spread(self, value: float, deviation: float) -> str:
        """Return for example "16.94 ± 0.01"; without ± if `deviation` is NaN, as for a single value."""
        spread = "" if isnan(value) or isnan(deviation) else f" ± {self.text(deviation).lstrip('+')}"
        return self.text(value) + spread

    @property
    def axis(self) -> str:
        """The label of an axis, for example "loss (nats per token)" or "perplexity"."""
        unit = UNITS.get(self.unit, self.unit)
        return f"{self.short} ({unit})" if unit else self.short

    @property
    def heading(self) -> str:
        """The heading of a column of a Markdown table, for example "Perplexity (↓)"."""
        text = self.short[:1].upper() + self.short[1:] + " (↓)" * self.lower_is_better
        return text.replace("<s>", "`<s>`")  # Markdown would read it as a tag


def is_sink(window_mass: Any, epsilon: float) -> Any:
    """Return whether a position with a window mass α (GS eq. 1) is a sink (WSE §3). No other code decides this."""
    return window_mass > epsilon


# Attention of random weights is near uniform: a sink is clear only where the odds of its window mass are above CLEAR
# times those under uniform attention. Fewer than 1 % of the heads of SmolLM2 and Gemma3 with random weights
# (`random_weights`) are, at 16 and 64 tokens. The default settings, which are WSE's, ask for more: ε = 0.3 has 5.4
# times those odds.
CLEAR = 5.0


def at_odds(mass: Any, times: float) -> Any:
    """Return the mass whose odds are `times` those of `mass`: as if the key counted that many times."""
    return times * mass / (1 + (times - 1) * mass)


def lacks_rate(uniform_mass: Any, epsilon: float) -> Any:
    """Return whether a position has no sink rate: uniform attention, with this window mass, would make it a sink."""
    return is_sink(uniform_mass, epsilon)


def is_clear(window_mass: Any, uniform_mass: Any) -> Any:
    """Return whether a window mass is farther from uniform attention than random weights are."""
    return ~(window_mass <= at_odds(uniform_mass, CLEAR))


def has_no_rate(values: Mapping[str, float]) -> bool:
    """Return whether these metrics have no sink rate because of `lacks_rate`, rather than no attention."""
    return isnan(values.get("sink_rate", nan)) and not isnan(values.get("uniform_mass", nan))


def notice_without_rate(values: Mapping[str, float], epsilon: float) -> str | None:
    """Return a line for the user if these metrics of the whole model have no sink rate; None if they have one."""
    if not has_no_rate(values):
        return None
    return f"no sink rate of position 0: {reason_without_rate(values['uniform_mass'], epsilon)}"


def reason_without_rate(uniform_mass: float, epsilon: float) -> str:
    mass = f"uniform attention alone gives it {uniform_mass:.1%} of the attention of the queries that see it"
    return f"{mass}, more than ε = {epsilon:.3g}"


# Token groups of GS figure 3: name, first and last position.
TOKEN_GROUPS = (("0", 0, 0), ("1", 1, 1), ("2-3", 2, 3), ("4-7", 4, 7), ("8-15", 8, 15))

_LEARNED = "models with learned positions and a query bias"
_QUERY_BIAS = "models with a query bias"
_GATED = "models and retrofits with gates or scales on values or heads' outputs"
_TASK = "train on bigram-backcopy"

# fmt: off
_MEASURED = (
    # --- attention
    Metric("sink_rate", "sink rate at position 0", "sink rate",
        "share of heads in which position 0 is a sink (window mass > ε), averaged over sequences",
        unit="share", form="{:.1%}", source="GS eq. 1; WSE §3", tables=(SUMMARY, EFFECT)),
    Metric("sink_rate_clear", "sink rate at position 0 clear of uniform attention", "clear sink rate",
        f"as sink_rate, of the heads in which the odds of the window mass are also more than {CLEAR:g} times those of "
        "uniform attention", unit="share", form="{:.1%}"),
    Metric("uniform_mass", "window mass at the position under uniform attention", "window mass, uniform",
        "window_mass if every query attended to all keys that it sees alike; above ε, the position has no sink rate",
        unit="attention", form="{:.3f}", tables=(SUMMARY, EFFECT)),
    Metric("sink_rate_later", "share of heads and sequences with a later sink", "sinks at later positions",
        "share of (head, sequence) pairs with a sink at any position from 1 on that has at least 16 queries",
        unit="share", form="{:.1%}", source="GS eq. 1"),
    Metric("sink_rate_anywhere", "share of heads and sequences with a sink anywhere", "sinks anywhere",
        "share of (head, sequence) pairs with a sink at any position that has at least 16 queries",
        unit="share", form="{:.1%}", source="GS eq. 1", tables=(EFFECT,)),
    Metric("sink_rate_outside", "share of heads and sequences with a sink outside the text", "sinks outside",
        "share of (head, sequence) pairs in which more than ε of the attention, averaged over queries, goes to no "
        "token of the text: to a learned term in the softmax's denominator, or to register tokens",
        unit="share", form="{:.1%}", source="WSE table 4 (S*)", whole="mean of the layers that have such a term",
        scope="models with learned sink logits, key biases or register tokens"),
    Metric("window_mass", "mean window mass at position 0", "window mass",
        "mean attention to the position over the W queries from it on (encoder: less than W away), averaged over heads "
        "and sequences", unit="attention", form="{:.3f}", source="GS eq. 1", tables=(SUMMARY, EFFECT)),
    Metric("sink_mass", "mean sink mass at position 0", "sink mass",
        "mean attention to position 0 over all queries, averaged over heads and sequences",
        unit="attention", form="{:.3f}", source="GS eq. 2"),
    Metric("repeated_bound", "upper bound of the sink mass on repeated tokens", "bound on the sink mass",
        "mean over heads and queries of exp(2ξ) ÷ (exp(2ξ) + n), n the other keys of the query, ξ = scaling · ‖q‖‖k‖",
        unit="attention", form="{:.3f}", source="WSE proposition 4",
        scope="rotary models on repeated tokens that attend to nothing else"),
    Metric("attention_entropy", "attention entropy (nats)", "attention entropy",
        "entropy of the attention weights of a query, averaged over queries, heads and sequences", unit="nats"),
    Metric("missing_mass", "attention mass taken by learned sink logits", "missing mass",
        "1 − sum of a query's attention weights, averaged over queries, heads and sequences",
        unit="attention", form="{:.3f}", source="WSE table 4", scope="models with learned sink logits"),
    # --- queries, keys, values and gates
    Metric("value_drain", "value norm at position 0 ÷ later positions (mean over all layers)", "value norm ÷ others",
        "norm of the value state at position 0 ÷ its mean over the other reported positions, per head, averaged "
        "over heads", unit="ratio", source="VGA §1"),
    Metric("raw_value_drain", "raw value norm at position 0 ÷ later positions", "raw value norm ÷ others",
        "as value_drain, of the value states that the projection gives, before the gate or scale",
        unit="ratio", source="GS §5.1; VGA eq. 8", scope=_GATED),
    Metric("sink_logit_gap", "logit of position 0 above the other keys'", "logit gap",
        "pre-softmax logit of position 0 − mean logit of the query's other keys, averaged over queries and heads",
        source="VGA §4.1"),
    Metric("qk_cosine", "cosine of queries and the key of position 0", "query-key cosine",
        "mean over queries of cos(q_t, k_0), averaged over heads", source="WSE fig. 2"),
    Metric("largest_logit", "largest logit of any head", "largest logit",
        "largest |logit| before the softmax over all queries and the keys that they see, of any head",
        form="{:.1f}", whole="largest", scope="runs with the observable largest-logit"),
    Metric("gate_first", "mean gate at position 0", "gate at position 0",
        "what the retrofit multiplies values or heads' outputs by at position 0, averaged over heads",
        form="{:.3f}", source="VGA eq. 6–10; GS §5.1", scope=_GATED),
    Metric("gate_later", "mean gate at later positions", "gate at others",
        "as gate_first, averaged over the other reported positions",
        form="{:.3f}", source="VGA eq. 6–10; GS §5.1", scope=_GATED),
    Metric("gate_mean", "mean gate over all tokens", "mean gate", "as gate_first, averaged over all tokens",
        form="{:.3f}", source="Qiu et al. 2025", scope=_GATED),
    Metric("gate_closed", "share of closed gates", "closed gates",
        f"share of tokens whose gate is below {CLOSED:g}, averaged over heads",
        unit="share", form="{:.1%}", source="Qiu et al. 2025", scope=_GATED),
    Metric("gate_deviation", "standard deviation of gates over tokens", "deviation of gates",
        "standard deviation of a head's gate over all tokens, averaged over heads; 0 if it does not depend on them",
        form="{:.3f}", source="Qiu et al. 2025", scope=_GATED),
    # --- activations and losses
    Metric("norm_ratio", "residual norm at position 0 ÷ later positions (mean over layers)", "residual norm ÷ others",
        "norm of the layer's output at position 0 ÷ its mean over the other reported positions",
        unit="ratio", form="{:.1f}", source="GS §2"),
    Metric("first_norm", "norm of the residual stream at position 0 (largest layer)", "residual norm",
        "L2 norm of the layer's output at position 0, averaged over sequences",
        form="{:,.1f}", source="GS §2", whole="largest"),
    Metric("massive_count", "massive activations per sequence, all layers", "massive activations per sequence",
        "entries of the layer's output with |x| > 100 and |x| ≥ 1000 × the median |entry|, per sequence",
        unit="entries", form="{:.1f}", source="Sun et al. 2024", whole="sum", tables=(SUMMARY, EFFECT)),
    Metric("massive_magnitude", "largest |activation| (mean over sequences, largest layer)", "largest |activation|",
        "largest |entry| of the layer's output, averaged over sequences",
        form="{:,.0f}", source="Sun et al. 2024", whole="largest", tables=(EFFECT,)),
    Metric("max_inf_norm", "max infinity norm (mean over sequences, largest site and layer)", "max infinity norm",
        "largest |entry| of each sequence, averaged over sequences, at the site where it is largest: layer_in, "
        "attn_out, mid, mlp_out, out_sum or layer_out (VGA table 1 has layer_inf_norm)",
        form="{:,.2f}", source="Bondarenko et al. 2023", whole="largest", lower_is_better=True,
        tables=(SUMMARY, QUANTIZATION)),
    Metric("layer_inf_norm", "infinity norm of the MLP's input + output (mean over sequences, largest layer)",
        "max I+O norm",
        "max_inf_norm of out_sum, or where no norm follows that sum of layer_out: Bondarenko et al.'s “FFN input + "
        "output”, VGA's “Max I+O Norm”",
        form="{:,.2f}", source="Bondarenko et al. 2023", whole="largest", lower_is_better=True),
    Metric("kurtosis_with_norms", "kurtosis with norms (mean over sequences, sites and layers)",
        "mean kurtosis with norms",
        "kurtosis of attn_norm, attn_out, mlp_norm, mlp_out and layer_out, of post-norm models of mlp_out and "
        "layer_out: the sites of Bondarenko et al.'s code, except the norm after the last layer of a pre-norm model",
        form="{:,.2f}", source="Bondarenko et al. 2023", scope="models with norms", lower_is_better=True),
    Metric("kurtosis", "kurtosis (mean over sequences, sites and layers)", "mean kurtosis",
        "mean((x − μ)⁴) ÷ σ⁴ over all entries of a site and sequence, averaged over sequences and the sites of "
        "max_inf_norm (VGA table 1 has kurtosis_with_norms)", form="{:,.2f}", source="Bondarenko et al. 2023",
        lower_is_better=True, tables=(SUMMARY, QUANTIZATION)),
    Metric("loss", "loss (nats per token)", "loss",
        "cross-entropy of the predicted tokens, of an encoder the masked ones; in the table `training` of the training "
        "batches",
        unit="nats", form="{:.3f}", whole="", lower_is_better=True, tables=(SUMMARY, EFFECT, QUANTIZATION, TRAINING)),
    Metric("held_out_loss", "held-out loss (nats per token)", "held-out loss", "loss of a probe's held-out sequences",
        unit="nats", form="{:.3f}", whole="", lower_is_better=True, tables=(TRAINING,)),
    Metric("perplexity", "perplexity of the run's text", "perplexity", "exp(loss)", form="{:,.2f}",
        source="VGA table 1", whole="", lower_is_better=True, tables=(SUMMARY, EFFECT, QUANTIZATION)),
    # --- states of the residual stream
    Metric("state_entropy", "entropy of a layer's states (mean over layers; 1 is the largest)", "entropy of states",
        "−Σ p_j log p_j ÷ log min(T, D), p_j the squared singular values of the layer's output (T,D) ÷ their sum",
        form="{:.3f}", source="arXiv 2510.06477", scope="runs with the observable entropy"),
    Metric("state_entropy_without_first", "the same entropy without position 0", "entropy without position 0",
        "as state_entropy, of all tokens but position 0",
        form="{:.3f}", source="arXiv 2510.06477", scope="runs with the observable entropy"),
    Metric("secondary_sinks", "secondary sinks per sequence", "secondary sinks",
        "tokens per sequence that join the first sink in the layer, for more than 1/8 of the depth and less than 17/32",
        unit="entries", source="arXiv 2512.22213", whole="sum", scope="runs with the observable sink-tokens"),
    Metric("residual_share", "share of tokens at which one coordinate is large (largest layer)", "residual sink",
        "largest share of tokens with |entry| > 20 × the median of the token's |entries| at one coordinate",
        unit="share", form="{:.1%}", source="arXiv 2601.22966", whole="largest",
        scope="runs with the observable residual-sinks"),
    # --- gradients
    Metric("value_gradient_ratio", "value gradient at position 0 ÷ positions 5–15", "value gradient ÷ later",
        "gradient norm of the value states at position 0 ÷ its mean over positions 5–15, all heads together; it grows "
        "with the number of sequences, whose gradients are added before the norm, as in the paper",
        unit="ratio", form="{:.1f}", source="GS fig. 2", whole="of the norms averaged over layers"),
    Metric("raw_value_gradient_ratio", "raw value gradient at position 0 ÷ positions 5–15",
        "raw value gradient ÷ later",
        "as value_gradient_ratio, of the value states that the projection gives, before the gate or scale",
        unit="ratio", form="{:.1f}", source="GS §5.1; VGA eq. 8", whole="of the norms averaged over layers",
        scope="models and retrofits with gates or scales on values"),
    Metric("value_gradient_norm", "raw value gradient at position 0", "raw value gradient",
        "gradient norm of the value states at position 0, all heads together, before a gate or scale if there is "
        "one", form="{:.3g}", source="GS §5.1; VGA eq. 8"),
    Metric("key_gradient_ratio", "key gradient at position 0 ÷ positions 5–15", "key gradient ÷ later",
        "as value_gradient_ratio, of the keys",
        unit="ratio", form="{:.1f}", source="GS fig. 2", whole="of the norms averaged over layers"),
    Metric("uniform_gradient_ratio", "value gradient ratio of uniform causal attention", "value gradient ÷ later, null",
        "value_gradient_ratio if each token attends equally to all tokens up to itself, and their gradients are "
        "unrelated and of one size", unit="ratio", form="{:.1f}", source="GS §3.1", whole="", scope="causal models"),
    Metric("value_over_key_gradient", "value gradient ÷ key gradient, position 0", "value gradient ÷ key gradient",
        "value_gradient_norm ÷ gradient norm of the keys at position 0, all heads together",
        unit="ratio", form="{:.1f}", source="GS §3.1", whole="of the norms averaged over layers"),
    *(
        Metric(f"{name}{ending}", f"{label} at {where}", f"{name} at {where}",
            definition + reduced, unit="ratio", form=form, source="GS §4", whole="median")
        for name, label, definition, form in (
            ("bloat", "gradient gain of the attention branch", "‖∇h̃‖ ÷ ‖∇r_attn‖", "{:.3g}"),
            ("compress", "gradient gain of the norm before it", "‖∇h − ∇h+½‖ ÷ ‖∇h̃‖", "{:.3g}"),
            ("change", "gradient gain of the complete branch", "‖∇h‖ ÷ ‖∇h+½‖", "{:.2f}"),
        )
        for ending, where, reduced in (
            ("", "position 0", " of the attention branch, averaged over sequences"),
            ("_later", "positions 5–15", " of the attention branch, averaged over sequences; median over positions"),
        )
    ),
    Metric("compress_slope", "slope of log compress on log norm", "compress slope",
        "least-squares slope of log₁₀ compress on log₁₀‖h‖, attention branch, all layers and positions",
        source="GS fig. 3", whole=""),
    Metric("compress_correlation", "correlation of log compress and log norm", "compress correlation",
        "Pearson's r of the points of compress_slope", source="GS fig. 3", whole=""),
    *(
        Metric(f"{name}_{group}", f"{label}, positions {group}", f"{short} {group}",
            f"as {name}, over positions {group}", source="GS fig. 3", whole="")
        for name, label, short in (
            ("compress_slope", "slope of log compress", "slope"),
            ("compress_correlation", "correlation of log compress", "correlation"),
        )
        for group, _, _ in TOKEN_GROUPS
    ),
    Metric("identity_residual", "largest residual of the value-gradient identity", "identity residual",
        "largest relative residual of ∇v_s = Σ_t a[t,s] g_t over heads and positions",
        form="{:.1e}", source="GS §3.1", whole="largest"),
    Metric("theorem1_holds", "share of heads and positions at which theorem 1 holds", "theorem 1 holds",
        "share of heads and positions whose squared value gradient lies within both bounds",
        unit="share", form="{:.1%}", source="GS theorem 1"),
    Metric("theorem2_holds", "share of tokens at which theorem 2 holds", "theorem 2 holds",
        "share of tokens at which a norm's gradient gain is within its bound",
        unit="share", form="{:.1%}", source="GS theorem 2"),
    Metric("theorem2_tightness", "gradient gain of norms ÷ theorem 2's bound", "theorem 2 tightness",
        "‖∇x‖ ÷ ‖∇y‖ of a norm ÷ ‖γ‖∞ ÷ rms(x), averaged over tokens", unit="ratio", source="GS theorem 2"),
    # --- the query bias
    Metric("delta_first", "Δ of the query bias at position 0", "Δ at position 0",
        "Δ_0 = b_Qᵀ W_k x_0, what the query bias adds to the logits of position 0",
        source="NU §4.1", scope=_QUERY_BIAS),
    Metric("delta_later", "Δ of the query bias at later positions", "Δ at later positions",
        "as delta_first, averaged over the later positions", source="NU §4.1", scope=_QUERY_BIAS),
    Metric("delta_gap", "Δ of the query bias, position 0 above later ones (standard deviations)", "Δ gap",
        "(Δ_0 − mean of the later positions' Δ) ÷ their standard deviation over sequences and positions",
        unit="standard deviations", form="{:.1f}", source="NU §4.2.1", scope=_QUERY_BIAS),
    Metric("delta_outlier_share", "share of layers in which Δ sets position 0 apart", "layers with a Δ gap",
        "share of layers with a delta_gap above 2",
        unit="share", form="{:.1%}", source="NU §4.2.1", whole="", scope=_QUERY_BIAS),
    Metric("key_alignment_first", "cosine of W_k EPE₀ and the query bias", "key alignment at position 0",
        "cos(W_k EPE_0, b_Q), EPE_i = MLP⁽¹⁾(p_i) + p_i", source="NU §4.1", scope=_LEARNED),
    Metric("key_alignment_later", "cosine of W_k EPE and the query bias, later positions", "key alignment at others",
        "as key_alignment_first, averaged over the later positions", source="NU §4.1", scope=_LEARNED),
    Metric("gamma_ratio", "|γ| at EPE₀'s massive coordinates ÷ its mean", "|γ| ratio",
        "mean |γ| at the massive coordinates of EPE_0 ÷ mean |γ| over all coordinates, γ = W_k b_Q",
        unit="ratio", form="{:.1f}", source="NU tables 1 and 2", scope=_LEARNED),
)

PERPLEXITY_IN_W8A8 = "perplexity_quantized"
LOSS_IN_W8A8 = "loss_quantized"
NORM_IN_W8A8, KURTOSIS_IN_W8A8 = "layer_inf_norm_quantized", "kurtosis_with_norms_quantized"
_QUANTIZED = (
    Metric("cost", "cost of quantization (nats per token)", "cost",
        "loss − loss in full precision on the same sequences",
        unit="nats", form="{:z.3f}", whole="", lower_is_better=True, tables=(QUANTIZATION,)),
    Metric(PERPLEXITY_IN_W8A8, "perplexity of the run's text in W8A8", "perplexity in W8A8",
        "perplexity with every linear layer but the LM head in simulated W8A8",
        form="{:,.2f}", source="VGA table 2", whole="", lower_is_better=True, tables=()),
    Metric("perplexity_increase", "increase of perplexity in W8A8", "Δ perplexity", "perplexity_quantized − perplexity",
        form="{:+,.2f}", source="VGA table 2", whole="", lower_is_better=True, tables=()),
    Metric(NORM_IN_W8A8, "infinity norm of the MLP's input + output in W8A8 (largest layer)", "max I+O norm in W8A8",
        "layer_inf_norm with every linear layer but the LM head in simulated W8A8",
        form="{:,.2f}", source="VGA table 2", whole="", lower_is_better=True, tables=()),
    Metric(KURTOSIS_IN_W8A8, "kurtosis with norms in W8A8 (mean over sites and layers)", "kurtosis with norms in W8A8",
        "kurtosis_with_norms with every linear layer but the LM head in simulated W8A8",
        form="{:,.2f}", source="VGA table 2", whole="", lower_is_better=True, tables=()),
    Metric("max_inf_norm_quantized", "max infinity norm in W8A8 (largest site and layer)", "max infinity norm in W8A8",
        "max_inf_norm with every linear layer but the LM head in simulated W8A8 (VGA table 2 has "
        "layer_inf_norm_quantized)", form="{:,.2f}", whole="", lower_is_better=True, tables=()),
    Metric("kurtosis_quantized", "kurtosis in W8A8 (mean over sites and layers)", "mean kurtosis in W8A8",
        "kurtosis with every linear layer but the LM head in simulated W8A8 (VGA table 2 has "
        "kurtosis_with_norms_quantized)", form="{:,.2f}", whole="", lower_is_better=True, tables=()),
)

_TRAINED = (
    Metric("gate_displacement_mean", "distance of new parameters from their start (mean)", "new parameters moved by",
        "‖p − p₀‖ of each head's new parameters, averaged over heads",
        form="{:.3g}", source="VGA §3.2", scope="retrofits with new parameters", tables=(TRAINING,)),
    Metric("gate_displacement_max", "distance of new parameters from their start (largest)", "gates moved at most",
        "‖p − p₀‖ of the head whose new parameters have moved farthest", form="{:.3g}", source="VGA §3.2",
        whole="largest", scope="retrofits with new parameters", tables=(TRAINING,)),
    Metric("value_ratio", "norm of the projected value of <s> ÷ other tokens", "‖v‖ of <s> ÷ others",
        "start_value_norm ÷ other_value_norm",
        unit="ratio", form="{:.3f}", source="VGA fig. 6", whole="by layer", scope=_TASK, tables=()),
    Metric("attended_ratio", "norm of the attended value of <s> ÷ other tokens", "attended ‖v‖ of <s> ÷ others",
        "start_attended_norm ÷ other_attended_norm",
        unit="ratio", form="{:.3f}", source="VGA fig. 6", whole="by layer", scope=_TASK, tables=()),
    Metric("learning_rate", "learning rate of the pretrained parameters", "learning rate",
        "as the scheduler has it at the step", form="{:.3g}", whole="", tables=(TRAINING,)),
    Metric("gradient_norm", "gradient norm of a training step", "gradient norm of a step",
        "norm of the gradient of all trained parameters, before it is clipped",
        form="{:.3g}", whole="", tables=(TRAINING,)),
    Metric("largest_activation", "largest entry of the layers' outputs", "largest activation",
        "largest |entry| of a layer's output on any token", form="{:,.1f}", whole="largest", tables=(TRAINING,)),
    Metric("massive_share", "share of sequences with a massive activation (largest layer)", "with massive activation",
        "share of sequences with a massive activation in the output of a layer",
        unit="share", form="{:.1%}", whole="largest", tables=(TRAINING,)),
    Metric("float16_headroom", "largest number of float16 ÷ largest activation", "float16 headroom",
        "65,504 ÷ largest_activation: below 1, it is infinite in float16",
        unit="ratio", form="{:,.1f}", whole="", tables=(TRAINING,)),
    Metric("float8_headroom", "largest number of float8 ÷ largest activation", "float8 headroom",
        "448, the largest number of float8_e4m3fn, ÷ largest_activation: below 1, it needs a scale",
        unit="ratio", form="{:,.1f}", whole="", tables=(TRAINING,)),
    Metric("total_weight", "total weight that a query gives (median)", "total weight",
        "Σ|sim ÷ Z| over the tokens that a query sees, 1 of softmax; median over queries after the first token",
        unit="weight", form="{:.3g}", source="WSE §7.4", whole="over queries of all layers", tables=(TRAINING,)),
    Metric("total_weight_at_sink", "total weight of queries on the first token (median)", "total weight at the sink",
        "total_weight of the queries that give the first token a share above ε",
        unit="weight", form="{:.3g}", source="WSE §7.4", whole="over queries of all layers", tables=(TRAINING,)),
    Metric("sink_rate_by_weight", "sink rate by total weight", "sink rate by total weight",
        "share of heads and sequences in which the first token has more than ε of the weight that all queries together "
        "give, Σ|sim ÷ Z| (equal to sink_rate for softmax)",
        unit="share", form="{:.1%}", whole="mean", tables=(TRAINING,)),
    Metric("sink_rate_by_weight_anywhere", "sink rate by total weight of any token", "sink at any token, by weight",
        "share of heads and sequences in which any token with enough queries has more than ε of their total weight",
        unit="share", form="{:.1%}", whole="mean", tables=(TRAINING,)),
)


def _task(
    name: str, label: str, short: str, definition: str, unit: str = "", form: str = "{:.3f}", whole: str = ""
) -> Metric:
    """Return a metric of the Bigram-Backcopy task. Queries begin at position 1: the first token sees only itself."""
    source = "VGA §4.1, figures 4–6"
    return Metric(name, label, short, definition, unit, form, source, whole, _TASK, tables=(TRAINING,))


BACKCOPY: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _task("bigram_risk", "excess loss where the pair decides (nats)", "bigram risk",
            "loss above the optimum at positions that follow no trigger: KL(p ‖ model)", unit="nats", form="{:.4f}"),
        _task("backcopy_risk", "excess loss at triggers (nats)", "backcopy risk",
            "loss above the optimum, 0, at triggers", unit="nats", form="{:.4f}"),
        _task("attention_to_start", "attention of non-trigger queries to <s>", "attention on <s>",
            "weight that queries which are no triggers give to <s>, or with --bos never to the first token",
            unit="attention", whole="by layer"),
        _task("attention_to_start_max", "attention of non-trigger queries to <s>, highest head", "on <s>, highest head",
            "as attention_to_start, of the head that gives most", unit="attention", whole="by layer"),
        _task("early_attention_to_start", "attention to <s> before any trigger", "on <s> before any trigger",
            "as attention_to_start, of queries before their sequence's first trigger, which is another sink",
            unit="attention", whole="by layer"),
        _task("attention_to_triggers", "attention of non-trigger queries to triggers", "attention on triggers",
            "weight that queries which are no triggers give to triggers, all together",
            unit="attention", whole="by layer"),
        _task("trigger_attention_to_start", "attention of triggers to <s>", "triggers' attention on <s>",
            "weight that triggers give to <s>", unit="attention", whole="by layer"),
        _task("delta_logit", "logit of <s> above the other keys'", "Δlogit of <s>",
            "logit of <s> − mean of the query's other keys; queries that are no triggers",
            form="{:.2f}", whole="by layer"),
        *(
            _task(f"{token}_{kind}_norm", f"norm of the {state} of {whose}", f"{state} norm of {whose}",
                f"‖v‖ of {whose} {how}, all heads together", whole="by layer")
            for kind, state, how in (
                ("value", "projected value", "as the projection makes it"),
                ("attended", "attended value", "as it is attended to: after a gate on the values, if there is one"),
            )
            for token, whose in (("start", "<s>"), ("trigger", "triggers"), ("other", "other tokens"))
        ),
        *(
            _task(f"{token}_output_gate", f"gate on heads' outputs at {where}", f"output gate at {where}",
                f"what a gate on the heads' outputs leaves of their norm, at {where}", whole="by layer")
            for token, where in (("plain", "non-trigger queries"), ("trigger", "trigger queries"))
        ),
    )
}

# fmt: on
# heading of a table of trained arms in Markdown → its metrics; all of them make up the table `retrofit`, in this order
ARM_TABLES: dict[str, tuple[str, ...]] = {
    "In full precision": ("perplexity", "layer_inf_norm", "kurtosis_with_norms", "max_inf_norm", "kurtosis"),
    "In W8A8": (
        PERPLEXITY_IN_W8A8,
        "perplexity_increase",
        NORM_IN_W8A8,
        KURTOSIS_IN_W8A8,
        "max_inf_norm_quantized",
        "kurtosis_quantized",
    ),
    "Position 0 against the others": (
        "sink_rate",
        "sink_rate_outside",
        "sink_mass",
        "massive_count",
        "norm_ratio",
        "value_gradient_norm",
        "value_gradient_ratio",
        "raw_value_gradient_ratio",
        "value_drain",
        "raw_value_drain",
        "gate_first",
        "gate_later",
        "gate_mean",
        "gate_closed",
        "gate_deviation",
        "gate_displacement_max",
    ),
}  # fmt: skip
ARM_METRICS = tuple(metric for metrics in ARM_TABLES.values() for metric in metrics)
METRICS: dict[str, Metric] = {
    metric.name: replace(metric, tables=(*metric.tables, RETROFIT)) if metric.name in ARM_METRICS else metric
    for metric in (*_MEASURED, *_QUANTIZED, *_TRAINED)
} | BACKCOPY

# metrics of the whole model in verdicts and model cards, in their order → the finding whose sentence has the metric
HEADLINE_METRICS = {
    "sink_rate": "sink", "sink_rate_outside": "sink-outside", "sink_rate_later": "later-sinks", "window_mass": "",
    "sink_mass": "", "repeated_bound": "", "attention_entropy": "", "missing_mass": "", "value_drain": "",
    "raw_value_drain": "", "gate_first": "own-gates", "gate_later": "own-gates", "norm_ratio": "", "massive_count": "",
    "value_gradient_ratio": "value-gradient", "uniform_gradient_ratio": "value-gradient", "compress_slope": "compress",
    "delta_gap": "", "key_alignment_first": "", "perplexity": "", "max_inf_norm": "", "kurtosis": "",
    "state_entropy": "", "state_entropy_without_first": "", "secondary_sinks": "", "residual_share": "",
}  # fmt: skip
