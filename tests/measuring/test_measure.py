"""The progress bar; CONTRIBUTING.md's new observable is measured in tests/test_documents.py."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from support.tables import assert_same_tables
from tiny import tiny_model

import sinkscope
from sinkscope.measuring import measure
from sinkscope.measuring.processes import Team


def test_the_bar_moves_at_every_layer_and_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and, with gradients, backwards; after the first batch it knows the time that is left."""
    asked: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 8, "batch_size": 2, "quiet": False}
    plain = sinkscope.analyze(tiny_model("llama"), **asked)
    moves: list[tuple[float, str]] = []

    def update(progress: Progress, task: Any, completed: float) -> None:
        moves.append((completed, progress.tasks[0].fields["bar"].left))

    monkeypatch.setattr(Progress, "update", update)
    screen = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(Team, "console", lambda *_: screen)
    monkeypatch.setattr(measure, "WORTH_TELLING", -1)
    watched = sinkscope.analyze(tiny_model("llama"), **asked)
    layers = plain.tables["summary"]["layer"].max() + 1
    shares = [2 * move / (2 * layers) for move in range(1, 2 * layers + 1)]
    assert [done for done, _ in moves] == pytest.approx([*shares, 2, *(2 + share for share in shares), 4])
    assert [left for _, left in moves[: 2 * layers]] == [""] * (2 * layers)
    assert moves[2 * layers + 1][1] == "0 s left"
    assert_same_tables(watched.tables, plain.tables, check_exact=True)
    assert "about 0 s, 0.5 GiB; 0.5 GiB in bfloat16" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert watched.manifest["expected"]["seconds"] > 0
    assert watched.manifest["expected"]["memory_mb"] > 500
