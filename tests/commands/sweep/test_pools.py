"""The workers of a sweep: the accelerators that they get, on a machine that is said to have some, and their streams."""

import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sinkscope.commands.sweep import pools
from sinkscope.commands.sweep.pools import Processes, RayTasks, run_groups, split
from sinkscope.commands.sweep.worker import ALL, Event, Group, State, Task, devices_for, prepare_worker
from sinkscope.measuring.console import PrintableStream


def started(monkeypatch: pytest.MonkeyPatch, workers: int, accelerators: int) -> tuple[Processes, list[Any]]:
    """Return a pool on a machine with accelerators, and the list of the devices of each worker that it starts."""
    devices: list[Any] = []

    def process(target: Any, args: tuple) -> Any:
        devices.append(args[3])
        return SimpleNamespace(start=lambda: None, terminate=lambda: None, join=lambda *_: None, is_alive=bool)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: accelerators)
    pool = Processes(workers)
    monkeypatch.setattr(pool, "_context", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process))
    return pool, devices


@pytest.mark.parametrize(
    ("device_map", "devices"),
    [("cpu", 0), (None, 1), ("cuda", 1), ("xpu", 1), ("auto", ALL), ("balanced", ALL), ("cuda:1", ALL)],
)
def test_accelerators_of_a_cell(device_map: str | None, devices: int) -> None:
    assert devices_for(device_map) == devices


def test_each_worker_sees_what_its_cell_uses_and_all_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, seen = started(monkeypatch, workers=3, accelerators=3)
    for devices in (1, 0, 1):
        assert pool.has_room(Group((), devices=devices))
        pool.start(Group((), devices=devices))
    assert seen == [[0], [], [1]]
    pool.close()
    pool.start(Group((), devices=ALL))
    assert seen[-1] == [0, 1, 2]
    assert not pool.has_room(Group((), devices=1))  # all are taken …
    assert pool.has_room(Group((), devices=0))  # … by a cell that leaves the CPU free
    pool.close()
    pool, seen = started(monkeypatch, workers=4, accelerators=2)
    for _ in range(4):
        assert pool.has_room(Group((), devices=1))
        pool.start(Group((), devices=1))
    assert seen == [[0], [1], [0], [1]]  # more workers than accelerators share them
    pool.close()
    monkeypatch.setattr(pools, "available_memory", lambda: 10)
    pool, _ = started(monkeypatch, workers=3, accelerators=0)
    pool.start(Group((), memory=6))
    assert pool.has_room(Group((), memory=4))
    assert not pool.has_room(Group((), memory=5))
    pool.close()


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), workers=st.integers(1, 8))
def test_groups_are_split_until_every_worker_has_one(sizes: list[int], workers: int) -> None:
    groups = [Group(tuple(f"{place}-{cell}" for cell in range(size))) for place, size in enumerate(sizes)]  # type: ignore
    parts = split(groups, workers)
    assert [task for part in parts for task in part.tasks] == [task for group in groups for task in group.tasks]
    assert len(parts) == max(len(groups), min(workers, sum(sizes)))
    if len(parts) > len(groups):  # no part could have been halved instead of a smaller one
        assert max(len(part.tasks) for part in parts) <= max(1, -(-max(sizes) // 2), *sorted(sizes)[:-1])


class Scripted:
    """A pool without processes, whose workers are lost in the cells that are called so, or before their first one."""

    workers = 2

    def __init__(self) -> None:
        self.running: dict[int, Group] = {}
        self.started = 0

    def has_room(self, group: Group) -> bool:
        return len(self.running) < self.workers

    def start(self, group: Group) -> int:
        self.started += 1
        self.running[self.started] = group
        return self.started

    def reports(self) -> Iterator[tuple[int, Event | str]]:
        worker, group = self.running.popitem()
        for task in group.tasks:
            if task.name == "unborn":
                break
            yield worker, Event(task.name, State.RUNNING)
            if task.name == "lost":
                break
            yield worker, Event(task.name, State.DONE)
        yield worker, "gone" if {"unborn", "lost"} & {task.name for task in group.tasks} else ""

    def close(self) -> None:
        self.running.clear()


def test_a_lost_worker_fails_its_cell_and_another_measures_the_others() -> None:
    groups = [
        Group(tuple(Task(name, "analyze", None, Path()) for name in names))
        for names in (("a", "lost", "b"), ("c",), ("unborn", "d"))
    ]
    events = list(run_groups(groups, Scripted()))
    ended = {event.name: (event.state, event.message) for event in events if event.state != State.RUNNING}
    done, failed = (State.DONE, ""), (State.FAILED, "gone")
    assert ended == {"a": done, "lost": failed, "b": done, "c": done, "unborn": failed, "d": failed}
    assert [event.name for event in events if event.state == State.RUNNING] == ["c", "a", "lost", "b"]


def test_workers_are_not_forked_where_there_are_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork cannot use CUDA if it was initialized before, as by a library that the fork's server imports."""
    for accelerators, method in ((0, pools.METHOD), (2, "spawn")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda accelerators=accelerators: accelerators)
        assert Processes(2)._context.get_start_method() == method


@pytest.mark.parametrize(("devices", "expected"), [(0, 0), (1, 1), (ALL, 4)])
def test_gpus_of_a_ray_task(devices: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task gets at most the GPUs of one machine of the cluster."""
    asked: dict[str, Any] = {}

    def remote(function: Any) -> Any:
        return SimpleNamespace(options=lambda **options: asked.update(options) or SimpleNamespace(remote=lambda *_: 0))

    nodes = [{"Alive": gpus < 8, "Resources": {"GPU": gpus}} for gpus in (4.0, 2.0, 8.0)]
    cluster = SimpleNamespace(
        is_initialized=lambda: True, nodes=lambda: nodes, remote=remote, cluster_resources=lambda: {"GPU": 6.0}
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", cluster)
    RayTasks(None).start(Group((), devices=devices))
    assert asked["num_gpus"] == expected


@pytest.mark.parametrize(("shown", "expected"), [(None, "0,2"), ("4,5,7", "4,7")])
def test_a_worker_sees_accelerators_of_those_that_the_sweep_sees(
    shown: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("signal.signal", "threading.Thread", "prepare_worker", "torch.set_num_threads"):
        monkeypatch.setattr(f"sinkscope.commands.sweep.pools.{name}", MagicMock())
    monkeypatch.setattr(pools, "measured", lambda group: [os.environ["CUDA_VISIBLE_DEVICES"]])
    monkeypatch.setattr(os, "environ", {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})
    sent: list[str] = []
    pools._main(Group(()), SimpleNamespace(send=sent.append), threads=1, devices=[0, 2])  # type: ignore[arg-type]
    assert sent == [expected]


def test_a_worker_outlives_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a model may print while nothing reads it."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, open(writer, "w", buffering=1, closefd=False))  # noqa: SIM115
    with warnings.catch_warnings():
        prepare_worker()
        prepare_worker()  # Ray's workers do this for each group
        print("loading …", flush=True)
        print("loading …", file=sys.stderr, flush=True)
    assert not isinstance(sys.stderr._stream, PrintableStream)  # type: ignore[attr-defined]
