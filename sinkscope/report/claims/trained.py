"""Claims that rest on trained models: on arms that differ in one factor, on steps of a training, or on a family of
models. No run says by itself which factor it varies, so that these are named and not measured yet.
"""

from typing import Any, Never

from sinkscope.report.claims.claim import Claim, Part, Test, above, at_least, at_most, below, between
from sinkscope.report.claims.evidence import Evidence
from sinkscope.results.findings import Published

SCRATCH = "60M model, 5 B tokens, sink rate at position 0 in %"


def _unread(evidence: Evidence) -> Never:
    raise NotImplementedError("no run plays this role")


def _claim(
    id: str, reference: str, statement: str, quantity: str, test: Test, factor: str, published: Any = (), **more: Any
) -> Claim:
    """`published`: name → value, all of one table."""
    values = tuple(
        Published(name, value, more.get("setting", SCRATCH), reference, more.get("mark", ""))
        for name, value in dict(published).items()
    )
    part = Part(quantity, _unread, test)
    return Claim(id, reference, statement, (part,), (f"trained:{factor}",), published=values)


RATE = "sink rate at position 0 in %"
VALVE = "V-scale and a plain fine-tune"
GATE = "VGA and a plain model"
BACKCOPY = "bigram-backcopy, plain, VGA and IGA"

# fmt: off
CLAIMS = (
    _claim("GS-21", "fig. 5", "V-scale keeps the sink.", "sink rate, V-scale − none", at_least(-0.05), VALVE),
    _claim("GS-22", "fig. 5", "V-scale lowers token 0's norm.", "largest ‖h_out,0‖, V-scale ÷ none", below(1.0), VALVE),
    _claim("GS-23", "fig. 5", "V-scale lowers its MLP outputs.", "largest ‖mlp_out₀‖, V-scale ÷ none", below(1.0),
        VALVE),
    _claim("GS-24", "§5.2", "MLP outputs fall more than attention outputs.",
        "(1 − ratio) of mlp_out − of attn_out", above(0.0), VALVE),
    _claim("GS-25", "§5.2", "V-scale costs nothing.", "held-out loss, V-scale − none", at_most(0.0), VALVE),
    _claim("GS-26", "§5.1", "The valve acts.", "raw value gradient at 0, V-scale ÷ none", below(1.0), VALVE),
    _claim("GS-27", "fig. 2", "The spike is there at every checkpoint.",
        "value-gradient ratio ÷ null, least over steps behind the onset", at_least(2.0), "steps of a training"),
    _claim("W-12", "C7", "Chat models have the sink of their base.", "|difference of sink rates| in points",
        at_most(10.0), "a chat model and its base"),
    _claim("W-22", "fig. 4", "The sink grows with size within a family.", "rank correlation", above(0.0),
        "sizes of a family"),
    _claim("W-23", "fig. 10", "Size raises the sink and HellaSwag within a family.", "rank correlations", above(0.0),
        "sizes of a family, with HellaSwag"),
    _claim("W-30", "fig. 4", "The sink appears in training.", "rise of the sink rate over steps, in points",
        above(10.0), "steps of a training"),
    _claim("W-31", "table 9", "More sink with a larger learning rate, equal steps.", "rank correlation", above(0.0),
        "the learning rate", {"4e-4": 18.18, "2e-4": 11.21, "1e-4": 2.90, "8e-4 at 20k": 32.23}),
    _claim("W-32", "table 9", "More sink with a larger learning rate, equal rate × steps.", "rank correlation",
        above(0.0), "learning rate at equal rate × steps",
        {"8e-4×10k": 23.44, "4e-4×20k": 18.18, "2e-4×40k": 16.81, "1e-4×80k": 6.29}),
    _claim("W-33", "table 10", "The batch size hardly matters.", "range of sink rates in points", at_most(3.0),
        "the batch size", {"0.25M": 16.45, "0.5M": 17.19, "1M": 18.18, "2M": 16.19}, mark="†"),
    _claim("W-34", "fig. 28", "With little data there is no sink.", RATE, below(1.0), "the amount of data"),
    _claim("W-35", "§5", "A random first token gives more sink.", "sink rate, random first − plain", above(0.0),
        "the first token", {"first random": 27.03}),
    _claim("W-36", "§5", "Two random first tokens move the sink to the second.", "S₁ − S₀", above(0.0),
        "the first two tokens", {"S₀": 1.98, "S₁": 14.08}),
    _claim("W-37", "table 10", "A fixed token at position k makes k the sink.", "S_k", above(10.0),
        "a fixed token", {"k = 0": 74.11, "k = 1": 69.03, "k = 2": 69.64}),
    _claim("W-38", "table 2", "Most sink at a weight decay of 0.1 to 2, none at 5.", "sink rate at 5", below(1.0),
        "weight decay", {"0": 15.20, "0.001": 15.39, "0.01": 15.23, "0.1": 18.18, "0.5": 41.08, "1": 37.71, "2": 6.13,
            "5": 0.01}),
    _claim("W-39", "fig. 5", "A prefix LM's sink is among the prefix.", "share of sinks within the prefix",
        at_least(0.9), "prefix LM"),
    _claim("W-40", "fig. 6", "A small window has no sink, a large one has.", "sink rate, large − small window",
        above(10.0), "window attention"),
    _claim("W-41", "fig. 6", "The sink is the absolute first token, not the window's.", "mean a[t, t−w+1]",
        below(0.03), "window attention"),
    _claim("W-42", "table 3", "Every positional scheme has a sink.", "smallest sink rate in %", above(10.0),
        "the positions", {"NoPE": 20.35, "absolute": 32.73, "learned": 33.13, "relative": 35.53, "ALiBi": 20.78,
            "rotary": 18.18}),
    _claim("W-43", "§7.2", "Post-norm models have one, too.", RATE, above(10.0), "post-norm", {"post-norm": 13.54}),
    _claim("W-44", "fig. 7", "There, states are massive before the norm, not behind it.", "norm ratio behind the norm",
        below(2.0), "post-norm"),
    _claim("W-45", "table 11", "The feed-forward design hardly matters.", "range of sink rates in points", at_most(5.0),
        "the feed-forward design", {"SwiGLU": 18.18, "GeGLU": 17.86, "ReGLU": 13.88, "ReLU": 16.90, "GeLU": 14.76,
            "Swish": 17.89}, mark="†"),
    _claim("W-46", "table 12", "Nor does the number of heads.", "range of sink rates in points", at_most(10.0),
        "the number of heads", {"8": 18.18, "4": 10.68, "2": 12.95, "1": 19.50, "heads summed": 21.76}),
    _claim("W-47", "table 4", "A sink token takes the sink.", "S* − S₀ in points", above(10.0), "a sink token",
        {"S*": 74.12, "S₀": 0.0}),
    _claim("W-48", "table 4", "So do key biases, at no cost.", "S* − S₀ in points", above(10.0), "key biases",
        {"S*": 73.34, "S₀": 0.0}),
    _claim("W-49", "table 4", "And key-value biases.", "S* − S₀ in points", above(10.0), "key-value biases",
        {"S*": 72.76, "S₀": 0.04, "S*, shared by heads": 56.61, "S₀, shared by heads": 12.44}, mark="†"),
    _claim("W-50", "table 4", "Value biases do not.", RATE, above(10.0), "value biases", {"S₀": 17.53}),
    _claim("W-51", "table 5", "With a fixed value of the bias, S* falls and S₀ rises with its norm.",
        "rank correlation of S₀ and m", above(0.0), "the fixed value of a key bias",
        {"S*, m = 0": 73.34, "S*, m = 1": 70.03, "S*, m = 5": 44.43, "S*, m = 20": 1.51, "S₀, m = 0": 0.0,
            "S₀, m = 1": 0.06, "S₀, m = 5": 3.71, "S₀, m = 20": 25.88}),
    _claim("W-52", "fig. 7", "Key and key-value biases end massive activations.", "norm ratio", below(2.0),
        "key biases"),
    _claim("W-54", "table 6", "Without normalization there is no sink.", "proxy of the sink rate in %", below(1.0),
        "unnormalized attention", {"sigmoid": 0.44, "ELU+1": 0.80, "identity": 0.0, "MLP kernel": 0.74}),
    _claim("W-55", "table 6", "With sum normalization there is one.", RATE, above(10.0), "normalized attention",
        {"softmax": 18.18, "sigmoid": 30.24, "ELU kernel": 53.65}),
    _claim("W-56", "fig. 8", "Without normalization no massive activations either.", "norm ratio", below(2.0),
        "unnormalized attention"),
    _claim("W-57", "table 14", "Scaling the normalizer down weakens the sink.", "rank correlation with α", above(0.0),
        "the normalizer's scale", {"2": 29.10, "1": 18.18, "0.2": 9.41, "0.1": 3.59, "0.05": 4.53}, mark="†"),
    _claim("W-58", "table 14", "Sigmoid attention has none at any learning rate and weight decay.", RATE, below(1.0),
        "sigmoid attention", {"lowest": 0.18, "highest": 0.81}),
    _claim("W-59", "§7.4", "Nor has it at 1 B.", "sink rate, sigmoid − softmax", below(-10.0),
        "sigmoid attention at 1 B",
        {"sigmoid": 2.46, "softmax": 45.11}),
    _claim("W-60", "fig. 30", "Fine-tuning stays stable.", "loss behind − in front", below(0.0), "fine-tuning",
        {"in front": 2.6, "behind": 1.8}, setting="1 B, loss"),
    _claim("S-4", "StreamingLLM", "A pretrained sink token suffices alone.", "perplexity with one kept ÷ with four",
        between(0.95, 1.05), "a sink token"),
    _claim("S-14", "Sun et al.", "Key-value biases remove massive activations.", "massive activations", at_most(0.0),
        "key-value biases"),
    _claim("V-4", "fig. 4", "The plain lab model sinks.", "attention on <s> before any trigger", at_least(0.5),
        BACKCOPY),
    _claim("V-5", "fig. 4", "And drains.", "‖v of <s>‖ ÷ others", at_most(0.5), BACKCOPY),
    _claim("V-6", "fig. 4", "VGA has no sink.", "attention on <s>, VGA − untrained", at_most(0.0), BACKCOPY),
    _claim("V-7", "fig. 4", "VGA has no drain.", "‖v of <s>‖ ÷ others", at_least(0.8), BACKCOPY),
    _claim("V-8", "fig. 5", "The plain model runs a cycle.", "correlation of attention and value norm over steps",
        below(0.0), BACKCOPY),
    _claim("V-9", "fig. 5", "VGA is stable.", "range over steps, VGA ÷ plain", below(0.5), BACKCOPY),
    _claim("V-10", "fig. 5", "VGA learns as well.", "risks, VGA − plain", at_most(0.0), BACKCOPY),
    _claim("V-11", "fig. 6", "IGA stands between.", "attention, (plain − IGA) and (IGA − VGA)", above(0.0), BACKCOPY),
    _claim("V-13", "eq. 8", "The gradient is severed.", "raw value gradient ÷ ‖Σ a g‖, against the gate", at_most(1.0),
        GATE),
    _claim("V-14", "table 1", "Perplexity is no worse.", "perplexity, VGA − plain", at_most(0.0), GATE,
        {"BERT": 0.0, "OPT": -0.46, "GPT-2": -0.51}, setting="trained from scratch"),
    _claim("V-15", "table 1", "The largest norm falls.", "plain ÷ VGA", above(1.0), GATE,
        {"BERT": 24.5, "OPT": 2.2, "GPT-2": 20.8}, setting="trained from scratch"),
    _claim("V-16", "table 1", "Kurtosis falls.", "plain ÷ VGA", above(1.0), GATE,
        {"BERT": 35.0, "OPT": 63.0, "GPT-2": 429.0}, setting="trained from scratch"),
    _claim("V-17", "table 1", "Register tokens worsen kurtosis.", "registers ÷ plain", above(1.0), "register tokens",
        {"BERT": 2.6, "OPT": 3.8, "GPT-2": 0.36}, setting="trained from scratch"),
    _claim("V-18", "table 2", "VGA quantizes best.", "Δ perplexity in W8A8, VGA − best other", below(0.0), GATE,
        {"BERT": 0.12, "OPT": 0.93}, setting="Δ perplexity of VGA"),
    _claim("V-19", "table 2", "Registers quantize worse than plain.", "Δ perplexity in W8A8, registers − plain",
        above(0.0), "register tokens", {"BERT": 909 - 613, "OPT": 108 - 28}, setting="difference"),
    _claim("V-20", "table 3", "A plain fine-tune worsens the norm.", "max norm behind ÷ in front", above(1.0),
        "VGA and a plain fine-tune", {"GPT-2": 1.55}, setting="fine-tuned"),
    _claim("V-21", "table 3", "The retrofit cures.", "max norm, VGA ÷ in front", below(0.2),
        "VGA and a plain fine-tune",
        {"GPT-2": 0.094}, setting="fine-tuned"),
    _claim("V-22", "table 3", "And has the best perplexity.", "perplexity, VGA − plain fine-tune", below(0.0),
        "VGA and a plain fine-tune", {"GPT-2": -0.07}, setting="fine-tuned"),
    _claim("V-23", "§3.2", "Its overhead is marginal.", "new ÷ all parameters", below(0.01), GATE),
)
# fmt: on
