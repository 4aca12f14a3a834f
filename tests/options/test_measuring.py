"""RunConfig: its defaults, its refusals, and that run.json gives it back."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sinkscope.errors import InputError
from sinkscope.options.measuring import AnalyzeOptions, RunConfig, make_config
from sinkscope.options.option import as_folder_name


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


@pytest.mark.parametrize(("seq_len", "positions", "window"), [(8, 8, 8), (24, 16, 24), (64, 16, 64), (512, 16, 64)])
def test_defaults_shrink_with_the_sequence(seq_len: int, positions: int, window: int) -> None:
    config = make_config(seq_len=seq_len)
    assert (config.positions, config.window) == (positions, window)


def test_seq_len_as_text_shrinks_them_too() -> None:
    assert make_config(seq_len="24").window == 24


def test_what_was_asked_for_does_not_shrink() -> None:
    assert make_config(seq_len=24, window=24, positions=3).positions == 3
    assert refusal(seq_len=24, window=25).startswith("--window 25 is beyond the sequence of 24 tokens")
    assert refusal(positions=65).startswith("--positions 65 is beyond the sequence of 64 tokens")


@pytest.mark.parametrize("epsilon", [0, 1, 0.3])
def test_epsilon_may_be_any_share(epsilon: float) -> None:
    assert make_config(epsilon=epsilon).epsilon == epsilon


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": math.nan}, "--epsilon nan: it must be a number"),
        ({"epsilon": math.inf}, "--epsilon inf: it must be a number"),
        ({"epsilon": 1.5}, "--epsilon 1.5: it must be at most 1"),
        ({"epsilon": -0.1}, "--epsilon -0.1: it must be at least 0"),
        ({"seq_len": 1}, "--seq-len 1: it must be at least 2"),
        ({"seq_len": None}, "--seq-len None: it must be a whole number"),
        ({"num_seqs": 0}, "--num-seqs 0: it must be at least 1"),
        ({"num_seqs": 2.5}, "--num-seqs 2.5: it must be a whole number"),
        ({"seed": -1}, "--seed -1: it must be at least 0"),
        ({"batch_size": 0}, "--batch-size 0: at least 1 sequence is needed in a batch"),
        ({"batch_size": "some"}, "--batch-size some: it must be a whole number or auto"),
        (
            {"dtype": "float23"},
            "'float23' is unknown; did you mean 'float32'? known: float32, bfloat16, float16",
        ),
        ({"bos": "alway"}, "did you mean 'always'?"),
        ({"attn": "flash"}, "--attn 'flash' is unknown; known: sdpa, eager"),
        ({"device_map": "gpu"}, "did you mean 'cpu'"),
        ({"seq_length": 8}, "option 'seq_length' is unknown; did you mean 'seq_len'?"),
        ({"observables": ""}, "none was named; `sinkscope list observables` shows the names"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    assert message in refusal(**options)


def test_observables_as_the_command_line_has_them() -> None:
    assert make_config(observables="attention, massive,attention").observables == ("attention", "massive")
    assert make_config(observables=["massive"]).observables == ("massive",)


def test_paths_are_kept_as_text() -> None:
    assert make_config(input=Path("here") / "text.txt").input == str(Path("here") / "text.txt")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "org/name", "revision": "r", "dtype": "bfloat16", "trust_remote_code": True},
        {
            "seq_len": 20,
            "window": 5,
            "observables": ("massive", "outlier"),
            "batch_size": 4,
            "epsilon": 0.123,
        },
    ],
)
def test_run_json_gives_it_back(options: dict[str, Any]) -> None:
    config = make_config(**options)
    assert make_config(**json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_it_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "models/a b"}, {"model": "models/a-b"}),
        ({"model": "models/a b"}, {"model": "models/a~b"}),
        ({"model": "models/???"}, {"model": "models/!!!"}),
        ({"model": "models/.a"}, {"model": "models/a"}),
        ({"model": "m", "input": "my text.txt"}, {"model": "m", "input": "my-text.txt"}),
        ({"model": "m", "revision": "refs/pr/1"}, {"model": "m", "revision": "refs-pr-1"}),
    ],
)
def test_odd_names_have_folders_of_their_own(one: dict[str, Any], other: dict[str, Any]) -> None:
    folders = [AnalyzeOptions(**options).folder() for options in (one, other)]
    assert folders[0] != folders[1]
    assert all(folder.parent == Path("runs") and as_folder_name(folder.name) == folder.name for folder in folders)


def test_plain_names_stay_as_they_are() -> None:
    options = AnalyzeOptions(model="org/Name-1.5_b", revision="step512")
    assert options.folder() == Path("runs/Name-1.5_b-step512-natural")
