"""The registration of a new observable, and the progress bar."""

import io
from typing import Any, ClassVar

import pandas as pd
import pytest
from rich.console import Console
from rich.progress import Progress
from support.tables import assert_same_tables
from tiny import tiny_model

import sinkscope
from sinkscope.measuring import measure
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.processes import Team
from sinkscope.results.tables import LEADING, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch


class LastToken(Observable):
    name = "last-token"
    about = "the last token of every sequence"
    sites = ("layer_out",)
    columns: ClassVar = {"last_token": (SEQUENCE, TOKEN_ID, TOKEN, Column("depth", "a number", "layers"))}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows: list[tuple[int, int, int, int]] = []

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        for row, ids in enumerate(batch.token_ids.tolist()):
            self.rows.append((layer, batch.first + row, layer + 1, ids[-1]))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"last_token": pd.DataFrame(self.rows, columns=["layer", "sequence", "depth", "token_id"])}


def test_a_new_observable_is_a_class_and_a_line_in_the_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBSERVABLES, "last-token", LastToken)
    run = sinkscope.analyze(tiny_model("llama"), input="random", num_seqs=3, seq_len=8)
    table = run.tables["last_token"]
    assert table.columns.tolist() == [*LEADING, "sequence", "token_id", "token", "depth"]
    assert set(table["model"]) == {"LlamaForCausalLM"}
    assert (table["depth"] == table["layer"] + 1).all()
    assert set(table["sequence"]) == {0, 1, 2}
    assert table["token"].tolist() == [f"<id {token}>" for token in table["token_id"]]
    columns = sinkscope.list("tables").query("table == 'last_token'")
    assert columns["column"].tolist() == ["sequence", "token_id", "token", "depth"]
    assert columns["unit"].tolist()[-1] == "layers"
    assert "last-token" in sinkscope.list("observables")["observable"].tolist()


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
    assert "about 0 s, 0.5 GB; 0.5 GB in bfloat16" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert watched.manifest["expected"]["seconds"] > 0
    assert watched.manifest["expected"]["memory_mb"] > 500
