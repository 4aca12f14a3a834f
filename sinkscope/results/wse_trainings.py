"""Sink rates of the models of 60 million parameters that WSE trains, by what differs from its default, in percent.

A name is a part of a level of a factor study (`factor_study.py`); arms are called as the recipes call them.
"""

from collections.abc import Mapping

from sinkscope.claims.published import published
from sinkscope.results.findings import Published

TRANSCRIBED = "†"  # from a transcription of the paper
SOFTMAX = 18.18  # WSE's default


def _table(source: str, of: str, rates: Mapping[str, float], mark: str = "") -> dict[str, Published]:
    values = published(source, {f"{of}{name}": rate for name, rate in rates.items()}, mark=mark)
    return {value.name: value for value in values}


WSE_TRAININGS: dict[str, Published] = {
    **_table("WSE table 2", "weight_decay=", {
        "0": 15.20, "0.001": 15.39, "0.01": 15.23, "0.1": SOFTMAX, "0.5": 41.08, "1": 37.71, "2": 6.13, "5": 0.01}),
    **_table("WSE table 3", "position_scheme=", {
        "none": 20.35, "absolute": 32.73, "learned": 33.13, "bucket-number": 35.53, "alibi": 20.78, "rotary": SOFTMAX}),
    **_table("WSE table 4", "", {"softmax": SOFTMAX, "K-bias": 0.0, "V-bias": 17.53}),
    **_table("WSE table 4", "", {"sink-token": 0.0, "KV-bias": 0.04}, TRANSCRIBED),
    **_table("WSE table 5", "", {"K-bias-m1": 0.06, "K-bias-m5": 3.71, "K-bias-m20": 25.88}),
    **_table("WSE table 6", "", {
        "sigmoid": 0.44, "sigmoid-normalized": 30.24, "elu": 0.80, "elu-kernel": 53.65, "identity": 0.0,
        "mlp-kernel": 0.74, "mlp-kernel-normalized": 0.19}),
    **_table("WSE table 9", "learning_rate=", {"0.0001": 2.90, "0.0002": 11.21, "0.0004": SOFTMAX, "0.0008": 32.23}),
    **_table("WSE table 10", "fixed_position=", {"0": 74.11, "1": 69.03, "2": 69.64}),
    **_table("WSE table 10", "bos=", {"auto": 74.11, "never": SOFTMAX}),  # its default has none, a BOS is a fixed token
    **_table("WSE table 11", "feed_forward=", {"swiglu": SOFTMAX}),
    **_table("WSE table 11", "feed_forward=", {
        "geglu": 17.86, "reglu": 13.88, "relu": 16.90, "gelu": 14.76, "swish": 17.89}, TRANSCRIBED),
    **_table("WSE table 12", "num_attention_heads=", {"4": 10.68, "2": 12.95, "1": 19.50}, TRANSCRIBED),
    **_table("WSE table 12", "head_mix=", {"summed": 21.76}, TRANSCRIBED),
    **_table("WSE table 14", "", {"alpha-2": 29.10, "alpha-0.2": 9.41, "alpha-0.1": 3.59, "alpha-0.05": 4.53},
        TRANSCRIBED),
    **_table("WSE §5", "random_tokens=", {"0": SOFTMAX, "1": 27.03, "2": 1.98}),
    **_table("WSE §7.2", "norm_placement=", {"post": 13.54}),
}  # fmt: skip
