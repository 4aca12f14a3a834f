"""What measuring costs on a GPU and whether it is right there, in steps with a limit each: `tests/gpu.sh` runs it.

One process makes the model once: Llama-2-7B's shape with random weights, in bfloat16 on the GPU. A step that fails or
takes too long says so, and the next one begins. `--rehearse` takes a small model on the CPU, and shorter texts.
"""

import argparse
import importlib.metadata
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' modules

PACKAGES = ("torch", "triton", "transformers", "accelerate", "nnsight", "numpy", "pandas", "sinkscope")
FORWARD = ("attention", "geometry", "activation", "massive", "outlier")
ROUNDS = 3
# rows of overhead.py that a long text has no time for
NOT_LONG = ("all forward observables, all columns",)


def machine() -> None:
    print(f"Python {platform.python_version()}, {platform.machine()}")
    for package in PACKAGES:
        try:
            print(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            print(package, "is not installed")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), torch.version.cuda, torch.cuda.get_device_properties(0).total_memory)
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)


class Probe:
    """The steps on one model. Each prints what it measures as soon as it has it."""

    def __init__(self, rehearse: bool) -> None:
        import overhead

        self.rehearse, self.device = rehearse, "cpu" if rehearse else "cuda"
        dtype = "float32" if rehearse else "bfloat16"
        asked = {"random": "small" if rehearse else "7b", "device": self.device, "dtype": dtype}
        self.model = overhead.the_model(SimpleNamespace(**asked, model=None))

    def shape(self, sequences: int, length: int) -> tuple[int, int]:
        return (min(sequences, 4), max(64, length // 32)) if self.rehearse else (sequences, length)

    def overhead(self, kinds: tuple[str, ...], *shape: int) -> None:
        """Print time and peak memory of the rows of overhead.py ÷ the bare pass."""
        import overhead

        shape = self.shape(*shape)
        for kind in kinds:
            rows = overhead.variants_of(self.model, shape)[kind]
            is_long = shape[0] * shape[1] > 8 * 64
            rows = {name: row for name, row in rows.items() if name in overhead.QUICK}
            rows = {name: row for name, row in rows.items() if not (is_long and name in NOT_LONG)}
            overhead.report_times(rows, shape, ROUNDS, seconds=15.0)
            if self.device == "cuda":
                overhead.report_memory(lambda name, rows=rows: overhead.device_peak(rows[name]), shape, list(rows))

    def counts(self) -> None:
        """Print launches by layer, waits and copies of the second of two batches, as PyTorch's profiler counts them."""
        from common import random_batch
        from support.accelerators import counting

        from sinkscope.measuring.observables import OBSERVABLES
        from sinkscope.measuring.observables.observable import Settings
        from sinkscope.measuring.tracer import open_tracer
        from sinkscope.models.families import find_family

        batch = random_batch(self.shape(8, 64), (100, self.model.config.vocab_size))
        for names in ((), FORWARD, ("gradient",)):
            with open_tracer(self.model, find_family(self.model)) as tracer:
                observables = [OBSERVABLES[name](Settings(positions=16, window=64)) for name in names]
                for observable in observables:
                    observable.prepare(self.model, tracer.family, batch.token_ids.numel())
                one_pass = tracer.forward_backward if "gradient" in names else tracer.forward
                one_pass(batch, observables)
                with counting() as counts:
                    one_pass(batch, observables)
            launches = counts["launches"] / self.model.config.num_hidden_layers
            waits, copies = counts["synchronizations"], counts["copies"]
            print(f"{'+'.join(names) or 'nothing'}: {launches:.0f} launches a layer, {waits} waits, {copies} copies")

    def analyze_twice(self) -> None:
        """Print parity and peak memory of `analyze`, and whether a second run has the same numbers bit for bit."""
        import sinkscope

        options: dict[str, Any] = {"input": "random", "num_seqs": 32, "seq_len": 256, "positions": 16}
        if self.rehearse:
            options |= {"num_seqs": 2, "seq_len": 32}
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first, second = (sinkscope.analyze(self.model, **options) for _ in range(2))
        print({key: first.manifest.get(key) for key in ("parity", "batch_size", "device", "not_measured", "wall_s")})
        if self.device == "cuda":
            print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        differing = [name for name, table in first.tables.items() if not table.equals(second.tables[name])]
        print("a second run differs in", ", ".join(differing) or "nothing")

    def watch(self) -> None:
        """Print whether a call that is watched has the same logits bit for bit, also with a static cache."""
        import sinkscope

        ids = torch.arange(100, 164, device=self.device)[None].repeat(4, 1)
        before = self.model(ids).logits
        with sinkscope.watch(self.model) as seen:
            during = self.model(ids).logits
        print(f"watch: {seen.calls} call, sink rate {seen.sink_rate}, logits equal: {torch.equal(before, during)}")
        with sinkscope.watch(self.model) as seen:
            self.model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static")
        print(f"static cache: {seen.calls} call, skipped {dict(seen.skipped)}")

    def compiled(self) -> None:
        """Print whether a compiled model, of four layers, is watched and has the same logits afterwards."""
        from copy import deepcopy

        import sinkscope

        config = deepcopy(self.model.config)
        config.num_hidden_layers = 4
        with torch.device(self.device):
            small = type(self.model)._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
        network = small if self.rehearse else torch.compile(small)
        ids = torch.arange(100, 164, device=self.device)[None].repeat(4, 1)
        before = network(ids).logits
        with sinkscope.watch(network) as seen:
            network(ids)
        equal = torch.equal(before, network(ids).logits)
        print(f"compiled: {seen.calls} call, sink rate {seen.sink_rate}, logits equal afterwards: {equal}")

    def steps(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """Return each step's limit in seconds and function: what is most wanted comes first."""
        every = ("forward", "backward", "arms")
        return {
            "8 × 64": (60, lambda: self.overhead(every, 8, 64)),
            "8 × 2048": (50, lambda: self.overhead(("forward",), 8, 2048)),
            "counts": (30, self.counts),
            "analyze": (30, self.analyze_twice),
            "watch": (20, self.watch),
            "compiled": (40, self.compiled),
            "100 × 64": (30, lambda: self.overhead(("forward",), 100, 64)),
            "1 × 32768": (60, lambda: self.overhead(("forward",), 1, 32_768)),
        }


def run(name: str, limit: int, step: Callable[[], None]) -> bool:
    """Run a step for at most `limit` seconds; return whether it succeeded."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {limit} s")

    print(f"\n== {name}", flush=True)
    start, succeeded = time.perf_counter(), False
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        step()
        succeeded = True
    except Exception:
        traceback.print_exc(limit=-5)
    finally:
        signal.alarm(0)
    print(f"== {name}: {'done' if succeeded else 'FAILED'}, {time.perf_counter() - start:.1f} of {limit} s", flush=True)
    return succeeded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", action="store_true", help="print the versions and the device, and end")
    parser.add_argument("--rehearse", action="store_true", help="a small model on the CPU, and shorter texts")
    arguments = parser.parse_args()
    if arguments.machine:
        machine()
        return
    start = time.perf_counter()
    probe = Probe(arguments.rehearse)
    print(f"model: {time.perf_counter() - start:.1f} s")
    with torch.no_grad():
        failed = [name for name, (limit, step) in probe.steps().items() if not run(name, limit, step)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
