"""Time and memory against the length of the text: `python tests/benchmarks/long_context.py [T …]`.

A small random Llama (4 layers, 4 query and 2 key heads of 64, width 256) reads one sequence of T tokens: the bare fused
forward without logits, and the same with all forward observables, 16 positions. Each runs in a separate process with
one torch thread, which measures CPU seconds of one pass after a short one, and in another process, in which memory is
counted exactly, which measures its peak above the resident memory before the pass. README.md has the results.
"""

import argparse
import time

import torch
from common import EXACT, FORWARD, bare_forward, numbers_of, peak_of, random_batch
from transformers import LlamaConfig, LlamaForCausalLM

from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

LENGTHS = (2048, 8192, 32_768)
VARIANTS = ("bare", "measured")


def small_model(length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@torch.no_grad()
def print_one(variant: str, length: int) -> None:
    torch.set_num_threads(1)
    model = small_model(length)
    family = find_family(model)

    def one_pass(ids: torch.Tensor) -> None:
        if variant == "bare":
            bare_forward(model, ids)
            return
        with open_tracer(model, family) as tracer:
            settings = Settings(positions=16, window=64)
            tracer.forward(Batch(ids, torch.ones_like(ids)), [OBSERVABLES[name](settings) for name in FORWARD])

    ids = random_batch((1, length), (3, 512)).token_ids
    one_pass(ids[:, :512])  # loads the libraries
    start, peak = time.process_time(), peak_of(lambda: one_pass(ids))
    print(time.process_time() - start, peak)


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
        (seconds, own_seconds), (peak, own_peak) = (
            [numbers_of(__file__, length, "--one", variant, environment=environment)[at] for variant in VARIANTS]
            for at, environment in enumerate(({}, EXACT))
        )
        times = f"{seconds:.1f} s | {own_seconds:.1f} s | {own_seconds / seconds:.2f}"
        print(f"| {length} | {times} | {peak:.0f} MB | {own_peak:.0f} MB | {own_peak / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
