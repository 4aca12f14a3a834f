"""RunConfig: its defaults, the options that it refuses, and its round trip through run.json."""

import math
from pathlib import Path
from typing import Any

import pytest

from sinkscope.errors import InputError
from sinkscope.options.measuring import RunConfig, make_config


def refusal(**options: Any) -> str:
    with pytest.raises(InputError) as caught:
        make_config(**options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults() -> None:
    config = make_config()
    assert (config.num_seqs, config.seq_len, config.positions, config.window) == (100, 64, 16, 64)
    assert (config.epsilon, config.input, config.bos, config.seed) == (0.3, "natural", "auto", 0)
    assert (config.batch_size, config.attn, config.observables) == ("auto", "sdpa", None)
    for length, positions, window in ((8, 8, 8), ("24", 16, 24), (512, 16, 64)):
        config = make_config(seq_len=length)
        assert (config.positions, config.window) == (positions, window)
    assert make_config(seq_len=24, window=24, positions=3).positions == 3
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


def test_refusals() -> None:
    dtypes = "'float23' is unknown; did you mean 'float32'? known: float32, bfloat16, float16"
    for options, message in (
        ({"seq_len": 24, "window": 25}, "--window 25 is beyond the sequence of 24 tokens"),
        ({"positions": 65}, "--positions 65 is beyond the sequence of 64 tokens"),
        ({"epsilon": math.nan}, "--epsilon nan: it must be a number"),
        ({"epsilon": 1.5}, "--epsilon 1.5: it must be at most 1"),
        ({"seq_len": 1}, "--seq-len 1: it must be at least 2"),
        ({"num_seqs": 2.5}, "--num-seqs 2.5: it must be a whole number"),
        ({"batch_size": 0}, "--batch-size 0: at least 1 sequence is needed in a batch"),
        ({"batch_size": "some"}, "--batch-size some: it must be a whole number or auto"),
        ({"dtype": "float23"}, dtypes),
        ({"attn": "flash"}, "--attn 'flash' is unknown; known: sdpa, eager"),
        ({"device_map": "gpu"}, "did you mean 'cpu'"),
        ({"seq_length": 8}, "option 'seq_length' is unknown; did you mean 'seq_len'?"),
        ({"observables": ""}, "none was named; `sinkscope list observables` shows the names"),
    ):
        assert message in refusal(**options)
    assert make_config(observables="attention, massive,attention").observables == ("attention", "massive")
    assert make_config(input=Path("here") / "text.txt").input == str(Path("here") / "text.txt")
