"""What editors, notebooks and type checkers know of the Python functions: every option, its type, default and help."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from keywords import KEYWORDS, written
from support.made_up_runs import run_manifest
from support.retrofit_command import command_line
from tiny import tiny_model

import sinkscope
from sinkscope.options.measuring import InputOptions, RunConfig
from sinkscope.options.option import Options, flag
from sinkscope.options.register import options_by_command
from sinkscope.options.signatures import as_keywords

BY_ARGUMENTS = ("compare", "show", "list", "card")  # commands whose functions name their few options
TAKE_OPTIONS = {
    **{name.replace("-", "_"): kind for name, kind in options_by_command().items() if name not in BY_ARGUMENTS},
    "analyze_steps": options_by_command()["analyze"],
    "intervening": InputOptions,
}


def test_the_types_that_type_checkers_read_are_those_of_the_fields() -> None:
    assert KEYWORDS.read_text(encoding="utf-8") == written(), "python tests/keywords.py"


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_function_lists_its_options_with_default_and_help(name: str) -> None:
    """IPython, Jupyter and `help` read the signature and the docstring."""
    function, kind = getattr(sinkscope, name), TAKE_OPTIONS[name]
    shown, text = inspect.signature(function).parameters, " ".join(inspect.getdoc(function).split())
    listed = {option: field for option, field in kind.offered().items() if f" {option}: {field.description}" in text}
    assert listed, "`with_options` lists them; BY_ARGUMENTS names the commands whose functions name their options"
    assert {option: shown[option].default for option in listed} == {name: f.default for name, f in listed.items()}
    # all others are parameters of the function itself
    assert kind.offered().keys() - listed <= {"model", "recipe", "file", "do", "config", "tokenizer"} & shown.keys()
    assert set(shown).isdisjoint(kind.refused)
    assert all(one.kind != one.VAR_KEYWORD for one in shown.values())


def test_every_command_is_a_function_and_every_class_of_options_is_described() -> None:
    assert {name.replace("-", "_") for name in options_by_command()} <= set(dir(sinkscope))
    assert sinkscope.run is sinkscope.run_recipe
    assert "list" not in sinkscope.__all__  # `from sinkscope import *` would replace Python's own
    assert sinkscope.list("metrics")["metric"].tolist()[0] == "sink_rate"
    assert set(sinkscope.list()) >= {"tables", "claims"}
    assert sinkscope.__version__.count(".") == 2
    with pytest.raises(sinkscope.InputError, match="did you mean 'tables'"):
        sinkscope.list("table")
    kinds = [Options]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind.__doc__, kind


@pytest.mark.parametrize(
    ("message", "in_python"),
    [
        ("--seq-len 64 is beyond it: take --dtype bfloat16,", "seq_len=64 is beyond it: take dtype=bfloat16,"),
        ("--prompt has 1 token", "prompt=… has 1 token"),
        ("--input: no other --seq-len or --device-map", "input=…: no other seq_len=… or device_map=…"),
        ("--force goes on; --overwrite replaces it", "force=True goes on; overwrite=True replaces it"),
        ("--steps 3; `sinkscope train --seq-len 3`", "--steps 3; `sinkscope train --seq-len 3`"),  # no options of it
        ("the folder a--seq-len", "the folder a--seq-len"),
    ],
)
def test_messages_spell_options_as_keywords(message: str, in_python: str) -> None:
    assert as_keywords(message, RunConfig) == in_python


@pytest.mark.parametrize(
    ("options", "in_python", "typed"),
    [
        ({"num_seqs": 0}, "num_seqs=0: it must", "--num-seqs 0: it must"),
        ({"prompt": "a"}, "prompt=… needs a tokenizer", "--prompt needs a tokenizer"),
        ({"input": "random", "observables": "attention,query"}, "observables='query' is", "--observables 'query' is"),
    ],
)
def test_errors_name_keywords_in_python_and_flags_on_a_command_line(
    tmp_path: Path, options: dict[str, Any], in_python: str, typed: str
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(sinkscope.InputError, match=re.escape(in_python)):
        sinkscope.analyze(tmp_path / "bare", **options)
    result = command_line(
        "analyze", tmp_path / "bare", *(part for name in options for part in (flag(name), options[name]))
    )
    assert (result.exit_code, typed in result.stderr) == (2, True)


def test_errors_of_functions_that_take_a_model_or_runs_name_keywords() -> None:
    model, run = tiny_model("llama"), sinkscope.Run(run_manifest(command="quantize"), {})
    calls: list[tuple[str, Callable[[], object]]] = [
        ("epsilon=2.0: it", lambda: sinkscope.watch(model, epsilon=2.0).__enter__()),
        ("num_seqs=0: it", lambda: sinkscope.SinkCallback(num_seqs=0)),
        ("adapter=./none: no such folder", lambda: sinkscope.load(adapter="./none")),
        ("seq_len=1: it", lambda: sinkscope.intervening(model, "zero-massive", seq_len=1).__enter__()),
        ("prompt=… needs", lambda: sinkscope.intervening(model, "zero-massive", prompt="a").__enter__()),
        ("metrics=… and by=… are", lambda: sinkscope.compare(run, run, metrics="x")),
    ]
    for message, call in calls:
        with pytest.raises(sinkscope.InputError, match=re.escape(message)):
            call()
