"""The choice of a run's observables, and the registration of a new one."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import pandas as pd
import pytest
from tiny import tiny_model

import sinkscope
from sinkscope import Run
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.list import listing
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.results.tables import LEADING, POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch


class LastToken(Observable):
    """Records the last token of every sequence: table `last_token`."""

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


class Closer(Observable):
    """Counts the sequences that a follow-up at the strongest position sees: table `closer`."""

    name = "closer"
    about = "a follow-up"
    sites = ("attention",)
    after = ("attention", "last-token")
    columns: ClassVar = {"closer": (POSITION, Column("sequences", "seen at once"))}
    position = -1

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sequences: dict[int, int] = {}

    @classmethod
    def aimed(cls, settings: Settings, tables: Mapping[str, pd.DataFrame]) -> Self:
        made = cls(settings)
        attention = tables["attention"]
        made.position = int(attention.loc[attention["window_mass"].idxmax(), "position"])
        return made

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self.sequences[layer] = len(batch.token_ids)

    def tables(self) -> dict[str, pd.DataFrame]:
        rows = [(layer, self.position, count) for layer, count in self.sequences.items()]
        return {"closer": pd.DataFrame(rows, columns=["layer", "position", "sequences"])}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBSERVABLES, "closer", Closer)
    monkeypatch.setitem(OBSERVABLES, "last-token", LastToken)


def run_of(**options: Any) -> Run:
    return sinkscope.analyze(tiny_model("llama"), input="random", num_seqs=3, seq_len=8, **options)


@pytest.mark.usefixtures("registered")
def test_a_new_observable_is_a_class_and_a_line_in_the_register() -> None:
    table = run_of().tables["last_token"]
    assert table.columns.tolist() == [*LEADING, "sequence", "token_id", "token", "depth"]
    assert set(table["model"]) == {"LlamaForCausalLM"}
    assert (table["depth"] == table["layer"] + 1).all()
    assert set(table["sequence"]) == {0, 1, 2}
    assert table["token"].tolist() == [f"<id {token}>" for token in table["token_id"]]
    columns = listing("tables")["tables"].query("table == 'last_token'")
    assert columns["column"].tolist() == ["sequence", "token_id", "token", "depth"]
    assert columns["unit"].tolist()[-1] == "layers"
    assert "last-token" in listing("observables")["observables"]["observable"].tolist()


@pytest.mark.usefixtures("registered")
def test_a_follow_up_sees_the_first_sequence_aimed_by_the_tables_before() -> None:
    run = run_of(observables=("attention", "last-token"))
    closer = run.tables["closer"]
    assert closer.columns.tolist() == [*LEADING, "position", "sequences"]
    assert set(closer["sequences"]) == {1}
    attention = run.tables["attention"]
    assert set(closer["position"]) == {attention.loc[attention["window_mass"].idxmax(), "position"]}
    assert "closer" not in run_of(observables=("attention",)).tables
    named = run_of(observables=("closer",))  # brings what it follows
    assert set(named.tables) == set(run.tables)
    pd.testing.assert_frame_equal(named.tables["closer"], closer)
