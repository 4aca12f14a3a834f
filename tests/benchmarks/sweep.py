"""Cost of a sweep in addition to its cells, and time saved by a shared load, in CPU seconds on the demo model.

OMP_NUM_THREADS=1 python tests/benchmarks/sweep.py [cells] [sequences]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sinkscope
from sinkscope.commands.sweep import _task, check, compared
from sinkscope.commands.sweeping.plan import groups_of, planned, sized
from sinkscope.commands.sweeping.pools import Processes
from sinkscope.commands.sweeping.reads import Reads
from sinkscope.commands.sweeping.worker import State, measured
from sinkscope.options.sweep_file import read_sweep
from sinkscope.results.cells import CellFolders


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main(cells: int = 3, sequences: int = 24) -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    file = folder / "sweep.yaml"
    seeds = ", ".join(map(str, range(cells)))
    file.write_text(
        "title: Cost\nmodels: [SmolLM2-135M-Instruct]\ninputs: [natural]\n"
        f"settings: {{seed: [{seeds}]}}\noptions: {{num-seqs: {sequences}}}\n"
    )
    start = time.process_time()
    found = read_sweep(str(file), {})
    check(found)
    folders = CellFolders(folder / "out")
    reads = Reads()
    todo = sized(planned(found.cells, folders, reads), Processes(2).share)
    groups = groups_of(todo, {cell.name: _task(found, cell, folders, reads) for cell in found.cells})
    planning = time.process_time() - start

    sinkscope.analyze(num_seqs=1, observables=("attention",))  # imports packages and fills caches
    times, begun = [], 0.0
    for event in measured(groups[0]):
        if event.state == State.RUNNING:
            begun = time.process_time()
        else:
            assert event.state == State.DONE, event.message
            times.append(time.process_time() - begun)

    comparing = seconds(lambda: compared(found, folders, 0.0))
    loading = seconds(lambda: sinkscope.load("SmolLM2-135M-Instruct"))
    sizing = seconds(lambda: sized(planned(found.cells, folders, Reads())))
    overhead = (planning + comparing) / sum(times)
    print("cells:", ", ".join(f"{seconds:.1f} s" for seconds in times))
    print(f"planning {planning:.2f} s, comparing {comparing:.2f} s: {overhead:.1%} of the cells' time")
    print(f"where two such models might not fit into memory, their sizes in addition: {sizing:.2f} s")
    print(f"one load takes {loading:.1f} s: sharing it saves {(cells - 1) * loading:.1f} s of {cells} cells")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
