"""Settings of `train` that claims vary: which options and entries of a configuration say one, and its level."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from sinkscope.options.training import tokens_a_step
from sinkscope.paper_claims.trainings import Training

Level = float | str


@dataclass(frozen=True)
class Factor:
    """One setting.

    Attributes:
        settings: The entries of `Training.settings` that may differ, and no others.
        level: The setting's value; None where a folder does not say.
        options: What has to be given to `train`, as it is typed.
        fixed: What has to be the same besides.
    """

    settings: tuple[str, ...]
    level: Callable[[Training], Level | None]
    options: str
    fixed: Callable[[Training], Any] = lambda training: None


def _setting(*names: str) -> Callable[[Training], Level | None]:
    """The first of these entries that a training has."""
    return lambda training: next((found for name in names if (found := training.settings.get(name)) is not None), None)


def _tokens_a_step(training: Training) -> Level:
    return tokens_a_step(training.settings, training.settings["processes"])


def _tokens(training: Training) -> Level | None:
    """That are there to train on, each counted once."""
    blocks = training.manifest.get("text_blocks")
    return None if blocks is None else blocks * training.settings["block_length"]


def _rate_times_steps(training: Training) -> float:
    return float(f"{training.settings['learning_rate'] * training.settings['steps']:.6g}")


def _window(training: Training) -> Level:
    """In tokens; ∞ where all earlier ones are seen."""
    return training.settings.get("sliding_window") or inf


RATES = ("learning_rate", "new_learning_rate")  # the second is that of methods, of which a plain training has none
IN_A_CONFIG = "--config config.json, several that differ in"

FACTORS = {
    "learning-rate": Factor(RATES, _setting("learning_rate"), "--learning-rate R, with several R"),
    "learning-rate-and-steps": Factor(
        (*RATES, "steps"),
        _setting("learning_rate"),
        "--learning-rate R --steps N, with several R and the same R × N",
        _rate_times_steps,
    ),
    "batch-size": Factor(("batch_size", "accumulation", "processes"), _tokens_a_step, "--batch-size N, with several N"),
    "data": Factor(("tokens",), _tokens, "--tokens N, with a small N and a large one"),
    "random-tokens": Factor(("random_tokens",), _setting("random_tokens"), "--random-tokens N, with N = 0, 1 and 2"),
    "fixed-position": Factor(
        ("fixed_position",), _setting("fixed_position"), "--fixed-position K, with K = 0, 1 and 2"
    ),
    "positions": Factor(
        ("position_scheme",),
        _setting("position_scheme"),
        "--config llama-60m:position_scheme=S, with S = none, absolute, learned, relative, alibi and rotary",
    ),
    "weight-decay": Factor(
        ("weight_decay",), _setting("weight_decay"), "--weight-decay W, with W = 0, others from 0.1 to 2, and 5"
    ),
    "window": Factor(
        ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        _window,
        f"{IN_A_CONFIG} sliding_window",
    ),
    "feed-forward": Factor(
        ("feed_forward", "hidden_act", "activation_function"),
        _setting("feed_forward", "hidden_act", "activation_function"),
        f"{IN_A_CONFIG} hidden_act",
    ),
    "heads": Factor(
        ("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"),
        _setting("num_attention_heads", "n_head"),
        f"{IN_A_CONFIG} num_attention_heads",
    ),
}
