"""What editors, notebooks and type checkers know of the Python functions: every option, its type, default and help."""

import inspect

import pytest
from keywords import KEYWORDS, written

import sinkscope
from sinkscope.options.measuring import InputOptions
from sinkscope.options.option import Options
from sinkscope.options.register import options_by_command

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
