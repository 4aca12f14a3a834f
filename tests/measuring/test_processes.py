"""Several processes share the sequences of a run, and their merged results are those of one process."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.encoders import encoder
from support.naming import naming
from support.ranks import on_two_ranks
from tiny import ragged_tokens, tiny_model, written
from transformers import PreTrainedModel

import sinkscope
from sinkscope import Run, SinkscopeError
from sinkscope.commands.claims.evidence import OF_STATES
from sinkscope.measuring import processes
from sinkscope.measuring.observables import OBSERVABLES, gradient_identities
from sinkscope.measuring.processes import Team
from sinkscope.measuring.tracer import Tracer
from sinkscope.results.tables import read_table

LENGTHS = (24, 17, 4, 11, 24, 9, 24)  # in batches of two: the longest sequences are in both halves, not in every batch
OPTIONS: dict[str, Any] = {"batch_size": 2, "positions": 6, "window": 8}
ROUND_OFF: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-9}  # round-off of float64 sums in another order


class Packed(Exception):
    """Raised when the second of two processes has packed its results."""


class Half(Team):
    """One of two processes, simulated alone: the first receives the bytes that the second has packed."""

    def __init__(self, place: int, packed: dict[int, bytes]) -> None:
        super().__init__(place, 2)
        self.packed = packed

    def each(self, mine: Any) -> list[Any]:
        return [mine]

    def of_the_first(self, find: Callable[[], Any]) -> Any:
        return find()

    def one_by_one(self, mine: bytes) -> Iterator[bytes]:
        self.packed[self.place] = mine
        if not self.is_first:
            raise Packed
        return iter([part for _, part in sorted(self.packed.items())])


@contextmanager
def being(members: Team) -> Iterator[None]:
    token = processes._TEAM.set(members)
    try:
        yield
    finally:
        processes._TEAM.reset(token)


def by_halves(model: PreTrainedModel, **options: Any) -> Run:
    """Return the run of the first of two simulated processes."""
    packed: dict[int, bytes] = {}
    with being(Half(1, packed)), pytest.raises(Packed):
        sinkscope.analyze(model, **options)
    with being(Half(0, packed)):
        return sinkscope.analyze(model, **options)


def ids_in(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Path:
    return written(folder / "ids.jsonl", ragged_tokens(lengths))


def assert_same(ours: Any, expected: Any) -> None:
    """Assert that two runs have the same tables: values of single sequences bit for bit, and sums up to round-off."""
    assert set(ours) == set(expected)
    for name, table in expected.items():
        exact = "sequence" in table and name != "sink_positions"
        pd.testing.assert_frame_equal(ours[name], table, check_exact=exact, **({} if exact else ROUND_OFF))


def test_identities_of_two_halves_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The equation is made wrong here: the residuals of the right one are round-off, whatever is summed."""
    right = gradient_identities.gradients_through_logits
    monkeypatch.setattr(
        gradient_identities, "gradients_through_logits",
        lambda read, mix, *others: right(read, torch.zeros_like(mix), *others),
    )  # fmt: skip
    options = {"input": ids_in(tmp_path), **OPTIONS, "observables": ("gradient-identities",)}
    whole, halves = sinkscope.analyze(tiny_model("llama"), **options), by_halves(tiny_model("llama"), **options)
    assert whole.tables["gradient_identity"]["residual"].median() > 0.1
    assert_same(halves.tables, whole.tables)


def test_two_halves_are_the_whole(tmp_path: Path) -> None:
    """All observables are measured, on models of several kinds and sequences of several lengths."""
    measured: set[str] = set()
    for name in ("gpt2", "gpt_oss", "bert"):
        with naming(name):
            model = encoder(name) if name == "bert" else tiny_model(name)
            options = {"input": ids_in(tmp_path), **OPTIONS}
            whole, halves = sinkscope.analyze(model, **options), by_halves(model, **options)
            assert_same(halves.tables, whole.tables)
            assert {"gradient_by_group", "attention_maps"} <= set(whole.tables) or name == "bert"
            for key in ("batch_size", "parity", "input", "scaling", "outside", "notices"):
                assert halves.manifest[key] == whole.manifest[key], key
            assert (halves.manifest["processes"], whole.manifest["processes"]) == (2, 1)
            measured |= {each for each, kind in OBSERVABLES.items() if set(kind.columns) & set(whole.tables)}
    # a new observable has to be measured here, too, because merging needs its sums to be accumulators
    elsewhere = {"equal-tokens", "gate", "largest-logit", "mean-maps", *OF_STATES[2:]}  # below, and of means alone
    elsewhere |= {"super-weight", "head-scores", "sink-output", "over-mixing", "gradient-identities"}  # in other tests
    assert set(OBSERVABLES) - measured == elsewhere


def test_two_halves_of_repeated_tokens_or_of_one_sequence_are_the_whole(tmp_path: Path) -> None:
    """With one sequence, the second process reads the batch of the first, and its results are not counted."""
    repeated = {"input": "repeated", "bos": "never", "num_seqs": 5, "seq_len": 12, "observables": ("equal-tokens",)}
    one = {"input": ids_in(tmp_path, (9,)), **OPTIONS}
    logits = {"input": "random", "num_seqs": 5, "seq_len": 12, **OPTIONS, "observables": ("largest-logit",)}
    states = {"input": ids_in(tmp_path), **OPTIONS, "observables": OF_STATES}
    names = ("super-weight", "head-scores", "sink-output", "over-mixing")
    asked_for = {"input": ids_in(tmp_path), **OPTIONS, "observables": names}
    families = ("bloom", "llama", "llama", "llama", "gpt_oss")
    for name, options in zip(families, (repeated, one, logits, states, asked_for), strict=True):
        model = tiny_model(name)
        whole = sinkscope.analyze(model, **{"batch_size": 2} | options)
        assert_same(by_halves(model, **options).tables, whole.tables)


def outcome(work: Callable[[], Any]) -> str:
    try:
        return str(work())
    except SinkscopeError as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def failing(place: int, error: Exception, owner: Any = Tracer, name: str = "forward_backward") -> Iterator[None]:
    """Raise the error in one process when it calls this function."""
    plain = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["RANK"]) == place:
            raise error
        return plain(*args, **kwargs)

    setattr(owner, name, broken)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def everything(folder: Path) -> None:
    """Run everything on one of two processes, and record how each run ended."""
    rank, model = os.environ["RANK"], folder / "gpt2"
    options = {"input": folder / "ids.jsonl", **OPTIONS}
    outcomes: dict[str, str] = {}

    def run(**more: Any) -> str:
        sinkscope.analyze(model, figures=(), **options | more)
        return "done"

    outcomes["written"] = outcome(lambda: run(out=folder / "two"))
    outcomes["there already"] = outcome(lambda: run(out=folder / "two"))
    for place in (0, 1):
        with failing(place, SinkscopeError("layer 1: NaN")):
            outcomes[f"in a batch of {place}"] = outcome(lambda: run(out=folder / "never"))
        with failing(place, KeyError("what nobody has foreseen"), sinkscope.measuring.measure, "choose"):
            try:
                outcomes[f"elsewhere in {place}"] = outcome(lambda: run(out=folder / "never"))
            except KeyError:
                outcomes[f"elsewhere in {place}"] = "KeyError"
    if rank == "0":  # by itself, as in a user's training
        outcomes["in memory"] = outcome(lambda: sinkscope.analyze(tiny_model("gpt2"), **options).manifest["processes"])
    outcomes["again"] = outcome(lambda: run(out=folder / "again"))
    plain = Tracer.forward_backward

    def limited(self: Any, batch: Any, observables: Any) -> Any:
        if rank == "1" and len(batch.token_ids) > 1:
            raise RuntimeError("CUDA out of memory.")
        return plain(self, batch, observables)

    Tracer.forward_backward = limited  # type: ignore[method-assign]
    outcomes["half the batch"] = outcome(lambda: run(out=folder / "halved"))
    (folder / f"found-{rank}.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    ids_in(folder)
    tiny_model("gpt2").save_pretrained(folder / "gpt2")
    sinkscope.analyze(folder / "gpt2", input=folder / "ids.jsonl", out=folder / "one", figures=(), **OPTIONS)
    ended = on_two_ranks(lambda: everything(folder), folder / "log")
    assert ended == [0, 0], (folder / "log").read_text()[-4000:]
    return folder


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    return {path.stem: read_table(path) for path in (folder / "tables").glob("*.parquet")}


@pytest.mark.slow
def test_two_processes_write_what_one_writes(two: Path) -> None:
    for name in ("two", "again"):  # also after failures
        assert_same(tables(two / name), tables(two / "one"))
    assert json.loads((two / "two" / "run.json").read_text())["processes"] == 2


def test_all_take_half_the_batch_where_one_has_no_memory(two: Path) -> None:
    assert json.loads((two / "halved" / "run.json").read_text())["batch_size"] == 1
    for name, table in tables(two / "one").items():
        ours = tables(two / "halved")[name].select_dtypes("number")
        np.testing.assert_allclose(ours, table.select_dtypes("number"), rtol=2e-3, atol=1e-4, err_msg=name)


def test_what_fails_in_one_process_fails_in_both(two: Path) -> None:
    first, second = (json.loads((two / f"found-{rank}.json").read_text()) for rank in (0, 1))
    there = f"InputError: out={two / 'two'} already holds a run: overwrite=True replaces it, or name another folder"
    nan, unforeseen = "SinkscopeError: layer 1: NaN", "SinkscopeError: unexpected KeyError: 'what nobody has foreseen'"
    expected = {
        "written": "done", "there already": there,
        "in a batch of 0": nan, "elsewhere in 0": "KeyError",
        "in a batch of 1": nan, "elsewhere in 1": unforeseen,
        "again": "done", "half the batch": "done",
    }  # fmt: skip
    assert first == expected | {"in memory": "1"}
    assert second == expected | {"elsewhere in 0": unforeseen, "elsewhere in 1": "KeyError"}
    assert not (two / "never").exists()
    assert not list(two.rglob(".sinkscope-*"))
