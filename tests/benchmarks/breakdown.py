"""Time of measuring by observable and by operation: `python tests/benchmarks/breakdown.py [MODEL]`.

Everything is CPU time of one process with one torch thread, because other work on the machine hardly affects it, and is
given as a share of the bare pass of the same round: the fused forward without logits, because measuring computes none,
or with `--backward` the frozen forward and backward. Printed are the lowest time over rounds ÷ the lowest of the bare
pass, and the median of the rounds' ratios; the passes of a round run one after the other.

"seams and trace" is a pass in which nothing is read; the rows of observables are the time inside their own calls during
one pass with all of them, so that shared work is part of the first observable that needs it. Run it also as
`ATEN_CPU_CAPABILITY=avx2 python tests/benchmarks/breakdown.py`. README.md has the results.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from common import FORWARD, bare_backward, bare_forward, random_batch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

import sinkscope.models.loading
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

FEW = ("attention", "activation")
CALLS = ("see", "see_attention", "watch", "watch_attention")
BARE, EMPTY = "bare pass", "seams and trace"
OPERATIONS = 12  # number of operations shown, the most expensive ones

Pass = Callable[[], Any]


class Clock:
    """CPU time inside the calls of each observable, during one pass."""

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


def measuring(model: PreTrainedModel, batch: Batch, names: tuple[str, ...], positions: int, clock: Clock) -> Pass:
    """Return one pass of the tracer with these observables; the tracer is already open, so opening it is not timed."""
    family = find_family(model)
    settings = Settings(positions=positions, window=min(64, batch.token_ids.shape[1]))

    def one_pass() -> tuple[float, None]:
        with open_tracer(model, family) as tracer:
            observables = [clock.around(OBSERVABLES[name](settings)) for name in names]
            for observable in observables:
                observable.prepare(model, family, batch.token_ids.numel())
            backward = any(observable.backward for observable in observables)
            start = time.process_time()
            (tracer.forward_backward if backward else tracer.forward)(batch, observables)
            return time.process_time() - start, None

    return one_pass


def passes_of(model: PreTrainedModel, batch: Batch, backward: bool, clock: Clock) -> dict[str, Pass]:
    """Return name → one pass; passes of the tracer return their own time."""
    length = batch.token_ids.shape[1]
    unseen = Clock()  # for passes whose calls are not shown separately
    if backward:
        return {
            BARE: lambda: bare_backward(model, batch.token_ids),
            "gradient": measuring(model, batch, ("gradient",), 16, unseen),
            "gradient + all forward": measuring(model, batch, ("gradient", *FORWARD), 16, clock),
        }
    return {
        BARE: lambda: bare_forward(model, batch.token_ids),
        EMPTY: measuring(model, batch, (), 16, unseen),
        "attention + activation, 16 positions": measuring(model, batch, FEW, 16, unseen),
        "attention + activation, all positions": measuring(model, batch, FEW, length, unseen),
        "all forward, 16 positions": measuring(model, batch, FORWARD, 16, clock),
        "all forward, all positions": measuring(model, batch, FORWARD, length, unseen),
    }


def seconds_of(one_pass: Pass) -> float:
    start = time.process_time()
    own = one_pass()
    return own[0] if own else time.process_time() - start


def print_shares(passes: dict[str, Pass], clock: Clock, rounds: int) -> None:
    """Print each pass ÷ the bare one, and the calls of each observable in the pass with all of them."""
    times: dict[str, list[float]] = defaultdict(list)
    passes[BARE]()  # allocates the memory that later passes reuse
    for _ in range(rounds):
        clock.seconds.clear()
        for name, one_pass in passes.items():
            times[name].append(seconds_of(one_pass))
        for name, own in clock.seconds.items():
            times[f"… {name}"].append(own)
    for name, seconds in times.items():
        shares = [own / bare for own, bare in zip(seconds, times[BARE], strict=True)]
        print(f"| {name} | {min(seconds) / min(times[BARE]):.3f} | {statistics.median(shares):.3f} |", flush=True)


def print_operations(passes: dict[str, Pass]) -> None:
    """Print the operations on which the pass with all observables spends more than the bare pass, ÷ the bare pass."""
    times = {}
    for name in (BARE, next(name for name in reversed(passes) if "all positions" not in name)):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            passes[name]()
        times[name] = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    bare, whole = times.values()
    further = {name: own - bare.get(name, 0.0) for name, own in whole.items()}
    total = sum(bare.values())
    print("\n| operation | further time |\n| --- | ---: |")
    for name in sorted(further, key=lambda name: -further[name])[:OPERATIONS]:
        print(f"| {name} | {further[name] / total:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", type=int, nargs=2, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--operations", action="store_true", help="also by operation, under torch's profiler")
    parser.add_argument("--rows", default="", help="only those with this in their names, and the bare pass")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = sinkscope.models.loading.load(arguments.model).model
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread")
    for shape in arguments.shape or ([(8, 64)] if arguments.backward else [(8, 64), (1, 2048)]):
        clock = Clock()
        for length in (64, shape[1]):
            passes = passes_of(model, random_batch((shape[0], length)), arguments.backward, clock)
            passes = {name: one for name, one in passes.items() if arguments.rows in name or name == BARE}
            if length == 64:
                for one_pass in passes.values():
                    one_pass()  # loads the libraries
        print(f"\n| {shape[0]} × {shape[1]} | lowest ÷ bare | median |\n| --- | ---: | ---: |")
        print_shares(passes, clock, arguments.rounds)
        if arguments.operations:
            print_operations(passes)


if __name__ == "__main__":
    main()
