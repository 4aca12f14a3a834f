"""Time and memory against the length of the text: `python tests/benchmarks/long_context.py [T …]`.

A small random Llama (4 layers, 4 query and 2 key heads of 64, width 256) reads one sequence of T tokens: the bare fused
forward that makes no logits, and the same with all forward observables, 16 positions. Each is a process of its own with
one torch thread: CPU seconds of one pass behind a short one, and in a further process, in which memory is counted
exactly, its peak above what was resident before. README.md has what it printed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from peak_memory import EXACT, peak_of
from transformers import LlamaConfig, LlamaForCausalLM

from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

FORWARD = ("attention", "geometry", "activation", "massive", "outlier")
LENGTHS = (2048, 8192, 32_768)
VARIANTS = ("bare", "measured")


def small_model(length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def seconds_and_peak(one_pass: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of one pass, and its peak of resident memory above the start in MB."""
    start, peak = time.process_time(), peak_of(one_pass)
    return time.process_time() - start, peak


@torch.no_grad()
def print_one(variant: str, length: int) -> None:
    torch.set_num_threads(1)
    model = small_model(length)
    family = find_family(model)

    def one_pass(ids: torch.Tensor) -> None:
        if variant == "bare":
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
            return
        with open_tracer(model, family) as tracer:
            settings = Settings(positions=16, window=64)
            tracer.forward(Batch(ids, torch.ones_like(ids)), [OBSERVABLES[name](settings) for name in FORWARD])

    ids = torch.randint(3, 512, (1, length), generator=torch.Generator().manual_seed(0))
    one_pass(ids[:, :512])  # loads the libraries
    print(*seconds_and_peak(lambda: one_pass(ids)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print_one(arguments.one, arguments.lengths[0])
        return
    print("| tokens | bare | measured | ratio | bare | measured | ratio |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for length in arguments.lengths:
        seconds, own_seconds = (_in_a_process(variant, length, {})[0] for variant in VARIANTS)
        peak, own_peak = (_in_a_process(variant, length, EXACT)[1] for variant in VARIANTS)
        times = f"{seconds:.1f} s | {own_seconds:.1f} s | {own_seconds / seconds:.2f}"
        print(f"| {length} | {times} | {peak:.0f} MB | {own_peak:.0f} MB | {own_peak / peak:.2f} |", flush=True)


def _in_a_process(variant: str, length: int, environment: dict[str, str]) -> list[float]:
    command = [sys.executable, __file__, str(length), "--one", variant]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return [float(part) for part in done.stdout.split()]


if __name__ == "__main__":
    main()
