"""Commands that are killed before changes on the disk, or whose disk is full, lose nothing and leave nothing over."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import CHANGES, RENAMES, WRITES, assert_same_folder, before_change, kill, refuse
from support.forked import forked
from support.tables import assert_same_tables
from tiny import tiny_tokens

import sinkscope
import sinkscope.commands.analyze.command
import sinkscope.commands.claims.command
import sinkscope.commands.claims.table
from sinkscope import Run, Scorecard, SinkscopeError
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.train.output import Trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_figures")]

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 16, "batch_size": 2}


def analyze(model: Path, out: Path, seed: int = 1, **options: Any) -> Run:
    return sinkscope.analyze(model, out=out, seed=seed, observables="attention", **SMALL | options)


def intervene(model: Path, out: Path, seed: int = 1, **options: Any) -> Run:
    return sinkscope.intervene(model, "mask-sink", out=out, seed=seed, draws=1, **SMALL | options)


def quantize(model: Path, out: Path, seed: int = 1, **options: Any) -> Run:
    return sinkscope.quantize(model, out=out, seed=seed, calibration=2, **SMALL | options)


def broken_off(number: int, parent: Path, act: Callable[[], Any], events: tuple[str, ...], work: Callable) -> int:
    """Return the exit status of the work when `act` is called before the n-th change."""

    def faulty() -> None:
        before_change(number, parent, act, events)
        work()

    with forked(faulty) as process:
        return process.wait()


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`analyze` measures the same options only once, since its writing is tested."""
    measure, known = sinkscope.commands.analyze.command.measure, dict[str, Any]()

    def remembered(*args: Any) -> Any:
        key = str([arg for arg in args if isinstance(arg, AnalyzeOptions)])
        if key not in known:
            known[key] = measure(*args)
        return known[key]

    monkeypatch.setattr(sinkscope.commands.analyze.command, "measure", remembered)


def killed_at_every(step: int, command: Any, events: tuple[str, ...], model: Path, folder: Path, first: int = 1) -> int:
    """Replace a run by another one, killed before every step-th change, and repeat it. Return the number of kills."""
    old, new = command(model, folder / "old" / "run", seed=0), command(model, folder / "new" / "run")
    out = folder / "killed" / "run"
    for kills, number in enumerate(range(first, 1000, step)):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "old" / "run", out)
        status = broken_off(number, out.parent, kill, events, lambda: command(model, out, overwrite=True))
        if status == 0:
            return kills
        assert status == -signal.SIGKILL
        left = Run.open(out)
        assert_same_tables(left.tables, (new if left.manifest["seed"] else old).tables, check_exact=True)
        command(model, out, overwrite=True)
        assert_same_tables(Run.open(out).tables, new.tables, check_exact=True)
        assert list(out.parent.iterdir()) == [out]
    raise AssertionError("it never ends")


@pytest.mark.usefixtures("measured_once")
def test_killed_before_every_fifteenth_change(tiny: Path, tmp_path: Path) -> None:
    assert killed_at_every(15, analyze, CHANGES, tiny, tmp_path) > 5


@pytest.mark.parametrize(("command", "step"), [(intervene, 12), (quantize, 7)])
def test_killed_before_some_renames(command: Any, step: int, tiny: Path, tmp_path: Path) -> None:
    """These are the first rename, one that exchanges the folders, and a later one."""
    assert killed_at_every(step, command, RENAMES, tiny, tmp_path) in (2, 3)


@pytest.mark.usefixtures("measured_once")
def test_a_disk_that_is_full_at_every_fourth_write(tiny: Path, tmp_path: Path) -> None:
    """The earlier run stays, also for the next command."""
    old, new = analyze(tiny, tmp_path / "old" / "run", seed=0), analyze(tiny, tmp_path / "new" / "run")
    out = tmp_path / "full" / "run"
    shutil.copytree(tmp_path / "old" / "run", out)
    for number in range(1, 1000, 4):

        def work() -> None:
            with pytest.raises(SinkscopeError, match=r"\A.*No space left on device.*\Z"):  # one line
                analyze(tiny, out, overwrite=True)

        if broken_off(number, out.parent, refuse, WRITES, work) != 0:
            break
        left = Run.open(out)  # the new run if its tables are complete
        assert_same_tables(left.tables, (new if left.manifest["seed"] else old).tables, check_exact=True)
        assert list(out.parent.iterdir()) == [out]
    assert number > 10
    assert_same_tables(Run.open(out).tables, new.tables)  # the disk was not full any more


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "ids.npy"
    np.save(path, tiny_tokens(12, 16).numpy())
    return path


def claims(model: Path, text: Path, out: Path) -> Scorecard:
    sizes = {"seq_len": 16, "num_seqs": 4, "batch_size": 4, "draws": 1, "nulls": 2}
    return sinkscope.claims(model, input=str(text), out=out, **sizes)


def test_claims_killed_before_some_renames_go_on(
    tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished runs are kept, and not measured again."""
    module = sinkscope.commands.claims.command
    few = {name: CLAIMS[name] for name in ("W-1", "W-2", "GS-28")}
    for part in (module, sinkscope.commands.claims.table):
        monkeypatch.setattr(part, "CLAIMS", few)
    monkeypatch.setattr(module, "ROUTE_ROLES", ())
    measured: list[str] = []
    for name in ("measure", "Experiment"):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own, **more: (measured.append(""), own(*args, **more))[1])
    claims(tiny, text, tmp_path / "new" / "run")
    roles = {path.parent.name for path in (tmp_path / "new" / "run").glob("runs/[!.]*/run.json")}
    assert roles > {"natural", "null", "null-1", "gradient-do-mask-sink"}
    assert len(measured) == len(roles)
    out, kept = tmp_path / "killed" / "run", dict[str, int]()
    for _ in range(2):
        status = broken_off(40, out.parent, kill, RENAMES, lambda: claims(tiny, text, out))
        assert status == -signal.SIGKILL
        before, kept = kept, {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/[!.]*/run.json")}
        assert before.items() < kept.items()
    measured.clear()
    claims(tiny, text, out)
    assert 0 < len(measured) == len(roles - set(kept))
    assert_same_folder(out, tmp_path / "new" / "run")


def retrofit(model: Path, text: Path, out: Path, **options: Any) -> Trained:
    return sinkscope.retrofit(model, "vga", text=text, out=out, **TRAINED | options)


def train(model: Path, text: Path, out: Path, **options: Any) -> Trained:
    return sinkscope.train(model / "config.json", "vscale,none", text=text, out=out, **TRAINED | options)


TRAINED: dict[str, Any] = {
    "steps": 2, "save_every": 1, "block_length": 16, "batch_size": 1, "num_seqs": 2, "observables": "attention",
}  # fmt: skip


@pytest.mark.parametrize(("command", "step"), [(retrofit, 29), (train, 33)])
def test_a_training_killed_before_some_renames_goes_on(
    command: Any, step: int, tiny: Path, text: Path, tmp_path: Path
) -> None:
    """It is killed several times, each time some renames later."""
    command(tiny, text, tmp_path / "new" / "run")
    out = tmp_path / "killed" / "run"
    for kills in range(9):
        status = broken_off(step if kills else 1, out.parent, kill, RENAMES, lambda: command(tiny, text, out))
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert kills >= 3
    assert_same_folder(out, tmp_path / "new" / "run")
