"""Table 1 of When Attention Sink Emerges in Language Models (WSE), as far as its values are at hand, in percent.

A model of a sweep that names one of these (`paper: GPT2-XL`) is shown beside it.
"""

from sinkscope.results.findings import Published

SETTING = {"window": 64, "epsilon": 0.3}  # with which it was measured, besides sequences of LENGTH tokens
LENGTH = 64
PRETRAINED, CHAT = "T = 64 and ε = 0.3, pretrained", "T = 64 and ε = 0.3, chat models"
TABLE_1, TABLE_7 = "WSE table 1", "WSE table 7"

# the paper's name of the model → input → its sink rate at position 0
WSE_TABLE_1: dict[str, dict[str, Published]] = {
    "Mistral-7B": {
        "natural": Published("Mistral-7B", 97.49, PRETRAINED, TABLE_1),
        "repeated": Published("Mistral-7B", 0.0, PRETRAINED, TABLE_1),
    },
    "LLaMA2-7B": {
        "natural": Published("LLaMA2-7B", 92.47, PRETRAINED, TABLE_1),
        "repeated": Published("LLaMA2-7B", 0.0, PRETRAINED, TABLE_1),
    },
    "LLaMA2-13B": {
        "natural": Published("LLaMA2-13B", 91.69, PRETRAINED, TABLE_1),
        "repeated": Published("LLaMA2-13B", 0.0, PRETRAINED, TABLE_1),
    },
    "LLaMA3-8B": {
        "natural": Published("LLaMA3-8B", 99.02, PRETRAINED, TABLE_1),
        "random": Published("LLaMA3-8B", 91.23, PRETRAINED, TABLE_1),
        "repeated": Published("LLaMA3-8B", 0.0, PRETRAINED, TABLE_1),
    },
    "GPT2-XL": {
        "natural": Published("GPT2-XL", 77.0, PRETRAINED, TABLE_1, "†"),
        "random": Published("GPT2-XL", 70.29, PRETRAINED, TABLE_1),
        "repeated": Published("GPT2-XL", 62.28, PRETRAINED, TABLE_7, "†"),
    },
    "Mistral-7B chat": {"natural": Published("Mistral-7B", 88.34, CHAT, TABLE_1)},
    "LLaMA2-7B chat": {"natural": Published("LLaMA2-7B", 92.88, CHAT, TABLE_1)},
    "LLaMA2-13B chat": {"natural": Published("LLaMA2-13B", 90.94, CHAT, TABLE_1)},
    "LLaMA3-8B chat": {"natural": Published("LLaMA3-8B", 98.85, CHAT, TABLE_1)},
}


def published_rates(reads: str) -> tuple[Published, ...]:
    """Of all models on one input."""
    return tuple(rates[reads] for rates in WSE_TABLE_1.values() if reads in rates)
