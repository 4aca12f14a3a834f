"""Published numbers, each of them once, and tables in the layout of the papers, made from the tables of a run.

WSE is When Attention Sink Emerges in Language Models, NU is Attention Sink Mechanisms Are Not Universal.
"""

from collections.abc import Mapping

import pandas as pd

from sinkscope.results.findings import Published
from sinkscope.results.metrics import PAPERS
from sinkscope.results.run import RunData

SCRATCH = "60M model, 5 B tokens, sink rate at position 0 in %"  # the setting of most of WSE's trainings
CLAIMS_PAPERS = {  # first part of a claim's id → title of the paper
    "GS": PAPERS["GS"],
    "W": PAPERS["WSE"],
    "S": PAPERS["S2M"],
    "N": PAPERS["NU"],
    "V": PAPERS["VGA"],
    "CV": "Attention Sinks and Compression Valleys in LLMs are Two Sides of the Same Coin (2510.06477)",
    "SS": "On the Existence and Behavior of Secondary Attention Sinks (2512.22213)",
    "RS": "Attention and Residual Sinks (2601.22966); The Spike, the Sparse and the Sink (2603.05498)",
    "SW": "The Super Weight in Large Language Models",
    "IH": "Identifying and Evaluating Inactive Heads in Pretrained LLMs",
    "FT": "Why do LLMs attend to the first token?",
    "SO": "The Structural Origin of Attention Sink (2605.06611)",
    "OQ": "Beyond Outliers, a study of optimizers (2509.23500)",
    "MD": "Hidden Dynamics of Massive Activations in Transformer Training (2508.03616)",
    "HY": "Sinks and spikes in hybrid models (2608.12149)",
    "GA": "Gated Attention for Large Language Models (Qiu et al. 2025)",
    "VS": "See What You Are Told: Visual Attention Sink in Large Multimodal Models (Kang et al. 2025)",
}


def paper_of(claim: str) -> str:
    """Return the title of the paper that a claim is from."""
    return CLAIMS_PAPERS[claim.partition("-")[0]]


def published(
    source: str, values: Mapping[str, float], setting: str = SCRATCH, mark: str = ""
) -> tuple[Published, ...]:
    """Return the numbers of one table, named by models or settings."""
    return tuple(Published(name, value, setting, source, mark) for name, value in values.items())


# --- WSE table 1: sink rates of pretrained models, in percent, where the values are available. If a model of a sweep
# names one of these (`paper: GPT2-XL`), figures and tables show both.

WSE_SETTING = {"window": 64, "epsilon": 0.3}  # settings of table 1, with sequences of LENGTH tokens
LENGTH = 64
PRETRAINED, CHAT = "T = 64 and ε = 0.3, pretrained", "T = 64 and ε = 0.3, chat models"
TABLE_1, TABLE_7 = "WSE table 1", "WSE table 7"

# the paper's name of the model → input → its sink rate at position 0
WSE_TABLE_1: dict[str, dict[str, Published]] = {
    name: {
        reads: Published(name.removesuffix(" chat"), rate, CHAT if name.endswith(" chat") else PRETRAINED, TABLE_1)
        for reads, rate in rates.items()
    }
    for name, rates in {
        "Mistral-7B": {"natural": 97.49, "repeated": 0.0},
        "LLaMA2-7B": {"natural": 92.47, "repeated": 0.0},
        "LLaMA2-13B": {"natural": 91.69, "repeated": 0.0},
        "LLaMA3-8B": {"natural": 99.02, "random": 91.23, "repeated": 0.0},
        "GPT2-XL": {"natural": 77.0, "random": 70.29, "repeated": 62.28},
        "Mistral-7B chat": {"natural": 88.34},
        "LLaMA2-7B chat": {"natural": 92.88},
        "LLaMA2-13B chat": {"natural": 90.94},
        "LLaMA3-8B chat": {"natural": 98.85},
    }.items()
}
_OF_GPT2 = WSE_TABLE_1["GPT2-XL"]
_OF_GPT2["natural"] = _OF_GPT2["natural"]._replace(mark="†")
_OF_GPT2["repeated"] = _OF_GPT2["repeated"]._replace(mark="†", source=TABLE_7)


def published_rates(reads: str) -> tuple[Published, ...]:
    """Return the published rates of all models on one input."""
    return tuple(rates[reads] for rates in WSE_TABLE_1.values() if reads in rates)


FROM_SCRATCH = "T = 64 and ε = 0.3, trained from scratch"
SINK_RATES = (
    *published_rates("natural"),
    Published("Llama 60M", 18.18, FROM_SCRATCH, "WSE §4"),
    Published("Llama 1B", 45.11, FROM_SCRATCH, "WSE §7.4"),
)


# --- WSE's trainings: sink rates of models of 60 million parameters, in percent, by the setting that differs from
# WSE's default. A name is a part of a level of a factor study; arms have the names of the recipes.

TRANSCRIBED = "†"  # marks numbers from a transcription of the paper
SOFTMAX = 18.18  # WSE's default


def _of_table(source: str, of: str, rates: Mapping[str, float], mark: str = "") -> dict[str, Published]:
    values = published(source, {f"{of}{name}": rate for name, rate in rates.items()}, mark=mark)
    return {value.name: value for value in values}


WSE_TRAININGS: dict[str, Published] = {
    **_of_table("WSE table 2", "weight_decay=", {
        "0": 15.20, "0.001": 15.39, "0.01": 15.23, "0.1": SOFTMAX, "0.5": 41.08, "1": 37.71, "2": 6.13, "5": 0.01}),
    **_of_table("WSE table 3", "position_scheme=", {
        "none": 20.35, "absolute": 32.73, "learned": 33.13, "bucket-number": 35.53, "alibi": 20.78, "rotary": SOFTMAX}),
    **_of_table("WSE table 4", "", {"softmax": SOFTMAX, "K-bias": 0.0, "V-bias": 17.53}),
    **_of_table("WSE table 4", "", {"sink-token": 0.0, "KV-bias": 0.04}, TRANSCRIBED),
    **_of_table("WSE table 5", "", {"K-bias-m1": 0.06, "K-bias-m5": 3.71, "K-bias-m20": 25.88}),
    **_of_table("WSE table 6", "", {
        "sigmoid": 0.44, "sigmoid-normalized": 30.24, "elu": 0.80, "elu-kernel": 53.65, "identity": 0.0,
        "mlp-kernel": 0.74, "mlp-kernel-normalized": 0.19}),
    **_of_table("WSE table 9", "learning_rate=", {"0.0001": 2.90, "0.0002": 11.21, "0.0004": SOFTMAX, "0.0008": 32.23}),
    **_of_table("WSE table 10", "fixed_position=", {"0": 74.11, "1": 69.03, "2": 69.64}),
    **_of_table("WSE table 10", "bos=", {"auto": 74.11, "never": SOFTMAX}),  # the default of WSE has no BOS
    **_of_table("WSE table 11", "feed_forward=", {"swiglu": SOFTMAX}),
    **_of_table("WSE table 11", "feed_forward=", {
        "geglu": 17.86, "reglu": 13.88, "relu": 16.90, "gelu": 14.76, "swish": 17.89}, TRANSCRIBED),
    **_of_table("WSE table 12", "num_attention_heads=", {"4": 10.68, "2": 12.95, "1": 19.50}, TRANSCRIBED),
    **_of_table("WSE table 12", "head_mix=", {"summed": 21.76}, TRANSCRIBED),
    **_of_table("WSE table 14", "", {"alpha-2": 29.10, "alpha-0.2": 9.41, "alpha-0.1": 3.59, "alpha-0.05": 4.53},
        TRANSCRIBED),
    **_of_table("WSE §5", "random_tokens=", {"0": SOFTMAX, "1": 27.03, "2": 1.98}),
    **_of_table("WSE §7.2", "norm_placement=", {"post": 13.54}),
}  # fmt: skip


# --- NU tables 1 and 2

NU_DIGITS = 3  # decimals, as NU prints

# NU tables 1 and 2, for GPT-2: layer, counted from 1 → mean ± 2 standard deviations of |γ|, and |γ| at the coordinates
# where EPE_0 is massive.
GPT2_LAYERS, GPT2_WIDTH, GPT2_MASSIVE = 12, 768, (138, 447)
PRINTED: dict[int, tuple[str, float, float]] = {
    1: ("4.47 ± 22.226", 12.116, 11.064),
    2: ("2.8 ± 6.62", 8.065, 24.468),
    3: ("1.717 ± 5.826", 10.178, 23.047),
    4: ("1.657 ± 5.02", 18.198, 17.149),
    5: ("1.561 ± 4.618", 3.072, 23.854),
    6: ("0.86 ± 1.59", 5.644, 6.142),
    7: ("1.12 ± 2.701", 12.453, 18.17),
    8: ("1.404 ± 3.546", 19.806, 28.01),
    9: ("1.23 ± 3.224", 17.846, 28.01),
    10: ("1.313 ± 3.616", 23.131, 28.42),
    11: ("1.403 ± 4.0", 27.547, 27.691),
    12: ("1.145 ± 2.65", 4.5, 13.59),
}
MISPRINT = (9, 447, 26.014)  # layer, coordinate and correct value of the entry for which NU prints another layer's
NEEDS_GPT2 = "GPT-2's weights are needed to compute them: `sinkscope claims gpt2`"


def paper_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """Return name → table, for the tables of papers that can be made from this run's tables."""
    gamma = gamma_table(run)
    return {} if gamma is None else {"gamma": gamma}


def gamma_table(run: RunData) -> pd.DataFrame | None:
    """Return NU tables 1 and 2, with a row for each layer, counted from 1; None if EPE_0 has no massive coordinate.

    |γ| at the massive coordinates of EPE_0 is next to the mean ± 2 standard deviations (population) of all its entries.
    For GPT-2, the values that the paper prints are added.
    """
    gamma = run.tables.get("gamma")
    if gamma is None or not gamma["is_massive_epe"].any():
        return None
    gamma = gamma.assign(magnitude=gamma["gamma"].abs())
    rows: list[dict[str, str | float]] = []
    for layer, entries in gamma.groupby("layer"):
        mean, spread = entries["magnitude"].mean(), 2 * entries["magnitude"].std(ddof=0)
        large = entries[entries["is_massive_epe"]].sort_values("coordinate")
        baseline = f"{round(mean, NU_DIGITS)} ± {round(spread, NU_DIGITS)}"
        columns = zip(large["coordinate"], large["magnitude"], strict=True)
        at_massive = {f"d={coordinate}": round(float(magnitude), NU_DIGITS) for coordinate, magnitude in columns}
        rows.append({"layer": f"layer {int(layer) + 1}", "baseline": baseline, **at_massive})
    table = pd.DataFrame(rows)
    # GPT-2 is recognized by its shape and massive coordinates, because copies of it have other names
    massive = tuple(sorted(gamma[gamma["is_massive_epe"]]["coordinate"].unique()))
    shape = (gamma["layer"].nunique(), gamma["coordinate"].nunique())
    is_gpt2 = massive == GPT2_MASSIVE and shape == (GPT2_LAYERS, GPT2_WIDTH)
    return table.merge(printed_gamma(), on="layer") if is_gpt2 else table


def printed_gamma() -> pd.DataFrame:
    """Return NU's values for GPT-2; the misprint is followed by the entry that the weights give."""
    rows = []
    for layer, (baseline, *entries) in PRINTED.items():
        printed = [f"{entry:g}" for entry in entries]
        if layer == MISPRINT[0]:
            printed[GPT2_MASSIVE.index(MISPRINT[1])] += f" (misprint of {MISPRINT[2]:g})"
        rows.append((f"layer {layer}", baseline, *printed))
    headings = ("baseline", *(f"d={coordinate}" for coordinate in GPT2_MASSIVE))
    return pd.DataFrame(rows, columns=["layer", *(f"{heading}, NU prints" for heading in headings)])
