"""`make demo` compared with the bare forward and backward of the same tokens: `python tests/benchmarks/demo.py`.

Two processes import their packages, load the model and run: `sinkscope analyze`, and the frozen model with gradients
from the embeddings, in batches of the same size. Printed are wall time, and CPU time of the process and its children;
set OMP_NUM_THREADS=1 for the CPU time of one thread. README.md has the results.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

BATCH = 8  # sequences, as in `analyze`


def bare(num_seqs: int) -> None:
    """Load the model, then run forward and backward on as many tokens as the demo."""
    from common import bare_backward, random_batch

    from sinkscope.models.loading import load

    start = time.process_time()
    model = load().model
    print(f"load {time.process_time() - start:.1f} s", flush=True)
    for ids in random_batch((num_seqs, 64)).token_ids.split(BATCH):
        bare_backward(model, ids)


def measured(*command: str) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=100)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.num_seqs)
        return
    count = str(arguments.num_seqs)
    print("| | wall | CPU |\n| --- | ---: | ---: |")
    base = measured(__file__, "--bare", "--num-seqs", count)
    print(f"| bare | {base[0]:.1f} s | {base[1]:.1f} s |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        demo = measured("-m", "sinkscope.cli", "analyze", "--num-seqs", count, "--out", f"{folder}/run", "--quiet")
    print(f"| demo | {demo[0]:.1f} s | {demo[1]:.1f} s |")
    print(f"| ratio | {demo[0] / base[0]:.2f} | {demo[1] / base[1]:.2f} |")


if __name__ == "__main__":
    main()
