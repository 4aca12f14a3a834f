"""Runs the recipes and sweeps that need a GPU or weights from the hub to the end, at about a thousandth of their size.

    make rehearse    # or tests/rehearse.py FOLDER [--record] NAME…

Each is killed once it has begun to measure or train, and resumed; a recipe that only measures writes its folder at the
end, and is not killed. Then all cells of a sweep have to be done, with a row for each level, and what is drawn, the
numbers of each arm or model, and those of its claims have to be those of `rehearsed.json`, up to what machines differ
by (`--record` writes that file). Trainings have a tiny configuration (`quick`), whose threshold of a sink is just above
uniform attention, so that rates differ from arm to arm and claims have numbers. Models of the hub are tiny ones of the
same repositories on a loopback hub, the first few of a sweep.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from hub import Hub, Repo
from PIL import Image
from tiny import tiny_model

from sinkscope.commands.sweep.factor_study import STUDY, at_a_glance
from sinkscope.commands.sweep.file import Sweep, known_sweeps, read_sweep
from sinkscope.commands.train.architectures import tokenizer_of
from sinkscope.commands.train.arms import parse_methods
from sinkscope.options.recipe import known_recipes
from sinkscope.text.sources import documents

RECORD = Path(__file__).with_name("rehearsed.json")
RELATIVE, ABSOLUTE = 2e-3, 1e-4  # differences of numbers of 20 steps on another machine
# the same of costs of 8 bits, which are small differences, and of ranks of near equals: twice what another kind of
# kernels gave (ATEN_CPU_CAPABILITY=default)
COARSE = {"V-18": 0.03, "V-19": 0.03, "V-26": 0.4, "V-27": 0.4}
FLIPS = 0.015  # of a sink rate: the share of two heads in one sequence, which may be as near to the threshold as that
SIDE, SHADES = 12, 2.0  # a figure is recorded in 12 × 12 gray cells, and may differ by this root mean square of 256
FEW = 4  # models of a sweep, and revisions of a model
BEGUN = ("**/training/checkpoint-*/trainer_state.json", "cells/*/run.json")
ORDERS_OF_VGA = ("V-14", "V-15", "V-16", "V-17", "V-18", "V-19", "V-26", "V-27")
V_SCALE = ("GS-21", "GS-22", "GS-23", "GS-24", "GS-25", "GS-26", "GS-30", "GS-32", "GS-35", "GS-36")

# sweep → claims that its folder gives numbers for; not W-32 and W-34, because all cells have the same number of steps
# and of tokens here, and not W-52 and W-56, because no model has a massive activation
SWEEPS: dict[str, tuple[str, ...]] = {
    "when-sinks-emerge-60m": ("W-30",),
    "when-sinks-emerge-60m-weight-decay": ("W-38",),
    "when-sinks-emerge-60m-positions": ("W-42",),
    "when-sinks-emerge-60m-biases": ("W-47", "W-48", "W-49", "W-50", "W-51"),
    "when-sinks-emerge-60m-operations": ("W-54", "W-55", "W-57"),
    "when-sinks-emerge-60m-learning-rate": ("W-31",),
    "when-sinks-emerge-60m-batches": ("W-33",),
    "when-sinks-emerge-60m-fixed-token": ("W-37",),
    "when-sinks-emerge-60m-random-tokens": ("W-35", "W-36"),
    "when-sinks-emerge-60m-blocks": ("W-45", "W-46"),
    "when-sinks-emerge-60m-windows": ("W-40",),
    "when-sinks-emerge-60m-data": ("W-30",),
    "when-sinks-emerge-60m-sigmoid": ("W-58",),
    "when-sinks-emerge-1b": ("W-30",),
    "gradient-sinks-100m": V_SCALE,
    "gradient-sinks-300m": V_SCALE,
    "value-state-gated-attention-bert-base": ORDERS_OF_VGA,
    "value-state-gated-attention-opt-125m": ORDERS_OF_VGA,
    "value-state-gated-attention-gpt2": ORDERS_OF_VGA,
    "value-state-gated-attention-table-3": ("V-20", "V-21", "V-22"),
    "when-sinks-emerge-table-1": (),
    "pythia-training": (),
    "atlas": (),
}


class Rehearsal(NamedTuple):
    """A recipe: the tiny model in place of its own, options that make it small, and claims that its folder decides."""

    kind: str
    options: dict[str, Any]
    claims: tuple[str, ...] = ()


READING = {"num-seqs": 4, "seq-len": 20, "window": 16}
RECIPES = {
    "gradient-sinks-checkpoints": Rehearsal("gpt_neox", READING | {"positions": 16}),
    "not-universal-interventions": Rehearsal("gpt2", READING | {"draws": 2}, ("N-6", "N-7", "N-8", "N-9", "N-10")),
    "not-universal-position-or-token": Rehearsal("gpt2", READING | {"draws": 2}),
    "not-universal-figures-1-and-4": Rehearsal("gpt2", READING),
    "not-universal-figures-2-and-5": Rehearsal("gpt2", READING),
    "not-universal-figure-6": Rehearsal("gpt2", READING),
    "not-universal-tables-1-and-2": Rehearsal("gpt2", READING),
}  # fmt: skip


def sinkscope(*arguments: str | Path, hub: str = "") -> subprocess.Popen:
    """Start the command line in a process group of its own."""
    command = [sys.executable, "-m", "sinkscope.cli", *map(str, arguments)]
    cache = f"build/rehearse/hub-{hub.rpartition(':')[2]}"
    places = {"HF_ENDPOINT": hub, "HF_HUB_CACHE": cache, "HF_HUB_DISABLE_XET": "1"} if hub else {}
    places["OMP_NUM_THREADS"] = "1"  # a rehearsal on each core
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | places, start_new_session=True, **pipes)  # type: ignore[call-overload]


def ended(process: subprocess.Popen) -> str:
    """Wait for a process, and return how it failed; "" if it did not."""
    _, errors = process.communicate()
    return f"status {process.returncode}: {errors.strip().splitlines()[-1:]}" if process.returncode else ""


def has_begun(folder: Path) -> bool:
    with suppress(FileNotFoundError):  # a folder is renamed while it is searched
        return any(any(folder.glob(pattern)) for pattern in BEGUN)
    return False


def killed_and_resumed(folder: Path, *arguments: str | Path, hub: str = "") -> str:
    """Run a command, kill it once something in its folder is begun, and run it again; return what is wrong.

    A command that only writes its folder at the end is neither killed nor resumed.
    """
    process = sinkscope(*arguments, hub=hub)
    while process.poll() is None and not has_begun(folder):
        time.sleep(0.02)
    if process.poll() is not None:
        return ended(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return ended(sinkscope(*arguments, hub=hub))


def lacking_cells(folder: Path, sweep: Sweep) -> list[str]:
    done = {path.parent.name for path in folder.glob("cells/*/run.json")}
    lacking = [f"cell {cell.name}" for cell in sweep.cells if cell.name not in done]
    if sweep.content.commands.keys() == {"train"}:
        table = pd.read_parquet(folder / "comparison" / "tables" / f"{STUDY}.parquet")
        wanted = sum(len(parse_methods(cell.options.method)) for cell in sweep.cells)
        if len(at_a_glance(table)) != wanted:
            lacking.append(f"{wanted} levels: there are {len(at_a_glance(table))}")
    return lacking


def thumbnails(folder: Path) -> dict[str, str]:
    """Return each figure in a few gray cells, two hexadecimal digits a cell."""
    names: dict[str, str] = {}
    for path in sorted(folder.glob("**/figures/*.png")):
        with Image.open(path) as image:
            cells = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()
        names[f"{path.stem} {sum(name.split()[0] == path.stem for name in names)}"] = cells.hex()
    return names


def numbers_of(folder: Path) -> dict[str, float]:
    """Return loss and sink rate of each arm at its last step, or those of each model and condition."""
    numbers: dict[str, float] = {}
    for path in sorted(folder.glob("**/tables/*.parquet")):
        if path.stem not in ("sweep", "summary", "retrofit", STUDY) or path.parts[-3] == "run":
            continue
        table = pd.read_parquet(path)
        table = table[table["metric"].isin(["loss", "sink_rate"]) & (table["layer"] == -1)]
        for row in table.to_dict("records"):  # of several steps the last, as rows are in their order
            place = [row.get(name, "") for name in ("model", "revision", "input", "settings", "condition", "seed")]
            numbers[" ".join(map(str, [path.stem, *place, row["metric"]]))] = round(float(row["value"]), 6)
    return numbers


def results_of(folder: Path, claims: Collection[str]) -> dict[str, Any]:
    """Return the figures of a finished folder, the numbers of its arms, and those of its claims."""
    results: dict[str, Any] = {"figures": thumbnails(folder), "numbers": numbers_of(folder)}
    if claims:
        out = folder.with_name(f"{folder.name}-claims")
        if failed := ended(sinkscope("claims", "--from", folder, "--out", out, "--overwrite")):
            return results | {"claims": failed}
        judged = pd.read_parquet(out / "tables" / "claim.parquet").query("claim in @claims")
        judged = judged[judged["outcome"] != "not measured"]
        keys = judged[["model", "claim", "part"]].astype(str).agg(" ".join, axis=1)
        results["claims"] = dict(zip(keys, judged["value"].astype(float).round(6), strict=True))
    return results


def tolerance(claim: str) -> float:
    """Return by how much the numbers of a claim may differ; those on WSE's models are rates in points, but for two."""
    return 100 * FLIPS if claim.startswith("W-") and claim not in ("W-51", "W-57") else COARSE.get(claim, ABSOLUTE)


def differences(results: dict[str, Any], recorded: dict[str, Any], claims: Collection[str]) -> list[str]:
    """Return in what the results of a rehearsal are not those on record."""
    figures, drawn = recorded["figures"], results["figures"]
    wrong = [f"figure {name} is missing or new" for name in sorted(figures.keys() ^ drawn.keys())]
    for name in sorted(figures.keys() & drawn.keys()):
        before, now = (np.frombuffer(bytes.fromhex(each[name]), np.uint8).astype(float) for each in (figures, drawn))
        if (shades := math.sqrt(np.mean((before - now) ** 2))) > SHADES:
            wrong.append(f"figure {name} is drawn otherwise, by {shades:.1f} of 256")
    if isinstance(results.get("claims"), str):
        return [*wrong, f"claims: {results['claims']}"]
    measured = {key.split()[-2] for key, value in results.get("claims", {}).items() if math.isfinite(value)}
    wrong += [f"claim {claim} has no number" for claim in claims if claim not in measured]
    for kind in ("numbers", "claims"):
        expected, numbers = (each.get(kind, {}) for each in (recorded, results))
        for key in sorted(expected.keys() | numbers.keys()):
            before, now = (each.get(key, math.nan) for each in (expected, numbers))
            absolute = FLIPS if key.endswith("sink_rate") else tolerance(key.split()[-2])
            same = math.isclose(before, now, rel_tol=RELATIVE, abs_tol=absolute)
            same = same or (math.isnan(before) and math.isnan(now))
            if not same or (key in expected) != (key in numbers):
                wrong.append(f"{kind.removesuffix('s')} {key}: {now:g}, not {before:g}")
    return wrong


def small_copy(name: str, folder: Path, hub: Hub) -> tuple[str, str | Path]:
    """Write the small copy of a recipe, or of a sweep of models on the hub. Return the command and the file."""
    tiny, file = folder.parent / "tiny", Path(f"{folder}.yaml")
    path = known_recipes()[name] if name in RECIPES else known_sweeps()[name]
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if name in SWEEPS and ("quick" in content or not content.get("models")):  # trainings, with a quick form
        for model in content.get("models", ()):
            hub.repos[model] = Repo({"main": folder.parent / "gpt2"})
        return "sweep", name
    if name in SWEEPS:  # all go the same way
        content["models"] = [
            entry | {"revisions": entry["revisions"][:FEW]} if "revisions" in entry else entry
            for entry in content["models"][:FEW]
        ]
    small = RECIPES[name].options if name in RECIPES else READING
    content = {"model": "openai-community/gpt2"} | content if name in RECIPES else content  # some are for any model
    file.write_text(yaml.safe_dump(content | {"options": content["options"] | small}), encoding="utf-8")
    if name in RECIPES:
        revisions = str(content["options"].get("revision", "main")).split(",")
        wanted = {(content["model"], revision) for revision in revisions}
        tiny = folder.parent / RECIPES[name].kind
    else:
        sweep = read_sweep(str(file), {})
        wanted = {(cell.source[0], cell.source[1] or "main") for cell in sweep.cells}
    for model, revision in wanted:
        hub.repos[model] = Repo({**hub.repos.get(model, Repo({})).revisions, revision: tiny})
    return ("run" if name in RECIPES else "sweep"), file


def rehearse(name: str, folder: Path, recorded: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Run one recipe or sweep. Return its results, and what is wrong; with nothing on record only what is missing."""
    claims = RECIPES[name].claims if name in RECIPES else SWEEPS[name]
    shutil.rmtree(folder, ignore_errors=True)
    with Hub() as hub:
        command, file = small_copy(name, folder, hub)
        is_quick = file == name
        arguments = (command, file, *["--quick"] * is_quick, "--out", folder)
        if failed := killed_and_resumed(folder, *arguments, hub=hub.url):
            return {}, [failed]
    lacking = lacking_cells(folder, read_sweep(str(file), {}, quick=is_quick)) if command == "sweep" else []
    results = results_of(folder, claims)
    return results, [*lacking, *differences(results, recorded or results, claims)]


def main(place: Path, names: list[str], record: bool) -> int:
    place.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(documents("natural", None)[1], 512)
    for kind in ("llama", *{rehearsal.kind for rehearsal in RECIPES.values()}):
        folder = place / ("tiny" if kind == "llama" else kind)
        tokenizer.save_pretrained(folder)
        model = tiny_model(kind, vocab_size=len(tokenizer))
        if kind == "gpt2":  # EPE_0 gets massive coordinates, which one of the interventions edits
            first = model.transformer.h[0]
            for projection in (first.attn.c_proj, first.mlp.c_proj):
                projection.weight.data *= 0.01
            model.transformer.wpe.weight.data[0, :2] += 30.0
        model.save_pretrained(folder)
    on_record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}

    def one(name: str) -> int:
        start = time.perf_counter()
        results, wrong = rehearse(name, place / name, None if record else on_record.get(name))
        if record and not wrong:
            on_record[name] = results
            RECORD.write_text(json.dumps(dict(sorted(on_record.items())), indent=1) + "\n", encoding="utf-8")
        elif name not in on_record:
            wrong.append("it is not on record")
        print(f"{name}: {'; '.join(wrong) or 'done'} ({time.perf_counter() - start:.0f} s)", flush=True)
        return bool(wrong)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(pool.map(one, names or [*SWEEPS, *RECIPES]))


if __name__ == "__main__":
    names = [argument for argument in sys.argv[2:] if argument != "--record"]
    sys.exit(main(Path(sys.argv[1]), names, record="--record" in sys.argv))
