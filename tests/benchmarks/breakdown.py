"""Time of measuring by observable and by operation: `python tests/benchmarks/breakdown.py [MODEL]`.

It is CPU time of one process with one torch thread, which other work on the machine hardly affects, ÷ that of the bare
pass of the same round: the fused forward without logits, or with `--backward` the frozen forward and backward. Printed
are the lowest time over rounds ÷ the lowest of the bare pass, and the median of the rounds' ratios. In "seams and
trace" nothing is read; shared work is part of the first observable that needs it. README.md has the results.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from overhead import Variant, variants_of
from torch.profiler import ProfilerActivity, profile

import sinkscope.models.loading
from sinkscope.measuring.observables.observable import Observable

CALLS = ("see", "see_stack", "see_attention", "finish", "watch", "watch_attention")
OPERATIONS = 12  # number of operations shown, the most expensive ones
# the bare pass, and the pass with all observables
ROWS = {
    "forward": ("bare SDPA forward, no logits", "all forward observables, 16 columns"),
    "backward": ("bare frozen forward + backward", "gradient and all forward observables"),
}


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, observable: Observable) -> Observable:
        for name in CALLS:
            setattr(observable, name, self._timed(observable.name, getattr(observable, name)))
        return observable

    def _timed(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            start = time.process_time()
            call(*arguments)
            self.seconds[name] += time.process_time() - start

        return timed


def print_shares(passes: dict[str, Variant], bare: str, whole: str, clock: Clock, rounds: int) -> None:
    """Print each pass ÷ the bare one, and the calls of each observable in the pass with all of them."""
    times: dict[str, list[float]] = defaultdict(list)
    for one_pass in passes.values():
        one_pass()  # loads the libraries, and allocates the memory that later passes reuse
    for _ in range(rounds):
        for name, one_pass in passes.items():
            clock.seconds.clear()
            times[name].append(one_pass())
            if name == whole:
                for observable, own in clock.seconds.items():
                    times[f"… {observable}"].append(own)
    for name, seconds in times.items():
        shares = [own / base for own, base in zip(seconds, times[bare], strict=True)]
        print(f"| {name} | {min(seconds) / min(times[bare]):.3f} | {statistics.median(shares):.3f} |", flush=True)


def print_operations(bare: Variant, whole: Variant) -> None:
    """Print the operations on which the pass with all observables spends more than the bare pass, ÷ the bare pass."""
    times = []
    for one_pass in (bare, whole):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            one_pass()
        times.append({event.key: event.self_cpu_time_total for event in profiled.key_averages()})
    further = {name: own - times[0].get(name, 0.0) for name, own in times[1].items()}
    print("\n| operation | further time |\n| --- | ---: |")
    for name in sorted(further, key=lambda name: -further[name])[:OPERATIONS]:
        print(f"| {name} | {further[name] / sum(times[0].values()):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", type=int, nargs=2, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--operations", action="store_true", help="also by operation, under torch's profiler")
    parser.add_argument(
        "--rows", default="", help="only those with this in their names, the bare pass and all observables"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = sinkscope.models.loading.load(arguments.model).model
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread")
    kind = "backward" if arguments.backward else "forward"
    bare, whole = ROWS[kind]
    for shape in arguments.shape or ([(8, 64)] if arguments.backward else [(8, 64), (1, 2048)]):
        clock = Clock()
        passes = variants_of(model, tuple(shape), time.process_time, clock.around)[kind]
        passes = {name: one for name, one in passes.items() if arguments.rows in name or name in (bare, whole)}
        print(f"\n| {shape[0]} × {shape[1]} | lowest ÷ bare | median |\n| --- | ---: | ---: |")
        with torch.no_grad():
            print_shares(passes, bare, whole, clock, arguments.rounds)
            if arguments.operations:
                print_operations(passes[bare], passes[whole])


if __name__ == "__main__":
    main()
