"""Every reader works with a run.json that was edited by hand, or names the wrong entry in one line."""

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.figures import skip_figures
from tiny import FORWARD, tiny_model

import sinkscope
import sinkscope.results.run
from sinkscope import InputError, Run, compare
from sinkscope.commands.measured import differences, options_of_run
from sinkscope.options.register import options_by_command
from sinkscope.results.folders import check_output
from sinkscope.results.manifest import read_manifest
from sinkscope.results.schema import RunManifest

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 16}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf")),
    *("", "x", "../x", "x" * 3000, "\\ud800", "a\nb", [], ["x"], [None], {}, {"x": "y"}, {"x": None}),
)


@pytest.fixture(autouse=True)
def always_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    monkeypatch.setattr(sinkscope.results.run, "read_table", cache(sinkscope.results.run.read_table))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of every command that measures. Tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_model("llama").save_pretrained(folder / "tiny")
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        # without gradients, because no entry affects their findings, and reading them takes half of the time
        sinkscope.analyze(folder / "tiny", out=folder / "analyze", observables=FORWARD, **SMALL)
        do = ["mask-sink"]
        sinkscope.intervene(folder / "tiny", do, out=folder / "intervene", draws=1, **SMALL)
        sinkscope.quantize(folder / "tiny", out=folder / "quantize", calibration=2, **SMALL)
    return folder


def edits(content: Any, replace: Callable[[Any], Any] = lambda part: part) -> Iterator[Any]:
    """Yield the content with each of its entries left out, and with another value for each entry."""
    entries = list(content.items()) if isinstance(content, dict) else list(enumerate(content))
    for key, value in entries:
        kept = [(name, part) for name, part in entries if name != key]
        yield replace(dict(kept) if isinstance(content, dict) else [part for _, part in kept])

        def replaced(edit: Any, key: Any = key) -> Any:
            changed = [(name, edit if name == key else part) for name, part in entries]
            return replace(dict(changed) if isinstance(content, dict) else [part for _, part in changed])

        yield replaced(random.choice(VALUES))
        if isinstance(value, dict | list) and value:
            yield from edits(value, replaced)


def read_in_every_way(folder: Path, whole: Path, command: str) -> None:
    run = Run.open(folder)
    run.verdict  # noqa: B018
    assert differences(folder, read_manifest(whole)) is not None
    if command == "analyze":
        compare(run, Run.open(whole))


def refusal(read: Callable[[], Any]) -> str:
    """Return the error message, of one or two lines; "" without an error."""
    try:
        read()
    except InputError as error:
        message = str(error)
    else:
        return ""
    assert len(message.splitlines()) in (1, 2)
    return message


@pytest.mark.slow
@pytest.mark.parametrize("command", ["analyze", "intervene", "quantize"])
def test_every_entry_edited_by_hand(command: str, runs: Path, tmp_path: Path) -> None:
    """Entries that all three runs have are edited only once."""
    folder, whole = tmp_path / command, runs / command
    folder.mkdir()
    (folder / "tables").symlink_to(whole / "tables")
    content = json.loads((whole / "run.json").read_text())
    count = {"read": 0, "refused": 0}
    left = {"versions", "files"} | (RunManifest.model_fields.keys() if command != "analyze" else set())
    for changed in edits({name: part for name, part in content.items() if name not in left}):
        edited = {name: content[name] for name in left & content.keys()} | changed
        (folder / "run.json").write_text(json.dumps(edited).replace("\\\\ud800", "\\ud800"))
        message = refusal(lambda: read_in_every_way(folder, whole, command))
        count["refused" if message else "read"] += 1
        assert not message or str(folder) in message
        refusal(lambda: options_of_run(folder, command, options_by_command()[command]))
        refusal(lambda: check_output(folder, overwrite=True))
    assert min(count.values()) > (50 if command == "analyze" else 5), count
