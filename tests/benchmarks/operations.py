"""Cost of a training step with another attention operation or positional scheme, compared with fused softmax.

    python tests/benchmarks/operations.py

A step is the Trainer's, of a new model at 8 × 256 tokens, in CPU time of one thread, so that other work on the machine
affects it only through the caches. The model and the plain one run steps in turn; the ratio is the median over rounds.
`softmax` is the cost of the chunked path alone: the same without the fused kernel.
"""

import argparse
import statistics
import time

import torch
from common import random_batch
from training import training_step

from sinkscope.models.families import find_family
from sinkscope.retrofits import retrofit_model
from sinkscope.retrofits.operation import KINDS
from sinkscope.training.architectures import architecture, fresh_model

CONFIG = "llama-1m:num_hidden_layers=6"
SCHEMES = ("none", "absolute", "learned", "relative", "alibi", "rotary")
TARGET = 1.3  # largest accepted time of an operation's step ÷ that of fused softmax


def cost(changed: object, plain: object, rounds: int) -> tuple[float, float]:
    """Return medians over rounds: CPU seconds of the plain step, and of the other step ÷ the plain one's."""

    def seconds(step: object) -> float:
        start = time.process_time()
        step()  # type: ignore[operator]
        return time.process_time() - start

    seconds(plain), seconds(changed)  # warm up
    pairs = [(seconds(plain), seconds(changed)) for _ in range(rounds)]
    return statistics.median(base for base, _ in pairs), statistics.median(ours / base for base, ours in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--only", nargs="*", default=[*KINDS, *SCHEMES], help="kinds of operations and schemes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = random_batch((8, 256), (3, 4000)).token_ids
    config = arguments.config
    plain = training_step(fresh_model(architecture(config), 0), ids)
    print(f"torch {torch.__version__}, {config}, 8 × 256 tokens, median of {arguments.rounds} rounds, 1 thread")
    for kind in filter(KINDS.__contains__, arguments.only):
        model = fresh_model(architecture(config), 0)
        retrofit_model(model, find_family(model), "operation", kind=kind)
        base, ratio = cost(training_step(model, ids), plain, arguments.rounds)
        print(
            f"  {kind:<26} {base:6.2f} s   {ratio:5.2f} ×{'' if ratio <= TARGET else '  above the target'}", flush=True
        )
    for scheme in filter(SCHEMES.__contains__, arguments.only):
        joint = "," if ":" in config else ":"
        model = fresh_model(architecture(f"{config}{joint}position_scheme={scheme}"), 0)
        base, ratio = cost(training_step(model, ids), plain, arguments.rounds)
        print(f"  positions: {scheme:<15} {base:6.2f} s   {ratio:5.2f} ×", flush=True)


if __name__ == "__main__":
    main()
