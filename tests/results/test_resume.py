"""A folder is gone on with by the same options, and by no others; what another command wrote is left alone."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.manifests import run_manifest

from sinkscope.errors import InputError, SinkscopeError
from sinkscope.results.folders import check_output, check_resumable, claim, new_folder, resumable
from sinkscope.results.manifest import MANIFEST, make_manifest, read_manifest, write_manifest

OPTIONS: dict[str, Any] = {"config": {"steps": 3, "names": ("a", "b")}, "text": "natural"}


def begun(folder: Path, command: str = "retrofit", **options: Any) -> Path:
    """A folder that a command with these options has claimed."""
    given = {"tables": [], **OPTIONS, **options}
    claim(folder, make_manifest(command, start=time.time(), arms={}, **given))
    return folder


# --- the manifest


def test_every_manifest_has_the_same_head(tmp_path: Path) -> None:
    manifest = make_manifest("compare", {"runs": []}, time.time() - 2, ("b", "a"), extra=1)
    assert manifest["tables"] == ["a", "b"]
    assert manifest["wall_seconds"] >= 2
    assert manifest["peak_memory_mb"] > 0
    assert {"sinkscope", "command", "config", "versions", "python", "git_commit", "started", "extra"} < manifest.keys()
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path, ("compare",)) == manifest | {"files": []}
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_the_reader_checks_the_command(tmp_path: Path) -> None:
    begun(tmp_path / "out")
    write_manifest(_made(tmp_path / "out" / "vga"), run_manifest())
    assert read_manifest(tmp_path / "out" / "vga")["command"] == "analyze"
    assert read_manifest(tmp_path / "out", None)["command"] == "retrofit"
    with pytest.raises(InputError, match=r"of `sinkscope retrofit`, not of `analyze`.*but holds runs: name one"):
        read_manifest(tmp_path / "out", ("analyze",))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- resuming


def test_the_same_options_go_on(tmp_path: Path) -> None:
    assert resumable(tmp_path, "retrofit", OPTIONS) is None
    begun(tmp_path)
    found = resumable(tmp_path, "retrofit", OPTIONS)
    assert found is not None
    assert found["config"] == {"steps": 3, "names": ["a", "b"]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"config": {"steps": 4, "names": ("a", "b")}}, "steps was 3, now 4"),
        ({"config": {"steps": 3}}, r"names was \['a', 'b'\], now None"),
        ({"text": "other.txt"}, "text was natural, now other.txt"),
        ({"seeds": 2}, "seeds was None, now 2"),
    ],
)
def test_other_options_are_named(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(InputError, match=f"made with other options .{named}.: repeat them to go on with it"):
        check_resumable(tmp_path, "retrofit", OPTIONS | options, overwrite=False)
    check_resumable(tmp_path, "retrofit", OPTIONS | options, overwrite=True)


def test_what_an_older_version_did_not_record_is_as_by_default(tmp_path: Path) -> None:
    begun(tmp_path)
    options = {**OPTIONS, "config": OPTIONS["config"] | {"decay": 0.1}, "sharded": False}
    defaults = {"config": {"decay": 0.1, "steps": 9}, "sharded": False}
    assert resumable(tmp_path, "retrofit", options, defaults) is not None
    with pytest.raises(InputError, match=r"decay was 0.1, now 0.2"):
        resumable(tmp_path, "retrofit", {**options, "config": options["config"] | {"decay": 0.2}}, defaults)


def test_another_commands_folder_is_refused(tmp_path: Path) -> None:
    begun(tmp_path, "train")
    with pytest.raises(InputError, match="of `sinkscope train`, not of `retrofit`"):
        check_resumable(tmp_path, "retrofit", OPTIONS, overwrite=False)
    with pytest.raises(InputError, match="holds what `train` wrote, and is not replaced"):
        check_resumable(tmp_path, "retrofit", OPTIONS, overwrite=True)
    with pytest.raises(InputError, match="holds what `train` wrote, and is not replaced"):
        check_output(tmp_path, overwrite=True)


def test_a_damaged_manifest_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    for content in ("{", "[]", json.dumps({"command": "retrofit"})):
        (tmp_path / MANIFEST).write_text(content)
        for overwrite in (False, True):
            with pytest.raises(InputError, match="is not the manifest of a run"):
                check_resumable(tmp_path, "retrofit", OPTIONS, overwrite)


def test_claiming_clears_what_a_kill_has_left(tmp_path: Path) -> None:
    (tmp_path / "vga" / ".sinkscope-run-new" / "tables").mkdir(parents=True)
    (tmp_path / "vga" / "model").mkdir()
    begun(tmp_path)
    assert [path.name for path in (tmp_path / "vga").iterdir()] == ["model"]


# --- folders


def written(folder: Path, name: str, error: BaseException | None = None) -> None:
    with new_folder(folder) as fresh:
        (fresh / name).touch()
        if error is not None:
            raise error


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "run"
    with pytest.raises(SinkscopeError, match=r"nothing of it is left: .* No space left"):
        written(target, "half", OSError(28, "No space left on device"))
    assert not list(tmp_path.iterdir())
    written(target, "one")
    with pytest.raises(KeyboardInterrupt):
        written(target, "two", KeyboardInterrupt())
    assert [path.name for path in target.iterdir()] == ["one"]
    assert [path.name for path in target.parent.iterdir()] == ["run"]
