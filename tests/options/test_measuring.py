"""Every option is declared once, for the command line, recipes and run.json; defaults, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sinkscope.cli.app import app
from sinkscope.commands.train.options import RetrofitOptions, TrainOptions
from sinkscope.errors import InputError
from sinkscope.measuring.summary import uniform_mass
from sinkscope.options.measuring import RunConfig, make_config
from sinkscope.options.option import checked, flag
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import options_by_command
from sinkscope.options.spec import parse_spec
from sinkscope.results.metrics import CLEAR, at_odds


def test_defaults() -> None:
    config = make_config()
    assert (config.num_seqs, config.seq_len, config.positions, config.window) == (100, 64, 16, 64)
    assert (config.epsilon, config.input, config.bos, config.seed) == (0.3, "natural", "auto", 0)
    assert (config.batch_size, config.attn, config.observables) == ("auto", "sdpa", None)
    uniform = float(uniform_mass(config.seq_len, 1)[0])
    assert config.epsilon > at_odds(uniform, CLEAR)  # every sink by default is clear of random weights
    for length, positions, window in ((8, 8, 8), ("24", 16, 24), (512, 16, 64)):
        config = make_config(seq_len=length)
        assert (config.positions, config.window) == (positions, window)
    assert make_config(seq_len=24, window=24, positions=3).positions == 3
    config = make_config(input=["a", "b", "c"], num_seqs=2, seq_len=8)  # what is not named reads all of it
    assert (config.num_seqs, config.seq_len, config.reads_all) == (2, 8, False)
    assert make_config(input=["a", "b", "c"]).reads_all
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


def test_runs_of_other_revisions_files_and_inputs_have_other_names() -> None:
    for options, name in (
        ({"revision": "refs-pr-1"}, "name-refs-pr-1-natural"),
        ({"gguf_file": "name.Q4_K.gguf"}, "name.Q4_K-natural"),
        ({"dataset": "org/texts:small:test"}, "name-texts"),
        ({"prompt": "the drain"}, "name-prompt"),
    ):
        assert make_config(model="org/name", **options).run_name == name
    assert make_config(model="org/name", revision="refs/pr/1").run_name != "name-refs-pr-1-natural"


def test_parameters_have_names_of_fields_and_the_last_one_takes_further_values() -> None:
    parameters = {"layers": "3", "massive_rows": "138,447", "draws": "2"}
    assert parse_spec("name:layers=3,massive-rows=138,447,draws=2", "--do") == ("name", parameters)


def test_refusals() -> None:
    dtypes = "'float23' is unknown; did you mean 'float32'? known: float32, bfloat16, float16"
    for options, message in (
        ({"seq_len": 24, "window": 25}, "--window 25 is beyond the sequence of 24 tokens"),
        ({"positions": 65}, "--positions 65 is beyond the sequence of 64 tokens"),
        ({"positions": -1}, "--positions -1: it is how many positions are reported, from position 0 on"),
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
        with pytest.raises(InputError) as caught:
            make_config(**options)
        (line,) = str(caught.value).split("\n")
        assert message in line
    assert make_config(observables="attention, massive,attention").observables == ("attention", "massive")
    assert make_config(input=Path("here") / "text.txt").input == str(Path("here") / "text.txt")
    assert OutputOptions(out="~/run").out == Path.home() / "run"


@pytest.mark.parametrize("name", options_by_command())
def test_help_shows_every_option(name: str) -> None:
    kind = options_by_command()[name]
    text = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"]).stdout.split())
    for field, info in kind.model_fields.items():
        is_shown = field not in (*kind.arguments, *kind.refused, *kind.hidden)
        assert (f"{flag(field)} " in text) == is_shown, field
        if is_shown:
            assert str(info.description)[:30] in text
    assert ("--out " in text) == bool(kind.writes)
    assert ("--from " in text) == (kind.repeatable or "from_" in kind.model_fields)


def test_run_json_gives_the_options_back() -> None:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("analyze", {"seq_len": 20, "window": 5, "observables": "massive,outlier", "batch_size": 4, "revision": "r"}),
        ("intervene", {"do": ["mask-sink", "replace-epe:source=1"], "draws": 2}),
        ("intervene", {"arms": {"one": "mask-sink", "two": ["mask-sink", "zero-massive"]}}),
        ("quantize", {"scheme": "static", "bits_weights": 4, "seq_len": 8}),
        ("quantize", {"scheme": ["FP8", "W8A8"]}),
        ("retrofit", {"method": {"VGA": "vga:placement=output"}, "steps": 3}),
        ("train", {"method": "none,vscale", "seeds": 2, "learning_rate": 0.1}),
    )
    for command, options in cases:
        asked = checked(options_by_command()[command], options)
        assert checked(options_by_command()[command], json.loads(asked.model_dump_json())) == asked


def test_defaults_of_a_training_from_random_weights() -> None:
    assert (TrainOptions().steps, RetrofitOptions().steps) == (2000, 6000)
    assert TrainOptions().new_learning_rate == TrainOptions().learning_rate == 1e-3
    assert TrainOptions(learning_rate=0.5).new_learning_rate == 0.5
    assert TrainOptions(learning_rate=0.5, new_learning_rate=0.1).new_learning_rate == 0.1


def test_arms_are_measured_on_blocks() -> None:
    measuring = RetrofitOptions(block_length=32, batch_size=2, dataset="org/text", num_seqs=5, model="org/m").measuring
    assert (measuring.seq_len, measuring.window, measuring.num_seqs, measuring.model) == (32, 32, 5, "org/m")
    assert (measuring.batch_size, measuring.dataset, measuring.dtype) == ("auto", None, "float32")
    for command, wrong, reason in (
        ("retrofit", {"dtype": "float16"}, "gradients become infinite in it"),
        ("retrofit", {"device_map": "auto"}, "stays on one GPU"),
        ("quantize", {"observables": ["massive"]}, "always measures perplexity and outliers"),
        ("train", {"only_new": True}, "begins with random weights"),
    ):
        with pytest.raises(InputError, match=reason):
            checked(options_by_command()[command], wrong)
