"""The output of every command, kept in a folder, and compared with the output before a change of the code.

`python tests/golden.py write FOLDER [WORD …]` runs the cases below by the command line, all or those with one of the
words in their name. `python tests/golden.py compare BEFORE AFTER` prints every difference and ends with status 1 if
there is one. Tables have to be equal bit for bit, so both folders have to be written on one machine. Figures are
compared by the data that they draw and by their texts.
"""

import difflib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.commands.list.command import kinds
from sinkscope.options.register import options_by_command

MODELS = ("llama", "gpt2")  # tiny ones: rotary without biases, and learned positions with a query bias
TEXT = ("--input", "ids.npy", "--seq-len", "32", "--num-seqs", "24", "--batch-size", "8")
TRAINING = (
    "--steps", "4", "--block-length", "16", "--batch-size", "2", "--log-every", "1", "--save-every", "2",
    "--num-seqs", "4", "--seeds", "2",
)  # fmt: skip
SWEEP = """
title: Two models on two inputs
models: [{model: llama}, {model: gpt2}]
inputs: [ids.npy, random]
options: {num-seqs: 6, seq-len: 24, batch-size: 6, observables: [attention, activation, massive]}
"""
ARCHITECTURE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 96,
}  # fmt: skip

# Entries of run.json about the time, the machine and the libraries of a run. They are not compared.
VOLATILE = {
    "versions", "python", "git_commit", "started", "wall_seconds", "peak_memory_mb", "sinkscope", "measured_seconds",
    "seconds", "step_seconds", "memory_mb", "tokens_per_second",
}  # fmt: skip
TIMED_COLUMNS = r"second|memory"
TIMED_TEXT = re.compile(r"\b\d[\d:.,]* ?(?:s|ms|min|minutes|seconds|MB|GB|tokens/s)\b|\d{4}-\d\d-\d\dT[\d:+]+")


def cases() -> dict[str, tuple[str, ...]]:
    """Return the arguments of sinkscope by name of the case. A case may read the output of earlier cases."""
    lines: dict[str, tuple[str, ...]] = {"analyze-demo": ("analyze", "--num-seqs", "6")}
    for model in MODELS:
        lines |= {
            f"doctor-{model}": ("doctor", model),
            f"analyze-{model}": ("analyze", model, *TEXT),
            f"intervene-{model}": ("intervene", model, "--do", "all", "--draws", "2", *TEXT),
            f"scan-{model}": ("scan", model),
            f"quantize-{model}": ("quantize", model, *TEXT),
            f"quantize-static-{model}": ("quantize", model, "--scheme", "static", *TEXT),
            f"kv-plan-{model}": (
                "kv-plan", model, "--input", "random", "--seq-len", "128", "--num-seqs", "4", "--calibration", "4",
            ),
            f"recipe-{model}": ("run", "gradient-sinks-figure-1", model, "--input", "ids.npy"),
            f"claims-{model}": ("claims", model, "--nulls", "2", "--draws", "2", *TEXT),
            f"retrofit-{model}": (
                "retrofit", model, "--method", "vga,vscale", "--text", "ids.npy", *TRAINING,
            ),
        }  # fmt: skip
    trained = ("train", "--config", "shape.json", "--method", "none,vga,operation:kind=sigmoid")
    lines["train"] = (*trained, "--text", "ids.npy", *TRAINING)
    backcopy = ("train", "--config", "bigram-backcopy", "--method", "none,vga", "--text", "bigram-backcopy")
    lines["train-backcopy"] = (*backcopy, *TRAINING)
    lines["sweep"] = ("sweep", "sweep.yaml")
    lines["compare"] = ("compare", *(f"out/analyze-{model}" for model in MODELS))
    lines["compare-formats"] = ("compare", *(f"out/quantize-{model}" for model in MODELS))
    lines["compare-interventions"] = ("compare", *(f"out/intervene-{model}" for model in MODELS))
    lines["scorecards"] = ("claims", *(part for model in MODELS for part in ("--from", f"out/claims-{model}")))
    lines["claims-of-a-training"] = ("claims", "--from", "out/train")
    lines |= {f"help-{command}": (command, "--help") for command in options_by_command()} | {"help": ("--help",)}
    lines |= {f"list-{kind}": ("list", kind) for kind in kinds()}
    return lines


def write(folder: Path, words: list[str]) -> None:
    """Run every case with one of the words in its name, and keep its printed text and its comparable files."""
    folder.mkdir(parents=True)
    work = folder / "work"
    work.mkdir()
    _inputs(work)
    chosen = {name: arguments for name, arguments in cases().items() if any(word in name for word in words or [""])}
    reads = {name: any(part.startswith("out/") for part in arguments) for name, arguments in chosen.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for later in (False, True):  # cases that read the output of others come later
            list(pool.map(lambda name: _run(name, work, folder), [name for name in reads if reads[name] == later]))
    shutil.rmtree(work)


def _inputs(work: Path) -> None:
    import torch
    from tiny import tiny_model

    for model in MODELS:
        tiny_model(model, spread=1.0).save_pretrained(work / model)
    torch.manual_seed(0)
    np.save(work / "ids.npy", np.random.default_rng(0).integers(3, 90, (48, 64)))
    (work / "sweep.yaml").write_text(SWEEP)
    (work / "shape.json").write_text(json.dumps(ARCHITECTURE))


def _run(name: str, work: Path, folder: Path) -> None:
    arguments = cases()[name]
    out = () if arguments[0] in ("list", "doctor") or "--help" in arguments else ("--out", f"out/{name}")
    drawn = folder / name / "drawn"
    drawn.mkdir(parents=True)
    own = {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "GOLDEN_DRAWN": str(drawn)}
    command = [sys.executable, __file__, "run", *arguments, *out]
    done = subprocess.run(command, cwd=work, env=os.environ | own, capture_output=True, text=True)
    print(f"{name}: status {done.returncode}", flush=True)
    kept = folder / name
    (kept / "printed.txt").write_text(f"status {done.returncode}\n{done.stdout}\n--- errors\n{done.stderr}")
    for path in sorted((work / "out" / name).rglob("*")):
        target = kept / path.relative_to(work / "out" / name)
        if path.name.endswith((".parquet", ".md")):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        elif path.name in ("run.json", "index.html") and "checkpoint" not in str(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            data = text if path.suffix == ".json" else _page_data(text)
            target.with_suffix(".json").write_text(json.dumps(_lasting(json.loads(data)), indent=1, sort_keys=True))


def _page_data(page: str) -> str:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return match[1] if match else "null"


def _lasting(value: Any) -> Any:
    """Return the value without the parts that differ between two runs of the same code."""
    if isinstance(value, dict):
        return {key: _lasting(entry) for key, entry in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_lasting(entry) for entry in value]
    return TIMED_TEXT.sub("TIME", value) if isinstance(value, str) else value


# --- one command, with the data of its figures kept


def run(arguments: list[str]) -> None:
    """Run the command line in a process whose figures also write their data to $GOLDEN_DRAWN."""
    from matplotlib.figure import Figure

    saved = Figure.savefig

    def savefig(figure: Any, *args: Any, **kwargs: Any) -> None:
        saved(figure, *args, **kwargs)
        texts = {text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))}
        name = hashlib.sha256(repr(_artists(figure)).encode()).hexdigest()[:16]
        shown = sorted(text for text in texts if text.strip())
        (Path(os.environ["GOLDEN_DRAWN"]) / f"{name}.json").write_text(json.dumps(shown, indent=1))

    Figure.savefig = savefig  # type: ignore[method-assign]
    from sinkscope.cli.app import main

    sys.argv = ["sinkscope", *arguments]
    main()


def _artists(figure: Any) -> list[tuple[str, str]]:
    """Return kind and digest of the data of everything that is drawn from data, in drawing order."""
    from matplotlib.collections import Collection
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = []
    for axes in figure.axes:
        for artist in axes.findobj():
            if isinstance(artist, Line2D):
                arrays = [artist.get_xydata()]
            elif isinstance(artist, AxesImage):
                arrays = [artist.get_array()]
            elif isinstance(artist, Collection):
                array = artist.get_array()
                paths = [path.vertices for path in artist.get_paths()]
                arrays = [artist.get_offsets(), *paths, *([] if array is None else [array])]
            elif isinstance(artist, Patch) and hasattr(artist, "get_xy"):
                arrays = [artist.get_path().vertices, np.asarray(artist.get_patch_transform())]
            else:
                continue
            data = io.BytesIO()
            for array in arrays:
                data.write(np.round(np.ma.filled(np.ma.asarray(array, dtype=float), np.nan), 9).tobytes())
            drawn.append((type(artist).__name__, hashlib.sha256(data.getvalue()).hexdigest()))
    return drawn


# --- comparison


def compare(before: Path, after: Path) -> bool:
    files = {path.relative_to(folder) for folder in (before, after) for path in folder.rglob("*") if path.is_file()}
    differences = 0
    for path in sorted(files):
        for line in _differences(before / path, after / path):
            print(line)
            differences += 1
    print(f"{len(files)} files, {differences} lines of difference")
    return not differences


def _differences(old: Path, new: Path) -> Iterator[str]:
    if not (old.exists() and new.exists()):
        yield f"{'- ' if old.exists() else '+ '}{old if old.exists() else new}"
    elif old.suffix == ".parquet":
        yield from _table_differences(old, new)
    elif old.read_bytes() != new.read_bytes():
        texts = (TIMED_TEXT.sub("TIME", path.read_text(encoding="utf-8")).splitlines() for path in (old, new))
        yield from difflib.unified_diff(*texts, str(old), str(new), lineterm="", n=0)


def _table_differences(old: Path, new: Path) -> Iterator[str]:
    ours, theirs = (pd.read_parquet(path) for path in (old, new))
    if list(ours.columns) != list(theirs.columns) or len(ours) != len(theirs):
        yield f"{new}: {ours.shape} {list(ours.columns)} became {theirs.shape} {list(theirs.columns)}"
        return
    timed = _timed(ours) & _timed(theirs)
    ours, theirs = ours[~timed], theirs[~timed]
    for name in ours.columns:
        if not re.search(TIMED_COLUMNS, name) and not ours[name].equals(theirs[name]):
            differing = ~((ours[name] == theirs[name]) | (ours[name].isna() & theirs[name].isna()))
            example = differing.idxmax()
            values = f"{ours[name][example]!r} → {theirs[name][example]!r}"
            yield f"{new}: {name} differs in {differing.sum()} rows, the first {values}"


def _timed(table: pd.DataFrame) -> pd.Series:
    named = [table[name].astype(str).str.contains(TIMED_COLUMNS) for name in ("metric", "quantity") if name in table]
    return sum(named, pd.Series(False, index=table.index)).astype(bool)


if __name__ == "__main__":
    action, *operands = sys.argv[1:]
    if action == "run":
        run(operands)
    elif action == "write":
        write(Path(operands[0]).resolve(), operands[1:])
    else:
        sys.exit(not compare(*map(Path, operands)))
