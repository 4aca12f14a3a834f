"""Sink rates that WSE publishes, as shares, and how they were measured."""

from collections.abc import Iterable

from sinkscope.results.findings import Published

SETTING = {"shortest": 64, "longest": 64, "window": 64, "epsilon": 0.3}  # of the manifest
PRETRAINED = "T = 64 and ε = 0.3, pretrained"
CHAT = "T = 64 and ε = 0.3, chat models"
SCRATCH = "T = 64 and ε = 0.3, trained from scratch"

SINK_RATES = {  # by what was read
    "natural": (
        Published("LLaMA2-13B", 0.9169, PRETRAINED, "WSE table 1"),
        Published("LLaMA2-7B", 0.9247, PRETRAINED, "WSE table 1"),
        Published("Mistral-7B", 0.9749, PRETRAINED, "WSE table 1"),
        Published("LLaMA3-8B", 0.9902, PRETRAINED, "WSE table 1"),
        Published("GPT2-XL", 0.77, PRETRAINED, "WSE table 1", mark="†"),
        Published("Mistral-7B", 0.8834, CHAT, "WSE table 1"),
        Published("Llama 60M", 0.1818, SCRATCH, "WSE §4 and §7.4"),
        Published("Llama 1B", 0.4511, SCRATCH, "WSE §4 and §7.4"),
    ),
    "random": (
        Published("GPT2-XL", 0.7029, PRETRAINED, "WSE table 1"),
        Published("LLaMA3-8B", 0.9123, PRETRAINED, "WSE table 1"),
    ),
}
OUTSIDE = Published("Llama 60M with key biases", 0.7334, SCRATCH, "WSE table 4")


def in_percent(published: Iterable[Published]) -> tuple[Published, ...]:
    return tuple(item._replace(value=round(100 * item.value, 2)) for item in published)
