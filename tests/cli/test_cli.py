"""The command line: its output and files, and its errors for wrong input, which write nothing."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import pytest
from rich.console import Console
from rich.text import Text
from support.figures import rough_figures
from support.retrofit_command import command_line, refused, succeeded
from support.tables import assert_same_tables
from tiny import tiny_model
from typer.testing import CliRunner, Result

import sinkscope
import sinkscope.figures
import sinkscope.results.tables
from sinkscope.cli.app import app
from sinkscope.cli.printing import InMarkdown, fitted
from sinkscope.errors import UNPRINTABLE
from sinkscope.figures import FIGURES, applicable
from sinkscope.measuring.console import PrintableStream, Terminal
from sinkscope.measuring.tracer import Tracer
from sinkscope.output.run import Run
from sinkscope.results.manifest import is_undrawn
from sinkscope.results.metrics import METRICS
from sinkscope.results.tables import LEADING, names_of, write_table

pytestmark = pytest.mark.usefixtures("here")

SMALL = ("--num-seqs", "4", "--seq-len", "24")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer. Tests must not change it."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A complete analysis from the command line, and its folder. Tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patched:
        rough_figures(patched)
        return command_line("analyze", tiny, *SMALL, "--out", out), out


@pytest.mark.slow
def test_a_finished_run(finished: tuple[Result, Path], tiny: Path) -> None:
    result, out = finished
    assert result.exit_code == 0, result.output
    assert result.stdout == (out / "verdict.md").read_text(encoding="utf-8")
    assert f"written to {out}" in result.stderr
    assert "\x1b" not in result.output

    run, manifest = Run.open(out), json.loads((out / "run.json").read_text(encoding="utf-8"))
    tables = {f"tables/{name}.parquet" for name in manifest["tables"]}
    figures = {f"figures/{name}.{kind}" for name in applicable(run) for kind in ("png", "pdf")}
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {"run.json", "verdict.md", "index.html", "activations.safetensors"} | tables | figures
    assert {"attention", "sink_positions", "geometry", "activation", "massive", "outlier", "summary"} <= set(run.tables)
    assert figures
    for name, table in run.tables.items():
        assert tuple(table.columns) == (*LEADING, *names_of(Run.columns[name]))
    assert list(out.parent.iterdir()) == [out]

    config = manifest["config"]
    assert (manifest["command"], config["model"], config["seq_len"], config["window"]) == ("analyze", str(tiny), 24, 24)
    assert (manifest["model"]["name"], manifest["input"]["token_zero"]) == ("tiny", "bos <s> (id 1)")
    assert {"versions", "git_commit", "started", "wall_seconds", "peak_memory_mb", "sinkscope"} <= manifest.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_from_repeats_a_run(finished: tuple[Result, Path]) -> None:
    result = succeeded("analyze", "--from", finished[1] / "run.json", "--out", "again")
    assert "unlike" not in result.stderr
    first, second = Run.open(finished[1]), Run.open("again")
    assert first.manifest["config"] == second.manifest["config"]
    assert_same_tables(second.tables, first.tables, check_exact=True)
    result = command_line("analyze", "--from", "again", "--out", "again", "--overwrite", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    manifest = json.loads(Path("again/run.json").read_text(encoding="utf-8"))
    manifest["input"]["sha256"] = "another"
    Path("again/run.json").write_text(json.dumps(manifest))
    result = command_line("analyze", "--from", "again")
    assert "note: unlike in the original run, input tokens was" in result.stderr
    assert Run.open("runs/tiny-natural-repeated").condition == "natural"


def test_wrong_options_and_commands(tiny: Path, bare: Path) -> None:
    """Refused before the model is loaded."""
    Path("loop").symlink_to("loop")
    Path("empty").mkdir()
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    analyze = ("analyze", tiny)
    for args, message in (
        ((*analyze, "--window", "65"), "--window 65 is beyond the sequence of 64 tokens: take at most 64"),
        ((*analyze, "--epsilon", "much"), "--epsilon"),
        ((*analyze, "--num-seqs", 10**22), f"--num-seqs {10**22}: it must be at most 1000000000"),
        ((*analyze, "--observables", "attention,masive"), "'masive' is unknown; did you mean 'massive'?"),
        ((*analyze, "--widow", "3"), "--widow"),
        ((*analyze, "--out"), "--out"),
        ((*analyze, "another"), "another"),
        ((*analyze, "--input", "random", "--prompt", "the of"), "--input random and --prompt: give one of the two"),
        ((*analyze, *SMALL, "--input", "a\nb\nc\nd"), ""),
        ((*analyze, "--out", "loop"), "loop cannot be used: Too many levels of symbolic links"),
        ((*analyze, "--out", "a\0b"), "characters that no path has"),
        ((*analyze, "--out", "mine", "--overwrite"), "--out mine is not empty and holds no run: name another folder"),
        ((*analyze, "--out", "mine/thesis.tex"), "thesis.tex is in the way"),
        (("analyze", "--from", ".", "--seed", "0"), "so --seed cannot be given with it"),
        (("anlyze",), "analyze"),
        (("list", "figurs"), "'figurs' is unknown; did you mean 'figures'?"),
        (("run",), "Missing argument 'RECIPE'"),
        (("run", "gradient-sinks-figure-1", "--draws", "1"), "--draws"),
        (("analyze", "empty"), "not a model in HuggingFace format: it is empty"),
        (("analyze", bare, *SMALL), "needs a tokenizer, and this model has none"),
        (("intervene", tiny, *SMALL, "--do", "zero-massive:layers=0-99999999999999"), ""),
        (("retrofit", tiny, "--method", "none", "--observables", "masive"), "'masive' is unknown; did you mean"),
    ):
        assert message in refused(2, *args)


@pytest.fixture
def steps(bare: Path) -> Path:
    for step in (5, 40):
        shutil.copytree(bare, f"trained/checkpoint-{step}")
    return Path("trained")


SERIES = ("--input", "random", *SMALL, "--observables", "attention,geometry")


@pytest.mark.usefixtures("no_figures")
def test_analyze_a_folder_of_checkpoints(steps: Path) -> None:
    result = succeeded("analyze", steps, *SERIES)
    assert [line.split("│")[1].strip() for line in result.stdout.splitlines() if "│" in line] == ["5", "40"]
    read, batches = "read: random tokens, 4 sequences, the first begins …\n", "4 sequences in batches of 4 × 24\n"
    parts = f"step 5 (1 of 2)\n{read}{batches}step 40 (2 of 2)\n{read}{batches}"
    assert re.sub("begins `.*`", "begins …", result.stderr) == f"{parts}written to runs/trained-steps-random\n"
    assert Run.open("runs/trained-steps-random/step40").model == "checkpoint-40"
    assert "already holds a run: --overwrite replaces it" in refused(2, "analyze", steps, *SERIES)
    message = refused(2, "analyze", "--from", "runs/trained-steps-random")
    assert "holds runs: name one of them, such as runs/trained-steps-random/step40" in message


RECIPE = """
title: A small one
options: {input: random, num-seqs: 4, seq-len: 24, batch-size: 1, observables: [attention]}
figures: []
"""


def test_run(bare: Path) -> None:
    Path("recipes").mkdir()
    Path("recipes/small.yaml").write_text(RECIPE)
    result = succeeded("run", "small", bare)
    assert result.stdout == Path("runs/small-bare/verdict.md").read_text(encoding="utf-8")
    assert re.sub("begins `.*`", "begins …", result.stderr) == (
        "small: A small one\nread: random tokens, 4 sequences, the first begins …\nwritten to runs/small-bare\n"
    )
    Path("recipes/two.yaml").write_text(RECIPE + "runs: {first: {}, second: {input: repeated}}")
    result = succeeded("run", "recipes/two.yaml", bare, "--out", "both")
    assert "sink_rate" in result.stdout
    lines = result.stderr.splitlines()
    assert [line for line in lines if not line.startswith(("read: ", "note: "))][1:] == [
        "run first (1 of 2)", "run second (2 of 2)", "written to both"
    ]  # fmt: skip


NEEDS_DEV_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")


class ClosedTerminal(io.TextIOWrapper):
    """A terminal that was closed: a bar, a spinner and every line fail."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


def full_disk() -> TextIO:
    return open("/dev/full", "w", buffering=1)


def closed() -> TextIO:
    """A stream that cannot be written, which is what a command has after `>&-`."""
    return open(os.open(os.devnull, os.O_RDONLY), "w")


QUICK = (*SMALL, "--input", "random", "--observables", "massive", "--no-page", "--out", "run")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    "stream", [ClosedTerminal, without_reader, pytest.param(full_disk, marks=NEEDS_DEV_FULL), lambda: None]
)
def test_a_run_outlives_its_stderr(
    stream: Any, bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream())
        sinkscope.analyze(
            tiny_model("llama"), input="random", num_seqs=2, seq_len=8, out="api", quiet=False, page=False
        )
        with pytest.raises(SystemExit) as ended:
            app(["analyze", str(bare), *QUICK])
        with pytest.raises(SystemExit) as refused:
            app(["analyze", str(bare), *QUICK])
    assert (ended.value.code, refused.value.code) == (0, 2)
    assert capsys.readouterr().out == Path("run/verdict.md").read_text(encoding="utf-8")
    assert not any(is_undrawn(Run.open(folder).manifest) for folder in ("run", "api"))


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (without_reader, ""),
        (closed, "Bad file descriptor"),
        pytest.param(full_disk, "No space left on device", marks=NEEDS_DEV_FULL),
    ],
)
def test_a_result_in_a_folder_needs_no_stdout(
    stream: Any, reason: str, bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that only prints fails without it, silently if a reader such as `head` has ended."""
    analyze = ["analyze", str(bare), *QUICK]
    failed = f"sinkscope: standard output cannot be written ({reason})"
    complete = f"{failed}, but the result is complete in run"
    for command, status, last in (
        (["list", "metrics"], 1, failed),
        (["analyze", "--help"], 1, failed),
        (analyze, *((1, complete) if stream is full_disk else (0, "written to run"))),
        ([*analyze, "--json", "--overwrite"], 1, complete),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream())
            with pytest.raises(SystemExit) as ended:
                app(command)
        expected = ["4 sequences in batches of 4 × 24"] * ("--help" not in command and command[0] == "analyze")
        expected += [last] * (bool(reason) or last == "written to run")
        printed = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("read: ")]
        assert (ended.value.code, printed) == (status, expected)
        assert Path("run/run.json").exists() == (command[:2] == analyze[:2])


def test_streams_that_are_closed_from_the_start() -> None:
    """No file of the command gets their numbers, which libraries in C write to."""
    code = "import os; from sinkscope.cli.app import app; app(['list'])"
    command = " ".join(["exec", sys.executable, "-c", f'"{code}"'])
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = partial(subprocess.run, shell=True, capture_output=True, env=env)
    ended = [run(f"{command} {how}") for how in ("2>&-", ">&-", ">&- 2>&-")]
    assert [each.returncode for each in ended] == [0, 1, 1]
    assert b"observables" in ended[0].stdout
    assert ended[1].stderr == b"sinkscope: standard output cannot be written (Bad file descriptor)\n"


@pytest.mark.usefixtures("no_figures")
def test_what_a_model_prints_is_no_result(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code may print, also while nothing reads stdout; and it may print what a terminal obeys."""
    forward = Tracer.forward
    monkeypatch.setattr(Tracer, "forward", lambda *args: print("hello \x1b[31m") or forward(*args))
    result = succeeded("analyze", bare, *QUICK, "--json")
    assert json.loads(result.stdout)["folder"] == "run"
    assert "hello \\u001b[31m\n" in result.stderr


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]:warning:"


@pytest.mark.usefixtures("no_figures")
def test_a_terminal_obeys_no_text_of_a_file(finished: tuple[Result, Path], tiny: Path) -> None:
    """Neither markup nor emoji codes of rich, escape sequences, nor controls of bidirectional text."""
    shutil.copytree(finished[1], "other")
    manifest = json.loads(Path("other/run.json").read_text(encoding="utf-8"))
    manifest["model"] |= {"name": HOSTILE, "source": HOSTILE}
    manifest["config"] |= {"model": HOSTILE, "seed": 5}
    manifest["dtype"] = HOSTILE
    Path("other/run.json").write_text(json.dumps(manifest))
    for path in Path("other/tables").glob("*.parquet"):
        table = pd.read_parquet(path).assign(model=HOSTILE)
        write_table(table.assign(token=HOSTILE) if "token" in table else table, path)
    shutil.copytree(tiny, "model")
    config = json.loads(Path("model/config.json").read_text(encoding="utf-8"))
    Path("model/config.json").write_text(json.dumps(config | {"hidden_act": HOSTILE, "architectures": [HOSTILE]}))
    printed = ""
    for command in (
        ("compare", finished[1], "other"),
        ("compare", finished[1], "other", "--json"),
        ("compare", finished[1], "other", "--format", "markdown"),
        ("card", "other"),
        ("analyze", "--from", "other"),
        ("doctor", "model"),
        ("doctor", "model", "--debug"),
        ("list", HOSTILE),
    ):
        result = command_line(*command)
        shown = result.stdout + result.stderr
        assert not UNPRINTABLE.search(shown), (command, shown)
        printed += shown
        if "--json" in command:
            assert HOSTILE in json.loads(result.stdout)["tables"]["numbers"][0]
    assert printed.count("[red]:warning:") > 10
    verdict = Run.open("other").verdict
    assert not UNPRINTABLE.search(verdict)
    assert "[red]:warning:" in verdict


def test_a_console_on_a_terminal_keeps_its_own_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)
    screen.print(Text("\x1b[2J\u202e", "red"))
    assert screen.file.getvalue() == "\x1b[31m\\u001b[2J\\u202e\x1b[0m\n"  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", PrintableStream(sys.stderr))
        Console(stderr=True, force_terminal=True, color_system="standard").print(Text("words", "red"))
        print("\rhalf of a bar\x1b[A", end="", file=sys.stderr)
        print("\x1b[A\x1b[A", end="", file=sys.stderr)  # tqdm's own, if bars are below each other
    assert capsys.readouterr().err == "\x1b[31mwords\x1b[0m\n\rhalf of a bar\\u001b[A\x1b[A\x1b[A"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS and Windows have no such names")
def test_names_that_are_not_utf8(tiny: Path, finished: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, weights and run.json cannot hold them, so they are refused before anything is read or measured."""
    odd, run = Path(os.fsdecode(b"caf\xe9")), finished[1]
    shutil.copytree(tiny, odd / "model")
    shutil.copytree(run, odd / "run")
    (odd / "x.txt").write_text("the of and drain " * 300)
    (odd / "x.yaml").write_text(RECIPE)
    Path("link").symlink_to(odd, target_is_directory=True)
    commands: list[tuple[object, ...]] = [
        ("analyze", odd / "model"),
        ("analyze", tiny, "--input", odd / "x.txt"),
        ("analyze", tiny, "--out", odd / "new"),
        ("analyze", tiny, "--out", "link/new"),
        ("analyze", "link/model"),
        ("analyze", tiny, "--revision", odd),
        ("analyze", "--from", odd / "run"),
        ("doctor", odd / "model"),
        ("run", odd / "x.yaml", tiny),
        ("run", "link/x.yaml", tiny),
        ("sweep", odd / "x.yaml"),
        ("train", "--config", odd / "model", "--tokenizer", tiny),
        ("show", odd / "run", "--again", "--print"),
        ("compare", odd / "run", run),
    ]
    for command in commands:
        assert "caf\\udce9" in (message := refused(2, *command)), command
        assert "is not UTF-8: rename the file or folder" in message
    for read in (lambda: Run.open(odd / "run"), lambda: Run.open(run).save(odd / "new")):
        with pytest.raises(sinkscope.InputError, match="is not UTF-8"):
            read()
    monkeypatch.chdir(odd)
    for command in (("analyze", tiny), ("analyze", "model"), ("analyze", tiny, "--input", "x.txt")):
        assert "is not UTF-8" in refused(2, *command)


@pytest.mark.usefixtures("no_figures")
def test_from_takes_no_permission_out_of_a_file(finished: tuple[Result, Path]) -> None:
    """Code that comes with a model runs only if the user permits it, never because run.json says so."""
    manifest = json.loads((finished[1] / "run.json").read_text(encoding="utf-8"))
    manifest["config"] |= {"trust_remote_code": True, "allow_pickle": True, "observables": ["massive"]}
    Path("old").mkdir()
    Path("old/run.json").write_text(json.dumps(manifest))
    flags = ["--trust-remote-code", "--allow-pickle"]
    assert refused(2, "analyze", "--from", "old").endswith(f"add {' and '.join(flags)}")
    assert refused(2, "analyze", "--from", "old", flags[1]).endswith(f"add {flags[0]}")
    succeeded("analyze", "--from", "old", *flags, "--out", "again")
    config = Run.open("again").manifest["config"]
    assert (config["trust_remote_code"], config["allow_pickle"]) == (True, True)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """failing(where, error) raises the error there, after half of the work."""

    def raise_after(count: int, owner: Any, name: str, error: BaseException) -> None:
        calls, plain = iter(range(count)), getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                raise error
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def fail(where: str, error: BaseException) -> None:
        if where == "measuring":
            for name in ("forward", "forward_backward"):
                raise_after(2, Tracer, name, error)
        else:
            raise_after(3, sinkscope.results.tables, "write_table", error)

    return fail


HIDDEN_INTERRUPT = TypeError("own")
HIDDEN_INTERRUPT.__context__ = KeyboardInterrupt()


RANDOM = ("--input", "random", *SMALL, "--batch-size", "1", "--out", "deep/down/run")


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("measuring", KeyboardInterrupt(), "interrupted: nothing was written"),
        ("tables", KeyboardInterrupt(), "interrupted: nothing was written"),
        ("measuring", HIDDEN_INTERRUPT, "interrupted: nothing was written"),
        ("tables", OSError(errno.ENOSPC, ""), "writing deep/down/run failed, and nothing of it is left: [Errno 28]"),
        ("tables", ZeroDivisionError("by\nnothing"), "unexpected ZeroDivisionError: by nothing\n--debug shows where"),
        ("measuring", MemoryError(), "memory ran out"),
        ("measuring", FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'\n--debug shows"),
    ],
)
def test_runs_that_fail(bare: Path, failing: Any, where: str, error: BaseException, message: str) -> None:
    failing(where, error)
    said = refused(1, "analyze", bare, *RANDOM).replace(f"{Path.cwd()}/", "")
    assert said.startswith(f"sinkscope: {message}")
    result = command_line("analyze", bare, *RANDOM, "--debug")
    assert (result.exit_code, "Traceback (most recent call last)" in result.stderr) == (1, True)


@pytest.mark.usefixtures("no_figures")
def test_series_and_recipes_that_are_interrupted(bare: Path, steps: Path, failing: Any) -> None:
    Path("small.yaml").write_text(RECIPE)
    failing("measuring", KeyboardInterrupt())
    for command in (("analyze", steps, *SERIES), ("run", "small.yaml", bare, "--out", "deep/down")):
        assert refused(1, *command, "--quiet") == "sinkscope: interrupted: nothing was written"


@pytest.mark.usefixtures("no_figures")
def test_results_as_json(tiny: Path) -> None:
    def found(*args: object, status: int = 0) -> dict[str, Any]:
        result = command_line(*args, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    measured = found("analyze", tiny, *SMALL, "--out", "run", "--no-page")
    run = Run.open("run")
    assert (measured["command"], measured["folder"], measured["failure"]) == ("analyze", "run", None)
    assert measured["metrics"]["sink_rate"] == run.metric("sink_rate")
    sink = next(each for each in measured["findings"] if each["name"] == "sink")
    (row,) = run.tables["finding"].query("finding == 'sink' and number == 'value'").to_dict("records")
    assert (sink["value"], sink["interval"]) == (row["value"], [row["low"], row["high"]])
    assert (sink["threshold"], sink["null"]) == (row["threshold"], None)
    shown = found("compare", "run", "run")
    assert next(each for each in shown["tables"]["numbers"] if each["metric"] == "sink_rate")["difference"] == 0
    assert found("list", "metrics")["tables"]["metrics"][0]["metric"] == next(iter(METRICS))
    assert found("show", "run", "--print")["data"] == {"page": "run/index.html"}
    assert found("doctor", tiny)["data"]["ok"] is True
    assert found("analyze", "nothing/at/all", status=2)["error"].startswith("nothing/at/all: no such file")
    assert found("analyze", "--seq-len", "1", status=2)["status"] == 2


def test_tables_cut_no_number_in_a_narrow_terminal(finished: tuple[Result, Path]) -> None:
    """Words are on several lines, and a table that does not fit becomes one for each row."""
    numbers = ["0.123456", "1,234.5", "[0.69, 0.75]", "-1.5e-05", "97.49%"]
    rows = [[Text(f"{word} of the whole model", "yellow"), *map(Text, numbers)] for word in ("first", "second")]
    for columns in (3, 6):
        header = [Text(name) for name in ("what is measured", *"abcde")][:columns]
        drawn = render(fitted(header, [row[:columns] for row in rows], 60))
        for number in " ".join(numbers[: columns - 1]).split():
            assert drawn.count(number) == 2, drawn
    drawn = render(InMarkdown(finished[0].stdout))
    for row in Run.open(finished[1]).report.table.itertuples(index=False):
        assert all(word in drawn for word in str(row[-1]).split())


def render(table: Any) -> str:
    """Return what a terminal of 60 columns shows."""
    console = Console(width=60, force_terminal=True, color_system=None, file=io.StringIO())
    console.print(table)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, drawn.splitlines())) <= 60
    return drawn


def test_shells_complete_commands_choices_and_names() -> None:
    for typed, expected in (
        ("sinkscope qua", "quantize"),
        ("sinkscope analyze --batch", "--batch-size"),
        ("sinkscope analyze --dtype bf", "bfloat16"),
        ("sinkscope list rec", "recipes"),
        ("sinkscope run all", "all-interventions"),
        ("sinkscope sweep offl", "offline-models"),
        ("sinkscope analyze --keep attention_", "attention_mask"),
        ("sinkscope train --config tiny-o", "tiny-opt"),
        ("sinkscope intervene --do zero-m", "zero-massive"),
        ("sinkscope analyze --observables attention,out", "attention,outlier"),
        ("sinkscope retrofit --method none,vs", "none,vscale"),
    ):
        asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_SINKSCOPE_COMPLETE": "complete_bash"}
        completed = CliRunner().invoke(app, env=asked, prog_name="sinkscope")
        assert completed.stdout.split() == [expected], typed


def test_commands_that_load_no_model_do_not_import_torch(finished: tuple[Result, Path]) -> None:
    code = f"""
import sys
from sinkscope.cli.app import app
for args in (["show", {str(finished[1])!r}, "--print"], ["list"], ["list", "metrics"], ["list", "recipes"]):
    try:
        app(args)
    except SystemExit as end:
        assert end.code == 0
assert not {{"torch", "transformers", "matplotlib"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_list() -> None:
    overview = command_line("list").stdout
    assert max(map(len, overview.splitlines())) <= 80
    assert "observables" in overview
    result = command_line("list", "all")
    assert (result.exit_code, result.stderr) == (0, "")
    for name in ("attention", "massive", "qwen3_moe", "post-norm", "interceptor", *FIGURES):
        assert name in result.stdout
    assert "…" not in result.stdout
    assert "\x1b" not in result.stdout
    assert "qwen3" not in command_line("list", "observables").stdout


def test_help() -> None:
    for command in ((), ("analyze",), ("compare",)):
        result = command_line(*command, "--help")
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Usage: sinkscope" in result.stdout
        assert result.stdout == command_line(*command, "-h").stdout
    result = command_line()
    assert result.exit_code == 2
    assert "analyze" in result.stdout
    assert command_line("--version").stdout.startswith("sinkscope ")
    module = subprocess.run([sys.executable, "-m", "sinkscope", "--version"], capture_output=True, text=True)
    assert module.stdout == command_line("--version").stdout
    assert "'sinkscope[lm-eval]'" in " ".join(command_line("benchmark", "--help").output.split())
    assert all(f"╭─ {panel} ─" in command_line("analyze", "--help").stdout for panel in ("Model", "Input", "Output"))
