"""Readers give a right result or one InputError of one or two lines for any input; tests/torture/ tries more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import bad_inputs as bad
from support.retrofit_command import words_tokenizer

from sinkscope.commands.train.arms import parse_methods
from sinkscope.errors import InputError
from sinkscope.interventions import parse
from sinkscope.models.files import read_settings
from sinkscope.options.files import kind_of, user_path
from sinkscope.options.option import checked
from sinkscope.options.recipe import find_recipe, read_recipe
from sinkscope.options.register import options_by_command
from sinkscope.text.inputs import build_inputs
from sinkscope.text.sources import check_source, documents

few = settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
VOCABULARY, TOKENIZER = 50, words_tokenizer()
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
CONFIG |= {"text_config": {"n_layer": 1}}


def ends_well(reader: Callable[[], Any]) -> Any:
    """Return the reader's result; None if it refuses with one or two lines."""
    try:
        return reader()
    except InputError as error:
        lines = str(error).splitlines()
    assert len(lines) in (1, 2)
    assert all(line.strip() for line in lines)
    return None


def read_inputs(path: Path) -> None:
    """Check that every id is in the vocabulary, and that no sequence is longer than asked for."""
    sizes = {"vocab_size": VOCABULARY + 1, "num_seqs": 3, "seq_len": 4}
    inputs = ends_well(lambda: build_inputs(path, tokenizer=TOKENIZER if path.suffix != ".npy" else None, **sizes))
    for ids in inputs.sequences if inputs else ():
        assert 2 <= len(ids) <= 4
        assert ((ids >= 0) & (ids <= VOCABULARY)).all()


def read_text(path: Path) -> None:
    """Check a text as the input of a measurement, and as the text of a training."""
    read_inputs(path)
    for text in ends_well(lambda: list(documents(str(path))[1])) or ():
        text.encode()  # a tokenizer is trained on it


def read_a_recipe(path: Path) -> None:
    recipe = ends_well(lambda: read_recipe(path))
    if recipe is not None:
        json.dumps(recipe.record, allow_nan=False).encode()  # an entry of run.json
        ends_well(lambda: recipe.options({}))


def read_a_config(path: Path) -> None:
    settings = ends_well(lambda: read_settings(path))
    if settings is not None:
        assert isinstance(settings.get("model_type", ""), str | None)
        assert (settings.get("num_hidden_layers") or 1) in range(1, 1001)


# file → its contents, and its reader
FILES: dict[str, tuple[st.SearchStrategy[bytes], Callable[[Path], None]]] = {
    "x.txt": (bad.text_files, read_text),
    "x.jsonl": (bad.json_lines | st.sampled_from([b'{"text": "\\ud800", "input_ids": [1]}', *bad.NESTED]), read_text),
    "x.npy": (bad.npy_files, read_inputs),
    "x.yaml": (bad.recipes, read_a_recipe),
    "x.json": (bad.edited(CONFIG).map(bad.written) | bad.some_json | bad.damaged(bad.written(CONFIG)), read_a_config),
}


@pytest.mark.parametrize("name", FILES)
@few
@given(data=st.data())
def test_files(name: str, data: st.DataObject, tmp_path: Path) -> None:
    contents, read = FILES[name]
    (tmp_path / name).write_bytes(data.draw(contents))
    read(tmp_path / name)


# kind of text → its values, and its readers
TEXTS: dict[str, tuple[st.SearchStrategy[str], tuple[Callable[[str], Any], ...]]] = {
    "interventions": (bad.interventions, (parse,)),
    "retrofits": (bad.retrofits, (parse_methods,)),
    "names": (bad.odd_texts, (lambda text: kind_of(user_path(text)), check_source, find_recipe)),
}


@pytest.mark.parametrize("kind", TEXTS)
@settings(few, max_examples=100)
@given(data=st.data())
def test_texts(kind: str, data: st.DataObject) -> None:
    values, readers = TEXTS[kind]
    text = data.draw(values)
    for read in readers:
        ends_well(lambda: read(text))  # noqa: B023


@pytest.mark.parametrize("command", options_by_command())
@settings(few, max_examples=40)
@given(data=st.data())
def test_options(command: str, data: st.DataObject) -> None:
    """Values are text as on the command line, YAML values as in recipes, and Python objects."""
    kind = options_by_command()[command]
    names = st.sampled_from(sorted(kind.model_fields)) | bad.odd_texts
    values = bad.odd_numbers | bad.odd_numbers.map(str) | bad.odd_texts | bad.json_values
    options = data.draw(st.dictionaries(names, values, min_size=1, max_size=2))
    resolved = ends_well(lambda: checked(kind, options))
    if resolved is not None:
        ends_well(resolved.folder)
        resolved.model_dump(mode="json")
