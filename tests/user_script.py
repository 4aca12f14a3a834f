"""A user's scripts, which `make check` type-checks: the public functions have real types, and so have their options."""

from pathlib import Path
from typing import Any, Literal, assert_type

import pandas as pd

import sinkscope
from sinkscope.commands.claims.routes import Routes
from sinkscope.commands.compare.curves import Curves
from sinkscope.commands.quantize.format_comparison import FormatComparison
from sinkscope.commands.train.output import Trained
from sinkscope.figures.style import Figure
from sinkscope.options.keywords import AnalyzeKeywords
from sinkscope.output.comparison import Comparison


def user_script(folder: Path) -> None:
    run = sinkscope.analyze("org/model", num_seqs=4, out=folder)
    assert_type(run, sinkscope.Run)
    assert_type(run.metric("sink_rate"), float)
    assert_type(run.tables["attention"], pd.DataFrame)
    assert_type(run.figure("sink-map"), Figure)
    assert_type(run.verdict, str)
    assert_type(sinkscope.Run.open(folder), sinkscope.Run)
    changed = sinkscope.intervene("org/model", "mask-sink", draws=2)
    assert_type(changed.at("mask-sink"), sinkscope.Run)
    assert_type(sinkscope.quantize("org/model"), sinkscope.Run)
    compared = sinkscope.compare(run, changed.at("before"))
    assert_type(compared, Comparison | FormatComparison | Routes | sinkscope.Scorecard | Curves)
    assert_type(sinkscope.retrofit("org/model", "vga,none", out=folder), Trained)
    assert_type(sinkscope.train("tiny-llama", out=folder).model("none"), Path)
    assert_type(sinkscope.analyze_steps(folder), sinkscope.Series)
    with sinkscope.watch(sinkscope.load("org/model").model) as seen:
        assert_type(seen.sink_rate, float)
    with sinkscope.intervening(sinkscope.load("org/model").model, "mask-sink"):
        pass


def wrong_options(options: AnalyzeKeywords) -> None:
    """Each `ignore` is an error of the type checker, which reports an `ignore` without one."""
    sinkscope.analyze("org/model", seq_length=4)  # type: ignore[call-arg]
    sinkscope.analyze("org/model", seq_len="64")  # type: ignore[arg-type]
    sinkscope.analyze("org/model", bos="sometimes")  # type: ignore[arg-type]
    sinkscope.analyze("org/model", input=3)  # type: ignore[arg-type]
    sinkscope.quantize("org/model", bits_weight=4)  # type: ignore[call-arg]
    sinkscope.doctor("org/model", dtype="float23")  # type: ignore[arg-type]
    assert_type(options["epsilon"], float)
    assert_type(options["dtype"], Literal["float32", "bfloat16", "float16"] | None)


def notebook(folder: Path) -> None:
    """Load, analyze prompts, query a table, draw, intervene in generate, save, reopen. A test runs it."""
    loaded = sinkscope.load()
    prompts = ["The capital of France is", "Attention sinks are heads that attend to the first token of a text."]
    run = sinkscope.analyze(loaded, input=prompts, observables="attention,massive")
    sinks = run.tables["attention"].query("position == 0").groupby("layer")["window_mass"].mean()
    figure = run.figure("sink-map", figsize=(4, 3))
    figure.axes[0].set_title(f"strongest sinks: layer {sinks.idxmax()}")
    assert run.attention(int(sinks.idxmax()), 0).shape == (len(run.attention(0, 0)),) * 2
    words = loaded.tokenizer(prompts[0], return_tensors="pt")  # type: ignore[misc]  # None: without tokenizer
    generate: Any = loaded.model.generate
    plain = generate(**words, max_new_tokens=4, do_sample=False)
    with sinkscope.intervening(loaded, ["zero-massive", "mask-sink"], input=prompts):
        changed = generate(**words, max_new_tokens=4, do_sample=False)
    assert changed.tolist() != plain.tolist()
    assert generate(**words, max_new_tokens=4, do_sample=False).tolist() == plain.tolist()
    with sinkscope.watch(loaded.model) as seen:
        for prompt in prompts:
            loaded.model(**loaded.tokenizer(prompt, return_tensors="pt"))  # type: ignore[misc]
    assert (seen.calls, seen.massive.position) == (2, 0)
    saved = run.save(folder / "run", figures=["sink-map"])
    again = sinkscope.Run.open(folder / "run")
    assert again.metric("sink_rate") == saved.metric("sink_rate") == run.metric("sink_rate") > 0.3
    assert repr(again) == repr(saved)
