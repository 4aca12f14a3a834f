"""Table 1 of When Attention Sink Emerges in Language Models (WSE), as far as its values are at hand.

A model of a sweep that names one of these (`paper: GPT2-XL`) is shown beside it.
"""

from sinkscope.results.findings import Published

SETTING = {"seq_len": 64, "window": 64, "epsilon": 0.3}  # of these values, and of those that they are shown beside
_WORDS = "T = 64 and ε = 0.3"


def _rates(name: str, **rates: tuple[float, str, str] | float) -> dict[str, Published]:
    """Input → sink rate; with the source where that is not table 1, and the mark."""
    rows = {reads: rate if isinstance(rate, tuple) else (rate, "WSE table 1", "") for reads, rate in rates.items()}
    return {reads: Published(name, rate, _WORDS, source, mark) for reads, (rate, source, mark) in rows.items()}


# the paper's name of the model → input → its sink rate
WSE_TABLE_1: dict[str, dict[str, Published]] = {
    name: _rates(name, **rates)  # type: ignore[arg-type]
    for name, rates in {
        "GPT2-XL": {"natural": (0.77, "WSE table 1", "†"), "random": 0.7029, "repeated": (0.6228, "WSE table 7", "†")},
        "Mistral-7B": {"natural": 0.9749, "repeated": 0.0},
        "Mistral-7B chat": {"natural": 0.8834},
        "LLaMA2-7B": {"natural": 0.9247, "repeated": 0.0},
        "LLaMA2-7B chat": {"natural": 0.9288},
        "LLaMA2-13B": {"natural": 0.9169, "repeated": 0.0},
        "LLaMA2-13B chat": {"natural": 0.9094},
        "LLaMA3-8B": {"natural": 0.9902, "random": 0.9123, "repeated": 0.0},
        "LLaMA3-8B chat": {"natural": 0.9885},
    }.items()
}
